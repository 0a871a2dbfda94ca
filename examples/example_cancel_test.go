package examples

import (
	"context"
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var machine = flow.NewAttribute[string]("machine")

// Train uses a machine for a long time.
type Train struct{ started chan struct{} }

// Execute learns at once when somebody cancels the flow, and may still write.
func (t *Train) Execute(ctx *flow.Context, name string) (flow.Decision, error) {
	close(t.started)
	<-ctx.Done() // the work, which heeds its context

	var cancelled *flow.CancelledError
	if !errors.As(context.Cause(ctx), &cancelled) {
		return flow.Decision{}, context.Cause(ctx) // a timeout, or a lost connection: retried
	}
	if err := release(context.WithoutCancel(ctx), name); err != nil {
		return flow.Decision{}, err
	}
	machine.Set(ctx, "released: "+cancelled.Reason)
	return flow.DeadEnd(), nil
}

// release is a call that must not be cut off by the cancelled context.
func release(ctx context.Context, name string) error { return ctx.Err() }

// A cancelled handler cleans up; what it writes then is kept.
func Example_cancel() {
	step := &Train{started: make(chan struct{})}
	trainings := flow.Define("training", flow.Step(step), machine)
	env := perduretest.Open(trainings)
	defer env.Close()

	env.Start(trainings, "t", flow.To(step, "gpu-7"), flow.With(machine, "in use"))
	<-step.started
	env.Stop("t", flow.Cancel, "too expensive")
	fmt.Println(env.Wait("t").Status)
	fmt.Println(perduretest.Get(env, "t", machine))

	// Output:
	// cancelled
	// released: too expensive
}
