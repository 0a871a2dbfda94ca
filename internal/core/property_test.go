package core

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

// script draws commands from bytes. The same bytes give the same commands, so a
// failing input is a story that can be told again.
type script struct {
	b     *book
	data  []byte
	msg   int // number of the last message proposed
	stale *wire.AttemptID
	slots bool // entries have few slots, or none
	depth int  // of recovery steps
	seen  counts
}

// counts is what a script has reached.
type counts struct {
	accepted map[string]int // changing ones, by kind of command
	refused  map[Code]int
}

func newScript(data []byte) *script {
	s := &script{b: newBook(), data: data, seen: counts{map[string]int{}, map[Code]int{}}}
	s.slots = s.n(2) == 0
	return s
}

func kindOf(e *wire.Entry) string {
	return strings.TrimPrefix(fmt.Sprintf("%T", e.Command), "*wire.Entry_")
}

func (s *script) n(below int) int {
	if len(s.data) == 0 {
		return 0
	}
	v := int(s.data[0]) % below
	s.data = s.data[1:]
	return v
}

func (s *script) one(of ...string) string { return of[s.n(len(of))] }

func (s *script) publish() *wire.Publish {
	ch := s.one("input", "results", "input", "other")
	s.msg++
	p := &wire.Publish{Channel: ch, Payload: fmt.Appendf(nil, "%s/%d", ch, s.msg), OnBusy: wire.Publish_OnBusy(s.n(3))}
	if s.n(4) == 0 {
		p.RequestId = fmt.Sprint("r", s.n(100))
	}
	if s.n(4) == 0 {
		moved(p)
	}
	if s.n(6) == 0 {
		p.MaxPending = uint32(s.n(4))
	}
	return p
}

func (s *script) publishes() []*wire.Publish {
	var ps []*wire.Publish
	for range s.n(4) {
		ps = append(ps, s.publish())
	}
	return ps
}

func (s *script) spec() *wire.StepSpec {
	spec := &wire.StepSpec{Name: s.one("turn", "tool", "continue")}
	switch s.n(8) {
	case 1:
		spec.Wait = &wire.Wait{Channel: "input", Count: 1, Idle: true}
	case 2:
		spec.Wait = &wire.Wait{Channel: s.one("results", "other", "input"), Count: uint32(1 + s.n(3)), Idle: s.n(4) == 1}
	case 3, 4:
		spec.Wait = s.conditions()
	case 5:
		spec.WaitFor, spec.Locals = true, []byte("l")
	}
	if s.n(2) == 0 {
		spec.Retry = &wire.RetryPolicy{MaxAttempts: uint32(s.n(4)), InitialUs: int64(s.n(200)), MaxUs: int64(s.n(2) * 500), TotalUs: int64(s.n(2) * 900)}
		if s.n(3) == 0 {
			spec.Retry.BackoffPermille = 1500
		}
	}
	if s.n(6) == 0 {
		spec.ConcurrencyKey, spec.ConcurrencyLimit = s.one("k1", "k2"), 1
	}
	if s.n(5) == 0 && s.depth == 0 {
		s.depth++
		spec.Recover = s.spec()
		s.depth--
	}
	spec.Async = s.n(5) == 0
	return spec
}

// conditions is a wait on channels, timers and children, in all or in some sets.
func (s *script) conditions() *wire.Wait {
	w := &wire.Wait{}
	for range 1 + s.n(3) {
		c := &wire.Condition{Name: s.one("", "a", "b")}
		switch s.n(6) {
		case 0, 1, 2:
			least := uint32(s.n(3))
			on := &wire.OnChannel{Name: s.one("input", "results", "other"), AtLeast: least}
			if s.n(2) == 0 {
				on.AtMost = max(1, least) + uint32(s.n(3))
			}
			c.On = &wire.Condition_Channel{Channel: on}
		case 3:
			c.On = &wire.Condition_TimerUs{TimerUs: int64(s.n(3) * 150)}
		case 4:
			c.On = &wire.Condition_AtUs{AtUs: s.b.nowUs + int64(s.n(4)*100) - 100}
		default:
			c.On = &wire.Condition_Flow{Flow: s.child()}
		}
		w.Conditions = append(w.Conditions, c)
	}
	for range s.n(3) {
		set := &wire.Combination{}
		for i := range w.Conditions {
			if s.n(2) == 0 {
				set.Of = append(set.Of, uint32(i))
			}
		}
		if len(set.Of) > 0 {
			w.Combinations = append(w.Combinations, set)
		}
	}
	return w
}

func (s *script) child() *wire.OnFlow {
	on := &wire.OnFlow{FlowId: s.one("s1/c1", "s1/c2", "s1/c1", "other/c")}
	if s.n(4) > 0 {
		on.Start = &wire.StartFlow{Type: "child", Closes: true, Steps: []*wire.StepSpec{{Name: "c"}}, Reuse: wire.StartFlow_Reuse(s.n(5))}
	}
	return on
}

func (s *script) sends() []*wire.Send {
	var out []*wire.Send
	for range s.n(3) {
		send := &wire.Send{FlowId: s.one("s1/c1", "s1/c2", "s1/c3", "else/x")}
		switch s.n(3) {
		case 0:
			send.Command = &wire.Send_Start{Start: &wire.StartFlow{Type: "child", Closes: true}}
		case 1:
			send.Command = &wire.Send_Publish{Publish: &wire.Publish{Channel: "input", Payload: []byte("x"), RequestId: s.one("", "own")}}
		default:
			send.Command = &wire.Send_Stop{Stop: &wire.StopFlow{}}
		}
		out = append(out, send)
	}
	return out
}

func (s *script) close() *wire.Close {
	if !s.b.f.GetCloses() && s.n(20) > 0 || s.n(3) > 0 {
		return nil
	}
	c := &wire.Close{How: wire.Close_How(s.n(5)), Output: []byte("done"), Error: "failed"}
	if c.How == wire.Close_IF_EMPTY {
		c.Channels, c.Otherwise = []string{s.one("input", "results")}, s.spec()
	}
	return c
}

func (s *script) specs(least int) []*wire.StepSpec {
	var specs []*wire.StepSpec
	for range least + s.n(3) {
		specs = append(specs, s.spec())
	}
	return specs
}

func (s *script) attributes() []*wire.Attribute {
	var as []*wire.Attribute
	for range s.n(4) {
		as = append(as, &wire.Attribute{Name: s.one("a", "b", "c", "d", "e"), Value: make([]byte, s.n(3))})
		if s.n(9) == 0 {
			as[len(as)-1].Value, as[len(as)-1].Blob, as[len(as)-1].Size = nil, "blob", 9
		}
	}
	return as
}

// step picks a live step, or nil.
func (s *script) step() *wire.Step {
	if s.b.f == nil || len(s.b.f.Steps) == 0 {
		return nil
	}
	return s.b.f.Steps[s.n(len(s.b.f.Steps))]
}

// agentNext is what the built-in agent does: rest, or tools and their join.
func (s *script) agentNext() []*wire.StepSpec {
	turn := &wire.StepSpec{Name: "turn", Prefetch: true, Wait: &wire.Wait{Channel: "input", Count: 1, Idle: true}}
	tools := s.n(4)
	if tools == 0 {
		return []*wire.StepSpec{turn}
	}
	var next []*wire.StepSpec
	for range tools {
		next = append(next, &wire.StepSpec{Name: "tool", Retry: &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 100}})
	}
	return append(next, &wire.StepSpec{Name: "continue", Wait: &wire.Wait{Channel: "results", Count: uint32(tools)}})
}

func (s *script) result(st *wire.Step) *wire.StepResult {
	r := &wire.StepResult{Exec: st.Exec, Attempt: st.Attempt}
	for i := range s.n(3) {
		r.Events = append(r.Events, &wire.NewEvent{Type: s.one("a", "b"), Items: make([][]byte, i)})
	}
	if s.n(4) == 0 {
		r.Retry = &wire.Retry{Error: "boom", AfterUs: int64(s.n(3) * 400), Permanent: s.n(6) == 0}
		r.Checkpoint = []byte(s.one("", "half"))
	}
	switch {
	case waitPhase(st) && s.n(12) > 0:
		if r.Retry == nil && s.n(4) > 0 {
			r.Wait = s.conditions()
		}
		r.Locals, r.Publish, r.Attributes = []byte("locals"), s.publishes(), s.attributes()
		if s.n(5) == 0 {
			r.Sends = s.sends()
		}
	case s.n(3) == 0:
		r.Next, r.Publish, r.Attributes, r.Close = s.specs(0), s.publishes(), s.attributes(), s.close()
		if s.n(2) == 0 {
			r.Sends = s.sends()
		}
		switch s.n(6) {
		case 0:
			r.CancelSteps = []string{s.one("turn", "tool", "continue")}
		case 1:
			if o := s.step(); o != nil {
				r.CancelExecs = []uint64{o.Exec}
			}
		}
	case st.Spec.Name == "tool":
		s.msg++
		r.Publish = []*wire.Publish{{Channel: "results", Payload: fmt.Appendf(nil, "results/%d", s.msg)}}
	default:
		r.Next, r.Close = s.agentNext(), s.close()
	}
	return r
}

func (s *script) start() *wire.StartFlow {
	c := &wire.StartFlow{Type: "agent", Attributes: s.attributes(), Steps: s.specs(1),
		Publish: s.publishes(), RetentionUs: int64(s.n(2) * 3000), RequestId: s.one("", "k1", "k2", "k3")}
	if s.n(3) == 0 {
		return c
	}
	c.Closes, c.Reuse = true, wire.StartFlow_Reuse(s.n(5))
	if s.n(3) == 0 {
		c.DelayUs = int64(s.n(200))
	}
	if s.n(3) == 0 {
		c.TimeoutUs = int64(s.n(40) * 200)
	}
	if s.n(3) == 0 {
		c.Parent = &wire.Link{FlowId: s.one("s1/p", "s1/p", "else/p"), RunId: "r", Exec: uint64(1 + s.n(3)), Condition: 0}
	}
	if s.n(8) == 0 && c.Parent != nil {
		return &wire.StartFlow{Reuse: wire.StartFlow_ATTACH, Parent: c.Parent, RequestId: c.RequestId}
	}
	return c
}

// reset goes back to some step, with some of what was consumed since.
func (s *script) reset() *wire.Reset {
	c := &wire.Reset{Exec: 1, Attributes: s.attributes(), Steps: s.specs(1), Reason: "again"}
	if l := s.b.f.LastEvent; s.n(8) > 0 {
		c.IfLastEvent = &wire.Cursor{Lsn: l.GetLsn(), N: l.GetN()}
	}
	h := s.b.history
	c.Publish = h[len(h)-s.n(min(len(h), 3)+1):]
	return c
}

func (s *script) update() *wire.Update {
	c := &wire.Update{Name: "call", Attributes: s.attributes(), Publish: s.publishes(), RequestId: s.one("", "", "u1", "u2", "u3", "r1"), Output: []byte("out")}
	switch s.n(4) {
	case 0:
		c.Next = s.specs(0)
	case 1:
		c.Sends = s.sends()
	}
	switch s.n(5) {
	case 0:
		c.IfAttributesLsn = s.b.f.AttributesLsn
	case 1:
		c.IfAttributesLsn = s.b.f.AttributesLsn + 1
	case 2:
		c.RunId = s.one(s.b.f.RunId, "run_else")
	}
	if s.n(6) == 0 {
		c.Close = s.close()
	}
	return c
}

// childClosed tells of a child that a step waits for, or of one that none does.
func (s *script) childClosed() *wire.ChildClosed {
	c := &wire.ChildClosed{Exec: 1, FlowId: "s1/c1", RunId: "r", Status: wire.Status_COMPLETED, Output: []byte("o")}
	for _, st := range s.b.f.Steps {
		for i := range st.Conditions {
			if on := st.Spec.Wait.Conditions[i].GetFlow(); on != nil && s.n(3) > 0 {
				c.Exec, c.Condition, c.FlowId = st.Exec, uint32(i), on.FlowId
				return c
			}
		}
	}
	return c
}

func (s *script) outboxDone() *wire.OutboxDone {
	c := &wire.OutboxDone{Id: 1, RunId: "run_c"}
	if o := s.b.f.Outbox; len(o) > 0 {
		c.Id = o[s.n(len(o))].Id
	}
	if s.n(3) == 0 {
		c.Error, c.RunId = "no such flow", ""
	}
	return c
}

// command gives the next entry.
func (s *script) command() *wire.Entry {
	op := s.n(64)
	s.b.nowUs += int64(s.n(3) * s.n(200))
	e := s.b.entry()
	if s.slots {
		e.Slots = [...]uint32{0, 1, 2, math.MaxUint32}[s.n(4)]
	}
	st := s.step()
	if over := s.b.f.GetStatus() != wire.Status_RUNNING; op < 2 || s.b.f == nil || over && s.n(2) == 0 {
		e.Command = &wire.Entry_StartFlow{StartFlow: s.start()}
		return e
	}
	if !s.common(e, op, st) {
		s.ofStep(e, op, st)
	}
	return e
}

// common draws the commands that need no step.
func (s *script) common(e *wire.Entry, op int, st *wire.Step) bool {
	f := s.b.f
	switch {
	case op < 14:
		e.Command = &wire.Entry_Publish{Publish: s.publish()}
	case op < 17:
		c := &wire.Cancel{Channel: s.one("input", "results", ""), Reason: s.one("", "user")}
		if st != nil && s.n(2) == 0 {
			c.Scope = st.Scope
		} else if len(f.Channels) > 0 && s.n(2) == 0 {
			c.Scope = f.Channels[0].Pending[0].Id
		}
		e.Command = &wire.Entry_Cancel{Cancel: c}
	case op < 22:
		s.fire(e, st)
	case op == 22 && s.n(4) == 0:
		e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}
	case op < 25:
		e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: s.attributes()}}
	case op == 25:
		s.b.epoch++
		e.Epoch = s.b.epoch
		e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: s.attributes()}}
	case op < 29:
		e.Command = &wire.Entry_Update{Update: s.update()}
	case op == 29 && s.n(2) == 0:
		e.Command = &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_How(s.n(3)), Reason: s.one("", "why"), GraceUs: int64(s.n(3) * 400), RunId: s.one("", f.RunId, "run_else"), RequestId: s.one("", "", "k1", "k2")}}
	case op == 30 || op == 38:
		e.Command = &wire.Entry_SkipTimer{SkipTimer: &wire.SkipTimer{Step: s.one("", "", "turn"), Condition: s.one("", "", "", "a")}}
	case op == 31:
		c := &wire.DropMessages{Channel: s.one("input", "results", "other")}
		if len(f.Channels) > 0 && s.n(2) == 0 {
			ch := f.Channels[s.n(len(f.Channels))]
			c.Channel, c.Ids = ch.Name, []string{ch.Pending[s.n(len(ch.Pending))].Id, "none"}
		}
		e.Command = &wire.Entry_DropMessages{DropMessages: c}
	case op == 32:
		e.Command = &wire.Entry_Reset_{Reset_: s.reset()}
	case op < 35 && s.n(2) == 0 || op < 34:
		e.Command = &wire.Entry_ChildClosed{ChildClosed: s.childClosed()}
	case op < 38:
		e.Command = &wire.Entry_OutboxDone{OutboxDone: s.outboxDone()}
	default:
		return false
	}
	return true
}

func (s *script) fire(e *wire.Entry, st *wire.Step) {
	exec := uint64(0)
	if st != nil && s.n(3) > 0 {
		exec = st.Exec
	}
	var at int64
	timers := slices.DeleteFunc(Outstanding(s.b.f), func(fx Effect) bool { return fx.Kind != SetTimer })
	if len(timers) > 0 && s.n(5) > 0 {
		fx := timers[s.n(len(timers))]
		at, exec = fx.AtUs, fx.Exec
	}
	if at > s.b.nowUs && s.n(2) == 0 {
		s.b.nowUs, e.TimeUs = at, at
	}
	e.Command = &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: exec}}
}

// ofStep draws the commands of workers: mostly for a step in the right state.
func (s *script) ofStep(e *wire.Entry, op int, st *wire.Step) {
	in := func(state wire.Step_State) {
		if i := slices.IndexFunc(s.b.f.Steps, func(o *wire.Step) bool { return o.State == state }); st.State != state && i >= 0 {
			st = s.b.f.Steps[i]
		}
	}
	switch {
	case st == nil:
		e.Command = &wire.Entry_Publish{Publish: s.publish()}
	case op < 42 || !IsRunning(s.b.f) && s.n(2) == 0:
		in(wire.Step_QUEUED)
		if st.State != wire.Step_QUEUED && s.n(8) > 0 {
			s.fire(e, st)
			return
		}
		e.Command = &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: st.Exec}}
	case op < 45:
		in(wire.Step_STARTED)
		e.Command = &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{Exec: st.Exec, Attempt: st.Attempt, Reason: "lost", Checkpoint: []byte(s.one("", "cp"))}}
		s.stale = st.Attempt
	case op == 45 && s.stale != nil:
		e.Command = &wire.Entry_StepResult{StepResult: &wire.StepResult{Exec: st.Exec, Attempt: s.stale}}
	case op == 46:
		in(wire.Step_STARTED)
		e.Command = &wire.Entry_Checkpoint{Checkpoint: &wire.Checkpoint{Exec: st.Exec, Attempt: st.Attempt, Data: []byte("half")}}
	default:
		in(wire.Step_STARTED)
		e.Command = &wire.Entry_StepResult{StepResult: s.result(st)}
	}
}

// play runs the script to its end and gives the promise that was broken.
func (s *script) play() error {
	for i := 0; len(s.data) > 0; i++ {
		e := s.command()
		out, err, broken := s.b.apply(e)
		if broken != nil {
			return fmt.Errorf("command %d, %v: %w", i, e, broken)
		}
		switch {
		case err != nil:
			s.seen.refused[err.(*Error).Code]++
		case out.Changed:
			s.seen.accepted[kindOf(e)]++
			for _, ev := range out.Events {
				s.seen.accepted[ev.Type]++
			}
		}
	}
	if err := s.b.replay(); err != nil {
		return err
	}
	return s.b.tasksKept()
}

// reached is what random commands must have done often.
var reached = []string{
	"StartFlow", "Publish", "Cancel", "StepResult", "Redispatch", "FireTimer", "DeleteFlow", "SetAttributes", "StopFlow", "StartQueued",
	"Update", "Checkpoint", "SkipTimer", "DropMessages", "Reset_", "ChildClosed", "OutboxDone",
	EventStepPreparing, EventStepWaiting, EventStepStarted, EventStepRestarted, EventStepRetrying, EventStepCompleted, EventStepFailed, EventStepCancelled,
	EventTimerFired, EventTimerSkipped, EventPublished, EventDropped, EventAttributesSet, EventRPC, EventCancelRequested, EventReset,
	EventCompleted, EventFailed, EventCancelled, EventTerminated, EventTimedOut, EventDeleted,
}

func TestRandomCommands(t *testing.T) {
	runs := 250
	if testing.Short() {
		runs = 80
	}
	all := counts{map[string]int{}, map[Code]int{}}
	for seed := range runs {
		rnd := rand.New(rand.NewPCG(uint64(seed), 7))
		data := make([]byte, 200+rnd.IntN(4000))
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		s := newScript(data)
		if err := s.play(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for k, n := range s.seen.accepted {
			all.accepted[k] += n
		}
		for c, n := range s.seen.refused {
			all.refused[c] += n
		}
	}
	t.Logf("accepted %v, refused %v", all.accepted, all.refused)
	for _, k := range reached {
		if all.accepted[k] < runs/40 {
			t.Errorf("%s happened %d times: the test does not reach it", k, all.accepted[k])
		}
	}
	for _, c := range []Code{Exists, Busy, QueueFull, StaleAttempt, NotDue, Invalid, KeyReused, Conflict, Closed, NotFound} {
		if all.refused[c] == 0 {
			t.Errorf("no command was refused with %s: the test does not reach it", c)
		}
	}
}

// FuzzApply searches for a story that breaks a promise.
func FuzzApply(f *testing.F) {
	for seed := range 8 {
		rnd := rand.New(rand.NewPCG(uint64(seed), 9))
		data := make([]byte, 300)
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 4096 {
			return
		}
		if err := newScript(data).play(); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzApplyDecoded: whatever decodes as a flow and an entry is applied or
// refused, without a panic, the same each time, and a refusal changes nothing.
func FuzzApplyDecoded(f *testing.F) {
	data := make([]byte, 1200)
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	s := newScript(data)
	for len(s.data) > 0 {
		flow, e := mustMarshal(s.b.f), s.command()
		p, _ := e.MarshalVT()
		f.Add(flow, p)
		if _, _, broken := s.b.apply(e); broken != nil {
			f.Fatal(broken)
		}
	}
	f.Fuzz(func(t *testing.T, flow, entry []byte) {
		load := func() (*wire.Flow, *wire.Entry) {
			e := &wire.Entry{}
			if e.UnmarshalVT(entry) != nil {
				t.Skip()
			}
			if len(flow) == 0 {
				return nil, e
			}
			fl := &wire.Flow{}
			if fl.UnmarshalVT(flow) != nil {
				t.Skip()
			}
			return fl, e
		}
		f1, e1 := load()
		f2, e2 := load()
		// The state is the core's own; only a flow that the core could have
		// written is promised to be handled.
		if f1 != nil && (f1.LastEvent == nil || checkShapeDecoded(f1) != nil) {
			t.Skip()
		}
		before := mustMarshal(f1)
		out1, err1 := Apply(f1, e1)
		out2, err2 := Apply(f2, e2)
		if (err1 == nil) != (err2 == nil) || string(mustMarshal(out1.Flow)) != string(mustMarshal(out2.Flow)) {
			t.Fatalf("two runs differ: %v, %v", err1, err2)
		}
		if err1 != nil && string(before) != string(mustMarshal(f1)) {
			t.Fatalf("refused with %v, but the flow changed", err1)
		}
	})
}

func checkShapeDecoded(f *wire.Flow) error {
	for _, s := range f.Steps {
		if s.Spec == nil || s.State > wire.Step_DELAYED || s.State < 0 {
			return fmt.Errorf("step %d has no spec", s.Exec)
		}
	}
	return checkShape(f)
}
