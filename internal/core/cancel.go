package core

import (
	"sort"

	"github.com/perdure-dev/perdure/internal/wire"
)

// EventCancelRequested says that running work was asked to stop.
const EventCancelRequested = "cancel.requested"

// EventDeleted is the last event of a flow; it is told, not kept.
const EventDeleted = "flow.deleted"

// applyCancel asks running work to stop and drops what waits. Each handler
// answers with a result of its own, so that what it had done so far is kept
// and nothing it had promised stays open.
func (t *tx) applyCancel(c *wire.Cancel) error {
	reason := c.Reason
	if reason == "" {
		reason = "cancelled"
	}
	n := t.dropPending(c.Channel, c.Scope, reason)
	n += t.cancelSteps(c.Scope, reason)
	t.reply = Reply{RunID: t.f.RunId, Cancelled: n}
	return nil
}

// cancelSteps marks live steps of a scope, or all that are not at rest.
func (t *tx) cancelSteps(scope, reason string) int {
	n := 0
	scopes := map[string]bool{}
	for _, s := range t.f.Steps {
		if atRest(s) || s.Cancel || (scope != "" && s.Scope != scope) {
			continue
		}
		n++
		s.Cancel, s.CancelReason = true, reason
		t.changed = true
		if !scopes[s.Scope] {
			scopes[s.Scope] = true
			t.event(&wire.Event{Type: EventCancelRequested, Scope: s.Scope, Data: []byte(reason)})
		}
		switch s.State {
		case wire.Step_STARTED:
			t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec, Attempt: attemptOf(s.Attempt)})
		case wire.Step_BACKOFF:
			t.handOutAgain(s, reason)
		}
	}
	return n
}

// applyDelete ends the flow and everything of it.
func (t *tx) applyDelete(c *wire.DeleteFlow) {
	for _, s := range t.f.Steps {
		if s.State == wire.Step_STARTED {
			t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec, Attempt: attemptOf(s.Attempt)})
		}
	}
	t.event(&wire.Event{Type: EventDeleted, Data: []byte(c.Reason)})
	t.deleted = true
}

func checkAttributes(have, set []*wire.Attribute) error {
	if len(have)+len(set) > MaxAttributes {
		return refuse(LimitReached, "%d attributes, at most %d", len(have)+len(set), MaxAttributes)
	}
	for _, a := range set {
		if a.GetName() == "" {
			return refuse(Invalid, "attribute name is missing")
		}
		if len(a.Value) > MaxPayload {
			return refuse(LimitReached, "attribute %q has %d bytes, at most %d", a.Name, len(a.Value), MaxPayload)
		}
	}
	return nil
}

func (t *tx) applySetAttributes(c *wire.SetAttributes) error {
	if err := checkAttributes(t.f.Attributes, c.Attributes); err != nil {
		return err
	}
	t.setAttributes(c.Attributes)
	t.reply = Reply{RunID: t.f.RunId}
	return nil
}

// setAttributes writes a new list, since tasks that are out share the old one.
func (t *tx) setAttributes(set []*wire.Attribute) {
	if len(set) == 0 {
		return
	}
	t.changed = true
	next := append([]*wire.Attribute(nil), t.f.Attributes...)
	for _, a := range set {
		i := sort.Search(len(next), func(i int) bool { return next[i].Name >= a.Name })
		has := i < len(next) && next[i].Name == a.Name
		switch {
		case len(a.Value) == 0 && has:
			next = append(next[:i], next[i+1:]...)
		case len(a.Value) == 0:
		case has:
			next[i] = a
		default:
			next = append(next, nil)
			copy(next[i+1:], next[i:])
			next[i] = a
		}
	}
	t.f.Attributes = next
}
