package partition

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// QueueBound is how many requests may wait for a partition's goroutine.
const QueueBound = 4096

// drainBound is how many waiting requests are applied before acknowledgements
// get a turn.
const drainBound = 256

// acksBound is how many acknowledgements of a far journal wait without holding it
// up; a journal has fewer frames on their way.
const acksBound = 64

// leaseLook is how often a lapsed lease is looked at while answers wait for it.
const leaseLook = 50 * time.Millisecond

// Runner drives a Machine in production: one goroutine applies; the next batch is
// built while the last ones are on their way. A near journal is appended to on a
// second goroutine, a far one has its own. Safe for concurrent use.
type Runner struct {
	m    *Machine
	near Near // one of near and far is nil
	far  Far
	in   chan request
	log  chan logWork // of near
	acks chan error
	room chan struct{} // of far: more may be sent
	wake chan struct{}
	done chan struct{}
	stop chan struct{}

	onLog atomic.Int32 // functions that have the journal or wait for it

	stopped atomic.Bool
	senders atomic.Int32 // calls that may be putting into in

	onLost  func(error)
	clock   env.Clock
	armed   env.Timer // owner: loop
	armedUs int64     // owner: loop
}

type request struct {
	proposal Proposal
	do       func(*Machine)
}

type logWork struct {
	frame journal.Frame
	do    func() // instead of a frame
}

// Start runs m. onLost is called once when the ownership is lost, on the
// runner's goroutine.
func Start(m *Machine, onLost func(error)) *Runner {
	r := &Runner{
		m: m, in: make(chan request, QueueBound), log: make(chan logWork, 4), acks: make(chan error, acksBound),
		room: make(chan struct{}, 1), wake: make(chan struct{}, 1), done: make(chan struct{}), stop: make(chan struct{}),
		onLost: onLost, clock: m.cfg.Env.Clock,
	}
	r.near, _ = m.cfg.Log.(Near)
	if r.near == nil {
		r.far = m.cfg.Log.(Far) //nolint:errcheck // a Journal is one of both
		r.far.OnRoom(func() { poke(r.room) })
	}
	go r.append()
	go r.loop()
	return r
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Submit proposes; it never blocks. An error means the command was not taken
// and Reply will not be called.
func (r *Runner) Submit(p Proposal) error { return r.try(request{proposal: p}) }

// SubmitWait proposes and waits for room in the queue.
func (r *Runner) SubmitWait(ctx context.Context, p Proposal) error {
	return r.put(ctx, request{proposal: p})
}

// Read gives a copy of a flow (nil when there is none), linearizable.
func (r *Runner) Read(ctx context.Context, flowID string) (*wire.Flow, error) {
	type answer struct {
		f   *wire.Flow
		err error
	}
	ch := make(chan answer, 1)
	err := r.put(ctx, request{do: func(m *Machine) {
		m.Read(flowID, func(f *wire.Flow, err error) { ch <- answer{f, err} })
	}})
	if err != nil {
		return nil, err
	}
	select {
	case a := <-ch:
		return a.f, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// View calls extract with a flow (nil when there is none) on the partition's
// goroutine, and done when what it saw is durable; see Machine.View. Neither may
// block. An error means that neither will be called.
func (r *Runner) View(flowID string, extract func(*wire.Flow), done func(error)) error {
	return r.try(request{do: func(m *Machine) { m.View(flowID, extract, done) }})
}

// Call proposes a command and waits for its outcome.
func (r *Runner) Call(ctx context.Context, e *wire.Entry) (core.Reply, error) {
	type answer struct {
		rep core.Reply
		err error
	}
	ch := make(chan answer, 1)
	err := r.Submit(Proposal{Entry: e, Reply: func(rep core.Reply, err error) { ch <- answer{rep, err} }})
	if err != nil {
		return core.Reply{}, err
	}
	select {
	case a := <-ch:
		return a.rep, a.err
	case <-ctx.Done():
		return core.Reply{}, context.Cause(ctx)
	}
}

// Do runs fn on the partition's goroutine, between commits, and waits for it.
// Everything published before is in the tables then.
func (r *Runner) Do(ctx context.Context, fn func(*Machine)) error {
	ran := make(chan struct{})
	if err := r.put(ctx, request{do: func(m *Machine) { fn(m); close(ran) }}); err != nil {
		return err
	}
	select {
	case <-ran:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// OnLog runs fn where a near journal is appended to, between two appends, and
// waits for it.
func (r *Runner) OnLog(ctx context.Context, fn func()) error {
	ran := make(chan struct{})
	if err := r.put(ctx, request{do: func(*Machine) {
		r.onLog.Add(1)
		r.log <- logWork{do: func() { fn(); close(ran) }}
	}}); err != nil {
		return err
	}
	select {
	case <-ran:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *Runner) try(q request) error {
	r.senders.Add(1)
	defer r.senders.Add(-1)
	if r.stopped.Load() {
		return ErrStopped
	}
	select {
	case r.in <- q:
		return nil
	default:
		return ErrOverloaded
	}
}

func (r *Runner) put(ctx context.Context, q request) error {
	r.senders.Add(1)
	defer r.senders.Add(-1)
	if r.stopped.Load() {
		return ErrStopped
	}
	select {
	case r.in <- q:
		return nil
	default:
	}
	select {
	case r.in <- q:
		return nil
	case <-r.stop:
		return ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Tables gives the partition's tables, for reads that may lag behind what is
// committed by one batch (see Do).
func (r *Runner) Tables() *state.DB { return r.m.cfg.Tables }

// Err says why the ownership ended, nil when it did not. Only after Stop.
func (r *Runner) Err() error { return r.m.Err() }

// Waiting counts the requests in the queue.
func (r *Runner) Waiting() int { return len(r.in) }

// Stop commits what was proposed before, refuses what comes after, and ends
// the runner. The tables and the journal stay open.
func (r *Runner) Stop() {
	if !r.stopped.Swap(true) {
		close(r.stop)
	}
	<-r.done
}

func (r *Runner) append() {
	for w := range r.log {
		if w.do != nil {
			w.do()
			r.onLog.Add(-1)
			continue
		}
		r.acks <- r.near.Append(w.frame)
	}
	close(r.done)
}

func (r *Runner) loop() {
	defer close(r.log)
	sweepEvery := max(time.Duration(r.m.cfg.IdleUs)*time.Microsecond/4, 100*time.Millisecond)
	sweepUs := r.m.now() + sweepEvery.Microseconds()
	lost := false
	for {
		r.seal()
		if r.m.Err() != nil && !lost {
			lost = true
			r.onLost(r.m.Err())
		}
		in := r.in
		if r.m.Full() && r.m.InFlight() >= r.m.cfg.Log.MaxInFlight() {
			in = nil
		}
		r.arm(sweepUs)
		select {
		case q := <-in:
			r.take(q)
		case err := <-r.acks:
			r.ack(err)
		case <-r.room: // seal
		case <-r.wake:
			r.armed = nil
			r.m.Revalidate()
			r.m.Tick()
			if now := r.m.now(); now >= sweepUs {
				r.m.PageOut()
				sweepUs = now + sweepEvery.Microseconds()
			}
		case <-r.stop:
			r.finish()
			return
		}
	}
}

// take applies a request and those that wait behind it.
func (r *Runner) take(q request) {
	r.run(q)
	for range drainBound {
		if r.m.Full() {
			return
		}
		select {
		case q := <-r.in:
			r.run(q)
		default:
			return
		}
	}
}

func (r *Runner) run(q request) {
	if q.do != nil {
		q.do(r.m)
		return
	}
	r.m.Propose(q.proposal)
}

// seal sends batches while the journal takes more.
func (r *Runner) seal() {
	for r.m.InFlight() < r.m.cfg.Log.MaxInFlight() {
		f, ok := r.m.Seal()
		if !ok {
			return
		}
		switch {
		case r.far != nil:
			r.far.Begin(f, func(err error) { r.acks <- err })
		case len(r.in) == 0 && r.onLog.Load() == 0 && !r.m.Hurried():
			// Nobody waits to be applied: appending here saves two hand-overs
			// between threads. Whoever comes meanwhile is applied after the
			// sync, as it would be committed after it anyway.
			r.ack(r.near.Append(f))
		default:
			r.log <- logWork{frame: f}
		}
	}
}

func (r *Runner) ack(err error) {
	if err != nil {
		r.m.Fail(err)
		return
	}
	r.m.Committed()
}

// arm wakes the loop at the next timer or sweep.
func (r *Runner) arm(sweepUs int64) {
	at := sweepUs
	if t, ok := r.m.NextTimer(); ok && t < at {
		at = t
	}
	if r.m.Held() {
		at = min(at, r.m.now()+leaseLook.Microseconds())
	}
	if r.armed != nil {
		if r.armedUs <= at {
			return
		}
		r.armed.Stop()
	}
	d := time.Duration(at-r.m.now()) * time.Microsecond
	r.armedUs = at
	r.armed = r.clock.AfterFunc(max(d, 0), func() { poke(r.wake) })
}

// finish applies what is in the queue, with what is being put there still, and
// commits.
func (r *Runner) finish() {
	if r.armed != nil {
		r.armed.Stop()
	}
	for {
		last := r.senders.Load() == 0 // looked at before the queue: nothing comes after
		select {
		case q := <-r.in:
			r.run(q)
			continue
		default:
		}
		if !last {
			runtime.Gosched() // they are between two instructions, or see that the runner stops
			continue
		}
		r.seal()
		if r.m.InFlight() == 0 && !r.m.Building() || r.m.Err() != nil {
			r.m.Revalidate()
			r.m.dropHeld(ErrLapsed)
			return
		}
		select {
		case err := <-r.acks:
			r.ack(err)
		case <-r.room:
		}
	}
}
