// Package fs is a blob store in a directory. One process at a time may use the
// directory; its caller holds the lock on the data directory.
//
// Layout: key "a/b" is the file objects/a.d/b.o, so that "a" and "a/b" can both
// be objects. A file is a header (magic, length, content hash, checksum) and
// the content. A write goes to tmp/, is synced, renamed into place, and the
// directory synced. Directories stay when their last object is deleted.
package fs

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/errors/oserror"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	objectsDir, tempDir   = "objects", "tmp"
	dirSuffix, fileSuffix = ".d", ".o"

	headerSize = 36
	magic      = "PRDBLOB1"
	stripes    = 64
	writeChunk = 64 << 10
)

// Store is a blob.Store.
type Store struct {
	fs   env.FS
	root string
	temp atomic.Uint64 // numbers the temporary files
	// locks, chosen by key, make condition and rename one step, and keep a
	// Get from showing an object whose name is not durable yet.
	locks [stripes]sync.RWMutex
	dirs  sync.Mutex // held while directories are made
	// failed: a directory sync failed, and what the directory looks like may
	// never reach the disk. Only a new Open, which reads what is there, helps.
	failed atomic.Bool
}

var _ blob.Store = (*Store)(nil)

// Open opens the store in dir, making it if there is none, and removes what a
// crash left half-written. It reads every directory once, not the objects.
func Open(fs env.FS, dir string) (*Store, error) {
	s := &Store{fs: fs, root: dir}
	for _, d := range []string{fs.PathJoin(dir, tempDir), fs.PathJoin(dir, objectsDir)} {
		if err := s.makeDir(d); err != nil {
			return nil, fmt.Errorf("blob: create %s: %w", d, err)
		}
	}
	temp := fs.PathJoin(dir, tempDir)
	names, err := fs.List(temp)
	if err != nil {
		return nil, fmt.Errorf("blob: list %s: %w", temp, err)
	}
	for _, name := range names {
		if err := fs.Remove(fs.PathJoin(temp, name)); err != nil {
			return nil, fmt.Errorf("blob: remove leftover: %w", err)
		}
	}
	// A process killed between a rename and the directory's sync left a name
	// that is visible and not durable.
	if err := s.syncTree(fs.PathJoin(dir, objectsDir)); err != nil {
		return nil, fmt.Errorf("blob: settle %s: %w", dir, err)
	}
	return s, nil
}

// syncTree syncs dir and the directories below; keys bound the depth.
func (s *Store) syncTree(dir string) error {
	names, err := s.fs.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, dirSuffix) {
			if err := s.syncTree(s.fs.PathJoin(dir, name)); err != nil {
				return err
			}
		}
	}
	return s.syncDir(dir)
}

func (s *Store) syncDir(dir string) error {
	d, err := s.fs.OpenDir(dir)
	if err != nil {
		s.failed.Store(true)
		return err
	}
	if err = d.Sync(); err != nil {
		s.failed.Store(true)
	}
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// makeDir makes dir and makes its name, and those above it that were missing,
// durable.
func (s *Store) makeDir(dir string) error {
	s.dirs.Lock()
	defer s.dirs.Unlock()
	if _, err := s.fs.Stat(dir); err == nil {
		return nil // Open has synced it, or an earlier Put
	}
	var parents []string // the deepest first
	for d := dir; ; {
		parent := s.fs.PathDir(d)
		if parent == d {
			break
		}
		parents = append(parents, parent)
		if _, err := s.fs.Stat(parent); err == nil {
			break
		}
		d = parent
	}
	if err := s.fs.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, p := range parents {
		if err := s.syncDir(p); err != nil {
			return err
		}
	}
	return nil
}

// path is where key's object lies.
func (s *Store) path(key string) (dir, file string) {
	dir = s.fs.PathJoin(s.root, objectsDir)
	for {
		element, rest, more := strings.Cut(key, "/")
		if !more {
			return dir, s.fs.PathJoin(dir, element+fileSuffix)
		}
		dir, key = s.fs.PathJoin(dir, element+dirSuffix), rest
	}
}

func (s *Store) lock(key string) *sync.RWMutex {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // never fails
	return &s.locks[h.Sum32()%stripes]
}

// Get implements blob.Store. It checks the content against its hash.
func (s *Store) Get(ctx context.Context, key string) (blob.Object, error) {
	if err := start(ctx, blob.CheckKey(key)); err != nil {
		return blob.Object{}, err
	}
	_, path := s.path(key)
	mu := s.lock(key)
	mu.RLock()
	f, err := s.fs.Open(path)
	mu.RUnlock()
	if err != nil {
		return blob.Object{}, s.openError(key, err)
	}
	defer f.Close() // read-only
	token, size, err := readHeader(f, key)
	if err != nil {
		return blob.Object{}, err
	}
	data := make([]byte, size)
	if n, err := f.ReadAt(data, headerSize); n < len(data) {
		return blob.Object{}, fmt.Errorf("blob: read %s: %w", key, err)
	}
	if blob.ContentToken(data) != token {
		return blob.Object{}, fmt.Errorf("%w: %s: content does not match its hash", blob.ErrCorrupt, key)
	}
	return blob.Object{Data: data, Token: token}, nil
}

func (s *Store) openError(key string, err error) error {
	if oserror.IsNotExist(err) {
		return fmt.Errorf("%w: %s", blob.ErrNotFound, key)
	}
	return fmt.Errorf("blob: open %s: %w", key, err)
}

// current is the token of key's object, "" if there is none. The key's lock is
// held.
func (s *Store) current(key, path string) (blob.Token, error) {
	f, err := s.fs.Open(path)
	if oserror.IsNotExist(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("blob: open %s: %w", key, err)
	}
	defer f.Close() // read-only
	token, _, err := readHeader(f, key)
	return token, err
}

// Put implements blob.Store. The token is the content's.
func (s *Store) Put(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
	if err := start(ctx, blob.CheckPut(key, data, opts)); err != nil {
		return "", err
	}
	if err := s.writable(); err != nil {
		return "", err
	}
	dir, path := s.path(key)
	token := blob.ContentToken(data)
	if err := s.makeDir(dir); err != nil {
		return "", fmt.Errorf("blob: put %s: %w", key, err)
	}
	temp, err := s.writeTemp(data, token)
	if err != nil {
		return "", fmt.Errorf("blob: put %s: %w", key, err)
	}
	if err := s.replace(key, dir, path, temp, opts); err != nil {
		_ = s.fs.Remove(temp) // gone if it was renamed; else Open would do it
		return "", err
	}
	return token, nil
}

// replace renames temp to path if opts hold.
func (s *Store) replace(key, dir, path, temp string, opts blob.PutOptions) error {
	mu := s.lock(key)
	mu.Lock()
	defer mu.Unlock()
	if opts.IfNoneMatch || opts.IfMatch != "" {
		now, err := s.current(key, path)
		if err != nil {
			return err
		}
		if now != opts.IfMatch { // "" with IfNoneMatch
			return fmt.Errorf("%w: put %s", blob.ErrPrecondition, key)
		}
	}
	if err := s.fs.Rename(temp, path); err != nil {
		return fmt.Errorf("%w: put %s: %w", blob.ErrAmbiguous, key, err)
	}
	if err := s.syncDir(dir); err != nil {
		return fmt.Errorf("%w: put %s: %w", blob.ErrAmbiguous, key, err)
	}
	return nil
}

// writeTemp writes and syncs a whole object file under a temporary name.
func (s *Store) writeTemp(data []byte, token blob.Token) (path string, err error) {
	path = s.fs.PathJoin(s.root, tempDir, fmt.Sprintf("%d", s.temp.Add(1)))
	f, err := s.fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return "", err
	}
	_, err = f.Write(encodeHeader(len(data), token))
	// A vfs.File may scribble on what it is given, and the data is the caller's.
	chunk := make([]byte, min(len(data), writeChunk))
	for rest := data; err == nil && len(rest) > 0; {
		n := copy(chunk, rest)
		_, err = f.Write(chunk[:n])
		rest = rest[n:]
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = s.fs.Remove(path) // the error above counts; Open removes it too
	}
	return path, err
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string, opts blob.DeleteOptions) error {
	if err := start(ctx, blob.CheckKey(key)); err != nil {
		return err
	}
	if err := s.writable(); err != nil {
		return err
	}
	dir, path := s.path(key)
	mu := s.lock(key)
	mu.Lock()
	defer mu.Unlock()
	if opts.IfMatch != "" {
		now, err := s.current(key, path)
		if err != nil {
			return err
		}
		if now != opts.IfMatch {
			return fmt.Errorf("%w: delete %s", blob.ErrPrecondition, key)
		}
	}
	switch err := s.fs.Remove(path); {
	case oserror.IsNotExist(err):
		return nil
	case err != nil:
		return fmt.Errorf("%w: delete %s: %w", blob.ErrAmbiguous, key, err)
	}
	if err := s.syncDir(dir); err != nil {
		return fmt.Errorf("%w: delete %s: %w", blob.ErrAmbiguous, key, err)
	}
	return nil
}

func (s *Store) writable() error {
	if s.failed.Load() {
		return fmt.Errorf("%w: a directory sync of %s failed; check the disk and start again", blob.ErrUnavailable, s.root)
	}
	return nil
}

func encodeHeader(size int, token blob.Token) []byte {
	_, sum, _ := strings.Cut(string(token), "-")
	b := append(make([]byte, 0, headerSize), magic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(size))
	b, _ = hex.AppendDecode(b, []byte(sum)) // ContentToken made it
	return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// readHeader reads an object file's header and checks the length with it.
func readHeader(f vfs.File, key string) (blob.Token, int64, error) {
	b := make([]byte, headerSize)
	if n, err := f.ReadAt(b, 0); n < headerSize && !errors.Is(err, io.EOF) {
		return "", 0, fmt.Errorf("blob: read %s: %w", key, err)
	}
	fi, err := f.Stat()
	if err != nil {
		return "", 0, fmt.Errorf("blob: stat %s: %w", key, err)
	}
	size := binary.LittleEndian.Uint64(b[8:])
	if string(b[:8]) != magic || binary.LittleEndian.Uint32(b[32:]) != crc32.ChecksumIEEE(b[:32]) ||
		size > blob.MaxObjectSize || fi.Size() != headerSize+int64(size) {
		return "", 0, fmt.Errorf("%w: %s: damaged header or wrong length", blob.ErrCorrupt, key)
	}
	return blob.Token(fmt.Sprintf("%x-%x", size, b[16:32])), int64(size), nil
}

// start is the common entry: bad arguments first, then the context.
func start(ctx context.Context, invalid error) error {
	if invalid != nil {
		return invalid
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("blob: not started: %w", err)
	}
	return nil
}
