package flows

import (
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestStartRunsTheFirstStep(t *testing.T) {
	w := newWorld(t)
	rep := w.must(start(&wire.StartRequest{
		FlowId: "a/1", FlowType: "order", Step: "approve", Input: []byte(`{"n":1}`), Priority: 4,
		Attributes: []*wire.Attribute{attr("total", "12"), attr("line.1", `{}`)},
		Publish:    []*wire.PublishRequest{{Channel: "in", Payloads: [][]byte{[]byte("1"), []byte("2")}}},
	})).GetStart()
	if rep.FlowId != "a/1" || rep.RunId == "" || !rep.Created {
		t.Errorf("got %v", rep)
	}
	k := w.step("approve")
	if string(k.Input) != `{"n":1}` || !k.WaitPhase || k.FlowID != "t/f/a/1" || k.Priority != 4 {
		t.Errorf("handed out %+v", k.Task)
	}
	for _, a := range k.Attributes {
		if want := map[string]wire.Attribute_Index{"total": wire.Attribute_INT}[a.Name]; a.Index != want {
			t.Errorf("attribute %s is indexed as %v", a.Name, a.Index)
		}
	}
	info := w.must(describe("a/1")).GetFlow()
	if info.FlowId != "a/1" || info.FlowType != "order" || info.Steps[0].State != "running" || info.Steps[0].Worker != "w1" || info.Channels[0].Pending != 2 {
		t.Errorf("described as %v", info)
	}
}

func TestStartMintsAnID(t *testing.T) {
	w := newWorld(t)
	a := w.must(start(&wire.StartRequest{Attributes: []*wire.Attribute{attr("x", "1")}})).GetStart()
	w.clock.advance(1e6)
	b := w.must(start(&wire.StartRequest{FlowType: "state"})).GetStart()
	if !strings.HasPrefix(a.FlowId, "f_") || a.FlowId >= b.FlowId {
		t.Errorf("IDs %q and %q are not in order of time", a.FlowId, b.FlowId)
	}
}

func TestStartReuse(t *testing.T) {
	w := newWorld(t)
	first := w.order("a")
	w.step("pay")
	w.refused(core.Exists, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay"}))
	rep := w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_ATTACH})).GetStart()
	if rep.Created || rep.RunId != first.RunId {
		t.Errorf("attached to %v, want run %s", rep, first.RunId)
	}
	rep = w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_TERMINATE})).GetStart()
	if !rep.Created || rep.RunId == first.RunId {
		t.Errorf("terminated into %v", rep)
	}
	w.result(w.step("pay"), complete(`1`))
	w.refused(core.Exists, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_FAILED}))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_CLOSED, RequestId: "r"}))
	again := w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", RequestId: "r"})).GetStart()
	if again.Created {
		t.Errorf("a repeated request started a flow: %v", again)
	}
}

func TestStartDelayAndTimeoutAreKept(t *testing.T) {
	w := newWorld(t)
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", DelayUs: 3600e6, TimeoutUs: 7200e6, RetentionUs: -1}))
	info := w.must(describe("a")).GetFlow()
	if info.Steps[0].State != "delayed" || info.Steps[0].NextUs != info.CreatedUs+3600e6 || info.TimeoutAtUs != info.CreatedUs+10800e6 {
		t.Errorf("described as %v", info)
	}
	w.must(&wire.Call{Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: "a", Step: "pay"}}})
	w.step("pay")
}

func TestStartRefusals(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat("x", 300)
	big := []byte(`"` + strings.Repeat("x", 70_000) + `"`)
	deep := &wire.StepSpec{Recover: &wire.StepSpec{Name: "ship", Recover: &wire.StepSpec{Name: "ship", Recover: &wire.StepSpec{Name: "ship"}}}}
	for name, c := range map[string]struct {
		code core.Code
		req  *wire.StartRequest
	}{
		"control character":     {Invalid, &wire.StartRequest{FlowId: "a\nb", FlowType: "order", Step: "pay"}},
		"not UTF-8":             {Invalid, &wire.StartRequest{FlowId: "a\xff", FlowType: "order", Step: "pay"}},
		"long ID":               {Invalid, &wire.StartRequest{FlowId: long, FlowType: "order", Step: "pay"}},
		"unknown type":          {UnknownType, &wire.StartRequest{FlowId: "a", FlowType: "invoice", Step: "pay"}},
		"reserved type":         {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "perdure.schedule", Step: "pay"}},
		"unknown step":          {UnknownStep, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "bill"}},
		"step of state":         {UnknownStep, &wire.StartRequest{FlowId: "a", Step: "pay"}},
		"unknown attribute":     {UnknownAttribute, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Attributes: []*wire.Attribute{attr("nope", "1")}}},
		"wrong int":             {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("total", `1.5`)}}},
		"wrong string":          {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("note", `1`)}}},
		"wrong keywords":        {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("tags", `["a",null]`)}}},
		"wrong time":            {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("at", `"noon"`)}}},
		"wrong float":           {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("ratio", `"1"`)}}},
		"wrong bool":            {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("paid", `1`)}}},
		"wrong bytes":           {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("raw", `[1]`)}}},
		"not JSON":              {WrongType, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("note", `"a`)}}},
		"large attribute":       {TooLarge, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{attr("note", string(big))}}},
		"missing attribute":     {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{nil}}},
		"large input":           {TooLarge, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Input: big}},
		"input is not JSON":     {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Input: []byte("{")}},
		"input without a step":  {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Input: []byte("1")}},
		"two inputs":            {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Input: []byte("1"), InputBlob: "b"}},
		"unknown channel":       {UnknownChannel, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Publish: []*wire.PublishRequest{{Channel: "out", Payloads: [][]byte{nil}}}}},
		"message elsewhere":     {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Publish: []*wire.PublishRequest{{FlowId: "b", Channel: "in", Payloads: [][]byte{nil}}}}},
		"no message":            {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Publish: []*wire.PublishRequest{nil}}},
		"bad reuse":             {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: 9}},
		"bad priority":          {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Priority: 10}},
		"negative delay":        {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", DelayUs: -1}},
		"endless timeout":       {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", TimeoutUs: 1 << 62}},
		"negative retention":    {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", RetentionUs: -2}},
		"long request ID":       {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", RequestId: long}},
		"request ID without ID": {Invalid, &wire.StartRequest{FlowType: "order", Step: "pay", RequestId: "r"}},
		"prefetch":              {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{Prefetch: true}}},
		"failure":               {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{Failure: "x"}}},
		"deep recovery":         {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: deep}},
		"unknown recovery":      {UnknownStep, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{Recover: &wire.StepSpec{Name: "x"}}}},
		"negative step timeout": {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{TimeoutUs: -1}}},
		"unknown wait":          {UnknownChannel, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{Wait: &wire.Wait{Channel: "out", Count: 1}}}},
		"key without limit":     {Invalid, &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: &wire.StepSpec{ConcurrencyKey: "k"}}},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			w.refused(c.code, start(c.req))
		})
	}
	w.t = t
	w.refused(core.NotFound, describe("a"))
	if e := w.refused(UnknownStep, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "bill"})); !strings.Contains(e.Message, "pay, ship") {
		t.Errorf("the steps that are known are not named: %s", e.Message)
	}
	if e := w.refused(UnknownType, start(&wire.StartRequest{FlowId: "a", FlowType: "invoice", Step: "bill"})); !strings.Contains(e.Message, "order") {
		t.Errorf("the types that are known are not named: %s", e.Message)
	}
}

func TestRefusalsNameFlowsAsClientsDo(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	if e := w.refused(core.Exists, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay"})); !strings.Contains(e.Message, `"a"`) {
		t.Errorf("got %q", e.Message)
	}
}

func TestStartCommandLeavesTheRequestAsItIs(t *testing.T) {
	w := newWorld(t)
	req := &wire.StartRequest{FlowId: "a", FlowType: "order", Step: "approve", Spec: &wire.StepSpec{}, Attributes: []*wire.Attribute{attr("total", "1")}}
	before := req.CloneVT()
	id, cmd, err := w.svc.StartCommand(tenant, req)
	if err != nil || id != "a" || !cmd.Closes || !cmd.Steps[0].WaitFor || cmd.Attributes[0].Index != wire.Attribute_INT {
		t.Errorf("got %q, %v, %v", id, cmd, err)
	}
	if !req.EqualVT(before) {
		t.Errorf("the request is changed: %v", req)
	}
	if _, _, err := w.svc.StartCommand(tenant, nil); err != nil { // a flow of type state with an ID of its own
		t.Error(err)
	}
}
