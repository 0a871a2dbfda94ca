package examples

import (
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Expense is what somebody has to approve.
type Expense struct {
	What      string
	Approvers []string
	Reminders int
}

// Vote is one approver's word.
type Vote struct {
	By  string
	Yes bool
}

var votes = flow.NewChannel[Vote]("votes")

// Approve waits until all have said yes, or one has said no.
type Approve struct{}

// WaitFor waits for as many votes as there are approvers left, one at a time,
// and for a day.
func (Approve) WaitFor(ctx *flow.Context, e Expense) (flow.Wait, error) {
	return flow.AnyOf(votes.ForOne(), flow.After("reminder", 24*time.Hour)), nil
}

// Execute counts a vote, or reminds.
func (Approve) Execute(ctx *flow.Context, e Expense) (flow.Decision, error) {
	if ctx.Fired("reminder") {
		if e.Reminders == 2 {
			return flow.Complete(e.What + ": given up, no word of " + strings.Join(e.Approvers, " and ")), nil
		}
		e.Reminders++
		fmt.Fprintf(ctx.Output(), "reminding %s\n", strings.Join(e.Approvers, " and "))
		return flow.GoTo(Approve{}, e), nil
	}
	v, _, err := votes.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if !v.Yes {
		return flow.Complete(e.What + ": refused by " + v.By), nil
	}
	var left []string
	for _, a := range e.Approvers {
		if a != v.By {
			left = append(left, a)
		}
	}
	if len(left) == 0 {
		return flow.Complete(e.What + ": approved"), nil
	}
	e.Approvers = left
	return flow.GoTo(Approve{}, e), nil
}

var approvals = flow.Define("approval", flow.Step(Approve{}), votes)

// People decide when they like; the flow reminds them, and gives up at last.
func Example_approval() {
	env := perduretest.Open(approvals)
	defer env.Close()

	both := []string{"ann", "bob"}
	env.Start(approvals, "a", flow.To(Approve{}, Expense{What: "chairs", Approvers: both}))
	perduretest.Publish(env, "a", votes, Vote{"ann", true})
	env.Advance(30 * time.Hour)
	perduretest.Publish(env, "a", votes, Vote{"bob", true})
	fmt.Println(perduretest.Result[string](env, "a"))
	fmt.Print(env.Shown("a"))

	env.Start(approvals, "b", flow.To(Approve{}, Expense{What: "tables", Approvers: both}))
	perduretest.Publish(env, "b", votes, Vote{"bob", false})
	fmt.Println(perduretest.Result[string](env, "b"))

	env.Start(approvals, "c", flow.To(Approve{}, Expense{What: "lamps", Approvers: both}))
	fmt.Println(perduretest.Result[string](env, "c"))

	// Output:
	// chairs: approved
	// reminding bob
	// tables: refused by bob
	// lamps: given up, no word of ann and bob
}
