//go:build e2e

package flows

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/flow"
)

// did writes a handler's deed and then works for a while, so that there is a
// middle for a kill to fall into.
func did(ctx *flow.Context, async bool, nap int, took ...string) {
	book.write(deed{Key: ctx.Key(), Attempt: ctx.Attempt(), Flow: ctx.FlowID(), Type: flowTypeOf(ctx.Step()), Step: ctx.Step(), Async: async, Took: took})
	if nap > 0 {
		time.Sleep(time.Duration(nap) * time.Millisecond)
	}
}

// flowTypeOf is the one type of the program that has the step.
func flowTypeOf(step string) string {
	for _, f := range program {
		for _, s := range f.Type().Steps {
			if s.Name == step {
				return f.Name()
			}
		}
	}
	return ""
}

// Job is a sequence of steps that is still to be done.
type Job struct {
	Left int
	Nap  int // milliseconds of work in each step
}

var count = flow.NewAttribute[int]("count", flow.Indexed())

// Seq is a SYNC step of a sequence: it counts itself.
type Seq struct{}

func (Seq) Execute(ctx *flow.Context, j Job) (flow.Decision, error) {
	did(ctx, false, j.Nap)
	return onward(ctx, j)
}

// Fast is Seq as an ASYNC step.
type Fast struct{}

func (Fast) Execute(ctx *flow.Context, j Job) (flow.Decision, error) {
	did(ctx, true, j.Nap)
	return onward(ctx, j)
}

// onward makes every third step an ASYNC one.
func onward(ctx *flow.Context, j Job) (flow.Decision, error) {
	n, err := count.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	count.Set(ctx, n+1)
	if j.Left--; j.Left <= 0 {
		return flow.Complete(n + 1), nil
	}
	if j.Left%3 == 0 {
		return flow.GoTo(Fast{}, j), nil
	}
	return flow.GoTo(Seq{}, j), nil
}

var pipeline = flow.Define("pipeline", flow.Step(Seq{}), flow.Step(Fast{}, flow.Async()), count)

var parts = flow.NewChannel[int]("parts")

// Split begins as many parts as it is told, and the step that joins them.
type Split struct{}

func (Split) Execute(ctx *flow.Context, n int) (flow.Decision, error) {
	did(ctx, false, 0)
	next := []flow.Next{flow.To(Join{}, n)}
	for i := range n {
		next = append(next, flow.To(Piece{}, i+1))
	}
	return flow.GoToAll(next...), nil
}

// Piece is one part of a fan: its result is a message.
type Piece struct{}

func (Piece) Execute(ctx *flow.Context, i int) (flow.Decision, error) {
	did(ctx, false, i%4)
	parts.Publish(ctx, i)
	return flow.DeadEnd(), nil
}

// Join waits for all parts and adds them up.
type Join struct{}

func (Join) WaitFor(_ *flow.Context, n int) (flow.Wait, error) {
	return flow.AllOf(parts.ForN(n)), nil
}

func (Join) Execute(ctx *flow.Context, _ int) (flow.Decision, error) {
	did(ctx, false, 0)
	got, err := parts.Messages(ctx)
	sum := 0
	for _, i := range got {
		sum += i
	}
	// A message to another flow leaves with the commit, once.
	letters.PublishTo(ctx, inboxOf(ctx.FlowID()), joined(ctx.FlowID()))
	return flow.Complete(sum), err
}

// inboxOf is the inbox that hears of the end of a fan, joined the message.
func inboxOf(id string) string {
	n := 0
	for _, c := range id {
		n += int(c)
	}
	return inboxID(n % inboxes)
}

func joined(id string) string { return "joined: " + id }

var fan = flow.Define("fan", flow.Step(Split{}), flow.Step(Piece{}), flow.Step(Join{}), parts)

// Tick waits for a timer as often as it is told.
type Tick struct{}

func (Tick) WaitFor(_ *flow.Context, left int) (flow.Wait, error) {
	return flow.AnyOf(flow.After("tick", time.Duration(20*left)*time.Millisecond)), nil
}

func (Tick) Execute(ctx *flow.Context, left int) (flow.Decision, error) {
	did(ctx, false, 0)
	if !ctx.Fired("tick") {
		return flow.Fail(errors.New("the wait was over before the timer fired")), nil
	}
	if left <= 1 {
		return flow.Complete("ticked"), nil
	}
	return flow.GoTo(Tick{}, left-1), nil
}

var ticker = flow.Define("ticker", flow.Step(Tick{}))

// Both waits for two child flows and adds up what they give.
type Both struct{}

func (Both) WaitFor(ctx *flow.Context, j Job) (flow.Wait, error) {
	a, b := childrenOf(ctx.FlowID())
	return flow.AllOf(flow.Child(pipeline, a, flow.To(Seq{}, j)), flow.Child(pipeline, b, flow.To(Fast{}, j))), nil
}

func (Both) Execute(ctx *flow.Context, _ Job) (flow.Decision, error) {
	did(ctx, false, 0)
	sum := 0
	a, b := childrenOf(ctx.FlowID())
	for _, id := range []string{a, b} {
		n, ok, err := flow.ChildResult[int](ctx, id)
		if err != nil || !ok {
			return flow.Fail(fmt.Errorf("child %s: done is %v: %w", id, ok, err)), nil
		}
		sum += n
	}
	return flow.Complete(sum), nil
}

func childrenOf(id string) (a, b string) { return id + "/a", id + "/b" }

var parent = flow.Define("parent", flow.Step(Both{}))

var (
	letters = flow.NewChannel[string]("letters")
	closing = flow.NewChannel[bool]("closing")
	taken   = flow.NewAttribute[int]("taken")
)

// Take consumes messages until it is told to close.
type Take struct{}

func (Take) WaitFor(*flow.Context, flow.None) (flow.Wait, error) {
	return flow.AnyOf(letters.AtMost(4), closing.ForOne()), nil
}

func (Take) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	if ctx.Fired(closing.Name()) {
		did(ctx, false, 0)
		return emptied(ctx, 0)
	}
	n, err := consume(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	taken.Set(ctx, n)
	return flow.GoTo(Take{}, flow.None{}), nil
}

// Rest consumes what is left when the inbox closes.
type Rest struct{}

func (Rest) WaitFor(*flow.Context, flow.None) (flow.Wait, error) {
	return flow.AnyOf(letters.AtMost(4)), nil
}

func (Rest) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	n, err := consume(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	taken.Set(ctx, n)
	return emptied(ctx, n)
}

func consume(ctx *flow.Context) (n int, err error) {
	got, err := letters.Messages(ctx)
	if err != nil {
		return 0, err
	}
	did(ctx, false, 2, got...)
	n, err = taken.Get(ctx)
	return n + len(got), err
}

func emptied(ctx *flow.Context, n int) (d flow.Decision, err error) {
	if n == 0 {
		if n, err = taken.Get(ctx); err != nil {
			return flow.Decision{}, err
		}
	}
	return flow.CompleteIfEmpty(n, flow.To(Rest{}, flow.None{}), letters), nil
}

var inbox = flow.Define("inbox", flow.Step(Take{}), flow.Step(Rest{}), letters, closing, taken)

// Mark is a step that some additions start.
type Mark struct{}

func (Mark) Execute(ctx *flow.Context, name string) (flow.Decision, error) {
	did(ctx, false, 1, name)
	return flow.DeadEnd(), nil
}

// marked says whether an addition of that name starts a Mark: each fourth does.
func marked(name string) bool { return name[len(name)-1]%4 == 0 }

// A counter begins without a step. It counts by keeping the names of all that
// was added, in order, so that its end says of each addition whether it took
// effect.
var (
	added = flow.NewAttribute[[]string]("added")
	notes = flow.NewAttributeMap[string, int]("notes")
	add   = flow.NewLockedRPC("add", func(ctx *flow.UpdateContext, name string) (int, error) {
		all, err := added.Get(ctx)
		if err != nil {
			return 0, err
		}
		all = append(all[:len(all):len(all)], name)
		added.Set(ctx, all)
		if marked(name) {
			ctx.Start(flow.To(Mark{}, name))
		}
		return len(all), nil
	})
	size = flow.NewRPC("size", func(ctx *flow.ReadContext, _ flow.None) (int, error) {
		all, err := added.Get(ctx)
		return len(all), err
	})
	finish = flow.NewLockedRPC("finish", func(ctx *flow.UpdateContext, _ flow.None) ([]string, error) {
		all, err := added.Get(ctx)
		ctx.Close(flow.Complete(len(all)))
		return all, err
	})
)

var counter = flow.Define("counter", flow.Step(Mark{}), added, notes, add, size, finish)

// Trip is what a saga books.
type Trip struct{ Full bool }

var errFull = errors.New("the flight is full")

// Hotel books the first part.
type Hotel struct{}

func (Hotel) Execute(ctx *flow.Context, t Trip) (flow.Decision, error) {
	did(ctx, false, 1)
	return flow.GoTo(Flight{}, t), nil
}

// Flight books the second part, at the second try if there is a seat.
type Flight struct{}

func (Flight) Execute(ctx *flow.Context, t Trip) (flow.Decision, error) {
	did(ctx, false, 1)
	switch {
	case t.Full:
		return flow.Decision{}, flow.Permanent(errFull)
	case ctx.Retries() < 1:
		return flow.Decision{}, errors.New("the airline does not answer")
	}
	return flow.Complete("booked"), nil
}

// Refund takes the first part back.
type Refund struct{}

func (Refund) Execute(ctx *flow.Context, _ Trip) (flow.Decision, error) {
	did(ctx, false, 1)
	return flow.Fail(fmt.Errorf("refunded: %w", ctx.Failure())), nil
}

var trip = flow.Define("trip", flow.Step(Hotel{}), flow.Step(Refund{}),
	flow.Step(Flight{}, flow.OnFailure(Refund{}), flow.Retry(flow.RetryPolicy{MaxAttempts: 3, Initial: 10 * time.Millisecond})))
