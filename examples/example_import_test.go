package examples

import (
	"context"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Import reads many rows in one step. It says how far it is; the next attempt
// goes on there.
type Import struct{ halfway chan struct{} }

// Execute is cut off in the middle of its first attempt, as by a lost machine.
func (i *Import) Execute(ctx *flow.Context, rows int) (flow.Decision, error) {
	at := 0
	if _, err := ctx.Checkpoint(&at); err != nil {
		return flow.Decision{}, err
	}
	from := at
	for ; at < rows; at++ {
		if at == rows/2 && ctx.Attempt() == 1 {
			close(i.halfway)
			<-ctx.Done()
			return flow.Decision{}, context.Cause(ctx)
		}
		if err := ctx.Heartbeat(at + 1); err != nil {
			return flow.Decision{}, err
		}
	}
	return flow.Complete(fmt.Sprintf("attempt %d read rows %d to %d", ctx.Attempt(), from, rows)), nil
}

// A heartbeat carries a checkpoint, and tells a slow handler from a lost one.
func Example_import() {
	step := &Import{halfway: make(chan struct{})}
	imports := flow.Define("import", flow.Step(step, flow.Heartbeat(time.Minute)))
	env := perduretest.Open(imports)
	defer env.Close()

	env.Start(imports, "i", flow.To(step, 1000))
	<-step.halfway
	env.LoseWorker()
	fmt.Println(perduretest.Result[string](env, "i"))

	// Output: attempt 2 read rows 500 to 1000
}
