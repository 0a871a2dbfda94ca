package core

import (
	"fmt"
	"math/rand/v2"
	"slices"
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
	switch s.n(4) {
	case 1:
		spec.Wait = &wire.Wait{Channel: "input", Count: 1, Idle: true}
	case 2:
		spec.Wait = &wire.Wait{Channel: s.one("results", "other", "input"), Count: uint32(1 + s.n(3)), Idle: s.n(4) == 1}
	}
	if s.n(2) == 0 {
		spec.Retry = &wire.RetryPolicy{MaxAttempts: uint32(s.n(4)), InitialUs: int64(s.n(200)), MaxUs: int64(s.n(2) * 500), TotalUs: int64(s.n(2) * 900)}
	}
	return spec
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
		r.Retry = &wire.Retry{Error: "boom", AfterUs: int64(s.n(3) * 400)}
	}
	switch {
	case s.n(3) == 0:
		r.Next, r.Publish, r.Attributes = s.specs(0), s.publishes(), s.attributes()
	case st.Spec.Name == "tool":
		s.msg++
		r.Publish = []*wire.Publish{{Channel: "results", Payload: fmt.Appendf(nil, "results/%d", s.msg)}}
	default:
		r.Next = s.agentNext()
	}
	return r
}

// command gives the next entry.
func (s *script) command() *wire.Entry {
	op := s.n(32)
	s.b.nowUs += int64(s.n(3) * s.n(200))
	e := s.b.entry()
	switch st := s.step(); {
	case op == 0 || s.b.f == nil:
		e.Command = &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "agent", Attributes: s.attributes(), Steps: s.specs(1),
			Publish: s.publishes(), RetentionUs: int64(s.n(2) * 3000), RequestId: s.one("", "k1", "k2")}}
	case op < 8:
		e.Command = &wire.Entry_Publish{Publish: s.publish()}
	case op < 11:
		c := &wire.Cancel{Channel: s.one("input", "results", ""), Reason: s.one("", "user")}
		if st != nil && s.n(2) == 0 {
			c.Scope = st.Scope
		} else if len(s.b.f.Channels) > 0 && s.n(2) == 0 {
			c.Scope = s.b.f.Channels[0].Pending[0].Id
		}
		e.Command = &wire.Entry_Cancel{Cancel: c}
	case op < 13 && st != nil:
		e.Command = &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{Exec: st.Exec, Attempt: st.Attempt, Reason: "lost"}}
		s.stale = st.Attempt
	case op < 16:
		exec := uint64(0)
		if st != nil && s.n(3) > 0 {
			exec = st.Exec
		}
		if at := s.b.open[exec].AtUs; at > s.b.nowUs && s.n(2) == 0 {
			s.b.nowUs, e.TimeUs = at, at
		}
		e.Command = &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: exec}}
	case op == 16 && s.n(4) == 0:
		e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}
	case op < 19:
		e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: s.attributes()}}
	case op == 19:
		s.b.epoch++
		e.Epoch = s.b.epoch
		e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: s.attributes()}}
	case st == nil:
		e.Command = &wire.Entry_Publish{Publish: s.publish()}
	case op == 20 && s.stale != nil:
		e.Command = &wire.Entry_StepResult{StepResult: &wire.StepResult{Exec: st.Exec, Attempt: s.stale}}
	default:
		if i := slices.IndexFunc(s.b.f.Steps, func(o *wire.Step) bool { return o.State == wire.Step_STARTED }); st.State != wire.Step_STARTED && i >= 0 {
			st = s.b.f.Steps[i]
		}
		e.Command = &wire.Entry_StepResult{StepResult: s.result(st)}
	}
	return e
}

// play runs the script to its end and gives what was accepted and refused.
func (s *script) play() (accepted int, refused map[Code]int, broken error) {
	refused = map[Code]int{}
	for i := 0; len(s.data) > 0; i++ {
		e := s.command()
		_, err, broken := s.b.apply(e)
		if broken != nil {
			return accepted, refused, fmt.Errorf("command %d, %v: %w", i, e, broken)
		}
		if err != nil {
			refused[err.(*Error).Code]++
		} else {
			accepted++
		}
	}
	if err := s.b.replay(); err != nil {
		return accepted, refused, err
	}
	return accepted, refused, s.b.tasksKept()
}

func TestRandomCommands(t *testing.T) {
	runs := 250
	if testing.Short() {
		runs = 60
	}
	accepted, refused := 0, map[Code]int{}
	for seed := range runs {
		rnd := rand.New(rand.NewPCG(uint64(seed), 7))
		data := make([]byte, 200+rnd.IntN(3000))
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		n, r, err := (&script{b: newBook(), data: data}).play()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		accepted += n
		for c, k := range r {
			refused[c] += k
		}
	}
	t.Logf("%d accepted, refused %v", accepted, refused)
	for _, c := range []Code{Exists, Busy, QueueFull, StaleAttempt, NotDue} {
		if refused[c] == 0 {
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
		if _, _, err := (&script{b: newBook(), data: data}).play(); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzApplyDecoded: whatever decodes as a flow and an entry is applied or
// refused, without a panic, the same each time, and a refusal changes nothing.
func FuzzApplyDecoded(f *testing.F) {
	s := &script{b: newBook(), data: make([]byte, 1200)}
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range s.data {
		s.data[i] = byte(rnd.Uint32())
	}
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
		if s.Spec == nil || s.State > wire.Step_BACKOFF || s.State < 0 {
			return fmt.Errorf("step %d has no spec", s.Exec)
		}
	}
	return checkShape(f)
}
