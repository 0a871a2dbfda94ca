package schedule

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// fakeClock moves only when it is told to.
type fakeClock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*fakeTimer]bool
}

type fakeTimer struct {
	c *fakeClock
	f func()
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) AfterFunc(_ time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &fakeTimer{c, f}
	c.timers[t] = true
	return t
}

func (t *fakeTimer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	was := t.c.timers[t]
	delete(t.c.timers, t)
	return was
}

// fire calls all timers, due or not: who is woken early looks at the clock.
func (c *fakeClock) fire() {
	c.mu.Lock()
	timers := c.timers
	c.timers = map[*fakeTimer]bool{}
	c.mu.Unlock()
	for t := range timers {
		t.f()
	}
}

// world is schedules on real partitions in memory, with one flow type "job"
// whose step "run" is over when the test says so.
type world struct {
	t     *testing.T
	ctx   context.Context
	clock *fakeClock
	fs    []*vfs.MemFS
	epoch uint64
	s     *Schedules
	set   partition.Set
	stop  func()

	mu      sync.Mutex
	heard   map[string]int           // guarded by mu; flow and event type
	changed chan struct{}            // guarded by mu; closed at the next event
	finish  map[string]chan struct{} // guarded by mu; by flow
	refuse  error                    // guarded by mu; of the Starter
}

const partitions = 3

func newWorld(t *testing.T) *world {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, clock: &fakeClock{now: time.UnixMicro(noon), timers: map[*fakeTimer]bool{}},
		heard: map[string]int{}, changed: make(chan struct{}), finish: map[string]chan struct{}{}}
	for range partitions {
		w.fs = append(w.fs, vfs.NewMem())
	}
	w.open()
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// Run implements worker.Handler for all types.
func (w *world) Run(ctx context.Context, call *worker.Call) *wire.StepResult {
	if call.FlowType == Type {
		res := w.s.Run(ctx, call)
		res.Events = append(res.Events, &wire.NewEvent{Type: "turned"}) // tells until
		return res
	}
	select {
	case <-w.over(call.FlowID):
		return &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL}}
	case <-ctx.Done():
		return &wire.StepResult{}
	}
}

func (w *world) Fail(work *partition.Work, err error) *wire.StepResult {
	w.t.Logf("%s %s: %v", work.FlowID, work.Name, err)
	return w.s.Fail(work, err)
}

// over is closed when the flow may end.
func (w *world) over(flow string) chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.finish[flow] == nil {
		w.finish[flow] = make(chan struct{})
	}
	return w.finish[flow]
}

func (w *world) end(id string) { close(w.over("acme/f/" + id)) }

// Publish implements partition.Observer.
func (w *world) Publish(flow string, evs []*wire.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ev := range evs {
		w.heard[flow+" "+ev.Type]++
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// until waits until cond holds; it is asked after each event.
func (w *world) until(what string, cond func() bool) {
	w.t.Helper()
	for {
		w.mu.Lock()
		changed := w.changed
		w.mu.Unlock()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-w.ctx.Done():
			w.t.Fatalf("never: %s", what)
		}
	}
}

// await waits for the nth event of a type of a flow.
func (w *world) await(flow, typ string, n int) {
	w.t.Helper()
	w.until(flow+" "+typ, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.heard[flow+" "+typ] >= n
	})
}

func (w *world) count(flow, typ string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.heard[flow+" "+typ]
}

func (w *world) start(tenant string, req *wire.StartRequest) (string, *wire.StartFlow, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuse != nil {
		return "", nil, w.refuse
	}
	if req.FlowType != "job" {
		return "", nil, &core.Error{Code: "unknown_type", Message: "flow type " + req.FlowType + " is not known"}
	}
	return req.FlowId, &wire.StartFlow{
		Type: req.FlowType, Closes: true, Attributes: req.Attributes, Reuse: req.Reuse,
		Steps: []*wire.StepSpec{{Name: req.Step, Input: req.Input}},
	}, nil
}

// open starts a server on what is there.
func (w *world) open() {
	w.epoch++
	w.s = New(Config{Clock: w.clock, Starter: w.start})
	pool := worker.New(stream.NewHub(), w, slog.New(slog.NewTextHandler(io.Discard, nil)))
	courier := partition.NewCourier(w.clock)
	w.set = nil
	var closers []func()
	for id, fs := range w.fs {
		e := env.Real()
		e.FS, e.Clock = fs, w.clock
		db, err := state.Open("tables", state.Options{FS: fs, Manual: true})
		w.must(err)
		log, err := journal.Open(fs, "journal", journal.Options{Rand: e.Rand})
		w.must(err)
		m, _, err := partition.Open(partition.Config{ID: id, Epoch: w.epoch, Env: e, Tables: db, Log: log, Executor: pool, Observer: w, Outbox: courier})
		w.must(err)
		r := partition.Start(m, func(err error) { w.t.Errorf("partition lost: %v", err) })
		w.set = append(w.set, r)
		closers = append(closers, func() {
			r.Stop()
			_ = log.Close()
			_ = db.Close()
		})
	}
	w.s.Bind(w.set)
	pool.Bind(w.set)
	courier.Bind(w.set)
	w.stop = func() {
		pool.Stop()
		for _, c := range closers {
			c()
		}
	}
}

// advance moves the clock and lets every partition look at it.
func (w *world) advance(d time.Duration) {
	w.t.Helper()
	w.clock.mu.Lock()
	w.clock.now = w.clock.now.Add(d)
	w.clock.mu.Unlock()
	w.clock.fire()
	for _, r := range w.set {
		w.must(r.Do(w.ctx, func(*partition.Machine) {}))
	}
	w.clock.fire() // of those that were being set meanwhile
}

func (w *world) do(c *wire.Call) (*wire.Answer, error) { return w.s.Do(w.ctx, "acme", c) }

func (w *world) ok(c *wire.Call) *wire.Answer {
	w.t.Helper()
	a, err := w.do(c)
	w.must(err)
	if a.Error != nil {
		w.t.Fatal(a.Error)
	}
	return a
}

func put(s *wire.Schedule, create bool) *wire.Call {
	return &wire.Call{Verb: &wire.Call_PutSchedule{PutSchedule: &wire.PutScheduleRequest{Schedule: s, Create: create}}}
}

func ask(id string) *wire.ScheduleRequest { return &wire.ScheduleRequest{Id: id} }

func get(id string) *wire.Call { return &wire.Call{Verb: &wire.Call_GetSchedule{GetSchedule: ask(id)}} }

func pause(id string, resume bool) *wire.Call {
	return &wire.Call{Verb: &wire.Call_PauseSchedule{PauseSchedule: &wire.PauseScheduleRequest{Id: id, Resume: resume, Note: "note"}}}
}

func trigger(id string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_TriggerSchedule{TriggerSchedule: ask(id)}}
}

func backfill(id string, from, to int64) *wire.Call {
	return &wire.Call{Verb: &wire.Call_BackfillSchedule{BackfillSchedule: &wire.BackfillRequest{Id: id, FromUs: from, ToUs: to}}}
}

func remove(id string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_DeleteSchedule{DeleteSchedule: ask(id)}}
}

// job is a schedule that starts a flow each minute.
func job(id string, overlap wire.Schedule_Overlap) *wire.Schedule {
	return &wire.Schedule{Id: id, Cron: "* * * * *", Overlap: overlap, Start: &wire.StartRequest{FlowType: "job", Step: "run", Input: []byte(`{"n":1}`)}}
}

// flow is the ID of the flow of an instant.
func flow(id string, sec int64) string {
	return id + "-" + strings.ReplaceAll(time.UnixMicro(at(sec)).UTC().Format("20060102T150405Z"), " ", "")
}
