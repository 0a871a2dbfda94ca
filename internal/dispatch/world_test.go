package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// world is a dispatcher on one real partition in memory, on one goroutine and a
// clock that is set by hand: what happens is the same each time.
type world struct {
	t     testing.TB
	clock *handClock
	rand  counter
	hub   *stream.Hub
	d     *Dispatcher
	m     *partition.Machine
	log   *journal.Log
	db    *state.DB

	queue      []partition.Proposal
	room       int  // of the queue; 0 = unbounded
	hold       bool // commits wait
	overloaded int
	events     []string // type and step of each
	entries    map[string]int
	outcomes   []string // by the hooks
}

type counter struct{ n atomic.Uint64 }

func (c *counter) Uint64() uint64 { return c.n.Add(0x9e3779b97f4a7c15) }

// handClock fires its timers when it is moved on.
type handClock struct {
	us     int64
	timers []*handTimer
}

type handTimer struct {
	c  *handClock
	us int64
	f  func()
}

func (c *handClock) Now() time.Time { return time.UnixMicro(c.us) }

func (c *handClock) AfterFunc(d time.Duration, f func()) env.Timer {
	t := &handTimer{c, c.us + d.Microseconds(), f}
	c.timers = append(c.timers, t)
	return t
}

func (t *handTimer) Stop() bool {
	i := slices.Index(t.c.timers, t)
	if i < 0 {
		return false
	}
	t.c.timers = slices.Delete(t.c.timers, i, i+1)
	return true
}

// fire moves the clock to the next timer up to an instant, and runs it.
func (c *handClock) fire(untilUs int64) bool {
	var next *handTimer
	for _, t := range c.timers {
		if t.us <= untilUs && (next == nil || t.us < next.us) {
			next = t
		}
	}
	if next == nil {
		c.us = max(c.us, untilUs)
		return false
	}
	next.Stop()
	c.us = max(c.us, next.us)
	next.f()
	return true
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, clock: &handClock{us: 1_000_000}, hub: stream.NewHub(), entries: map[string]int{}}
	w.d = New(Config{Clock: w.clock, Hub: w.hub, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Hooks: Hooks{
		Attempt: func(flowType, step, outcome string, took, queued time.Duration) {
			w.outcomes = append(w.outcomes, fmt.Sprintf("%s.%s %s %v %v", flowType, step, outcome, took, queued))
		},
		RPC: func(flowType, name, outcome string, took time.Duration) {
			w.outcomes = append(w.outcomes, fmt.Sprintf("%s.%s %s %v", flowType, name, outcome, took))
		},
	}})
	fs := vfs.NewMem()
	var err error
	if w.db, err = state.Open("tables", state.Options{FS: fs, Manual: true}); err != nil {
		t.Fatal(err)
	}
	if w.log, err = journal.Open(fs, "journal", journal.Options{SegmentSize: 64 << 10}); err != nil {
		t.Fatal(err)
	}
	if w.m, _, err = partition.Open(partition.Config{Epoch: 1, Nonce: 1, Tables: w.db, Log: w.log, Executor: w.d, Observer: w,
		Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: fs}}); err != nil {
		t.Fatal(err)
	}
	w.d.Bind(w)
	t.Cleanup(func() {
		if err := errors.Join(w.m.Err(), w.db.Close(), w.log.Close()); err != nil {
			t.Error(err)
		}
	})
	return w
}

// Publish implements partition.Observer.
func (w *world) Publish(flow string, evs []*wire.Event) {
	w.hub.Publish(flow, evs)
	for _, ev := range evs {
		w.events = append(w.events, strings.TrimSuffix(ev.Type+" "+ev.Step, " "))
	}
}

// Submit implements Proposer.
func (w *world) Submit(_ string, p partition.Proposal) error {
	if w.room > 0 && len(w.queue) >= w.room {
		w.overloaded++
		return partition.ErrOverloaded
	}
	w.queue = append(w.queue, p)
	return nil
}

// SubmitWait implements Proposer.
func (w *world) SubmitWait(_ context.Context, _ string, p partition.Proposal) error {
	w.queue = append(w.queue, p)
	return nil
}

// settle applies and commits until nothing is left to do now.
func (w *world) settle() {
	w.t.Helper()
	for range 1_000_000 {
		for len(w.queue) > 0 {
			p := w.queue[0]
			w.queue = w.queue[1:]
			w.entries[strings.TrimPrefix(fmt.Sprintf("%T", p.Entry.Command), "*wire.Entry_")]++
			w.m.Propose(p)
		}
		if w.hold || !w.commit() && len(w.queue) == 0 {
			return
		}
	}
	w.t.Fatal("it never ends")
}

func (w *world) commit() bool {
	f, ok := w.m.Seal()
	if !ok {
		return false
	}
	if err := w.log.Append(f); err != nil {
		w.t.Fatal(err)
	}
	w.m.Committed()
	return true
}

// pass lets time go by.
func (w *world) pass(d time.Duration) {
	w.t.Helper()
	until := w.clock.us + d.Microseconds()
	for {
		more := w.clock.fire(until)
		w.m.Tick()
		w.settle()
		if !more {
			return
		}
	}
}

// fullID is where a flow lives: of tenant "a" unless it says another.
func fullID(id string) string {
	if tenant, rest, ok := strings.Cut(id, ":"); ok {
		return tenant + "/f/" + rest
	}
	return "a/f/" + id
}

// start begins a flow of type "t" with the given first steps.
func (w *world) start(id string, steps ...*wire.StepSpec) {
	w.t.Helper()
	w.startWith(id, &wire.StartFlow{Type: "t", Steps: steps, Closes: true})
}

func (w *world) startWith(id string, c *wire.StartFlow) {
	w.t.Helper()
	w.do(&wire.Entry{FlowId: fullID(id), Command: &wire.Entry_StartFlow{StartFlow: c}})
}

// do proposes a command, which must be accepted.
func (w *world) do(e *wire.Entry) {
	w.t.Helper()
	_ = w.SubmitWait(context.Background(), "", partition.Proposal{Entry: e, Reply: func(_ core.Reply, err error) {
		if err != nil {
			w.t.Errorf("%T: %v", e.Command, err)
		}
	}})
	w.settle()
}

func (w *world) flow(id string) *wire.Flow {
	w.t.Helper()
	var f *wire.Flow
	w.m.Read(fullID(id), func(g *wire.Flow, err error) {
		if err != nil {
			w.t.Fatal(err)
		}
		f = g
	})
	return f
}

func step(name string) *wire.StepSpec { return &wire.StepSpec{Name: name} }

// fake is a worker's side of a stream.
type fake struct {
	w       *world
	worker  *Worker
	welcome *wire.Welcome
	tasks   []*wire.Task
	rpcs    []*wire.RpcTask
	cancels []*wire.CancelTask
	refused []*wire.Refusal
	drain   bool
	closed  bool
	err     error
	full    error // of each Put that weighs something
}

// Put implements Outlet.
func (f *fake) Put(weight int, fn func(*wire.ServerFrame)) error {
	if f.full != nil && weight > 0 {
		return f.full
	}
	var m wire.ServerFrame
	fn(&m)
	if m.Welcome != nil {
		f.welcome = m.Welcome
	}
	f.tasks = append(f.tasks, m.Tasks...)
	f.rpcs = append(f.rpcs, m.Rpcs...)
	f.cancels = append(f.cancels, m.Cancels...)
	f.refused = append(f.refused, m.Refusals...)
	f.drain = f.drain || m.Drain
	return nil
}

// Close implements Outlet.
func (f *fake) Close(err error) {
	if !f.closed {
		f.closed, f.err = true, err
	}
}

// typeT is a flow type "t" with steps s, u and v, and the RPCs read and lock.
func typeT() *wire.FlowType {
	return &wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "s"}, {Name: "u"}, {Name: "v"}},
		Rpcs: []*wire.RpcType{{Name: "read"}, {Name: "lock", Locked: true}}}
}

// connect brings a worker of tenant "a" with credits for tasks; "x:w" is one of
// tenant x.
func (w *world) connect(id string, credits uint32, types ...*wire.FlowType) *fake {
	w.t.Helper()
	tenant, name, ok := strings.Cut(id, ":")
	if !ok {
		tenant, name = "a", id
	}
	if len(types) == 0 {
		types = []*wire.FlowType{typeT()}
	}
	f := &fake{w: w}
	var err error
	f.worker, err = w.d.Connect(tenant, "here", &wire.Hello{Protocol: 1, WorkerId: name, FlowTypes: types}, f)
	if err != nil {
		w.t.Fatal(err)
	}
	f.frame(&wire.WorkerFrame{TaskCredits: credits})
	return f
}

// frame sends one, which must be taken.
func (f *fake) frame(m *wire.WorkerFrame) {
	f.w.t.Helper()
	if err := f.worker.Frame(m); err != nil {
		f.w.t.Fatal(err)
	}
	f.w.settle()
}

// leave ends the stream.
func (f *fake) leave(reason string) {
	f.w.t.Helper()
	f.worker.Leave(errors.New(reason))
	f.w.settle()
}

// take gives the only task that came.
func (f *fake) take() *wire.Task {
	f.w.t.Helper()
	if len(f.tasks) != 1 {
		f.w.t.Fatalf("worker %s has %d tasks, want one", f.worker.id, len(f.tasks))
	}
	t := f.tasks[0]
	f.tasks = nil
	return t
}

// names gives flow and step of each task that came since.
func (f *fake) names() string {
	var out []string
	for _, t := range f.tasks {
		out = append(out, t.FlowId+"."+t.Step)
	}
	f.tasks = nil
	return strings.Join(out, " ")
}

// answer gives a task's result, and a credit for the next task. Without a next
// step the flow is complete.
func (f *fake) answer(t *wire.Task, next ...*wire.StepSpec) {
	f.w.t.Helper()
	r := &wire.StepResult{Next: next}
	if len(next) == 0 {
		r.Close = &wire.Close{How: wire.Close_GRACEFUL}
	}
	f.result(t, r)
}

func (f *fake) result(t *wire.Task, r *wire.StepResult) {
	f.w.t.Helper()
	f.frame(&wire.WorkerFrame{TaskCredits: 1, Results: []*wire.TaskResult{resultOf(t, r)}})
}

func resultOf(t *wire.Task, r *wire.StepResult) *wire.TaskResult {
	r.Exec, r.Attempt = t.Exec, t.Attempt
	return &wire.TaskResult{FlowId: t.FlowId, Result: r}
}

// idle checks that nothing is left over: no slot, no hold, no record.
func (w *world) idle() {
	w.t.Helper()
	for _, t := range w.d.tenants.Load().all {
		if len(t.runs) > 0 || len(t.queued) > 0 || t.marked != 0 || len(t.calls) > 0 || len(t.dues) > 0 || len(t.hungry) > 0 || t.startable.Load() != 0 {
			w.t.Errorf("tenant %s: %d runs, %d queued, %d marked, %d calls, %d dues, %d hungry, %d startable", t.name, len(t.runs), len(t.queued), t.marked, len(t.calls), len(t.dues), len(t.hungry), t.startable.Load())
		}
		for _, l := range t.lanes {
			held := 0
			for _, k := range l.links.all {
				held += k.reserved
			}
			if held+l.orphaned+l.arriving+l.running+l.owed.n+l.calls.n+l.nReady+l.arrivals.n+l.parked.n+len(l.keys)+len(l.held.all) != 0 {
				w.t.Errorf("lane %s: %d held, %d orphaned, %d arriving, %d running, %d owed, %d calls, %d ready, %d arrivals, %d parked, %d keys", l.name,
					held, l.orphaned, l.arriving, l.running, l.owed.n, l.calls.n, l.nReady, l.arrivals.n, l.parked.n, len(l.keys))
			}
		}
	}
	if w.d.sched.inFlight != 0 {
		w.t.Errorf("%d proposals in flight", w.d.sched.inFlight)
	}
}

func wantText(t testing.TB, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// proposed is a Proposer that only tells what it was given.
type proposed func(flow string)

// Submit implements Proposer.
func (p proposed) Submit(flow string, _ partition.Proposal) error { p(flow); return nil }

// SubmitWait implements Proposer.
func (p proposed) SubmitWait(_ context.Context, flow string, _ partition.Proposal) error {
	p(flow)
	return nil
}

// canceled is a context with which Next gives only what is there.
func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func proposal(e *wire.Entry) partition.Proposal { return partition.Proposal{Entry: e} }
