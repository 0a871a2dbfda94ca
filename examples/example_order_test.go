package examples

import (
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Order is what a customer wants.
type Order struct {
	ID     string
	Amount int
}

// Payment is what the bank tells.
type Payment struct{ Amount int }

var (
	orderState = flow.NewAttribute[string]("state")
	paid       = flow.NewChannel[Payment]("paid")
	askState   = flow.NewRPC("state", func(ctx *flow.ReadContext, _ flow.None) (string, error) {
		return orderState.Get(ctx)
	})
)

// AwaitPayment waits a day for the money.
type AwaitPayment struct{}

// WaitFor says what has to happen first; it waits on disk, not in memory.
func (AwaitPayment) WaitFor(ctx *flow.Context, o Order) (flow.Wait, error) {
	orderState.Set(ctx, "waiting for payment")
	return flow.AnyOf(paid.ForOne(), flow.After("deadline", 24*time.Hour)), nil
}

// Execute runs when one of them has happened.
func (AwaitPayment) Execute(ctx *flow.Context, o Order) (flow.Decision, error) {
	p, ok, err := paid.Message(ctx)
	switch {
	case err != nil:
		return flow.Decision{}, err
	case !ok:
		orderState.Set(ctx, "expired")
		return flow.Complete("nobody paid"), nil
	case p.Amount < o.Amount:
		return flow.GoTo(AwaitPayment{}, Order{o.ID, o.Amount - p.Amount}), nil
	}
	orderState.Set(ctx, "paid")
	return flow.GoTo(Ship{}, o), nil
}

// Ship sends the goods.
type Ship struct{}

// Execute ships.
func (Ship) Execute(ctx *flow.Context, o Order) (flow.Decision, error) {
	return flow.Complete("shipped " + o.ID), nil
}

var orders = flow.Define("order", flow.Step(AwaitPayment{}), flow.Step(Ship{}), orderState, paid, askState)

// An order waits for its payment, in one sum or in parts, and expires after a day.
func Example_order() {
	env := perduretest.Open(orders)
	defer env.Close()

	env.Start(orders, "order-1", flow.To(AwaitPayment{}, Order{"tea", 30}))
	env.Settle()
	state, err := perduretest.Call(env, "order-1", askState, flow.None{})
	fmt.Println(state, err)
	perduretest.Publish(env, "order-1", paid, Payment{10}, Payment{20})
	fmt.Println(perduretest.Result[string](env, "order-1"))

	env.Start(orders, "order-2", flow.To(AwaitPayment{}, Order{"coffee", 40}))
	fmt.Println(perduretest.Result[string](env, "order-2"), "until", env.Now().Format(time.DateOnly))
	fmt.Println(perduretest.Get(env, "order-2", orderState))

	// Output:
	// waiting for payment <nil>
	// shipped tea
	// nobody paid until 2026-01-02
	// expired
}
