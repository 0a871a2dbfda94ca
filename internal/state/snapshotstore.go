package state

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/blob"
)

const (
	putTries     = 3       // of a write whose outcome is unknown
	maxSnapshots = 1 << 16 // manifests below one prefix
)

// snapshots is the part of a store that one partition's snapshots are in. It
// counts its requests.
type snapshots struct {
	store  blob.Store
	prefix string
	count  *counters
}

type counters struct {
	puts, gets, lists, deletes, putBytes, gotBytes atomic.Int64
}

func newSnapshots(store blob.Store, prefix string) snapshots {
	return snapshots{store, prefix, &counters{}}
}

func (s snapshots) stats() SnapshotStats {
	c := s.count
	return SnapshotStats{
		Puts: c.puts.Load(), Gets: c.gets.Load(), Lists: c.lists.Load(), Deletes: c.deletes.Load(),
		PutBytes: c.putBytes.Load(), GotBytes: c.gotBytes.Load(),
	}
}

func (s snapshots) get(ctx context.Context, key string) ([]byte, error) {
	o, err := s.store.Get(ctx, key)
	s.count.gets.Add(1)
	s.count.gotBytes.Add(int64(len(o.Data)))
	return o.Data, err
}

func (s snapshots) put(ctx context.Context, key string, data []byte) error {
	s.count.puts.Add(1)
	s.count.putBytes.Add(int64(len(data)))
	_, err := s.store.Put(ctx, key, data, blob.PutOptions{IfNoneMatch: true})
	return err
}

func (s snapshots) delete(ctx context.Context, key string) error {
	s.count.deletes.Add(1)
	return s.store.Delete(ctx, key, blob.DeleteOptions{})
}

// list calls fn for each object of a folder, in the order of names.
func (s snapshots) list(ctx context.Context, folder string, fn func(name string, size int64) error) error {
	prefix := path.Join(s.prefix, folder) + "/"
	for after := ""; ; {
		infos, err := s.store.List(ctx, prefix, after, blob.MaxList)
		s.count.lists.Add(1)
		if err != nil {
			return err
		}
		for _, i := range infos {
			if err := fn(i.Key[len(prefix):], i.Size); err != nil {
				return err
			}
			after = i.Key
		}
		if len(infos) < blob.MaxList {
			return nil
		}
	}
}

// ids lists the snapshots there are, oldest first.
func (s snapshots) ids(ctx context.Context) ([]SnapshotID, error) {
	var out []SnapshotID
	err := s.list(ctx, snapshotFolder, func(name string, _ int64) error {
		if id, ok := parseSnapshot(name); ok {
			out = append(out, id)
		}
		if len(out) > maxSnapshots {
			return fmt.Errorf("over %d snapshots below %q", maxSnapshots, s.prefix)
		}
		return nil
	})
	slices.SortFunc(out, SnapshotID.Compare) // format 1 has names of another length
	return out, err
}

// putOnce writes an object that nobody else may have written, and reads it
// back.
func (s snapshots) putOnce(ctx context.Context, key string, data []byte) error {
	want := ManifestFile{Size: int64(len(data)), SHA256: sum(data)}
	for try := 1; ; try++ {
		err := s.put(ctx, key, data)
		switch {
		case err == nil, errors.Is(err, blob.ErrPrecondition):
			return s.compare(ctx, key, want) // ours, if an answer before was lost
		case !errors.Is(err, blob.ErrAmbiguous), try == putTries, ctx.Err() != nil:
			return err
		}
	}
}

// compare reads back what was written.
func (s snapshots) compare(ctx context.Context, key string, want ManifestFile) error {
	data, err := s.get(ctx, key)
	if err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	if !want.Matches(data) {
		return fmt.Errorf("read back %s: %d bytes differ from the %d written; is there another writer?", key, len(data), want.Size)
	}
	return nil
}

func (s snapshots) manifest(ctx context.Context, id SnapshotID) (Manifest, error) {
	data, err := s.get(ctx, ManifestKey(s.prefix, id))
	if err != nil {
		return Manifest{}, err
	}
	return DecodeManifest(data, id)
}

// ListSnapshots gives the snapshots below prefix, oldest first.
func ListSnapshots(ctx context.Context, store blob.Store, prefix string) ([]SnapshotID, error) {
	ids, err := newSnapshots(store, prefix).ids(ctx)
	if err != nil {
		return nil, fmt.Errorf("state: list snapshots below %q: %w", prefix, err)
	}
	return ids, nil
}

// DecodeManifest reads the object of a snapshot's manifest. What it gives was
// checked against its checksum; table files were not looked at. Errors are
// ErrDamaged but for a format that this program is too old for.
func DecodeManifest(data []byte, id SnapshotID) (Manifest, error) {
	m, err := decodeManifest(data)
	if err == nil && m.id() != id {
		err = fmt.Errorf("%w: snapshot %v is under the key of %v", ErrDamaged, m.id(), id)
	}
	return m, err
}

func (m *Manifest) id() SnapshotID { return SnapshotID{m.Epoch, m.Sequence} }
