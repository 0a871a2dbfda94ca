package examples

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// renderer is another system that takes its time.
type renderer struct{ ready time.Time }

func (r *renderer) done(now time.Time) bool { return !now.Before(r.ready) }

// Poll asks the renderer until it is done. What a step needs, its value holds:
// here a connection to the other system.
type Poll struct{ renderer *renderer }

var errNotYet = errors.New("not rendered yet")

// Execute fails while there is nothing yet; the retry policy does the waiting.
func (p *Poll) Execute(ctx *flow.Context, video string) (flow.Decision, error) {
	if !p.renderer.done(ctx.Now()) {
		return flow.Decision{}, errNotYet
	}
	return flow.Complete(fmt.Sprintf("%s is ready after %v, asked %d times", video, ctx.Now().Sub(ctx.Started()), ctx.Attempt())), nil
}

// Each pause between two questions is twice as long as the last, up to an hour.
func Example_polling() {
	r := &renderer{ready: perduretest.Epoch.Add(5 * time.Hour)}
	videos := flow.Define("video", flow.Step(&Poll{r}, flow.Retry(flow.RetryPolicy{Initial: time.Minute, Factor: 2, Max: time.Hour})))
	env := perduretest.Open(videos)
	defer env.Close()

	env.Start(videos, "v", flow.To(&Poll{}, "holiday.mp4"))
	fmt.Println(perduretest.Result[string](env, "v"))

	// Output: holiday.mp4 is ready after 5h3m0s, asked 11 times
}
