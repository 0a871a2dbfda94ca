package flow_test

import (
	"context"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

type count struct{}

func (count) Execute(ctx *flow.Context, n int) (flow.Decision, error) {
	if n == 0 {
		return flow.Complete(n), nil
	}
	return flow.GoTo(count{}, n-1), nil
}

// BenchmarkStep is the path of a task through the runtime: no network.
func BenchmarkStep(b *testing.B) {
	rt, err := flow.NewRuntime(flow.Define("count", flow.Step(count{})))
	if err != nil {
		b.Fatal(err)
	}
	h := newHost()
	t := &wire.Task{FlowId: "f1", FlowType: "count", RunId: "r1", Exec: 7, Attempt: &wire.AttemptID{}, Number: 1, Step: "count", Input: []byte("5"), TimeoutUs: 1e6}
	b.ReportAllocs()
	for b.Loop() {
		if r := rt.Step(context.Background(), t, h).Run(); len(r.Next) != 1 {
			b.Fatal(r)
		}
	}
}

// BenchmarkStepWithState also reads and writes attributes and waits.
func BenchmarkStepWithState(b *testing.B) {
	rt, err := flow.NewRuntime(flow.Define("order", flow.Step(awaitPayment{}), flow.Step(ship{}), status, paid))
	if err != nil {
		b.Fatal(err)
	}
	h := newHost()
	t := &wire.Task{FlowId: "f1", FlowType: "order", RunId: "r1", Exec: 7, Attempt: &wire.AttemptID{}, Number: 1, Step: "ship",
		Input: []byte(`{"ID":"order-1","Amount":7}`)}
	b.ReportAllocs()
	for b.Loop() {
		if r := rt.Step(context.Background(), t, h).Run(); len(r.Next) != 1 {
			b.Fatal(r)
		}
	}
}

// BenchmarkWorker is tasks over a stream in memory: both sides of gRPC.
func BenchmarkWorker(b *testing.B) {
	s := newServer(b)
	const tasks = 256
	start(b, s, flow.WorkerOptions{Concurrency: tasks, RPCConcurrency: 1}, flow.Define("count", flow.Step(count{})))
	l := s.accept()
	l.credits(tasks, 1)
	exec := uint64(0)
	send := func(n int) {
		f := &wire.ServerFrame{}
		for range n {
			exec++
			f.Tasks = append(f.Tasks, &wire.Task{FlowId: "f1", FlowType: "count", RunId: "r1", Exec: exec, Attempt: &wire.AttemptID{Lsn: 1}, Number: 1,
				Step: "count", Input: []byte("5"), TimeoutUs: time.Minute.Microseconds()})
		}
		if err := l.stream.Send(f); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	b.ResetTimer()
	done := 0
	sent := min(tasks/2, b.N)
	send(sent)
	for done < b.N {
		f := <-l.frames
		done += len(f.Results)
		if n := min(len(f.Results), b.N-sent); n > 0 {
			send(n)
			sent += n
		}
	}
	b.StopTimer()
	l.end <- nil
}
