package worker

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
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

// world is a pool on one real partition in memory, with a handler of functions.
type world struct {
	t    *testing.T
	hub  *stream.Hub
	pool *Pool
	r    *partition.Runner
	ctx  context.Context

	run  func(ctx context.Context, call *Call) *wire.StepResult
	fail func(w *partition.Work, err error) *wire.StepResult

	mu      sync.Mutex
	waiting map[string]chan *wire.Event // guarded by mu; by event type
}

func (w *world) Run(ctx context.Context, call *Call) *wire.StepResult { return w.run(ctx, call) }
func (w *world) Fail(work *partition.Work, err error) *wire.StepResult {
	return w.fail(work, err)
}

// Publish implements partition.Observer.
func (w *world) Publish(flow string, evs []*wire.Event) {
	w.hub.Publish(flow, evs)
	for _, ev := range evs {
		w.heard(ev.Type) <- ev
	}
}

func (w *world) heard(typ string) chan *wire.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting[typ] == nil {
		w.waiting[typ] = make(chan *wire.Event, 1000)
	}
	return w.waiting[typ]
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

// newWorld makes a world; run is its handler. bind says whether results have a
// place to go from the start.
func newWorld(t *testing.T, bind bool, run func(ctx context.Context, call *Call) *wire.StepResult) *world {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, hub: stream.NewHub(), ctx: ctx, run: run, waiting: map[string]chan *wire.Event{}}
	w.fail = func(_ *partition.Work, err error) *wire.StepResult { return say("failed", err.Error()) }
	w.pool = New(w.hub, w, slog.New(slog.NewTextHandler(io.Discard, nil)))
	e := env.Real()
	e.FS = vfs.NewMem()
	db, err := state.Open("tables", state.Options{FS: e.FS, Manual: true})
	if err != nil {
		t.Fatal(err)
	}
	log, err := journal.Open(e.FS, "journal", journal.Options{Rand: e.Rand})
	if err != nil {
		t.Fatal(err)
	}
	m, _, err := partition.Open(partition.Config{Epoch: 1, Env: e, Tables: db, Log: log, Executor: w.pool, Observer: w})
	if err != nil {
		t.Fatal(err)
	}
	w.r = partition.Start(m, func(err error) { t.Errorf("partition lost: %v", err) })
	if bind {
		w.pool.Bind(partition.Set{w.r})
	}
	t.Cleanup(func() {
		w.pool.Stop()
		w.r.Stop()
		_ = log.Close()
		_ = db.Close()
	})
	return w
}

// say is a result that leaves one event.
func say(typ, data string) *wire.StepResult {
	return &wire.StepResult{Events: []*wire.NewEvent{{Type: typ, Data: []byte(data)}}}
}

// start makes a flow whose only step begins at once.
func (w *world) start(id string, prefetch bool) {
	w.t.Helper()
	w.submit(startEntry(id, prefetch))
}

func startEntry(id string, prefetch bool) *wire.Entry {
	return &wire.Entry{FlowId: id, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t",
		Steps: []*wire.StepSpec{{Name: "step", Prefetch: prefetch, Retry: &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 1}}}}}}
}

func (w *world) cancel(id, reason string) {
	w.t.Helper()
	w.submit(&wire.Entry{FlowId: id, Command: &wire.Entry_Cancel{Cancel: &wire.Cancel{Reason: reason}}})
}

// submit proposes without waiting for the commit.
func (w *world) submit(e *wire.Entry) {
	w.t.Helper()
	err := w.r.Submit(partition.Proposal{Entry: e, Reply: func(_ core.Reply, err error) {
		if err != nil {
			w.t.Errorf("%T: %v", e.Command, err)
		}
	}})
	if err != nil {
		w.t.Fatal(err)
	}
}

// holdCommits keeps the journal from committing until the function it gives is
// called.
func (w *world) holdCommits() (release func()) {
	w.t.Helper()
	held, hold := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- w.r.OnLog(w.ctx, func() { close(held); <-hold })
	}()
	<-held
	return func() {
		close(hold)
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
}

// applied waits until what was submitted before has been applied.
func (w *world) applied() {
	w.t.Helper()
	if err := w.r.Do(w.ctx, func(*partition.Machine) {}); err != nil {
		w.t.Fatal(err)
	}
}

// frames reads up to an event of a type and gives all, one word each.
func frames(ctx context.Context, sub *stream.Sub, until string) (words []string, err error) {
	for {
		fs, err := sub.Next(ctx)
		if err != nil {
			return words, err
		}
		for _, f := range fs {
			if f.Delta != nil {
				words = append(words, fmt.Sprintf("%d+%s", f.Delta.Offset, f.Delta.Text))
				continue
			}
			words = append(words, f.Item.Event.Type)
			if f.Item.Event.Type == until {
				return words, nil
			}
		}
	}
}
