package agent

import (
	"encoding/json"
	"fmt"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Decisions are what the handlers decide, without the calls they make: whoever
// makes the calls another way, as the simulator does, gets the same results.
// They are pure.
type Decisions struct{ p policy }

// NewDecisions gives the decisions under limits, for a provider with the given
// retry policy.
func NewDecisions(l Limits, retry *wire.RetryPolicy) Decisions {
	return Decisions{policy{maxRounds: l.MaxToolRounds, maxCalls: l.MaxToolCalls, model: retry, tool: toolRetry}}
}

// Answered is the result of a model call that gave an answer.
func (d Decisions) Answered(w *partition.Work, res model.Result) *wire.StepResult {
	return answered(d.p, progressOf(w), res, w.Exec)
}

// Cancelled is the result of a model call that was asked to stop; shown is the
// text it had shown.
func (d Decisions) Cancelled(w *partition.Work, shown, reason string) *wire.StepResult {
	return cancelled(d.p, progressOf(w), shown, reason)
}

// ModelFailed is the result of a model call with an error.
func (d Decisions) ModelFailed(w *partition.Work, res model.Result, err *model.Error) *wire.StepResult {
	return modelFailed(d.p, progressOf(w), res, err)
}

// ToolDone is the result of a tool call; retry is set when a further attempt
// may do better.
func (d Decisions) ToolDone(w *partition.Work, content string, isError bool, retry *wire.Retry) *wire.StepResult {
	var in toolInput
	_ = json.Unmarshal(w.Input, &in) // written by answered; empty is still an answer
	out := toolDone(in, content, isError)
	out.Retry = retry
	return out
}

// Conversation gives the messages that a model call of w is made from.
func Conversation(w *partition.Work) ([]json.RawMessage, error) {
	req, err := request(w, &Agent{})
	if err != nil {
		return nil, fmt.Errorf("read the conversation: %w", err)
	}
	return req.Messages, nil
}
