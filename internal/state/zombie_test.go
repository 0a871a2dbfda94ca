package state

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

// A contest is an owner, its successors and the zombies that former owners
// are, on one store. One of them moves at a time, by one request, so that each
// may be paused between any two requests for as long as the seed likes.
type contest struct {
	r       *rand.Rand
	store   *mem.Store
	take    snapshotFunc
	hashes  []uint64 // of the right rows, by LSN
	owner   uint64   // epoch
	logged  uint64   // entries acknowledged
	trimmed uint64   // entries that the log does not hold any more
	actors  []*contender
	stop    chan struct{}
	newest  Manifest // restored and compared already
	shared  *Shared
	written int  // snapshots that were the newest
	changed bool // the store, since the last check
}

type snapshotFunc func(ctx context.Context, d *DB, store blob.Store, o SnapshotOptions) (Manifest, error)

const (
	contestEntries = 120
	contestOwners  = 4
	contestSteps   = 700
)

// contestEntry writes the rows of one entry.
func contestEntry(d *DB, lsn uint64) error {
	r := rand.New(rand.NewPCG(3, lsn))
	b := d.NewBatch()
	defer b.Close()
	for range 1 + r.IntN(2) {
		f := flow(fmt.Sprintf("f/%d", r.IntN(5)), r.IntN(2) == 0, r.IntN(300))
		f.NextExec = lsn
		b.PutFlow(f)
		b.PutEvent(f.Id, event(lsn, 0))
	}
	return b.Commit(lsn)
}

// contender is a process that owns, or owned, the partition under one epoch.
type contender struct {
	c     *contest
	epoch uint64
	fs    *vfs.MemFS
	ready chan bool // false: it has ended
	grant chan struct{}
	ended bool
	pause int // turns it misses
	err   error
}

var errContestOver = errors.New("the contest is over")

// ask waits for the turn of a request.
func (a *contender) ask() error {
	a.ready <- true
	select {
	case <-a.grant:
		return nil
	case <-a.c.stop:
		return errContestOver
	}
}

// turns is the store of a contender.
type turns struct{ a *contender }

func (s turns) Get(ctx context.Context, key string) (blob.Object, error) {
	if err := s.a.ask(); err != nil {
		return blob.Object{}, err
	}
	return s.a.c.store.Get(ctx, key)
}

func (s turns) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if err := s.a.ask(); err != nil {
		return "", err
	}
	s.a.c.changed = true
	return s.a.c.store.Put(ctx, key, data, o)
}

func (s turns) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if err := s.a.ask(); err != nil {
		return nil, err
	}
	return s.a.c.store.List(ctx, prefix, after, limit)
}

func (s turns) Delete(ctx context.Context, key string, o blob.DeleteOptions) error {
	if err := s.a.ask(); err != nil {
		return err
	}
	s.a.c.changed = true
	return s.a.c.store.Delete(ctx, key, o)
}

func (a *contender) valid() bool { return a.c.owner == a.epoch }

// live restores, replays, and then takes snapshots for ever.
func (a *contender) live() {
	defer func() { a.ready <- false }()
	if err := a.work(); a.valid() && !errors.Is(err, errContestOver) {
		a.err = err // a zombie may fail
	}
}

func (a *contender) work() error {
	c, ctx := a.c, context.Background()
	if _, err := Restore(ctx, turns{a}, "p", a.fs, "p"); err != nil && !errors.Is(err, ErrNoSnapshot) {
		return err
	}
	d, err := Open("p", Options{FS: a.fs, Manual: true, Shared: c.shared})
	if err != nil {
		return err
	}
	defer d.Close()
	mine := c.logged // what it takes over, and what it adds
	if d.AppliedLSN() < c.trimmed {
		return fmt.Errorf("epoch %d: restored up to entry %d, the log begins behind %d", a.epoch, d.AppliedLSN(), c.trimmed)
	}
	r := rand.New(rand.NewPCG(c.r.Uint64(), a.epoch))
	for {
		if a.valid() {
			c.logged = min(c.logged+r.Uint64N(4), contestEntries)
			mine = c.logged
		}
		for lsn := d.AppliedLSN() + 1; lsn <= mine; lsn++ {
			if err := contestEntry(d, lsn); err != nil {
				return err
			}
		}
		if r.IntN(3) == 0 {
			if err := d.Compact(ctx); err != nil {
				return err
			}
		}
		m, err := c.take(ctx, d, turns{a}, SnapshotOptions{Epoch: a.epoch, Valid: a.valid})
		if err == nil && a.valid() { // the head is moved by compare-and-swap
			c.trimmed = max(c.trimmed, m.AppliedLSN)
		}
		if err := a.ask(); err != nil { // a turn without a request: no loop without one
			return err
		}
	}
}

// next lets one contender go as far as its next request.
func (c *contest) next() error {
	if len(c.actors) < contestOwners && c.r.IntN(60) == 0 {
		former := c.actors[len(c.actors)-1]
		former.pause = c.r.IntN(80) // the zombie sleeps, perhaps with a request half done
		return c.begin()
	}
	if c.r.IntN(80) == 0 {
		c.actors[c.r.IntN(len(c.actors))].pause = c.r.IntN(150)
	}
	a := c.actors[len(c.actors)-1]
	if c.r.IntN(3) == 0 {
		a = c.actors[c.r.IntN(len(c.actors))]
	}
	for _, a := range c.actors {
		a.pause = max(0, a.pause-1)
	}
	if a.ended || a.pause > 0 {
		return nil
	}
	a.grant <- struct{}{}
	return c.settle(a)
}

func (c *contest) begin() error {
	c.owner++
	a := &contender{c: c, epoch: c.owner, fs: vfs.NewMem(), ready: make(chan bool), grant: make(chan struct{})}
	c.actors = append(c.actors, a)
	go a.live()
	return c.settle(a)
}

func (c *contest) settle(a *contender) error {
	if a.ended = !<-a.ready; a.ended {
		return a.err
	}
	return c.check()
}

// check is the promise: what the log does not hold any more can be restored at
// any time, with the right rows.
func (c *contest) check() error {
	if !c.changed {
		return nil
	}
	c.changed = false
	ctx := context.Background()
	ids, err := ListSnapshots(ctx, c.store, "p")
	if err != nil {
		return err
	}
	if len(ids) == 0 {
		if c.trimmed > 0 {
			return fmt.Errorf("no snapshot, the log begins behind %d", c.trimmed)
		}
		return nil
	}
	id := ids[len(ids)-1]
	if id == c.newest.id() {
		return c.checkTables(ctx)
	}
	if c.newest, err = newSnapshots(c.store, "p").manifest(ctx, id); err != nil {
		return err
	}
	if c.newest.AppliedLSN < c.trimmed {
		return fmt.Errorf("snapshot %v is of entry %d, the log begins behind %d", id, c.newest.AppliedLSN, c.trimmed)
	}
	c.written++
	if err := c.checkTables(ctx); err != nil {
		return err
	}
	return c.checkRows(c.newest)
}

func (c *contest) checkTables(ctx context.Context) error {
	for _, f := range c.newest.Files {
		if !f.IsTable() {
			continue
		}
		if o, err := c.store.Get(ctx, TableKey("p", f)); err != nil || int64(len(o.Data)) != f.Size {
			return fmt.Errorf("snapshot %v has lost table %s: %w", c.newest.id(), f.Object, errors.Join(err, ErrDamaged))
		}
	}
	return nil
}

func (c *contest) checkRows(m Manifest) error {
	fs := vfs.NewMem()
	if _, err := Restore(context.Background(), c.store, "p", fs, "p"); err != nil {
		return err
	}
	d, err := Open("p", Options{FS: fs, Manual: true, Shared: c.shared})
	if err != nil {
		return err
	}
	defer d.Close()
	hash, err := d.Hash()
	if err != nil {
		return err
	}
	if d.AppliedLSN() != m.AppliedLSN || hash != c.hashes[m.AppliedLSN] {
		return fmt.Errorf("snapshot %v: rows of entry %d with hash %x, want those of %d with %x", m.id(), d.AppliedLSN(), hash, m.AppliedLSN, c.hashes[m.AppliedLSN])
	}
	return nil
}

// contestHashes gives the hash of the right rows at each LSN.
func contestHashes(t *testing.T) []uint64 {
	d := openMem(t, vfs.NewMem(), Options{Manual: true})
	hashes := make([]uint64, contestEntries+1)
	for lsn := range uint64(contestEntries + 1) {
		if lsn > 0 {
			must(t, contestEntry(d, lsn))
		}
		var err error
		hashes[lsn], err = d.Hash()
		must(t, err)
	}
	return hashes
}

// runContest gives how many snapshots were the newest at some time, and the
// first broken promise.
func runContest(seed uint64, hashes []uint64, take snapshotFunc) (int, error) {
	c := &contest{r: rand.New(rand.NewPCG(seed, 9)), store: mem.New(mem.Options{}), take: take, hashes: hashes, stop: make(chan struct{}), shared: NewShared(0, 0)}
	defer c.shared.Close()
	err := c.begin()
	for step := 0; err == nil && step < contestSteps; step++ {
		if err = c.next(); err != nil {
			err = fmt.Errorf("seed %d, step %d, owner %d: %w", seed, step, c.owner, err)
		}
	}
	close(c.stop)
	for _, a := range c.actors {
		for !a.ended {
			a.ended = !<-a.ready
		}
	}
	return c.written, err
}

func contestSeeds(t *testing.T) uint64 {
	if testing.Short() {
		return 5
	}
	return 20
}

func TestZombieCannotHurtSnapshots(t *testing.T) {
	hashes, written := contestHashes(t), 0
	for seed := range contestSeeds(t) {
		n, err := runContest(seed, hashes, func(ctx context.Context, d *DB, store blob.Store, o SnapshotOptions) (Manifest, error) {
			return d.Snapshot(ctx, store, "p", o)
		})
		if err != nil {
			t.Fatal(err)
		}
		written += n
	}
	if written < int(contestSeeds(t))*10 {
		t.Errorf("only %d snapshots were written", written)
	}
}

// TestContestFindsNamesByContent: the checker fails with what format 1 did.
func TestContestFindsNamesByContent(t *testing.T) {
	hashes := contestHashes(t)
	for seed := range contestSeeds(t) {
		if _, err := runContest(seed, hashes, snapshotByContent); err != nil {
			t.Log(err)
			return
		}
	}
	t.Error("no seed finds it")
}

// meanwhile runs something before the first write.
type meanwhile struct {
	blob.Store
	once func()
}

func (s *meanwhile) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if once := s.once; once != nil {
		s.once = nil
		once()
	}
	return s.Store.Put(ctx, key, data, o)
}

// TestSnapshotsRestOnValid: a former owner that goes on is harmless because it
// is told that it is one, and for no other reason.
func TestSnapshotsRestOnValid(t *testing.T) {
	for name, valid := range map[string]func() bool{"told": func() bool { return false }, "not told": nil} {
		t.Run(name, func(t *testing.T) {
			store, ctx := mem.New(mem.Options{}), t.Context()
			former := openMem(t, vfs.NewMem(), Options{Manual: true})
			write(t, former, 1, func(b *Batch) { b.PutFlow(flow("a", true, 100)) })
			_, err := former.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1})
			must(t, err)
			fs := vfs.NewMem()
			_, err = Restore(ctx, store, "p", fs, "p")
			must(t, err)
			next := openMem(t, fs, Options{Manual: true})
			write(t, next, 2, func(b *Batch) { b.PutFlow(flow("b", true, 100)) })
			var told error
			_, err = next.Snapshot(ctx, &meanwhile{store, func() {
				for lsn := range uint64(4) { // while the successor is between two requests
					write(t, former, lsn+2, func(b *Batch) { b.PutFlow(flow("a", true, 100)) })
					must(t, former.Flush())
					must(t, former.Compact(ctx))
					_, told = former.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1, Valid: valid})
				}
			}}, "p", SnapshotOptions{Epoch: 2})
			must(t, err)
			m, err := Restore(ctx, store, "p", vfs.NewMem(), "p")
			if valid == nil {
				if err == nil && m.Epoch == 2 {
					t.Error("the test is too weak: nothing was lost")
				}
				return
			}
			if !errors.Is(told, ErrNotOwner) {
				t.Errorf("the former owner got %v", told)
			}
			if err != nil || m.AppliedLSN != 2 {
				t.Errorf("restored up to %d, %v", m.AppliedLSN, err)
			}
			_, err = former.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1})
			if !errors.Is(err, ErrNotOwner) {
				t.Errorf("beside a newer owner's snapshot: %v", err)
			}
		})
	}
}

// snapshotByContent is how format 1 wrote and pruned.
func snapshotByContent(ctx context.Context, d *DB, store blob.Store, _ SnapshotOptions) (Manifest, error) {
	to, cp := newSnapshots(store, "p"), checkpointDir(d.dir)
	m := Manifest{Format: 1, Sequence: 1, AppliedLSN: d.AppliedLSN()}
	if err := errors.Join(d.Flush(), d.o.FS.RemoveAll(cp), d.db.Checkpoint(cp)); err != nil {
		return m, err
	}
	ids, err := to.ids(ctx)
	if err != nil {
		return m, err
	}
	if len(ids) > 0 {
		m.Sequence = ids[len(ids)-1].Sequence + 1
	}
	there := map[string]bool{}
	if err := to.list(ctx, tableFolder, func(name string, _ int64) error { there[name] = true; return nil }); err != nil {
		return m, err
	}
	names, err := d.o.FS.List(cp)
	if err != nil {
		return m, err
	}
	for _, name := range names {
		data, err := readFile(d.o.FS, d.o.FS.PathJoin(cp, name))
		if err != nil {
			return m, err
		}
		f := ManifestFile{Name: name, Size: int64(len(data)), SHA256: sum(data), Data: data}
		if f.IsTable() {
			f.Object, f.Data = f.SHA256, nil
			if !there[f.Object] {
				if _, err := store.Put(ctx, TableKey("p", f), data, blob.PutOptions{}); err != nil {
					return m, err
				}
			}
		}
		m.Files = append(m.Files, f)
	}
	data, err := m.encode()
	if err != nil {
		return m, err
	}
	if err := to.putOnce(ctx, ManifestKey("p", m.id()), data); err != nil {
		return m, err
	}
	return m, pruneByContent(ctx, to, append(ids, m.id()))
}

func pruneByContent(ctx context.Context, to snapshots, ids []SnapshotID) error {
	cut := max(0, len(ids)-2)
	named := map[string]bool{}
	for _, id := range ids[cut:] {
		m, err := to.manifest(ctx, id)
		if err != nil {
			return err
		}
		for _, f := range m.Files {
			named[f.Object] = true
		}
	}
	var gone []string
	for _, id := range ids[:cut] {
		gone = append(gone, ManifestKey("p", id))
	}
	if err := to.list(ctx, tableFolder, func(name string, _ int64) error {
		if !named[name] {
			gone = append(gone, TableKey("p", ManifestFile{Object: name}))
		}
		return nil
	}); err != nil {
		return err
	}
	for _, key := range gone {
		if err := to.delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
