package examples

import (
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Move is money that comes or goes.
type Move struct {
	Currency string
	Cents    int
}

var (
	balances = flow.NewAttributeMap[string, int]("balance")

	// A locked RPC is a transaction on its flow.
	move = flow.NewLockedRPC("move", func(ctx *flow.UpdateContext, m Move) (int, error) {
		balance := balances.At(m.Currency)
		cents, err := balance.Get(ctx)
		if err != nil {
			return 0, err
		}
		if cents += m.Cents; cents < 0 {
			return 0, flow.WithKind(errors.New("there is not enough on the account"), "overdrawn")
		}
		balance.Set(ctx, cents)
		return cents, nil
	})

	// Any other RPC only reads: its context cannot write.
	statement = flow.NewRPC("statement", func(ctx *flow.ReadContext, _ flow.None) (map[string]int, error) {
		all := map[string]int{}
		for _, currency := range balances.Keys(ctx) {
			cents, err := balances.At(currency).Get(ctx)
			if err != nil {
				return nil, err
			}
			all[currency] = cents
		}
		return all, nil
	})

	accounts = flow.Define("account", balances, move, statement)
)

// A flow without steps is a durable object: it lives by its attributes and RPCs.
func Example_account() {
	env := perduretest.Open(accounts)
	defer env.Close()

	env.Start(accounts, "ann", flow.NoStep, flow.With(balances.At("EUR"), 500))
	fmt.Println(perduretest.Call(env, "ann", move, Move{"EUR", -200}))
	fmt.Println(perduretest.Call(env, "ann", move, Move{"USD", 1000}))

	_, err := perduretest.Call(env, "ann", move, Move{"EUR", -400})
	var refused *perduretest.RefusedError
	if errors.As(err, &refused) {
		fmt.Println(refused.Kind)
	}
	fmt.Println(perduretest.Call(env, "ann", statement, flow.None{}))

	// Output:
	// 300 <nil>
	// 1000 <nil>
	// overdrawn
	// map[EUR:300 USD:1000] <nil>
}
