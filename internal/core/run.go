package core

import (
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Events that close a run. The item of a completion is the output; the data of
// the others says why.
const (
	EventCompleted  = "flow.completed"
	EventFailed     = "flow.failed"
	EventCancelled  = "flow.cancelled"
	EventTerminated = "flow.terminated"
	EventTimedOut   = "flow.timed_out"
	EventReset      = "flow.reset" // opens a run that goes back: its scope is the run ID, its attributes are all there are
)

// DefaultGraceUs is how long a cancelled run's handlers may take.
const DefaultGraceUs = 30_000_000

var closers = [...]string{
	wire.Status_COMPLETED: EventCompleted, wire.Status_FAILED: EventFailed, wire.Status_CANCELLED: EventCancelled,
	wire.Status_TERMINATED: EventTerminated, wire.Status_TIMED_OUT: EventTimedOut,
}

// IsCloser reports whether an event of that type closes a run.
func IsCloser(typ string) bool {
	for _, c := range closers {
		if c == typ && c != "" {
			return true
		}
	}
	return false
}

func statusWord(s wire.Status) string { return strings.ToLower(s.String()) }

// mustRun refuses commands to a run that has ended, or to another run than the
// one that is meant.
func (t *tx) mustRun(runID string) error {
	if runID != "" && runID != t.f.RunId {
		return refuse(Conflict, "flow %q is at run %s, not %s", t.f.Id, t.f.RunId, runID)
	}
	if t.f.Status != wire.Status_RUNNING {
		return refuse(Closed, "flow %q is %s", t.f.Id, statusWord(t.f.Status))
	}
	return nil
}

func (t *tx) checkClose(c *wire.Close, live int) error {
	if c == nil || c.How == wire.Close_NONE {
		return nil
	}
	switch {
	case !t.f.Closes:
		return refuse(Invalid, "flow %q does not close", t.f.Id)
	case c.How < 0 || c.How > wire.Close_IF_EMPTY:
		return refuse(Invalid, "close has the unknown way %d", c.How)
	case len(c.Output) > MaxPayload:
		return refuse(LimitReached, "output has %d bytes, at most %d", len(c.Output), MaxPayload)
	case c.How != wire.Close_IF_EMPTY:
		return checkReason(c.Error)
	case c.Otherwise == nil || len(c.Channels) == 0 || len(c.Channels) > MaxChannels:
		return refuse(Invalid, "a close if channels are empty needs 1 to %d channels and a step otherwise", MaxChannels)
	}
	return checkSpecs(t.f, []*wire.StepSpec{c.Otherwise}, live)
}

// close does what a decision says of the run.
func (t *tx) close(c *wire.Close) {
	if c == nil || t.f.Status != wire.Status_RUNNING {
		return
	}
	switch c.How {
	case wire.Close_GRACEFUL:
		t.f.Closing = c
	case wire.Close_FORCE:
		t.closeRun(wire.Status_COMPLETED, c.Output, "")
	case wire.Close_FAIL:
		t.closeRun(wire.Status_FAILED, nil, c.Error)
	case wire.Close_IF_EMPTY:
		for _, name := range c.Channels {
			if pendingCount(t.f, name) > 0 {
				t.addStep(c.Otherwise, "", false, "")
				return
			}
		}
		t.closeRun(wire.Status_COMPLETED, c.Output, "")
	}
}

// settle closes a run whose end was asked for, when nothing is left to wait for.
func (t *tx) settle() {
	if t.f.Status != wire.Status_RUNNING || len(t.f.Steps) > 0 {
		return
	}
	switch {
	case t.f.GraceAtUs != 0:
		t.closeRun(wire.Status_CANCELLED, nil, t.f.StopReason)
	case t.f.Closing != nil:
		t.closeRun(wire.Status_COMPLETED, t.f.Closing.Output, "")
	}
}

// closeRun ends a run: steps, waits and timers go, those who wait for it are
// told. What it has sent already goes on.
func (t *tx) closeRun(status wire.Status, output []byte, why string) {
	f := t.f
	for len(f.Steps) > 0 {
		t.dropStep(f.Steps[len(f.Steps)-1], statusWord(status))
	}
	t.clearFlowTimers()
	f.Status, f.Output, f.Error, f.ClosedUs = status, output, why, t.e.TimeUs
	f.TimeoutAtUs, f.GraceAtUs, f.Closing, f.Channels = 0, 0, nil, nil
	ev := &wire.Event{Type: closers[status], Data: []byte(why)}
	if output != nil {
		ev.Items = [][]byte{output}
	}
	t.event(ev)
	if f.RetentionUs > 0 {
		t.armExpiry(t.e.TimeUs + f.RetentionUs)
	}
	for _, p := range f.Parents {
		t.tellParent(p)
	}
	f.Parents = nil
	t.reply.Status = status
}

// applyStop closes a run from outside.
func (t *tx) applyStop(c *wire.StopFlow) error {
	if r := seenMessage(t.f, stopKey+c.RequestId); r != nil && c.RequestId != "" {
		t.reply = Reply{RunID: r.MessageId, Duplicate: true, Status: t.f.Status}
		return nil
	}
	if len(c.RequestId) > MaxRequestID {
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	}
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	if err := t.mustRun(c.RunId); err != nil {
		return t.tooLate(c, err)
	}
	switch {
	case !t.f.Closes:
		return refuse(Invalid, "flow %q does not close; delete it", t.f.Id)
	case c.GraceUs < 0 || c.GraceUs > MaxDelayUs:
		return refuse(Invalid, "grace is %d microseconds, must be 0 to %d", c.GraceUs, int64(MaxDelayUs))
	}
	t.reply = Reply{RunID: t.f.RunId} // closeRun adds the status
	t.rememberStop(c)
	switch c.How {
	case wire.StopFlow_CANCEL:
		t.cancelRun(c)
	case wire.StopFlow_TERMINATE:
		t.closeRun(wire.Status_TERMINATED, nil, c.Reason)
	case wire.StopFlow_FAIL:
		t.closeRun(wire.Status_FAILED, nil, c.Reason)
	default:
		return refuse(Invalid, "stop has the unknown way %d", c.How)
	}
	return nil
}

// tooLate remembers the key of a stop that found nothing to stop: delivered
// again, it must not stop the run that was begun since.
func (t *tx) tooLate(c *wire.StopFlow, err error) error {
	if c.RequestId == "" {
		return err
	}
	t.rememberStop(c)
	t.changed, t.keepUpdated = true, true
	t.reply = Reply{RunID: t.f.RunId, Status: t.f.Status}
	return nil
}

// rememberStop keeps the key beyond the run, like those of starts.
func (t *tx) rememberStop(c *wire.StopFlow) {
	if c.RequestId != "" {
		t.remember(&wire.Request{RequestId: stopKey + c.RequestId, MessageId: t.f.RunId})
	}
}

// cancelRun tells running handlers and ends everything that does not run. The
// run closes when the last one has answered, or when the grace is over.
func (t *tx) cancelRun(c *wire.StopFlow) {
	if t.f.GraceAtUs != 0 {
		return // under way
	}
	reason := c.Reason
	if reason == "" {
		reason = "cancelled"
	}
	grace := c.GraceUs
	if grace == 0 {
		grace = DefaultGraceUs
	}
	t.f.StopReason, t.f.GraceAtUs = reason, t.e.TimeUs+grace
	t.changed = true
	t.event(&wire.Event{Type: EventCancelRequested, Data: []byte(reason)})
	t.setTimer(0, t.f.GraceAtUs)
	for i := 0; i < len(t.f.Steps); {
		s := t.f.Steps[i]
		if s.State != wire.Step_STARTED {
			t.dropStep(s, reason)
			continue
		}
		s.Cancel, s.CancelReason = true, reason
		t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec, Attempt: attemptOf(s.Attempt), Reason: reason})
		i++
	}
	t.settle()
}

// applyReset begins a new run at a step of the log.
func (t *tx) applyReset(c *wire.Reset) error {
	f := t.f
	switch last := f.LastEvent; {
	case !f.Closes:
		return refuse(Invalid, "flow %q does not close and cannot be reset", f.Id)
	case last.GetLsn() != c.IfLastEvent.GetLsn() || last.GetN() != c.IfLastEvent.GetN():
		return refuse(Conflict, "the log of flow %q has grown", f.Id)
	case len(c.Steps) == 0:
		return refuse(Invalid, "a reset needs a step")
	}
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	if err := checkAttributes(nil, c.Attributes); err != nil {
		return err
	}
	if err := checkSpecs(f, c.Steps, 0); err != nil {
		return err
	}
	if err := checkOutbox(f, children(c.Steps...)); err != nil {
		return err
	}
	if err := checkRoom(&wire.Flow{Id: f.Id, Channels: f.Channels}, c.Publish); err != nil {
		return err
	}
	t.goBack(c)
	return nil
}

func (t *tx) goBack(c *wire.Reset) {
	f := t.f
	for len(f.Steps) > 0 {
		t.dropStep(f.Steps[len(f.Steps)-1], "reset")
	}
	waiting := f.Channels
	typ, parents, priority, retention, timeout, trace, quiet := f.Type, f.Parents, f.Priority, f.RetentionUs, f.TimeoutAtUs, f.Trace, f.Quiet
	t.rememberStart()
	requests, first, next := f.Requests, f.FirstRequest, f.NextRequest
	t.newRun()
	f.Type, f.Parents, f.Priority, f.RetentionUs, f.Trace, f.Closes, f.Quiet = typ, parents, priority, retention, trace, true, quiet
	f.CreatedUs, f.RunId, f.AttributesLsn = t.e.TimeUs, t.mintID("run_"), t.e.Lsn
	// A request that was answered stays so.
	f.Requests, f.FirstRequest, f.NextRequest = requests, first, next
	set := t.setAttributes(c.Attributes)
	f.AttributesLsn = t.e.Lsn
	ev := &wire.Event{Type: EventReset, Scope: f.RunId, Exec: c.Exec, Data: []byte(c.Reason), Attributes: set}
	t.event(ev)
	f.RunStart = &wire.Cursor{Lsn: ev.Lsn, N: ev.N}
	if timeout > t.e.TimeUs {
		f.TimeoutAtUs = timeout
		t.setTimer(0, timeout)
	}
	// What was consumed since comes before what waits still.
	for _, p := range c.Publish {
		t.publish(p, true)
	}
	for _, ch := range waiting {
		for _, m := range ch.Pending {
			t.publish(&wire.Publish{Channel: ch.Name, Payload: m.Payload, Blob: m.Blob, Size: m.Size}, true)
		}
	}
	for _, spec := range c.Steps {
		t.addStep(spec, "", false, "")
	}
	t.reply = Reply{RunID: f.RunId}
}

// applyFireTimer starts what a timer held back. A timer that is no longer
// meant, or not yet due, is refused; the codes tell these two apart, since the
// latter must be set again.
func (t *tx) applyFireTimer(c *wire.FireTimer) error {
	if c.Exec == 0 {
		return t.fireFlowTimer()
	}
	s := stepOf(t.f, c.Exec)
	switch {
	case s == nil || s.State == wire.Step_STARTED || s.State == wire.Step_QUEUED:
		return refuse(StaleAttempt, "step %d of flow %q has no timer", c.Exec, t.f.Id)
	case s.State == wire.Step_WAITING:
		return t.fireStepTimers(s)
	case t.e.TimeUs < s.RetryAtUs:
		return refuse(NotDue, "timer of step %d of flow %q is not due", c.Exec, t.f.Id)
	case s.State == wire.Step_DELAYED:
		t.changed = true
		t.ready(s)
		return nil
	}
	t.handOutAgain(s, "retry")
	return nil
}

// fireFlowTimer does what the flow's own timers are for: the end of a cancel's
// grace, of a run's time, of a flow's retention.
func (t *tx) fireFlowTimer() error {
	f, now := t.f, t.e.TimeUs
	switch {
	case f.GraceAtUs != 0 && f.GraceAtUs <= now:
		t.closeRun(wire.Status_CANCELLED, nil, f.StopReason)
	case f.TimeoutAtUs != 0 && f.TimeoutAtUs <= now:
		t.closeRun(wire.Status_TIMED_OUT, nil, fmt.Sprintf("the run's time was over after %d ms", (now-f.CreatedUs)/1000))
	case f.ExpireUs != 0 && f.ExpireUs <= now:
		return t.expire()
	case f.GraceAtUs != 0 || f.TimeoutAtUs != 0 || f.ExpireUs != 0:
		return refuse(NotDue, "timers of flow %q are not due", f.Id)
	default:
		return refuse(StaleAttempt, "flow %q has no timer", f.Id)
	}
	return nil
}

// expire deletes a flow that was at rest, or closed, for its retention, or sets
// the timer anew.
func (t *tx) expire() error {
	f, now := t.f, t.e.TimeUs
	due := f.UpdatedUs + f.RetentionUs
	switch {
	case f.Closes && f.Status != wire.Status_RUNNING:
		due = f.ClosedUs + f.RetentionUs
	case IsBusy(f) || len(f.Outbox) > 0:
		due = now + f.RetentionUs
	}
	if len(f.Outbox) > 0 && due <= now {
		due = now + max(f.RetentionUs, deleteAgainUs) // its sends have no answer yet
	}
	if due <= now {
		t.delete("retention")
		return nil
	}
	t.armExpiry(due)
	t.keepUpdated = true // the timer is not a use of the flow
	return nil
}

func (t *tx) armExpiry(at int64) {
	t.clearTimer(0, t.f.ExpireUs)
	t.f.ExpireUs = at
	t.changed = true
	t.setTimer(0, at)
}
