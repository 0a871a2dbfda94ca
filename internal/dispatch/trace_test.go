package dispatch

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// spans records what the dispatcher tells of hand-outs: each begin names its
// parent and gives the child "<parent>/<n>".
type spans struct {
	n     int
	open  int
	lines []string
}

func (s *spans) begin(trace []byte, what, id, flowType, name string, number uint32) ([]byte, func(string)) {
	s.n++
	s.open++
	child := fmt.Sprintf("%s/%d", trace, s.n)
	ended := false
	return []byte(child), func(outcome string) {
		if ended {
			outcome = "again: " + outcome
		}
		ended = true
		s.open--
		s.lines = append(s.lines, fmt.Sprintf("%s %s %s.%s.%s #%d %s", child, what, flowType, id, name, number, outcome))
	}
}

func (s *spans) want(t *testing.T, lines ...string) {
	t.Helper()
	wantText(t, "spans", strings.Join(s.lines, "\n"), strings.Join(lines, "\n"))
	s.lines = nil
}

func (w *world) traced() *spans {
	s := &spans{}
	w.d.cfg.Hooks.Begin = s.begin
	return s
}

func (w *world) startTraced(id string, steps ...*wire.StepSpec) {
	w.t.Helper()
	w.startWith(id, &wire.StartFlow{Type: "t", Steps: steps, Closes: true, Trace: []byte("T")})
}

func TestSpansOfAttempts(t *testing.T) {
	w := newWorld(t)
	s := w.traced()
	f := w.connect("f", 1)
	w.start("untraced", step("s"))
	if task := f.take(); len(task.Trace) > 0 {
		t.Errorf("trace %s", task.Trace)
	} else {
		f.answer(task)
	}
	s.want(t)

	w.startTraced("one", step("s"))
	task := f.take()
	wantText(t, "the worker's parent", string(task.Trace), "T/1")
	u := step("u")
	u.Retry = &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 1_000_000}
	f.result(task, &wire.StepResult{Next: []*wire.StepSpec{u}})
	s.want(t, "T/1 step t.one.s #1 completed")
	task = f.take()
	f.result(task, &wire.StepResult{Retry: &wire.Retry{Error: "no"}, Close: &wire.Close{How: wire.Close_FAIL}})
	s.want(t, "T/2 step t.one.u #1 retried")
	w.pass(2 * time.Second)
	task = f.take()
	f.result(task, &wire.StepResult{Retry: &wire.Retry{Error: "no", Permanent: true}, Close: &wire.Close{How: wire.Close_FAIL}})
	s.want(t, "T/3 step t.one.u #2 failed")

	w.startTraced("late", &wire.StepSpec{Name: "s", TimeoutUs: 1_000_000, Retry: &wire.RetryPolicy{MaxAttempts: 1}})
	f.take()
	w.pass(time.Second)
	s.want(t, "T/4 step t.late.s #1 timeout")
	f.frame(&wire.WorkerFrame{TaskCredits: 1})

	w.startTraced("stopped", step("s"))
	f.take()
	w.do(&wire.Entry{FlowId: fullID("stopped"), Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_TERMINATE}}})
	s.want(t, "T/5 step t.stopped.s #1 cancelled")
	f.frame(&wire.WorkerFrame{TaskCredits: 1})

	w.startTraced("lost", step("s"))
	f.take()
	f.leave("EOF")
	s.want(t, "T/6 step t.lost.s #1 lost")
	g := w.connect("g", 1)
	g.answer(g.take())
	s.want(t, "T/7 step t.lost.s #2 completed")
	w.idle()
	if s.open != 0 {
		t.Errorf("%d spans are open", s.open)
	}
}

// TestChildrenInherit: flows that a handler starts are below its own span.
func TestChildrenInherit(t *testing.T) {
	w := newWorld(t)
	s := w.traced()
	f := w.connect("f", 1)
	child := func(trace string) *wire.StartFlow {
		return &wire.StartFlow{Type: "t", Trace: []byte(trace), Steps: []*wire.StepSpec{step("v")}}
	}
	on := func(c *wire.StartFlow) *wire.Wait {
		return &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: "c", Start: c}}}}}
	}
	sent, own, waited, recovers, below := child(""), child("OWN"), child(""), child(""), child("")
	waited.Steps[0].Wait = on(below)
	w.startTraced("one", step("s"))
	task := f.take()
	w.queue, w.hold = nil, true
	r := resultOf(task, &wire.StepResult{
		Sends: []*wire.Send{{FlowId: "c", Command: &wire.Send_Start{Start: sent}}, {FlowId: "c", Command: &wire.Send_Start{Start: own}},
			{FlowId: "c", Command: &wire.Send_Publish{Publish: &wire.Publish{}}}},
		Next: []*wire.StepSpec{{Name: "u", Wait: on(waited), Recover: &wire.StepSpec{Name: "v", Wait: on(recovers)}}},
	})
	if err := f.worker.Frame(&wire.WorkerFrame{Results: []*wire.TaskResult{r}}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range []*wire.StartFlow{sent, own, waited, recovers, below} {
		got = append(got, string(c.Trace))
	}
	wantText(t, "traces", strings.Join(got, " "), "T/1 OWN T/1 T/1 T/1")

	call := w.tracedCall("one", "lock")
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	sent = child("")
	f.frame(&wire.WorkerFrame{RpcResults: []*wire.RpcResult{{Call: f.takeCall().Call, Update: &wire.Update{
		Sends: []*wire.Send{{FlowId: "c", Command: &wire.Send_Start{Start: sent}}}}}}})
	call.want(t, "")
	wantText(t, "trace", string(sent.Trace), "R/2")
	if !slices.Contains(s.lines, "R/2 rpc t.one.lock #1 completed") {
		t.Errorf("spans %q", s.lines)
	}
}

func (w *world) tracedCall(id, name string) *asked {
	a := &asked{task: &wire.RpcTask{Name: name, Locked: name == "lock", Input: []byte("1"), Trace: []byte("R")}}
	w.d.Call(fullID(id), "t", a.task, time.Minute, func(r *wire.RpcResult, err error) { a.res, a.err, a.n = r, err, a.n+1 })
	return a
}

func TestSpansOfCalls(t *testing.T) {
	w := newWorld(t)
	s := w.traced()
	f := w.connect("f", 0)
	a := w.tracedCall("one", "read")
	f.frame(&wire.WorkerFrame{RpcCredits: 9})
	r := f.takeCall()
	wantText(t, "the worker's parent", string(r.Trace), "R/1")
	if r == a.task || r.Call != a.task.Call || string(r.Input) != "1" || r.TimeoutUs != 60_000_000 {
		t.Errorf("call %v", r)
	}
	f.leave("EOF") // another one reads
	g := w.connect("g", 0)
	g.frame(&wire.WorkerFrame{RpcCredits: 9})
	g.reply(g.takeCall(), 0)
	a.want(t, "")
	s.want(t, "R/1 rpc t.one.read #1 lost", "R/2 rpc t.one.read #2 completed")

	b := w.tracedCall("one", "lock")
	g.frame(&wire.WorkerFrame{RpcResults: []*wire.RpcResult{{Call: g.takeCall().Call, Error: "no"}}})
	b.want(t, "")
	c := w.tracedCall("one", "lock")
	w.d.CancelCall(fullID("one"), c.task)
	g.rpcs = nil
	w.tracedCall("one", "lock")
	w.pass(time.Minute)
	g.rpcs = nil
	e := w.tracedCall("one", "lock")
	g.leave("EOF")
	e.want(t, "worker_lost")
	s.want(t, "R/3 rpc t.one.lock #1 failed", "R/4 rpc t.one.lock #1 cancelled", "R/5 rpc t.one.lock #1 timeout", "R/6 rpc t.one.lock #1 lost")
	w.idle()
}

// TestStopAnswersCalls: none is left without an answer, nor a span open.
func TestStopAnswersCalls(t *testing.T) {
	w := newWorld(t)
	s := w.traced()
	f := w.connect("f", 1)
	w.startTraced("one", step("s"))
	f.take()
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	has := w.tracedCall("one", "read")
	waits := w.tracedCall("one", "lock")
	if n := w.d.Running(); n != 2 {
		t.Errorf("%d are running, want a step and a call", n)
	}
	w.d.Stop()
	waits.want(t, "unavailable: ")
	if has.n != 0 {
		t.Error("a call is answered that its worker may answer still")
	}
	f.leave("the server stops")
	has.want(t, "worker_lost: ")
	s.want(t, "R/2 rpc t.one.read #1 lost", "T/1 step t.one.s #1 lost")
}

// TestNoTraceCostsNothing: what is not traced is not looked at, and nothing is
// made for it.
func TestNoTraceCostsNothing(t *testing.T) {
	count := func(begin func([]byte, string, string, string, string, uint32) ([]byte, func(string))) (step, call float64) {
		d := New(Config{Clock: env.SystemClock{}, Hub: stream.NewHub(), Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Hooks: Hooks{Begin: begin}})
		e := &engine{d: d, tasks: make([]core.Task, 1)}
		d.Bind(e)
		out := &sink{}
		w, err := d.Connect("default", "", &wire.Hello{Protocol: 1, WorkerId: "w", FlowTypes: []*wire.FlowType{
			{Name: "bench", Steps: []*wire.StepType{{Name: "step"}}, Rpcs: []*wire.RpcType{{Name: "read"}}}}}, out)
		if err != nil {
			t.Fatal(err)
		}
		frame := func(f *wire.WorkerFrame) {
			if err := w.Frame(f); err != nil {
				t.Fatal(err)
			}
		}
		frame(&wire.WorkerFrame{TaskCredits: 10, RpcCredits: 1})
		d.Reserve("default/f/flow", "bench", 1)
		d.Dispatch(&partition.Work{Task: &core.Task{FlowID: "default/f/flow", FlowType: "bench", Name: "step", Spec: benchSpec, Attempt: core.Attempt{Epoch: 1}}})
		step = testing.AllocsPerRun(100, func() {
			task := out.frame.Tasks[0]
			out.frame.Tasks = out.frame.Tasks[:0]
			frame(&wire.WorkerFrame{TaskCredits: 1, Results: []*wire.TaskResult{{FlowId: task.FlowId, Result: &wire.StepResult{Exec: task.Exec, Attempt: task.Attempt, Next: benchNext}}}})
		})
		call = testing.AllocsPerRun(100, func() {
			d.Call("default/f/flow", "bench", &wire.RpcTask{Name: "read"}, 0, func(*wire.RpcResult, error) {})
			id := out.frame.Rpcs[0].Call
			out.frame.Rpcs = out.frame.Rpcs[:0]
			frame(&wire.WorkerFrame{RpcCredits: 1, RpcResults: []*wire.RpcResult{{Call: id}}})
		})
		return step, call
	}
	step, call := count(nil)
	began := 0
	step2, call2 := count(func(trace []byte, _, _, _, _ string, _ uint32) ([]byte, func(string)) { began++; return trace, nil })
	if step2 > step || call2 > call || began > 0 {
		t.Errorf("with a tracer a step costs %v allocations instead of %v, a call %v instead of %v; %d spans", step2, step, call2, call, began)
	}
}
