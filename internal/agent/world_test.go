package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// handClock moves only when told to.
type handClock struct {
	mu     sync.Mutex
	now    time.Time    // guarded by mu
	timers []*handTimer // guarded by mu
}

type handTimer struct {
	clock *handClock
	at    time.Time
	f     func() // nil once fired or stopped; guarded by clock.mu
}

func (c *handClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &handTimer{clock: c, at: c.now.Add(d), f: f}
	if d <= 0 {
		t.f = nil
		go f()
		return t
	}
	c.timers = append(c.timers, t)
	return t
}

func (t *handTimer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	was := t.f != nil
	t.f = nil
	return was
}

func (c *handClock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []func()
	for _, t := range c.timers {
		if t.f != nil && !t.at.After(c.now) {
			due = append(due, t.f)
			t.f = nil
		}
	}
	c.mu.Unlock()
	for _, f := range due {
		f()
	}
}

// generate is one scripted model call; n counts them from 1.
type generate func(ctx context.Context, n int, req model.Request, sink model.Sink) (model.Result, error)

// world is the agent's handler on one real partition in memory, with a
// scripted model and a real HTTP server for the tools.
type world struct {
	t        *testing.T
	ctx      context.Context
	clock    *handClock
	registry *Registry
	provider *Provider
	pool     *worker.Pool
	hub      *stream.Hub
	r        *partition.Runner
	script   generate
	calls    atomic.Int32
	tools    http.HandlerFunc

	mu      sync.Mutex
	waiting map[string]chan *wire.Event // guarded by mu; by event type
}

func (w *world) Generate(ctx context.Context, req model.Request, sink model.Sink) (model.Result, error) {
	return w.script(ctx, int(w.calls.Add(1)), req, sink)
}
func (w *world) Check(context.Context) error { return nil }
func (w *world) Close()                      {}

func (w *world) heard(typ string) chan *wire.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting[typ] == nil {
		w.waiting[typ] = make(chan *wire.Event, 1000)
	}
	return w.waiting[typ]
}

// Publish implements partition.Observer.
func (w *world) Publish(flow string, evs []*wire.Event) {
	w.hub.Publish(flow, evs)
	for _, ev := range evs {
		w.heard(ev.Type) <- ev
	}
}

// await waits for the next event of a type.
func (w *world) await(typ string) *wire.Event {
	w.t.Helper()
	select {
	case ev := <-w.heard(typ):
		return ev
	case <-w.ctx.Done():
		w.t.Fatalf("no event %q", typ)
		return nil
	}
}

const turnTimeout = time.Minute

func newWorld(t *testing.T, limiter *model.Limiter, script generate) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, clock: &handClock{now: time.UnixMicro(1_000_000_000)}, hub: stream.NewHub(), script: script, waiting: map[string]chan *wire.Event{}}
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.tools(rw, r) }))
	t.Cleanup(server.Close)
	client, err := tool.NewClient(tool.Options{Clock: env.SystemClock{}, Dialer: &net.Dialer{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	if limiter == nil {
		limiter = model.NewLimiter(0, 0)
	}
	w.provider = &Provider{Provider: w, Name: "p", Model: "m", Limiter: limiter,
		Retry: &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 1_000_000, MaxUs: 10_000_000}}
	def := tool.Definition{Name: "look", Parameters: tool.Schema(`{"type":"object","properties":{"at":{"type":"string"}},"required":["at"]}`),
		HTTP: tool.HTTP{URL: server.URL + "/look", AllowPrivate: true}}
	w.registry = NewRegistry(map[string]*Provider{"p": w.provider}, map[string]tool.Definition{"look": def}, client)
	a, err := w.registry.Compile(Definition{Name: "a", Provider: "p", Instructions: "be brief", Tools: []ToolRef{{Name: "look"}}}, false)
	if err != nil {
		t.Fatal(err)
	}
	w.registry.Set("tenant", a)
	w.partition(&Handler{Registry: w.registry, Limits: Limits{MaxToolRounds: 3, MaxToolCalls: 4, TurnTimeout: turnTimeout}, Clock: w.clock})
	return w
}

func (w *world) partition(h *Handler) {
	e := env.Real()
	e.FS, e.Clock = vfs.NewMem(), w.clock
	db, err := state.Open("tables", state.Options{FS: e.FS, Manual: true})
	if err != nil {
		w.t.Fatal(err)
	}
	log, err := journal.Open(e.FS, "journal", journal.Options{Rand: e.Rand})
	if err != nil {
		w.t.Fatal(err)
	}
	w.pool = worker.New(w.hub, h, slog.New(slog.NewTextHandler(io.Discard, nil)))
	m, _, err := partition.Open(partition.Config{Epoch: 1, Env: e, Tables: db, Log: log, Executor: w.pool, Observer: w})
	if err != nil {
		w.t.Fatal(err)
	}
	w.r = partition.Start(m, func(err error) { w.t.Errorf("partition lost: %v", err) })
	w.pool.Bind(partition.Set{w.r})
	w.t.Cleanup(func() {
		w.pool.Stop()
		w.r.Stop()
		_ = log.Close()
		_ = db.Close()
	})
}

func (w *world) call(e *wire.Entry) core.Reply {
	w.t.Helper()
	rep, err := w.r.Call(w.ctx, e)
	if err != nil {
		w.t.Fatalf("%T: %v", e.Command, err)
	}
	return rep
}

// session makes a session of agent a and gives its flow's ID.
func (w *world) session(name string) string {
	w.t.Helper()
	a, err := w.registry.Get("tenant", "a")
	if err != nil {
		w.t.Fatal(err)
	}
	flow := "tenant/s/" + name
	w.call(&wire.Entry{FlowId: flow, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: FlowType, Steps: []*wire.StepSpec{a.FirstStep()},
		Attributes: []*wire.Attribute{{Name: AttributeAgent, Value: []byte("a")}}}}})
	return flow
}

func userMessage(text string) string { return fmt.Sprintf(`{"role":"user","content":%q}`, text) }

// say begins a turn, or enqueues or interrupts with one.
func (w *world) say(flow, text string, busy wire.Publish_OnBusy) {
	w.t.Helper()
	w.call(&wire.Entry{FlowId: flow, Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: Input, Payload: []byte(userMessage(text)), OnBusy: busy}}})
}

func (w *world) cancel(flow, reason string) {
	w.t.Helper()
	w.call(&wire.Entry{FlowId: flow, Command: &wire.Entry_Cancel{Cancel: &wire.Cancel{Channel: Input, Reason: reason}}})
}

// conversation gives the messages of a session, one a line.
func (w *world) conversation(flow string) string {
	w.t.Helper()
	if err := w.r.Do(w.ctx, func(*partition.Machine) {}); err != nil {
		w.t.Fatal(err)
	}
	var lines []string
	if err := w.r.Tables().Events(flow, 0, 0, 0, func(ev *wire.Event) error {
		for _, it := range ev.Items {
			lines = append(lines, string(it))
		}
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// pass lets time go by, once the partition has set its timers.
func (w *world) pass(d time.Duration) {
	w.t.Helper()
	if err := w.r.Do(w.ctx, func(*partition.Machine) {}); err != nil {
		w.t.Fatal(err)
	}
	w.clock.advance(d)
}

// atRest checks that the session waits for its next turn and nothing else.
func (w *world) atRest(flow string) {
	w.t.Helper()
	f, err := w.r.Read(w.ctx, flow)
	if err != nil {
		w.t.Fatal(err)
	}
	if core.IsBusy(f) || len(f.Steps) != 1 || len(f.Channels) != 0 {
		w.t.Fatalf("session is not at rest: %v %v", f.Steps, f.Channels)
	}
}

// failure reads the code of a turn.failed.
func failure(t *testing.T, data []byte) Failure {
	t.Helper()
	var d struct{ Error Failure }
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return d.Error
}

// wantLines compares text by lines that hold these words, in order.
func wantLines(t *testing.T, text string, words ...string) {
	t.Helper()
	lines := strings.Split(text, "\n")
	if len(lines) != len(words) {
		t.Fatalf("%d messages, want %d:\n%s", len(lines), len(words), text)
	}
	for i, w := range words {
		if !strings.Contains(lines[i], w) {
			t.Errorf("message %d is\n%s\nwant %s", i, lines[i], w)
		}
	}
}

// speak sends text to the sink and gives it as an answer.
func speak(sink model.Sink, pieces ...string) (model.Result, error) {
	res := model.Result{FinishReason: "stop", Usage: model.Usage{Prompt: 10, Completion: 2}}
	for _, p := range pieces {
		res.Shown = true
		if err := sink.Delta([]byte(p)); err != nil {
			return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeSink, Message: err.Error()}
		}
		res.Text += p
	}
	return res, nil
}

// ask is an answer with tool calls: pairs of name and arguments.
func ask(calls ...string) (model.Result, error) {
	res := model.Result{FinishReason: "tool_calls", Usage: model.Usage{Prompt: 5, Completion: 1}}
	for i := 0; i < len(calls); i += 2 {
		res.ToolCalls = append(res.ToolCalls, model.ToolCall{ID: fmt.Sprintf("call_%d", i/2), Name: calls[i], Arguments: calls[i+1]})
	}
	return res, nil
}

// until waits for the end of a call's context, as a provider does.
func until(ctx context.Context, res model.Result) (model.Result, error) {
	<-ctx.Done()
	return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeCancelled, Message: "the call was cancelled"}
}
