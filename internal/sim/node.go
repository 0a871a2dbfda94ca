package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
)

// node is one life of the server process, put together as internal/server
// does it.
type node struct {
	w        *world
	m        *machine
	disk     *disk
	lock     io.Closer
	store    blob.Store
	shared   *state.Shared
	hub      *stream.Hub
	parts    []*part
	flows    *flowNode
	draining bool
	serving  bool // answers clients
	lost     bool // a partition lost its journal, or the process its lease: it ends
	dead     bool

	member   *member // nil: its journal is on its disk
	routines []*routine
	running  *routine // now
}

const dataDir = "/srv/data"

// start begins a life with the journal on the disk.
func (m *machine) start() {
	w := m.w
	n := &node{w: w, m: m, disk: m.disk, hub: stream.NewHub()}
	err := n.open(context.Background())
	if m.disk.fired() != nil {
		m.node = n // the event's end finds it dead
		return
	}
	if err != nil {
		n.discard()
		w.tell("", "life %d does not start: %v", m.lives, err)
		if !errors.Is(err, blob.ErrUnavailable) && !errors.Is(err, blob.ErrAmbiguous) && !errors.Is(err, errInjected) {
			w.violate("recovery", "", "life %d does not start: %v", m.lives, err)
		}
		w.fault("start-failed")
		w.after(w.rng.between(10_000, 300_000), m.boot)
		return
	}
	m.node, n.serving = n, true
	w.tell("", "life %d is up", m.lives)
	for _, p := range n.parts {
		p.kick()
	}
	n.flows.dispatch.Bind(n.flows)
	n.haunt()
}

func (n *node) open(ctx context.Context) error {
	if err := n.prepare(); err != nil {
		return err
	}
	for i := range n.w.p.partitions {
		p := &part{n: n, id: i, hist: n.w.hist[i]}
		n.parts = append(n.parts, p)
		if err := p.open(ctx); err != nil {
			return fmt.Errorf("partition %d: %w", i, err)
		}
	}
	return nil
}

// prepare makes what all partitions share.
func (n *node) prepare() (err error) {
	if err := makeDir(n.disk, dataDir); err != nil {
		return err
	}
	if n.lock, err = n.disk.Lock(dataDir + "/LOCK"); err != nil {
		return err
	}
	if n.w.bucket == nil {
		if n.store, err = openStore(n.disk); err != nil {
			return err
		}
		n.store = n.w.faulty(n.store)
	}
	n.shared = state.NewShared(1<<20, 64)
	n.flows = newFlowNode(n)
	return nil
}

// makeDir makes a folder whose name survives: a folder that is made and not
// synced into the one above is lost with all that was synced in it.
func makeDir(d *disk, dir string) error {
	if err := d.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	for dir != "/" {
		dir = d.PathDir(dir)
		if err := syncDir(d, dir); err != nil {
			return err
		}
	}
	return nil
}

// faulty breaks calls of the object store, while faults are on.
func (w *world) faulty(inner blob.Store) blob.Store {
	if w.p.storeFaults == 0 {
		return inner
	}
	decide := blob.Seeded(w.rng.fork(), blob.Rates{Refused: w.p.storeFaults, Lost: w.p.storeFaults, AnswerLost: w.p.storeFaults})
	return blob.NewFaulty(inner, func(op blob.Op) blob.Fault {
		f := decide(op)
		if w.calm || f.Outcome == blob.Passed {
			return blob.Fault{}
		}
		w.fault("store-" + op.Kind.String())
		return f
	}, blob.FaultHooks{})
}

type owner struct {
	Epoch uint64 `json:"epoch"`
}

// takeOwnership begins a new epoch of a partition, by compare-and-swap, in the
// form in which internal/server keeps it.
func takeOwnership(ctx context.Context, store blob.Store, id int) (uint64, error) {
	key := fmt.Sprintf("p%03d/owner.json", id)
	var o owner
	put := blob.PutOptions{IfNoneMatch: true}
	obj, err := store.Get(ctx, key)
	switch {
	case err == nil:
		if err := json.Unmarshal(obj.Data, &o); err != nil {
			return 0, err
		}
		put = blob.PutOptions{IfMatch: obj.Token}
	case !errors.Is(err, blob.ErrNotFound):
		return 0, err
	}
	o.Epoch++
	raw, err := json.Marshal(o)
	if err != nil {
		return 0, err
	}
	_, err = store.Put(ctx, key, raw, put)
	return o.Epoch, err
}

func snapshotPrefix(id int) string { return fmt.Sprintf("p%03d/snapshot", id) }

func tablesDir(id int) string  { return fmt.Sprintf("%s/p%03d/tables", dataDir, id) }
func journalDir(id int) string { return fmt.Sprintf("%s/p%03d/journal", dataDir, id) }

func stateOptions(d *disk, s *state.Shared) state.Options {
	return state.Options{FS: d, Shared: s, Outbox: true, Manual: true}
}

func (p *part) open(ctx context.Context) (err error) {
	w, d := p.n.w, p.n.disk
	if p.epoch, err = takeOwnership(ctx, p.n.store, p.id); err != nil {
		return fmt.Errorf("take ownership: %w", err)
	}
	if p.epoch <= p.hist.epoch {
		w.violate("epochs", "", "partition %d: epoch %d begins after %d", p.id, p.epoch, p.hist.epoch)
	}
	if err := makeDir(d, fmt.Sprintf("%s/p%03d", dataDir, p.id)); err != nil {
		return err
	}
	if err := restoreIfMissing(ctx, p.n.store, p.id, d); err != nil {
		return err
	}
	if p.tables, err = state.Open(tablesDir(p.id), stateOptions(d, p.n.shared)); err != nil {
		return err
	}
	if p.near, err = openJournal(d, p.id, w); err != nil {
		return err
	}
	p.log, p.nonce = p.near, w.rng.Uint64()
	if d.fired() != nil {
		return nil // the rest would be a dead process's
	}
	p.hist.checkLog(p.near)
	p.checkPrefix()
	if w.broken != nil {
		return w.broken
	}
	p.pool = &pool{p: p, runs: map[attemptKey]*run{}}
	p.flows = newRouter(p)
	m, rec, err := partition.Open(p.config(p.flows))
	if err != nil {
		return err
	}
	p.m = m
	p.openLSN = m.CommittedLSN()
	p.durable = p.openLSN
	w.tell("", "partition %d: epoch %d, %d entries replayed up to %d, %d steps handed out again, %d timers", p.id, p.epoch, rec.Entries, p.openLSN, rec.Redispatched, rec.Timers)
	if p.openLSN != p.hist.last() {
		w.violate("recovery", "", "partition %d recovered up to entry %d, the journal has %d", p.id, p.openLSN, p.hist.last())
	}
	return nil
}

func openJournal(d *disk, id int, w *world) (*journal.Log, error) {
	return journal.Open(d, journalDir(id), journal.Options{SegmentSize: w.p.segmentBytes, FirstSegmentSize: 8 << 10, Rand: w.rng.fork()})
}

func (p *part) config(x executor) partition.Config {
	w := p.n.w
	var valid func() bool
	if p.n.member != nil {
		valid = p.n.valid
	}
	return partition.Config{
		ID: p.id, Epoch: p.epoch, Nonce: p.nonce, Valid: valid, Env: env.Env{Clock: clock{p.n.m}, Rand: w.rng.fork(), FS: p.n.disk},
		Tables: p.tables, Log: p.log, Executor: x, Observer: x, Outbox: x,
		MaxBatchBytes: w.p.batchBytes, MaxBatchEntries: w.p.batchEntries, MaxHotFlows: w.p.hotFlows,
		MaxHotBytes: w.p.hotBytes, MaxTailBytes: w.p.tailBytes, IdleUs: w.p.idleUs,
	}
}

type executor interface {
	partition.Executor
	partition.Observer
	partition.Outbox
}

// restoreIfMissing brings the newest snapshot back when the tables are gone.
func restoreIfMissing(ctx context.Context, store blob.Store, id int, d *disk) error {
	if _, err := d.Stat(tablesDir(id)); err == nil {
		return nil
	}
	_, err := state.Restore(ctx, store, snapshotPrefix(id), d, tablesDir(id))
	if errors.Is(err, state.ErrNoSnapshot) {
		return nil // the journal has all
	}
	return err
}

// discard ends a life without a word: what it holds in memory is gone.
func (n *node) discard() {
	n.dead = true
	n.endRoutines()
	for _, p := range n.parts {
		if p.tables != nil {
			_ = p.tables.Close() // it may fail on a disk that is gone
		}
		if p.near != nil {
			_ = p.near.Close()
		}
	}
	if n.shared != nil {
		n.shared.Close()
	}
	if n.lock != nil {
		_ = n.lock.Close()
	}
}

// reap ends the life whose disk fired within the last event.
func (w *world) reap() {
	for _, m := range w.machines {
		switch n := m.node; {
		case n == nil:
		case n.disk.fired() != nil:
			w.tell("", "the machine dies within a disk operation")
			n.die(n.disk.fired())
		case n.lost:
			n.bury(n.whyLost(), m.disk)
		}
	}
}

func (n *node) whyLost() string {
	switch {
	case n.member == nil:
		n.w.fault("journal-lost")
		return "ends, its journal is lost"
	case n.member.leave:
		return "ends in order"
	}
	n.w.fault("ousted")
	return "ends, it may not be the owner any more"
}

// die ends the life at once; the next one finds the given disk.
func (n *node) die(left *disk) {
	w := n.w
	n.m.node = nil
	n.dead = true // what was planned for it is void
	n.endRoutines()
	for _, p := range n.parts {
		if p.pool != nil {
			w.ghosts = append(w.ghosts, p.pool.ghosts()...)
			p.flows.loseEarly()
		}
	}
	n.discard()
	for _, f := range w.workers {
		if f.stream != nil && f.stream.n == n {
			f.lost(f.stream) // what was on its way to it still arrives
		}
	}
	n.m.disk = left
	w.after(w.rng.between(5_000, 800_000), n.m.boot)
}

// bury ends the life in order: the pool is stopped, tables are flushed.
func (n *node) bury(how string, d *disk) {
	w := n.w
	w.tell("", "life %d %s", n.m.lives, how)
	n.dead = true
	n.endRoutines()
	for _, p := range n.parts {
		if p.tables == nil {
			continue
		}
		if err := p.tables.Flush(); err != nil {
			w.violate("tables", "", "partition %d: flush at the end: %v", p.id, err)
		}
	}
	if img := d.fired(); img != nil {
		w.tell("", "the machine dies within the stop")
		d = img
	}
	n.die(d)
}
