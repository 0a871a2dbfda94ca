package flows

import (
	"context"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func wait(id, run string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: id, RunId: run}}}
}

func TestWaitAnswersWhenTheRunIsClosed(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	k := w.step("pay")
	newest, named := w.begin(w.ctx, wait("a", "")), w.begin(w.ctx, wait("a", run))
	w.must(describe("a")) // both wait by now
	w.result(k, complete(`{"ok":true}`))
	for _, ch := range []chan *wire.Answer{newest, named} {
		info := w.next(ch).GetFlow()
		if info.GetStatus() != wire.Status_COMPLETED || string(info.Output) != `{"ok":true}` || info.RunId != run || info.ClosedUs == 0 {
			t.Errorf("got %v", info)
		}
	}
	if info := w.must(wait("a", run)).GetFlow(); string(info.Output) != `{"ok":true}` || info.FlowType != "order" {
		t.Errorf("got %v of a closed run", info)
	}
	if n := w.svc.waiters.total.Load(); n != 0 {
		t.Errorf("%d calls wait still", n)
	}
}

func TestWaitForAFormerRun(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	w.result(w.step("pay"), &wire.StepResult{Close: &wire.Close{How: wire.Close_FAIL, Error: "no money"}})
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_CLOSED}))
	info := w.must(wait("a", run)).GetFlow()
	if info.Status != wire.Status_FAILED || info.Error != "no money" || info.RunId != run {
		t.Errorf("got %v", info)
	}
	w.refused(UnknownRun, wait("a", "run_x"))
	w.refused(core.NotFound, wait("b", ""))
}

func TestWaitSeesTheRunTerminatedByTheNext(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	ch := w.begin(w.ctx, wait("a", run))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_TERMINATE}))
	if info := w.next(ch).GetFlow(); info.GetStatus() != wire.Status_TERMINATED || info.RunId != run {
		t.Errorf("got %v", info)
	}
}

func TestWaitEndsWithTheFlow(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	ch := w.begin(w.ctx, wait("a", ""))
	w.must(&wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}})
	if a := w.next(ch); a.GetFlow().GetStatus() != wire.Status_TERMINATED {
		t.Errorf("got %v", a)
	}
}

func TestWaitGivesUpWithTheStateSoFar(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	c := wait("a", "")
	c.TimeoutUs = 5e6
	ch := w.begin(w.ctx, c)
	w.awaitWaiters(1)
	w.clock.advance(5 * time.Second)
	a := w.next(ch)
	if a.Error.GetCode() != string(Deadline) || a.GetFlow().GetSteps()[0].GetStep() != "pay" {
		t.Errorf("got %v", a)
	}
}

func TestWaitEndsWithItsCaller(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	ctx, cancel := context.WithCancel(w.ctx)
	ch := w.begin(ctx, wait("a", ""))
	w.awaitWaiters(1)
	cancel()
	if a := w.next(ch); a.Error.GetCode() != string(Cancelled) {
		t.Errorf("got %v", a)
	}
	w.awaitWaiters(0)
}

// awaitWaiters passes when so many calls wait: a read behind them in the queue
// of their partition has been answered.
func (w *world) awaitWaiters(n int64) {
	w.t.Helper()
	for w.svc.waiters.total.Load() != n {
		if w.ctx.Err() != nil {
			w.t.Fatalf("%d calls wait, want %d", w.svc.waiters.total.Load(), n)
		}
		w.must(describe("a"))
	}
}

func TestWaitFollowsAReset(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	k := w.step("pay")
	newest, named := w.begin(w.ctx, wait("a", "")), w.begin(w.ctx, wait("a", run))
	w.awaitWaiters(2)
	again := w.must(&wire.Call{Verb: &wire.Call_Reset_{Reset_: &wire.ResetRequest{FlowId: "a", Exec: k.Exec}}}).GetReset_().RunId
	if info := w.next(named).GetFlow(); info.GetStatus() != wire.Status_TERMINATED || info.Error == "" {
		t.Errorf("got %v", info)
	}
	w.result(w.step("pay"), complete(`2`))
	if info := w.next(newest).GetFlow(); info.GetStatus() != wire.Status_COMPLETED || info.RunId != again {
		t.Errorf("got %v, want run %s", info, again)
	}
}

func waitAttr(id, name, equals string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_WaitAttribute{WaitAttribute: &wire.WaitAttributeRequest{FlowId: id, Name: name, Equals: []byte(equals)}}}
}

func setAttr(id string, as ...*wire.Attribute) *wire.Call {
	return &wire.Call{Verb: &wire.Call_SetAttributes{SetAttributes: &wire.SetAttributesRequest{FlowId: id, Attributes: as}}}
}

func TestWaitAttribute(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	some, one := w.begin(w.ctx, waitAttr("a", "line.7", "")), w.begin(w.ctx, waitAttr("a", "line.7", `{"b":2,"a":1}`))
	w.awaitWaiters(2)
	w.must(setAttr("a", attr("line.7", `{}`)))
	if got := value(t, w.next(some).GetAttributes().GetAttributes(), "line.7"); got != "{}" {
		t.Errorf("got %q", got)
	}
	w.result(k, &wire.StepResult{Attributes: []*wire.Attribute{attr("line.7", `{"a":1, "b":2}`)}, Next: []*wire.StepSpec{{Name: "ship"}}})
	if got := value(t, w.next(one).GetAttributes().GetAttributes(), "line.7"); got != `{"a":1, "b":2}` {
		t.Errorf("got %q", got)
	}
	w.must(waitAttr("a", "line.7", `{"b":2,"a":1}`)) // is there already
	never := w.begin(w.ctx, waitAttr("a", "total", ""))
	w.awaitWaiters(1)
	w.result(w.step("ship"), complete(`1`))
	if a := w.next(never); a.Error.GetCode() != string(Closed) {
		t.Errorf("got %v", a)
	}
	w.refused(Closed, waitAttr("a", "total", ""))
	w.refused(UnknownAttribute, waitAttr("a", "nope", ""))
	w.refused(Invalid, waitAttr("a", "total", "{"))
	w.refused(Invalid, waitAttr("a", "", ""))
	w.refused(core.NotFound, waitAttr("b", "total", ""))
}

func TestWaitAttributeGivesUp(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	ch := w.begin(w.ctx, waitAttr("a", "total", "5"))
	w.awaitWaiters(1)
	w.must(setAttr("a", attr("total", `4`)))
	w.clock.advance(time.Minute)
	a := w.next(ch)
	if a.Error.GetCode() != string(Deadline) || value(t, a.GetAttributes().GetAttributes(), "total") != "4" {
		t.Errorf("got %v", a)
	}
}

func TestWaitersAreBounded(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.svc.waiters.most = 1
	w.begin(w.ctx, wait("a", ""))
	w.refused(Overloaded, wait("a", ""))
}

// TestWaitCounts: who waited hears of as many events and steps as a description
// shows, from wherever the wait began.
func TestWaitCounts(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	k := w.step("pay")
	var waits []chan *wire.Answer
	waits = append(waits, w.begin(w.ctx, wait("a", "")))
	w.result(k, &wire.StepResult{Next: []*wire.StepSpec{{Name: "ship", Recover: &wire.StepSpec{Name: "pay"}}}})
	k = w.step("ship")
	waits = append(waits, w.begin(w.ctx, wait("a", run)))
	w.must(publish("a", "in", "", "1"))
	w.result(k, &wire.StepResult{Retry: &wire.Retry{Error: "no", Permanent: true}}) // its recovery goes on
	k = w.step("pay")
	waits = append(waits, w.begin(w.ctx, wait("a", "")))
	w.must(setAttr("a", attr("note", `"x"`)))
	w.result(k, &wire.StepResult{Retry: &wire.Retry{Error: "no", Permanent: true}, Close: &wire.Close{How: wire.Close_FAIL, Error: "no"}})
	waits = append(waits, w.begin(w.ctx, wait("a", "")))
	want := w.must(describe("a")).GetFlow()
	if want.Events < 8 || want.StepsDone != 2 {
		t.Errorf("described as %v", want)
	}
	for i, ch := range waits {
		if got := w.next(ch).GetFlow(); got.Events != want.Events || got.StepsDone != want.StepsDone {
			t.Errorf("wait %d: %d events and %d steps, want %d and %d", i, got.Events, got.StepsDone, want.Events, want.StepsDone)
		}
	}
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_CLOSED}))
	if got := w.must(wait("a", run)).GetFlow(); got.StepsDone != 2 {
		t.Errorf("a former run is %v", got)
	}
}
