package oracle

import (
	"bytes"
	"math"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// mayEnd reports whether anything asked for, or allowed, the end of a run; of
// any run when it is "".
func (f *flow) mayEnd(run string) bool {
	began := int64(math.MinInt64)
	for _, op := range f.acked {
		if op.Kind == Start && op.RunID == run {
			began = op.From
		}
	}
	for _, op := range f.acked {
		if op.Kind == Delete && op.To >= began || op.Kind == Start && op.Retention && (run == "" || op.RunID == run) {
			return true
		}
	}
	return slices.ContainsFunc(f.sent, func(op Op) bool { return op.Kind == Delete || op.Kind == Start && op.Retention })
}

// checkRun: a started flow is there until it is deleted, and not afterwards.
func (o *Oracle) checkRun(f *flow, state *wire.Flow) {
	for _, start := range f.acked {
		if start.Kind != Start {
			continue
		}
		if state == nil || state.RunId != start.RunID {
			if !f.mayEnd(start.RunID) {
				o.fail(f, Durability, "run %s is gone, and nobody deleted it", start.RunID)
			}
			continue
		}
		for _, del := range f.acked {
			if del.Kind == Delete && start.To < del.From {
				o.fail(f, Deletion, "run %s is there, though it was deleted", start.RunID)
			}
		}
	}
}

// checkState: the state agrees with what the observer saw last.
func (o *Oracle) checkState(f *flow, state *wire.Flow) {
	l := &f.log
	if (l.replaced || l.deleted || l.seen && state == nil) && !f.mayEnd("") {
		o.fail(f, Deletion, "a run that was shown has ended, and nobody deleted it")
	}
	if state == nil {
		return
	}
	if l.deleted {
		o.fail(f, Deletion, "the flow is there after its end was shown")
	}
	if at := (cursor{state.LastEvent.GetLsn(), state.LastEvent.GetN()}); at != l.last || state.EventCount != l.events || state.ItemCount != l.items {
		o.fail(f, Durability, "state has %d events and %d items up to %v, the observer saw %d and %d up to %v",
			state.EventCount, state.ItemCount, at, l.events, l.items, l.last)
	}
	running := ""
	for _, s := range state.Steps {
		if atRest(s) {
			continue
		}
		if running != "" && s.Scope != running {
			o.fail(f, OneTurn, "steps of %q and %q are alive", running, s.Scope)
		}
		running = s.Scope
	}
	if running != l.running {
		o.fail(f, Durability, "%q runs in the state, the observer saw %q running", running, l.running)
	}
}

// publishes gives the acknowledged messages, each once. A message that was
// asked for several times under one request ID may have been accepted as early
// as the first time, answered or not, and by the policy of any of these.
func (f *flow) publishes() []Op {
	var ms []Op
	for _, op := range f.acked {
		if op.Kind != Publish || slices.ContainsFunc(ms, func(m Op) bool { return m.MessageID == op.MessageID && m.RunID == op.RunID }) {
			continue
		}
		for _, other := range slices.Concat(f.acked, f.sent) {
			if op.RequestID == "" || other.RequestID != op.RequestID || other.Kind != Publish {
				continue
			}
			op.From = min(op.From, other.From)
			if other.OnBusy != op.OnBusy {
				op.OnBusy = Enqueue
			}
		}
		ms = append(ms, op)
	}
	return ms
}

// checkMessage: an acknowledged message has exactly one fate.
func (o *Oracle) checkMessage(f *flow, state *wire.Flow, op Op) {
	m := f.log.message(op.MessageID)
	waits := state != nil && isPending(state, op.MessageID)
	runs := state != nil && f.log.running == op.MessageID
	fates := 0
	for _, is := range []bool{m.ended != "", m.dropped, waits, runs} {
		if is {
			fates++
		}
	}
	if gone := state == nil || state.RunId != op.RunID; fates == 0 && !(gone && f.mayEnd(op.RunID)) || fates > 1 {
		o.fail(f, Outcome, "message %s: ended %q, dropped %v, waits %v, runs %v", op.MessageID, m.ended, m.dropped, waits, runs)
	}
	if m.started && !bytes.Equal(m.startItem, op.Payload) {
		o.fail(f, Payload, "message %s was %q, its turn started with %q", op.MessageID, op.Payload, m.startItem)
	}
	if op.OnBusy == Reject && m.waited {
		o.fail(f, Policy, "message %s waited, though it was to be rejected when busy", op.MessageID)
	}
}

func isPending(state *wire.Flow, id string) bool {
	for _, c := range state.Channels {
		for _, m := range c.Pending {
			if m.Id == id {
				return true
			}
		}
	}
	return false
}

// checkCause: a message is dropped or cancelled only when somebody asked for
// it, by a cancel or by a message that interrupts.
func (o *Oracle) checkCause(f *flow, op Op) {
	m := f.log.message(op.MessageID)
	if !m.dropped && m.ended != "turn.cancelled" {
		return
	}
	cause := func(by Op) bool {
		return by.Kind == Cancel && (by.Scope == "" || by.Scope == op.MessageID) ||
			by.Kind == Publish && by.OnBusy == Interrupt && by.MessageID != op.MessageID
	}
	if slices.ContainsFunc(f.acked, func(by Op) bool { return cause(by) && by.To >= op.From }) || slices.ContainsFunc(f.sent, cause) {
		return
	}
	o.fail(f, Policy, "message %s was taken away or cancelled, and nobody asked for it", op.MessageID)
}

// checkOrder: of two messages of a run whose order is certain, the first starts
// first; and when the second interrupts, the first does not start after it.
func (o *Oracle) checkOrder(f *flow, ms []Op) {
	for _, a := range ms {
		for _, b := range ms {
			if a.To >= b.From || a.RunID != b.RunID {
				continue
			}
			ma, mb := f.log.message(a.MessageID), f.log.message(b.MessageID)
			if !ma.started {
				continue
			}
			if mb.started && mb.startAt.before(ma.startAt) {
				o.fail(f, FIFO, "message %s was accepted before %s, and started after it", a.MessageID, b.MessageID)
			}
			if b.OnBusy == Interrupt && mb.seen && mb.seenAt.before(ma.startAt) {
				o.fail(f, Policy, "message %s started after %s, which was to take its place", a.MessageID, b.MessageID)
			}
		}
	}
}

// rememberedRequests is how many younger requests a request ID outlives: half
// of what the engine promises, since requests without an answer count as well.
const rememberedRequests = 32

func (o *Oracle) checkRequests(f *flow) {
	for i, a := range f.acked {
		younger := map[string]bool{}
		for _, b := range f.acked[i+1:] {
			if b.Kind != Publish || a.Kind != Publish || a.RequestID == "" || a.RunID != b.RunID {
				continue
			}
			if b.RequestID == a.RequestID && b.MessageID != a.MessageID && len(younger) < rememberedRequests {
				o.fail(f, Idempotency, "request %q made message %s, and again %s", a.RequestID, a.MessageID, b.MessageID)
			}
			younger[b.RequestID] = true
		}
	}
}
