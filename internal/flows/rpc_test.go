package flows

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

func rpc(id, name, input string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Rpc{Rpc: &wire.RpcRequest{FlowId: id, Name: name, Input: []byte(input)}}}
}

// adder adds its input to the attribute total.
func adder(t *wire.RpcTask) *wire.RpcResult {
	sum, _ := strconv.Atoi(string(t.Input))
	for _, a := range t.Attributes {
		if a.Name == "total" {
			have, _ := strconv.Atoi(string(a.Value))
			sum += have
		}
	}
	out := strconv.Itoa(sum)
	return &wire.RpcResult{Update: &wire.Update{Attributes: []*wire.Attribute{attr("total", out)}, Output: []byte(out)}}
}

func TestReadRPC(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.must(setAttr("a", attr("total", "5")))
	w.rpc("total", func(k *wire.RpcTask) *wire.RpcResult {
		if k.FlowId != "a" || k.FlowType != "order" || k.Locked || string(k.Input) != "1" {
			t.Errorf("called with %v", k)
		}
		return &wire.RpcResult{Update: &wire.Update{Output: k.Attributes[0].Value}}
	})
	if rep := w.must(rpc("a", "total", "1")).GetRpc(); string(rep.Output) != "5" || rep.Duplicate {
		t.Errorf("got %v", rep)
	}
	w.result(w.step("pay"), complete("1"))
	w.must(rpc("a", "total", "1")) // a closed flow can be read

	w.rpc("total", func(*wire.RpcTask) *wire.RpcResult { return &wire.RpcResult{Error: "no", ErrorKind: "shy"} })
	if e := w.refused(RPCFailed, rpc("a", "total", "1")); e.Message != "no" || e.Kind != "shy" {
		t.Errorf("got %v", e)
	}
	w.rpc("total", adder)
	w.refused(RPCFailed, rpc("a", "total", "1"))
	w.refused(UnknownRPC, rpc("a", "nope", ""))
	w.refused(core.NotFound, rpc("b", "total", ""))
	w.refused(Invalid, rpc("a", "total", "{"))
	w.order("a2")
	w.mu.Lock()
	delete(w.rpcs, "total")
	w.mu.Unlock()
	w.refused(NoWorker, rpc("a2", "total", ""))
	w.must(start(&wire.StartRequest{FlowId: "s"}))
	w.refused(UnknownRPC, rpc("s", "total", ""))
}

func TestRPCOutcomesOfWorkers(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	for code, err := range map[core.Code]error{Deadline: context.DeadlineExceeded, NoWorker: errors.New("worker w1 was lost"), Overloaded: &Error{Code: Overloaded, Message: "full"}} {
		for _, name := range []string{"total", "add"} {
			w.mu.Lock()
			w.rpcs[name] = func(_ *wire.RpcTask, done func(*wire.RpcResult, error)) { done(nil, err) }
			w.mu.Unlock()
			w.refused(code, rpc("a", name, ""))
		}
	}
	w.mu.Lock()
	w.rpcs["add"] = func(_ *wire.RpcTask, done func(*wire.RpcResult, error)) { done(nil, nil) }
	w.mu.Unlock()
	w.refused(Internal, rpc("a", "add", ""))
	w.rpc("add", adder)
	w.must(rpc("a", "add", "1")) // the lock was given back each time
}

func TestLockedRPCsAreOneAfterTheOther(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	var inside atomic.Int32
	w.rpc("add", func(k *wire.RpcTask) *wire.RpcResult {
		if inside.Add(1) != 1 {
			t.Error("two handlers at once")
		}
		defer inside.Add(-1)
		return adder(k)
	})
	const n = 200
	var answers []chan *wire.Answer
	for range n {
		answers = append(answers, w.begin(w.ctx, rpc("a", "add", "1")))
	}
	seen := map[string]bool{}
	for _, ch := range answers {
		a := w.next(ch)
		if a.Error != nil || seen[string(a.GetRpc().Output)] {
			t.Fatalf("got %v", a)
		}
		seen[string(a.GetRpc().Output)] = true
	}
	if got := value(t, w.must(get("a")).GetAttributes().Attributes, "total"); got != fmt.Sprint(n) {
		t.Errorf("total is %s", got)
	}
	w.unlocked()
}

// unlocked waits until no lock is held, which an answer may come before, and
// checks that nobody waits for one.
func (w *world) unlocked() {
	w.t.Helper()
	for i := range w.svc.locks.shards {
		s := &w.svc.locks.shards[i]
		for held := 1; held > 0; runtime.Gosched() {
			s.mu.Lock()
			held = len(s.held)
			s.mu.Unlock()
			if w.ctx.Err() != nil {
				w.t.Fatalf("%d locks are held", held)
			}
		}
	}
	if n := w.svc.locks.waiting.Load(); n != 0 {
		w.t.Errorf("%d wait for locks", n)
	}
}

func TestLockedRPCTriesAgainWhenAStepWrites(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	w.must(setAttr("a", attr("total", "1")))
	calls := 0
	w.rpc("add", func(task *wire.RpcTask) *wire.RpcResult {
		if calls++; calls == 1 {
			w.result(k, &wire.StepResult{Attributes: []*wire.Attribute{attr("total", "10")}, Next: []*wire.StepSpec{{Name: "ship"}}})
		}
		return adder(task)
	})
	if rep := w.must(rpc("a", "add", "1")).GetRpc(); string(rep.Output) != "11" || calls != 2 {
		t.Errorf("got %v after %d calls", rep, calls)
	}
	w.rpc("add", func(task *wire.RpcTask) *wire.RpcResult {
		w.must(setAttr("a", attr("note", `"again"`)))
		return adder(task)
	})
	w.refused(Conflict, rpc("a", "add", "1"))
	w.unlocked()
}

func TestLockedRPCRequestID(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	calls := 0
	w.rpc("add", func(task *wire.RpcTask) *wire.RpcResult { calls++; return adder(task) })
	c := rpc("a", "add", "3")
	c.GetRpc().RequestId = "r"
	first, again := w.must(c).GetRpc(), w.must(c).GetRpc()
	if string(first.Output) != "3" || first.Duplicate || string(again.Output) != "3" || !again.Duplicate || calls != 1 {
		t.Errorf("got %v, then %v, after %d calls", first, again, calls)
	}
	// Also of a handler that wrote nothing, and when the run has ended since.
	w.rpc("look", func(*wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{Output: []byte(`"seen"`)}}
	})
	c = rpc("a", "look", "")
	c.GetRpc().RequestId = "q"
	w.must(c)
	w.result(w.step("pay"), complete("1"))
	if again := w.must(c).GetRpc(); string(again.Output) != `"seen"` || !again.Duplicate {
		t.Errorf("got %v", again)
	}
	w.refused(Closed, rpc("a", "add", "1"))
	w.unlocked()
}

func TestLockedRPCThatWritesNothingMakesNoEntry(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.rpc("look", func(*wire.RpcTask) *wire.RpcResult { return &wire.RpcResult{Update: &wire.Update{Output: []byte("1")}} })
	before := w.must(describe("a")).GetFlow().Events
	if rep := w.must(rpc("a", "look", "")).GetRpc(); string(rep.Output) != "1" {
		t.Errorf("got %v", rep)
	}
	if after := w.must(describe("a")).GetFlow().Events; after != before {
		t.Errorf("%d events, %d before", after, before)
	}
	w.unlocked()
}

// both takes two steps that are handed out in whichever order.
func (w *world) both(names ...string) []*partition.Work {
	w.t.Helper()
	var got []*partition.Work
	for range names {
		select {
		case k := <-w.steps:
			if got = append(got, k); !slices.Contains(names, k.Name) {
				w.t.Fatalf("step %q was handed out", k.Name)
			}
		case <-w.ctx.Done():
			w.t.Fatalf("only %d steps were handed out", len(got))
		}
	}
	return got
}

func TestLockedRPCDoesEverythingAHandlerWrites(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.step("pay")
	update := &wire.Update{}
	w.rpc("add", func(*wire.RpcTask) *wire.RpcResult { return &wire.RpcResult{Update: update} })
	update = &wire.Update{
		Attributes: []*wire.Attribute{attr("total", "9")}, Publish: []*wire.Publish{{Channel: "in", Payload: []byte("1")}},
		Next:  []*wire.StepSpec{{Name: "approve", WaitFor: true}},
		Sends: []*wire.Send{{FlowId: "child", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "order", Steps: []*wire.StepSpec{{Name: "ship"}}}}}},
	}
	w.must(rpc("a", "add", ""))
	for _, k := range w.both("approve", "ship") { // of two partitions
		if k.Name == "approve" && !k.WaitPhase {
			t.Errorf("handed out %+v", k.Task)
		}
	}
	if a := w.must(get("a", "total")).GetAttributes().Attributes[0]; a.Index != wire.Attribute_INT {
		t.Errorf("got %v", a)
	}
	if update.Sends[0].FlowId != "t/f/child" || !update.Sends[0].GetStart().Closes {
		t.Errorf("sent %v", update.Sends[0])
	}
	for name, u := range map[core.Code]*wire.Update{
		UnknownAttribute: {Attributes: []*wire.Attribute{attr("nope", "1")}},
		WrongType:        {Attributes: []*wire.Attribute{attr("total", `"x"`)}},
		UnknownChannel:   {Publish: []*wire.Publish{{Channel: "out"}}},
		UnknownStep:      {Next: []*wire.StepSpec{{Name: "nope"}}},
		UnknownType:      {Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "nope"}}}}},
		Invalid:          {Events: []*wire.NewEvent{{Type: "flow.completed"}}},
	} {
		update = u
		w.refused(name, rpc("a", "add", ""))
	}
	for _, u := range []*wire.Update{
		{Sends: []*wire.Send{nil}}, {Sends: []*wire.Send{{FlowId: "x"}}}, {Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_Start{}}}},
		{Publish: []*wire.Publish{nil}}, {Next: []*wire.StepSpec{nil}}, {Events: []*wire.NewEvent{nil}},
		{Next: []*wire.StepSpec{{Name: "pay", Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{}}}}}}},
	} {
		update = u
		w.refused(Invalid, rpc("a", "add", ""))
	}
	for _, output := range []string{"{", `"` + strings.Repeat("x", 64<<10) + `"`} {
		update = &wire.Update{Output: []byte(output)}
		w.refused(RPCFailed, rpc("a", "add", ""))
	}
	update = &wire.Update{Next: []*wire.StepSpec{{Name: "pay", Wait: &wire.Wait{Conditions: []*wire.Condition{
		{On: &wire.Condition_Flow{Flow: &wire.OnFlow{Start: &wire.StartFlow{Type: "order", Steps: []*wire.StepSpec{{Name: "ship"}}}}}}}}}}}
	w.must(rpc("a", "add", ""))
	w.unlocked()
}

// hold makes an RPC wait for the test.
func (w *world) hold(name string) chan func(*wire.RpcResult, error) {
	ch := make(chan func(*wire.RpcResult, error), 10)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rpcs[name] = func(_ *wire.RpcTask, done func(*wire.RpcResult, error)) { ch <- done }
	return ch
}

func TestLockContention(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	held := w.hold("add")
	first := w.begin(w.ctx, rpc("a", "add", ""))
	done := <-held

	fast := rpc("a", "add", "")
	fast.GetRpc().FailFast = true
	if e := w.refused(Locked, fast); e.RetryAfterUs == 0 {
		t.Errorf("got %v", e)
	}
	patient := rpc("a", "add", "")
	patient.GetRpc().LockTimeoutUs = 1e6
	slow := w.begin(w.ctx, patient)
	ctx, cancel := context.WithCancel(w.ctx)
	gone := w.begin(ctx, rpc("a", "add", ""))
	second := w.begin(w.ctx, rpc("a", "add", ""))
	for w.svc.locks.waiting.Load() != 3 {
		w.must(get("a"))
	}
	w.clock.advance(time.Second)
	if a := w.next(slow); a.Error.GetCode() != string(Deadline) {
		t.Errorf("got %v", a)
	}
	cancel()
	if a := w.next(gone); a.Error.GetCode() != string(Cancelled) {
		t.Errorf("got %v", a)
	}
	done(adder(&wire.RpcTask{Input: []byte("4")}), nil)
	if a := w.next(first); string(a.GetRpc().GetOutput()) != "4" {
		t.Errorf("got %v", a)
	}
	(<-held)(nil, errors.New("worker lost"))
	if a := w.next(second); a.Error.GetCode() != string(NoWorker) {
		t.Errorf("got %v", a)
	}
	w.unlocked()
}

func TestLockWaitersAreBounded(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	held := w.hold("add")
	var all []chan *wire.Answer
	all = append(all, w.begin(w.ctx, rpc("a", "add", "")))
	done := <-held
	for range MaxLockWaiters {
		all = append(all, w.begin(w.ctx, rpc("a", "add", "")))
	}
	w.refused(Overloaded, rpc("a", "add", ""))
	w.rpc("add", adder)
	done(nil, errors.New("worker lost"))
	for _, ch := range all[1:] {
		if a := w.next(ch); a.Error != nil {
			t.Fatalf("got %v", a)
		}
	}
	w.unlocked()
}

func TestLockedRPCWhoseCallerHasGone(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	held := w.hold("add")
	ctx, cancel := context.WithCancel(w.ctx)
	ch := w.begin(ctx, rpc("a", "add", ""))
	done := <-held
	cancel()
	if k := <-w.cancelled; k.Name != "add" {
		t.Errorf("cancelled %v", k)
	}
	done(adder(&wire.RpcTask{}), nil)
	if a := w.next(ch); a.Error.GetCode() != string(Cancelled) {
		t.Errorf("got %v", a)
	}
	if as := w.must(get("a")).GetAttributes().Attributes; len(as) != 0 {
		t.Errorf("it wrote %v", as)
	}
	w.unlocked()
}

func TestRPCWhoseTimeIsOver(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	held := w.hold("add")
	ch := w.begin(w.ctx, rpc("a", "add", ""))
	done := <-held
	w.must(setAttr("a", attr("total", "3")))
	w.clock.advance(time.Minute)
	done(adder(&wire.RpcTask{}), nil) // meets a conflict or a deadline
	if a := w.next(ch); a.Error.GetCode() != string(Deadline) && a.Error != nil {
		t.Errorf("got %v", a)
	}
	w.unlocked()
}
