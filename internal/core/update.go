package core

import "github.com/perdure-dev/perdure/internal/wire"

// EventRPC says that a transactional call was executed; its data is the name.
const EventRPC = "rpc.executed"

// applyUpdate does what a transactional call wrote.
func (t *tx) applyUpdate(c *wire.Update) error {
	r := seenUpdate(t.f, c.RequestId)
	if r == nil && seenRequest(t.f, c.RequestId) != nil {
		return refuse(KeyReused, "request ID %q came with a message before", c.RequestId)
	}
	if r != nil {
		t.reply = Reply{RunID: t.f.RunId, Duplicate: true, Output: r.Output}
		return nil
	}
	if err := t.mustRun(c.RunId); err != nil {
		return err
	}
	if t.f.GraceAtUs != 0 && (len(c.Next) > 0 || c.Close.GetHow() != wire.Close_NONE) {
		return refuse(Closed, "flow %q is being cancelled", t.f.Id)
	}
	if c.IfAttributesLsn != 0 && c.IfAttributesLsn != t.f.AttributesLsn {
		return refuse(Conflict, "attributes of flow %q have changed meanwhile", t.f.Id)
	}
	if err := t.checkUpdate(c); err != nil {
		return err
	}
	set := t.setAttributes(c.Attributes)
	for _, ev := range c.Events {
		t.event(&wire.Event{Type: ev.Type, Data: ev.Data, Items: ev.Items})
	}
	t.event(&wire.Event{Type: EventRPC, Data: []byte(c.Name), Attributes: set})
	r = &wire.Request{RequestId: c.RequestId}
	if len(c.Output) <= MaxKeptOutput {
		r.Output = c.Output
	}
	t.remember(r)
	for _, p := range c.Publish {
		t.publish(p, true)
	}
	for _, s := range c.Sends {
		t.send(s, 0, 0)
	}
	for _, spec := range c.Next {
		t.addStep(spec, "", false, "")
	}
	t.close(c.Close)
	t.settle()
	t.reply = Reply{RunID: t.f.RunId, Output: c.Output, Status: t.f.Status}
	return nil
}

func (t *tx) checkUpdate(c *wire.Update) error {
	switch n := len(c.Events) + len(c.Next) + len(c.Publish) + len(c.Sends); {
	case n > MaxResultItems:
		return refuse(LimitReached, "update has %d parts, at most %d", n, MaxResultItems)
	case len(c.RequestId) > MaxRequestID:
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	case len(c.Output) > MaxPayload:
		return refuse(LimitReached, "output has %d bytes, at most %d", len(c.Output), MaxPayload)
	}
	if err := checkName("name of the call", c.Name); err != nil {
		return err
	}
	if err := checkEvents(c.Events); err != nil {
		return err
	}
	if err := checkRoom(t.f, c.Publish); err != nil {
		return err
	}
	if err := t.checkSends(c.Sends); err != nil {
		return err
	}
	if err := checkOutbox(t.f, len(c.Sends)+children(c.Next...)+children(c.Close.GetOtherwise())); err != nil {
		return err
	}
	if err := checkAttributes(t.f.Attributes, c.Attributes); err != nil {
		return err
	}
	if err := t.checkClose(c.Close, len(t.f.Steps)+len(c.Next)); err != nil {
		return err
	}
	return checkSpecs(t.f, c.Next, len(t.f.Steps))
}
