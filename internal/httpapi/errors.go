package httpapi

import (
	"context"
	"errors"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"net/http"
	"strconv"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
)

// refusal is an error as a client sees it. It never holds a secret.
type refusal struct {
	status  int
	code    string // stable, for programs
	message string // what is wrong
	hint    string // what to do about it; may be empty
	param   string // the path of the bad field, if it is one
	retry   time.Duration
}

func (e *refusal) Error() string { return e.code + ": " + e.message }

// statusClientGone is written to the access log when the client left before
// its answer was there; nothing is sent.
const statusClientGone = 499

func invalidJSON(message string) error {
	return &refusal{status: http.StatusBadRequest, code: "invalid_json", message: message}
}

func invalidField(path, problem string) error {
	if path == "" {
		path = "body"
	}
	return &refusal{status: http.StatusBadRequest, code: "invalid_request", message: path + ": " + problem, param: path}
}

func tooLarge(what string, bound int64, key string) error {
	return &refusal{status: http.StatusRequestEntityTooLarge, code: "too_large",
		message: what + " has more than " + strconv.FormatInt(bound, 10) + " bytes", hint: "the bound is " + key + " of the server's config"}
}

func noTurn(id string) error {
	return &refusal{status: http.StatusNotFound, code: "turn_not_found", message: "turn " + strconv.Quote(id) + " is not in this session's log"}
}

var (
	errDraining = &refusal{status: http.StatusServiceUnavailable, code: "draining", message: "the server is shutting down",
		hint: "try again; a new server takes the same sessions", retry: time.Second}
	errTooManyRequests = &refusal{status: http.StatusServiceUnavailable, code: "too_many_requests", message: "the server has too many requests open",
		hint: "the bound is limits.max_requests of the server's config", retry: time.Second}
	errNoKey = &refusal{status: http.StatusUnauthorized, code: "unauthorized", message: "the API key is missing",
		hint: "send the header Authorization: Bearer KEY"}
	errBadKey = &refusal{status: http.StatusUnauthorized, code: "unauthorized", message: "the API key is not known to this server",
		hint: "send the header Authorization: Bearer KEY with a key of auth.keys"}
	errCrossOrigin = &refusal{status: http.StatusForbidden, code: "cross_origin", message: "a web page of another origin may not change anything here",
		hint: "call the API from your own server, or serve the page from this address"}
	errHost = &refusal{status: http.StatusForbidden, code: "host_not_allowed", message: "without API keys the server answers only to localhost and to IP addresses",
		hint: "use http://127.0.0.1 or http://localhost, or configure auth.keys"}
	errClientGone = &refusal{status: statusClientGone, code: "client_gone", message: "the client left"}
)

// refusalOf is the one place that maps errors to what clients see. ok is false
// for an error that no one foresaw: it is logged, and the client gets its ID.
func refusalOf(err error) (r *refusal, ok bool) {
	var (
		own      *refusal
		overload *session.Overloaded
		ce       *core.Error
		de       *agent.DefinitionError
	)
	switch {
	case errors.As(err, &own):
		return own, true
	case errors.As(err, &overload):
		return &refusal{status: http.StatusTooManyRequests, code: "overloaded", message: overload.Error(),
			hint: "try again after the time of Retry-After", retry: overload.RetryAfter}, true
	case errors.Is(err, partition.ErrLost):
		return &refusal{status: http.StatusServiceUnavailable, code: "outcome_unknown", message: "the journal was lost while the request ran; whether it took effect is unknown",
			hint: "send the request again with the same Idempotency-Key", retry: time.Second}, true
	case errors.Is(err, stream.ErrSlowReader): // before the turn's ID was known
		return &refusal{status: http.StatusServiceUnavailable, code: "outcome_unknown", message: "this request fell behind the session's events; its input is probably accepted",
			hint: "send the request again with the same Idempotency-Key, or look at the session's events", retry: time.Second}, true
	case errors.Is(err, partition.ErrOverloaded):
		return &refusal{status: http.StatusTooManyRequests, code: "overloaded", message: "too many requests wait for this session's partition; nothing was done",
			hint: "try again after the time of Retry-After", retry: time.Second}, true
	case errors.Is(err, partition.ErrStopped):
		return errDraining, true
	case errors.As(err, &ce):
		return coreRefusal(ce), true
	case errors.As(err, &de):
		return &refusal{status: http.StatusBadRequest, code: "invalid_agent", message: de.Error(), param: de.Path}, true
	case errors.Is(err, agent.ErrNoAgent):
		return &refusal{status: http.StatusNotFound, code: "agent_not_found", message: err.Error(), hint: "GET /v1/agents lists the agents"}, true
	case errors.Is(err, agent.ErrConfigged):
		return &refusal{status: http.StatusConflict, code: "agent_in_config", message: err.Error(), hint: "change the config, or take another name"}, true
	case errors.Is(err, session.ErrBadID):
		return &refusal{status: http.StatusBadRequest, code: "bad_session_id", message: err.Error()}, true
	case errors.Is(err, session.ErrBadCursor):
		return &refusal{status: http.StatusBadRequest, code: "bad_cursor", message: err.Error()}, true
	case errors.Is(err, session.ErrCursorAhead):
		return &refusal{status: http.StatusBadRequest, code: "cursor_ahead", message: err.Error(), hint: "begin without a cursor"}, true
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return errClientGone, true
	}
	return nil, false
}

// coreRefusal says in terms of sessions what the core says of flows.
func coreRefusal(e *core.Error) *refusal {
	switch e.Code {
	case core.NotFound:
		return &refusal{status: http.StatusNotFound, code: string(e.Code), message: e.Message}
	case core.Exists:
		return &refusal{status: http.StatusConflict, code: string(e.Code), message: "a session with this ID exists already",
			hint: "use it, or create one without an ID"}
	case core.Busy:
		return &refusal{status: http.StatusConflict, code: string(e.Code), message: "the session is running a turn",
			hint: "wait for its end, or send on_busy: interrupt or enqueue"}
	case core.QueueFull:
		return &refusal{status: http.StatusTooManyRequests, code: string(e.Code), message: "too many turns wait on this session",
			hint: "the bound is kernel.max_queued_turns_per_session of the server's config", retry: time.Second}
	case core.KeyReused:
		return &refusal{status: http.StatusUnprocessableEntity, code: string(e.Code), message: "this Idempotency-Key came with another input before",
			hint: "use a new key for a new input"}
	case core.LimitReached:
		return &refusal{status: http.StatusRequestEntityTooLarge, code: string(e.Code), message: e.Message}
	case core.StaleAttempt, core.NotDue:
		return &refusal{status: http.StatusConflict, code: string(e.Code), message: e.Message}
	}
	return &refusal{status: http.StatusBadRequest, code: string(e.Code), message: e.Message}
}

func (e *refusal) appendNative(b []byte) []byte {
	b = jsontext.AppendString(append(b, `{"error":{"code":`...), e.code)
	b = jsontext.AppendString(append(b, `,"message":`...), e.message)
	if e.hint != "" {
		b = jsontext.AppendString(append(b, `,"hint":`...), e.hint)
	}
	return append(b, "}}\n"...)
}

// appendOpenAI writes the error as OpenAI's API does.
func (e *refusal) appendOpenAI(b []byte) []byte {
	message := e.message
	if e.hint != "" {
		message += " (" + e.hint + ")"
	}
	b = jsontext.AppendString(append(b, `{"error":{"message":`...), message)
	b = jsontext.AppendString(append(b, `,"type":`...), e.openAIType())
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, "null"...)
	} else {
		b = jsontext.AppendString(b, e.param)
	}
	code := e.code
	switch code {
	case "agent_not_found":
		code = "model_not_found"
	case "unauthorized":
		code = "invalid_api_key"
	}
	b = jsontext.AppendString(append(b, `,"code":`...), code)
	return append(b, "}}"...)
}

func (e *refusal) openAIType() string {
	switch {
	case e.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.status == http.StatusUnauthorized:
		return "authentication_error"
	case e.status == http.StatusForbidden:
		return "permission_error"
	case e.status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}
