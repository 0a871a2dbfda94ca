//go:build e2e

package flows

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"time"

	"github.com/perdure-dev/perdure/flow"
)

// Panics is a step that always panics.
type Panics struct{}

func (Panics) Execute(*flow.Context, flow.None) (flow.Decision, error) { panic("out of order") }

// Hangs is a step that does not heed its context.
type Hangs struct{}

func (Hangs) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	time.Sleep(2 * time.Second)
	return flow.Complete("too late"), nil
}

// Astray goes to a step that its flow does not have.
type Astray struct{}

func (Astray) Execute(*flow.Context, flow.None) (flow.Decision, error) {
	return flow.GoTo(flow.Ref[flow.None]("Nowhere"), flow.None{}), nil
}

// Hoarder writes a value that is larger than any may be.
type Hoarder struct{}

func (Hoarder) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	text.Set(ctx, string(make([]byte, 12<<20))) // each byte of it becomes six: \u0000
	return flow.Complete(nil), nil
}

var (
	once    = flow.Retry(flow.NoRetry)
	amount  = flow.NewAttribute[int]("amount", flow.Indexed())
	text    = flow.NewAttribute[string]("text")
	doors   = flow.NewChannel[string]("doors")
	boom    = flow.NewLockedRPC("boom", func(*flow.UpdateContext, flow.None) (int, error) { panic("no such thing") })
	decline = flow.NewLockedRPC("decline", func(ctx *flow.UpdateContext, _ flow.None) (int, error) {
		amount.Set(ctx, 1_000_000) // takes no effect
		return 0, flow.WithKind(errors.New("you have no credit"), "no_credit")
	})
	dawdle = flow.NewRPC("dawdle", func(ctx *flow.ReadContext, _ flow.None) (string, error) {
		<-ctx.Done()
		return "", context.Cause(ctx)
	})
)

// odd is a flow type whose handlers go wrong.
var odd = flow.Define("odd", flow.Step(Panics{}, once), flow.Step(Hangs{}, once, flow.Timeout(300*time.Millisecond)),
	flow.Step(Astray{}, once), flow.Step(Hoarder{}, once), amount, text, doors, boom, decline, dawdle)

// Load is a step with a large input and a large attribute.
type Load struct{}

var (
	bulk   = flow.NewAttribute[string]("bulk")
	halves = flow.NewAttribute[string]("halves")
)

func (Load) Execute(ctx *flow.Context, in string) (flow.Decision, error) {
	have, err := bulk.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	halves.Set(ctx, in[:len(in)/2])
	return flow.Complete([]string{digest(in), digest(have)}), nil
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

var bulky = flow.Define("bulky", flow.Step(Load{}), bulk, halves)

// Walk is one of many steps. It writes an attribute, always of the same size,
// and says where it is at every thousandth.
type Walk struct{}

var (
	stride    = flow.NewAttribute[int]("stride", flow.Indexed())
	milestone = flow.NewAttribute[int]("milestone")
)

func (Walk) Execute(ctx *flow.Context, left int) (flow.Decision, error) {
	n, err := stride.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if n++; n%1000 == 0 {
		milestone.Set(ctx, n)
	}
	stride.Set(ctx, n)
	if left <= 1 {
		return flow.Complete(n), nil
	}
	return flow.GoTo(Walk{}, left-1), nil
}

var long = flow.Define("long", flow.Step(Walk{}), stride, milestone)

// Hold is a step that takes its time, and writes when it begins and ends.
type Hold struct{}

func (Hold) Execute(ctx *flow.Context, ms int) (flow.Decision, error) {
	did(ctx, false, ms)
	if err := ctx.Err(); err != nil {
		return flow.Decision{}, context.Cause(ctx)
	}
	return flow.Complete("held"), nil
}

var holding = flow.Define("holding", flow.Step(Hold{}))

// Write is the first step of a small program for the command line.
type Write struct{}

var (
	subject  = flow.NewAttribute[string]("subject", flow.Indexed())
	approval = flow.NewChannel[bool]("approval")
	about    = flow.NewRPC("about", func(ctx *flow.ReadContext, greeting string) (string, error) {
		s, err := subject.Get(ctx)
		return greeting + " " + s, err
	})
)

func (Write) Execute(ctx *flow.Context, s string) (flow.Decision, error) {
	if s == "" {
		return flow.Decision{}, flow.Permanent(errors.New("nothing to write about"))
	}
	subject.Set(ctx, s)
	_, err := ctx.Output().Write([]byte("writing about " + s))
	return flow.GoTo(Approve{}, flow.None{}), err
}

// Approve waits for a signal.
type Approve struct{}

func (Approve) WaitFor(*flow.Context, flow.None) (flow.Wait, error) {
	return flow.AnyOf(approval.ForOne(), flow.After("reminder", time.Hour)), nil
}

func (Approve) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	yes, ok, err := approval.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	s, err := subject.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	switch {
	case !ok:
		return flow.Complete("nobody cared for " + s), nil
	case !yes:
		return flow.Fail(errors.New("refused")), nil
	}
	return flow.Complete(s + " is published"), nil
}

var note = flow.Define("note", flow.Step(Write{}), flow.Step(Approve{}), subject, approval, about)

// program is what the worker processes run. It stands below the steps' methods,
// so that the compiler knows these when it reads the definitions.
var program = []*flow.Flow{pipeline, fan, ticker, parent, inbox, counter, trip, odd, bulky, long, holding, note}
