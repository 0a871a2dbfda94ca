package examples

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Check looks at one thing about an applicant.
type Check struct{}

// Execute is the whole of the child flow.
func (Check) Execute(ctx *flow.Context, what string) (flow.Decision, error) {
	if what == "employer" {
		return flow.Fail(errors.New("the employer does not know him")), nil
	}
	return flow.Complete(what + " is fine"), nil
}

var checks = flow.Define("check", flow.Step(Check{}))

// Examine waits for two child flows.
type Examine struct{}

// WaitFor starts them; each is a flow of its own, that others see, too.
func (Examine) WaitFor(ctx *flow.Context, who string) (flow.Wait, error) {
	return flow.AnyCombination(
		flow.AllOf(
			flow.Child(checks, who+"/address", flow.To(Check{}, "address"), flow.Reuse(flow.AttachExisting)),
			flow.Child(checks, who+"/employer", flow.To(Check{}, "employer"), flow.Reuse(flow.AttachExisting)),
		),
		flow.AllOf(flow.After("too-late", 30*24*time.Hour)),
	), nil
}

// Execute sees how they ended.
func (Examine) Execute(ctx *flow.Context, who string) (flow.Decision, error) {
	if ctx.Fired("too-late") {
		return flow.Complete("no answer"), nil
	}
	address, _, err := flow.ChildResult[string](ctx, who+"/address")
	if err != nil {
		return flow.Decision{}, err
	}
	_, _, err = flow.ChildResult[string](ctx, who+"/employer")
	var failed *flow.ChildFailedError
	if errors.As(err, &failed) {
		return flow.Complete(fmt.Sprintf("%s; %s", address, failed.Message)), nil
	}
	return flow.Complete("hire"), err
}

var applicants = flow.Define("applicant", flow.Step(Examine{}))

// A flow starts others and waits for how they end.
func Example_subflow() {
	env := perduretest.Open(checks, applicants)
	defer env.Close()

	env.Start(applicants, "bob", flow.To(Examine{}, "bob"))
	fmt.Println(perduretest.Result[string](env, "bob"))
	fmt.Println("bob/employer is", env.Status("bob/employer"))

	// Output:
	// address is fine; the employer does not know him
	// bob/employer is failed
}
