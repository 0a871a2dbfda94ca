package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

const tenant = "t"

// world is the verbs over two partitions in memory, with a scripted model: it
// says what the user said, "hold" waits to be released or cancelled, "fail"
// fails.
type world struct {
	t    *testing.T
	ctx  context.Context
	env  env.Env
	gate *admit.Gate
	hub  *stream.Hub
	reg  *agent.Registry
	svc  *Service
	set  partition.Set

	held    chan struct{} // a message for each call that waits
	release chan struct{}

	mu      sync.Mutex
	ended   map[string]int              // guarded by mu; outcomes told to the hook
	waiting map[string]chan *wire.Event // guarded by mu; by public name
	close   func()
}

func (w *world) Check(context.Context) error { return nil }
func (w *world) Close()                      {}

func (w *world) Generate(ctx context.Context, req model.Request, sink model.Sink) (model.Result, error) {
	var m struct{ Content any }
	if err := json.Unmarshal(req.Messages[len(req.Messages)-1], &m); err != nil {
		return model.Result{}, &model.Error{Kind: model.KindPermanent, Code: model.CodeInvalidRequest, Message: err.Error()}
	}
	text := fmt.Sprint(m.Content)
	if text == "fail" {
		return model.Result{}, &model.Error{Kind: model.KindPermanent, Code: model.CodeInvalidRequest, Message: "no"}
	}
	res := model.Result{FinishReason: "stop", Shown: true}
	for _, piece := range strings.SplitAfter(text, " ") {
		res.Text += piece
		if err := sink.Delta([]byte(piece)); err != nil {
			return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeSink, Message: err.Error()}
		}
	}
	if strings.HasPrefix(text, "hold") {
		w.held <- struct{}{}
		select {
		case <-w.release:
		case <-ctx.Done():
			return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeCancelled, Message: "cancelled"}
		}
		res.Text += " on"
		_ = sink.Delta([]byte(" on"))
	}
	return res, nil
}

func newWorld(t *testing.T, limit int) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, env: env.Real(), held: make(chan struct{}, 100), release: make(chan struct{}, 100)}
	w.env.FS = vfs.NewMem()
	w.open(limit)
	t.Cleanup(func() { w.close() })
	return w
}

// open starts a process on the world's disk.
func (w *world) open(limit int) {
	w.t.Helper()
	w.ended, w.waiting = map[string]int{}, map[string]chan *wire.Event{}
	w.gate, w.hub, w.set = admit.NewGate(limit), stream.NewHub(), nil
	w.reg = agent.NewRegistry(map[string]*agent.Provider{"p": {Provider: w, Name: "p", Model: "m", Limiter: model.NewLimiter(0, 0)}}, nil, nil)
	if err := w.reg.AddConfig(agent.Definition{Name: "a", Provider: "p"}); err != nil {
		w.t.Fatal(err)
	}
	w.svc = New(Config{Agents: w.reg, Hub: w.hub, Gate: w.gate, Env: w.env, MaxQueued: 2, StatelessKeep: time.Hour, Hooks: Hooks{
		TurnEnded: func(_, outcome string, took time.Duration) {
			w.mu.Lock()
			w.ended[outcome]++
			w.mu.Unlock()
		},
		Events: func(_ string, evs []*wire.Event) {
			for _, ev := range evs {
				w.heard(nameOf(ev)) <- ev
			}
		},
	}})
	pool := worker.New(w.hub, &agent.Handler{Registry: w.reg, Limits: agent.Limits{MaxToolRounds: 2, MaxToolCalls: 2, TurnTimeout: time.Minute}, Clock: w.env.Clock},
		slog.New(slog.NewTextHandler(io.Discard, nil)))
	var closers []func() error
	var machines []*partition.Machine
	for i := range 2 {
		db, err := state.Open(fmt.Sprintf("tables-%d", i), state.Options{FS: w.env.FS, Manual: true})
		if err != nil {
			w.t.Fatal(err)
		}
		log, err := journal.Open(w.env.FS, fmt.Sprintf("journal-%d", i), journal.Options{Rand: w.env.Rand})
		if err != nil {
			w.t.Fatal(err)
		}
		m, _, err := partition.Open(partition.Config{ID: i, Epoch: 1, Env: w.env, Tables: db, Log: log, Executor: pool, Observer: w.svc})
		if err != nil {
			w.t.Fatal(err)
		}
		if err := db.OpenFlows(func(f *wire.Flow) error { w.svc.Recover(f); return nil }); err != nil {
			w.t.Fatal(err)
		}
		machines = append(machines, m)
		closers = append(closers, log.Close, db.Close)
	}
	for _, m := range machines {
		w.set = append(w.set, partition.Start(m, func(err error) { w.t.Errorf("partition lost: %v", err) }))
	}
	w.svc.Bind(w.set)
	pool.Bind(w.set)
	w.close = func() {
		pool.Stop()
		for _, r := range w.set {
			r.Stop()
		}
		for _, c := range closers {
			if err := c(); err != nil {
				w.t.Error(err)
			}
		}
	}
}

// restart ends the process and starts another one on its disk.
func (w *world) restart(limit int) {
	w.t.Helper()
	w.close()
	w.open(limit)
}

func (w *world) heard(name string) chan *wire.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting[name] == nil {
		w.waiting[name] = make(chan *wire.Event, 10_000)
	}
	return w.waiting[name]
}

// await waits for the next event of a public name; the gate has been told then.
func (w *world) await(name string) *wire.Event {
	w.t.Helper()
	select {
	case ev := <-w.heard(name):
		return ev
	case <-w.ctx.Done():
		w.t.Fatalf("no event %q", name)
		return nil
	}
}

// awaitHeld waits until a model call holds.
func (w *world) awaitHeld() {
	w.t.Helper()
	select {
	case <-w.held:
	case <-w.ctx.Done():
		w.t.Fatal("no model call waits")
	}
}

func (w *world) create(id string) {
	w.t.Helper()
	if _, err := w.svc.Create(w.ctx, tenant, CreateRequest{ID: id, Agent: "a"}); err != nil {
		w.t.Fatal(err)
	}
}

func turnRequest(text string, busy wire.Publish_OnBusy) TurnRequest {
	return TurnRequest{Content: json.RawMessage(fmt.Sprintf("%q", text)), OnBusy: busy}
}

// start begins a turn that must be accepted.
func (w *world) start(id, text string, busy wire.Publish_OnBusy) *Watcher {
	w.t.Helper()
	watch, err := w.svc.StartTurn(w.ctx, tenant, id, turnRequest(text, busy))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(watch.Close)
	return watch
}

// rest reads a watcher to its end and gives the events' names; text is what a
// client shows that follows the deltas and completes each message.
func (w *world) rest(watch *Watcher) (names []string, text string) {
	w.t.Helper()
	for {
		evs, err := watch.Next(w.ctx)
		if errors.Is(err, ErrEnded) {
			return names, text
		}
		if err != nil {
			w.t.Fatalf("after %q: %v", names, err)
		}
		for _, e := range evs {
			if d := e.Delta; d != nil {
				if d.Offset > len(text) {
					w.t.Errorf("delta at %d after %d bytes", d.Offset, len(text))
				}
				text = text[:min(d.Offset, len(text))] + d.Text
				if len(names) == 0 || names[len(names)-1] != EventDelta {
					names = append(names, EventDelta)
				}
				continue
			}
			names = append(names, e.Name)
			if e.Name == agent.EventMessage {
				var m struct{ Content string }
				if err := json.Unmarshal(e.Durable.Items[0], &m); err != nil || !strings.HasPrefix(m.Content, text) {
					w.t.Errorf("deltas %q of the message %s", text, e.Durable.Items[0])
				}
				text = m.Content
			}
		}
	}
}

// settled checks that nothing is in flight by any count.
func (w *world) settled(outcomes map[string]int) {
	w.t.Helper()
	if n, s := w.svc.OpenTurns(), w.gate.Stats(); n != 0 || s.InFlight != 0 {
		w.t.Errorf("%d turns open, %d tickets out", n, s.InFlight)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if fmt.Sprint(w.ended) != fmt.Sprint(outcomes) {
		w.t.Errorf("turns ended %v, want %v", w.ended, outcomes)
	}
}

func code(err error) core.Code {
	var ce *core.Error
	if errors.As(err, &ce) {
		return ce.Code
	}
	return ""
}
