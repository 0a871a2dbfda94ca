package client

import (
	"errors"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

type order struct {
	Item string `json:"item"`
	N    int    `json:"n"`
}

type charge struct{}

func (charge) Execute(*flow.Context, order) (flow.Decision, error) { return flow.Complete("paid"), nil }

var (
	amount  = flow.NewAttribute[int]("amount", flow.Indexed())
	payment = flow.NewChannel[string]("payment")
	total   = flow.NewRPC("total", func(*flow.ReadContext, int) (int, error) { return 0, nil })
	add     = flow.NewLockedRPC("add", func(*flow.UpdateContext, int) (int, error) { return 0, nil })
	orders  = flow.Define("order", flow.Step(charge{}, flow.Timeout(time.Minute)), amount, payment, total, add)
)

// TestTyped: what goes over the wire for each typed call, and what comes back.
func TestTyped(t *testing.T) {
	var got *wire.Call
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		got = c
		switch {
		case c.GetStart() != nil:
			answer(&wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{FlowId: c.GetStart().FlowId, RunId: "r", Created: true}}})
		case c.GetWait() != nil && c.GetWait().FlowId == "bad":
			answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{FlowId: "bad", Status: wire.Status_TIMED_OUT, Error: "too slow"}}})
		case c.GetWait() != nil:
			answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{Status: wire.Status_COMPLETED, Output: []byte(`"paid"`)}}})
		case c.GetPublish() != nil:
			answer(&wire.Answer{Result: &wire.Answer_Publish{Publish: &wire.PublishReply{}}})
		case c.GetRpc() != nil && string(c.GetRpc().Input) == "-1":
			answer(&wire.Answer{Error: &wire.Error{Code: "rpc_failed", Message: "negative", Kind: "too_small", Position: -1}})
		case c.GetRpc() != nil:
			answer(rpcAnswer("7"))
		default:
			answer(&wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{Attributes: []*wire.Attribute{{Name: "amount", Value: []byte("5")}}}}})
		}
	})
	c := f.client(Options{})
	ctx := background(t)

	st, err := Start(ctx, c, orders, "o1", flow.To(charge{}, order{"tea", 2}), flow.With(amount, 3), flow.WithMessage(payment, "early"), flow.Priority(4))
	if r := got.GetStart(); err != nil || st != (Started{"o1", "r", true}) || r.Step != "charge" || string(r.Input) != `{"item":"tea","n":2}` ||
		r.FlowType != "order" || r.Priority != 4 || r.Spec.TimeoutUs != 60_000_000 || string(r.Attributes[0].Value) != "3" ||
		r.Attributes[0].Index != wire.Attribute_INT || string(r.Publish[0].Payloads[0]) != `"early"` || r.RequestId == "" {
		t.Errorf("%v, %v, %v", st, err, got)
	}
	if _, err := Start(ctx, c, orders, "", flow.NoStep); err != nil || got.GetStart().FlowId == "" || got.GetStart().Step != "" {
		t.Errorf("%v, %v", err, got)
	}
	if _, err := Start(ctx, c, orders, "", flow.To(charge{}, order{}), flow.Priority(40)); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	if out, err := Result[string](ctx, c, "o1"); err != nil || out != "paid" {
		t.Errorf("%q, %v", out, err)
	}
	_, err = Result[string](ctx, c, "bad")
	var failed *FlowFailed
	if !errors.As(err, &failed) || failed.Status != TimedOut || err.Error() != "flow bad is timed_out: too slow" {
		t.Error(err)
	}
	if _, err := Result[int](ctx, c, "o1"); err == nil {
		t.Error("a text as a number")
	}
	if v, err := Get(ctx, c, "o1", amount); err != nil || v != 5 || got.GetGetAttributes().Names[0] != "amount" {
		t.Errorf("%d, %v", v, err)
	}
	if err := Set(ctx, c, "o1", amount, 6); err != nil || string(got.GetSetAttributes().Attributes[0].Value) != "6" {
		t.Error(err)
	}
	if v, err := Await(ctx, c, "o1", amount); err != nil || v != 5 {
		t.Errorf("%d, %v", v, err)
	}
	if err := AwaitValue(ctx, c, "o1", amount, 5); err != nil || string(got.GetWaitAttribute().Equals) != "5" {
		t.Error(err)
	}
	if err := Publish(ctx, c, "o1", payment, "a", "b"); err != nil || len(got.GetPublish().Payloads) != 2 || got.GetPublish().RequestId == "" {
		t.Errorf("%v, %v", err, got)
	}
	if v, err := Call(ctx, c, "o1", total, 1); err != nil || v != 7 || got.GetRpc().RequestId != "" {
		t.Errorf("%d, %v, %v", v, err, got)
	}
	if v, err := Call(ctx, c, "o1", add, 1); err != nil || v != 7 || got.GetRpc().RequestId == "" {
		t.Errorf("%d, %v, %v", v, err, got)
	}
	if _, err := Call(ctx, c, "o1", add, -1); HandlerKind(err) != "too_small" {
		t.Error(err)
	}
}
