package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// wait answers when a run is closed: with its outcome and counts, without
// attributes, steps and channels. A run that is not the newest any more is looked up in the
// log.
func (c *call) wait(req *wire.WaitRequest) {
	flowID, err := c.flow(req.FlowId)
	if err != nil {
		c.fail(err)
		return
	}
	c.awaitRun(flowID, req)
}

func (c *call) awaitRun(flowID string, req *wire.WaitRequest) {
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		switch {
		case req.RunId != "" && req.RunId != f.RunId:
			c.formerRun(flowID, req.RunId)
			return nil, nil
		case f.Status != wire.Status_RUNNING:
			return infoAnswer(outcome(f)), nil
		}
		info := outcome(f)
		x := &waiter{c: c, flowID: flowID, late: func() { c.lateWith(flowID, func(f *wire.Flow) *wire.Answer { return infoAnswer(c.s.info(f)) }) }}
		x.heard = func(ev *wire.Event) func() {
			tally(info, ev)
			switch {
			case ev.Type == core.EventReset && req.RunId == "":
				return func() { c.awaitRun(flowID, req) } // the newest run is another one now
			case closedBy(info, ev):
				return func() { c.answer(infoAnswer(info)) }
			}
			return nil
		}
		return nil, c.s.waiters.add(x, f)
	})
}

func infoAnswer(info *wire.FlowInfo) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Flow{Flow: info}}
}

var statusOf = map[string]wire.Status{
	core.EventCompleted: wire.Status_COMPLETED, core.EventFailed: wire.Status_FAILED, core.EventCancelled: wire.Status_CANCELLED,
	core.EventTerminated: wire.Status_TERMINATED, core.EventTimedOut: wire.Status_TIMED_OUT,
	core.EventReset: wire.Status_TERMINATED, // a run that was running still
}

// closedBy takes the outcome of a run from the event that closed it, or that
// began the next one.
func closedBy(info *wire.FlowInfo, ev *wire.Event) bool {
	status, ok := statusOf[ev.Type]
	if !ok {
		return false
	}
	info.Status, info.ClosedUs, info.UpdatedUs = status, ev.AtUs, ev.AtUs
	info.TimeoutAtUs, info.Cancelling = 0, false
	switch {
	case ev.Type == core.EventReset:
		info.Error = "the flow was reset to another step: " + string(ev.Data)
	case len(ev.Items) > 0:
		info.Output = ev.Items[0]
	default:
		info.Error = string(ev.Data)
	}
	return true
}

// tally counts an event, and the step that it says is over. One that failed and
// goes on with its recovery is not.
func tally(info *wire.FlowInfo, ev *wire.Event) {
	info.Events++
	if ev.Type == core.EventStepCompleted || ev.Type == core.EventStepFailed && len(ev.Next) == 0 {
		info.StepsDone++
	}
}

// formerRun answers with the outcome of a run that another one has followed.
func (c *call) formerRun(flowID, run string) {
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		r := c.s.cfg.Set.For(flowID)
		if err := settled(ctx, r); err != nil {
			return nil, err
		}
		from, _, err := c.s.findRun(ctx, flowID, run)
		if err != nil {
			return nil, err
		}
		info := &wire.FlowInfo{FlowId: UserID(flowID), RunId: run}
		at := before(from)
		err = r.Tables().Events(flowID, at.LSN, at.N, 0, func(ev *wire.Event) error {
			if info.CreatedUs == 0 {
				info.CreatedUs = ev.AtUs
			}
			tally(info, ev)
			if closedBy(info, ev) {
				return errEnough
			}
			return nil
		})
		info.Events = 0 // those of a flow are of all its runs
		if errors.Is(err, errEnough) {
			return infoAnswer(info), nil
		}
		if err == nil {
			err = refuse(UnknownRun, "the log of flow %q does not say how its run %q ended", UserID(flowID), run)
		}
		return nil, err
	})
}

// errEnough ends a walk.
var errEnough = errors.New("enough")

// waitAttribute answers when an attribute has a value, or the one that is
// wanted. A value that was there between two others counts.
func (c *call) waitAttribute(req *wire.WaitAttributeRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil {
		err = checkName("attribute name", req.Name)
	}
	if err == nil {
		err = c.s.checkJSON("the value that is waited for", req.Equals)
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		if _, err := c.s.declared(c.tenant, f.Type).attributeType(req.Name); err != nil {
			return nil, err
		}
		if a := wanted(f.Attributes, req); a != nil {
			return attributesReply(f.RunId, []*wire.Attribute{a}), nil
		}
		if f.Status != wire.Status_RUNNING {
			return nil, neverSet(flowID, req.Name)
		}
		run := f.RunId
		x := &waiter{c: c, flowID: flowID, late: func() {
			c.lateWith(flowID, func(f *wire.Flow) *wire.Answer {
				return attributesReply(f.RunId, chosen(f.Attributes, []string{req.Name}))
			})
		}}
		x.heard = func(ev *wire.Event) func() {
			if a := wanted(ev.Attributes, req); a != nil {
				return func() { c.answer(attributesReply(run, []*wire.Attribute{a})) }
			}
			switch {
			case ev.Type == core.EventReset:
				run = ""
			case core.IsCloser(ev.Type):
				return func() { c.fail(neverSet(flowID, req.Name)) }
			}
			return nil
		}
		return nil, c.s.waiters.add(x, f)
	})
}

func neverSet(flowID, name string) error {
	return refuse(Closed, "the run of flow %q has ended, attribute %q will not get that value", UserID(flowID), name)
}

func wanted(as []*wire.Attribute, req *wire.WaitAttributeRequest) *wire.Attribute {
	i := slices.IndexFunc(as, func(a *wire.Attribute) bool { return a.Name == req.Name })
	if i < 0 || len(as[i].Value) == 0 && as[i].Blob == "" && as[i].Size == 0 {
		return nil
	}
	if len(req.Equals) > 0 && !sameJSON(as[i].Value, req.Equals) {
		return nil
	}
	return as[i]
}

// sameJSON compares JSON texts by what they mean; numbers by their digits.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	va, errA := decoded(a)
	vb, errB := decoded(b)
	return errA == nil && errB == nil && reflect.DeepEqual(va, vb)
}

func decoded(b []byte) (v any, err error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	err = d.Decode(&v)
	return v, err
}
