package examples

import (
	"fmt"
	"slices"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var (
	customer = flow.NewAttribute[string]("customer", flow.Indexed())
	tags     = flow.NewAttribute[[]string]("tags", flow.Indexed())
	priority = flow.NewAttribute[int]("weight", flow.Indexed())
	closing  = flow.NewChannel[string]("closing")
)

// Ticket is open until it is closed.
type Ticket struct{}

// WaitFor waits for the end.
func (Ticket) WaitFor(ctx *flow.Context, _ flow.None) (flow.Wait, error) {
	return flow.AllOf(closing.ForOne()), nil
}

// Execute ends it.
func (Ticket) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	why, _, err := closing.Message(ctx)
	tags.Set(ctx, []string{"closed", why})
	return flow.Complete(nil), err
}

var tickets = flow.Define("ticket", flow.Step(Ticket{}), customer, tags, priority, closing)

// Attributes that are declared as indexed can be searched for, as soon as they
// are written.
func Example_search() {
	env := perduretest.Open(tickets)
	defer env.Close()

	for i, who := range []string{"acme", "bolt", "acme"} {
		env.Start(tickets, fmt.Sprintf("t%d", i+1), flow.To(Ticket{}, flow.None{}),
			flow.With(customer, who), flow.With(tags, []string{"open", "new"}), flow.With(priority, 10*i))
	}
	perduretest.Publish(env, "t1", closing, "solved")

	for _, query := range []string{
		`customer = "acme"`,
		`customer = "acme" and status = running`,
		`tags = "solved" or weight >= 20`,
	} {
		ids := env.Search(query)
		slices.Sort(ids)
		fmt.Println(query, "→", ids)
	}

	// Output:
	// customer = "acme" → [t1 t3]
	// customer = "acme" and status = running → [t3]
	// tags = "solved" or weight >= 20 → [t1 t3]
}
