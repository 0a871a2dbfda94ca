package core

import (
	"math"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// applyStepResult ends an attempt: its writes and the next steps in one entry,
// or, for a failure that the policy forgives, a backoff.
func (t *tx) applyStepResult(c *wire.StepResult) error {
	s, err := t.running(c.Exec, c.Attempt)
	if err != nil {
		return err
	}
	if err := t.checkResult(s, c); err != nil {
		return err
	}
	if c.Retry != nil {
		if len(c.Checkpoint) > 0 {
			s.Checkpoint = c.Checkpoint
		}
		if t.retry(s, c.Retry) || t.recoverStep(s, c.Retry) {
			t.settle()
			return nil
		}
	}
	t.changed = true
	t.releaseKey(s)
	if waitPhase(s) && c.Retry == nil {
		t.waitKnown(s, c)
		return nil
	}
	t.removeStep(s.Exec)
	t.f.StepsDone++
	t.writes(s, c)
	if t.f.GraceAtUs == 0 {
		for _, spec := range c.Next {
			t.addStep(spec, s.Scope, s.Cancel, s.CancelReason)
		}
		t.close(c.Close)
	}
	if !t.f.Closes {
		t.wakeCancelled()
	}
	t.settle()
	t.reply = Reply{RunID: t.f.RunId}
	return nil
}

// writes takes what a handler wrote into the flow and the log.
func (t *tx) writes(s *wire.Step, c *wire.StepResult) {
	for _, ev := range c.Events {
		t.event(&wire.Event{Type: ev.Type, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
			Attempt: s.Attempts, Data: ev.Data, Items: ev.Items})
	}
	set := t.setAttributes(c.Attributes)
	if t.f.Closes {
		t.told(s, c, set)
	}
	t.dropSiblings(s, c) // before they could take what is published
	for _, p := range c.Publish {
		t.publish(p, true)
	}
	for _, send := range c.Sends {
		t.send(send, 0, 0)
	}
}

// told writes the line of the log that every result of a closing flow leaves.
func (t *tx) told(s *wire.Step, c *wire.StepResult, set []*wire.Attribute) {
	ev := &wire.Event{Type: EventStepCompleted, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Attempt: s.Attempts, Attributes: set}
	if c.Retry != nil {
		ev.Type, ev.Data = EventStepFailed, []byte(c.Retry.Error)
	}
	if len(c.Next) > 0 && t.f.GraceAtUs == 0 {
		ev.Next = make([]string, len(c.Next))
		for i, n := range c.Next {
			ev.Next[i] = n.Name
		}
	}
	t.event(ev)
}

// waitKnown takes the result of a WaitFor: the step waits now, or goes on at
// once when it said nothing to wait for.
func (t *tx) waitKnown(s *wire.Step, c *wire.StepResult) {
	// Tasks that are out share the old spec. The wait begins after what the
	// handler wrote: until then its conditions have no state.
	spec := specCopy(s.Spec)
	spec.Wait, spec.Locals = nil, c.Locals
	s.Spec = spec
	s.Attempt, s.Retries, s.Checkpoint, s.State = nil, 0, nil, wire.Step_WAITING
	attempts := s.Attempts
	s.Attempts, s.FirstStartUs = 0, 0 // Execute counts on its own
	for _, ev := range c.Events {
		t.event(&wire.Event{Type: ev.Type, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Attempt: attempts, Data: ev.Data, Items: ev.Items})
	}
	set := t.setAttributes(c.Attributes)
	t.event(&wire.Event{Type: EventStepWaiting, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Attempt: attempts, Attributes: set})
	for _, p := range c.Publish {
		t.publish(p, true)
	}
	for _, send := range c.Sends {
		t.send(send, 0, 0)
	}
	t.reply = Reply{RunID: t.f.RunId}
	if t.f.GraceAtUs != 0 {
		t.dropStep(s, t.f.StopReason)
		t.settle()
		return
	}
	if c.Wait == nil {
		s.Executing = true
		t.start(s)
		return
	}
	spec.Wait = c.Wait
	t.beginWait(s)
	if !t.f.Closes {
		t.wakeCancelled()
	}
}

// specCopy is a copy that shares what is in it.
func specCopy(s *wire.StepSpec) *wire.StepSpec {
	return &wire.StepSpec{
		Name: s.Name, Input: s.Input, Wait: s.Wait, Retry: s.Retry, Prefetch: s.Prefetch, WaitFor: s.WaitFor,
		Async: s.Async, Recover: s.Recover, TimeoutUs: s.TimeoutUs, HeartbeatUs: s.HeartbeatUs, Locals: s.Locals,
		ConcurrencyKey: s.ConcurrencyKey, ConcurrencyLimit: s.ConcurrencyLimit, InputBlob: s.InputBlob, Failure: s.Failure,
	}
}

// recoverStep goes to the step's recovery instead of what its result says.
func (t *tx) recoverStep(s *wire.Step, r *wire.Retry) bool {
	if s.Spec.Recover == nil || t.f.GraceAtUs != 0 || s.Cancel {
		return false
	}
	spec := specCopy(s.Spec.Recover)
	spec.Failure = r.Error
	if len(spec.Input) == 0 && spec.InputBlob == "" {
		spec.Input, spec.InputBlob = s.Spec.Input, s.Spec.InputBlob
	}
	t.releaseKey(s)
	t.removeStep(s.Exec)
	t.event(&wire.Event{Type: EventStepFailed, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: []byte(r.Error), Next: []string{spec.Name}})
	t.addStep(spec, s.Scope, false, "")
	t.reply = Reply{RunID: t.f.RunId}
	return true
}

// dropSiblings cancels the steps that a decision names.
func (t *tx) dropSiblings(s *wire.Step, c *wire.StepResult) {
	if len(c.CancelSteps) == 0 && len(c.CancelExecs) == 0 {
		return
	}
	var gone []*wire.Step
	for _, other := range slices.Clone(t.f.Steps) {
		if slices.Contains(c.CancelSteps, other.Spec.Name) || slices.Contains(c.CancelExecs, other.Exec) {
			t.dropStep(other, "cancelled by step "+s.Spec.Name)
			gone = append(gone, other)
		}
	}
	for _, other := range gone {
		t.unblock(other)
	}
}

func (t *tx) checkResult(s *wire.Step, c *wire.StepResult) error {
	if n := len(c.Events) + len(c.Next) + len(c.Publish) + len(c.Sends) + len(c.CancelSteps) + len(c.CancelExecs); n > MaxResultItems {
		return refuse(LimitReached, "result has %d parts, at most %d", n, MaxResultItems)
	}
	if err := checkEvents(c.Events); err != nil {
		return err
	}
	if c.Retry != nil {
		if err := checkReason(c.Retry.Error); err != nil {
			return err
		}
	}
	if len(c.Checkpoint) > MaxPayload || len(c.Locals) > MaxPayload {
		return refuse(LimitReached, "checkpoint or locals have more than %d bytes", MaxPayload)
	}
	if c.Wait != nil {
		if !waitPhase(s) {
			return refuse(Invalid, "the result of step %q has a wait, but its attempt was no WaitFor", s.Spec.Name)
		}
		if err := checkWait(t.f, s.Spec.Name, c.Wait); err != nil {
			return err
		}
	}
	if waitPhase(s) && (len(c.Next) > 0 || c.Close != nil && c.Retry == nil) {
		return refuse(Invalid, "the WaitFor of step %q gave a decision", s.Spec.Name)
	}
	if len(c.Publish) > 0 {
		if err := checkRoom(t.f, c.Publish); err != nil {
			return err
		}
	}
	if err := t.checkSends(c.Sends); err != nil {
		return err
	}
	sends := len(c.Sends) + children(c.Next...) + children(&wire.StepSpec{Wait: c.Wait}, c.Close.GetOtherwise())
	if err := checkOutbox(t.f, sends); err != nil {
		return err
	}
	if err := checkAttributes(t.f.Attributes, c.Attributes); err != nil {
		return err
	}
	if err := t.checkClose(c.Close, len(t.f.Steps)-1+len(c.Next)); err != nil {
		return err
	}
	return checkSpecs(t.f, c.Next, len(t.f.Steps)-1)
}

func checkEvents(evs []*wire.NewEvent) error {
	for _, ev := range evs {
		if err := checkName("event type", ev.Type); err != nil {
			return err
		}
		if err := checkEventSize(ev.Type, ev.Data, ev.Items); err != nil {
			return err
		}
	}
	return nil
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
	if p == nil || r.Permanent || s.Retries+1 >= p.MaxAttempts && p.MaxAttempts != math.MaxUint32 {
		return false
	}
	if t.f.GraceAtUs != 0 {
		return false // its run is being cancelled: a failure is its answer
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
	t.changed = true
	if s.Cancel {
		t.handOutAgain(s, r.Error)
		return true
	}
	t.releaseKey(s)
	s.State, s.RetryAtUs = wire.Step_BACKOFF, at
	t.event(&wire.Event{Type: EventStepRetrying, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: []byte(r.Error)})
	t.setTimer(s.Exec, at)
	return true
}

// backoff grows from the initial interval by the factor up to the maximum, and
// is at least what the handler asked for.
func backoff(p *wire.RetryPolicy, retries uint32, after int64) int64 {
	factor := int64(p.BackoffPermille)
	if factor == 0 {
		factor = 2000
	}
	d := max(p.InitialUs, 1)
	for range min(retries, 1024) {
		if d >= p.MaxUs && p.MaxUs > 0 || d > 1<<42 {
			break
		}
		if next := d / 1000 * factor; d >= 1000*1000 {
			d = next
		} else {
			d = d * factor / 1000
		}
		if factor == 1000 {
			break
		}
	}
	if p.MaxUs > 0 {
		d = min(d, p.MaxUs)
	}
	return max(d, after)
}
