package dispatch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// asked is a call with what came of it.
type asked struct {
	task *wire.RpcTask
	res  *wire.RpcResult
	err  error
	n    int
}

func (w *world) call(id, name string, timeout time.Duration) *asked {
	a := &asked{task: &wire.RpcTask{Name: name, Locked: name == "lock", Input: []byte("1")}}
	w.d.Call(fullID(id), "t", a.task, timeout, func(r *wire.RpcResult, err error) { a.res, a.err, a.n = r, err, a.n+1 })
	return a
}

func (a *asked) want(t *testing.T, err string) {
	t.Helper()
	if a.n != 1 || err == "" && (a.err != nil || a.res == nil) || err != "" && (a.res != nil || !strings.Contains(fmt.Sprint(a.err), err)) {
		t.Errorf("answered %d times: %v %v, want %q", a.n, a.res, a.err, err)
	}
}

func (f *fake) takeCall() *wire.RpcTask {
	f.w.t.Helper()
	if len(f.rpcs) != 1 {
		f.w.t.Fatalf("worker %s has %d calls, want one", f.worker.id, len(f.rpcs))
	}
	r := f.rpcs[0]
	f.rpcs = nil
	return r
}

func (f *fake) reply(r *wire.RpcTask, credits uint32) {
	f.w.t.Helper()
	f.frame(&wire.WorkerFrame{RpcCredits: credits, RpcResults: []*wire.RpcResult{{Call: r.Call, Update: &wire.Update{Output: []byte("2")}}}})
}

func TestRPCHasCreditsOfItsOwn(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.start("busy", step("s")) // the only task credit
	a := w.call("one", "read", time.Minute)
	if len(f.rpcs) > 0 {
		t.Fatal("called without a credit")
	}
	b := w.call("one", "read", time.Minute)
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	r := f.takeCall()
	if r.FlowId != "one" || r.FlowType != "t" || r.Name != "read" || r.TimeoutUs != 60_000_000 || string(r.Input) != "1" || r.Call != a.task.Call {
		t.Errorf("call %v", r)
	}
	w.pass(time.Second)
	f.reply(r, 1)
	a.want(t, "")
	f.reply(f.takeCall(), 1)
	b.want(t, "")
	f.reply(r, 0) // again
	if a.n != 1 || w.d.Stats().Late != 1 {
		t.Error("a second answer was taken")
	}
	f.answer(f.take())
	w.idle()
	wantText(t, "outcomes", strings.Join(w.outcomes[:2], "|"), "t.read completed 1s|t.read completed 1s")
}

func TestRPCEndsInTime(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 0)
	waits := w.call("one", "read", time.Second)
	w.pass(time.Second)
	waits.want(t, "no_worker: ")
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	has := w.call("one", "read", time.Second)
	r := f.takeCall()
	w.pass(time.Second)
	has.want(t, "deadline: ")
	if len(f.cancels) != 1 || f.cancels[0].Call != r.Call || !f.cancels[0].Forget {
		t.Errorf("cancels %v", f.cancels)
	}
	unknown := w.call("one", "nope", 0)
	f.frame(&wire.WorkerFrame{RpcCredits: 5})
	later := w.call("one", "read", 0)
	f.reply(f.takeCall(), 0)
	later.want(t, "") // it is not behind one that nobody knows
	w.pass(31 * time.Second)
	unknown.want(t, "no_worker: ")
	w.idle()
}

func TestRPCIsCancelled(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 0)
	a, b := w.call("one", "read", 0), w.call("one", "read", 0)
	w.d.CancelCall(fullID("one"), a.task)
	a.want(t, "cancelled")
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	f.takeCall()
	w.d.CancelCall(fullID("one"), b.task)
	w.d.CancelCall(fullID("one"), b.task)
	w.d.CancelCall("x/f/y", b.task)
	b.want(t, "cancelled")
	if len(f.cancels) != 1 {
		t.Errorf("cancels %v", f.cancels)
	}
	w.idle()
}

func TestRPCOfALostWorker(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 0)
	f.frame(&wire.WorkerFrame{RpcCredits: 3})
	read, locked := w.call("one", "read", 0), w.call("one", "lock", 0)
	f.leave("EOF")
	locked.want(t, "worker_lost: ")
	if read.n != 0 {
		t.Fatal("the read was not given to another one")
	}
	g := w.connect("g", 0)
	g.frame(&wire.WorkerFrame{RpcCredits: 3})
	if r := g.takeCall(); r.Call != read.task.Call {
		t.Errorf("call %v", r)
	}
	g.leave("EOF")
	read.want(t, "worker_lost: ")
	w.idle()
}

func TestRPCsThatWaitAreBounded(t *testing.T) {
	w := newWorld(t)
	var all []*asked
	for range MaxWaitingCalls + 1 {
		all = append(all, w.call("one", "read", time.Second))
	}
	all[MaxWaitingCalls].want(t, "overloaded: ")
	w.pass(2 * time.Second)
	all[0].want(t, "no_worker")
	w.idle()
	w.d.Drain()
	w.call("one", "read", time.Second).want(t, "unavailable: ")
	a := &asked{}
	w.d.Call("nonsense", "t", &wire.RpcTask{}, 0, func(r *wire.RpcResult, err error) { a.res, a.err, a.n = r, err, a.n+1 })
	a.want(t, "invalid: ")
}

func TestRPCGoesToTheLeastLoadedThatKnowsIt(t *testing.T) {
	w := newWorld(t)
	f, g := w.connect("f", 0), w.connect("g", 0)
	h := w.connect("h", 0, &wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "s"}}})
	for i, x := range []*fake{f, g, h} {
		x.frame(&wire.WorkerFrame{RpcCredits: uint32(i + 2)})
	}
	for range 6 {
		w.call("one", "read", time.Second)
	}
	if len(f.rpcs) != 2 || len(g.rpcs) != 3 || len(h.rpcs) != 0 {
		t.Errorf("%d %d %d", len(f.rpcs), len(g.rpcs), len(h.rpcs))
	}
	if q := w.d.Queues("a")[0]; q.RpcCredits != 4 || q.Workers != 3 {
		t.Errorf("queue %v", q)
	}
}
