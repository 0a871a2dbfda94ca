package flows

import (
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// stop closes a run, or asks its handlers to wind down.
func (c *call) stop(req *wire.StopRequest) {
	flowID, err := c.flow(req.FlowId)
	switch {
	case err != nil:
	case wire.StopFlow_How_name[int32(req.How)] == "":
		err = refuse(Invalid, "the way to stop %d is not known", req.How)
	case len(req.Reason) > core.MaxReason:
		err = refuse(TooLarge, "the reason has %d bytes, at most %d", len(req.Reason), core.MaxReason)
	default:
		err = checkTime("grace", req.GraceUs)
	}
	if err != nil {
		c.fail(err)
		return
	}
	e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{
		How: req.How, Reason: orSaid(req.Reason, "stopped by a client"), GraceUs: req.GraceUs, RunId: req.RunId}}}
	c.propose(e, func(rep core.Reply) *wire.Answer {
		return &wire.Answer{Result: &wire.Answer_Stop{Stop: &wire.StopReply{RunId: rep.RunID, Status: rep.Status}}}
	})
}

func orSaid(reason, otherwise string) string {
	if reason == "" {
		return otherwise
	}
	return reason
}

// delete ends a flow and everything of it.
func (c *call) delete(req *wire.DeleteRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil && len(req.Reason) > core.MaxReason {
		err = refuse(TooLarge, "the reason has %d bytes, at most %d", len(req.Reason), core.MaxReason)
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.propose(&wire.Entry{FlowId: flowID, Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: orSaid(req.Reason, "deleted by a client")}}}, doneAnswer)
}

// skipTimer makes a timer of a waiting step due.
func (c *call) skipTimer(req *wire.SkipTimerRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil && (len(req.Step) > core.MaxName || len(req.Condition) > core.MaxName) {
		err = refuse(Invalid, "a step or condition name has more than %d bytes", core.MaxName)
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		if d := c.s.declared(c.tenant, f.Type); req.Step != "" && d.known {
			if _, err := d.step(req.Step); err != nil {
				return nil, err
			}
		}
		e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_SkipTimer{SkipTimer: &wire.SkipTimer{Exec: req.Exec, Step: req.Step, Condition: req.Condition}}}
		return nil, c.submit(e, doneAnswer)
	})
}
