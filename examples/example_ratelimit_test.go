package examples

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// bank is an API that takes two calls of one customer at a time, and no more.
type bank struct {
	now, most atomic.Int32
	pairs     chan struct{}
}

func (b *bank) transfer(ctx context.Context) error {
	n := b.now.Add(1)
	defer b.now.Add(-1)
	for most := b.most.Load(); n > most && !b.most.CompareAndSwap(most, n); most = b.most.Load() {
	}
	// Two calls meet here, so that it is seen that two run at once.
	select {
	case b.pairs <- struct{}{}:
	case <-b.pairs:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// Transfer calls the bank.
type Transfer struct{ bank *bank }

// Execute may run for many flows at once, but not for one customer.
func (t *Transfer) Execute(ctx *flow.Context, customer string) (flow.Decision, error) {
	if err := t.bank.transfer(ctx); err != nil {
		return flow.Decision{}, err
	}
	return flow.Complete("done"), nil
}

// At most two attempts of one key run at a time, whatever flow they are of.
func Example_ratelimit() {
	b := &bank{pairs: make(chan struct{})}
	transfers := flow.Define("transfer", flow.Step(&Transfer{b},
		flow.Concurrency(2, func(customer string) string { return "bank/" + customer })))
	env := perduretest.Open(transfers)
	defer env.Close()

	for i := range 20 {
		env.Start(transfers, fmt.Sprintf("transfer-%d", i), flow.To(&Transfer{}, "ann"))
	}
	for i := range 20 {
		perduretest.Result[string](env, fmt.Sprintf("transfer-%d", i))
	}
	fmt.Println("at most", b.most.Load(), "at a time")

	// Output: at most 2 at a time
}
