package flows

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func get(id string, names ...string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_GetAttributes{GetAttributes: &wire.GetAttributesRequest{FlowId: id, Names: names}}}
}

func describe(id string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: id}}}
}

func TestAttributes(t *testing.T) {
	w := newWorld(t)
	run := w.order("a").RunId
	set := w.must(setAttr("a", attr("total", "1"), attr("line.a", `"x"`), attr("line.b", `[]`), attr("tags", `["p","q"]`))).GetAttributes()
	if set.RunId != run || len(set.Attributes) != 4 || set.Attributes[0].Index != wire.Attribute_INT {
		t.Errorf("set %v", set)
	}
	for names, want := range map[string]string{"": "line.a line.b tags total", "total": "total", "line.*": "line.a line.b", "tags line.a nope": "line.a tags", "nope": ""} {
		rep := w.must(get("a", strings.Fields(names)...)).GetAttributes()
		var got []string
		for _, a := range rep.Attributes {
			got = append(got, a.Name)
		}
		if strings.Join(got, " ") != want || rep.RunId != run {
			t.Errorf("%q gives %v of %s", names, got, rep.RunId)
		}
	}
	w.must(setAttr("a", attr("line.a", "")))
	if rep := w.must(get("a", "line.a")).GetAttributes(); len(rep.Attributes) != 0 {
		t.Errorf("removed, but there is %v", rep)
	}
	w.refused(core.NotFound, get("b"))
	w.refused(Invalid, get("a", ""))
	w.refused(Invalid, get("a", make([]string, 2000)...))
	w.refused(Invalid, get(""))
	w.refused(Invalid, setAttr("a"))
	w.refused(core.NotFound, setAttr("b", attr("total", "1")))
	w.refused(UnknownAttribute, setAttr("a", attr("nope", "1")))
	w.refused(WrongType, setAttr("a", attr("total", "true")))
	w.refused(Invalid, setAttr("a", &wire.Attribute{Name: "doc", Value: []byte("1"), Blob: "x"}))
	if got := value(t, w.must(get("a")).GetAttributes().Attributes, "total"); got != "1" {
		t.Errorf("a refused call has set %q", got)
	}
}

func TestAttributesOfATypeNobodyKnowsAnyMore(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.must(setAttr("a", attr("total", "1")))
	w.mu.Lock()
	delete(w.types, "order")
	w.mu.Unlock()
	rep := w.must(setAttr("a", attr("total", "2"), attr("other", "3"))).GetAttributes()
	if rep.Attributes[0].Index != wire.Attribute_INT {
		t.Errorf("the index is lost: %v", rep)
	}
	w.must(publish("a", "anywhere", "", "1"))
	w.refused(UnknownType, start(&wire.StartRequest{FlowId: "b", FlowType: "order", Step: "pay"}))
	w.refused(UnknownType, rpc("a", "total", ""))
}

func publish(id, channel, key string, payloads ...string) *wire.Call {
	req := &wire.PublishRequest{FlowId: id, Channel: channel, RequestId: key}
	for _, p := range payloads {
		req.Payloads = append(req.Payloads, []byte(p))
	}
	return &wire.Call{Verb: &wire.Call_Publish{Publish: req}}
}

func list(id, channel string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_ListMessages{ListMessages: &wire.ListMessagesRequest{FlowId: id, Channel: channel}}}
}

func drop(id, channel string, ids ...string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_DropMessages{DropMessages: &wire.DropMessagesRequest{FlowId: id, Channel: channel, Ids: ids}}}
}

func TestMessages(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	one := w.must(publish("a", "in", "k", `1`)).GetPublish()
	if len(one.MessageIds) != 1 || one.Duplicate {
		t.Errorf("got %v", one)
	}
	if again := w.must(publish("a", "in", "k", `1`)).GetPublish(); !again.Duplicate || again.MessageIds[0] != one.MessageIds[0] {
		t.Errorf("got %v again", again)
	}
	w.refused(core.KeyReused, publish("a", "in", "k", `2`))
	many := w.must(publish("a", "in", "m", `2`, `3`, `4`)).GetPublish()
	if len(many.MessageIds) != 3 || many.Duplicate {
		t.Errorf("got %v", many)
	}
	if again := w.must(publish("a", "in", "m", `2`, `3`, `4`)).GetPublish(); !again.Duplicate || fmt.Sprint(again.MessageIds) != fmt.Sprint(many.MessageIds) {
		t.Errorf("got %v again", again)
	}
	if more := w.must(publish("a", "in", "m", `2`, `3`, `4`, `5`)).GetPublish(); more.Duplicate || len(more.MessageIds) != 4 {
		t.Errorf("got %v for one more", more)
	}
	msgs := w.must(list("a", "in")).GetMessages().Messages
	var got []string
	for _, m := range msgs {
		got = append(got, string(m.Payload))
	}
	if strings.Join(got, "") != "12345" || msgs[1].Id != many.MessageIds[0] {
		t.Errorf("waiting are %v", msgs)
	}
	if n := w.must(drop("a", "in", many.MessageIds[0], "nope")).GetMessages().Dropped; n != 1 {
		t.Errorf("dropped %d", n)
	}
	if n := w.must(drop("a", "in")).GetMessages().Dropped; n != 4 {
		t.Errorf("dropped %d", n)
	}
	if msgs := w.must(list("a", "item.7")).GetMessages().Messages; len(msgs) != 0 {
		t.Errorf("waiting are %v", msgs)
	}
}

func TestMessageRefusals(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.refused(UnknownChannel, publish("a", "out", "", "1"))
	w.refused(UnknownChannel, list("a", "out"))
	w.refused(UnknownChannel, drop("a", "out"))
	w.refused(Invalid, publish("a", "", "", "1"))
	w.refused(Invalid, publish("a", "in", ""))
	w.refused(Invalid, publish("a", "in", "", "{"))
	w.refused(Invalid, publish("a", "in", strings.Repeat("k", 255), "1", "2"))
	w.refused(TooLarge, publish("a", "in", "", `"`+strings.Repeat("x", 70_000)+`"`))
	w.refused(core.NotFound, publish("b", "in", "", "1"))
	w.refused(core.NotFound, list("b", "in"))
	w.refused(core.NotFound, drop("b", "in"))
	w.refused(Invalid, drop("a", "in", make([]string, 2000)...))

	c := publish("a", "in", "", "1", "2", "3")
	c.GetPublish().MaxPending = 2
	if e := w.refused(core.QueueFull, c); !strings.HasPrefix(e.Message, "only 2 of 3 messages were published") || e.RetryAfterUs == 0 {
		t.Errorf("got %v", e)
	}
	w.result(w.step("pay"), complete("1"))
	w.refused(Closed, publish("a", "in", "", "1"))
}

func stop(id, run string, how wire.StopFlow_How) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{FlowId: id, RunId: run, How: how, Reason: "enough"}}}
}

func TestStop(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	if rep := w.must(stop("a", "", wire.StopFlow_CANCEL)).GetStop(); rep.Status != wire.Status_RUNNING || rep.RunId != k.RunID {
		t.Errorf("got %v while the handler winds down", rep)
	}
	if info := w.must(describe("a")).GetFlow(); !info.Cancelling {
		t.Errorf("got %v", info)
	}
	w.result(k, &wire.StepResult{})
	if info := w.must(wait("a", "")).GetFlow(); info.Status != wire.Status_CANCELLED || info.Error != "enough" {
		t.Errorf("got %v", info)
	}
	w.refused(Closed, stop("a", "", wire.StopFlow_CANCEL))

	for how, want := range map[wire.StopFlow_How]wire.Status{wire.StopFlow_TERMINATE: wire.Status_TERMINATED, wire.StopFlow_FAIL: wire.Status_FAILED} {
		id := "b" + how.String()
		run := w.order(id).RunId
		w.refused(Conflict, stop(id, "run_other", how))
		if rep := w.must(stop(id, run, how)).GetStop(); rep.Status != want {
			t.Errorf("%v gives %v", how, rep)
		}
	}
	w.refused(core.NotFound, stop("z", "", 0))
	w.refused(Invalid, stop("z", "", 7))
	w.refused(TooLarge, &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{FlowId: "a", Reason: strings.Repeat("x", 70_000)}}})
	w.refused(Invalid, &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{FlowId: "a", GraceUs: -1}}})
}

func TestDelete(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	del := &wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}}
	if w.must(del).GetDone() == nil {
		t.Error("not done")
	}
	w.refused(core.NotFound, del)
	w.refused(TooLarge, &wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a", Reason: strings.Repeat("x", 70_000)}}})
}

func TestSkipTimer(t *testing.T) {
	w := newWorld(t)
	skip := func(id, step, cond string) *wire.Call {
		return &wire.Call{Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: id, Step: step, Condition: cond}}}
	}
	w.must(start(&wire.StartRequest{FlowId: "c"}))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "approve"}))
	w.result(w.step("approve"), &wire.StepResult{Wait: &wire.Wait{
		Conditions: []*wire.Condition{
			{Name: "late", On: &wire.Condition_TimerUs{TimerUs: 3600e6}},
			{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "in", AtMost: 3}}},
			{Name: "child", On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: "t/f/c"}}},
		},
		Combinations: []*wire.Combination{{Of: []uint32{0}}, {Of: []uint32{1, 2}}},
	}})
	st := w.must(describe("a")).GetFlow().Steps[0]
	if !strings.HasPrefix(st.WaitsFor, "late: a timer at 20") || !strings.HasSuffix(st.WaitsFor, ` or 1 to 3 messages of channel "in" and child: flow "c" to close`) || st.NextUs == 0 || st.State != "waiting" {
		t.Errorf("waits for %q until %d", st.WaitsFor, st.NextUs)
	}
	w.refused(core.NotFound, skip("a", "approve", "early"))
	w.refused(UnknownStep, skip("a", "nope", ""))
	w.refused(Invalid, skip("a", strings.Repeat("x", 300), ""))
	w.refused(core.NotFound, skip("b", "", ""))
	w.must(skip("a", "approve", "late"))
	if k := w.step("approve"); k.WaitPhase || !k.Conditions[0].Done {
		t.Errorf("handed out %+v", k.Task)
	}
	w.refused(core.NotFound, skip("a", "", ""))
}

func TestQueuesAndWorkers(t *testing.T) {
	w := newWorld(t)
	if q := w.must(&wire.Call{Verb: &wire.Call_Queues{}}).GetQueues(); q.Queues[0].Queued != 3 {
		t.Errorf("got %v", q)
	}
	if q := w.must(&wire.Call{Verb: &wire.Call_Workers{}}).GetWorkers(); q.Workers[0].WorkerId != "w1" {
		t.Errorf("got %v", q)
	}
}

type finder struct{}

func (finder) Search(_ context.Context, tenant string, q *wire.SearchRequest) (*wire.SearchReply, error) {
	if q.Query == "(" {
		return nil, &Error{Code: Invalid, Message: "a bracket is open", Position: 1}
	}
	return &wire.SearchReply{Flows: []*wire.FlowInfo{{FlowId: tenant + q.Query}}}, nil
}

func (finder) Do(_ context.Context, _ string, c *wire.Call) (*wire.Answer, error) {
	return &wire.Answer{Result: &wire.Answer_Schedule{Schedule: &wire.Schedule{Id: c.GetGetSchedule().GetId()}}}, nil
}

func TestSearchAndSchedulesAreServedByOthers(t *testing.T) {
	w := newWorld(t)
	search := func(q string) *wire.Call {
		return &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Query: q}}}
	}
	schedule := &wire.Call{Verb: &wire.Call_GetSchedule{GetSchedule: &wire.ScheduleRequest{Id: "s"}}}
	w.refused(NotServed, search("x"))
	w.refused(NotServed, schedule)
	w.svc.cfg.Searcher, w.svc.cfg.Schedules = finder{}, finder{}
	if rep := w.must(search("x")).GetSearch(); rep.Flows[0].FlowId != "tx" {
		t.Errorf("got %v", rep)
	}
	if e := w.refused(Invalid, search("(")); e.Position != 1 {
		t.Errorf("got %v", e)
	}
	if rep := w.must(schedule).GetSchedule(); rep.Id != "s" {
		t.Errorf("got %v", rep)
	}
}

func TestCallsThatAreNone(t *testing.T) {
	w := newWorld(t)
	w.refused(Invalid, &wire.Call{})
	w.refused(Invalid, &wire.Call{TimeoutUs: -1, Verb: &wire.Call_Queues{}})
	for _, c := range []*wire.Call{
		{Verb: &wire.Call_Describe{}}, {Verb: &wire.Call_Wait{}}, {Verb: &wire.Call_Stop{}}, {Verb: &wire.Call_GetAttributes{}},
		{Verb: &wire.Call_SetAttributes{}}, {Verb: &wire.Call_WaitAttribute{}}, {Verb: &wire.Call_Publish{}}, {Verb: &wire.Call_ListMessages{}},
		{Verb: &wire.Call_DropMessages{}}, {Verb: &wire.Call_Rpc{}}, {Verb: &wire.Call_SkipTimer{}}, {Verb: &wire.Call_Reset_{}},
		{Verb: &wire.Call_History{}}, {Verb: &wire.Call_Delete{}}, {Verb: &wire.Call_Watch{}},
	} {
		w.refused(Invalid, c)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	if a := w.next(w.begin(ctx, get("a"))); a.Error.GetCode() != string(Cancelled) {
		t.Errorf("got %v", a)
	}
}

func TestReadsAreBounded(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.svc.reads = newBound(0)
	if e := w.refused(Overloaded, &wire.Call{Verb: &wire.Call_History{History: &wire.HistoryRequest{FlowId: "a"}}}); e.RetryAfterUs == 0 {
		t.Errorf("got %v", e)
	}
	w.svc.streams = newBound(0)
	w.refused(Overloaded, &wire.Call{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "a"}}})
}

func TestDescribeSaysWhatStepsDo(t *testing.T) {
	w := newWorld(t)
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{Retry: &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 3600e6}}}))
	w.result(w.step("pay"), &wire.StepResult{Retry: &wire.Retry{Error: "no"}, Close: &wire.Close{How: wire.Close_FAIL}})
	w.slots = func(int) int { return 0 }
	w.rpc("add", func(*wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{Next: []*wire.StepSpec{{Name: "ship"}, {Name: "pay", Wait: &wire.Wait{Channel: "in", Count: 2}}}}}
	})
	w.must(rpc("a", "add", ""))
	w.must(setAttr("a", attr("note", `"`+strings.Repeat("x", 2000)+`"`), attr("total", "1")))
	info := w.must(describe("a")).GetFlow()
	var got []string
	for _, st := range info.Steps {
		got = append(got, st.Step+" "+st.State+" "+st.WaitsFor)
	}
	if want := `pay backoff ,ship queued ,pay waiting 2 messages of channel "in"`; strings.Join(got, ",") != want {
		t.Errorf("got %q", got)
	}
	if info.Steps[0].NextUs == 0 || info.Steps[0].Retries != 1 {
		t.Errorf("got %v", info.Steps[0])
	}
	for _, a := range info.Attributes {
		if (a.Name == "note") != (len(a.Value) == 0 && a.Size == 2002) {
			t.Errorf("attribute %v", a)
		}
	}
}
