package core

import (
	"github.com/perdure-dev/perdure/internal/wire"
)

// applyStepResult ends an attempt: its writes and the next steps in one entry,
// or, for a failure that the policy forgives, a backoff.
func (t *tx) applyStepResult(c *wire.StepResult) error {
	s, err := t.running(c.Exec, c.Attempt)
	if err != nil {
		return err
	}
	if err := t.checkResult(c); err != nil {
		return err
	}
	if c.Retry != nil && t.retry(s, c.Retry) {
		return nil
	}
	t.removeStep(s.Exec)
	t.changed = true
	for _, ev := range c.Events {
		t.event(&wire.Event{Type: ev.Type, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
			Attempt: s.Attempts, Data: ev.Data, Items: ev.Items})
	}
	t.setAttributes(c.Attributes)
	for _, p := range c.Publish {
		t.publish(p, true)
	}
	for _, spec := range c.Next {
		t.addStep(spec, s.Scope, s.Cancel, s.CancelReason)
	}
	t.wakeCancelled()
	t.reply = Reply{RunID: t.f.RunId}
	return nil
}

func (t *tx) checkResult(c *wire.StepResult) error {
	if n := len(c.Events) + len(c.Next) + len(c.Publish); n > MaxResultItems {
		return refuse(LimitReached, "result has %d parts, at most %d", n, MaxResultItems)
	}
	for _, ev := range c.Events {
		if err := checkName("event type", ev.Type); err != nil {
			return err
		}
		if err := checkEventSize(ev.Type, ev.Data, ev.Items); err != nil {
			return err
		}
	}
	if c.Retry != nil {
		if err := checkReason(c.Retry.Error); err != nil {
			return err
		}
	}
	if len(c.Publish) > 0 {
		if err := checkRoom(t.f, c.Publish); err != nil {
			return err
		}
	}
	if err := checkAttributes(t.f.Attributes, c.Attributes); err != nil {
		return err
	}
	return checkSpecs(c.Next, len(t.f.Steps)-1)
}

func checkEventSize(typ string, data []byte, items [][]byte) error {
	if len(items) > MaxResultItems {
		return refuse(LimitReached, "event %q has %d items, at most %d", typ, len(items), MaxResultItems)
	}
	size := len(data)
	for _, it := range items {
		size += len(it)
	}
	if size > MaxPayload {
		return refuse(LimitReached, "event %q has %d bytes, at most %d", typ, size, MaxPayload)
	}
	return nil
}

// retry reports whether the policy grants a further attempt, and arranges it.
// Cancelled work is handed out at once, so that its handler can end it.
func (t *tx) retry(s *wire.Step, r *wire.Retry) bool {
	p := s.Spec.Retry
	if p == nil || s.Retries+1 >= p.MaxAttempts {
		return false
	}
	delay := backoff(p, s.Retries, r.AfterUs)
	if delay > MaxDelayUs {
		return false
	}
	at := t.e.TimeUs + delay
	if p.TotalUs > 0 && at-s.FirstStartUs > p.TotalUs {
		return false
	}
	s.Retries++
	if s.Cancel {
		t.handOutAgain(s, r.Error)
		return true
	}
	s.State, s.RetryAtUs = wire.Step_BACKOFF, at
	t.event(&wire.Event{Type: EventStepRetrying, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: []byte(r.Error)})
	t.effects = append(t.effects, Effect{Kind: SetTimer, FlowID: t.f.Id, Exec: s.Exec, AtUs: at})
	return true
}

// backoff doubles from the initial interval up to the maximum, and is at least
// what the handler asked for.
func backoff(p *wire.RetryPolicy, retries uint32, after int64) int64 {
	d := max(p.InitialUs, 1)
	for range min(retries, 62) {
		if d >= p.MaxUs && p.MaxUs > 0 || d > 1<<50 {
			break
		}
		d *= 2
	}
	if p.MaxUs > 0 {
		d = min(d, p.MaxUs)
	}
	return max(d, after)
}

// applyFireTimer starts what a timer held back. A timer that is no longer
// meant, or not yet due, is refused; the codes tell these two apart, since the
// latter must be set again.
func (t *tx) applyFireTimer(c *wire.FireTimer) error {
	if c.Exec == 0 {
		return t.fireExpiry()
	}
	s := stepOf(t.f, c.Exec)
	if s == nil || s.State != wire.Step_BACKOFF {
		return refuse(StaleAttempt, "step %d of flow %q has no timer", c.Exec, t.f.Id)
	}
	if t.e.TimeUs < s.RetryAtUs {
		return refuse(NotDue, "timer of step %d of flow %q is not due", c.Exec, t.f.Id)
	}
	t.handOutAgain(s, "retry")
	return nil
}

// fireExpiry deletes a flow that was at rest for its retention, or sets the
// timer anew.
func (t *tx) fireExpiry() error {
	f := t.f
	if f.ExpireUs == 0 {
		return refuse(StaleAttempt, "flow %q has no retention timer", f.Id)
	}
	if t.e.TimeUs < f.ExpireUs {
		return refuse(NotDue, "retention timer of flow %q is not due", f.Id)
	}
	due := f.UpdatedUs + f.RetentionUs
	if IsBusy(f) {
		due = t.e.TimeUs + f.RetentionUs
	}
	if due <= t.e.TimeUs {
		return t.applyDelete(&wire.DeleteFlow{Reason: "retention"})
	}
	t.armExpiry(due)
	t.keepUpdated = true // the timer is not a use of the flow
	return nil
}

func (t *tx) armExpiry(at int64) {
	t.f.ExpireUs = at
	t.changed = true
	t.effects = append(t.effects, Effect{Kind: SetTimer, FlowID: t.f.Id, AtUs: at})
}
