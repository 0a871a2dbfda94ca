package examples

import (
	"fmt"
	"io"
	"strings"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// reply is what a model says: words, or calls of tools.
type reply struct {
	Words string
	Calls []toolCall
}

type toolCall struct{ Tool, Input string }

// model stands for a model provider: it asks for the weather, and then answers.
func model(conversation []string) reply {
	last := conversation[len(conversation)-1]
	if strings.HasPrefix(last, "user: ") {
		return reply{Calls: []toolCall{{"weather", "Oslo"}, {"weather", "Rome"}}}
	}
	return reply{Words: "Rome is warmer."}
}

var (
	conversation = flow.NewAttribute[[]string]("conversation")
	toolResults  = flow.NewChannel[string]("tool-results")
)

// Think calls the model with what was said so far, and the results of tools it
// has waited for.
type Think struct{}

// WaitFor waits for the results of all tools that the last answer has called.
func (Think) WaitFor(ctx *flow.Context, results int) (flow.Wait, error) {
	if results == 0 {
		return flow.Wait{}, nil
	}
	return flow.AllOf(toolResults.ForN(results)), nil
}

// Execute is one turn of the loop.
func (Think) Execute(ctx *flow.Context, _ int) (flow.Decision, error) {
	said, err := conversation.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	results, err := toolResults.Messages(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	said = append(said, results...)
	r := model(said)
	if len(r.Calls) == 0 {
		for _, word := range strings.SplitAfter(r.Words, " ") {
			io.WriteString(ctx.Output(), word) // token by token, to those who watch
		}
		conversation.Set(ctx, append(said, "model: "+r.Words))
		return flow.Complete(r.Words), nil
	}
	conversation.Set(ctx, said)
	next := []flow.Next{flow.To(Think{}, len(r.Calls))}
	for _, c := range r.Calls {
		next = append(next, flow.To(CallTool{}, c))
	}
	return flow.GoToAll(next...), nil
}

// CallTool runs one tool, beside the others, with retries of its own.
type CallTool struct{}

// Execute tells its result to the step that waits for all of them.
func (CallTool) Execute(ctx *flow.Context, c toolCall) (flow.Decision, error) {
	degrees := map[string]int{"Oslo": -3, "Rome": 12}
	toolResults.Publish(ctx, fmt.Sprintf("tool: %s %s: %d°C", c.Tool, c.Input, degrees[c.Input]))
	return flow.DeadEnd(), nil
}

var agents = flow.Define("agent", flow.Step(Think{}), flow.Step(CallTool{}), conversation, toolResults)

// An agent is a loop of a model and its tools. If the worker dies in the middle,
// the loop goes on where it was, and no tool that has answered is called again.
func Example_agent() {
	env := perduretest.Open(agents)
	defer env.Close()

	env.Start(agents, "chat", flow.To(Think{}, 0), flow.With(conversation, []string{"user: Where is it warmer, in Oslo or in Rome?"}))
	perduretest.Result[string](env, "chat")
	fmt.Println("streamed:", env.Shown("chat"))
	said := perduretest.Get(env, "chat", conversation)
	fmt.Println(len(said), "messages, the last one:", said[len(said)-1])

	// Output:
	// streamed: Rome is warmer.
	// 4 messages, the last one: model: Rome is warmer.
}
