package sim

import (
	"context"
	"fmt"

	"github.com/perdure-dev/perdure/internal/state"
)

// plan begins the faults that come by themselves.
func (w *world) plan() {
	if w.bucket != nil {
		w.planObjects()
		return
	}
	if w.p.crashEveryUs > 0 {
		w.after(w.rng.between(100_000, 2*w.p.crashEveryUs), w.crash)
	}
	if w.p.clockJumps {
		w.after(w.rng.between(100_000, 5_000_000), w.jump)
	}
	w.after(w.rng.between(0, w.p.upkeepEveryUs), w.upkeep)
}

// crash ends a life, and plans the next end.
func (w *world) crash() {
	if w.calm {
		return
	}
	w.after(w.rng.between(w.p.crashEveryUs/2, 2*w.p.crashEveryUs), w.crash)
	n := w.machines[0].node
	if n == nil { // while it is down, or within the start
		return
	}
	if w.rng.percent(w.p.stops) {
		n.stop()
		return
	}
	kind, l := w.howItDies()
	if w.rng.percent(w.p.tripped) {
		ops := pick(w.rng, 1, 2, 3, 1+w.rng.intn(12), 1+w.rng.intn(60))
		w.tell("", "%s will come within disk operation %d from now", kind, ops)
		n.disk.trip(ops, l)
		switch w.rng.intn(4) {
		case 0:
			w.flush(n)
		case 1:
			w.snapshot(n, n.parts[w.rng.intn(len(n.parts))])
		}
		return
	}
	w.tell("", "the machine dies: %s", kind)
	left := n.disk.crash(l)
	if l != nil {
		n.m.loseTables(left)
	}
	n.die(left)
}

// howItDies draws the end of a process, or of its machine with what it had not
// synced.
func (w *world) howItDies() (kind string, l *loss) {
	kind = "kill"
	if w.rng.percent(w.p.powerLoss) {
		kind = "power"
		l = &loss{seed: w.rng.Uint64(), keep: pick(w.rng, 0, 20, 50, 80, 100), tear: pick(w.rng, 0, 30)}
	}
	w.fault(kind)
	return kind, l
}

// crashStart lets a start end within, now and then.
func (m *machine) crashStart() {
	w := m.w
	if w.calm || w.p.crashEveryUs == 0 || !w.rng.percent(w.p.startCrash) {
		return
	}
	kind, l := w.howItDies()
	ops := 1 + w.rng.intn(80)
	w.tell("", "%s will come within disk operation %d of the start", kind, ops)
	m.disk.trip(ops, l)
}

// loseTables takes a partition's tables away, as a mishap or an operator would.
func (m *machine) loseTables(left *disk) {
	w := m.w
	if !w.rng.percent(w.p.loseTables) {
		return
	}
	id := w.rng.intn(w.p.partitions)
	if left.find(tablesDir(id)) == nil {
		return
	}
	w.fault("tables-lost")
	m.flushed[id] = 0
	w.tell("", "the tables of partition %d are lost", id)
	_ = left.RemoveAll(tablesDir(id)) // it is there
	_ = syncDir(left, fmt.Sprintf("%s/p%03d", dataDir, id))
}

func syncDir(d *disk, dir string) error {
	f, err := d.OpenDir(dir)
	if err != nil {
		return err
	}
	return f.Sync()
}

// drainUs is how long a stop waits for turns.
const drainUs = 1_500_000

// stop is an orderly one: no new turns, a wait, then the end of the process.
func (n *node) stop() {
	w := n.w
	if n.draining {
		return
	}
	n.draining = true
	n.flows.dispatch.Drain()
	w.fault("stop")
	w.tell("", "the server drains")
	n.inLife(w.rng.between(0, drainUs), func() {
		for _, p := range n.parts {
			p.pool.Abort()
		}
		n.flows.dispatch.Stop()
		n.settle(func() {
			if n.member == nil {
				n.bury("ends in order", n.disk)
				return
			}
			for _, p := range n.parts {
				p.halted = true
			}
			n.spawn(n.quit)
		})
	})
}

// settle goes on when all that was proposed is committed.
func (n *node) settle(then func()) {
	for _, p := range n.parts {
		if len(p.queue) > 0 || !p.quiet() {
			p.kick()
			n.inLife(1_000, func() { n.settle(then) })
			return
		}
	}
	then()
}

// jump sets the wall clock.
func (w *world) jump() {
	if w.calm {
		return
	}
	by := w.rng.between(-20_000_000, 20_000_000)
	w.machines[0].skewUs += by
	w.fault("clock-jump")
	w.tell("", "the clock jumps by %d ms", by/1000)
	w.after(w.rng.between(1_000_000, 10_000_000), w.jump)
}

// upkeep is what goes on beside: page-out, flushes, compactions, snapshots and
// trimming.
func (w *world) upkeep() {
	if w.calm {
		return
	}
	w.after(w.rng.between(w.p.upkeepEveryUs/2, w.p.upkeepEveryUs*3/2), w.upkeep)
	n := w.active()
	if n == nil {
		return
	}
	p := n.parts[w.rng.intn(len(n.parts))]
	if gone := p.m.PageOut(); gone > 0 {
		w.tell("", "partition %d: %d flows leave memory", p.id, gone)
	}
	switch roll := w.rng.intn(10); {
	case roll < 3:
		w.flush(n)
	case roll < 4:
		if err := p.tables.Compact(context.Background()); err != nil {
			w.violate("tables", "", "partition %d: compact: %v", p.id, err)
		}
		w.fault("compact")
	case roll < 8 && w.p.snapshots:
		w.snapshot(n, p)
	case roll < 9:
		p.checkReplay()
	}
}

func (w *world) flush(n *node) {
	for _, p := range n.parts {
		if p.tables == nil {
			continue
		}
		before := p.tables.AppliedLSN()
		if err := p.tables.Flush(); err != nil {
			w.violate("tables", "", "partition %d: flush: %v", p.id, err)
		}
		if at := p.tables.FlushedLSN(); at != before {
			w.violate("tables", "", "partition %d: flushed up to %d, applied was %d", p.id, at, before)
		}
		if n.disk.fired() == nil {
			n.m.flushed[p.id] = before
		}
	}
	w.fault("flush")
}

// snapshot takes one and trims the journal, as the server does.
func (w *world) snapshot(n *node, p *part) {
	m, err := p.tables.Snapshot(context.Background(), n.store, snapshotPrefix(p.id), state.SnapshotOptions{Epoch: p.epoch})
	if n.disk.fired() != nil {
		return
	}
	if err != nil {
		w.tell("", "partition %d: no snapshot: %v", p.id, err)
		if w.p.storeFaults == 0 {
			w.violate("snapshot", "", "partition %d: %v", p.id, err)
		}
		return
	}
	w.fault("snapshot")
	upTo := min(m.AppliedLSN, p.tables.FlushedLSN())
	if upTo > p.durable {
		w.violate("snapshot", "", "partition %d: holds entry %d, durable are entries up to %d", p.id, upTo, p.durable)
	}
	if err := p.near.Trim(upTo); err != nil {
		w.violate("snapshot", "", "partition %d: trim: %v", p.id, err)
	}
	w.tell("", "partition %d: snapshot at entry %d, the journal begins at %d", p.id, m.AppliedLSN, p.log.FirstLSN())
}
