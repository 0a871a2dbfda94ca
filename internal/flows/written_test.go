package flows

import (
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func TestCheckResultFillsInWhatTheServerKnows(t *testing.T) {
	w := newWorld(t)
	blob := w.put("a", []byte("12345")).Blob
	r := &wire.StepResult{
		Attributes: []*wire.Attribute{attr("total", "1"), {Name: "doc", Blob: blob, Size: 99, Lsn: 7}},
		Next: []*wire.StepSpec{
			{Name: "approve"}, // its WaitFor ran with the decision and wanted nothing
			{Name: "approve", WaitFor: true},
			{Name: "approve", WaitFor: true, Wait: &wire.Wait{Channel: "in", Count: 1}},
			{Name: "pay", WaitFor: true, Recover: &wire.StepSpec{Name: "approve", WaitFor: true}},
		},
		Sends: []*wire.Send{
			{FlowId: "b", Command: &wire.Send_Publish{Publish: &wire.Publish{Channel: "any", Payload: []byte("1")}}},
			{FlowId: "c", Command: &wire.Send_Stop{Stop: &wire.StopFlow{}}},
			{FlowId: "d", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "order", Steps: []*wire.StepSpec{{Name: "approve"}, {Name: "pay", WaitFor: true}}}}},
		},
		Close: &wire.Close{How: wire.Close_IF_EMPTY, Channels: []string{"in"}, Otherwise: &wire.StepSpec{Name: "pay", WaitFor: true}},
	}
	if err := w.svc.CheckResult(tenant, "order", r); err != nil {
		t.Fatal(err)
	}
	if a := r.Attributes; a[0].Index != wire.Attribute_INT || a[1].Size != 5 || a[1].Lsn != 0 {
		t.Errorf("attributes are %v", a)
	}
	for i, want := range []bool{false, true, false, false} {
		if r.Next[i].WaitFor != want {
			t.Errorf("step %d is %v", i, r.Next[i])
		}
	}
	if !r.Next[3].Recover.WaitFor || r.Close.Otherwise.WaitFor {
		t.Errorf("got %v and %v", r.Next[3].Recover, r.Close.Otherwise)
	}
	if r.Sends[0].FlowId != "t/f/b" || r.Sends[1].FlowId != "t/f/c" || r.Sends[2].FlowId != "t/f/d" {
		t.Errorf("sends are %v", r.Sends)
	}
	child := r.Sends[2].GetStart()
	if !child.Closes || child.RetentionUs != w.svc.cfg.Retention.Microseconds() || !child.Steps[0].WaitFor || child.Steps[1].WaitFor {
		t.Errorf("the child is started with %v", child)
	}

	wait := &wire.StepResult{Wait: &wire.Wait{Conditions: []*wire.Condition{
		{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "item.9"}}}, {On: &wire.Condition_TimerUs{TimerUs: 1}},
		{On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: "e"}}},
	}}}
	if err := w.svc.CheckResult(tenant, "order", wait); err != nil || wait.Wait.Conditions[2].GetFlow().FlowId != "t/f/e" {
		t.Errorf("got %v, %v", wait, err)
	}
}

func TestCheckResultRefusals(t *testing.T) {
	w := newWorld(t)
	for want, rs := range map[string][]*wire.StepResult{
		"unknown_step":      {{Next: []*wire.StepSpec{{Name: "x"}}}, {Close: &wire.Close{Otherwise: &wire.StepSpec{Name: "x"}}}},
		"unknown_attribute": {{Attributes: []*wire.Attribute{attr("x", "1")}}},
		"unknown_channel": {
			{Publish: []*wire.Publish{{Channel: "x"}}}, {Wait: &wire.Wait{Channel: "x"}},
			{Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "x"}}}}}},
		},
		"unknown_type": {{Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "x"}}}}}},
		"invalid": {
			{Sends: []*wire.Send{{FlowId: "\n", Command: &wire.Send_Stop{}}}},
			{Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "order", Items: [][]byte{nil}}}}}},
			{Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_ChildClosed{}}}},
			{Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{}}}}}},
			{Publish: []*wire.Publish{{Channel: "in", OnBusy: wire.Publish_INTERRUPT}}},
			{Events: []*wire.NewEvent{{Type: "step.completed"}}}, {Events: []*wire.NewEvent{{}}},
			{Close: &wire.Close{How: wire.Close_FORCE, Output: []byte("{")}},
		},
		"too_large": {{Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte(`"` + strings.Repeat("x", 64<<10) + `"`)}}},
	} {
		for _, r := range rs {
			if err := w.svc.CheckResult(tenant, "order", r); string(code(err)) != want {
				t.Errorf("%v: %v, want %s", r, err, want)
			}
		}
	}
	// Of a type that this server does not know names are not judged.
	if err := w.svc.CheckResult(tenant, "other", &wire.StepResult{Next: []*wire.StepSpec{{Name: "x", WaitFor: true}}, Attributes: []*wire.Attribute{attr("y", "1")}}); err != nil {
		t.Error(err)
	}
}
