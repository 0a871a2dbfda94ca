package flow_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestDecisions(t *testing.T) {
	b := newBed(t)
	b.wait = func(*flow.Context, string) (flow.Wait, error) { return flow.AllOf(paid.ForOne()), nil }
	tests := []struct {
		name string
		d    flow.Decision
		ok   func(*wire.StepResult) bool
	}{
		{"dead end", flow.DeadEnd(), func(r *wire.StepResult) bool { return r.Close == nil && r.Next == nil }},
		{"nowhere", flow.GoToAll(), func(r *wire.StepResult) bool { return r.Close == nil && r.Next == nil }},
		{"many", flow.GoToAll(flow.To(ship{}, order{}), flow.To(refund{}, "x")), func(r *wire.StepResult) bool {
			return len(r.Next) == 2 && r.Next[1].Name == "refund"
		}},
		{"recovery", flow.GoTo(script{}, "x"), func(r *wire.StepResult) bool {
			s := r.Next[0]
			return s.Recover.GetName() == "refund" && s.Recover.Input == nil && string(s.Input) == `"x"` && s.HeartbeatUs == 1e6
		}},
		{"delayed", flow.GoToAll(flow.To(refund{}, "x").Delayed(time.Minute)), func(r *wire.StepResult) bool {
			return r.Next[0].Wait.Conditions[0].GetTimerUs() == 60e6
		}},
		{"complete", flow.Complete(map[string]int{"a": 1}), func(r *wire.StepResult) bool {
			return r.Close.How == wire.Close_GRACEFUL && string(r.Close.Output) == `{"a":1}`
		}},
		{"complete with nothing", flow.Complete(nil), func(r *wire.StepResult) bool {
			return r.Close.How == wire.Close_GRACEFUL && r.Close.Output == nil
		}},
		{"force", flow.ForceComplete(3), func(r *wire.StepResult) bool {
			return r.Close.How == wire.Close_FORCE && string(r.Close.Output) == "3"
		}},
		{"fail", flow.Fail(errors.New("no")), func(r *wire.StepResult) bool {
			return r.Close.How == wire.Close_FAIL && r.Close.Error == "no" && r.Retry == nil
		}},
		{"if empty", flow.CompleteIfEmpty("x", flow.To(picky{}, "y"), paid, inbox.At(2)), func(r *wire.StepResult) bool {
			c := r.Close
			return c.How == wire.Close_IF_EMPTY && reflect.DeepEqual(c.Channels, []string{"paid", "inbox/2"}) &&
				c.Otherwise.Name == "picky" && len(c.Otherwise.Wait.Conditions) == 1 && len(r.Next) == 0
		}},
		{"cancelling", flow.DeadEnd().Cancelling(ship{}, "refund"), func(r *wire.StepResult) bool {
			return reflect.DeepEqual(r.CancelSteps, []string{"ship", "refund"})
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := b.ok(b.script(func(*flow.Context) (flow.Decision, error) { return tt.d, nil }))
			if !tt.ok(r) {
				t.Errorf("got %v", r)
			}
		})
	}
}

func TestRefusedDecisionsAndWrites(t *testing.T) {
	b := newBed(t)
	tests := []struct {
		name, want string
		fn         func(*flow.Context) flow.Decision
	}{
		{"none", "neither a decision nor an error", func(*flow.Context) flow.Decision { return flow.Decision{} }},
		{"unknown step", `no step "elsewhere"`, func(*flow.Context) flow.Decision { return flow.GoTo(flow.Ref[int]("elsewhere"), 1) }},
		{"input of another type", "takes a string, not a int", func(*flow.Context) flow.Decision { return flow.GoTo(flow.Ref[int]("refund"), 1) }},
		{"delayed wait", "has a WaitFor", func(*flow.Context) flow.Decision { return flow.GoToAll(flow.To(picky{}, "").Delayed(1)) }},
		{"negative delay", "must be 0 to", func(*flow.Context) flow.Decision { return flow.GoToAll(flow.To(refund{}, "").Delayed(-1)) }},
		{"input that is no JSON", "cannot be stored", func(*flow.Context) flow.Decision {
			return flow.GoTo(flow.Ref[func()]("refund"), func() {})
		}},
		{"output that is no JSON", "the output of the run", func(*flow.Context) flow.Decision { return flow.Complete(func() {}) }},
		{"large output", "at most 1024", func(*flow.Context) flow.Decision { return flow.Complete(strings.Repeat("x", 2000)) }},
		{"unknown channel", `no channel "other"`, func(*flow.Context) flow.Decision {
			return flow.CompleteIfEmpty(1, flow.To(refund{}, ""), flow.NewChannel[int]("other"))
		}},
		{"unknown sibling", `no step "other"`, func(*flow.Context) flow.Decision { return flow.DeadEnd().Cancelling("other") }},
		{"unknown attribute", `no attribute "other"`, func(ctx *flow.Context) flow.Decision {
			flow.NewAttribute[int]("other").Set(ctx, 1)
			return flow.DeadEnd()
		}},
		{"publish to an unknown channel", `no channel "other"`, func(ctx *flow.Context) flow.Decision {
			flow.NewChannel[int]("other").Publish(ctx, 1)
			return flow.DeadEnd()
		}},
		{"too large a message", "at most 67108864", func(ctx *flow.Context) flow.Decision {
			inbox.At(1).Publish(ctx, strings.Repeat("x", flow.MaxValue))
			return flow.DeadEnd()
		}},
		{"message to nobody", "flow ID is empty", func(ctx *flow.Context) flow.Decision {
			paid.PublishTo(ctx, "", payment{})
			return flow.DeadEnd()
		}},
		{"bad key", "control characters", func(ctx *flow.Context) flow.Decision {
			balance.At("a\n").Set(ctx, 1)
			return flow.DeadEnd()
		}},
		{"locals in Execute", "only WaitFor", func(ctx *flow.Context) flow.Decision {
			ctx.SetLocals(1)
			return flow.DeadEnd()
		}},
		{"too many writes", "at most 4096", func(ctx *flow.Context) flow.Decision {
			for range 4097 {
				paid.Publish(ctx, payment{})
			}
			return flow.DeadEnd()
		}},
		{"value that is no JSON", "cannot be stored", func(ctx *flow.Context) flow.Decision {
			flow.NewAttribute[func()]("status").Set(ctx, func() {})
			return flow.DeadEnd()
		}},
		{"start of an unknown step", `no step "nope"`, func(ctx *flow.Context) flow.Decision {
			flow.StartFlow(ctx, flow.Define("empty"), "x", flow.To(flow.Ref[int]("nope"), 1))
			return flow.DeadEnd()
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b.failed(b.script(func(ctx *flow.Context) (flow.Decision, error) { return tt.fn(ctx), nil }), tt.want)
		})
	}
}

func TestSends(t *testing.T) {
	b := newBed(t)
	other := flow.Define("other", flow.Step(awaitPayment{}), flow.Step(ship{}), status, paid)
	r := b.ok(b.script(func(ctx *flow.Context) (flow.Decision, error) {
		paid.PublishTo(ctx, "o2", payment{3})
		flow.StartFlow(ctx, other, "o3", flow.To(awaitPayment{}, order{}), flow.Reuse(flow.AttachExisting), flow.Priority(3),
			flow.RunTimeout(time.Hour), flow.Delay(time.Second), flow.Retention(time.Minute), flow.With(status, "new"), flow.WithMessage(paid, payment{}))
		flow.StartFlow(ctx, flow.External("billing"), "o4", flow.To(flow.Ref[int]("bill"), 4))
		flow.StartFlow(ctx, other, "o5", flow.NoStep)
		flow.Stop(ctx, "o6", flow.Terminate, "over")
		return flow.DeadEnd(), nil
	}))
	if len(r.Sends) != 5 {
		t.Fatalf("sends are %v", r.Sends)
	}
	s := r.Sends[1].GetStart()
	if s.Type != "other" || !s.Closes || s.Reuse != wire.StartFlow_ATTACH || s.Priority != 3 || s.TimeoutUs != 3600e6 ||
		s.DelayUs != 1e6 || s.RetentionUs != 60e6 || string(s.Attributes[0].Value) != `"new"` || len(s.Publish) != 1 || !s.Steps[0].WaitFor {
		t.Errorf("start is %v", s)
	}
	if s := r.Sends[2].GetStart(); s.Type != "billing" || !s.Steps[0].WaitFor || string(s.Steps[0].Input) != "4" {
		t.Errorf("start is %v", s)
	}
	if s := r.Sends[3].GetStart(); len(s.Steps) != 0 {
		t.Errorf("start is %v", s)
	}
	if s := r.Sends[4].GetStop(); s.How != wire.StopFlow_TERMINATE || s.Reason != "over" {
		t.Errorf("stop is %v", s)
	}
}

func TestChildren(t *testing.T) {
	b := newBed(t)
	other := flow.Define("other", flow.Step(ship{}), status)
	b.wait = func(*flow.Context, string) (flow.Wait, error) {
		return flow.AllOf(flow.Child(other, "c1", flow.To(ship{}, order{})), flow.FlowEnd("c2")), nil
	}
	task := b.task("picky", "")
	task.Phase = wire.Task_WAIT_FOR
	r := b.ok(b.do(task))
	if c := r.Wait.Conditions; c[0].GetFlow().FlowId != "c1" || c[0].GetFlow().Start.Steps[0].Name != "ship" || c[1].GetFlow().Start != nil {
		t.Errorf("wait is %v", r.Wait)
	}
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		n, ok, err := flow.ChildResult[int](ctx, "c1")
		if n != 5 || !ok || err != nil {
			return flow.Decision{}, fmt.Errorf("c1: %d, %v, %v", n, ok, err)
		}
		_, ok, err = flow.ChildResult[int](ctx, "c2")
		var failed *flow.ChildFailedError
		if !ok || !errors.As(err, &failed) || failed.Status != flow.Failed || failed.Message != "broken" {
			return flow.Decision{}, fmt.Errorf("c2: %v, %w", ok, err)
		}
		if _, ok, err = flow.ChildResult[int](ctx, "c3"); ok || err != nil {
			return flow.Decision{}, fmt.Errorf("c3: %v, %w", ok, err)
		}
		_, _, err = flow.ChildResult[int](ctx, "c4")
		return flow.DeadEnd(), err
	}
	task = b.task("picky", "")
	task.ConditionNames = []string{"c1", "c2", "c3"}
	task.Conditions = []*wire.ConditionState{{Done: true, Status: wire.Status_COMPLETED, Output: []byte("5")},
		{Done: true, Status: wire.Status_FAILED, Error: "broken"}, {}}
	b.failed(b.do(task), `has not waited for a flow "c4"`)
}

func TestWaits(t *testing.T) {
	b := newBed(t)
	wait := func(w flow.Wait) *wire.StepResult {
		b.wait = func(*flow.Context, string) (flow.Wait, error) { return w, nil }
		task := b.task("picky", "")
		task.Phase = wire.Task_WAIT_FOR
		return b.do(task)
	}
	one := paid.ForOne()
	r := b.ok(wait(flow.AnyCombination(flow.AllOf(one, inbox.At(1).AtLeast(2)), flow.AllOf(one, flow.At("t", time.Unix(9, 0))), flow.AllOf(inbox.At(2).AtMost(5)))))
	if c := r.Wait.Conditions; len(c) != 4 || c[1].GetChannel().AtMost != flow.MaxMessages || c[3].GetChannel().AtLeast != 1 || c[2].GetAtUs() != 9e6 {
		t.Errorf("conditions are %v", c)
	}
	if s := r.Wait.Combinations; len(s) != 3 || !slices.Equal(s[1].Of, []uint32{0, 2}) {
		t.Errorf("combinations are %v", s)
	}
	many := make([]flow.Condition, 200)
	for i := range many {
		many[i] = flow.After(fmt.Sprint(i), time.Second)
	}
	for want, w := range map[string]flow.Wait{
		"must be within 1 to 1000":      flow.AllOf(paid.ForN(0)),
		"1 to 1001 messages":            flow.AllOf(paid.AtMost(1001)),
		"200 conditions":                flow.AllOf(many...),
		"zero Condition":                flow.AllOf(flow.Condition{}),
		"made by AllOf":                 flow.AnyCombination(flow.AnyOf(one)),
		`have the name "t"`:             flow.AllOf(flow.After("t", 0), flow.After("t", 1)),
		`no channel "other"`:            flow.AllOf(flow.NewChannel[int]("other").ForOne()),
		"at most 876000h0m0s":           flow.AllOf(flow.After("t", 1<<62)),
		"flow ID is empty":              flow.AllOf(flow.FlowEnd("")),
		`other has no step "awaitPaym`:  flow.AllOf(flow.Child(flow.Define("other"), "c", flow.To(awaitPayment{}, order{}))),
		`the name of channel "a/b" has`: flow.AllOf(flow.NewChannel[int]("a/b").ForOne()),
	} {
		b.failed(wait(w), want)
	}
}
