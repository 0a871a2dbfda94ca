// Package oracle is a tiny reference model of what Perdure promises about
// sessions and flows, seen from outside. It is told which operations clients had answered
// and which events they saw, and says which promise was broken. It knows the
// names that clients know, and nothing of how the engine works.
//
// An Oracle, of sessions, and Flows, of flows that close, are for tests: they
// keep what they are told. They are used from one goroutine.
package oracle

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Rule names a promise.
type Rule string

// The promises.
const (
	Cursors      Rule = "cursors"      // events come in the order of their cursors: none twice, none missing
	OneTurn      Rule = "one-turn"     // at most one turn of a session runs
	Ended        Rule = "ended"        // a turn ends once, and nothing of it comes after
	Outcome      Rule = "outcome"      // an acknowledged message has exactly one fate: ended, dropped, or still there
	FIFO         Rule = "fifo"         // messages start in the order in which they were accepted
	Policy       Rule = "policy"       // a busy policy does what it says, and nothing is cancelled unasked
	Payload      Rule = "payload"      // a turn starts with what the client sent
	Idempotency  Rule = "idempotency"  // the same request ID gives the same message
	Conversation Rule = "conversation" // each tool call is followed by exactly its result
	Durability   Rule = "durability"   // what was acknowledged or shown is in the state
	Deletion     Rule = "deletion"     // what was deleted stays so
	Liveness     Rule = "liveness"     // when nothing disturbs, all work ends
)

// Violation is a broken promise.
type Violation struct {
	Rule   Rule
	FlowID string
	Detail string
}

func (v *Violation) Error() string {
	return fmt.Sprintf("oracle: %s broken in flow %q: %s", v.Rule, v.FlowID, v.Detail)
}

// Kind says what a client asked for.
type Kind uint8

// The kinds of operations.
const (
	Start Kind = iota + 1
	Publish
	Cancel
	Delete
)

// OnBusy is the policy of a Publish.
type OnBusy uint8

// The policies.
const (
	Enqueue OnBusy = iota
	Reject
	Interrupt
)

// Op is an operation of a client. From and To are the instants of call and
// answer on one clock, in any unit: an operation whose answer came before
// another was called comes before it.
type Op struct {
	Kind      Kind
	FlowID    string
	From, To  int64
	RequestID string // Start, Publish: idempotency key, or empty
	Payload   []byte // Publish
	OnBusy    OnBusy // Publish
	Scope     string // Cancel: the message meant; empty = all
	Retention bool   // Start: the flow may be deleted when it was idle for long

	// Of the answer; empty when there was none.
	RunID     string // Start, Publish
	MessageID string // Publish
}

// maxViolations bounds what is kept; a broken engine breaks everything.
const maxViolations = 20

// Oracle judges one history of any number of flows.
type Oracle struct {
	flows  map[string]*flow
	broken []error
}

// flow is what is known of one flow ID.
type flow struct {
	id    string
	acked []Op
	sent  []Op // without an answer: they may have taken effect
	log   eventLog
}

// New gives an oracle that was told nothing.
func New() *Oracle { return &Oracle{flows: map[string]*flow{}} }

// Err gives the broken promises, or nil. Each is a *Violation.
func (o *Oracle) Err() error { return errors.Join(o.broken...) }

func (o *Oracle) fail(f *flow, rule Rule, format string, args ...any) {
	if len(o.broken) < maxViolations {
		o.broken = append(o.broken, &Violation{rule, f.id, fmt.Sprintf(format, args...)})
	}
}

func (o *Oracle) flow(id string) *flow {
	f := o.flows[id]
	if f == nil {
		f = &flow{id: id}
		o.flows[id] = f
	}
	return f
}

// Acked tells of an operation that was answered with success.
func (o *Oracle) Acked(op Op) {
	f := o.flow(op.FlowID)
	f.acked = append(f.acked, op)
}

// Sent tells of an operation whose answer was lost: it may or may not have
// happened. A refused operation is not told at all.
func (o *Oracle) Sent(op Op) {
	f := o.flow(op.FlowID)
	f.sent = append(f.sent, op)
}

// Event tells of an event of a flow that a client saw. There is one observer
// of a flow; it sees the flow from its first event on and, when its stream
// breaks, goes on from its cursor. Only the end of a flow is told and not kept:
// it may be missed.
func (o *Oracle) Event(flowID string, ev *wire.Event) {
	f := o.flow(flowID)
	f.log.add(ev, func(rule Rule, format string, args ...any) { o.fail(f, rule, format, args...) })
}

// Final compares with the durable state of the flows, when the observers have
// seen all of it. A flow that does not exist is not in the map.
func (o *Oracle) Final(flows map[string]*wire.Flow) {
	for _, id := range slices.Sorted(maps.Keys(o.flows)) {
		f := o.flows[id]
		state := flows[id]
		o.checkRun(f, state)
		o.checkState(f, state)
		ms := f.publishes()
		for _, op := range ms {
			o.checkMessage(f, state, op)
			o.checkCause(f, op)
		}
		o.checkOrder(f, ms)
		o.checkRequests(f)
	}
	for id := range flows {
		if o.flows[id] == nil {
			o.fail(o.flow(id), Durability, "nobody asked for this flow")
		}
	}
}

// Settled is Final for a world that was left in peace for long enough: all work
// must have ended.
func (o *Oracle) Settled(flows map[string]*wire.Flow) {
	o.Final(flows)
	for _, id := range slices.Sorted(maps.Keys(flows)) {
		for _, s := range flows[id].Steps {
			if !atRest(s) {
				o.fail(o.flow(id), Liveness, "step %q of %q is still in state %v", s.Spec.Name, s.Scope, s.State)
			}
		}
		for _, c := range flows[id].Channels {
			if len(c.Pending) > 0 {
				o.fail(o.flow(id), Liveness, "%d messages still wait in %q", len(c.Pending), c.Name)
			}
		}
	}
}

func atRest(s *wire.Step) bool {
	return s.State == wire.Step_WAITING && s.Spec.Wait != nil && s.Spec.Wait.Idle
}
