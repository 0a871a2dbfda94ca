package core

import (
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// checkOutbox says whether there is room for n more sends. Those to parents have
// room of their own; steps that begin later are not counted again then.
func checkOutbox(f *wire.Flow, n int) error {
	if sum := len(f.GetOutbox()) + n; n > 0 && sum > MaxOutbox-MaxParents {
		return refuse(LimitReached, "%d sends would wait for their answer, at most %d", sum, MaxOutbox-MaxParents)
	}
	return nil
}

// children counts the flows that waits start or ask for.
func children(specs ...*wire.StepSpec) int {
	n := 0
	for _, s := range specs {
		for _, c := range s.GetWait().GetConditions() {
			if c.GetFlow() != nil {
				n++
			}
		}
	}
	return n
}

// checkSends checks commands to other flows.
func (t *tx) checkSends(sends []*wire.Send) error {
	for _, s := range sends {
		if err := sameTenant(t.f, s.GetFlowId()); err != nil {
			return err
		}
		var err error
		switch c := s.Command.(type) {
		case *wire.Send_Start:
			err = checkStart(s.FlowId, c.Start)
		case *wire.Send_Publish:
			err = checkPublish(c.Publish)
		case *wire.Send_Stop:
			if c.Stop == nil {
				err = refuse(Invalid, "flow %q is sent an empty stop", s.FlowId)
				break
			}
			err = checkReason(c.Stop.Reason)
		default:
			err = refuse(Invalid, "flow %q is sent nothing that it could take", s.FlowId)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// send puts a command into the outbox. Its key makes a repeated delivery known
// to the target.
func (t *tx) send(s *wire.Send, exec uint64, condition uint32) {
	id := t.f.NextOutgoing + 1
	t.f.NextOutgoing = id
	key := t.f.RunId + ">" + uitoa(id)
	out := &wire.Outgoing{Id: id, Exec: exec, Condition: condition, Send: s}
	switch c := s.Command.(type) {
	case *wire.Send_Start:
		if c.Start.RequestId == "" {
			// The entry and its specs are shared: what is stamped is a copy.
			start := startCopy(c.Start)
			start.RequestId = key
			out.Send = &wire.Send{FlowId: s.FlowId, Command: &wire.Send_Start{Start: start}}
		}
	case *wire.Send_Publish:
		if p := c.Publish; p.RequestId == "" {
			p = &wire.Publish{Channel: p.Channel, Payload: p.Payload, OnBusy: p.OnBusy, MaxPending: p.MaxPending, RequestId: key, Blob: p.Blob, Size: p.Size}
			out.Send = &wire.Send{FlowId: s.FlowId, Command: &wire.Send_Publish{Publish: p}}
		}
	case *wire.Send_Stop:
		if st := c.Stop; st.RequestId == "" {
			st = &wire.StopFlow{How: st.How, Reason: st.Reason, GraceUs: st.GraceUs, RunId: st.RunId, RequestId: key}
			out.Send = &wire.Send{FlowId: s.FlowId, Command: &wire.Send_Stop{Stop: st}}
		}
	}
	t.f.Outbox = append(t.f.Outbox, out)
	t.changed = true
	t.effects = append(t.effects, Effect{Kind: Send, FlowID: t.f.Id, Out: out})
}

func startCopy(s *wire.StartFlow) *wire.StartFlow {
	return &wire.StartFlow{
		Type: s.Type, Attributes: s.Attributes, Steps: s.Steps, Items: s.Items, Publish: s.Publish, RetentionUs: s.RetentionUs,
		RequestId: s.RequestId, Reuse: s.Reuse, DelayUs: s.DelayUs, TimeoutUs: s.TimeoutUs, Priority: s.Priority,
		Closes: s.Closes, Parent: s.Parent, Trace: s.Trace, Quiet: s.Quiet,
	}
}

// sendChild starts the child flow that a condition waits for, or asks to be told
// of the one that is there.
func (t *tx) sendChild(s *wire.Step, condition uint32, on *wire.OnFlow) {
	start := &wire.StartFlow{Reuse: wire.StartFlow_ATTACH}
	if on.Start != nil {
		start = startCopy(on.Start)
		start.Closes = true
		start.RequestId = "" // of this wait alone: another parent's start is not its repetition
	}
	start.Parent = &wire.Link{FlowId: t.f.Id, RunId: t.f.RunId, Exec: s.Exec, Condition: condition}
	t.send(&wire.Send{FlowId: on.FlowId, Command: &wire.Send_Start{Start: start}}, s.Exec, condition)
}

// tellParent sends how the run ended to a step that waits for it.
func (t *tx) tellParent(p *wire.Link) {
	f := t.f
	t.send(&wire.Send{FlowId: p.FlowId, Command: &wire.Send_ChildClosed{ChildClosed: &wire.ChildClosed{
		Exec: p.Exec, Condition: p.Condition, FlowId: f.Id, RunId: f.RunId, Status: f.Status, Output: f.Output, Error: f.Error, ParentRunId: p.RunId}}}, 0, 0)
}

// applyOutboxDone ends a send. A child that could not be started fails the
// condition that waits for it.
func (t *tx) applyOutboxDone(c *wire.OutboxDone) error {
	i := slices.IndexFunc(t.f.Outbox, func(o *wire.Outgoing) bool { return o.Id == c.Id })
	if i < 0 {
		return refuse(StaleAttempt, "flow %q has no send %d", t.f.Id, c.Id)
	}
	o := t.f.Outbox[i]
	// The old list may be in rows that are being written.
	t.f.Outbox = slices.Delete(slices.Clone(t.f.Outbox), i, i+1)
	t.changed, t.keepUpdated = true, true
	if f := t.f; f.Status != wire.Status_RUNNING && f.ExpireUs != 0 && len(f.Outbox) == 0 && f.ClosedUs+f.RetentionUs <= t.e.TimeUs {
		t.delete("retention")
		return nil
	}
	s, st := t.condition(o.Exec, o.Condition)
	if s == nil || st.Done {
		return nil
	}
	if c.Error == "" {
		st.RunId = c.RunId
		return nil
	}
	st.Done, st.Status, st.Error = true, wire.Status_FAILED, c.Error
	t.keepUpdated = false
	t.evaluate(s)
	return nil
}

// condition gives a condition of a step that waits.
func (t *tx) condition(exec uint64, i uint32) (*wire.Step, *wire.ConditionState) {
	s := stepOf(t.f, exec)
	if exec == 0 || s == nil || s.State != wire.Step_WAITING || int(i) >= len(s.Conditions) {
		return nil, nil
	}
	return s, s.Conditions[i]
}

// applyChildClosed tells a waiting step how its child ended. One that comes too
// late, or again, changes nothing.
func (t *tx) applyChildClosed(c *wire.ChildClosed) error {
	t.reply = Reply{RunID: t.f.RunId}
	if c.ParentRunId != "" && c.ParentRunId != t.f.RunId {
		return nil // a flow of the same ID, deleted since, had waited
	}
	s, st := t.condition(c.Exec, c.Condition)
	if s == nil || st.Done || s.Spec.Wait.Conditions[c.Condition].GetFlow().GetFlowId() != c.FlowId {
		return nil
	}
	st.Done, st.Status, st.Output, st.Error, st.RunId = true, c.Status, c.Output, c.Error, c.RunId
	t.changed = true
	t.evaluate(s)
	return nil
}
