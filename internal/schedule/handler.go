package schedule

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// refusals is how often the result of a turn may be refused before the turn is
// done without its starts.
const refusals = 3

// Run implements worker.Handler.
func (s *Schedules) Run(_ context.Context, call *worker.Call) *wire.StepResult {
	return s.step(call.Work)
}

func (s *Schedules) step(w *partition.Work) *wire.StepResult {
	var res *wire.StepResult
	var err error
	if w.Name == stepWatch {
		res, err = closed(w)
	} else {
		res, err = s.turn(w)
	}
	if err != nil {
		return s.Fail(w, err)
	}
	return res
}

// Fail implements worker.Handler: a step of a schedule is tried again for ever.
func (s *Schedules) Fail(_ *partition.Work, err error) *wire.StepResult {
	return &wire.StepResult{Retry: &wire.Retry{Error: err.Error()}}
}

// closed tells the schedule that the flow it watches is over.
func closed(w *partition.Work) (*wire.StepResult, error) {
	o := order{Op: opClosed, Flow: string(w.Input)}
	if len(w.Conditions) > 0 && w.Conditions[0].RunId == "" { // no run: it could not be started
		if o.Refused = w.Conditions[0].Error; o.Refused == "" {
			o.Refused = "it could not be started"
		}
	}
	b, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	return &wire.StepResult{Publish: []*wire.Publish{{Channel: channelControl, Payload: b}}}, nil
}

// turn is one step "tick".
func (s *Schedules) turn(w *partition.Work) (*wire.StepResult, error) {
	sched, err := load(w.Attributes)
	if err != nil {
		return nil, err
	}
	orders, err := ordersOf(w.Matched)
	if err != nil {
		return nil, err
	}
	d, err := sched.decide(s.cfg.Clock.Now().UnixMicro(), orders)
	if err != nil {
		return nil, err
	}
	if w.Retries >= refusals {
		sched.giveUp(&d)
	}
	tenant, _ := split(w.FlowID)
	res := &wire.StepResult{Next: []*wire.StepSpec{tick(d.wakeUs)}}
	for _, deed := range d.deeds {
		s.do(res, tenant, sched, deed)
	}
	res.Attributes, err = sched.attributes()
	return res, err
}

// giveUp leaves out the starts of a turn that was refused again and again.
func (s *schedule) giveUp(d *decided) {
	for _, deed := range d.deeds {
		if deed.stops {
			continue
		}
		s.book.Started--
		s.book.Skipped++
		s.book.Error = fmt.Sprintf("the start of flow %q was refused", deed.id)
		if s.book.Running == deed.id {
			s.book.Running = ""
		}
	}
	d.deeds = nil
}

// do puts one deed into a result.
func (s *Schedules) do(res *wire.StepResult, tenant string, sched *schedule, d deed) {
	whole := tenant + "/f/" + d.id
	if d.stops {
		stop := &wire.StopFlow{How: d.stop, Reason: fmt.Sprintf("schedule %q starts the next one", sched.spec.Id)}
		res.Sends = append(res.Sends, &wire.Send{FlowId: whole, Command: &wire.Send_Stop{Stop: stop}})
		return
	}
	cmd := s.command(tenant, sched, d.id)
	if d.watch {
		res.Next = append(res.Next, watch(whole, d.id, cmd))
		return
	}
	res.Sends = append(res.Sends, &wire.Send{FlowId: whole, Command: &wire.Send_Start{Start: cmd}})
}

// command gives the start of one flow: as its worker declares it now, or, when
// that is not known or no longer fits, as it was when the schedule was put. A
// start that was accepted then is never lost.
func (s *Schedules) command(tenant string, sched *schedule, id string) *wire.StartFlow {
	req := sched.spec.Start.CloneVT()
	req.FlowId = id
	if _, cmd, err := s.cfg.Starter(tenant, req); err == nil {
		return cmd
	}
	return sched.start.CloneVT()
}

// ordersOf reads messages of the channel "control".
func ordersOf(msgs []*wire.Message) ([]order, error) {
	out := make([]order, len(msgs))
	for i, m := range msgs {
		if err := json.Unmarshal(m.Payload, &out[i]); err != nil {
			return nil, fmt.Errorf("order %s of schedule: %w", m.Id, err)
		}
	}
	return out, nil
}
