package flow_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// finish stops the worker, whose streams drain.
func (r *running) finish(links ...*link) {
	r.t.Helper()
	r.stop()
	for _, l := range links {
		l.until("drain", func() bool { return l.drained })
		l.end <- nil
	}
	if err := r.ended(); err != nil {
		r.t.Error(err)
	}
}

const never = 1 << 30 // looks

// TestWorkerOpensFurtherStreams: when a write to its stream does not end.
func TestWorkerOpensFurtherStreams(t *testing.T) {
	s := newServer(t)
	deaf := make(chan struct{})
	s.deaf = deaf
	loud := flow.StepFunc("loud", func(ctx *flow.Context, in string) (flow.Decision, error) {
		_, err := io.WriteString(ctx.Output(), strings.Repeat("x", 500<<10))
		return flow.DeadEnd(), err
	})
	b, f := newBlocks()
	g := flow.Define("g", flow.Step(loud))
	w := startAt(t, s, flow.WorkerOptions{Concurrency: 20, RPCConcurrency: 1, MaxStreams: 2, ID: "w1"},
		func(w *flow.Worker) { flow.SetPace(w, time.Millisecond, 0.7, 3, never, 1) }, f, g)
	first := s.accept()
	task := blockTask(1, "")
	task.FlowType, task.Step = "g", "loud"
	first.send(&wire.ServerFrame{Tasks: []*wire.Task{task}})
	second := s.accept()
	if second.hello.WorkerId != "w1" || len(second.hello.FlowTypes) != 2 {
		t.Errorf("hello is %v", second.hello)
	}
	second.joined()
	close(deaf)
	first.until("the result", func() bool { return len(first.results) == 1 && first.tasks == 20 })

	// Credits of handlers that end move to the stream that has fewer.
	var tasks []*wire.Task
	for i := range 20 {
		tasks = append(tasks, blockTask(uint64(i+1), ""))
	}
	first.send(&wire.ServerFrame{Tasks: tasks})
	for range 20 {
		b.wait(t)
		b.goOn <- "done"
	}
	first.until("20 results", func() bool { return len(first.results) == 21 })
	second.until("credits", func() bool { return first.tasks+second.tasks == 20 && second.tasks >= 5 })
	// Both are used, and answered where the tasks came from.
	second.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(31, ""), blockTask(32, "")}})
	first.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(33, "")}})
	for range 3 {
		b.wait(t)
		b.goOn <- "done"
	}
	second.until("2 results", func() bool { return len(second.results) == 2 })
	first.until("all credits", func() bool { return len(first.results) == 22 && first.tasks+second.tasks == 20 })
	w.finish(first, second)
}

// TestWorkerGivesStreamsBack: when they are idle, with the credits they had.
func TestWorkerGivesStreamsBack(t *testing.T) {
	s := newServer(t)
	_, f := newBlocks()
	// One is opened whenever there is but one, and given back when there are two.
	w := startAt(t, s, flow.WorkerOptions{Concurrency: 20, RPCConcurrency: 1, MaxStreams: 2},
		func(w *flow.Worker) { flow.SetPace(w, time.Millisecond, 0, 1, 2, 1) }, f)
	first := s.accept()
	for range 3 {
		second := s.accept()
		second.until("drain", func() bool { return second.drained })
		if second.tasks != 0 {
			t.Errorf("an idle stream got %d credits", second.tasks)
		}
		second.end <- nil
	}
	first.credits(20, 1)
	if first.drained {
		t.Error("the first stream was given back")
	}
	w.stop()
	first.until("drain", func() bool { return first.drained })
	first.end <- nil
	for {
		select {
		case last := <-s.links: // one was being opened
			last.end <- nil
		case err := <-w.done:
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

// TestWorkerLosesAFurtherStream: what came over it is over, and nothing else.
func TestWorkerLosesAFurtherStream(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	w := startAt(t, s, flow.WorkerOptions{Concurrency: 40, MaxStreams: 2}, func(w *flow.Worker) { flow.SetPace(w, time.Millisecond, 0, 1, never, never) }, f)
	first := s.accept()
	first.credits(40, 64)
	second := s.accept()
	second.joined()
	var tasks []*wire.Task
	for i := range 40 {
		tasks = append(tasks, blockTask(uint64(i+1), ""))
	}
	first.send(&wire.ServerFrame{Tasks: tasks})
	for range 40 {
		b.wait(t)
		b.goOn <- "done"
	}
	first.until("results", func() bool { return len(first.results) == 40 })
	second.until("credits", func() bool { return first.tasks+second.tasks == 40 && second.tasks > 0 })
	second.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(51, "")}})
	lost := b.wait(t)
	first.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(52, "")}})
	kept := b.wait(t)
	second.end <- errors.New("a cable was cut")
	if err := b.cause(t); !errors.Is(err, flow.ErrLost) || lost.Err() == nil || kept.Err() != nil {
		t.Errorf("lost with %v; the contexts are %v and %v", err, lost.Err(), kept.Err())
	}
	b.goOn <- "done"
	first.until("all credits", func() bool { return len(first.results) == 41 && first.tasks == 40 })
	w.finish(first)
}

// TestStreamsThatComeAndGo: on a real server, nothing is lost on the way.
func TestStreamsThatComeAndGo(t *testing.T) {
	srv := serve(t, t.TempDir(), "127.0.0.1:0")
	h := &hop{done: &atomic.Int64{}}
	hops := flow.Define("hop", flow.Step(h), status, getStatus)
	r := startReal(t, srv.address, func(w *flow.Worker) { flow.SetPace(w, 2*time.Millisecond, 0, 1, 5, 1) }, hops)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, client.Options{Address: srv.address})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const flows, steps = 30, 200
	for i := range flows {
		begin(t, ctx, c, hops, fmt.Sprintf("f-%d", i), flow.To(h, steps-1))
	}
	most := 0
	for i := range flows {
		id := fmt.Sprintf("f-%d", i)
		if got, err := client.Result[string](ctx, c, id); got != id || err != nil {
			t.Errorf("flow %s: %q, %v", id, got, err)
		}
		ws, err := c.Workers(ctx)
		if err != nil || len(ws) != 1 {
			t.Fatalf("workers are %+v, %v", ws, err)
		}
		most = max(most, ws[0].Streams)
	}
	if most < 2 || most > 4 {
		t.Errorf("the worker had up to %d streams", most)
	}
	if n := h.done.Load(); n != flows*steps {
		t.Errorf("%d steps ran, want %d", n, flows*steps)
	}
	r.stop()
	if err := r.ended(); err != nil {
		t.Error(err)
	}
}
