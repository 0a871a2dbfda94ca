package state

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// ErrNoSnapshot says that there is no snapshot below the prefix.
var ErrNoSnapshot = errors.New("state: no snapshot")

// Restore writes the newest snapshot that is whole into dir, which must be
// missing or empty, and gives its manifest. All of it was checked against the
// manifest's checksums. A snapshot with damage is passed over for the one
// before it, whose journal may be trimmed: compare AppliedLSN with the
// journal's first LSN. A store that does not answer is an error, never a
// reason to take an older snapshot.
func Restore(ctx context.Context, store blob.Store, prefix string, fs env.FS, dir string) (Manifest, error) {
	if names, err := fs.List(dir); err == nil && len(names) > 0 {
		return Manifest{}, fmt.Errorf("state: restore into %q: the folder has %d files; move it away first", dir, len(names))
	}
	from := snapshots{store, prefix}
	seqs, err := from.sequences(ctx)
	if err != nil {
		return Manifest{}, fmt.Errorf("state: restore: %w", err)
	}
	if len(seqs) == 0 {
		return Manifest{}, fmt.Errorf("%w below %q", ErrNoSnapshot, prefix)
	}
	var damage []error
	for i := len(seqs) - 1; i >= 0; i-- {
		m, err := from.restore(ctx, seqs[i], fs, dir)
		if err == nil {
			return m, nil
		}
		err = fmt.Errorf("snapshot %d: %w", seqs[i], err)
		if !isDamage(err) {
			return Manifest{}, fmt.Errorf("state: restore: %w", err)
		}
		damage = append(damage, err)
	}
	return Manifest{}, fmt.Errorf("state: restore: no snapshot below %q is whole: %w", prefix, errors.Join(damage...))
}

// isDamage tells an object that is lost or broken from a store or disk that
// does not work just now.
func isDamage(err error) bool {
	return errors.Is(err, ErrDamaged) || errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrCorrupt)
}

// restore writes one snapshot beside dir and moves it there when it is whole.
func (s snapshots) restore(ctx context.Context, seq uint64, fs env.FS, dir string) (Manifest, error) {
	m, err := s.manifest(ctx, seq)
	if err != nil {
		return Manifest{}, err
	}
	tmp := dir + ".restore"
	if err := fs.RemoveAll(tmp); err != nil {
		return Manifest{}, err
	}
	if err := fs.MkdirAll(tmp, 0o755); err != nil {
		return Manifest{}, err
	}
	for _, f := range m.Files {
		if err := s.restoreFile(ctx, f, fs, fs.PathJoin(tmp, f.Name)); err != nil {
			_ = fs.RemoveAll(tmp)
			return Manifest{}, err
		}
	}
	if err := syncDir(fs, tmp); err != nil {
		return Manifest{}, err
	}
	if err := fs.RemoveAll(dir); err != nil { // empty, or not there
		return Manifest{}, err
	}
	if err := fs.Rename(tmp, dir); err != nil {
		return Manifest{}, err
	}
	return m, syncDir(fs, fs.PathDir(dir))
}

func (s snapshots) restoreFile(ctx context.Context, f ManifestFile, fs env.FS, name string) error {
	data := f.Data
	if isTable(f.Name) {
		o, err := s.store.Get(ctx, s.tableKey(f.SHA256))
		if err != nil {
			return err
		}
		if data = o.Data; !f.matches(data) {
			return fmt.Errorf("%w: table file %s is not as its checksum says", ErrDamaged, f.Name)
		}
	}
	w, err := fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = w.Write(data)
	return errors.Join(err, w.Sync(), w.Close())
}

func syncDir(fs env.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
