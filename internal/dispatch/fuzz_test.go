package dispatch

import (
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// FuzzFrame lets a worker that has a task and a call send anything: the server
// takes it or ends that stream, and others are served.
func FuzzFrame(f *testing.F) {
	seed := func(m *wire.WorkerFrame) {
		b, err := m.MarshalVT()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	at := &wire.AttemptID{Epoch: 1, Lsn: 2}
	result := func(r *wire.StepResult) *wire.WorkerFrame {
		r.Exec, r.Attempt = 1, at
		return &wire.WorkerFrame{Results: []*wire.TaskResult{{FlowId: "one", Result: r}}, TaskCredits: 1}
	}
	seed(&wire.WorkerFrame{Drain: true, TaskCredits: 1 << 31, RpcCredits: 7})
	seed(&wire.WorkerFrame{Hello: &wire.Hello{Protocol: 1}})
	seed(result(&wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte("1")}}))
	seed(result(&wire.StepResult{Next: []*wire.StepSpec{{Name: "s", ConcurrencyKey: "k", ConcurrencyLimit: 1}, {Name: "x", Async: true}}, CancelExecs: []uint64{1, 2}}))
	seed(result(&wire.StepResult{Retry: &wire.Retry{Error: "x", AfterUs: -5}, Checkpoint: []byte("c")}))
	seed(result(&wire.StepResult{Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_TimerUs{TimerUs: 5}}}, Combinations: []*wire.Combination{{Of: []uint32{0}}}}}))
	seed(result(&wire.StepResult{Publish: []*wire.Publish{{Channel: "c", Payload: []byte("1")}}, Attributes: []*wire.Attribute{{Name: "a", Value: []byte("1")}}, Sends: []*wire.Send{{FlowId: "b/f/x"}}}))
	seed(&wire.WorkerFrame{Heartbeats: []*wire.Heartbeat{{FlowId: "one", Exec: 1, Attempt: at, Checkpoint: []byte("c")}, {}}, Outputs: []*wire.Output{{FlowId: "one", Exec: 1, Attempt: at, Text: "t"}, {}}})
	seed(&wire.WorkerFrame{RpcResults: []*wire.RpcResult{{Call: 1, Error: "x"}, {}}})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &wire.WorkerFrame{}
		if m.UnmarshalVT(b) != nil {
			return
		}
		w := newWorld(t)
		bad := w.connect("bad", 1)
		w.start("one", step("s"))
		bad.frame(&wire.WorkerFrame{RpcCredits: 1})
		w.call("one", "read", time.Minute)
		if err := bad.worker.Frame(m); err != nil || bad.closed {
			bad.worker.Leave(err)
		}
		w.settle()
		w.pass(time.Second)
		good := w.connect("good", 100)
		w.start("two", step("s"))
		for _, task := range good.tasks {
			if task.FlowId == "two" {
				good.answer(task)
				break
			}
		}
		if len(bad.tasks) < 2 && w.flow("two").Status != wire.Status_COMPLETED {
			t.Errorf("another worker's flow is %v", w.flow("two").Status)
		}
	})
}
