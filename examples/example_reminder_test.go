package examples

import (
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var (
	unsubscribe = flow.NewChannel[flow.None]("unsubscribe")
	mailsSent   = flow.NewAttribute[int]("mails-sent")
)

// Remind sends a mail each week until the customer has enough.
type Remind struct{}

// WaitFor sleeps for a week. A million flows that sleep cost no goroutine.
func (Remind) WaitFor(ctx *flow.Context, customer string) (flow.Wait, error) {
	return flow.AnyOf(unsubscribe.ForOne(), flow.After("week", 7*24*time.Hour)), nil
}

// Execute goes to itself: a loop, without an end and without a growing history.
func (Remind) Execute(ctx *flow.Context, customer string) (flow.Decision, error) {
	n, err := mailsSent.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if !ctx.Fired("week") {
		return flow.Complete(fmt.Sprintf("%s got %d mails", customer, n)), nil
	}
	mailsSent.Set(ctx, n+1)
	return flow.GoTo(Remind{}, customer), nil
}

var reminders = flow.Define("reminder", flow.Step(Remind{}), unsubscribe, mailsSent)

// A flow may run for years; a message ends it.
func Example_reminder() {
	env := perduretest.Open(reminders)
	defer env.Close()

	env.Start(reminders, "ann", flow.To(Remind{}, "ann"))
	env.Advance(365 * 24 * time.Hour)
	perduretest.Publish(env, "ann", unsubscribe, flow.None{})
	fmt.Println(perduretest.Result[string](env, "ann"))

	// Output: ann got 52 mails
}
