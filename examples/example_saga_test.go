package examples

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Trip is what a saga books: all of it, or nothing.
type Trip struct {
	Days   int
	Booked []string // what has to be undone
}

// BookHotel books the first part.
type BookHotel struct{}

// Execute books a room; what it has done travels in the next step's input.
func (BookHotel) Execute(ctx *flow.Context, t Trip) (flow.Decision, error) {
	t.Booked = append(t.Booked, "hotel")
	return flow.GoTo(BookFlight{}, t), nil
}

// BookFlight books the second part.
type BookFlight struct{}

var errFull = errors.New("the flight is full")

// Execute books a seat. A short trip finds one at the third attempt.
func (BookFlight) Execute(ctx *flow.Context, t Trip) (flow.Decision, error) {
	if t.Days > 7 {
		return flow.Decision{}, flow.Permanent(errFull) // trying again is of no use
	}
	if ctx.Retries() < 2 {
		return flow.Decision{}, errors.New("the airline does not answer")
	}
	t.Booked = append(t.Booked, "flight")
	return flow.Complete("booked " + strings.Join(t.Booked, " and ")), nil
}

// Undo takes back what was booked before the failure.
type Undo struct{}

// Execute gets the input of the step that failed.
func (Undo) Execute(ctx *flow.Context, t Trip) (flow.Decision, error) {
	return flow.Fail(fmt.Errorf("%w; cancelled: %s", ctx.Failure(), strings.Join(t.Booked, ", "))), nil
}

var trips = flow.Define("trip",
	flow.Step(BookHotel{}),
	flow.Step(BookFlight{}, flow.OnFailure(Undo{}), flow.Retry(flow.RetryPolicy{MaxAttempts: 5, Initial: time.Minute})),
	flow.Step(Undo{}),
)

// A failure that retries cannot mend goes to the step that undoes what was done.
func Example_saga() {
	env := perduretest.Open(trips)
	defer env.Close()

	env.Start(trips, "weekend", flow.To(BookHotel{}, Trip{Days: 2}))
	fmt.Println(perduretest.Result[string](env, "weekend"))

	env.Start(trips, "holiday", flow.To(BookHotel{}, Trip{Days: 21}))
	end := env.Wait("holiday")
	fmt.Printf("%v: %s\n", end.Status, end.Error)

	// Output:
	// booked hotel and flight
	// failed: the flight is full; cancelled: hotel
}
