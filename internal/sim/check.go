package sim

import (
	"context"
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// quiet reports whether all that was proposed is committed.
func (p *part) quiet() bool {
	return p.openLSN+p.m.Stats().Entries == p.m.CommittedLSN() && p.m.InFlight() == 0
}

// checkQuiet compares, when all is committed, the tables with the journal, and
// the effects that were let out with those that are outstanding.
func (p *part) checkQuiet() {
	w := p.n.w
	if !p.quiet() || p.m.Err() != nil || w.bucket != nil && !w.bucket.owned(p.n) {
		return
	}
	if at := p.tables.AppliedLSN(); at != p.m.CommittedLSN() || at != p.hist.last() {
		w.violate("tables", "", "partition %d: tables are at %d, committed are %d, the journal has %d", p.id, at, p.m.CommittedLSN(), p.hist.last())
		return
	}
	if diff := p.hist.fold.differs(p.tables); diff != "" {
		w.violate("replay", "", "partition %d at entry %d: %s", p.id, p.hist.last(), diff)
	}
	p.checkOutstanding()
}

// checkOutstanding: emitted and not finished is exactly Outstanding.
func (p *part) checkOutstanding() {
	w := p.n.w
	wanted := map[attemptKey]bool{}
	var first int64
	err := p.tables.Flows("", "", 0, false, func(f *wire.Flow) error {
		out := core.Outstanding(f)
		if core.HasOutstanding(f) != (len(out) > 0) {
			w.violate("outstanding", f.Id, "HasOutstanding says %v, Outstanding has %d", core.HasOutstanding(f), len(out))
		}
		for _, ef := range out {
			if isFlow(f.Id) && ef.Kind != core.SetTimer {
				p.checkOutstandingFlow(ef)
				continue
			}
			if ef.Kind == core.SetTimer {
				if first == 0 || ef.AtUs < first {
					first = ef.AtUs
				}
				continue
			}
			key := attemptKey{p.id, f.Id, ef.Exec, ef.Attempt}
			wanted[key] = true
			if p.pool.runs[key] == nil && !p.n.draining {
				w.violate("outstanding", f.Id, "step %d, attempt %v, is outstanding and nobody runs it", ef.Exec, ef.Attempt)
			}
		}
		return nil
	})
	if err != nil {
		w.violate("tables", "", "partition %d: %v", p.id, err)
	}
	if at, ok := p.m.NextTimer(); first != 0 && (!ok || at > first) {
		w.violate("outstanding", "", "partition %d: a timer is outstanding for %d, the next one is set for %d (%v)", p.id, first, at, ok)
	}
	for _, r := range p.pool.list {
		f := p.hist.fold.flows[r.w.FlowID]
		if !wanted[r.key] && f != nil && f.RunId == r.w.RunID {
			w.violate("outstanding", r.w.FlowID, "step %d, attempt %v, runs and is not outstanding", r.w.Exec, r.w.Attempt)
		}
	}
}

// checkPrefix: what a crash left of the tables is a prefix of the journal, and
// all that was flushed is in it. The tables are those that were just opened.
func (p *part) checkPrefix() {
	w := p.n.w
	at := p.tables.AppliedLSN()
	if at > p.hist.last() {
		w.violate("prefix", "", "partition %d: tables are at %d, the journal ends at %d", p.id, at, p.hist.last())
		return
	}
	if at < p.n.m.flushed[p.id] {
		w.violate("prefix", "", "partition %d: tables are at %d, flushed were entries up to %d", p.id, at, p.n.m.flushed[p.id])
	}
	if p.near != nil && at+1 < p.near.FirstLSN() {
		w.violate("prefix", "", "partition %d: tables end at %d, the journal begins at %d", p.id, at, p.near.FirstLSN())
		return
	}
	if diff := p.hist.upTo(at).differs(p.tables); diff != "" {
		w.violate("prefix", "", "partition %d: tables at entry %d: %s", p.id, at, diff)
	}
}

// silence is an executor that does nothing, for a replay beside.
type silence struct{ partition.Slotless }

func (silence) Dispatch(*partition.Work)                          {}
func (silence) Commit(*partition.Work)                            {}
func (silence) Cancel(string, uint64, core.Attempt, string, bool) {}
func (silence) Abort()                                            {}
func (silence) Publish(flowID string, events []*wire.Event)       {}
func (silence) Send(string, *wire.Outgoing)                       {}

// checkReplay replays the whole journal, or what follows the newest snapshot,
// into fresh tables: they are like those that live.
func (p *part) checkReplay() {
	if p.far != nil {
		p.checkRestore()
		return
	}
	if !p.quiet() || p.m.Err() != nil || p.n.disk.fired() != nil {
		return
	}
	w := p.n.w
	live, err := p.tables.Hash()
	if err != nil {
		w.violate("tables", "", "partition %d: hash: %v", p.id, err)
		return
	}
	again, err := p.replayed()
	switch {
	case err != nil:
		w.violate("replay", "", "partition %d: %v", p.id, err)
	case again != live:
		w.violate("replay", "", "partition %d at entry %d: the replay's hash is %016x, the tables have %016x", p.id, p.hist.last(), again, live)
	}
	w.tell("", "partition %d: replayed, hash %016x", p.id, live)
}

// replayed gives the hash of fresh tables.
func (p *part) replayed() (hash uint64, err error) {
	w := p.n.w
	d := p.n.disk.crash(nil)
	if err := d.RemoveAll(tablesDir(p.id)); err != nil {
		return 0, err
	}
	q := &part{n: &node{w: w, m: p.n.m, disk: d}, id: p.id, epoch: p.epoch + 1}
	if p.near.FirstLSN() > 1 {
		store, err := openStore(d)
		if err != nil {
			return 0, err
		}
		if _, err := state.Restore(context.Background(), store, snapshotPrefix(p.id), d, tablesDir(p.id)); err != nil {
			return 0, err
		}
	}
	if q.tables, err = state.Open(tablesDir(p.id), stateOptions(d, nil)); err != nil {
		return 0, err
	}
	defer q.tables.Close() // read and forgotten
	if q.near, err = openJournal(d, p.id, w); err != nil {
		return 0, err
	}
	q.log, q.nonce = q.near, w.rng.Uint64()
	defer q.near.Close()
	if _, _, err := partition.Open(q.config(silence{})); err != nil {
		return 0, err
	}
	if at := q.tables.AppliedLSN(); at != p.hist.last() {
		return 0, fmt.Errorf("the replay ends at entry %d, the journal has %d", at, p.hist.last())
	}
	return q.tables.Hash()
}

// finish takes faults away, waits until all is at rest, and judges.
func (w *world) finish() {
	w.calm = true
	w.tell("", "faults are over")
	w.idleUs = w.nowUs
	for _, m := range w.machines {
		if m.node != nil {
			m.node.disk.trip(0, nil)
		}
	}
	if w.bucket != nil {
		w.bucket.calm()
	}
	const patience, step = 120_000_000, 100_000
	for end := w.nowUs + patience; w.nowUs < end && w.broken == nil; {
		w.runUntil(w.nowUs+step, nil)
		if w.atRest() {
			break
		}
		w.restartIdle()
	}
	if w.broken != nil {
		return
	}
	for _, v := range w.watchers {
		v.connect(0) // each comes back once more, with its cursor
	}
	for end := w.nowUs + patience; w.nowUs < end && w.broken == nil; {
		w.runUntil(w.nowUs+step, nil)
		if w.atRest() && w.allCaughtUp() {
			break
		}
	}
	if w.broken == nil {
		w.verdict()
	}
}

func (w *world) atRest() bool {
	n := w.active()
	if n == nil || n.draining {
		return false
	}
	for _, c := range w.clients {
		if c.op != nil {
			return false
		}
	}
	if w.asks > 0 {
		return false
	}
	for _, p := range n.parts {
		if len(p.queue) > 0 || !p.quiet() {
			return false
		}
		for _, f := range p.hist.fold.flows {
			if isFlow(f.Id) {
				if !flowAtRest(f) {
					return false
				}
			} else if core.IsBusy(f) || len(f.Channels) > 0 {
				return false
			}
		}
	}
	return true
}

func (w *world) allCaughtUp() bool {
	for _, v := range w.watchers {
		if !v.caughtUp() {
			return false
		}
	}
	return true
}

// verdict is the last check, of a world at rest.
func (w *world) verdict() {
	n := w.active()
	if n == nil {
		w.violate("liveness", "", "the server does not come up")
		return
	}
	flows := map[string]*wire.Flow{}
	for _, p := range n.parts {
		p.checkQuiet()
		p.checkReplay()
		err := p.tables.Flows("", "", 0, false, func(f *wire.Flow) error {
			if !isFlow(f.Id) {
				flows[f.Id] = f
			}
			return nil
		})
		if err != nil {
			w.violate("tables", "", "partition %d: %v", p.id, err)
		}
	}
	for _, v := range w.watchers {
		if !v.caughtUp() {
			w.violate("watch", v.flow, "a watcher of a log of %d events has come to %d.%d and gets no more", len(v.log()), v.last.LSN, v.last.N)
		}
	}
	w.oracle.Settled(flows)
	w.judge()
	if w.p.flows() && w.broken == nil {
		w.judgeFlows()
	}
}
