package examples

import (
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// One channel for each player.
var moves = flow.NewChannelMap[string, int]("moves")

// Game is whose turn it is, and what was played.
type Game struct {
	Players []string
	Turn    int
	Played  []string
}

// Turn waits for the move of the player whose turn it is; a move of another
// waits in its own channel.
type Turn struct{}

// WaitFor picks the channel by its key.
func (Turn) WaitFor(ctx *flow.Context, g Game) (flow.Wait, error) {
	return flow.AllOf(moves.At(g.Players[g.Turn]).ForOne()), nil
}

// Execute plays.
func (Turn) Execute(ctx *flow.Context, g Game) (flow.Decision, error) {
	player := g.Players[g.Turn]
	n, _, err := moves.At(player).Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	g.Played = append(g.Played, fmt.Sprintf("%s %d", player, n))
	if len(g.Played) == 4 {
		return flow.Complete(g.Played), nil
	}
	g.Turn = (g.Turn + 1) % len(g.Players)
	return flow.GoTo(Turn{}, g), nil
}

var games = flow.Define("game", flow.Step(Turn{}), moves)

// A ChannelMap gives each key a queue of its own.
func Example_inbox() {
	env := perduretest.Open(games)
	defer env.Close()

	env.Start(games, "g", flow.To(Turn{}, Game{Players: []string{"ann", "bob"}}))
	perduretest.Publish(env, "g", moves.At("bob"), 20, 21)
	fmt.Println(env.Status("g"))
	perduretest.Publish(env, "g", moves.At("ann"), 10, 11)
	fmt.Println(perduretest.Result[[]string](env, "g"))

	// Output:
	// running
	// [ann 10 bob 20 ann 11 bob 21]
}
