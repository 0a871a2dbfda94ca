package examples

import (
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Fetch, Clean and Store are a pipeline. The first two change nothing outside,
// so it does not matter if a crash of the server makes them run again: they are
// asynchronous, and the flow does not wait for the disk between them.
type (
	Fetch struct{}
	Clean struct{}
	Store struct{}
)

// Execute reads a page.
func (Fetch) Execute(ctx *flow.Context, url string) (flow.Decision, error) {
	return flow.GoTo(Clean{}, "  the page at "+url+" "), nil
}

// Execute tidies it up.
func (Clean) Execute(ctx *flow.Context, text string) (flow.Decision, error) {
	return flow.GoTo(Store{}, strings.TrimSpace(text)), nil
}

// Execute is synchronous again: it starts when all before it is on disk.
func (Store) Execute(ctx *flow.Context, text string) (flow.Decision, error) {
	return flow.Complete(fmt.Sprintf("stored %q", text)), nil
}

var pages = flow.Define("page", flow.Step(Fetch{}, flow.Async()), flow.Step(Clean{}, flow.Async()), flow.Step(Store{}))

// Async steps trade a promise for speed.
func Example_pipeline() {
	env := perduretest.Open(pages)
	defer env.Close()

	env.Start(pages, "p", flow.To(Fetch{}, "example.org"))
	fmt.Println(perduretest.Result[string](env, "p"))

	// Output: stored "the page at example.org"
}
