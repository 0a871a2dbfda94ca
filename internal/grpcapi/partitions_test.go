package grpcapi

import (
	"context"
	"fmt"
	"math/rand"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// closed counts the flows that closed, by status.
type closed struct {
	mu   sync.Mutex
	n    map[string]int // guarded by mu
	left int            // guarded by mu
	all  chan struct{}
}

// Publish implements partition.Observer.
func (c *closed) Publish(_ string, evs []*wire.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ev := range evs {
		switch ev.Type {
		case "flow.completed", "flow.failed":
			c.n[ev.Type]++
			if c.left--; c.left == 0 {
				close(c.all)
			}
		}
	}
}

// openPartitions runs partitions in memory whose steps the dispatcher hands out.
func (w *world) openPartitions(n int, o partition.Observer) partition.Set {
	w.t.Helper()
	var set partition.Set
	for i := range n {
		e := env.Real()
		e.FS = vfs.NewMem()
		db, err := state.Open("tables", state.Options{FS: e.FS, Manual: true})
		if err != nil {
			w.t.Fatal(err)
		}
		log, err := journal.Open(e.FS, "journal", journal.Options{Rand: e.Rand, SegmentSize: 64 << 10})
		if err != nil {
			w.t.Fatal(err)
		}
		m, _, err := partition.Open(partition.Config{ID: i, Epoch: 1, Env: e, Tables: db, Log: log, Executor: w.dispatch, Observer: o})
		if err != nil {
			w.t.Fatal(err)
		}
		r := partition.Start(m, func(err error) { w.t.Errorf("partition lost: %v", err) })
		set = append(set, r)
		w.t.Cleanup(func() {
			r.Stop()
			_ = log.Close()
			_ = db.Close()
		})
	}
	return set
}

// unsteady is a worker that answers what it gets, leaves without a word now and
// then, and drains at other times; it comes back until ctx ends.
func (w *world) unsteady(ctx context.Context, seed int64, steps int) {
	r := rand.New(rand.NewSource(seed))
	for ctx.Err() == nil {
		stream, cancel := context.WithCancel(ctx)
		s, err := wire.NewWorkersClient(w.conn).Work(stream)
		if err == nil {
			_ = s.Send(&wire.WorkerFrame{Hello: hello(), TaskCredits: uint32(1 + r.Intn(8))})
			for frames := 5 + r.Intn(50); frames != 0; frames-- {
				f, err := s.Recv()
				if err != nil {
					break
				}
				out := &wire.WorkerFrame{Drain: frames == 5 && r.Intn(2) == 0}
				for _, t := range f.Tasks {
					out.Results = append(out.Results, answer(t, steps))
					out.TaskCredits++
				}
				if s.Send(out) != nil {
					break
				}
			}
		}
		cancel()
	}
}

// answer goes on to the next step until there were enough.
func answer(t *wire.Task, steps int) *wire.TaskResult {
	r := result(t)
	n := len(t.Input)
	if n+1 >= steps {
		r.Result.Close = &wire.Close{How: wire.Close_GRACEFUL}
		return r
	}
	next := &wire.StepSpec{Name: "s", Input: make([]byte, n+1), Async: n%7 == 3}
	if n%5 == 2 {
		next.ConcurrencyKey, next.ConcurrencyLimit = fmt.Sprint("k", n%3), 4
	}
	r.Result.Next = []*wire.StepSpec{next}
	return r
}

// Flows on real partitions end, each step's result taken once, whatever their
// workers do.
func TestFlowsEndWhateverTheWorkersDo(t *testing.T) {
	w := newWorld(t, nil)
	const flows, steps = 100, 12
	c := &closed{n: map[string]int{}, left: flows, all: make(chan struct{})}
	set := w.openPartitions(2, c)
	w.dispatch.Bind(dispatch.Partitions(set))
	ctx, cancel := context.WithCancel(w.ctx)
	var workers sync.WaitGroup
	for i := range 4 {
		workers.Go(func() { w.unsteady(ctx, int64(i), steps) })
	}
	for i := range flows {
		id := fmt.Sprint("default/f/f", i)
		e := &wire.Entry{FlowId: id, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Closes: true, Steps: []*wire.StepSpec{{Name: "s"}}}}}
		if err := set.For(id).SubmitWait(w.ctx, partition.Proposal{Entry: e, Reply: func(_ core.Reply, err error) {
			if err != nil {
				t.Error(err)
			}
		}}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-c.all:
	case <-w.ctx.Done():
		t.Errorf("%d flows are not closed; queues %v", c.left, w.dispatch.Queues("default"))
	}
	cancel()
	workers.Wait()
	if c.n["flow.completed"] != flows {
		t.Errorf("ends %v", c.n)
	}
	for i := range flows {
		id := fmt.Sprint("default/f/f", i)
		if f, err := set.For(id).Read(w.ctx, id); err != nil || f.StepsDone != steps {
			t.Errorf("flow %d: %d steps, %v", i, f.GetStepsDone(), err)
		}
	}
}
