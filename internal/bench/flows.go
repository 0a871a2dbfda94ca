package bench

import (
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
)

// The flows that are measured. They do as little as a flow can, so that what is
// measured is the engine.

// programs are the definitions of one worker process.
type programs struct {
	steps, async, holder, waiter, timers *flow.Flow
}

// number is the attribute that the rpc scenarios read and write.
var number = flow.NewAttribute[int]("n")

// get reads it.
var get = flow.NewRPC("get", func(ctx *flow.ReadContext, _ flow.None) (int, error) { return number.Get(ctx) })

// add writes it, alone on its flow.
var add = flow.NewLockedRPC("add", func(ctx *flow.UpdateContext, by int) (int, error) {
	n, err := number.Get(ctx)
	if err != nil {
		return 0, err
	}
	number.Set(ctx, n+by)
	return n + by, nil
})

// large is the attributes of attribute-read.
var large = flow.NewAttributeMap[int, string]("large")

// wakeUp is the channel of channel-wake.
var wakeUp = flow.NewChannel[int]("wake")

// progress is the input of a step of sequential-steps.
type progress struct {
	Done int `json:"done"`
	Of   int `json:"of"`
}

// next is one step after the other; the last completes the flow.
func next(_ *flow.Context, p progress) (flow.Decision, error) {
	if p.Done++; p.Done >= p.Of {
		return flow.Complete(p.Done), nil
	}
	return flow.GoTo(flow.Ref[progress]("next"), p), nil
}

// newPrograms makes the definitions; woke is told which waiter's handler has
// started, by its number.
func newPrograms(woke func(number int)) *programs {
	step := flow.StepFunc("next", next)
	wait := flow.StepFunc("wait", func(_ *flow.Context, w waiting) (flow.Decision, error) {
		woke(w.Number)
		if w.Once {
			return flow.Complete(nil), nil
		}
		return flow.GoTo(flow.Ref[waiting]("wait"), w), nil
	}).WithWait(func(*flow.Context, waiting) (flow.Wait, error) { return flow.AllOf(wakeUp.ForOne()), nil })
	sleep := flow.StepFunc("sleep", func(_ *flow.Context, s sleeping) (flow.Decision, error) {
		woke(s.Number)
		return flow.Complete(nil), nil
	}).WithWait(func(_ *flow.Context, s sleeping) (flow.Wait, error) {
		return flow.AllOf(flow.At("due", time.UnixMilli(s.DueMS))), nil
	})
	return &programs{
		steps:  flow.Define("bench.steps", flow.Step(step)),
		async:  flow.Define("bench.async", flow.Step(step, flow.Async())),
		holder: flow.Define("bench.holder", number, get, add, large),
		waiter: flow.Define("bench.waiter", wakeUp, flow.Step(wait)),
		timers: flow.Define("bench.timers", flow.Step(sleep)),
	}
}

// waiting is the input of a waiter's step.
type waiting struct {
	Number int  `json:"number"`
	Once   bool `json:"once,omitempty"`
}

// sleeping is the input of a timer's step.
type sleeping struct {
	Number int   `json:"number"`
	DueMS  int64 `json:"due_ms"`
}

func (p *programs) all() []*flow.Flow {
	return []*flow.Flow{p.steps, p.async, p.holder, p.waiter, p.timers}
}

// sequence is the definition of sequential-steps by durability.
func (p *programs) sequence(durability string) *flow.Flow {
	if durability == durabilityAsync {
		return p.async
	}
	return p.steps
}

func holderID(i int) string { return fmt.Sprintf("holder/%d", i) }
