// Package flow is how programs are written that do not lose their place.
//
// A flow has steps. A step is a type with a method Execute: ordinary code, that
// may do anything, take hours, fail and be tried again. What it returns is the
// decision where the flow goes: to other steps, or to its end. What it wrote
// meanwhile (attributes, messages, starts of other flows) is committed together
// with the decision, as a whole or not at all. There is no replay: code is never
// run again to find out where it was, so there is no rule about determinism, and
// a flow may loop for years.
//
//	type Charge struct{ bank *bank.Client }
//
//	func (c *Charge) Execute(ctx *flow.Context, o Order) (flow.Decision, error) {
//		if err := c.bank.Charge(ctx, ctx.Key(), o.Amount); err != nil {
//			return flow.Decision{}, err // tried again, as the step's policy says
//		}
//		status.Set(ctx, "charged")
//		return flow.GoTo(AwaitDelivery{}, o), nil
//	}
//
//	// AwaitDelivery waits, on disk, for a message or for a week.
//	type AwaitDelivery struct{}
//
//	func (AwaitDelivery) WaitFor(ctx *flow.Context, o Order) (flow.Wait, error) {
//		return flow.AnyOf(delivered.ForOne(), flow.After("a week", 7*24*time.Hour)), nil
//	}
//
//	func (AwaitDelivery) Execute(ctx *flow.Context, o Order) (flow.Decision, error) {
//		if ctx.Fired("a week") {
//			return flow.GoTo(Complain{}, o), nil
//		}
//		return flow.Complete("delivered"), nil
//	}
//
//	var (
//		status    = flow.NewAttribute[string]("status", flow.Indexed())
//		delivered = flow.NewChannel[Parcel]("delivered")
//	)
//
//	func Flow(bank *bank.Client) *flow.Flow {
//		return flow.Define("order", status, delivered,
//			flow.Step(&Charge{bank}, flow.Timeout(time.Minute)),
//			flow.Step(AwaitDelivery{}),
//			flow.Step(Complain{}),
//		)
//	}
//
// A Worker runs the handlers: it connects to a Perdure server and takes work
// from it. Package client starts flows and talks to them; package perduretest
// runs them in unit tests, with days that pass at once; package examples has
// twenty of them, whole.
//
// # Promises
//
// A step runs at least once, and its result counts once. An attempt is handed
// out again when it failed, took too long, or was lost with its worker; a result
// that comes from an attempt that is over is dropped, and so is what a worker
// finishes while it has no connection. Attempts of a step share ctx.Key(), so
// that what they do outside can be made to happen once.
//
// The next step starts when the result of the last one is on disk. A step that
// is declared Async is the exception: it does not wait for that, and a crash of
// the server may run it again together with what has followed from it, from the
// newest commit on.
//
// Values are JSON, as encoding/json writes it. Names (of flows, steps,
// attributes, channels and RPCs) are stored, too: change neither while there are
// flows that use them.
package flow
