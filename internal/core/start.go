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
			return Output{Flow: f, Reply: Reply{RunID: f.RunId, Duplicate: true}}, nil
		}
		return Output{}, refuse(Exists, "flow %q exists already", e.FlowId)
	}
	if err := checkStart(c); err != nil {
		return Output{}, err
	}
	t := &tx{e: e, f: &wire.Flow{
		Id: e.FlowId, Type: c.Type, CreatedUs: e.TimeUs, NextExec: 1,
		RetentionUs: c.RetentionUs, StartRequestId: c.RequestId,
	}}
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
	switch {
	case c.Type == "":
		return refuse(Invalid, "flow type is missing")
	case len(c.Steps) == 0 && len(c.Attributes) == 0:
		return refuse(Invalid, "a flow needs a step or an attribute")
	case len(c.RequestId) > MaxRequestID:
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	case len(c.Items) > MaxResultItems:
		return refuse(LimitReached, "history has %d items, at most %d", len(c.Items), MaxResultItems)
	case c.RetentionUs < 0:
		return refuse(Invalid, "retention is negative")
	case len(c.Publish) > MaxPending:
		return refuse(LimitReached, "%d first messages, at most %d", len(c.Publish), MaxPending)
	}
	if err := checkAttributes(nil, c.Attributes); err != nil {
		return err
	}
	if err := checkSpecs(c.Steps, 0); err != nil {
		return err
	}
	for _, p := range c.Publish {
		if err := checkPublish(p); err != nil {
			return err
		}
	}
	return nil
}
