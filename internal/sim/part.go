package sim

import (
	"errors"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// part drives one Machine as partition.Runner does, each of its goroutines'
// steps an event: take what waits, seal, append, acknowledge.
type part struct {
	n      *node
	id     int
	epoch  uint64
	hist   *history
	tables *state.DB
	nonce  uint64
	log    partition.Journal
	near   *journal.Log // one of near and far is log
	far    *farLog
	m      *partition.Machine
	pool   *pool
	flows  *router

	follower  *partition.Follower // until it is the owner
	following bool                // standBy runs
	halted    bool                // the process is about to end in order

	queue   []request
	kicked  bool
	sealing bool
	armedUs int64
	armed   bool

	openLSN uint64 // where this life began
	durable uint64 // newest entry whose append was reported
	last    map[string]uint64
}

// request is what waits for the partition's goroutine.
type request struct {
	flow  string
	entry *wire.Entry // nil: a read
	reply func(outcome)
	read  func(*wire.Flow, error)
	view  bool // a read by Machine.View
}

// outcome answers a proposal.
type outcome struct {
	core.Reply
	err error
	lsn uint64 // of the entry that was made; 0 = none
}

func (p *part) submit(r request) {
	p.queue = append(p.queue, r)
	p.kick()
}

// kick plans a turn of the partition's goroutine.
func (p *part) kick() {
	if p.kicked {
		return
	}
	p.kicked = true
	p.n.inLife(p.n.w.rng.between(0, 150), func() {
		p.kicked = false
		p.turn()
	})
}

// blocked: the batch is full and another one is on its way.
func (p *part) blocked() bool { return p.m.Full() && p.m.InFlight() >= p.log.MaxInFlight() }

func (p *part) turn() {
	if p.halted || p.m == nil {
		return
	}
	p.m.Revalidate()
	for len(p.queue) > 0 && !p.m.Full() && p.m.Err() == nil {
		r := p.queue[0]
		p.queue = p.queue[1:]
		p.run(r)
	}
	p.checkLost()
	if !p.sealing {
		p.sealing = true
		p.n.inLife(p.n.w.rng.between(0, 100), func() {
			p.sealing = false
			p.seal()
		})
	}
	p.arm()
	if p.m.Held() {
		p.n.inLife(leaseLookUs, p.kick)
	}
}

// leaseLookUs is how often a lapsed lease is looked at while answers wait for it.
const leaseLookUs = 50_000

func (p *part) run(r request) {
	if r.entry == nil {
		p.read(r)
		return
	}
	need := p.last[r.flow]
	var made uint64
	before := p.m.Stats().Entries
	p.m.Propose(partition.Proposal{Entry: r.entry, Reply: func(rep core.Reply, err error) {
		p.gate(r.flow, max(made, need), err, "an answer")
		r.reply(outcome{rep, err, made})
	}})
	if p.m.Stats().Entries > before {
		made = r.entry.Lsn
		if p.last == nil {
			p.last = map[string]uint64{}
		}
		p.last[r.flow] = made
	}
}

func (p *part) read(r request) {
	need := p.last[r.flow]
	if r.view {
		var f *wire.Flow
		p.m.View(r.flow, func(live *wire.Flow) { f = live.CloneVT() }, func(err error) {
			p.gate(r.flow, max(need, f.GetLastEvent().GetLsn()), err, "a view")
			r.read(f, err)
		})
		return
	}
	p.m.Read(r.flow, func(f *wire.Flow, err error) {
		if f != nil {
			need = max(need, f.LastEvent.GetLsn())
		}
		p.gate(r.flow, need, err, "a read")
		r.read(f, err)
	})
}

// gate: nothing leaves before what it shows is durable.
func (p *part) gate(flow string, lsn uint64, err error, what string) {
	if lsn > p.durable && !errors.Is(err, partition.ErrLost) {
		p.n.w.violate("gate", flow, "%s shows entry %d, durable are entries up to %d", what, lsn, p.durable)
	}
}

func (p *part) seal() {
	if p.halted {
		return
	}
	if p.m.InFlight() < p.log.MaxInFlight() {
		if f, ok := p.m.Seal(); ok {
			if p.far != nil {
				p.far.Begin(f, p.ack)
			} else {
				p.hand(f)
			}
		}
	}
	if len(p.queue) > 0 && !p.blocked() {
		p.kick()
	}
}

// hand gives a frame to the journal's goroutine.
func (p *part) hand(f journal.Frame) {
	w := p.n.w
	wait := w.rng.between(20, 400)
	if w.rng.percent(w.p.slowAppend) && !w.calm {
		w.fault("slow-append")
		wait += w.rng.between(1_000, w.p.slowAppendUs)
	}
	if w.mutant.ackEarly {
		p.n.inLife(wait/2, func() { p.ack(nil) })
		p.n.inLife(wait, func() { _ = p.append(f) })
		return
	}
	p.n.inLife(wait/2, func() {
		err := p.append(f)
		p.n.inLife(wait-wait/2, func() { p.ack(err) })
	})
}

func (p *part) append(f journal.Frame) error {
	w := p.n.w
	p.hist.pending = &f
	if w.rng.intn(1000) < w.p.appendFails && !w.calm {
		p.failAppend()
		defer p.n.disk.failWith(nil)
	}
	err := p.near.Append(f)
	if p.n.disk.fired() != nil {
		return err // nobody hears of it
	}
	if err != nil {
		w.tell("", "partition %d: append of entry %d fails: %v", p.id, f.FirstLSN, err)
		return err
	}
	p.durable = f.FirstLSN + uint64(f.Count) - 1
	p.hist.learn(f)
	w.tell("journal", "partition %d: entries %d to %d are durable", p.id, f.FirstLSN, p.durable)
	return nil
}

// errInjected is a fault of the simulated disk.
var errInjected = errors.New("injected fault of the disk")

// failAppend lets one of the next operations on a journal file fail.
func (p *part) failAppend() {
	w := p.n.w
	kind, n := pick(w.rng, "write", "sync", "any"), w.rng.intn(2)
	p.n.disk.failWith(func(op, _ string) error {
		if kind != "any" && op != kind {
			return nil
		}
		if n--; n >= 0 {
			return nil
		}
		w.fault("disk-" + op)
		return errInjected
	})
}

// ack takes the journal's report.
func (p *part) ack(err error) {
	if err != nil {
		p.m.Fail(err)
		p.checkLost()
		return
	}
	p.m.Committed()
	if p.n.disk.fired() != nil {
		return
	}
	p.checkLost()
	p.kick()
	if p.n.w.rng.percent(10) {
		p.checkQuiet()
	}
}

// checkLost ends the process when the ownership is lost; only the journal may
// be the reason.
func (p *part) checkLost() {
	if err := p.m.Err(); err != nil {
		if !errors.Is(err, errInjected) && (p.far == nil || !p.fenced(err)) {
			p.n.w.violate("ownership", "", "partition %d: %v", p.id, err)
		}
		p.n.lost = true
	}
}

// arm plans a tick at the next timer, by the wall clock as it is now.
func (p *part) arm() {
	at, ok := p.m.NextTimer()
	w := p.n.w
	if !ok || p.armed && p.armedUs <= at || p.m.Err() != nil || w.mutant.noTimers {
		return
	}
	p.armed, p.armedUs = true, at
	p.n.inLife(at-clock{p.n.m}.Now().UnixMicro(), func() {
		if p.armed && p.armedUs == at && !p.halted {
			p.armed = false
			p.m.Tick()
			p.turn()
		}
	})
}
