package httpapi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"net/http"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/wire"
)

// chatRequest is the body of an OpenAI chat completion, as far as it counts.
type chatRequest struct {
	agent        string
	input        json.RawMessage   // content of the last message, which is the user's
	history      []json.RawMessage // the messages before it, in normal form
	stream       bool
	includeUsage bool
}

// Parameters that change the form of the answer are refused, since ignoring
// them would give an answer that the client cannot use. Those that only tune
// the model (temperature and the like) are ignored: an agent has its own.
func decodeChat(v value) (chatRequest, error) {
	var req chatRequest
	err := v.object(func(name string, m value) error {
		switch name {
		case "model":
			return m.str(&req.agent)
		case "messages":
			return m.conversation(&req)
		}
		if m.isNull() {
			return nil
		}
		switch name {
		case "stream":
			return m.boolean(&req.stream)
		case "stream_options":
			return m.object(func(name string, o value) error {
				if name == "include_usage" && !o.isNull() {
					return o.boolean(&req.includeUsage)
				}
				return nil
			})
		case "n":
			return m.mustBeOne()
		case "tools", "functions":
			return m.mustBeEmpty()
		case "tool_choice", "function_call":
			return m.mustBe("tools belong to the agent here and it chooses among them", `"none"`, `"auto"`)
		case "response_format":
			return m.mustBeText()
		case "modalities":
			return m.mustBe("answers are text", `["text"]`)
		case "logprobs":
			return m.mustBe("log probabilities are not kept", "false")
		case "audio":
			return m.unsupported("answers are text")
		}
		return nil
	})
	switch {
	case err != nil:
	case req.agent == "":
		err = invalidField("model", "is missing; it is the name of an agent, see GET /v1/models")
	case req.input == nil:
		err = invalidField("messages", "is missing; it must be an array whose last message is the user's")
	}
	return req, err
}

func (v value) unsupported(why string) error {
	return &refusal{status: http.StatusBadRequest, code: "unsupported_parameter", message: v.path + ": " + why, param: v.path}
}

func (v value) mustBe(why string, allowed ...string) error {
	for _, a := range allowed {
		if string(v.raw) == a {
			return nil
		}
	}
	return v.unsupported(fmt.Sprintf("%s; allowed: %s", why, list(allowed)))
}

func (v value) mustBeOne() error {
	var n int
	if err := v.integer(&n); err != nil {
		return err
	}
	if n != 1 {
		return v.unsupported("one answer is given to one request; allowed: 1")
	}
	return nil
}

func (v value) mustBeEmpty() error {
	if v.raw[0] != '[' {
		return v.want("an array")
	}
	if !v.empty() {
		return v.unsupported("tools belong to the agent here and run on the server; define them there, and send none")
	}
	return nil
}

func (v value) mustBeText() error {
	return v.object(func(name string, m value) error {
		if name != "type" {
			return nil
		}
		return m.mustBe("the form of the answer belongs to the agent: set parameters.response_format in its definition", `"text"`)
	})
}

// conversation splits the messages into the history and the user's last one.
func (v value) conversation(req *chatRequest) error {
	var last message
	var lastAt value
	err := v.array(maxHistory, func(i int, e value) error {
		if i > 0 {
			req.history = append(req.history, last.raw)
		}
		var err error
		last, err = e.message()
		lastAt = e
		return err
	})
	switch {
	case err != nil:
		return err
	case last.raw == nil:
		return v.bad("must have a message")
	case last.role != "user":
		return invalidField(lastAt.at("role"), fmt.Sprintf("the last message must be the user's, this one is of %q", last.role))
	}
	req.input = last.content.raw
	return nil
}

// chatCompletions is OpenAI's chat completion over an agent. With a session
// header only the last message counts, as the session has the rest; without
// one the request's messages become a session of their own.
func (a *API) chatCompletions(c *call) error {
	b, err := c.body(false)
	if err != nil {
		return err
	}
	v, err := parse(b)
	if err != nil {
		return err
	}
	req, err := decodeChat(v)
	if err != nil {
		return err
	}
	if err := a.checkPrompt(req.input); err != nil {
		return err
	}
	if _, err := a.agentKnown(c.tenant, req.agent); err != nil {
		return err
	}
	w, err := a.startChat(c, req)
	if err != nil {
		return err
	}
	a.watches(c, w)
	if req.stream {
		return c.relay(w, c.streamChat(w, req)).serve()
	}
	return c.await(w, newOutcome(c.session, w.Turn()), func(o *outcome) error { return c.completion(o, req.agent) })
}

const headerSession, headerOnBusy = "X-Perdure-Session", "X-Perdure-On-Busy"

func (a *API) startChat(c *call, req chatRequest) (*session.Watcher, error) {
	turn := session.TurnRequest{Content: req.input, OnBusy: wire.Publish_INTERRUPT}
	var err error
	if turn.RequestID, err = c.idempotencyKey(); err != nil {
		return nil, err
	}
	if word := c.r.Header.Get(headerOnBusy); word != "" {
		v := value{raw: jsontext.AppendString(nil, word), path: headerOnBusy}
		if err := v.onBusy(&turn.OnBusy); err != nil {
			return nil, err
		}
	}
	create := session.CreateRequest{Agent: req.agent, History: req.history, RequestID: turn.RequestID}
	if id := c.r.Header.Get(headerSession); id != "" {
		c.session = id
		return a.continueChat(c, create, turn)
	}
	create.Stateless = true
	if turn.RequestID != "" { // the same key finds the same session, and so the same turn
		sum := sha256.Sum256([]byte(turn.RequestID))
		create.ID = statelessPrefix + hex.EncodeToString(sum[:16])
	}
	w, id, err := a.svc.CreateAndStart(c.r.Context(), c.tenant, create, turn)
	c.session = id
	return w, err
}

// continueChat starts a turn in the session that the client names, and makes
// that session when it is not there. Another client may make or delete it
// meanwhile, hence the bounded tries.
func (a *API) continueChat(c *call, create session.CreateRequest, turn session.TurnRequest) (*session.Watcher, error) {
	var err error
	for range 3 {
		var s *session.Session
		s, err = a.svc.Get(c.r.Context(), c.tenant, c.session)
		if isCore(err, core.NotFound) {
			var w *session.Watcher
			if err := checkNewID(c.session); err != nil {
				return nil, err
			}
			create.ID = c.session
			if w, _, err = a.svc.CreateAndStart(c.r.Context(), c.tenant, create, turn); !isCore(err, core.Exists) {
				return w, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		if s.Agent != create.Agent {
			return nil, &refusal{status: http.StatusConflict, code: "agent_mismatch", param: "model",
				message: fmt.Sprintf("session %q is of agent %q, not %.70q", s.ID, s.Agent, create.Agent), hint: "send that model, or take another session"}
		}
		var w *session.Watcher
		if w, err = a.svc.StartTurn(c.r.Context(), c.tenant, c.session, turn); !isCore(err, core.NotFound) {
			return w, err
		}
	}
	return nil, err
}

func isCore(err error, code core.Code) bool {
	var ce *core.Error
	return errors.As(err, &ce) && ce.Code == code
}

// turnRefusal is a turn that did not complete, as an error of the request.
func turnRefusal(o *outcome) *refusal {
	if o.status == "cancelled" {
		reason := o.end.Reason
		if reason == "" {
			reason = "cancelled"
		}
		return &refusal{status: http.StatusConflict, code: "turn_cancelled", message: "the turn was cancelled: " + reason}
	}
	f := o.end.Error
	if f == nil {
		return &refusal{status: http.StatusInternalServerError, code: "turn_failed", message: "the turn failed"}
	}
	ref := &refusal{status: failureStatus(f.Code), code: f.Code, message: f.Message, hint: f.Hint}
	if ref.status == http.StatusTooManyRequests || ref.status == http.StatusServiceUnavailable {
		ref.retry = time.Second
	}
	return ref
}

// failureStatus gives the HTTP status of a failed turn's code.
func failureStatus(code string) int {
	switch code {
	case "model_rate_limited", "model_quota_exhausted":
		return http.StatusTooManyRequests
	case "model_provider_queue_full":
		return http.StatusServiceUnavailable
	case "model_invalid_request":
		return http.StatusBadRequest
	case "model_timeout", "turn_timeout":
		return http.StatusGatewayTimeout
	case "agent_not_found":
		return http.StatusNotFound
	case "too_many_tool_rounds", "history_unreadable", "internal":
		return http.StatusInternalServerError
	}
	return http.StatusBadGateway
}
