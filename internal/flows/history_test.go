package flows

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func history(req *wire.HistoryRequest) *wire.Call {
	return &wire.Call{Verb: &wire.Call_History{History: req}}
}

func typesOf(events []*wire.Event) string {
	var out []string
	for _, ev := range events {
		out = append(out, ev.Type)
	}
	return strings.Join(out, " ")
}

const paidLog = "flow.started step.started attributes.set step.completed flow.completed"

// paid runs a flow to its end.
func (w *world) paid(id string) {
	w.t.Helper()
	w.order(id)
	k := w.step("pay")
	w.must(setAttr(id, attr("total", "1")))
	w.result(k, complete("1"))
}

func TestHistoryIsPaged(t *testing.T) {
	w := newWorld(t)
	w.paid("a")
	all := w.must(history(&wire.HistoryRequest{FlowId: "a"})).GetHistory()
	if typesOf(all.Events) != paidLog || all.Next != nil {
		t.Errorf("got %s, next %v", typesOf(all.Events), all.Next)
	}
	for _, newest := range []bool{false, true} {
		req := &wire.HistoryRequest{FlowId: "a", Limit: 2, NewestFirst: newest}
		var got []*wire.Event
		pages := 0
		for {
			rep := w.must(history(req)).GetHistory()
			got = append(got, rep.Events...)
			if pages++; rep.Next == nil {
				break
			}
			req.After = rep.Next
		}
		if newest {
			for i := range got {
				if got[i].Type != all.Events[len(all.Events)-1-i].Type {
					t.Errorf("newest first: %s", typesOf(got))
					break
				}
			}
		} else if typesOf(got) != paidLog {
			t.Errorf("got %s", typesOf(got))
		}
		if pages != 3 {
			t.Errorf("%d pages", pages)
		}
	}
	w.refused(core.NotFound, history(&wire.HistoryRequest{FlowId: "b"}))
	w.refused(BadCursor, history(&wire.HistoryRequest{FlowId: "a", After: &wire.Cursor{Lsn: 1 << 40}}))
	w.refused(UnknownRun, history(&wire.HistoryRequest{FlowId: "a", RunId: "run_x"}))
	w.refused(Invalid, history(&wire.HistoryRequest{FlowId: "a", Live: true, NewestFirst: true}))
}

func TestHistoryOfOneRun(t *testing.T) {
	w := newWorld(t)
	var runs []string
	for i := range 3 {
		runs = append(runs, w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_CLOSED})).GetStart().RunId)
		w.result(w.step("pay"), complete(fmt.Sprint(i)))
	}
	for i, run := range runs {
		for _, newest := range []bool{false, true} {
			rep := w.must(history(&wire.HistoryRequest{FlowId: "a", RunId: run, NewestFirst: newest})).GetHistory()
			evs := rep.Events
			if len(evs) != 4 || rep.Next != nil {
				t.Fatalf("run %d: %s", i, typesOf(evs))
			}
			if newest {
				evs[0], evs[3] = evs[3], evs[0]
			}
			if evs[0].Scope != run || string(evs[3].Items[0]) != fmt.Sprint(i) {
				t.Errorf("run %d: %v", i, evs)
			}
		}
		// Live, a run that is over ends at once.
		evs := w.all(w.begin(w.ctx, history(&wire.HistoryRequest{FlowId: "a", RunId: run, Live: true})))
		if len(evs) != 4 {
			t.Errorf("run %d: %s", i, typesOf(evs))
		}
	}
}

// all reads a stream to its end.
func (w *world) all(ch chan *wire.Answer) (events []*wire.Event) {
	w.t.Helper()
	for {
		a := w.next(ch)
		if a.Error != nil {
			w.t.Fatalf("stream ended with %v", a.Error)
		}
		events = append(events, a.GetHistory().GetEvents()...)
		if !a.More {
			return events
		}
	}
}

func TestLiveHistoryHasNoGapAndNoDouble(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	const n = 60
	var streams []chan *wire.Answer
	for i := range n {
		streams = append(streams, w.begin(w.ctx, history(&wire.HistoryRequest{FlowId: "a", Live: true, Limit: 3})))
		w.must(setAttr("a", attr("total", fmt.Sprint(i))))
	}
	w.result(k, complete("1"))
	for i, ch := range streams {
		evs := w.all(ch)
		if len(evs) != n+4 {
			t.Fatalf("stream %d has %d events", i, len(evs))
		}
		for j := 1; j < len(evs); j++ {
			if !core.CursorOf(evs[j-1]).Before(evs[j]) {
				t.Fatalf("stream %d: event %v after %v", i, evs[j], evs[j-1])
			}
		}
	}
}

func TestLiveHistoryGoesOnFromACursor(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	first := w.must(history(&wire.HistoryRequest{FlowId: "a", Limit: 1})).GetHistory()
	ch := w.begin(w.ctx, history(&wire.HistoryRequest{FlowId: "a", Live: true, After: first.Next}))
	if a := w.next(ch); typesOf(a.GetHistory().GetEvents()) != "step.started" || a.GetHistory().Next == nil || !a.More {
		t.Errorf("got %v", a)
	}
	w.result(k, complete("1"))
	if evs := w.all(ch); typesOf(evs) != "step.completed flow.completed" {
		t.Errorf("got %s", typesOf(evs))
	}
}

func TestLiveHistoryOfARunThatAnotherFollows(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	one := w.begin(w.ctx, history(&wire.HistoryRequest{FlowId: "a", Live: true, RunId: run}))
	every := w.begin(w.ctx, history(&wire.HistoryRequest{FlowId: "a", Live: true}))
	w.next(one)
	w.next(every)
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_TERMINATE}))
	if evs := w.all(one); evs[len(evs)-1].Type != core.EventTerminated {
		t.Errorf("got %s", typesOf(evs))
	}
	w.must(&wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}})
	if evs := w.all(every); !strings.Contains(typesOf(evs), "flow.terminated flow.started step.started") {
		t.Errorf("got %s", typesOf(evs))
	}
}

func TestWatchShowsOutputs(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	w.hub.Delta("t/f/a", "", k.Exec, 1, "Hel")
	ch := w.begin(w.ctx, &wire.Call{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "a"}}})
	if a := w.next(ch); typesOf(a.GetHistory().GetEvents()) != "flow.started step.started" {
		t.Errorf("got %v", a)
	}
	if o := w.next(ch).GetHistory().GetOutputs(); len(o) != 1 || o[0].Text != "Hel" || o[0].Offset != 0 || o[0].Exec != k.Exec || o[0].Attempt != 1 {
		t.Errorf("got %v", o)
	}
	w.hub.Delta("t/f/a", "", k.Exec, 1, "lo")
	if o := w.next(ch).GetHistory().GetOutputs(); len(o) != 1 || o[0].Text != "lo" || o[0].Offset != 3 {
		t.Errorf("got %v", o)
	}
	w.result(k, complete("1"))
	if evs := w.all(ch); typesOf(evs) != "step.completed flow.completed" {
		t.Errorf("got %s", typesOf(evs))
	}
}

func TestStreamsEnd(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	ctx, cancel := context.WithCancel(w.ctx)
	gone := w.begin(ctx, &wire.Call{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "a"}}})
	late := w.begin(w.ctx, &wire.Call{TimeoutUs: 5e6, Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "a"}}})
	w.next(gone)
	w.next(late)
	cancel()
	if a := w.next(gone); a.Error.GetCode() != string(Cancelled) || a.More {
		t.Errorf("got %v", a)
	}
	w.clock.advance(5e9)
	if a := w.next(late); a.Error.GetCode() != string(Deadline) || a.More {
		t.Errorf("got %v", a)
	}
	w.svc.Close()
}

func TestASlowReaderIsToldSo(t *testing.T) {
	w := newWorld(t)
	w.svc.cfg.StreamBound = 500
	w.order("a")
	block, blocked := make(chan struct{}), make(chan struct{}, 1)
	ch := make(chan *wire.Answer, 100)
	w.svc.Do(w.ctx, tenant, history(&wire.HistoryRequest{FlowId: "a", Live: true}), func(a *wire.Answer) {
		select {
		case blocked <- struct{}{}:
		default:
		}
		<-block
		ch <- a
	})
	<-blocked
	for i := range 50 {
		w.must(setAttr("a", attr("total", fmt.Sprint(i))))
	}
	close(block)
	for {
		if a := w.next(ch); !a.More {
			if a.Error.GetCode() != string(SlowReader) {
				t.Errorf("got %v", a)
			}
			return
		}
	}
}
