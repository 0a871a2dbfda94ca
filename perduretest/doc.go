// Package perduretest runs flows in a unit test: on the real engine, in memory,
// without a server or a network, and on a time of its own.
//
//	func TestOrderExpires(t *testing.T) {
//		env := perduretest.New(t, order.Flow)
//		env.Start(order.Flow, "order-1", flow.To(order.AwaitPayment{}, order.Order{Amount: 30}))
//		if got := perduretest.Result[string](env, "order-1"); got != "expired" {
//			t.Errorf("got %q", got)
//		}
//	}
//
// The clock of an Env stands still, except that Result and Wait move it to the
// next timer (a wait, a backoff, a timeout) whenever there is nothing else left
// to do, and Advance moves it by hand. So a flow that waits for days ends at
// once, and one that waits for something that never comes makes the test fail,
// with words about what it waits for. Handlers see the clock by ctx.Now.
//
// What the test does is done through an Env; its methods, and the functions
// that take one, make the test fail when they are refused, and return only what
// a test may want to look at.
package perduretest
