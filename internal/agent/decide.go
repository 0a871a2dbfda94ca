package agent

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"github.com/perdure-dev/perdure/internal/wire"
)

// The steps of the agent flow and its channels. `turn` is at rest until a
// message comes on Input; `tool` runs one call and publishes its result on
// results; `continue` waits for the results of its round, so that waiting for
// N messages is the join of N parallel calls.
const (
	FlowType = "agent"

	StepTurn     = "turn"
	StepContinue = "continue"
	StepTool     = "tool"

	Input   = "input"
	results = "results"
)

// Events of the agent, beside those of the core.
const (
	EventMessage   = "message.completed" // items: the assistant's message
	EventTool      = "tool.completed"
	EventCompleted = "turn.completed"
	EventFailed    = "turn.failed"
	EventCancelled = "turn.cancelled"
)

// Terminal reports whether an event ends its turn.
func Terminal(eventType string) bool {
	return eventType == EventCompleted || eventType == EventFailed || eventType == EventCancelled
}

// Usage counts tokens of a turn.
type Usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// append writes u as JSON.
func (u Usage) append(b []byte) []byte {
	b = strconv.AppendInt(append(b, `{"prompt_tokens":`...), int64(u.Prompt), 10)
	b = strconv.AppendInt(append(b, `,"completion_tokens":`...), int64(u.Completion), 10)
	b = strconv.AppendInt(append(b, `,"total_tokens":`...), int64(u.Total), 10)
	return append(b, '}')
}

func (u Usage) plus(m model.Usage) Usage {
	return Usage{u.Prompt + m.Prompt, u.Completion + m.Completion, u.Total + m.Prompt + m.Completion}
}

// progress is what a turn's next model call must know of it: the input of
// `continue`.
type progress struct {
	Round     int   `json:"round"` // model calls with tool calls so far
	Usage     Usage `json:"usage"`
	StartedUs int64 `json:"started_us"`
}

// policy is what the pure decisions need of agent and provider.
type policy struct {
	maxRounds int
	maxCalls  int
	model     *wire.RetryPolicy
	tool      *wire.RetryPolicy
}

// Failure is why a turn failed, for the client.
type Failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// TurnStep is the step in which a session is at rest.
func TurnStep(retry *wire.RetryPolicy) *wire.StepSpec {
	return &wire.StepSpec{Name: StepTurn, Wait: &wire.Wait{Channel: Input, Count: 1, Idle: true}, Retry: retry, Prefetch: true}
}

type toolCall struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

type assistantMessage struct {
	Role      string     `json:"role"`
	Content   *string    `json:"content"`
	ToolCalls []toolCall `json:"tool_calls,omitempty"`
}

// encode gives the message as JSON. The usual one, text alone, is written
// without reflection: it ends every turn.
func (m assistantMessage) encode() []byte {
	if m.Content == nil || len(m.ToolCalls) > 0 {
		return encode(m)
	}
	b := append(make([]byte, 0, len(*m.Content)+40), `{"role":"assistant","content":`...)
	return append(jsontext.AppendString(b, *m.Content), '}')
}

type toolMessage struct {
	Role    string `json:"role"`
	CallID  string `json:"tool_call_id"`
	Content string `json:"content"`
}

// toolInput is the input of a `tool` step.
type toolInput struct {
	ID        string `json:"call_id"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// answered is the result of a model call that gave an answer.
func answered(p policy, pr progress, res model.Result, exec uint64) *wire.StepResult {
	pr.Usage = pr.Usage.plus(res.Usage)
	msg := assistantMessage{Role: "assistant", Content: &res.Text, ToolCalls: wireCalls(res.ToolCalls, exec)}
	if res.Text == "" && len(msg.ToolCalls) > 0 {
		msg.Content = nil
	}
	out := &wire.StepResult{}
	said := addMessage(out, msg, res.FinishReason, res.Usage, false)
	if len(msg.ToolCalls) == 0 {
		data := append(strconv.AppendInt([]byte(`{"model_calls":`), int64(pr.Round+1), 10), `,"usage":`...)
		return end(out, p, EventCompleted, append(pr.Usage.append(data), '}'))
	}
	run := msg.ToolCalls
	if pr.Round+1 > p.maxRounds {
		return overRounds(out, p, pr, said, run)
	}
	if len(run) > p.maxCalls {
		run = run[:p.maxCalls]
	}
	for _, c := range run {
		out.Next = append(out.Next, &wire.StepSpec{Name: StepTool, Retry: p.tool,
			Input: encode(toolInput{c.ID, c.Function.Name, c.Function.Arguments})})
	}
	for _, c := range msg.ToolCalls[len(run):] {
		out.Publish = append(out.Publish, toolResult(c.ID, fmt.Sprintf("not run: at most %d tool calls are taken from one answer", p.maxCalls)))
	}
	pr.Round++
	out.Next = append(out.Next, &wire.StepSpec{Name: StepContinue, Retry: p.model, Prefetch: true, Input: encode(pr),
		Wait: &wire.Wait{Channel: results, Count: uint32(len(msg.ToolCalls))}})
	return out
}

// overRounds ends a turn whose model keeps asking for tools. Each call gets a
// result, or providers would refuse the conversation from then on.
func overRounds(out *wire.StepResult, p policy, pr progress, said *wire.NewEvent, calls []toolCall) *wire.StepResult {
	for _, c := range calls {
		said.Items = append(said.Items, encode(toolMessage{"tool", c.ID, "not run: the turn had too many rounds of tool calls"}))
	}
	f := Failure{"too_many_tool_rounds", fmt.Sprintf("the model asked for tools in more than %d answers of one turn", p.maxRounds),
		"raise kernel.max_tool_rounds, or tell the agent when to stop"}
	return end(out, p, EventFailed, encode(map[string]any{"error": f, "usage": pr.Usage}))
}

// wireCalls gives the calls in their wire form; an ID that is missing or
// doubled is made up, since results are matched by it.
func wireCalls(calls []model.ToolCall, exec uint64) []toolCall {
	seen := map[string]bool{"": true}
	var out []toolCall
	for i, c := range calls {
		w := toolCall{ID: c.ID, Type: "function"}
		for n := i; seen[w.ID]; n++ {
			w.ID = fmt.Sprintf("call_%d_%d", exec, n)
		}
		seen[w.ID] = true
		w.Function.Name, w.Function.Arguments = c.Name, c.Arguments
		out = append(out, w)
	}
	return out
}

// stopped is the result of a model call that did not finish: what it had shown
// is kept, so that the client's screen and the conversation agree.
func stopped(p policy, pr progress, shown string, event string, data map[string]any) *wire.StepResult {
	out := &wire.StepResult{}
	if shown != "" {
		addMessage(out, assistantMessage{Role: "assistant", Content: &shown}, "incomplete", model.Usage{}, true)
	}
	data["usage"] = pr.Usage
	return end(out, p, event, encode(data))
}

func cancelled(p policy, pr progress, shown, reason string) *wire.StepResult {
	return stopped(p, pr, shown, EventCancelled, map[string]any{"reason": reason})
}

func failed(p policy, pr progress, shown string, f Failure) *wire.StepResult {
	return stopped(p, pr, shown, EventFailed, map[string]any{"error": f})
}

// modelFailed is the result of a model call with an error: tried again by the
// step's policy when that can help and nothing was shown, else the turn fails.
func modelFailed(p policy, pr progress, res model.Result, err *model.Error) *wire.StepResult {
	out := failed(p, pr, res.Text, Failure{"model_" + err.Code, err.Message, err.Hint})
	if err.Kind == model.KindRetryable && !res.Shown {
		out.Retry = &wire.Retry{Error: err.Error(), AfterUs: err.RetryAfter.Microseconds()}
	}
	return out
}

// toolDone is the result of a tool call.
func toolDone(in toolInput, content string, isError bool) *wire.StepResult {
	preview, cut := content, false
	if len(preview) > toolPreview {
		preview, cut = cutText(preview, toolPreview), true
	}
	data := map[string]any{"call_id": in.ID, "name": in.Name, "content": preview, "is_error": isError}
	if cut {
		data["truncated"] = true
	}
	return &wire.StepResult{
		Events:  []*wire.NewEvent{{Type: EventTool, Data: encode(data)}},
		Publish: []*wire.Publish{toolResult(in.ID, content)},
	}
}

// toolPreview is how much of a tool's result its event shows; the conversation
// has all of it.
const toolPreview = 16 << 10

// cutText gives at most n bytes of s, and no half of a character.
func cutText(s string, n int) string {
	if n >= len(s) {
		return s
	}
	for n > 0 && s[n]&0xC0 == 0x80 {
		n--
	}
	return s[:n]
}

func toolResult(callID, content string) *wire.Publish {
	return &wire.Publish{Channel: results, Payload: encode(toolMessage{"tool", callID, content})}
}

func addMessage(out *wire.StepResult, m assistantMessage, finish string, u model.Usage, partial bool) *wire.NewEvent {
	data := jsontext.AppendField(append(make([]byte, 0, 128), '{'), "finish_reason", finish)
	data = Usage{}.plus(u).append(append(data, `,"usage":`...))
	if partial {
		data = append(data, `,"partial":true`...)
	}
	ev := &wire.NewEvent{Type: EventMessage, Data: append(data, '}'), Items: [][]byte{m.encode()}}
	out.Events = append(out.Events, ev)
	return ev
}

// end appends the terminal event and puts the session to rest.
func end(out *wire.StepResult, p policy, event string, data []byte) *wire.StepResult {
	out.Events = append(out.Events, &wire.NewEvent{Type: event, Data: data})
	out.Next = append(out.Next, TurnStep(p.model))
	return out
}

// encode never fails: it is given structs, maps of plain values and strings.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("agent: encode %T: %v", v, err))
	}
	return b
}
