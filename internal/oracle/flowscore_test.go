package oracle_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/oracle"
	"github.com/perdure-dev/perdure/internal/wire"
)

// farm is a few flows on the bare core that do to each other whatever there is,
// by chance, with the reference model beside them.
type farm struct {
	t     *testing.T
	rnd   *rand.Rand
	o     *oracle.Flows
	flows map[string]*wire.Flow
	lsn   uint64
	now   int64
	msgs  int
	took  map[string]int // changing commands by kind
	types map[string]int // events by type
	// lose, when not nil, says which events are lost on their way to the model.
	lose func(*wire.Event) bool
	kept bool // flows are not deleted, which would end the counting of their events
	calm bool
}

var farmIDs = []string{"t/f/a", "t/f/b", "t/f/c", "t/f/a-child", "t/f/b-child", "t/f/c-child"}

func newFarm(t *testing.T, seed uint64) *farm {
	return &farm{t: t, rnd: rand.New(rand.NewPCG(seed, 11)), o: oracle.NewFlows(), flows: map[string]*wire.Flow{},
		took: map[string]int{}, types: map[string]int{}}
}

func (f *farm) one(of ...string) string { return of[f.rnd.IntN(len(of))] }

func (f *farm) apply(id string, e *wire.Entry) (core.Reply, error) {
	f.now += int64(f.rnd.IntN(40))
	e.Version, e.FlowId, e.Lsn, e.TimeUs, e.Epoch, e.Seed = core.EntryVersion, id, f.lsn+1, f.now, 1, f.rnd.Uint64()
	e.Slots = uint32(f.rnd.IntN(3))
	if f.calm {
		e.Slots = 100
	}
	out, err := core.Apply(f.flows[id], e)
	if err != nil || !out.Changed {
		return out.Reply, err
	}
	f.lsn = e.Lsn
	f.took[strings.TrimPrefix(fmt.Sprintf("%T", e.Command), "*wire.Entry_")]++
	if out.Flow == nil {
		delete(f.flows, id)
	} else {
		f.flows[id] = out.Flow
	}
	var told []*wire.Event
	for _, ev := range out.Events {
		f.types[ev.Type]++
		if f.lose == nil || !f.lose(ev) {
			told = append(told, ev)
		}
	}
	f.o.Events(id, told)
	return out.Reply, nil
}

// step draws a step: plain, waiting, with a WaitFor, under a key.
func (f *farm) step(id string) *wire.StepSpec {
	s := &wire.StepSpec{Name: f.one("work", "join", "check"), Retry: &wire.RetryPolicy{MaxAttempts: uint32(f.rnd.IntN(4)), InitialUs: 50}}
	switch f.rnd.IntN(8) {
	case 0, 1:
		s.Wait = f.wait(id)
	case 2:
		s.WaitFor = true
	case 3:
		s.ConcurrencyKey, s.ConcurrencyLimit = "k", 1
	case 4:
		s.Recover = &wire.StepSpec{Name: "undo"}
	}
	return s
}

func (f *farm) wait(id string) *wire.Wait {
	w := &wire.Wait{Conditions: []*wire.Condition{
		{Name: "mail", On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: f.one("in", "in2"), AtLeast: uint32(f.rnd.IntN(3)), AtMost: uint32(3 * f.rnd.IntN(2))}}},
		{Name: "late", On: &wire.Condition_TimerUs{TimerUs: int64(f.rnd.IntN(500))}},
	}}
	if f.rnd.IntN(3) == 0 && !strings.HasSuffix(id, "child") {
		start := &wire.StartFlow{Type: "child", Closes: true, Reuse: wire.StartFlow_Reuse(f.rnd.IntN(5)), Steps: []*wire.StepSpec{{Name: "work"}}}
		w.Conditions[0] = &wire.Condition{On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: id + "-child", Start: start}}}
	}
	if f.rnd.IntN(2) == 0 {
		w.Combinations = []*wire.Combination{{Of: []uint32{0}}, {Of: []uint32{1}}}
	}
	return w
}

func (f *farm) steps(id string) []*wire.StepSpec {
	out := []*wire.StepSpec{f.step(id)}
	for range f.rnd.IntN(2) {
		out = append(out, f.step(id))
	}
	return out
}

func (f *farm) attrs() []*wire.Attribute {
	var out []*wire.Attribute
	for range f.rnd.IntN(3) {
		out = append(out, &wire.Attribute{Name: f.one("x", "y", "z"), Value: make([]byte, f.rnd.IntN(3))})
	}
	return out
}

func (f *farm) message() *wire.Publish {
	f.msgs++
	return &wire.Publish{Channel: f.one("in", "in2"), Payload: fmt.Appendf(nil, "m%d", f.msgs), RequestId: f.one("", fmt.Sprint("r", f.msgs/2))}
}

func (f *farm) close() *wire.Close {
	c := &wire.Close{How: wire.Close_How(f.rnd.IntN(5)), Output: []byte("done"), Error: "because"}
	if c.How == wire.Close_IF_EMPTY {
		c.Channels, c.Otherwise = []string{"in"}, &wire.StepSpec{Name: "work"}
	}
	return c
}

// client does what a client may do.
func (f *farm) client(id string) {
	e, fl := &wire.Entry{}, f.flows[id]
	switch f.rnd.IntN(16) {
	case 0, 1, 2:
		s := &wire.StartFlow{Type: "t", Closes: true, Reuse: wire.StartFlow_Reuse(f.rnd.IntN(5)), Attributes: f.attrs(), Steps: f.steps(id), RequestId: fmt.Sprint("s", f.rnd.IntN(99))}
		s.DelayUs, s.TimeoutUs, s.RetentionUs = int64(f.rnd.IntN(2)*100), int64(f.rnd.IntN(3)*2000), int64(f.rnd.IntN(3)*1500)
		if f.kept {
			s.RetentionUs = 0
		}
		e.Command = &wire.Entry_StartFlow{StartFlow: s}
	case 3, 4, 5:
		e.Command = &wire.Entry_Publish{Publish: f.message()}
	case 6:
		e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: f.attrs()}}
	case 7, 8:
		u := &wire.Update{Name: "call", Attributes: f.attrs(), Publish: []*wire.Publish{f.message()}, RequestId: f.one("", "u1")}
		if fl != nil && f.rnd.IntN(2) == 0 {
			u.IfAttributesLsn = fl.AttributesLsn
		}
		if f.rnd.IntN(4) == 0 {
			u.Next = f.steps(id)
		}
		e.Command = &wire.Entry_Update{Update: u}
	case 9:
		e.Command = &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_How(f.rnd.IntN(3)), GraceUs: int64(f.rnd.IntN(300))}}
	case 10:
		e.Command = &wire.Entry_SkipTimer{SkipTimer: &wire.SkipTimer{}}
	case 11:
		e.Command = &wire.Entry_DropMessages{DropMessages: &wire.DropMessages{Channel: "in"}}
	case 12:
		if fl != nil {
			e.Command = &wire.Entry_Reset_{Reset_: &wire.Reset{Exec: 1, IfLastEvent: fl.LastEvent.CloneVT(), Attributes: f.attrs(), Steps: f.steps(id)}}
		}
	case 13:
		if !f.kept && f.rnd.IntN(3) == 0 {
			e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}
		}
	case 14:
		if f.rnd.IntN(3) == 0 {
			e.Command = &wire.Entry_Cancel{Cancel: &wire.Cancel{Channel: "in"}}
		}
	default:
		e.Command = &wire.Entry_Publish{Publish: f.message()}
	}
	if e.Command != nil {
		_, _ = f.apply(id, e) // refusals are part of it
	}
}

// work does one thing that is outstanding, and reports whether there was any.
func (f *farm) work(id string) bool {
	fl := f.flows[id]
	if fl == nil {
		return false
	}
	out := core.Outstanding(fl)
	if len(out) == 0 {
		return false
	}
	fx := out[f.rnd.IntN(len(out))]
	switch fx.Kind {
	case core.Dispatch:
		f.attempt(fx.Task)
	case core.Queue:
		_, _ = f.apply(id, &wire.Entry{Command: &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: fx.Exec}}})
	case core.SetTimer:
		if f.calm || f.rnd.IntN(4) == 0 {
			f.now = max(f.now, fx.AtUs)
		}
		_, _ = f.apply(id, &wire.Entry{Command: &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: fx.Exec}}})
	case core.Send:
		f.deliver(id, fx.Out)
	}
	return true
}

// deliver carries a send, now and then twice or without a report.
func (f *farm) deliver(from string, out *wire.Outgoing) {
	for range 1 + f.rnd.IntN(2) {
		e := &wire.Entry{}
		switch c := out.Send.Command.(type) {
		case *wire.Send_Start:
			e.Command = &wire.Entry_StartFlow{StartFlow: c.Start}
		case *wire.Send_Publish:
			e.Command = &wire.Entry_Publish{Publish: c.Publish}
		case *wire.Send_ChildClosed:
			e.Command = &wire.Entry_ChildClosed{ChildClosed: c.ChildClosed}
		case *wire.Send_Stop:
			e.Command = &wire.Entry_StopFlow{StopFlow: c.Stop}
		}
		r, err := f.apply(out.Send.FlowId, e)
		done := &wire.OutboxDone{Id: out.Id, RunId: r.RunID}
		if err != nil {
			done.Error = err.Error()
		}
		if f.calm || f.rnd.IntN(3) > 0 {
			_, _ = f.apply(from, &wire.Entry{Command: &wire.Entry_OutboxDone{OutboxDone: done}})
		}
	}
}

// attempt answers, loses or checkpoints an attempt.
func (f *farm) attempt(task *core.Task) {
	if !f.calm {
		switch f.rnd.IntN(10) {
		case 0:
			_, _ = f.apply(task.FlowID, &wire.Entry{Command: &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{Exec: task.Exec, Attempt: task.Attempt.Wire(), Reason: "lost"}}})
			return
		case 1:
			_, _ = f.apply(task.FlowID, &wire.Entry{Command: &wire.Entry_Checkpoint{Checkpoint: &wire.Checkpoint{Exec: task.Exec, Attempt: task.Attempt.Wire(), Data: []byte("half")}}})
			return
		}
	}
	r := &wire.StepResult{Exec: task.Exec, Attempt: task.Attempt.Wire(), Attributes: f.attrs()}
	if f.rnd.IntN(5) == 0 {
		r.Retry = &wire.Retry{Error: "boom"}
	}
	switch {
	case task.WaitPhase:
		if r.Retry == nil && !f.calm {
			r.Wait = f.wait(task.FlowID)
		}
	case f.calm:
		r.Close = &wire.Close{How: wire.Close_GRACEFUL, Output: []byte("in peace")}
	default:
		f.decide(task.FlowID, r)
	}
	if _, err := f.apply(task.FlowID, &wire.Entry{Command: &wire.Entry_StepResult{StepResult: r}}); err != nil {
		f.t.Fatalf("a result is refused: %v", err)
	}
}

func (f *farm) decide(id string, r *wire.StepResult) {
	switch f.rnd.IntN(5) {
	case 0:
		r.Close = f.close()
	case 1:
		r.Publish = []*wire.Publish{f.message()}
	case 2:
		r.CancelSteps = []string{"work"}
		r.Next = f.steps(id)
	case 3:
		r.Sends = []*wire.Send{{FlowId: f.one(farmIDs...), Command: &wire.Send_Publish{Publish: &wire.Publish{Channel: "in", Payload: []byte("from " + id)}}}}
		r.Next = f.steps(id)
	default:
		r.Next = f.steps(id)
		r.Events = []*wire.NewEvent{{Type: "said", Items: [][]byte{[]byte("x")}}}
	}
}

// run lets the farm live for a while, and then leaves it in peace.
func (f *farm) run(n int) error {
	for range n {
		id := farmIDs[f.rnd.IntN(len(farmIDs))]
		if f.rnd.IntN(3) == 0 {
			f.client(id)
		} else {
			f.work(id)
		}
	}
	f.o.Final(f.flows)
	f.calm = true
	for i := 0; i < 20_000; i++ {
		busy := false
		for _, id := range farmIDs {
			busy = f.work(id) || busy
		}
		if !busy {
			break
		}
	}
	f.o.Settled(f.flows)
	return f.o.Err()
}

// TestFlowsKeepTheirPromises: the model agrees with the core, until each kind of
// command has changed something and each kind of event was seen.
func TestFlowsKeepTheirPromises(t *testing.T) {
	took, types := map[string]int{}, map[string]int{}
	for seed := range uint64(80) {
		f := newFarm(t, seed)
		if err := f.run(1500); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for k, n := range f.took {
			took[k] += n
		}
		for k, n := range f.types {
			types[k] += n
		}
	}
	t.Log(took, types)
	for _, kind := range []string{"StartFlow", "Publish", "Cancel", "StepResult", "Redispatch", "FireTimer", "DeleteFlow", "SetAttributes", "StopFlow",
		"StartQueued", "Update", "Checkpoint", "SkipTimer", "DropMessages", "Reset_", "ChildClosed", "OutboxDone"} {
		if took[kind] < 10 {
			t.Errorf("%s succeeded %d times", kind, took[kind])
		}
	}
	for _, typ := range slices.Sorted(maps.Keys(noticed)) {
		if types[typ] < 10 {
			t.Errorf("%s was seen %d times", typ, types[typ])
		}
	}
}

// noticed is the events whose loss must be noticed.
var noticed = map[string]bool{
	"flow.started": true, "flow.reset": true, "flow.deleted": true, "flow.completed": true, "flow.failed": true, "flow.cancelled": true,
	"flow.terminated": true, "flow.timed_out": true, "step.preparing": true, "step.waiting": true, "step.started": true, "step.restarted": true,
	"step.retrying": true, "step.completed": true, "step.failed": true, "step.cancelled": true, "timer.fired": true, "timer.skipped": true,
	"channel.published": true, "channel.dropped": true, "attributes.set": true, "rpc.executed": true, "cancel.requested": true, "said": true,
}

func TestLostEventsOfFlows(t *testing.T) {
	for _, typ := range slices.Sorted(maps.Keys(noticed)) {
		found := false
		for seed := uint64(0); seed < 40 && !found; seed++ {
			f, seen := newFarm(t, seed), false
			f.kept = typ != "flow.deleted"
			f.lose = func(ev *wire.Event) bool {
				if ev.Type != typ || seen {
					return false
				}
				seen = true
				return true
			}
			err := f.run(600)
			if seen && err == nil {
				t.Errorf("the loss of a %s was not noticed with seed %d", typ, seed)
			}
			found = seen
		}
		if !found {
			t.Errorf("%s never happens", typ)
		}
	}
}
