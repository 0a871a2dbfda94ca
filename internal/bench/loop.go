package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of a loop.
const (
	// maxClients bounds the operations in flight, in either kind of loop.
	maxClients = 16_384
	// hopeless is how many operations may fail in a row, all clients together,
	// before a loop gives up.
	hopeless = 2_000
	// failurePause is what a client waits after a failure, so that a server that
	// refuses at once is not asked in a tight loop.
	failurePause = 5 * time.Millisecond
	// leastTick is how often an open loop looks for what is due. What is due in
	// between starts late; since latency counts from the intended start, that
	// is in the figures, and Result.Lag says how much it is.
	leastTick = 500 * time.Microsecond
	// drainTime bounds the wait for operations in flight at the end.
	drainTime = 30 * time.Second
)

// Op does one operation as client number client, 0 to Clients-1. No two run at
// once with the same number. from is when it was to start: now, or earlier in an
// open loop. It ends at the returned instant, or when it returns if that is zero.
type Op func(ctx context.Context, client int, from time.Time) (end time.Time, err error)

// Loop puts a load on something.
//
// A closed loop (Rate 0) keeps Clients operations in flight: each client starts
// its next one when the last has ended. What ends in the window counts. An open
// loop starts operations at a steady rate whatever becomes of the earlier ones,
// with at most Clients in flight; the latency of an operation counts from when it
// was to start, and what was to start in the window counts.
type Loop struct {
	Clients int
	Rate    float64 // units a second; 0 = a closed loop
	Units   int     // units of one operation: its steps, for one; 0 = 1
	// WindowBegin and WindowEnd, if set, are called just before the window and
	// just after it, under load: what is read there is of a steady state. The load
	// goes on until WindowEnd returns.
	WindowBegin, WindowEnd func()
	// Progress, if set, is called about once a second.
	Progress func(Progress)
	Warmup   time.Duration
	Duration time.Duration
	Op       Op
}

// Progress is how far a loop is.
type Progress struct {
	Warm    bool // the window has begun
	Elapsed time.Duration
	Units   uint64 // of the last second
	Errors  uint64
}

// Result is what a loop measured in its window.
type Result struct {
	Units   uint64        // operations × Loop.Units
	Elapsed time.Duration // of the window
	Latency *Hist         // of a unit: the operation's time ÷ its units
	Lag     *Hist         // open loop: how late operations were started
	Errors  uint64        // from the first operation to the last, warm-up too
	First   error         // the first of them
	Late    uint64        // open loop: due in the window, and never started
}

// PerSecond is units a second.
func (r *Result) PerSecond() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Units) / r.Elapsed.Seconds()
}

// run is a loop under way.
type run struct {
	*Loop
	ctx       context.Context
	stop      context.CancelFunc
	start     time.Time
	begin     time.Time // of the window; read when phase has left warming
	end       time.Time // read when phase is cooling or over
	phase     atomic.Int32
	failures  atomic.Int64 // in a row
	units     atomic.Uint64
	total     atomic.Uint64 // with those of the warm-up
	errors    atomic.Uint64
	firstOnce sync.Once
	first     error
	latency   Hist
	lag       Hist
	late      atomic.Uint64
}

// Phases of a loop. The load is on in all but the last.
const (
	warming int32 = iota
	measuring
	cooling
	over
)

// Run measures until the window is over and every operation has ended. The
// error is about the loop; failed operations are in the result.
func (l *Loop) Run(ctx context.Context) (*Result, error) {
	if l.Clients < 1 || l.Clients > maxClients {
		return nil, fmt.Errorf("%d clients: want 1 to %d", l.Clients, maxClients)
	}
	if l.Rate < 0 || l.Duration <= 0 || l.Warmup < 0 || l.Op == nil {
		return nil, errors.New("a loop needs an operation, a duration, and no negative rate or warm-up")
	}
	l.Units = max(l.Units, 1)
	opCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{Loop: l, ctx: opCtx, stop: cancel, start: time.Now()}
	var clients sync.WaitGroup
	if l.Rate > 0 {
		r.open(&clients)
	} else {
		for c := range l.Clients {
			clients.Go(func() { r.closed(c) })
		}
	}
	elapsed := r.window()
	ended := make(chan struct{})
	go func() { clients.Wait(); close(ended) }()
	drain := time.NewTimer(drainTime)
	defer drain.Stop()
	select {
	case <-ended:
	case <-drain.C:
		cancel()
		<-ended
	}
	res := &Result{Units: r.units.Load(), Elapsed: elapsed, Latency: &r.latency, Lag: &r.lag, Errors: r.errors.Load(), First: r.first, Late: r.late.Load()}
	if err := ctx.Err(); err != nil {
		return res, err
	}
	if r.failures.Load() >= hopeless {
		return res, fmt.Errorf("%d operations failed in a row, the first of all with: %w", r.failures.Load(), r.first)
	}
	if res.Units == 0 {
		return res, fmt.Errorf("no operation ended in the window of %v (%d failed, the first with: %v)", l.Duration, res.Errors, r.first)
	}
	return res, nil
}

// window passes the phases and returns how long the window was.
func (r *run) window() time.Duration {
	r.pass(r.start.Add(r.Warmup), false)
	if r.WindowBegin != nil {
		r.WindowBegin()
	}
	begin := time.Now()
	r.begin = begin
	r.phase.Store(measuring)
	r.pass(begin.Add(r.Duration), true)
	r.end = time.Now()
	r.phase.Store(cooling)
	if r.WindowEnd != nil {
		r.WindowEnd()
	}
	r.phase.Store(over)
	return r.end.Sub(begin)
}

// pass waits until an instant, or the loop's end, and tells how it goes.
func (r *run) pass(until time.Time, warm bool) {
	last := r.total.Load()
	for r.ctx.Err() == nil {
		left := time.Until(until)
		if left <= 0 {
			return
		}
		t := time.NewTimer(min(left, time.Second))
		select {
		case <-t.C:
		case <-r.ctx.Done():
			t.Stop()
		}
		if now := r.total.Load(); r.Progress != nil && left > time.Second {
			r.Progress(Progress{Warm: warm, Elapsed: time.Since(r.start), Units: now - last, Errors: r.errors.Load()})
			last = now
		}
	}
}

// closed is one client of a closed loop.
func (r *run) closed(client int) {
	for r.phase.Load() != over && r.ctx.Err() == nil {
		begin := time.Now()
		end, ok := r.do(client, begin)
		if ok && r.phase.Load() == measuring {
			r.record(begin, end)
		}
	}
}

// do runs one operation and keeps account of failures.
func (r *run) do(client int, from time.Time) (end time.Time, ok bool) {
	end, err := r.Op(r.ctx, client, from)
	if end.IsZero() {
		end = time.Now()
	}
	if err == nil {
		if r.failures.Load() != 0 {
			r.failures.Store(0)
		}
		r.total.Add(uint64(r.Units))
		return end, true
	}
	if r.ctx.Err() != nil {
		return end, false // the end of the loop, not a failure
	}
	r.errors.Add(1)
	r.firstOnce.Do(func() { r.first = err })
	if r.failures.Add(1) >= hopeless {
		r.stop()
	}
	t := time.NewTimer(failurePause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.ctx.Done():
	}
	return end, false
}

func (r *run) record(begin, end time.Time) {
	r.units.Add(uint64(r.Units))
	r.latency.Record(end.Sub(begin) / time.Duration(r.Units))
}

// open starts the clients of an open loop and the pacer that feeds them.
func (r *run) open(clients *sync.WaitGroup) {
	due := make(chan time.Time, 1) // what waits, waits in the schedule
	for c := range r.Clients {
		clients.Go(func() {
			for intended := range due {
				counts := r.counts(intended)
				if counts {
					r.lag.Record(time.Since(intended))
				}
				if end, ok := r.do(c, intended); ok && counts {
					r.record(intended, end)
				}
			}
		})
	}
	clients.Go(func() { defer close(due); r.pace(due) })
}

// counts says whether an instant, which has come, lies in the window.
func (r *run) counts(intended time.Time) bool {
	switch r.phase.Load() {
	case warming:
		return false
	case measuring:
		return !intended.Before(r.begin)
	}
	return !intended.Before(r.begin) && intended.Before(r.end)
}

// pace hands out the instants of the schedule as they come, until the loop is
// over. It falls behind when all clients are busy; the schedule does not.
func (r *run) pace(due chan<- time.Time) {
	gap := float64(time.Second) * float64(r.Units) / r.Rate
	tick := time.NewTicker(max(leastTick, time.Duration(gap)))
	defer tick.Stop()
	for n := uint64(0); ; {
		next := r.start.Add(time.Duration(float64(n) * gap))
		if r.phase.Load() == over {
			r.late.Store(uint64(max(float64(r.end.Sub(next))/gap, 0)))
			return
		}
		if time.Until(next) > 0 {
			select {
			case <-tick.C:
				continue
			case <-r.ctx.Done():
				return
			}
		}
		select {
		case due <- next:
			n++
		case <-r.ctx.Done():
			return
		}
	}
}
