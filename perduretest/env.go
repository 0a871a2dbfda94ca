package perduretest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/flows"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/search"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	tenant = "test"
	never  = 60 * 365 * 24 * time.Hour // longer than any test's time; what is due then is housekeeping

	// Concurrency is how many steps, and how many RPCs besides, run at once.
	Concurrency = 256

	patience     = 30 * time.Second       // of real time, for one handler
	busyPatience = 100 * time.Millisecond // of real time, before Advance moves on beside a running handler
)

// Epoch is what the clock of a new Env shows.
var Epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// Env is an engine with the handlers of some flows. Its methods are for the
// test's goroutine; a handler must not call them.
type Env struct {
	t      testing.TB // nil: failures panic
	clock  *clock
	rt     *flow.Runtime
	set    partition.Set
	svc    *flows.Service
	d      *dispatch.Dispatcher
	w      *worker
	closed bool
	ends   []func() error

	ctx    context.Context
	cancel context.CancelFunc

	moves atomic.Uint64 // whatever happens counts
	lost  atomic.Pointer[error]

	mu    sync.Mutex
	busy  int               // guarded by mu; frames and handlers under way
	idle  chan struct{}     // guarded by mu; closed when busy gets 0; nil = nobody waits
	shown map[string]string // guarded by mu; what steps put out, by flow
}

// New makes an Env that ends with the test.
func New(t testing.TB, fs ...*flow.Flow) *Env {
	t.Helper()
	e := &Env{t: t}
	e.open(fs)
	t.Cleanup(e.Close)
	return e
}

// Open makes an Env outside of a test, for an Example, say: what would make a
// test fail panics. Close it.
func Open(fs ...*flow.Flow) *Env {
	e := &Env{}
	e.open(fs)
	return e
}

func (e *Env) fatal(format string, args ...any) {
	if e.t == nil {
		panic("perduretest: " + fmt.Sprintf(format, args...))
	}
	e.t.Helper()
	e.t.Fatalf(format, args...)
}

func (e *Env) helper() {
	if e.t != nil {
		e.t.Helper()
	}
}

// counter is randomness that is the same each time.
type counter struct{ n atomic.Uint64 }

func (c *counter) Uint64() uint64 { return c.n.Add(0x9e3779b97f4a7c15) }

func (e *Env) open(fs []*flow.Flow) {
	e.helper()
	e.clock = &clock{now: Epoch}
	e.shown = map[string]string{}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	var err error
	if e.rt, err = flow.NewRuntime(fs...); err != nil {
		e.fatal("%v", err)
	}
	world := env.Env{Clock: e.clock, Rand: &counter{}, FS: vfs.NewMem()}
	hub := stream.NewHub()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	e.d = dispatch.New(dispatch.Config{Clock: e.clock, Hub: hub, Log: log, Heartbeat: never / 3, Server: "perduretest",
		Check: func(tenant, flowType string, r *wire.StepResult) error { return e.svc.CheckResult(tenant, flowType, r) }})
	e.svc = flows.New(flows.Config{Hub: hub, Env: world, Workers: e.d, Searcher: finder{e}, Blobs: mem.New(mem.Options{}), Retention: never})
	courier := partition.NewCourier(e.clock)
	if err := e.openPartition(world, hub, courier); err != nil {
		e.fatal("the engine does not start: %v", err)
	}
	e.svc.Bind(e.set)
	courier.Bind(e.set)
	e.d.Bind(dispatch.Partitions(e.set))
	e.connect()
}

func (e *Env) openPartition(world env.Env, hub *stream.Hub, courier *partition.Courier) error {
	tables, err := state.Open("tables", state.Options{FS: world.FS, Manual: true})
	if err != nil {
		return err
	}
	e.ends = append(e.ends, tables.Close)
	log, err := journal.Open(world.FS, "journal", journal.Options{Rand: world.Rand})
	if err != nil {
		return err
	}
	e.ends = append(e.ends, log.Close)
	m, _, err := partition.Open(partition.Config{Epoch: 1, Nonce: 1, Env: world, Tables: tables, Log: log,
		Executor: e.d, Observer: observer{e, hub}, Outbox: outbox{e, courier}, IdleUs: 4 * never.Microseconds()})
	if err != nil {
		return err
	}
	e.set = partition.Set{partition.Start(m, func(err error) { e.lost.Store(&err) })}
	return nil
}

// Close ends the engine. Handlers that still run are told to stop. An Env made
// by New closes itself.
func (e *Env) Close() {
	if e.closed {
		return
	}
	e.closed = true
	e.cancel()
	e.d.Stop()
	for _, r := range e.set {
		r.Stop()
	}
	e.svc.Close()
	e.w.stop()
	var errs []error
	for i := len(e.ends) - 1; i >= 0; i-- {
		errs = append(errs, e.ends[i]())
	}
	if err := errors.Join(errs...); err != nil && e.t != nil {
		e.t.Errorf("the engine does not close: %v", err)
	}
}

// observer passes committed events on.
type observer struct {
	e   *Env
	hub *stream.Hub
}

// Publish implements partition.Observer.
func (o observer) Publish(flowID string, events []*wire.Event) {
	o.e.moves.Add(1)
	o.hub.Publish(flowID, events)
	o.e.svc.Publish(flowID, events)
}

// outbox counts what is sent.
type outbox struct {
	e *Env
	c *partition.Courier
}

// Send implements partition.Outbox.
func (o outbox) Send(flowID string, out *wire.Outgoing) {
	o.e.moves.Add(1)
	o.c.Send(flowID, out)
}

// finder searches once there are partitions.
type finder struct{ e *Env }

// Search implements flows.Searcher.
func (f finder) Search(ctx context.Context, tenant string, q *wire.SearchRequest) (*wire.SearchReply, error) {
	reply, err := search.New(f.e.set, f.e.clock).Search(ctx, tenant, q)
	if bad, ok := errors.AsType[*query.Error](err); ok {
		return nil, &flows.Error{Code: flows.Invalid, Message: bad.Message + " " + bad.Hint, Position: int32(bad.Pos)}
	}
	return reply, err
}

// begin and done count what is under way.
func (e *Env) begin() {
	e.moves.Add(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.busy++
}

func (e *Env) done() {
	e.moves.Add(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.busy--; e.busy == 0 && e.idle != nil {
		close(e.idle)
		e.idle = nil
	}
}

// rest waits, in real time, until nothing is under way in handlers.
func (e *Env) rest(patience time.Duration) bool {
	e.mu.Lock()
	if e.busy == 0 {
		e.mu.Unlock()
		return true
	}
	if e.idle == nil {
		e.idle = make(chan struct{})
	}
	idle := e.idle
	e.mu.Unlock()
	late := make(chan struct{})
	t := env.SystemClock{}.AfterFunc(patience, func() { close(late) })
	defer t.Stop()
	select {
	case <-idle:
		return true
	case <-late:
		return false
	}
}

// settle lets everything happen that happens without the clock being moved. It
// says whether handlers still ran after patience.
func (e *Env) settle(patience time.Duration) (idle bool) {
	e.helper()
	idle = true
	for quiet := 0; quiet < 2; {
		before := e.moves.Load()
		for e.clock.fire() {
			e.moves.Add(1)
		}
		if idle {
			idle = e.rest(patience)
		}
		atRest := false
		if err := e.set[0].Do(e.ctx, func(m *partition.Machine) { atRest = e.atRest(m) }); err != nil {
			e.fatal("the engine has stopped: %v", err)
		}
		if err := e.lost.Load(); err != nil {
			e.fatal("the engine has failed: %v", *err)
		}
		if quiet++; !atRest || e.moves.Load() != before {
			quiet = 0
		}
	}
	return idle
}

// atRest says that all that was proposed is committed, and no timer is due.
func (e *Env) atRest(m *partition.Machine) bool {
	at, ok := m.NextTimer()
	return m.CommittedLSN() == m.Stats().Entries && !(ok && at <= e.clock.Now().UnixMicro())
}

// Settle lets everything happen that happens without the clock being moved: it
// returns when all flows wait for something, or have ended.
func (e *Env) Settle() {
	e.helper()
	if !e.settle(patience) {
		e.fatal("a handler still runs after %v", patience)
	}
}

// Now is the time of the clock.
func (e *Env) Now() time.Time { return e.clock.Now() }

// Advance moves the clock on; the timers that come due fire one after the
// other, each at its own time, and what follows from one happens before the
// next. A handler that runs for long does not hold it up.
func (e *Env) Advance(d time.Duration) {
	e.helper()
	to := e.clock.Now().Add(d)
	for {
		e.settle(busyPatience)
		at, ok := e.clock.next()
		if !ok || at.After(to) {
			break
		}
		e.clock.set(at)
	}
	e.clock.set(to)
	e.settle(busyPatience)
}

// skip moves the clock to the next timer; false when there is none.
func (e *Env) skip() bool {
	at, ok := e.clock.next()
	if !ok || at.Sub(e.clock.Now()) > never/2 {
		return false
	}
	e.clock.set(at)
	return true
}
