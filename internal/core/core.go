// Package core is the pure state machine of flows. Apply takes one flow and
// one journaled entry and returns the changed flow, the events for its log,
// the effects for the world and the reply. It has no goroutine, no clock, no
// I/O and no map iteration: time and randomness come from the entry alone, so
// that a replay of the journal gives the same state.
//
// A flow has channels (durable FIFOs), steps, attributes and a log of events.
// A step may wait for conditions (messages of a channel, timers, child flows);
// then it is handed to a worker as an attempt, and the worker's result carries
// everything the handler wrote and the next steps: result and next start are
// one entry, one commit, when the proposer has reserved a worker's slot.
//
// Flows that close (StartFlow.closes) end with a status and an output; others
// live until they are deleted.
package core

import (
	"fmt"
	"math"

	"github.com/perdure-dev/perdure/internal/wire"
)

// EntryVersion is the version of entries this code writes; it reads all up to
// it. Version 2 brought slots: entries of version 1 may start any number of steps.
const EntryVersion = 2

// Bounds of one flow. What is over them is refused, never cut.
const (
	MaxSteps       = 1024     // live steps
	MaxPending     = 1000     // waiting messages of a channel
	MaxChannels    = 256      // channels with waiting messages
	MaxAttributes  = 1024     // attributes
	MaxPayload     = 8 << 20  // bytes of a payload, input, value or event
	MaxRequests    = 256      // idempotency keys remembered by a flow
	MaxIDBytes     = 512      // a flow ID
	MaxRequestID   = 256      // an idempotency key
	MaxResultItems = 4096     // events, items, next steps, messages or attributes of one entry
	MaxName        = 256      // bytes of the name of a channel, step, attribute, event type or flow type
	MaxReason      = 64 << 10 // bytes of a reason or an error
	MaxConditions  = 128      // conditions of a wait, and sets of them
	MaxOutbox      = 4096     // sends that wait for their target's answer
	MaxParents     = 64       // steps that wait for one run to close
	MaxKeptOutput  = 4 << 10  // bytes of an output kept for a repeated request
	MaxPriority    = 9
	MaxNesting     = 8 // starts of children within a start, and recoveries

	MaxDelayUs = 100 * 365 * 24 * 3600 * 1_000_000 // a retention or a retry's delay, microseconds
)

// Code classifies a refusal.
type Code string

// The codes of refusals.
const (
	NotFound     Code = "not_found"
	Exists       Code = "already_exists"
	Busy         Code = "busy"
	QueueFull    Code = "queue_full"
	StaleAttempt Code = "stale_attempt"
	NotDue       Code = "not_due" // a timer fired early: set it again, as Outstanding says
	Invalid      Code = "invalid"
	LimitReached Code = "limit_reached"
	KeyReused    Code = "idempotency_key_reused"
	Conflict     Code = "conflict"    // what the command relied on has changed
	Closed       Code = "flow_closed" // the run has ended
)

// Error is a refusal: the command changed nothing.
type Error struct {
	Code    Code
	Message string
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

func refuse(code Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Reply answers the proposer of a command.
type Reply struct {
	MessageIDs []string // Publish, StartFlow: the ID of each message, in order; of a duplicate start those with a request ID
	Started    bool     // Publish: a step took the message at once
	Created    bool     // StartFlow: false when the request ID was seen before, or a running flow was attached to
	Duplicate  bool     // StartFlow, Publish, Update: the request ID was seen before
	RunID      string
	Cancelled  int         // Cancel, DropMessages: steps asked to stop and messages dropped
	Output     []byte      // Update: of a repeated request
	Status     wire.Status // StartFlow, StopFlow: of the run afterwards
}

// Output is what one applied entry gives.
type Output struct {
	Flow    *wire.Flow // nil when the flow was deleted
	Changed bool       // false: nothing to journal
	Events  []*wire.Event
	Effects []Effect
	Reply   Reply
	// Removed is the names of attributes that are gone; a name may have been set
	// again after.
	Removed []string
}

// Apply runs one entry on the flow it names; f is nil when there is none. On
// success f may have been changed in place; on an error nothing was changed.
// The caller owns f and passes each flow from one goroutine only. The flow and
// the output keep references into e, which must not change afterwards.
func Apply(f *wire.Flow, e *wire.Entry) (Output, error) {
	if e.Version > EntryVersion {
		return Output{}, refuse(Invalid, "entry version %d is newer than this program's %d", e.Version, EntryVersion)
	}
	if e.FlowId == "" || len(e.FlowId) > MaxIDBytes {
		return Output{}, refuse(Invalid, "flow ID must have 1 to %d bytes", MaxIDBytes)
	}
	if c, ok := e.Command.(*wire.Entry_StartFlow); ok {
		return applyStart(f, e, c.StartFlow)
	}
	if f == nil {
		return Output{}, refuse(NotFound, "flow %q does not exist", e.FlowId)
	}
	if f.Id != e.FlowId {
		return Output{}, refuse(Invalid, "entry for flow %q meets flow %q", e.FlowId, f.Id)
	}
	tx := newTx(f, e)
	var err error
	switch c := e.Command.(type) {
	case *wire.Entry_Publish:
		err = tx.applyPublish(c.Publish)
	case *wire.Entry_Cancel:
		err = tx.applyCancel(c.Cancel)
	case *wire.Entry_StepResult:
		err = tx.applyStepResult(c.StepResult)
	case *wire.Entry_Redispatch:
		err = tx.applyRedispatch(c.Redispatch)
	case *wire.Entry_FireTimer:
		err = tx.applyFireTimer(c.FireTimer)
	case *wire.Entry_DeleteFlow:
		err = tx.applyDelete(c.DeleteFlow)
	case *wire.Entry_SetAttributes:
		err = tx.applySetAttributes(c.SetAttributes)
	case *wire.Entry_StopFlow:
		err = tx.applyStop(c.StopFlow)
	case *wire.Entry_StartQueued:
		err = tx.applyStartQueued(c.StartQueued)
	case *wire.Entry_Update:
		err = tx.applyUpdate(c.Update)
	case *wire.Entry_Checkpoint:
		err = tx.applyCheckpoint(c.Checkpoint)
	case *wire.Entry_SkipTimer:
		err = tx.applySkipTimer(c.SkipTimer)
	case *wire.Entry_DropMessages:
		err = tx.applyDropMessages(c.DropMessages)
	case *wire.Entry_Reset_:
		err = tx.applyReset(c.Reset_)
	case *wire.Entry_ChildClosed:
		err = tx.applyChildClosed(c.ChildClosed)
	case *wire.Entry_OutboxDone:
		err = tx.applyOutboxDone(c.OutboxDone)
	default:
		err = refuse(Invalid, "entry %d has an unknown command", e.Lsn)
	}
	if err != nil {
		return Output{}, err
	}
	return tx.finish(), nil
}

// tx collects what one entry does to one flow.
type tx struct {
	f        *wire.Flow
	e        *wire.Entry
	events   []*wire.Event
	effects  []Effect
	reply    Reply
	removed  []string
	attempts uint32 // minted by this entry
	ids      uint32 // minted by this entry
	slots    uint32 // left for hand-outs
	changed  bool
	deleted  bool

	keepUpdated bool

	// Room for what most entries give, so that it costs no allocation of its own.
	eventRoom  [4]*wire.Event
	effectRoom [2]Effect
}

func newTx(f *wire.Flow, e *wire.Entry) *tx {
	t := &tx{f: f, e: e, slots: e.Slots}
	if e.Version < 2 {
		t.slots = math.MaxUint32
	}
	t.events, t.effects = t.eventRoom[:0], t.effectRoom[:0]
	return t
}

func (t *tx) finish() Output {
	out := Output{Flow: t.f, Changed: t.changed, Reply: t.reply, Removed: t.removed}
	if len(t.events) > 0 {
		out.Events = t.events
	}
	if len(t.effects) > 0 {
		out.Effects = t.effects
	}
	if t.deleted {
		out.Flow = nil
		return out
	}
	if t.changed && !t.keepUpdated {
		t.f.UpdatedUs = t.e.TimeUs
	}
	return out
}

// event appends to the flow's log.
func (t *tx) event(ev *wire.Event) {
	ev.Lsn, ev.N, ev.AtUs = t.e.Lsn, uint32(len(t.events)), t.e.TimeUs
	t.events = append(t.events, ev)
	t.changed = true
	t.f.EventCount++
	t.f.ItemCount += uint64(len(ev.Items))
	if t.f.LastEvent == nil {
		t.f.LastEvent = &wire.Cursor{}
	}
	t.f.LastEvent.Lsn, t.f.LastEvent.N = ev.Lsn, ev.N
}

// mintID gives an ID that is unique by the entry's seed. prefix has at most 16 bytes.
func (t *tx) mintID(prefix string) string {
	const hex = "0123456789abcdef"
	v := t.e.Seed + uint64(t.ids)*0x9e3779b97f4a7c15
	t.ids++
	var b [32]byte
	n := copy(b[:16], prefix)
	for i := range 16 {
		b[n+i] = hex[v>>(60-4*i)&15]
	}
	return string(b[:n+16])
}

// IsRunning reports whether a step of the flow is with a worker.
func IsRunning(f *wire.Flow) bool {
	for _, s := range f.Steps {
		if s.State == wire.Step_STARTED {
			return true
		}
	}
	return false
}

// IsBusy reports whether the flow has work besides steps at rest.
func IsBusy(f *wire.Flow) bool {
	for _, s := range f.Steps {
		if !atRest(s) {
			return true
		}
	}
	return false
}

func atRest(s *wire.Step) bool {
	return s.State == wire.Step_WAITING && s.Spec.Wait != nil && s.Spec.Wait.Idle
}
