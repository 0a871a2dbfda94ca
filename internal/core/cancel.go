package core

import (
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
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	reason := c.Reason
	if reason == "" {
		reason = "cancelled"
	}
	n := t.dropPending(c.Channel, c.Scope, reason)
	n += t.cancelSteps(c.Scope, reason)
	t.wakeCancelled()
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
			t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec, Attempt: attemptOf(s.Attempt), Reason: reason})
		case wire.Step_BACKOFF:
			t.clearTimers(s)
			t.handOutAgain(s, reason)
		}
	}
	return n
}

// wakeCancelled hands out a cancelled step that still waits although nothing of
// its scope runs: nobody is left who would send it what it waits for, and
// without an attempt the cancel would never end. It gets the messages that have
// come. One step of a scope at a time, the oldest first, for what it does may be
// what a younger one waits for.
func (t *tx) wakeCancelled() {
	for _, s := range t.f.Steps {
		if s.State != wire.Step_WAITING || !s.Cancel || hasLive(t.f, s.Scope) {
			continue
		}
		if len(s.Spec.Wait.Conditions) > 0 {
			t.clearTimers(s)
			s.Executing = true
			t.start(s)
			if c := s.Spec.Wait.Conditions[0].GetChannel(); c != nil {
				t.match(c.Name) // what it kept from younger ones
			}
			continue
		}
		n := 0
		if oldestWaiter(t.f, s.Spec.Wait.Channel) == s {
			n = min(int(s.Spec.Wait.Count), pendingCount(t.f, s.Spec.Wait.Channel))
		}
		t.startMatched(s, n)
	}
}

// hasLive reports whether a step of the scope is with a worker or will be.
func hasLive(f *wire.Flow, scope string) bool {
	for _, s := range f.Steps {
		if s.Scope == scope && s.State != wire.Step_WAITING {
			return true
		}
	}
	return false
}

func checkReason(reason string) error {
	if len(reason) > MaxReason {
		return refuse(LimitReached, "reason has %d bytes, at most %d", len(reason), MaxReason)
	}
	return nil
}

// deleteAgainUs is how soon a flow that could not be deleted is tried again.
const deleteAgainUs = 1_000_000

// applyDelete ends the flow and everything of it. A run that has not closed is
// terminated first, so that those who wait for it are told; the flow stays until
// what it has sent is answered.
func (t *tx) applyDelete(c *wire.DeleteFlow) error {
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	f := t.f
	if f.Closes && f.Status == wire.Status_RUNNING {
		t.closeRun(wire.Status_TERMINATED, nil, c.Reason)
	}
	if f.Closes && len(f.Outbox) > 0 {
		f.RetentionUs = 1 // it is over, see applyOutboxDone
		t.armExpiry(t.e.TimeUs + deleteAgainUs)
		t.reply = Reply{RunID: f.RunId, Status: f.Status}
		return nil
	}
	t.delete(c.Reason)
	return nil
}

func (t *tx) delete(reason string) {
	t.clearFlowTimers()
	for _, s := range t.f.Steps {
		t.clearTimers(s)
		if s.State == wire.Step_STARTED {
			t.releaseKey(s)
			t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec, Attempt: attemptOf(s.Attempt), Reason: "deleted"})
		}
	}
	t.event(&wire.Event{Type: EventDeleted, Data: []byte(reason)})
	t.deleted = true
}

func checkName(what, name string) error {
	if name == "" {
		return refuse(Invalid, "%s is missing", what)
	}
	if len(name) > MaxName {
		return refuse(LimitReached, "%s has %d bytes, at most %d", what, len(name), MaxName)
	}
	return nil
}
