package grpcapi

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// engine applies at once what it is given: each result starts the next step, as
// long as there are steps to do.
type engine struct {
	d    *dispatch.Dispatcher
	lsn  uint64
	left int
	done chan struct{}
}

// Submit implements dispatch.Proposer; one stream calls it.
func (e *engine) Submit(flowID string, p partition.Proposal) error {
	if e.left--; e.left == 0 {
		close(e.done)
	}
	if e.left > 0 && e.d.Reserve(flowID, "bench", 1) == 1 {
		e.lsn++
		e.d.Dispatch(&partition.Work{Task: &core.Task{FlowID: flowID, FlowType: "bench", RunID: "run_0123456789abcdef", Name: "step",
			Exec: e.lsn, Attempt: core.Attempt{Epoch: 1, LSN: e.lsn}, Spec: benchSpec}})
	}
	p.Reply(core.Reply{}, nil)
	return nil
}

// SubmitWait implements dispatch.Proposer.
func (e *engine) SubmitWait(_ context.Context, flowID string, p partition.Proposal) error {
	return e.Submit(flowID, p)
}

var benchSpec = &wire.StepSpec{Name: "step", Input: []byte("1")}

func serve(b *testing.B, flows Flows) (*dispatch.Dispatcher, *grpc.ClientConn) {
	b.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	d := dispatch.New(dispatch.Config{Clock: env.SystemClock{}, Hub: stream.NewHub(), Log: log})
	s := NewServer(Config{Flows: flows, Dispatch: d, Clock: env.SystemClock{}, Log: log})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = s.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(mux.Codec{})))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = conn.Close()
		d.Stop()
		s.Stop()
	})
	return d, conn
}

// BenchmarkStep is one step over a loopback connection, both sides together,
// without an engine behind: 256 flows, one worker that answers at once.
func BenchmarkStep(b *testing.B) {
	d, conn := serve(b, &fakeFlows{})
	e := &engine{d: d, left: b.N, done: make(chan struct{})}
	d.Bind(e)
	s, err := wire.NewWorkersClient(conn).Work(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	out := mux.NewSender(1<<30, s.Send)
	_ = out.Put(0, func(f *wire.WorkerFrame) {
		f.Hello = &wire.Hello{Protocol: 1, WorkerId: "w", FlowTypes: []*wire.FlowType{{Name: "bench", Steps: []*wire.StepType{{Name: "step"}}}}}
		f.TaskCredits = 512
	})
	if _, err := s.Recv(); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range 256 {
		id := fmt.Sprint("default/f/flow-", i)
		d.Reserve(id, "bench", 1)
		d.Dispatch(&partition.Work{Task: &core.Task{FlowID: id, FlowType: "bench", Name: "step", Exec: 1, Spec: benchSpec}})
	}
	go func() {
		for {
			f, err := s.Recv()
			if err != nil {
				return
			}
			for _, t := range f.Tasks {
				_ = out.Put(0, func(f *wire.WorkerFrame) {
					f.Results = append(f.Results, &wire.TaskResult{FlowId: t.FlowId, Result: &wire.StepResult{Exec: t.Exec, Attempt: t.Attempt, Next: benchNext}})
					f.TaskCredits++
				})
			}
		}
	}()
	<-e.done
}

var benchNext = []*wire.StepSpec{benchSpec}

// BenchmarkCall is one call over a stream on loopback, both sides together: 256
// calls are open.
func BenchmarkCall(b *testing.B) {
	_, conn := serve(b, &fakeFlows{})
	s, err := wire.NewFlowsClient(conn).Stream(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	out := mux.NewSender(1<<30, s.Send)
	asked := 0
	ask := func() {
		asked++
		c := describe(uint64(asked), "f")
		_ = out.Put(0, func(f *wire.Calls) { f.Calls = append(f.Calls, c) })
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range 256 {
		ask()
	}
	for n := 0; n < b.N; {
		f, err := s.Recv()
		if err != nil {
			b.Fatal(err)
		}
		for range f.Answers {
			n++
			ask()
		}
	}
}
