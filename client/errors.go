package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Error is what a server answers, or what kept the client from an answer.
// Compare it with the Err values by errors.Is: they match by code.
type Error struct {
	Code       string        `json:"code"`    // stable; one of the Err values has it
	Message    string        `json:"message"` // what happened, and where
	Hint       string        `json:"hint,omitempty"`
	Kind       string        `json:"kind,omitempty"` // of an error that a flow's own handler gave
	Position   int           `json:"-"`              // of an error in a query, in bytes from 0; -1 = none
	RetryAfter time.Duration `json:"-"`              // when asking again may help; 0 = not said
	// Unknown says that the call may have taken effect all the same.
	Unknown bool `json:"outcome_unknown,omitempty"`

	cause error
}

// What errors.Is can ask of an *Error.
var (
	ErrNotFound        = &Error{Code: "not_found"}              // no such flow, schedule, …
	ErrExists          = &Error{Code: "already_exists"}         // a flow or schedule of this ID is there
	ErrConflict        = &Error{Code: "conflict"}               // somebody else was faster
	ErrLocked          = &Error{Code: "locked"}                 // an RPC with FailFast met the flow's lock
	ErrClosed          = &Error{Code: "flow_closed"}            // the run has ended
	ErrInvalid         = &Error{Code: "invalid"}                // the request makes no sense as it is
	ErrWrongType       = &Error{Code: "wrong_type"}             // a value is not of the declared type
	ErrUnknownType     = &Error{Code: "unknown_type"}           // no worker has declared this flow type
	ErrUnknownStep     = &Error{Code: "unknown_step"}           // … this step of it
	ErrUnknownRPC      = &Error{Code: "unknown_rpc"}            // … this RPC of it
	ErrTooLarge        = &Error{Code: "too_large"}              // a value is larger than a server takes
	ErrLimit           = &Error{Code: "limit_reached"}          // a bound of the flow is reached
	ErrQueueFull       = &Error{Code: "queue_full"}             // the channel has too many messages waiting
	ErrKeyReused       = &Error{Code: "idempotency_key_reused"} // the request ID came with other content
	ErrHandler         = &Error{Code: "rpc_failed"}             // the flow's own RPC handler refused; see Kind
	ErrNoWorker        = &Error{Code: "no_worker"}              // none was there, or had room, in time
	ErrUnauthenticated = &Error{Code: "unauthenticated"}        // no key, or one the server does not know
	ErrUnavailable     = &Error{Code: "unavailable"}            // the server cannot be reached
	ErrOverloaded      = &Error{Code: "overloaded"}             // the server refuses more for now
	ErrDeadline        = &Error{Code: "deadline"}               // no answer in time
	ErrCanceled        = &Error{Code: "cancelled"}              // the caller's context was cancelled
	ErrClientClosed    = &Error{Code: "client_closed"}          // Client.Close was called
	ErrUnknown         = &Error{Code: "outcome_unknown"}        // lost on the way; matches every error with Unknown
)

// Codes that a server answers and this package deals with itself.
const (
	codeSlowReader = "slow_reader"
	codeInternal   = "internal"
	codeWorkerLost = "worker_lost"
)

// Error gives the message, and the hint after it.
func (e *Error) Error() string {
	msg := e.Message
	if msg == "" {
		msg = strings.ReplaceAll(e.Code, "_", " ")
	}
	if e.Hint != "" {
		msg += " (" + e.Hint + ")"
	}
	return msg
}

// Is matches by code; ErrUnknown matches whatever may have taken effect.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	if !ok || t.Message != "" {
		return false
	}
	return t.Code == e.Code || t == ErrUnknown && e.Unknown
}

// Unwrap gives the cause: context.DeadlineExceeded, or the connection's error.
func (e *Error) Unwrap() error { return e.cause }

// FlowFailed says that a flow ended otherwise than completed.
type FlowFailed struct {
	FlowID  string
	RunID   string
	Status  Status
	Message string // why
}

func (e *FlowFailed) Error() string {
	msg := fmt.Sprintf("flow %s is %s", e.FlowID, e.Status)
	if e.Message != "" {
		msg += ": " + e.Message
	}
	return msg
}

// fromWire takes a server's error over. A server that says nothing of a
// position says -1.
func fromWire(e *wire.Error) *Error {
	return &Error{
		Code: e.Code, Message: e.Message, Unknown: e.Code == ErrUnknown.Code, Hint: e.Hint, Kind: e.Kind,
		Position: int(e.Position), RetryAfter: time.Duration(e.RetryAfterUs) * time.Microsecond,
	}
}

// invalid is an error of the caller's own making, found before anything is sent.
func invalid(hint, format string, args ...any) *Error {
	return &Error{Code: ErrInvalid.Code, Message: fmt.Sprintf(format, args...), Hint: hint, Position: -1}
}

// errLost is the fate of calls whose connection broke before their answer.
type errLost struct{ cause error }

func (e *errLost) Error() string { return "the connection broke: " + e.cause.Error() }
func (e *errLost) Unwrap() error { return e.cause }

// contextError says that ctx ended; sent, that a call was on its way then.
func contextError(ctx context.Context, sent bool) *Error {
	e := &Error{Position: -1, Unknown: sent, cause: ctx.Err()}
	if errors.Is(e.cause, context.DeadlineExceeded) {
		e.Code, e.Message = ErrDeadline.Code, "the server did not answer before the deadline"
	} else {
		e.Code, e.Message = ErrCanceled.Code, "the call was cancelled"
	}
	return e
}
