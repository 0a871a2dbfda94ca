package examples

import (
	"errors"
	"fmt"
	"sync"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// psp is a payment provider with idempotency keys, as all of them have.
type psp struct {
	mu      sync.Mutex
	charges map[string]int
}

func (p *psp) charge(key string, cents int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.charges[key] = cents // the same key again changes nothing
}

func (p *psp) total() (cents, charges int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.charges {
		cents += c
	}
	return cents, len(p.charges)
}

// Charge does something outside, and then fails.
type Charge struct{ psp *psp }

// Execute charges under a key that is the same for each attempt of this step.
func (c *Charge) Execute(ctx *flow.Context, cents int) (flow.Decision, error) {
	c.psp.charge(ctx.Key(), cents)
	if ctx.Attempt() < 3 {
		return flow.Decision{}, errors.New("the connection broke after the charge")
	}
	return flow.Complete("charged"), nil
}

// A step may run more than once; its key makes what it does outside happen once.
func Example_payment() {
	p := &psp{charges: map[string]int{}}
	payments := flow.Define("payment", flow.Step(&Charge{p}))
	env := perduretest.Open(payments)
	defer env.Close()

	env.Start(payments, "p", flow.To(&Charge{}, 4200))
	fmt.Println(perduretest.Result[string](env, "p"))
	fmt.Println(p.total())

	// Output:
	// charged
	// 4200 1
}
