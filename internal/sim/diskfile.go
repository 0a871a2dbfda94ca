package sim

import (
	"io"
	"io/fs"
	"path"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// file is an open file of a disk. Its own position is for one goroutine.
type file struct {
	d        *disk
	n        *inode
	name     string
	pos      int
	writable bool
}

func (f *file) Close() error { return nil }

func (f *file) Read(p []byte) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.pos >= len(f.n.data) {
		return 0, io.EOF
	}
	n := copy(p, f.n.data[f.pos:])
	f.pos += n
	return n, nil
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if off >= int64(len(f.n.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.n.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *file) Write(p []byte) (int, error) {
	n, err := f.WriteAt(p, int64(f.pos))
	f.pos += n
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if !f.writable {
		return 0, &fs.PathError{Op: "write", Path: f.name, Err: fs.ErrPermission}
	}
	if err := f.d.before("write", f.name); err != nil {
		return 0, err
	}
	from, to := int(off), int(off)+len(p)
	if grow := to - len(f.n.data); grow > 0 {
		f.n.data = append(f.n.data, make([]byte, grow)...)
	}
	copy(f.n.data[from:to], p)
	if n := len(f.n.dirty); n > 0 && f.n.dirty[n-1].to == from {
		f.n.dirty[n-1].to = to
	} else {
		f.n.dirty = append(f.n.dirty, span{from, to})
	}
	return len(p), nil
}

// Sync makes what was written, or the names of a directory, survive. An
// injected failure leaves the pages clean in the kernel's eyes, as Linux does:
// a later sync succeeds and writes nothing of them.
func (f *file) Sync() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if err := f.d.before("sync", f.name); err != nil {
		f.n.limbo, f.n.dirty = append(f.n.limbo, f.n.dirty...), nil
		return err
	}

	if f.n.dir {
		kept := make(map[string]*inode, len(f.n.names))
		for name, n := range f.n.names {
			kept[name] = n
		}
		f.n.keptNames, f.n.ops = kept, nil
		return nil
	}
	if grow := len(f.n.data) - len(f.n.kept); grow > 0 {
		f.n.kept = append(f.n.kept, make([]byte, grow)...)
	}
	for _, s := range f.n.dirty {
		copy(f.n.kept[s.from:s.to], f.n.data[s.from:s.to])
	}
	f.n.dirty = nil
	return nil
}

// SyncData is fdatasync: what Append of the journal waits for.
func (f *file) SyncData() error {
	if f.d.lies {
		return nil
	}
	return f.Sync()
}

func (f *file) SyncTo(int64) (fullSync bool, _ error)  { return false, nil }
func (f *file) Preallocate(offset, length int64) error { return nil }
func (f *file) Prefetch(offset, length int64) error    { return nil }
func (f *file) Fd() uintptr                            { return vfs.InvalidFd }

func (f *file) Stat() (vfs.FileInfo, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return info{path.Base(f.name), int64(len(f.n.data)), f.n.dir}, nil
}

type info struct {
	name string
	size int64
	dir  bool
}

func (i info) Name() string { return i.name }
func (i info) Size() int64  { return i.size }
func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o750
	}
	return 0o640
}
func (i info) ModTime() time.Time     { return time.Time{} }
func (i info) IsDir() bool            { return i.dir }
func (i info) Sys() any               { return nil }
func (i info) DeviceID() vfs.DeviceID { return vfs.DeviceID{} }
