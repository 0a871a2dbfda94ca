package examples

import (
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var (
	letters     = flow.NewChannel[string]("letters")
	lettersSent = flow.NewAttribute[int]("sent")
)

// Deliver takes letters in bundles.
type Deliver struct{}

// WaitFor takes what is there, up to three.
func (Deliver) WaitFor(ctx *flow.Context, _ flow.None) (flow.Wait, error) {
	return flow.AllOf(letters.AtMost(3)), nil
}

// Execute ends the flow when the channel is empty. That is decided as the result
// is committed: a letter that comes at the last moment is not lost.
func (Deliver) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	bundle, err := letters.Messages(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	n, err := lettersSent.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	n += len(bundle)
	lettersSent.Set(ctx, n)
	fmt.Fprintf(ctx.Output(), "delivered %v\n", bundle)
	return flow.CompleteIfEmpty(fmt.Sprintf("%d letters", n), flow.To(Deliver{}, flow.None{}), letters), nil
}

var posts = flow.Define("post", flow.Step(Deliver{}), letters, lettersSent)

// A flow that lives as long as there is something to do.
func Example_queue() {
	env := perduretest.Open(posts)
	defer env.Close()

	env.Start(posts, "p", flow.To(Deliver{}, flow.None{}),
		flow.WithMessage(letters, "a"), flow.WithMessage(letters, "b"), flow.WithMessage(letters, "c"), flow.WithMessage(letters, "d"))
	fmt.Println(perduretest.Result[string](env, "p"))
	fmt.Print(env.Shown("p"))

	// Output:
	// 4 letters
	// delivered [a b c]
	// delivered [d]
}
