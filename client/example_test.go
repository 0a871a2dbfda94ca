package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// The parts of a flow are declared once, where its worker and its clients see
// them. Clients that are built without the worker's code name its steps by Ref.
var (
	Order   = flow.External("order")
	Charge  = flow.Ref[int]("Charge")
	Amount  = flow.NewAttribute[int]("amount")
	Payment = flow.NewChannel[string]("payment")
)

func Example() {
	ctx := context.Background()
	c, err := client.Dial(ctx, client.Options{Address: "127.0.0.1:8080"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	_, err = client.Start(ctx, c, Order, "order-17", flow.To(Charge, 42), flow.Priority(5))
	if errors.Is(err, client.ErrExists) {
		fmt.Println("it was started before")
	}
	if err := client.Publish(ctx, c, "order-17", Payment, "cash"); err != nil {
		log.Fatal(err)
	}
	receipt, err := client.Result[string](ctx, c, "order-17")
	var failed *client.FlowFailed
	if errors.As(err, &failed) {
		fmt.Println("no luck:", failed.Status, failed.Message)
	}
	fmt.Println(receipt)
}

func ExampleClient_Search() {
	ctx := context.Background()
	c, err := client.Dial(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	for f, err := range c.Search(ctx, `type = "order" and amount > 100 and created > -2h`, 20) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(f.ID, f.Status)
	}
}

func ExampleClient_Watch() {
	ctx := context.Background()
	c, err := client.Dial(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	for seen, err := range c.Watch(ctx, "order-17", client.Cursor{}) {
		switch {
		case err != nil:
			log.Fatal(err)
		case seen.Output != nil:
			fmt.Print(seen.Output.Text)
		default:
			fmt.Println(seen.Event.Type, seen.Event.Step)
		}
	}
}
