// Package agent is the built-in agent: definitions, and the handlers of its
// flow. What a handler decides is pure (decide.go); this file does the calls.
package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// AttributeAgent is the attribute of a session that names its agent.
const AttributeAgent = "agent"

// Limits bounds the turns of every agent.
type Limits struct {
	MaxToolRounds int
	MaxToolCalls  int
	TurnTimeout   time.Duration
}

// Handler runs the steps of agent flows; it is a worker.Handler.
type Handler struct {
	Registry *Registry
	Limits   Limits
	Clock    env.Clock
	// OnUsage is told of the tokens of each model call. May be nil.
	OnUsage func(model.Usage)
}

var errTurnTimeout = errors.New("turn timed out")

// toolRetry is the policy of tool calls: only failures that a further attempt
// may not meet are tried again (see tool.Result.Retryable).
var toolRetry = &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 250_000, MaxUs: 5_000_000}

// policy takes the retries of p, or, when the agent is gone, of the step.
func (h *Handler) policy(p *Provider, w *partition.Work) policy {
	pol := policy{maxRounds: h.Limits.MaxToolRounds, maxCalls: h.Limits.MaxToolCalls, tool: toolRetry}
	if p != nil {
		pol.model = p.Retry
	} else if w.Name != StepTool {
		pol.model = w.Retry
	}
	return pol
}

// maxHandOuts bounds how often a step is handed out again because the process
// that had it ended. Beyond it the step itself is suspected of ending them.
const maxHandOuts = 20

// Run implements worker.Handler.
func (h *Handler) Run(ctx context.Context, call *worker.Call) *wire.StepResult {
	if lost := call.Number - 1 - call.Retries; lost >= maxHandOuts && !call.Task.Cancel {
		return h.abandon(call.Work, lost)
	}
	switch call.Name {
	case StepTurn, StepContinue:
		return h.model(ctx, call)
	case StepTool:
		return h.tool(ctx, call)
	}
	return h.Fail(call.Work, fmt.Errorf("step %q is unknown to this program", call.Name))
}

// abandon ends a step whose process ended at each hand-out, so that one bad
// step cannot keep the server from living.
func (h *Handler) abandon(w *partition.Work, lost uint32) *wire.StepResult {
	text := fmt.Sprintf("the step %q was handed out %d times and the process ended each time", w.Name, lost)
	if w.Name == StepTool {
		var in toolInput
		_ = json.Unmarshal(w.Input, &in) // written by answered; empty is still an answer
		return toolDone(in, "the tool call was given up: "+text, true)
	}
	return failed(h.policy(h.providerOf(w), w), progressOf(w), "", Failure{"abandoned", text, "see the server's log for why it ended"})
}

// Fail implements worker.Handler.
func (h *Handler) Fail(w *partition.Work, err error) *wire.StepResult {
	if w.Name == StepTool {
		var in toolInput
		_ = json.Unmarshal(w.Input, &in) // written by answered; empty is still an answer
		return toolDone(in, "the tool call failed: "+err.Error(), true)
	}
	return failed(h.policy(h.providerOf(w), w), progressOf(w), "", Failure{"internal", err.Error(), "see the server's log"})
}

func (h *Handler) agentOf(w *partition.Work) (*Agent, string, error) {
	tenant, _, _ := strings.Cut(w.FlowID, "/")
	name := string(w.Attribute(AttributeAgent))
	a, err := h.Registry.Get(tenant, name)
	return a, name, err
}

func (h *Handler) providerOf(w *partition.Work) *Provider {
	if a, _, err := h.agentOf(w); err == nil {
		return a.provider
	}
	return nil
}

func progressOf(w *partition.Work) progress {
	var pr progress
	if w.Name == StepContinue {
		_ = json.Unmarshal(w.Input, &pr) // written by answered
	} else {
		pr.StartedUs = w.StartedUs
	}
	return pr
}

// model makes one model call of a turn.
func (h *Handler) model(ctx context.Context, call *worker.Call) *wire.StepResult {
	pr := progressOf(call.Work)
	a, name, err := h.agentOf(call.Work)
	if err != nil {
		return failed(h.policy(nil, call.Work), pr, "", Failure{"agent_not_found", fmt.Sprintf("agent %q is not there any more", name), "define it again, or make a new session"})
	}
	pol := h.policy(a.provider, call.Work)
	if call.Task.Cancel {
		return cancelled(pol, pr, "", call.Reason)
	}
	ctx, done := h.deadline(ctx, pr)
	defer done()
	if f, ok := h.acquire(ctx, call, a.provider); !ok {
		return h.interrupted(ctx, pol, pr, model.Result{}, f)
	}
	req, err := request(call.Work, a)
	if err != nil {
		a.provider.Limiter.Release()
		return failed(pol, pr, "", Failure{"history_unreadable", err.Error(), "see the server's log"})
	}
	res, err := a.provider.Generate(ctx, req, model.SinkFunc(func(text []byte) error { return call.Show(ctx, string(text)) }))
	a.provider.Limiter.Release()
	if h.OnUsage != nil {
		h.OnUsage(res.Usage)
	}
	if err == nil {
		return answered(pol, pr, res, call.Exec)
	}
	var me *model.Error
	if !errors.As(err, &me) {
		me = &model.Error{Kind: model.KindPermanent, Code: "unknown", Message: err.Error()}
	}
	return h.interrupted(ctx, pol, pr, res, me)
}

// interrupted gives the result of a call that brought an error: by a cancel,
// by the turn's deadline, or its own.
func (h *Handler) interrupted(ctx context.Context, pol policy, pr progress, res model.Result, me *model.Error) *wire.StepResult {
	var asked *worker.Cancelled
	switch cause := context.Cause(ctx); {
	case errors.As(cause, &asked):
		return cancelled(pol, pr, res.Text, asked.Reason)
	case errors.Is(cause, errTurnTimeout):
		return failed(pol, pr, res.Text, Failure{"turn_timeout", fmt.Sprintf("the turn took longer than %s", h.Limits.TurnTimeout), "raise kernel.turn_timeout"})
	case cause != nil:
		return cancelled(pol, pr, res.Text, "the server stops") // not proposed: see worker.Pool
	}
	return modelFailed(pol, pr, res, me)
}

// deadline ends ctx with errTurnTimeout when the turn has lasted too long.
func (h *Handler) deadline(ctx context.Context, pr progress) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	left := time.UnixMicro(pr.StartedUs).Add(h.Limits.TurnTimeout).Sub(h.Clock.Now())
	if left <= 0 {
		cancel(errTurnTimeout)
		return ctx, func() {}
	}
	t := h.Clock.AfterFunc(left, func() { cancel(errTurnTimeout) })
	return ctx, func() { t.Stop(); cancel(nil) }
}

// acquire takes a permit. Before the commit of the step's start only a free
// one: a call that must queue gains nothing by being early.
func (h *Handler) acquire(ctx context.Context, call *worker.Call, p *Provider) (*model.Error, bool) {
	if !call.Committed() && p.Limiter.TryAcquire() {
		return nil, true
	}
	select {
	case <-call.Durable():
	case <-ctx.Done():
		return nil, false
	}
	if err := p.Limiter.Acquire(ctx); err != nil {
		var me *model.Error
		errors.As(err, &me)
		return me, false
	}
	return nil, true
}

// tool runs one tool call.
func (h *Handler) tool(ctx context.Context, call *worker.Call) *wire.StepResult {
	var in toolInput
	if err := json.Unmarshal(call.Input, &in); err != nil {
		return toolDone(in, "the call could not be read: "+err.Error(), true)
	}
	if call.Task.Cancel {
		return toolDone(in, "cancelled before it ran", true)
	}
	a, name, err := h.agentOf(call.Work)
	if err != nil {
		return toolDone(in, fmt.Sprintf("agent %q is not there any more", name), true)
	}
	t := a.tools[in.Name]
	if t == nil {
		return toolDone(in, fmt.Sprintf("there is no tool %q", in.Name), true)
	}
	if err := t.Validate(in.Arguments); err != nil {
		return toolDone(in, "the arguments are not valid: "+err.Error(), true)
	}
	res := t.Call(ctx, tool.Call{Arguments: in.Arguments, IdempotencyKey: call.Key()})
	var asked *worker.Cancelled
	if res.IsError && errors.As(context.Cause(ctx), &asked) {
		return toolDone(in, "cancelled while it ran; whether it took effect is unknown", true)
	}
	out := toolDone(in, res.Content, res.IsError)
	if res.Retryable {
		out.Retry = &wire.Retry{Error: cutText(res.Content, 512), AfterUs: res.RetryAfter.Microseconds()}
	}
	return out
}
