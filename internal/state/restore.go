package state

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// ErrNoSnapshot says that there is no snapshot below the prefix.
var ErrNoSnapshot = errors.New("state: no snapshot")

// restoreTries bounds how often Restore begins again because an owner at work
// took a newer snapshot and deleted the one being read.
const restoreTries = 5

// Restore writes the newest snapshot that is whole into dir, which must be
// missing or empty, and gives its manifest. All of it was checked against the
// manifest's checksums. A snapshot with damage is passed over for the one
// before it, whose journal may be trimmed: compare AppliedLSN with the
// journal's first LSN. A store that does not answer is an error, never a
// reason to take an older snapshot. The owner may take snapshots meanwhile.
func Restore(ctx context.Context, store blob.Store, prefix string, fs env.FS, dir string) (Manifest, error) {
	if names, err := fs.List(dir); err == nil && len(names) > 0 {
		return Manifest{}, fmt.Errorf("state: restore into %q: the folder has %d files; move it away first", dir, len(names))
	}
	from := newSnapshots(store, prefix)
	var tried SnapshotID
	var damage []error
	for range restoreTries {
		ids, err := from.ids(ctx)
		if err != nil {
			return Manifest{}, fmt.Errorf("state: restore: %w", err)
		}
		if len(ids) == 0 && len(damage) == 0 {
			return Manifest{}, fmt.Errorf("%w below %q", ErrNoSnapshot, prefix)
		}
		older := len(ids) == 0 || ids[len(ids)-1] == tried // what is damaged is the newest there is
		if !older {
			tried, ids, damage = ids[len(ids)-1], ids[len(ids)-1:], nil
		} else if len(ids) > 0 {
			ids = ids[:len(ids)-1]
		}
		m, more, err := from.restoreFirst(ctx, ids, fs, dir)
		if err != nil {
			return Manifest{}, fmt.Errorf("state: restore: %w", err)
		}
		if m != nil {
			return *m, nil
		}
		if damage = append(damage, more...); older {
			break
		}
	}
	return Manifest{}, fmt.Errorf("state: restore: no snapshot below %q is whole: %w", prefix, errors.Join(damage...))
}

// restoreFirst restores the newest of ids that is whole, and says what is wrong
// with those that are not. An error is not damage.
func (s snapshots) restoreFirst(ctx context.Context, ids []SnapshotID, fs env.FS, dir string) (m *Manifest, damage []error, err error) {
	for _, id := range slices.Backward(ids) {
		m, err := s.restore(ctx, id, fs, dir)
		if err == nil {
			return &m, damage, nil
		}
		err = fmt.Errorf("snapshot %v: %w", id, err)
		if !isDamage(err) {
			return nil, damage, err
		}
		damage = append(damage, err)
	}
	return nil, damage, nil
}

// isDamage tells an object that is lost or broken from a store or disk that
// does not work just now.
func isDamage(err error) bool {
	return errors.Is(err, ErrDamaged) || errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrCorrupt)
}

// restore writes one snapshot beside dir and moves it there when it is whole.
func (s snapshots) restore(ctx context.Context, id SnapshotID, fs env.FS, dir string) (Manifest, error) {
	m, err := s.manifest(ctx, id)
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
	if f.IsTable() {
		var err error
		if data, err = s.get(ctx, TableKey(s.prefix, f)); err != nil {
			return err
		}
		if !f.Matches(data) {
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
