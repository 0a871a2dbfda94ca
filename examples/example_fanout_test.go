package examples

import (
	"fmt"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var counted = flow.NewChannel[string]("counted")

// Split starts one step for each text, and one that waits for them.
type Split struct{}

// Execute starts them all in one commit.
func (Split) Execute(ctx *flow.Context, texts []string) (flow.Decision, error) {
	next := []flow.Next{flow.To(Join{}, len(texts))}
	for _, t := range texts {
		next = append(next, flow.To(Count{}, t))
	}
	return flow.GoToAll(next...), nil
}

// Count counts the words of one text. Many run at a time.
type Count struct{}

// Execute publishes the result, and ends its branch.
func (Count) Execute(ctx *flow.Context, text string) (flow.Decision, error) {
	counted.Publish(ctx, fmt.Sprintf("%d words in %q", len(strings.Fields(text)), text))
	return flow.DeadEnd(), nil
}

// Join waits for all results.
type Join struct{}

// WaitFor waits for n messages: this is the join.
func (Join) WaitFor(ctx *flow.Context, n int) (flow.Wait, error) {
	return flow.AllOf(counted.ForN(n)), nil
}

// Execute has them all.
func (Join) Execute(ctx *flow.Context, n int) (flow.Decision, error) {
	all, err := counted.Messages(ctx)
	slices.Sort(all)
	return flow.Complete(all), err
}

var counts = flow.Define("count", flow.Step(Split{}), flow.Step(Count{}), flow.Step(Join{}), counted)

// Work is spread over parallel steps; a wait for all their messages joins them.
func Example_fanout() {
	env := perduretest.Open(counts)
	defer env.Close()

	env.Start(counts, "c", flow.To(Split{}, []string{"to be or not", "a rose is a rose", "call me"}))
	for _, line := range perduretest.Result[[]string](env, "c") {
		fmt.Println(line)
	}

	// Output:
	// 2 words in "call me"
	// 4 words in "to be or not"
	// 5 words in "a rose is a rose"
}
