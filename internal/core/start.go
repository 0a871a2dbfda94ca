package core

import (
	"github.com/perdure-dev/perdure/internal/wire"
)

// EventStarted opens a flow's log; its items are the history it began with.
const EventStarted = "flow.started"

// applyStart creates a flow, sets its first steps up and publishes its first
// messages. The same request ID again answers without a change.
func applyStart(f *wire.Flow, e *wire.Entry, c *wire.StartFlow) (Output, error) {
	if f != nil {
		if c.RequestId != "" && f.StartRequestId == c.RequestId {
			return Output{Flow: f, Reply: Reply{RunID: f.RunId, Duplicate: true, MessageIDs: seenMessages(f, c.Publish)}}, nil
		}
		return Output{}, refuse(Exists, "flow %q exists already", e.FlowId)
	}
	if err := checkStart(c); err != nil {
		return Output{}, err
	}
	t := newTx(&wire.Flow{
		Id: e.FlowId, Type: c.Type, CreatedUs: e.TimeUs, NextExec: 1,
		RetentionUs: c.RetentionUs, StartRequestId: c.RequestId,
	}, e)
	t.f.RunId = t.mintID("run_")
	t.reply.RunID, t.reply.Created = t.f.RunId, true
	t.setAttributes(c.Attributes)
	t.event(&wire.Event{Type: EventStarted, Items: c.Items})
	for _, spec := range c.Steps {
		t.addStep(spec, "", false, "")
	}
	if c.RetentionUs > 0 {
		t.armExpiry(e.TimeUs + c.RetentionUs)
	}
	for _, p := range c.Publish {
		t.publish(p, false)
	}
	return t.finish(), nil
}

func checkStart(c *wire.StartFlow) error {
	if err := checkName("flow type", c.Type); err != nil {
		return err
	}
	switch {
	case len(c.Steps) == 0 && len(c.Attributes) == 0:
		return refuse(Invalid, "a flow needs a step or an attribute")
	case len(c.RequestId) > MaxRequestID:
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	case c.RetentionUs < 0:
		return refuse(Invalid, "retention is negative")
	case c.RetentionUs > MaxDelayUs:
		return refuse(LimitReached, "retention is %d microseconds, at most %d", c.RetentionUs, int64(MaxDelayUs))
	case len(c.Publish) > MaxPending:
		return refuse(LimitReached, "%d first messages, at most %d", len(c.Publish), MaxPending)
	}
	if err := checkAttributes(nil, c.Attributes); err != nil {
		return err
	}
	if err := checkSpecs(c.Steps, 0); err != nil {
		return err
	}
	if err := checkEventSize(EventStarted, nil, c.Items); err != nil {
		return err
	}
	return checkRoom(&wire.Flow{}, c.Publish)
}

// seenMessages gives the IDs that the first start answered with, as far as its
// messages had request IDs.
func seenMessages(f *wire.Flow, ps []*wire.Publish) []string {
	var ids []string
	for _, p := range ps {
		if r := seenRequest(f, p.RequestId); r != nil {
			ids = append(ids, r.MessageId)
		}
	}
	return ids
}
