package sim

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// disk is a file system in memory that knows what a power failure would leave
// of it. It holds for each file what was synced beside what readers see, and
// for each directory the names that were synced.
//
// All its methods lock, since Pebble flushes on goroutines of its own; while
// one of those runs the simulation waits, so the order of calls is always the
// same, but for the removal of files that Pebble no longer needs.
type disk struct {
	mu    sync.Mutex
	root  *inode          // guarded by mu
	locks map[string]bool // guarded by mu
	ids   uint64          // guarded by mu; inodes made

	// tripAfter counts down at each counted operation; at 0 the image of a
	// crash at just this moment is kept, and life goes on until the simulation
	// has the control again. All guarded by mu.
	tripAfter int
	tripLoss  *loss
	image     *disk

	// fail is asked before an operation on a file of a journal. Guarded by mu.
	fail func(op, name string) error
	// lies makes SyncData do nothing, for the test of the simulator itself.
	lies bool
}

// inode is a file or a directory.
type inode struct {
	id  uint64
	dir bool

	data  []byte // what readers see
	kept  []byte // what was synced
	dirty []span // written since; ascending by time
	// limbo is what a failed sync left: the kernel takes it for written.
	limbo []span

	names     map[string]*inode // as readers see them
	keptNames map[string]*inode // as synced
	ops       []dirOp           // what led from the synced ones to these
}

// dirOp gives a name to an inode, or takes it away (nil). File systems with a
// journal of their own keep the order of these, and Pebble counts on it: after
// a crash a directory has some prefix of them.
type dirOp struct {
	name string
	n    *inode
}

// set gives or takes a name.
func (n *inode) set(name string, to *inode) {
	if to == nil {
		delete(n.names, name)
	} else {
		n.names[name] = to
	}
	n.ops = append(n.ops, dirOp{name, to})
}

type span struct{ from, to int }

func newDisk() *disk {
	d := &disk{locks: map[string]bool{}}
	d.root = d.newInode(true)
	return d
}

func (d *disk) newInode(dir bool) *inode {
	d.ids++
	n := &inode{id: d.ids, dir: dir}
	if dir {
		n.names, n.keptNames = map[string]*inode{}, map[string]*inode{}
	}
	return n
}

func split(name string) []string {
	return strings.FieldsFunc(path.Clean("/"+name), func(r rune) bool { return r == '/' })
}

func notExist(op, name string) error { return &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist} }

// find gives the inode of a path, or nil. d.mu is held.
func (d *disk) find(name string) *inode {
	n := d.root
	for _, p := range split(name) {
		if n == nil || !n.dir {
			return nil
		}
		n = n.names[p]
	}
	return n
}

// parent gives the directory of a path and the last name. d.mu is held.
func (d *disk) parent(op, name string) (*inode, string, error) {
	dir := d.find(path.Dir(path.Clean("/" + name)))
	if dir == nil || !dir.dir {
		return nil, "", notExist(op, name)
	}
	return dir, path.Base(name), nil
}

// before runs ahead of each operation that changes something. d.mu is held.
func (d *disk) before(op, name string) error {
	if d.tripAfter > 0 && !untimely(op, name) {
		if d.tripAfter--; d.tripAfter == 0 {
			d.image = d.clone(d.tripLoss)
		}
	}
	if d.fail != nil && strings.Contains(name, "/journal") {
		return d.fail(op, name)
	}
	return nil
}

// untimely tells the operations that Pebble does in the background, at moments
// that are not the simulation's: it removes files, and syncs its folder once
// more, or not, when it has done so. They must decide nothing.
func untimely(op, name string) bool {
	return op == "remove" && strings.Contains(name, "/tables") || op == "sync" && strings.HasSuffix(name, "/tables")
}

// trip makes a crash happen within what is called next, before the nth
// operation that changes the disk; see fired.
func (d *disk) trip(n int, l *loss) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tripAfter, d.tripLoss = n, l
}

// fired gives the image of a crash that has come, or nil.
func (d *disk) fired() *disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.image
}

// failWith sets what is asked before operations on journal files.
func (d *disk) failWith(fn func(op, name string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = fn
}

// Create implements vfs.FS.
func (d *disk) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	return d.make("create", name, true)
}

func (d *disk) make(op, name string, anew bool) (vfs.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base, err := d.parent("open", name)
	if err != nil {
		return nil, err
	}
	n := dir.names[base]
	if n == nil || anew {
		if err := d.before(op, name); err != nil {
			return nil, err
		}
		n = d.newInode(false)
		dir.set(base, n)
	}
	return &file{d: d, n: n, name: name, writable: true}, nil
}

// OpenReadWrite implements vfs.FS.
func (d *disk) OpenReadWrite(name string, _ vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.make("create", name, false)
	for _, o := range opts {
		if err == nil {
			o.Apply(f)
		}
	}
	return f, err
}

// Open implements vfs.FS.
func (d *disk) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	d.mu.Lock()
	n := d.find(name)
	d.mu.Unlock()
	if n == nil {
		return nil, notExist("open", name)
	}
	f := &file{d: d, n: n, name: name}
	for _, o := range opts {
		o.Apply(f)
	}
	return f, nil
}

// OpenDir implements vfs.FS.
func (d *disk) OpenDir(name string) (vfs.File, error) { return d.Open(name) }

// Link implements vfs.FS.
func (d *disk) Link(oldname, newname string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(oldname)
	dir, base, err := d.parent("link", newname)
	switch {
	case n == nil:
		return notExist("link", oldname)
	case err != nil:
		return err
	case dir.names[base] != nil:
		return &fs.PathError{Op: "link", Path: newname, Err: fs.ErrExist}
	}
	if err := d.before("link", newname); err != nil {
		return err
	}
	dir.set(base, n)
	return nil
}

// Remove implements vfs.FS.
func (d *disk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base, err := d.parent("remove", name)
	if err != nil {
		return err
	}
	n := dir.names[base]
	if n == nil {
		return notExist("remove", name)
	}
	if len(n.names) > 0 {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrExist}
	}
	if err := d.before("remove", name); err != nil {
		return err
	}
	dir.set(base, nil)
	return nil
}

// RemoveAll implements vfs.FS.
func (d *disk) RemoveAll(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base, err := d.parent("remove", name)
	if err != nil || dir.names[base] == nil {
		return nil
	}
	if err := d.before("remove", name); err != nil {
		return err
	}
	dir.set(base, nil)
	return nil
}

// Rename implements vfs.FS.
func (d *disk) Rename(oldname, newname string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	from, oldBase, err := d.parent("rename", oldname)
	if err != nil {
		return err
	}
	to, newBase, err := d.parent("rename", newname)
	if err != nil {
		return err
	}
	n := from.names[oldBase]
	if n == nil {
		return notExist("rename", oldname)
	}
	if err := d.before("rename", newname); err != nil {
		return err
	}
	from.set(oldBase, nil)
	to.set(newBase, n)
	return nil
}

// ReuseForWrite implements vfs.FS.
func (d *disk) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := d.Rename(oldname, newname); err != nil {
		return nil, err
	}
	return d.OpenReadWrite(newname, c)
}

// MkdirAll implements vfs.FS.
func (d *disk) MkdirAll(name string, _ fs.FileMode) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.root
	for _, p := range split(name) {
		next := n.names[p]
		if next == nil {
			if err := d.before("mkdir", name); err != nil {
				return err
			}
			next = d.newInode(true)
			n.set(p, next)
		}
		if !next.dir {
			return &fs.PathError{Op: "mkdir", Path: name, Err: fs.ErrExist}
		}
		n = next
	}
	return nil
}

type unlocker struct {
	d    *disk
	name string
}

func (u unlocker) Close() error {
	u.d.mu.Lock()
	defer u.d.mu.Unlock()
	delete(u.d.locks, u.name)
	return nil
}

// Lock implements vfs.FS.
func (d *disk) Lock(name string) (io.Closer, error) {
	if _, err := d.make("create", name, false); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	name = path.Clean(name)
	if d.locks[name] {
		return nil, fmt.Errorf("lock %s: held already", name)
	}
	d.locks[name] = true
	return unlocker{d, name}, nil
}

// List implements vfs.FS; the names are sorted.
func (d *disk) List(name string) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(name)
	if n == nil || !n.dir {
		return nil, notExist("list", name)
	}
	return sortedNames(n.names), nil
}

func sortedNames(names map[string]*inode) []string {
	return slices.Sorted(maps.Keys(names))
}

// Stat implements vfs.FS.
func (d *disk) Stat(name string) (vfs.FileInfo, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	return f.Stat()
}

// PathBase implements vfs.FS.
func (d *disk) PathBase(p string) string { return path.Base(p) }

// PathJoin implements vfs.FS.
func (d *disk) PathJoin(elem ...string) string { return path.Join(elem...) }

// PathDir implements vfs.FS.
func (d *disk) PathDir(p string) string { return path.Dir(p) }

// GetDiskUsage implements vfs.FS.
func (d *disk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: 1 << 40, TotalBytes: 1 << 40}, nil
}

// Unwrap implements vfs.FS.
func (d *disk) Unwrap() vfs.FS { return nil }
