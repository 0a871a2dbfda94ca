package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	uploadsAtOnce = 4
	uploadBytes   = 2 * tableBytes // of files being uploaded; a larger one goes alone
)

// ErrNotOwner says that a snapshot was not finished because the partition is
// another's by now, or may be.
var ErrNotOwner = errors.New("state: not the owner of the partition")

// SnapshotOptions say for whom a snapshot is written.
type SnapshotOptions struct {
	// Epoch is the ownership of the partition, above 0. One DB writes its
	// snapshots under one epoch, which no other DB has.
	Epoch uint64
	// Valid reports whether the partition is this owner's at the moment of the
	// call: no other can have taken it over before. It may be called from any
	// goroutine and must not block. Nil where nobody else can own the partition
	// (a locked directory).
	Valid func() bool
}

func (o SnapshotOptions) check() error {
	if o.Valid != nil && !o.Valid() {
		return ErrNotOwner
	}
	return nil
}

// snapshotter is what snapshots remember from one to the next.
type snapshotter struct {
	mu   sync.Mutex        // one snapshot at a time; guards the rest
	sums map[string]string // checksums of table files by name; they never change
	seq  uint64            // the last one used, by failed snapshots too
	last *Manifest         // the newest of ours, or what we began from; nil: not known
	// objects is what a manifest may name: what last names, and uploads since.
	objects map[tableFile]string
	unnamed map[string]bool // objects that the last prune saw and found no name of
}

// tableFile is a table file by content.
type tableFile struct {
	sum  string
	size int64
}

func checkpointDir(dir string) string { return dir + ".checkpoint" }

// Snapshot writes the tables to the store below prefix: only table files that
// are not there yet, then a manifest. What it wrote was read back and compared
// when it returns, so the journal may be trimmed up to the manifest's
// AppliedLSN. Of older snapshots one is kept; of table files that no kept
// snapshot names, those that were not named at the snapshot before either are
// deleted.
//
// A DB has one store and prefix for its life, and only the owner of the
// partition calls; a former owner that still does can do no harm, as long as
// Valid keeps its word, and gets ErrNotOwner. Close waits for a running
// snapshot: end its context first. An error leaves older snapshots as they
// were; trying again is safe.
func (d *DB) Snapshot(ctx context.Context, store blob.Store, prefix string, o SnapshotOptions) (Manifest, error) {
	if o.Epoch == 0 {
		return Manifest{}, errors.New("state: a snapshot needs the epoch of its owner")
	}
	if !d.gate.enter() {
		return Manifest{}, ErrClosed
	}
	defer d.gate.leave()
	d.snap.mu.Lock()
	defer d.snap.mu.Unlock()
	to := newSnapshots(store, prefix)
	m, err := d.snapshot(ctx, to, o)
	if err != nil {
		return Manifest{}, fmt.Errorf("state: snapshot of tables in %q: %w", d.dir, err)
	}
	m.Stats.add(to.stats())
	return m, nil
}

func (s *SnapshotStats) add(requests SnapshotStats) {
	requests.NewTables, requests.Tables = s.NewTables, s.Tables
	*s = requests
}

func (d *DB) snapshot(ctx context.Context, to snapshots, o SnapshotOptions) (Manifest, error) {
	if err := o.check(); err != nil {
		return Manifest{}, err
	}
	if err := d.Flush(); err != nil {
		return Manifest{}, err
	}
	lsn := d.FlushedLSN() // before the checkpoint: it has at least these rows
	cp := checkpointDir(d.dir)
	if err := d.o.FS.RemoveAll(cp); err != nil {
		return Manifest{}, err
	}
	defer d.o.FS.RemoveAll(cp) // what is left goes with the next one
	if err := d.db.Checkpoint(cp); err != nil {
		return Manifest{}, err
	}
	there, err := d.survey(ctx, to, o.Epoch)
	if err != nil {
		return Manifest{}, err
	}
	m := Manifest{Format: snapshotFormat, Epoch: o.Epoch, Sequence: d.snap.seq, AppliedLSN: lsn}
	if err := d.upload(ctx, to, cp, &m); err != nil {
		return Manifest{}, err
	}
	if err := d.publish(ctx, to, &m, o); err != nil {
		return Manifest{}, err
	}
	former := d.snap.last
	d.remember(&m)
	// From here on a new owner begins from this manifest or a later one, since
	// we were the owner after it was written: see prune.
	if err := d.prune(ctx, to, there, former, o); err != nil {
		d.log(Error, fmt.Sprintf("old snapshots of tables in %q are left for the next time: %v", d.dir, err))
	}
	return m, nil
}

// publish writes the manifest.
func (d *DB) publish(ctx context.Context, to snapshots, m *Manifest, o SnapshotOptions) error {
	if err := o.check(); err != nil { // a manifest of a former owner is only waste
		return err
	}
	data, err := m.encode()
	if err != nil {
		return err
	}
	if err := to.putOnce(ctx, ManifestKey(to.prefix, m.id()), data); err != nil {
		return err
	}
	return o.check() // else a successor may have begun without it
}

// remember makes m what the next snapshot begins from.
func (d *DB) remember(m *Manifest) {
	d.snap.last, d.snap.objects = m, map[tableFile]string{}
	for _, f := range m.Files {
		if f.IsTable() {
			d.snap.objects[tableFile{f.SHA256, f.Size}] = f.Object
		}
	}
}

// upload puts the files of a checkpoint into the store and describes them in m.
func (d *DB) upload(ctx context.Context, to snapshots, cp string, m *Manifest) error {
	names, err := d.o.FS.List(cp)
	if err != nil {
		return err
	}
	if len(names) > maxSnapshotFiles {
		return fmt.Errorf("%d files, at most %d", len(names), maxSnapshotFiles)
	}
	m.Files = make([]ManifestFile, len(names))
	uploaded := make([]bool, len(names))
	room := semaphore.NewWeighted(uploadBytes)
	err = d.each(ctx, len(names), func(ctx context.Context, i int) (err error) {
		m.Files[i], uploaded[i], err = d.uploadFile(ctx, to, d.o.FS.PathJoin(cp, names[i]), m.id(), room)
		return err
	})
	sums := map[string]string{}
	for i, f := range m.Files {
		if !f.IsTable() || f.Object == "" {
			continue
		}
		sums[f.Name] = f.SHA256
		m.Stats.Tables++
		if uploaded[i] {
			m.Stats.NewTables++
			d.snap.objects[tableFile{f.SHA256, f.Size}] = f.Object // for the next try, if this one fails
		}
	}
	if err == nil {
		d.snap.sums = sums
	}
	return err
}

// uploadFile gives the manifest's line of a file. A table file that is not in
// the store yet is put there; room bounds the bytes held for that. Calls run at
// the same time: it changes nothing of d.
func (d *DB) uploadFile(ctx context.Context, to snapshots, file string, by SnapshotID, room *semaphore.Weighted) (f ManifestFile, uploaded bool, err error) {
	f.Name = d.o.FS.PathBase(file)
	info, err := d.o.FS.Stat(file)
	if err != nil {
		return f, false, err
	}
	f.Size, f.SHA256 = info.Size(), d.snap.sums[f.Name]
	if f.Size > blob.MaxObjectSize {
		return f, false, fmt.Errorf("%s has %d bytes, at most %d", f.Name, f.Size, blob.MaxObjectSize)
	}
	if f.Object = d.snap.objects[tableFile{f.SHA256, f.Size}]; f.Object != "" {
		return f, false, nil
	}
	weight := min(f.Size, uploadBytes)
	if err := room.Acquire(ctx, weight); err != nil {
		return f, false, err
	}
	defer room.Release(weight)
	data, err := readFile(d.o.FS, file)
	if err != nil {
		return f, false, err
	}
	f.Size, f.SHA256 = int64(len(data)), sum(data)
	if !f.IsTable() {
		f.Data = data
		return f, false, nil
	}
	if f.Object = d.snap.objects[tableFile{f.SHA256, f.Size}]; f.Object != "" {
		return f, false, nil // the first snapshot of this life knows no checksums
	}
	f.Object = tableObject{f.SHA256, by}.String()
	err = to.putOnce(ctx, TableKey(to.prefix, f), data)
	return f, err == nil, err
}

// each calls fn for 0 to n-1, a few at once; of a manual DB one after another on
// this goroutine. The first error ends it.
func (d *DB) each(ctx context.Context, n int, fn func(context.Context, int) error) error {
	if d.o.Manual {
		for i := range n {
			if err := fn(ctx, i); err != nil {
				return err
			}
		}
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(uploadsAtOnce)
	for i := range n {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fn(ctx, i)
		})
	}
	return g.Wait()
}

func readFile(fs env.FS, name string) (data []byte, err error) {
	f, err := fs.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	return io.ReadAll(io.LimitReader(f, blob.MaxObjectSize+1))
}
