package flow_test

import (
	"context"
	"testing"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// FuzzFrames runs whatever a server may send: no task may harm the worker, and
// each has an answer.
func FuzzFrames(f *testing.F) {
	seed := &wire.ServerFrame{
		Tasks: []*wire.Task{
			{FlowId: "f", FlowType: "order", Step: "awaitPayment", Exec: 1, Input: []byte(`{"ID":"a"}`), ConditionNames: []string{"paid"},
				Conditions: []*wire.ConditionState{{Messages: 1, Done: true}}, Messages: []*wire.Message{{Payload: []byte("{}")}}},
			{FlowId: "f", FlowType: "order", Step: "awaitPayment", Phase: wire.Task_WAIT_FOR, Cancelled: true},
			{FlowId: "f", FlowType: "order", Step: "refund", Failure: "x", Checkpoint: []byte("1"), Locals: []byte("2")},
		},
		Rpcs: []*wire.RpcTask{{FlowId: "f", FlowType: "order", Name: "deposit", Locked: true, Attributes: []*wire.Attribute{{Name: "balance/all", Value: []byte("1")}}}},
	}
	b, err := seed.MarshalVT()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var frame wire.ServerFrame
		if frame.UnmarshalVT(b) != nil {
			return
		}
		bed := newBed(t)
		bed.run = func(ctx *flow.Context, in string) (flow.Decision, error) {
			if _, _, err := inbox.At(1).Message(ctx); err != nil {
				return flow.Decision{}, err
			}
			for _, k := range balance.Keys(ctx) {
				balance.At(k).Set(ctx, 1)
			}
			_, _, err := flow.ChildResult[int](ctx, in)
			return flow.Complete(ctx.Key()), err
		}
		bed.wait = func(ctx *flow.Context, in string) (flow.Wait, error) {
			return flow.AnyOf(flow.FlowEnd(in), inbox.At(len(in)).ForN(len(in))), nil
		}
		for _, task := range frame.Tasks {
			task.TimeoutUs = 0
			if r := bed.rt.Step(context.Background(), task, bed.h).Run(); r == nil || r.Exec != task.Exec {
				t.Errorf("%v: got %v", task, r)
			}
		}
		for _, task := range frame.Rpcs {
			if r := bed.rt.RPC(context.Background(), task, bed.h).Run(); r == nil || r.Call != task.Call || (r.Update == nil) == (r.Error == "") {
				t.Errorf("%v: got %v", task, r)
			}
		}
	})
}
