package flows

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

func reset(id, step string, exec uint64) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Reset_{Reset_: &wire.ResetRequest{FlowId: id, Step: step, Exec: exec}}}
}

func payloads(k *partition.Work) string {
	var out []string
	for _, m := range k.Matched {
		out = append(out, string(m.Payload))
	}
	return strings.Join(out, " ")
}

// Each "pay" waits for two messages and adds one to the total.
func paySpec() *wire.StepSpec {
	return &wire.StepSpec{Name: "pay", Input: []byte("7"), Wait: &wire.Wait{Conditions: []*wire.Condition{
		{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "in"}}},
		{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "item.1", AtMost: 2}}},
	}}}
}

func TestResetGoesBackToAStep(t *testing.T) {
	w := newWorld(t)
	first := w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Input: []byte("7"), Spec: paySpec(), Attributes: []*wire.Attribute{attr("total", "0"), attr("doc", "1")}})).GetStart().RunId
	var second *partition.Work
	for i := range 4 {
		w.must(publish("a", "item.1", "", fmt.Sprintf(`"i%d"`, i)))
		w.must(publish("a", "in", "", fmt.Sprint(i)))
		k := w.step("pay")
		if i == 1 {
			second = k
			w.must(setAttr("a", attr("doc", "2"))) // after the start of the second
		}
		if i < 3 {
			w.result(k, &wire.StepResult{Attributes: []*wire.Attribute{attr("total", fmt.Sprint(i+1))}, Next: []*wire.StepSpec{paySpec()}})
		}
	}
	w.must(publish("a", "in", "", "99")) // waits
	run := w.must(reset("a", "", second.Exec)).GetReset_().RunId
	if run == "" || run == first {
		t.Errorf("run %q", run)
	}
	k := w.step("pay")
	if string(k.Input) != "7" || payloads(k) != `1 "i1" "i2"` || k.RunID != run {
		t.Errorf("handed out %s with %s", k.Input, payloads(k))
	}
	as := w.must(get("a")).GetAttributes().Attributes
	if value(t, as, "total") != "1" || value(t, as, "doc") != "1" || as[len(as)-1].Index != wire.Attribute_INT {
		t.Errorf("attributes are %v", as)
	}
	var left []string
	for _, ch := range []string{"in", "item.1"} {
		for _, m := range w.must(list("a", ch)).GetMessages().Messages {
			left = append(left, string(m.Payload))
		}
	}
	if strings.Join(left, " ") != `2 3 99 "i3"` {
		t.Errorf("waiting are %v", left)
	}

	// Its last start, by name, of a run that is closed.
	w.result(k, complete("1"))
	w.must(reset("a", "pay", 0))
	if k := w.step("pay"); payloads(k) != `1 "i1" "i2"` {
		t.Errorf("handed out with %s", payloads(k))
	}
}

func TestResetRunsAWaitForAgain(t *testing.T) {
	w := newWorld(t)
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "approve"}))
	w.result(w.step("approve"), &wire.StepResult{Attributes: []*wire.Attribute{attr("total", "5")}, Wait: &wire.Wait{Conditions: []*wire.Condition{
		{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "in"}}}}}})
	w.must(publish("a", "in", "", "1"))
	k := w.step("approve")
	if k.WaitPhase {
		t.Fatal("WaitFor again")
	}
	w.must(reset("a", "approve", 0))
	if k := w.step("approve"); !k.WaitPhase || k.Number != 1 {
		t.Errorf("handed out %+v", k.Task)
	}
	if as := w.must(get("a")).GetAttributes().Attributes; len(as) != 0 {
		t.Errorf("attributes are %v", as)
	}
	if ms := w.must(list("a", "in")).GetMessages().Messages; len(ms) != 1 {
		t.Errorf("waiting are %v", ms)
	}
}

func TestResetPutsBackWhatQueuedStepsHold(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.step("pay")
	var full atomic.Bool
	w.slots = func(want int) int {
		if full.Load() {
			return 0
		}
		return want
	}
	w.rpc("add", func(*wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{Next: []*wire.StepSpec{{Name: "ship", Wait: &wire.Wait{Channel: "in", Count: 2}}}}}
	})
	w.must(rpc("a", "add", ""))
	full.Store(true)
	w.must(publish("a", "in", "", "1", "2"))
	if n := len(w.must(list("a", "in")).GetMessages().Messages); n != 0 {
		t.Fatalf("%d messages wait: the step did not take them", n)
	}
	w.must(reset("a", "pay", 0))
	if ms := w.must(list("a", "in")).GetMessages().Messages; len(ms) != 2 || string(ms[0].Payload) != "1" {
		t.Errorf("waiting are %v", ms)
	}
}

func TestResetRefusals(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	w.refused(Invalid, reset("a", "", 0))
	w.refused(Invalid, reset("a", "pay", 1))
	w.refused(core.NotFound, reset("a", "", 99))
	w.refused(core.NotFound, reset("a", "ship", 0))
	w.refused(UnknownStep, reset("a", "nope", 0))
	w.refused(core.NotFound, reset("b", "pay", 0))
	c := reset("a", "pay", 0)
	c.GetReset_().Reason = strings.Repeat("x", 70_000)
	w.refused(TooLarge, c)
	w.result(k, complete("1"))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "ship", Reuse: wire.StartFlow_IF_CLOSED}))
	w.refused(core.NotFound, reset("a", "", k.Exec)) // of a former run
}

func TestSharesOfChannels(t *testing.T) {
	on := func(name string, least, most uint32) *wire.Condition {
		return &wire.Condition{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: name, AtLeast: least, AtMost: most}}}
	}
	tick := &wire.Condition{On: &wire.Condition_TimerUs{TimerUs: 1}}
	for _, c := range []struct {
		w    *wire.Wait
		n    int
		want string
	}{
		{nil, 2, ""},
		{&wire.Wait{Channel: "a", Count: 2}, 2, "a a"},
		{&wire.Wait{Conditions: []*wire.Condition{on("a", 0, 0), tick, on("b", 2, 0)}}, 3, "a b b"},
		{&wire.Wait{Conditions: []*wire.Condition{on("a", 1, 3), on("b", 1, 3)}}, 5, "a a a b b"},
		{&wire.Wait{Conditions: []*wire.Condition{on("a", 1, 0), on("b", 3, 0)}, Combinations: []*wire.Combination{{Of: []uint32{0}}, {Of: []uint32{1}}}}, 3, "b b b"},
		{&wire.Wait{Conditions: []*wire.Condition{on("a", 2, 0)}}, 1, ""},
		{&wire.Wait{Conditions: []*wire.Condition{on("a", 1, 0)}}, 2, ""},
		{&wire.Wait{Conditions: []*wire.Condition{tick}}, 0, ""},
	} {
		if got := strings.Join(shares(c.w, c.n), " "); got != c.want {
			t.Errorf("%d of %v: %q, want %q", c.n, c.w, got, c.want)
		}
	}
}
