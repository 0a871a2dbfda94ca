package flow

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrLost is the cause of a context whose attempt is no longer wanted: the
// connection broke, the server handed the step to another worker, or the run
// was closed. Nothing the handler writes or returns takes effect.
var ErrLost = errors.New("flow: the attempt is no longer wanted; the server has given the step to another, or closed the run")

// ErrStopping is the cause of a context whose worker has to end before its
// handlers have: the server hands the step out again.
var ErrStopping = errors.New("flow: the worker is stopping")

// CancelledError is the cause (context.Cause) of a context whose work was
// cancelled. The handler may still clean up and write: attributes and messages
// of a cancelled handler that returns a decision are kept, but no step follows.
type CancelledError struct {
	Reason string // of whoever cancelled
}

func (e *CancelledError) Error() string { return "flow: cancelled: " + e.Reason }

// Unwrap makes it a context.Canceled.
func (e *CancelledError) Unwrap() error { return context.Canceled }

// TimeoutError is the cause of a context whose attempt had its time. The
// attempt counts as failed when the handler returns an error then.
type TimeoutError struct {
	After time.Duration
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("flow: the attempt took longer than %v", e.After)
}

// Unwrap makes it a context.DeadlineExceeded.
func (e *TimeoutError) Unwrap() error { return context.DeadlineExceeded }

// StepFailedError says why the step failed that this one recovers, see
// OnFailure and Context.Failure.
type StepFailedError struct {
	Message string
}

func (e *StepFailedError) Error() string { return e.Message }

// ChildFailedError says that a child flow ended otherwise than completed, or
// could not be started.
type ChildFailedError struct {
	FlowID  string
	Status  Status
	Message string
}

func (e *ChildFailedError) Error() string {
	msg := fmt.Sprintf("flow: child %q is %s", e.FlowID, e.Status)
	if e.Message != "" {
		msg += ": " + e.Message
	}
	return msg
}

// PanicError is the failure of a handler that panicked. The stack is in the
// worker's log.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// UnknownNameError says that a handler used something that its flow does not
// declare. The flow's definition lacks it.
type UnknownNameError struct {
	Flow, Kind, Name string
}

func (e *UnknownNameError) Error() string {
	return fmt.Sprintf("flow: %s has no %s %q: add it to the flow's definition", e.Flow, e.Kind, e.Name)
}

// SizeError says that a value is larger than allowed.
type SizeError struct {
	What        string
	Bytes, Most uint64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("flow: %s has %d bytes, at most %d", e.What, e.Bytes, e.Most)
}

// Permanent marks an error that no further attempt can help: the step fails at
// once, whatever its retry policy says. errors.Is and errors.As see through it.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &retryError{error: err, permanent: true}
}

// RetryAfter marks an error whose next attempt, if the policy allows one, must
// not begin before d from now. errors.Is and errors.As see through it.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryError{error: err, after: d}
}

type retryError struct {
	error
	permanent bool
	after     time.Duration
}

func (e *retryError) Unwrap() error { return e.error }

// WithKind gives an error a word that programs can compare: it is kept with the
// failure, and a client whose RPC fails gets it. errors.Is and errors.As see
// through it.
func WithKind(err error, kind string) error {
	if err == nil {
		return nil
	}
	return &kindError{error: err, kind: kind}
}

type kindError struct {
	error
	kind string
}

func (e *kindError) Unwrap() error { return e.error }

// kindOf gives the word for an error; empty = none.
func kindOf(err error) string {
	if k, ok := errors.AsType[*kindError](err); ok {
		return k.kind
	}
	if _, ok := errors.AsType[*PanicError](err); ok {
		return "panic"
	}
	if _, ok := errors.AsType[*TimeoutError](err); ok {
		return "timeout"
	}
	if _, ok := errors.AsType[*UnknownNameError](err); ok {
		return "unknown_name"
	}
	if _, ok := errors.AsType[*SizeError](err); ok {
		return "too_large"
	}
	return ""
}

// maxErrorText is how much of an error's text is kept, in bytes.
const maxErrorText = 8 << 10

func errorText(err error) string {
	s := err.Error()
	if s == "" {
		s = fmt.Sprintf("an error without words (%T)", err)
	}
	if len(s) > maxErrorText {
		s = s[:maxErrorText] + "…"
	}
	return s
}
