package dispatch

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// sink takes a worker's frames and keeps the last tasks.
type sink struct{ frame wire.ServerFrame }

// Put implements Outlet.
func (s *sink) Put(_ int, fn func(*wire.ServerFrame)) error { fn(&s.frame); return nil }

// Close implements Outlet.
func (s *sink) Close(error) {}

// engine applies at once what it is given: each result starts the next step.
type engine struct {
	d     *Dispatcher
	lsn   uint64
	tasks []core.Task
}

// Submit implements Proposer.
func (e *engine) Submit(flowID string, p partition.Proposal) error {
	r := p.Entry.GetStepResult()
	if r == nil {
		return nil
	}
	e.lsn++
	n := e.d.Reserve(flowID, "bench", 1)
	t := &e.tasks[r.Exec%uint64(len(e.tasks))]
	t.FlowID, t.FlowType, t.RunID, t.Name, t.Exec, t.Spec = flowID, "bench", "run_0123456789abcdef", "step", r.Exec, benchSpec
	t.Attempt = core.Attempt{Epoch: 1, LSN: e.lsn}
	if n == 1 {
		e.d.Dispatch(&partition.Work{Task: t})
	}
	p.Reply(core.Reply{}, nil)
	return nil
}

// SubmitWait implements Proposer.
func (e *engine) SubmitWait(_ context.Context, flowID string, p partition.Proposal) error {
	return e.Submit(flowID, p)
}

var benchSpec = &wire.StepSpec{Name: "step", Input: []byte("1")}

// BenchmarkStep is one step by the dispatcher: slot, hand-out, result, reply.
// Results of 64 steps come in a frame.
func BenchmarkStep(b *testing.B) {
	for _, workers := range []int{1, 4} {
		b.Run(fmt.Sprint("workers=", workers), func(b *testing.B) {
			const flows, batch = 1024, 64
			d := New(Config{Clock: env.SystemClock{}, Hub: stream.NewHub(), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
			e := &engine{d: d, tasks: make([]core.Task, flows)}
			d.Bind(e)
			var ws []*Worker
			var outs []*sink
			for i := range workers {
				out := &sink{}
				w, err := d.Connect("default", "", &wire.Hello{Protocol: 1, WorkerId: fmt.Sprint(i),
					FlowTypes: []*wire.FlowType{{Name: "bench", Steps: []*wire.StepType{{Name: "step"}}}}}, out)
				if err != nil {
					b.Fatal(err)
				}
				_ = w.Frame(&wire.WorkerFrame{TaskCredits: 2 * flows})
				ws, outs = append(ws, w), append(outs, out)
			}
			for i := range flows {
				id := fmt.Sprint("default/f/flow-", i)
				d.Reserve(id, "bench", 1)
				d.Dispatch(&partition.Work{Task: &core.Task{FlowID: id, FlowType: "bench", Name: "step", Exec: uint64(i), Spec: benchSpec, Attempt: core.Attempt{Epoch: 1}}})
			}
			b.ReportAllocs()
			b.ResetTimer()
			for done := 0; done < b.N; {
				for i, w := range ws {
					tasks := outs[i].frame.Tasks
					if len(tasks) == 0 {
						continue
					}
					n := min(batch, len(tasks))
					f := &wire.WorkerFrame{TaskCredits: uint32(n), Results: make([]*wire.TaskResult, n)}
					for j, t := range tasks[:n] {
						f.Results[j] = &wire.TaskResult{FlowId: t.FlowId, Result: &wire.StepResult{Exec: t.Exec, Attempt: t.Attempt, Next: benchNext}}
					}
					outs[i].frame.Tasks = append(outs[i].frame.Tasks[:0], tasks[n:]...)
					if err := w.Frame(f); err != nil {
						b.Fatal(err)
					}
					done += n
				}
			}
		})
	}
}

var benchNext = []*wire.StepSpec{benchSpec}

// BenchmarkRPC is one call by the dispatcher: hand-out, answer, caller.
func BenchmarkRPC(b *testing.B) {
	d := New(Config{Clock: env.SystemClock{}, Hub: stream.NewHub(), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	d.Bind(&engine{d: d})
	out := &sink{}
	w, err := d.Connect("default", "", &wire.Hello{Protocol: 1, WorkerId: "w", FlowTypes: []*wire.FlowType{{Name: "bench", Rpcs: []*wire.RpcType{{Name: "read"}}}}}, out)
	if err != nil {
		b.Fatal(err)
	}
	const batch = 64
	_ = w.Frame(&wire.WorkerFrame{RpcCredits: batch})
	done := 0
	count := func(*wire.RpcResult, error) { done++ }
	b.ReportAllocs()
	b.ResetTimer()
	for done < b.N {
		for range batch {
			d.Call("default/f/flow", "bench", &wire.RpcTask{Name: "read"}, 0, count)
		}
		f := &wire.WorkerFrame{RpcCredits: batch, RpcResults: make([]*wire.RpcResult, batch)}
		for i, t := range out.frame.Rpcs {
			f.RpcResults[i] = &wire.RpcResult{Call: t.Call}
		}
		out.frame.Rpcs = out.frame.Rpcs[:0]
		if err := w.Frame(f); err != nil {
			b.Fatal(err)
		}
	}
}
