package sim

import (
	"context"

	"github.com/perdure-dev/perdure/internal/wire"
)

// planObjects begins the faults of nodes that share an object store.
func (w *world) planObjects() {
	w.after(w.rng.between(100_000, 2*w.p.faultEveryUs), w.mishap)
	w.after(w.rng.between(0, w.p.upkeepEveryUs), w.upkeepObjects)
	w.after(w.rng.between(0, probeUs), w.probe)
}

// mishap is what happens to a node, or to all, and comes again.
func (w *world) mishap() {
	if w.calm {
		return
	}
	w.after(w.rng.between(w.p.faultEveryUs/2, 2*w.p.faultEveryUs), w.mishap)
	m := w.machines[w.rng.intn(len(w.machines))]
	if n := w.active(); n != nil && w.rng.percent(60) {
		m = n.m // most happens where most is done
	}
	long := w.rng.between(0, 3*w.p.ttlUs)
	if n := w.active(); n != nil && w.p.liars && w.rng.percent(40) {
		n.freeze(w.p.ttlUs + long) // until another one is the owner
		return
	}
	switch w.rng.intn(10) {
	case 0, 1, 2:
		w.end(m)
	case 3, 4:
		if m.node != nil && !m.stopped() {
			m.node.freeze(long)
		}
	case 5, 6:
		w.fault("cut-off")
		w.tell("", "machine %d is cut off from the store for %d ms", m.id, long/1000)
		w.bucket.cut(m, long)
	case 7:
		w.fault("outage")
		w.tell("", "the store is not reached for %d ms", long/1000)
		for _, m := range w.machines {
			w.bucket.cut(m, long)
		}
	case 8:
		w.fault("store-busy")
		w.bucket.busyUs = max(w.bucket.busyUs, w.nowUs+long)
	default:
		by := w.rng.between(-20_000_000, 20_000_000)
		m.skewUs += by
		w.fault("clock-jump")
		w.tell("", "the clock of machine %d jumps by %d ms", m.id, by/1000)
	}
}

// end ends a machine's process: in order, at once, or with its machine.
func (w *world) end(m *machine) {
	n := m.node
	switch {
	case n == nil:
		return
	case n.serving && !m.stopped() && w.rng.percent(30):
		n.stop()
		return
	}
	kind, l := w.howItDies()
	if w.rng.percent(w.p.tripped) {
		ops := pick(w.rng, 1, 2, 3, 1+w.rng.intn(12), 1+w.rng.intn(60))
		w.tell("", "machine %d: %s will come within disk operation %d from now", m.id, kind, ops)
		n.disk.trip(ops, l)
		return
	}
	w.tell("", "machine %d dies: %s", m.id, kind)
	left := n.disk.crash(l)
	if l != nil {
		m.loseTables(left)
	}
	m.stoppedUs = 0
	n.die(left)
}

// upkeepObjects is what goes on beside: page-out, flushes, compactions, snapshots
// and trimming.
func (w *world) upkeepObjects() {
	if w.calm {
		return
	}
	w.after(w.rng.between(w.p.upkeepEveryUs/2, w.p.upkeepEveryUs*3/2), w.upkeepObjects)
	n := w.machines[w.rng.intn(len(w.machines))].node
	if a := w.active(); a != nil && w.rng.percent(70) {
		n = a
	}
	if n == nil || n.m.stopped() || n.draining {
		return
	}
	p := n.parts[w.rng.intn(len(n.parts))]
	roll := w.rng.intn(10)
	switch {
	case p.tables == nil:
	case roll < 2:
		w.flush(n)
	case roll < 3:
		if err := p.tables.Compact(context.Background()); err != nil {
			w.violate("tables", "", "partition %d: compact: %v", p.id, err)
		}
		w.fault("compact")
	case !n.serving:
	case roll < 4:
		p.m.PageOut()
	case roll < 9 && !p.far.busy:
		p.far.busy = true
		n.spawn(p.snapshotFar)
	default:
		p.checkRestore()
	}
}

// probeUs is the mean time between two reads that look for old answers.
const probeUs = 30_000

// probe reads the flow that changed last from any node that answers, most of all from one that is not the
// owner any more: what it shows is no older than what was known when it was asked.
func (w *world) probe() {
	if w.calm {
		return
	}
	w.after(w.rng.between(probeUs/2, 2*probeUs), w.probe)
	at := w.elsewhere(w.rng, 0)
	for _, m := range w.machines {
		if m.node != nil && m.node.serving && m.node != w.active() {
			at = m.id
		}
	}
	newest := w.hist[w.rng.intn(len(w.hist))].fold.newest
	if newest == nil {
		return
	}
	flow := newest.FlowId
	floor := max(w.acked[flow], w.model.LastLSN(flow))
	w.arriveAt(at, w.rng.between(50, 3_000), func(n *node) {
		if n == nil || n.draining || w.p.liars {
			return
		}
		if a := w.active(); a != nil && a != n {
			w.fault("zombie-asked")
		}
		n.flows.part(flow).submit(request{flow: flow, read: func(f *wire.Flow, err error) {
			if err != nil {
				w.fault("probe-refused")
				return
			}
			w.fault("probe")
			if f != nil && f.LastEvent.GetLsn() < floor {
				w.violate("reads", flow, "machine %d shows events up to %d, %d was durable before", n.m.id, f.LastEvent.GetLsn(), floor)
			}
		}})
	})
}

// idleUs is how long a node may serve in peace without noticing that it is not the
// owner.
const idleUs = 10_000_000

// restartIdle ends, as an operator would, a node that holds its lease and has nothing
// to write, and so does not notice that a node that was elected before it, and has
// died since, took a partition from it: the next write would tell it.
func (w *world) restartIdle() {
	if w.bucket == nil || w.active() != nil {
		w.idleUs = w.nowUs
		return
	}
	if w.nowUs-w.idleUs < idleUs {
		return
	}
	w.idleUs = w.nowUs
	for _, m := range w.machines {
		if m.node != nil && m.node.serving && !m.node.draining {
			w.fault("idle-ousted")
			m.node.lost = true
		}
	}
}
