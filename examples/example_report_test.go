package examples

import (
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var (
	sales     = flow.NewChannel[int]("sales")
	stopSales = flow.NewChannel[flow.None]("stop")
)

// Nightly makes a report of the day's sales at midnight.
type Nightly struct{}

// WaitFor sleeps until midnight; sales wait in the channel meanwhile.
func (Nightly) WaitFor(ctx *flow.Context, day int) (flow.Wait, error) {
	midnight := ctx.Now().Truncate(24 * time.Hour).Add(24 * time.Hour)
	return flow.AnyCombination(
		flow.AllOf(stopSales.ForOne()),
		flow.AllOf(flow.At("midnight", midnight), sales.AtLeast(1)),
	), nil
}

// Execute has all sales of the day.
func (Nightly) Execute(ctx *flow.Context, day int) (flow.Decision, error) {
	if !ctx.Fired("midnight") {
		return flow.Complete(fmt.Sprintf("%d reports", day)), nil
	}
	all, err := sales.Messages(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	sum := 0
	for _, s := range all {
		sum += s
	}
	fmt.Fprintf(ctx.Output(), "%s: %d sales, %d in all\n", ctx.Now().Format(time.DateOnly), len(all), sum)
	return flow.GoTo(Nightly{}, day+1), nil
}

var reports = flow.Define("report", flow.Step(Nightly{}), sales, stopSales)

// A flow that wakes each night. (To start a flow by the calendar, use a
// schedule: client.PutSchedule, or perdure schedule create.)
func Example_report() {
	env := perduretest.Open(reports)
	defer env.Close()

	env.Start(reports, "shop", flow.To(Nightly{}, 0))
	perduretest.Publish(env, "shop", sales, 10, 20, 12)
	env.Advance(30 * time.Hour)
	perduretest.Publish(env, "shop", sales, 7)
	env.Advance(24 * time.Hour)
	fmt.Print(env.Shown("shop"))
	perduretest.Publish(env, "shop", stopSales, flow.None{})
	fmt.Println(perduretest.Result[string](env, "shop"))

	// Output:
	// 2026-01-02: 3 sales, 42 in all
	// 2026-01-03: 1 sales, 7 in all
	// 2 reports
}
