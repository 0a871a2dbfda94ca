package flows

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

const tenant = "t"

// clock is a clock that stands still until it is moved.
type clock struct {
	mu     sync.Mutex
	now    time.Time
	timers []*timer
}

type timer struct {
	c  *clock
	at time.Time
	f  func()
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &timer{c: c, at: c.now.Add(d), f: f}
	if d <= 0 {
		go f()
		return t
	}
	c.timers = append(c.timers, t)
	return t
}

func (t *timer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	i := slices.Index(t.c.timers, t)
	if i >= 0 {
		t.c.timers = slices.Delete(t.c.timers, i, i+1)
	}
	return i >= 0
}

// advance moves the clock and fires what is due, one after the other.
func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []*timer
	c.timers = slices.DeleteFunc(c.timers, func(t *timer) bool {
		if t.at.After(c.now) {
			return false
		}
		due = append(due, t)
		return true
	})
	c.mu.Unlock()
	for _, t := range due {
		t.f()
	}
}

// world is the verbs over two partitions in memory. Steps are handed to the
// test, which says how each ends; RPCs run the handlers that it set.
type world struct {
	t         testing.TB
	ctx       context.Context
	clock     *clock
	hub       *stream.Hub
	svc       *Service
	set       partition.Set
	store     blob.Store
	steps     chan *partition.Work
	losing    atomic.Bool        // partitions are lost on purpose
	cancelled chan *wire.RpcTask // calls that were cancelled
	slots     func(want int) int

	mu      sync.Mutex
	types   map[string]*wire.FlowType                                    // guarded by mu
	rpcs    map[string]func(*wire.RpcTask, func(*wire.RpcResult, error)) // guarded by mu
	queued  []core.Effect                                                // guarded by mu
	closers []func() error
}

var orderType = &wire.FlowType{
	Name:  "order",
	Steps: []*wire.StepType{{Name: "pay"}, {Name: "ship"}, {Name: "approve", WaitFor: true}},
	Rpcs:  []*wire.RpcType{{Name: "total"}, {Name: "add", Locked: true}, {Name: "look", Locked: true}},
	Attributes: []*wire.AttributeType{
		{Name: "total", Type: "int", Index: wire.Attribute_INT}, {Name: "note", Type: "string"}, {Name: "tags", Type: "json", Index: wire.Attribute_KEYWORD},
		{Name: "at", Type: "time", Index: wire.Attribute_TIME}, {Name: "ratio", Type: "float", Index: wire.Attribute_FLOAT}, {Name: "paid", Type: "bool", Index: wire.Attribute_BOOL},
		{Name: "line.*", Type: "json"}, {Name: "raw", Type: "bytes"}, {Name: "doc", Type: "json"},
	},
	Channels: []string{"in", "pay", "item.*"},
}

func (w *world) Reserve(_, _ string, want int) int {
	if w.slots != nil {
		return w.slots(want)
	}
	return want
}
func (w *world) Release(_, _ string, _ int)           {}
func (w *world) Dispatch(k *partition.Work)           { w.steps <- k }
func (w *world) Commit(*partition.Work)               {}
func (w *world) Done(_, _ string, _ uint64, _ string) {}
func (w *world) Abort()                               {}

func (w *world) Cancel(string, uint64, core.Attempt, string, bool) {}

func (w *world) Queue(q core.Effect) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queued = append(w.queued, q)
}

func (w *world) Publish(flowID string, events []*wire.Event) {
	w.hub.Publish(flowID, events)
	w.svc.Publish(flowID, events)
}

func (w *world) Call(flowID, flowType string, t *wire.RpcTask, _ time.Duration, done func(*wire.RpcResult, error)) {
	w.mu.Lock()
	h := w.rpcs[t.Name]
	w.mu.Unlock()
	if h == nil {
		done(nil, fmt.Errorf("no worker"))
		return
	}
	go h(t, done)
}

func (w *world) CancelCall(_ string, t *wire.RpcTask) { w.cancelled <- t }

func (w *world) KnownType(_, flowType string) (*wire.FlowType, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t, ok := w.types[flowType]
	return t, ok
}

func (w *world) Queues(string) []*wire.Queue { return []*wire.Queue{{FlowType: "order", Queued: 3}} }

func (w *world) Workers(string) []*wire.WorkerInfo {
	return []*wire.WorkerInfo{{WorkerId: "w1", FlowTypes: []string{"order"}}}
}

func (w *world) RunningOn(string, uint64) string { return "w1" }

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{
		t: t, hub: stream.NewHub(), clock: &clock{now: time.UnixMilli(1_700_000_000_000)}, store: mem.New(mem.Options{}),
		steps: make(chan *partition.Work, 1000), cancelled: make(chan *wire.RpcTask, 1000), types: map[string]*wire.FlowType{"order": orderType},
		rpcs: map[string]func(*wire.RpcTask, func(*wire.RpcResult, error)){},
	}
	var cancel context.CancelFunc
	w.ctx, cancel = context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	real := env.Real()
	real.FS = vfs.NewMem()
	own := real
	own.Clock = w.clock
	w.svc = New(Config{Hub: w.hub, Env: own, Workers: w, Blobs: w.store})
	courier := partition.NewCourier(real.Clock)
	var machines []*partition.Machine
	for i := range 2 {
		db, err := state.Open(fmt.Sprintf("tables-%d", i), state.Options{FS: real.FS, Manual: true})
		if err != nil {
			t.Fatal(err)
		}
		log, err := journal.Open(real.FS, fmt.Sprintf("journal-%d", i), journal.Options{Rand: real.Rand})
		if err != nil {
			t.Fatal(err)
		}
		m, _, err := partition.Open(partition.Config{ID: i, Epoch: 1, Env: real, Tables: db, Log: log, Executor: w, Observer: w, Outbox: courier})
		if err != nil {
			t.Fatal(err)
		}
		machines = append(machines, m)
		w.closers = append(w.closers, log.Close, db.Close)
	}
	for _, m := range machines {
		w.set = append(w.set, partition.Start(m, func(err error) {
			if !w.losing.Load() {
				t.Errorf("partition lost: %v", err)
			}
		}))
	}
	w.svc.Bind(w.set)
	courier.Bind(w.set)
	t.Cleanup(w.close)
	return w
}

func (w *world) close() {
	for _, r := range w.set {
		r.Stop()
	}
	for _, c := range w.closers {
		if err := c(); err != nil {
			w.t.Error(err)
		}
	}
	w.closers = nil
}

// begin makes a call; its answers come through the channel.
func (w *world) begin(ctx context.Context, c *wire.Call) chan *wire.Answer {
	ch := make(chan *wire.Answer, 100)
	c.Id = 7
	var over atomic.Bool
	w.svc.Do(ctx, tenant, c, func(a *wire.Answer) {
		if a.Id != 7 {
			w.t.Errorf("answer has the ID %d", a.Id)
		}
		if over.Load() || !a.More && over.Swap(true) {
			w.t.Errorf("%T: an answer behind the last one: %v", c.Verb, a)
		}
		ch <- a
	})
	return ch
}

func (w *world) next(ch chan *wire.Answer) *wire.Answer {
	w.t.Helper()
	select {
	case a := <-ch:
		return a
	case <-w.ctx.Done():
		w.t.Fatal("no answer")
		return nil
	}
}

// do makes a call and gives its one answer.
func (w *world) do(c *wire.Call) *wire.Answer {
	w.t.Helper()
	return w.next(w.begin(w.ctx, c))
}

// must makes a call that succeeds.
func (w *world) must(c *wire.Call) *wire.Answer {
	w.t.Helper()
	a := w.do(c)
	if a.Error != nil {
		w.t.Fatalf("%T: %v", c.Verb, a.Error)
	}
	return a
}

// refused makes a call that fails with a code.
func (w *world) refused(code core.Code, c *wire.Call) *wire.Error {
	w.t.Helper()
	a := w.do(c)
	if a.Error.GetCode() != string(code) {
		w.t.Errorf("%T: got %v, want %s", c.Verb, a, code)
		return &wire.Error{}
	}
	if a.Error.Message == "" || a.Error.Hint == "" {
		w.t.Errorf("%s has no message or no hint: %v", code, a.Error)
	}
	return a.Error
}

func start(req *wire.StartRequest) *wire.Call { return &wire.Call{Verb: &wire.Call_Start{Start: req}} }

// order starts a flow whose first step is handed to the test.
func (w *world) order(id string) *wire.StartReply {
	w.t.Helper()
	return w.must(start(&wire.StartRequest{FlowId: id, FlowType: "order", Step: "pay"})).GetStart()
}

// step takes the next step that was handed out.
func (w *world) step(name string) *partition.Work {
	w.t.Helper()
	select {
	case k := <-w.steps:
		if k.Name != name {
			w.t.Fatalf("step %q was handed out, want %q", k.Name, name)
		}
		return k
	case <-w.ctx.Done():
		w.t.Fatalf("step %q was not handed out", name)
		return nil
	}
}

// result ends a step.
func (w *world) result(k *partition.Work, r *wire.StepResult) {
	w.t.Helper()
	r.Exec, r.Attempt = k.Exec, k.Attempt.Wire()
	if _, err := w.set.For(k.FlowID).Call(w.ctx, &wire.Entry{FlowId: k.FlowID, Command: &wire.Entry_StepResult{StepResult: r}}); err != nil {
		w.t.Fatal(err)
	}
}

func complete(output string) *wire.StepResult {
	return &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte(output)}}
}

// rpc sets the handler of an RPC; what it returns is the result.
func (w *world) rpc(name string, h func(*wire.RpcTask) *wire.RpcResult) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rpcs[name] = func(t *wire.RpcTask, done func(*wire.RpcResult, error)) { done(h(t), nil) }
}

func attr(name, value string) *wire.Attribute {
	return &wire.Attribute{Name: name, Value: []byte(value)}
}

func value(t testing.TB, as []*wire.Attribute, name string) string {
	t.Helper()
	i := slices.IndexFunc(as, func(a *wire.Attribute) bool { return a.Name == name })
	if i < 0 {
		return ""
	}
	return string(as[i].Value)
}
