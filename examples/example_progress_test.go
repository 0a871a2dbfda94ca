package examples

import (
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Encode encodes a film and tells how far it is.
type Encode struct{}

// Execute writes to those who watch; nothing of it is stored. A client sees it
// at once, with client.Watch or perdure flow watch.
func (Encode) Execute(ctx *flow.Context, frames int) (flow.Decision, error) {
	for at := 25; at <= 100; at += 25 {
		fmt.Fprintf(ctx.Output(), "%d%% ", at)
	}
	return flow.Complete(fmt.Sprintf("%d frames", frames)), nil
}

var films = flow.Define("film", flow.Step(Encode{}))

// Progress streams out of a step while it runs.
func Example_progress() {
	env := perduretest.Open(films)
	defer env.Close()

	env.Start(films, "f", flow.To(Encode{}, 4000))
	fmt.Println(perduretest.Result[string](env, "f"))
	fmt.Println(env.Shown("f"))

	// Output:
	// 4000 frames
	// 25% 50% 75% 100%
}
