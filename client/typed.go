package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Start starts a flow at a step: Start(ctx, c, Order, "order-17",
// flow.To(Charge{}, order)). first is flow.NoStep for a flow that lives by its
// RPCs and attributes; an empty id is replaced by a new one.
func Start(ctx context.Context, c *Client, f *flow.Flow, id string, first flow.Next, opts ...flow.StartOption) (Started, error) {
	rec, err := f.StartRecord(first, opts...)
	if err != nil {
		return Started{}, invalid("", "%s", err)
	}
	if id == "" {
		id = newFlowID()
	}
	own := rec.RequestId == ""
	if own {
		rec.RequestId = c.requestID()
	}
	w := &wire.StartRequest{
		FlowId: id, FlowType: rec.Type, Attributes: rec.Attributes, Reuse: rec.Reuse, RequestId: rec.RequestId,
		DelayUs: rec.DelayUs, TimeoutUs: rec.TimeoutUs, RetentionUs: rec.RetentionUs, Priority: rec.Priority,
	}
	for _, s := range rec.Steps { // there is at most one
		w.Step, w.Input, w.Spec = s.Name, s.Input, s
		s.Name, s.Input = "", nil // they travel beside their options
	}
	for _, p := range rec.Publish {
		w.Publish = append(w.Publish, &wire.PublishRequest{Channel: p.Channel, Payloads: [][]byte{p.Payload}})
	}
	if err := c.storeInput(ctx, w); err != nil {
		return Started{}, err
	}
	if err := c.storeLarge(ctx, id, w.Attributes); err != nil {
		return Started{}, err
	}
	if err := c.storePayloads(ctx, id, w.Publish...); err != nil {
		return Started{}, err
	}
	st, err := c.start(ctx, w)
	st.Created = st.Created || err == nil && own && rec.Reuse != wire.StartFlow_ATTACH
	return st, err
}

// Result waits until the newest run of a flow is closed, and gives its output.
// A run that ended otherwise than completed is a *FlowFailed.
func Result[T any](ctx context.Context, c *Client, id string) (T, error) {
	return ResultOf[T](ctx, c, id, "")
}

// ResultOf is Result of a certain run.
func ResultOf[T any](ctx context.Context, c *Client, id, runID string) (T, error) {
	var zero T
	i, err := c.Wait(ctx, id, runID)
	if err != nil {
		return zero, err
	}
	if i.Status != Completed {
		return zero, &FlowFailed{FlowID: i.ID, RunID: i.RunID, Status: i.Status, Message: i.Error}
	}
	return decode[T](i.Output, "the output of flow "+id)
}

func decode[T any](b []byte, what string) (T, error) {
	v, err := flow.Decode[T](b)
	if err != nil {
		return v, fmt.Errorf("%s: %w", what, err)
	}
	return v, nil
}

// Get reads an attribute of a flow; the zero value when it has none.
func Get[T any](ctx context.Context, c *Client, id string, a flow.Attribute[T]) (T, error) {
	v, _, err := Lookup(ctx, c, id, a)
	return v, err
}

// Lookup is Get, and says whether there is a value.
func Lookup[T any](ctx context.Context, c *Client, id string, a flow.Attribute[T]) (v T, ok bool, err error) {
	got, err := c.Attributes(ctx, id, a.Name())
	if err != nil || len(got) == 0 {
		return v, false, err
	}
	v, err = decode[T](got[0].Value, "attribute "+a.Name())
	return v, err == nil, err
}

// Set writes an attribute of a flow.
func Set[T any](ctx context.Context, c *Client, id string, a flow.Attribute[T], v T) error {
	w, err := a.Value(v)
	if err != nil {
		return invalid("", "%s", err)
	}
	return c.setAttributes(ctx, id, []*wire.Attribute{w})
}

// Await waits until an attribute has a value, and gives it.
func Await[T any](ctx context.Context, c *Client, id string, a flow.Attribute[T]) (T, error) {
	got, err := c.WaitAttribute(ctx, id, a.Name(), nil)
	if err != nil {
		var zero T
		return zero, err
	}
	return decode[T](got.Value, "attribute "+a.Name())
}

// AwaitValue waits until an attribute has this value.
func AwaitValue[T any](ctx context.Context, c *Client, id string, a flow.Attribute[T], v T) error {
	_, err := c.WaitAttribute(ctx, id, a.Name(), v)
	return err
}

// Publish appends messages to a channel of a flow.
func Publish[T any](ctx context.Context, c *Client, id string, ch flow.Channel[T], messages ...T) error {
	payloads := make([]any, len(messages))
	for i, m := range messages {
		payloads[i] = m
	}
	_, err := c.Publish(ctx, id, ch.Name(), PublishOptions{}, payloads...)
	return err
}

// Call calls an RPC of a flow. An error that its handler returned is an
// ErrHandler with the handler's words, and its kind; see HandlerKind.
func Call[In, Out any](ctx context.Context, c *Client, id string, r flow.RPC[In, Out], in In) (Out, error) {
	return CallWith(ctx, c, id, r, in, RPCOptions{})
}

// CallWith is Call with options.
func CallWith[In, Out any](ctx context.Context, c *Client, id string, r flow.RPC[In, Out], in In, o RPCOptions) (Out, error) {
	o.ReadOnly = o.ReadOnly || !r.Locked()
	out, err := c.RPC(ctx, id, r.Name(), in, o)
	if err != nil {
		var zero Out
		return zero, err
	}
	return decode[Out](out, "the output of RPC "+r.Name())
}

// HandlerKind is the kind that a flow's RPC handler gave its error by
// flow.WithKind; empty when err is something else.
func HandlerKind(err error) string {
	var e *Error
	if errors.As(err, &e) && e.Code == ErrHandler.Code {
		return e.Kind
	}
	return ""
}
