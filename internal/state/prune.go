package state

import (
	"context"
	"fmt"
	"maps"
)

// maxUnnamed bounds the unnamed objects of one prune; the rest waits.
const maxUnnamed = 100_000

// surveyed is what a snapshot found in the store before it wrote anything.
type surveyed struct {
	snapshots []SnapshotID
	unnamed   []string // table objects that the last manifest does not name, in order
}

// survey looks at what is there, and sets d.snap up for a snapshot: its
// sequence number, what it begins from, and which objects it may name. A
// snapshot of a newer owner is ErrNotOwner.
func (d *DB) survey(ctx context.Context, to snapshots, epoch uint64) (surveyed, error) {
	ids, err := to.ids(ctx)
	if err != nil {
		return surveyed{}, err
	}
	s := &d.snap
	for _, id := range ids {
		if id.Epoch > epoch {
			return surveyed{}, fmt.Errorf("%w: it has the snapshot %v of a newer one", ErrNotOwner, id)
		}
		s.seq = max(s.seq, id.Sequence)
	}
	s.seq++ // never used twice: a write that was given up may still be done
	if s.last == nil && len(ids) > 0 {
		m, err := to.manifest(ctx, ids[len(ids)-1])
		switch {
		case err == nil:
			d.remember(&m)
		case !isDamage(err):
			return surveyed{}, err
		}
	}
	if s.objects == nil {
		s.objects = map[tableFile]string{}
	}
	there := surveyed{snapshots: ids}
	there.unnamed, err = d.checkObjects(ctx, to)
	return there, err
}

// checkObjects lists the table objects, forgets those of d.snap that are not
// there as they should be, and gives the rest, which d.snap does not name.
func (d *DB) checkObjects(ctx context.Context, to snapshots) (unnamed []string, err error) {
	sizes := make(map[string]int64, len(d.snap.objects))
	for _, object := range d.snap.objects {
		sizes[object] = -1
	}
	err = to.list(ctx, tableFolder, func(name string, size int64) error {
		if _, ok := sizes[name]; ok {
			sizes[name] = size
		} else if len(unnamed) < maxUnnamed {
			unnamed = append(unnamed, name)
		}
		return nil
	})
	maps.DeleteFunc(d.snap.objects, func(f tableFile, object string) bool { return sizes[object] != f.size })
	return unnamed, err
}

// prune deletes the snapshots but the newest and the former one of this owner's
// own line, and then the table objects that neither names and that were not
// named at the last prune. It touches nothing of a newer owner.
//
// It is safe at any time, however late a request of it is done: the newest
// manifest was there while we were the owner, so every later owner begins from
// it or from one that came of it, and none of these ever names an object that
// it does not name, but for new ones under new keys.
func (d *DB) prune(ctx context.Context, to snapshots, there surveyed, former *Manifest, o SnapshotOptions) error {
	if former == nil && len(there.snapshots) > 0 {
		return nil // the newest there was is damaged: an older one may be needed
	}
	keep := map[SnapshotID]bool{d.snap.last.id(): true}
	named := map[string]bool{}
	for _, m := range []*Manifest{d.snap.last, former} {
		if m == nil {
			continue
		}
		keep[m.id()] = true
		for _, f := range m.Files {
			named[f.Object] = true
		}
	}
	var snaps, objects []string
	for _, id := range there.snapshots {
		if !keep[id] {
			snaps = append(snaps, ManifestKey(to.prefix, id))
		}
	}
	before := d.snap.unnamed
	d.snap.unnamed = map[string]bool{}
	for _, name := range there.unnamed {
		switch t, ok := parseTable(name); {
		case !ok, t.by.Epoch > o.Epoch, named[name]:
		case before[name]:
			objects = append(objects, TableKey(to.prefix, ManifestFile{Object: name}))
		default:
			d.snap.unnamed[name] = true
		}
	}
	for _, keys := range [][]string{snaps, objects} { // no snapshot is there without what it names
		if err := d.deleteAll(ctx, to, keys, o); err != nil {
			return err
		}
	}
	return nil
}

// deleteAll asks before each request whether we are still the owner: a former
// one has nothing to tidy up.
func (d *DB) deleteAll(ctx context.Context, to snapshots, keys []string, o SnapshotOptions) error {
	return d.each(ctx, len(keys), func(ctx context.Context, i int) error {
		if err := o.check(); err != nil {
			return err
		}
		return to.delete(ctx, keys[i])
	})
}
