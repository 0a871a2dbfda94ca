package perduretest_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// TestLargeValuesEverywhere: what is above the bound of a record comes as it was
// sent: by a start, a publish, a step, an RPC, to the flow itself and to others.
func TestLargeValuesEverywhere(t *testing.T) {
	big := strings.Repeat("x", 100_000)
	letters := flow.NewChannel[string]("letters")
	finish := flow.StepFunc("finish", func(ctx *flow.Context, in string) (flow.Decision, error) {
		all, err := letters.Messages(ctx)
		return flow.Complete([]int{len(in), len(all), len(strings.Join(all, ""))}), err
	}).WithWait(func(*flow.Context, string) (flow.Wait, error) { return flow.AllOf(letters.ForN(2)), nil })
	child := flow.Define("child", letters, flow.Step(finish))
	add := flow.NewLockedRPC("add", func(ctx *flow.UpdateContext, in string) (string, error) {
		letters.Publish(ctx, in+"r")
		return in + in, nil
	})
	parent := flow.Define("parent", letters, add,
		flow.Step(flow.StepFunc("begin", func(ctx *flow.Context, in string) (flow.Decision, error) {
			letters.Publish(ctx, in+"s")
			letters.PublishTo(ctx, "d", in+"t")
			return flow.GoTo(flow.Ref[string]("gather"), in), nil
		})),
		flow.Step(flow.StepFunc("gather", func(ctx *flow.Context, in string) (flow.Decision, error) {
			all, err := letters.Messages(ctx)
			if err != nil {
				return flow.Decision{}, err
			}
			got, _, err := flow.ChildResult[[]int](ctx, "c")
			return flow.Complete(append(got, len(all), len(strings.Join(all, "")))), err
		}).WithWait(func(_ *flow.Context, in string) (flow.Wait, error) {
			return flow.AllOf(letters.ForN(3), flow.Child(child, "c", flow.To(finish, in), flow.WithMessage(letters, in+"uv"), flow.Reuse(flow.AttachExisting))), nil
		})),
	)
	env := perduretest.New(t, parent, child)
	env.Start(child, "d", flow.To(finish, ""))
	env.Start(parent, "p", flow.To(flow.Ref[string]("begin"), big), flow.WithMessage(letters, big))
	if out, err := perduretest.Call(env, "p", add, big); err != nil || out != big+big {
		t.Errorf("%d bytes, %v", len(out), err)
	}
	env.Settle() // the child is there
	perduretest.Publish(env, "c", letters, big)
	perduretest.Publish(env, "d", letters, big)
	got := perduretest.Result[[]int](env, "p")
	if len(got) != 5 || got[0] != 100_000 || got[1] != 2 || got[2] != 200_002 || got[3] != 3 || got[4] != 300_002 {
		t.Errorf("got %v", got)
	}
	if got := perduretest.Result[[]int](env, "d"); len(got) != 3 || got[1] != 2 || got[2] != 200_001 {
		t.Errorf("another flow got %v", got)
	}
	_, err := perduretest.Call(env, "p", add, big)
	if refused := (*perduretest.RefusedError)(nil); !errors.As(err, &refused) || refused.Code != "flow_closed" {
		t.Errorf("got %v", err)
	}
}
