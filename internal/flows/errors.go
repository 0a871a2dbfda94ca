package flows

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Codes beside those of core. They are stable: clients tell errors apart by them.
const (
	Invalid          core.Code = core.Invalid
	TooLarge         core.Code = "too_large"
	WrongType        core.Code = "wrong_type"
	UnknownType      core.Code = "unknown_type"
	UnknownStep      core.Code = "unknown_step"
	UnknownRPC       core.Code = "unknown_rpc"
	UnknownAttribute core.Code = "unknown_attribute"
	UnknownChannel   core.Code = "unknown_channel"
	UnknownRun       core.Code = "unknown_run"
	Closed           core.Code = core.Closed
	Conflict         core.Code = core.Conflict
	Deadline         core.Code = "deadline"
	Cancelled        core.Code = "cancelled"
	Locked           core.Code = "locked"
	RPCFailed        core.Code = "rpc_failed"
	NoWorker         core.Code = "no_worker"
	WorkerLost       core.Code = "worker_lost"
	NotServed        core.Code = "not_served"
	Overloaded       core.Code = "overloaded"
	Unavailable      core.Code = "unavailable"
	OutcomeUnknown   core.Code = "outcome_unknown"
	SlowReader       core.Code = "slow_reader"
	BadCursor        core.Code = "bad_cursor"
	BlobMissing      core.Code = "blob_missing"
	Internal         core.Code = "internal"
)

// hints say, for each code, what to do. One with a retry is worth asking again
// unchanged.
var hints = map[core.Code]struct {
	hint  string
	retry bool
}{
	core.NotFound:     {hint: "Check the ID, and that the key belongs to the tenant that started the flow; a closed flow is deleted after its retention."},
	core.Exists:       {hint: "Choose another flow ID, or a reuse policy: if_closed, if_failed, terminate or attach."},
	core.Busy:         {hint: "Wait until the running work is done.", retry: true},
	core.QueueFull:    {hint: "The flow has not taken its waiting messages yet: publish later.", retry: true},
	core.StaleAttempt: {hint: "The step is over, or was handed out again meanwhile; describe shows the live steps."},
	core.NotDue:       {hint: "The timer is set again by itself."},
	core.LimitReached: {hint: "Stay within the bound that the message names."},
	core.KeyReused:    {hint: "Use a new request ID for another request; the same one only for the same request."},
	Invalid:           {hint: "Correct the field that the message names; nothing was changed."},
	TooLarge:          {hint: "Move large values with the Blobs service and pass the blob's name instead."},
	WrongType:         {hint: "Give a JSON value of the type that the flow's worker declared."},
	UnknownType:       {hint: "Start a worker that registers this flow type, then try again."},
	UnknownStep:       {hint: "Use one of the steps that the flow's worker registered."},
	UnknownRPC:        {hint: "Use one of the RPCs that the flow's worker registered."},
	UnknownAttribute:  {hint: "Use an attribute that the flow's worker declared, or declare it and restart the worker."},
	UnknownChannel:    {hint: "Use a channel that the flow's worker declared, or declare it and restart the worker."},
	UnknownRun:        {hint: "Leave the run ID out to mean the newest run."},
	Closed:            {hint: "The run has ended; start a new one, or reset it to a step."},
	Conflict:          {hint: "The flow changed meanwhile: read it again and repeat.", retry: true},
	Deadline:          {hint: "Ask again, with a longer timeout if it is needed; what the flow does goes on."},
	Cancelled:         {hint: "The caller gave up; a command that was on its way may have taken effect."},
	Locked:            {hint: "Another locked RPC runs on this flow: try again, or leave fail_fast out to wait for it.", retry: true},
	RPCFailed:         {hint: "The handler refused or failed; nothing of it took effect."},
	NoWorker:          {hint: "Start a worker of this flow type, or try again when one has room.", retry: true},
	WorkerLost:        {hint: "Call again; another worker takes it.", retry: true},
	NotServed:         {hint: "Ask a server that has this part switched on."},
	Overloaded:        {hint: "Try again after the given time, with fewer calls at once.", retry: true},
	Unavailable:       {hint: "Try again shortly.", retry: true},
	OutcomeUnknown:    {hint: "Repeat it with the same request ID: it takes effect once."},
	SlowReader:        {hint: "Read faster; go on after the last event that came."},
	BadCursor:         {hint: "Use the next cursor of a reply about this same flow."},
	BlobMissing:       {hint: "Put the value again with the Blobs service, for this flow ID, and use it within half an hour."},
	Internal:          {hint: "See the server's log."},
}

// Error is a refusal or a failure of a verb; nothing was changed unless its
// message says so.
type Error struct {
	Code     core.Code
	Message  string
	Kind     string // of an error that a user's handler gave
	Position int32  // in a query, from 0; -1 = none
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

func refuse(code core.Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Position: -1}
}

var errDeadline = errors.New("the call's time is over")

func noFlow(flowID string) error {
	return refuse(core.NotFound, "flow %q does not exist", UserID(flowID))
}

func (c *call) late() error {
	return refuse(Deadline, "not answered within the call's %s", c.timeout())
}

func (c *call) gone() error { return refuse(Cancelled, "the caller gave up") }

// Wire gives an error as clients see it.
func Wire(err error) *wire.Error {
	code, out := codeOf(err), &wire.Error{Message: err.Error(), Position: -1}
	var own *Error
	var ce *core.Error
	switch {
	case errors.As(err, &own):
		out.Message, out.Kind, out.Position = own.Message, own.Kind, own.Position
	case errors.As(err, &ce):
		out.Message = ce.Message
	}
	h := hints[code]
	out.Code, out.Hint = string(code), h.hint
	if h.retry {
		out.RetryAfterUs = retryAfter.Microseconds()
	}
	return out
}

// wire is Wire without the prefix that only the server knows flows by.
func (c *call) wire(err error) *wire.Error {
	e := Wire(err)
	e.Message = strings.ReplaceAll(e.Message, `"`+c.tenant+`/f/`, `"`)
	return e
}

// codeOf is the one place where errors of the packages below become codes.
func codeOf(err error) core.Code {
	var own *Error
	var ce *core.Error
	switch {
	case errors.As(err, &own):
		return own.Code
	case errors.As(err, &ce):
		return ce.Code
	case errors.Is(err, partition.ErrOverloaded):
		return Overloaded
	case errors.Is(err, partition.ErrLost):
		return OutcomeUnknown
	case errors.Is(err, partition.ErrStopped), errors.Is(err, state.ErrClosed), errors.Is(err, stream.ErrClosed),
		errors.Is(err, blob.ErrUnavailable), errors.Is(err, blob.ErrAmbiguous):
		return Unavailable
	case errors.Is(err, stream.ErrSlowReader):
		return SlowReader
	case errors.Is(err, blob.ErrNotFound):
		return BlobMissing
	case errors.Is(err, errDeadline), errors.Is(err, context.DeadlineExceeded):
		return Deadline
	case errors.Is(err, context.Canceled):
		return Cancelled
	}
	return Internal
}
