package core

import (
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// EventStarted opens the log of a run. Of one that closes, its scope is the run
// ID; its items are the history it began with,
// its attributes what it began with.
const EventStarted = "flow.started"

// applyStart creates a flow, sets its first steps up and publishes its first
// messages. The same request ID again answers without a change.
func applyStart(f *wire.Flow, e *wire.Entry, c *wire.StartFlow) (Output, error) {
	if run := seenStart(f, c.RequestId); run != "" {
		return Output{Flow: f, Reply: Reply{RunID: run, Duplicate: true, Status: f.Status, MessageIDs: seenMessages(f, c.Publish)}}, nil
	}
	if c.Type == "" && c.Reuse == wire.StartFlow_ATTACH && c.Parent != nil {
		return attach(f, e, c)
	}
	if err := checkStart(e.FlowId, c); err != nil {
		return Output{}, err
	}
	if f == nil {
		t := newTx(&wire.Flow{Id: e.FlowId, NextExec: 1}, e)
		t.startRun(c)
		return t.finish(), nil
	}
	closed := f.Status != wire.Status_RUNNING
	switch {
	case c.Reuse == wire.StartFlow_ATTACH && !closed:
		return attach(f, e, c)
	case !f.Closes, c.Reuse == wire.StartFlow_REFUSE,
		!closed && c.Reuse != wire.StartFlow_TERMINATE,
		closed && c.Reuse == wire.StartFlow_IF_FAILED && f.Status == wire.Status_COMPLETED:
		return Output{}, refuse(Exists, "flow %q exists already and is %s", e.FlowId, statusWord(f.Status))
	}
	t := newTx(f, e)
	if err := checkOutbox(f, max(1, children(c.Steps...))); err != nil {
		return Output{}, err // nobody has answered what the former run sent
	}
	if !closed {
		t.closeRun(wire.Status_TERMINATED, nil, "a new run was started")
	}
	t.newRun()
	t.startRun(c)
	return t.finish(), nil
}

// seenStart gives the run that a start with this request ID made or attached to,
// or "".
func seenStart(f *wire.Flow, id string) string {
	switch {
	case f == nil || id == "":
		return ""
	case f.StartRequestId == id:
		return f.RunId
	}
	return seenMessage(f, startKey+id).GetMessageId()
}

// What the remembered request IDs of starts and stops begin with; no client's
// does.
const (
	startKey = "start\x00"
	stopKey  = "stop\x00"
)

// rememberStart keeps the key of the run's start beyond the run: a start that is
// delivered again must not begin one more.
func (t *tx) rememberStart() {
	if t.f.StartRequestId != "" {
		t.remember(&wire.Request{RequestId: startKey + t.f.StartRequestId, MessageId: t.f.RunId})
		t.f.StartRequestId = ""
	}
}

// attach makes a step of another flow wait for the run that there is. Its key is
// remembered: the same start may come again when the run has closed.
func attach(f *wire.Flow, e *wire.Entry, c *wire.StartFlow) (Output, error) {
	switch {
	case f == nil:
		return Output{}, refuse(NotFound, "flow %q does not exist", e.FlowId)
	case len(c.RequestId) > MaxRequestID:
		return Output{}, refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	}
	t := newTx(f, e)
	t.reply = Reply{RunID: f.RunId, Status: f.Status}
	if p := c.Parent; p != nil {
		if err := sameTenant(f, p.FlowId); err != nil {
			return Output{}, err
		}
		switch {
		case !f.Closes:
			return Output{}, refuse(Invalid, "flow %q does not close, it cannot be waited for", f.Id)
		case f.Status != wire.Status_RUNNING:
			if len(f.Outbox) >= MaxOutbox {
				return Output{}, refuse(LimitReached, "flow %q has %d sends that nobody has answered", f.Id, len(f.Outbox))
			}
			t.tellParent(p)
		case hasParent(f, p):
		case len(f.Parents) >= MaxParents:
			return Output{}, refuse(LimitReached, "%d steps wait for flow %q already", len(f.Parents), f.Id)
		default:
			f.Parents = append(f.Parents, p)
			t.changed = true
		}
	}
	if c.RequestId != "" {
		t.remember(&wire.Request{RequestId: startKey + c.RequestId, MessageId: f.RunId})
		t.changed = true
	}
	t.keepUpdated = true
	return t.finish(), nil
}

func hasParent(f *wire.Flow, p *wire.Link) bool {
	for _, have := range f.Parents {
		if have.EqualVT(p) {
			return true
		}
	}
	return false
}

// newRun clears what belongs to one run. Step numbers, sends and the keys of
// starts and stops go on.
func (t *tx) newRun() {
	old := t.f
	for _, a := range old.Attributes {
		t.removed = append(t.removed, a.Name)
	}
	t.clearFlowTimers()
	t.rememberStart()
	var keys []*wire.Request
	next := old.NextRequest
	for _, r := range old.Requests {
		if strings.HasPrefix(r.RequestId, startKey) || strings.HasPrefix(r.RequestId, stopKey) {
			keys = append(keys, &wire.Request{RequestId: r.RequestId, MessageId: r.MessageId, PayloadHash: r.PayloadHash, Output: r.Output, Seq: next, Lsn: t.e.Lsn})
			next++
		}
	}
	*t.f = wire.Flow{
		Id: old.Id, NextExec: old.NextExec, LastEvent: old.LastEvent, EventCount: old.EventCount,
		ItemCount: old.ItemCount, Outbox: old.Outbox, NextOutgoing: old.NextOutgoing, Requests: keys,
		FirstRequest: old.NextRequest, NextRequest: next,
	}
}

func (t *tx) startRun(c *wire.StartFlow) {
	f, e := t.f, t.e
	f.Type, f.CreatedUs, f.RetentionUs, f.StartRequestId = c.Type, e.TimeUs, c.RetentionUs, c.RequestId
	f.Closes, f.Quiet, f.Priority, f.Trace = c.Closes, c.Quiet, c.Priority, c.Trace
	f.RunId = t.mintID("run_")
	f.AttributesLsn = e.Lsn // also of none: what was read before is told from what is now
	if c.Parent != nil {
		f.Parents = []*wire.Link{c.Parent}
	}
	t.reply.RunID, t.reply.Created, t.reply.Status = f.RunId, true, wire.Status_RUNNING
	f.AttributesLsn = e.Lsn // a locked call on a run without attributes has something to compare
	set := t.setAttributes(c.Attributes)
	ev := &wire.Event{Type: EventStarted, Items: c.Items}
	if f.Closes {
		ev.Attributes, ev.Scope = set, f.RunId
	}
	t.event(ev)
	if f.Closes {
		f.RunStart = &wire.Cursor{Lsn: ev.Lsn, N: ev.N}
	}
	for _, spec := range c.Steps {
		if c.DelayUs > 0 {
			t.delayStep(spec, e.TimeUs+c.DelayUs)
		} else {
			t.addStep(spec, "", false, "")
		}
	}
	if c.TimeoutUs > 0 {
		f.TimeoutAtUs = e.TimeUs + c.DelayUs + c.TimeoutUs
		t.setTimer(0, f.TimeoutAtUs)
	}
	if c.RetentionUs > 0 && !c.Closes {
		t.armExpiry(e.TimeUs + c.RetentionUs)
	}
	for _, p := range c.Publish {
		t.publish(p, false)
	}
}

// checkStart checks a start of the flow of that ID.
func checkStart(id string, c *wire.StartFlow) error {
	if err := checkName("flow type", c.Type); err != nil {
		return err
	}
	switch {
	case len(c.Steps) == 0 && len(c.Attributes) == 0 && !c.Closes:
		return refuse(Invalid, "a flow needs a step or an attribute")
	case len(c.RequestId) > MaxRequestID:
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	case c.RetentionUs < 0:
		return refuse(Invalid, "retention is negative")
	case c.RetentionUs > MaxDelayUs:
		return refuse(LimitReached, "retention is %d microseconds, at most %d", c.RetentionUs, int64(MaxDelayUs))
	case c.DelayUs < 0 || c.DelayUs > MaxDelayUs:
		return refuse(Invalid, "delay is %d microseconds, must be 0 to %d", c.DelayUs, int64(MaxDelayUs))
	case c.TimeoutUs < 0 || c.TimeoutUs > MaxDelayUs:
		return refuse(Invalid, "timeout is %d microseconds, must be 0 to %d", c.TimeoutUs, int64(MaxDelayUs))
	case c.TimeoutUs > 0 && !c.Closes:
		return refuse(Invalid, "a flow that does not close has no timeout")
	case c.Priority > MaxPriority:
		return refuse(Invalid, "priority is %d, must be 0 to %d", c.Priority, MaxPriority)
	case len(c.Trace) > MaxName:
		return refuse(LimitReached, "trace context has more than %d bytes", MaxName)
	case c.Reuse < wire.StartFlow_REFUSE || c.Reuse > wire.StartFlow_ATTACH:
		return refuse(Invalid, "reuse has the unknown value %d", c.Reuse)
	case len(c.Publish) > MaxPending:
		return refuse(LimitReached, "%d first messages, at most %d", len(c.Publish), MaxPending)
	}
	empty := &wire.Flow{Id: id}
	if c.Parent != nil {
		if err := sameTenant(empty, c.Parent.FlowId); err != nil {
			return err
		}
	}
	if err := checkAttributes(nil, c.Attributes); err != nil {
		return err
	}
	if err := checkSpecs(empty, c.Steps, 0); err != nil {
		return err
	}
	if err := checkOutbox(nil, children(c.Steps...)); err != nil {
		return err
	}
	if err := checkEventSize(EventStarted, nil, c.Items); err != nil {
		return err
	}
	return checkRoom(empty, c.Publish)
}

// seenMessages gives the IDs that the first start answered with, as far as its
// messages had request IDs.
func seenMessages(f *wire.Flow, ps []*wire.Publish) []string {
	var ids []string
	for _, p := range ps {
		if r := seenMessage(f, p.RequestId); r != nil {
			ids = append(ids, r.MessageId)
		}
	}
	return ids
}
