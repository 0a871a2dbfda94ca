package oracle_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/oracle"
	"github.com/perdure-dev/perdure/internal/wire"
)

// session is one agent session on the bare core, with a handler that decides by
// chance. It shows that the oracle accepts what the core does, and notices when
// something is taken away from it.
type session struct {
	t     *testing.T
	rnd   *rand.Rand
	o     *oracle.Oracle
	f     *wire.Flow
	lsn   uint64
	now   int64
	calls int
	open  []*core.Task
	// lose, when not nil, says which events are lost on their way.
	lose func(*wire.Event) bool
	// kept: the session is not deleted, which would end the counting of events.
	kept bool
}

var turnStep = &wire.StepSpec{Name: "turn", Wait: &wire.Wait{Channel: "input", Count: 1, Idle: true}, Retry: retryPolicy}
var retryPolicy = &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 20}

func (s *session) apply(e *wire.Entry) (core.Reply, bool) {
	s.now += 10
	e.Lsn, e.TimeUs, e.Epoch, e.FlowId, e.Seed = s.lsn+1, s.now, 1, "s1", s.rnd.Uint64()
	out, err := core.Apply(s.f, e)
	if err != nil || !out.Changed {
		return out.Reply, err == nil
	}
	s.lsn, s.f = e.Lsn, out.Flow
	for _, ev := range out.Events {
		if s.lose == nil || !s.lose(ev) {
			s.o.Event("s1", ev)
		}
	}
	s.open = nil
	if s.f != nil {
		for _, fx := range core.Outstanding(s.f) {
			if fx.Kind == core.Dispatch {
				s.open = append(s.open, fx.Task)
			}
		}
	}
	return out.Reply, true
}

// do is an operation of the client, whose answer is lost now and then.
func (s *session) do(op oracle.Op, e *wire.Entry) {
	op.FlowID, op.From = "s1", s.now
	r, ok := s.apply(e)
	op.To = s.now
	switch {
	case !ok:
	case s.rnd.IntN(8) == 0:
		s.o.Sent(op)
	default:
		op.RunID = r.RunID
		if len(r.MessageIDs) > 0 {
			op.MessageID = r.MessageIDs[0]
		}
		s.o.Acked(op)
	}
}

func (s *session) client() {
	switch s.rnd.IntN(12) {
	case 0:
		s.do(oracle.Op{Kind: oracle.Cancel}, &wire.Entry{Command: &wire.Entry_Cancel{Cancel: &wire.Cancel{Channel: "input"}}})
	case 1:
		scope := ""
		if c := s.f.GetChannels(); len(c) > 0 && c[0].Name == "input" {
			scope = c[0].Pending[0].Id
		}
		s.do(oracle.Op{Kind: oracle.Cancel, Scope: scope}, &wire.Entry{Command: &wire.Entry_Cancel{Cancel: &wire.Cancel{Channel: "input", Scope: scope}}})
	case 2:
		if !s.kept && s.rnd.IntN(10) == 0 {
			s.do(oracle.Op{Kind: oracle.Delete}, &wire.Entry{Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}})
		}
	default:
		policy := s.rnd.IntN(3)
		on := [...]wire.Publish_OnBusy{wire.Publish_ENQUEUE, wire.Publish_REJECT, wire.Publish_INTERRUPT}[policy]
		n := s.rnd.IntN(1000)
		request := fmt.Sprint("r", n/20) // often a request again
		payload := fmt.Appendf(nil, `{"role":"user","content":"%s"}`, request)
		s.do(oracle.Op{Kind: oracle.Publish, RequestID: request, Payload: payload, OnBusy: oracle.OnBusy(policy)},
			&wire.Entry{Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: "input", Payload: payload, OnBusy: on, RequestId: request}}})
	}
}

// worker answers one open attempt, or loses it, or fires what is in backoff.
func (s *session) worker() {
	if len(s.open) == 0 {
		for _, fx := range core.Outstanding(s.f) {
			s.now = max(s.now, fx.AtUs)
			s.apply(&wire.Entry{Command: &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: fx.Exec}}})
			return
		}
		return
	}
	task := s.open[s.rnd.IntN(len(s.open))]
	if s.rnd.IntN(6) == 0 {
		s.apply(&wire.Entry{Command: &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{Exec: task.Exec, Attempt: task.Attempt.Wire(), Reason: "lost"}}})
		return
	}
	r := s.handle(task)
	r.Exec, r.Attempt = task.Exec, task.Attempt.Wire()
	if s.rnd.IntN(6) == 0 {
		r.Retry = &wire.Retry{Error: "503"}
	}
	if _, ok := s.apply(&wire.Entry{Command: &wire.Entry_StepResult{StepResult: r}}); !ok {
		s.t.Fatalf("a result was refused")
	}
}

func (s *session) handle(task *core.Task) *wire.StepResult {
	if task.Name == "tool" {
		return &wire.StepResult{Events: []*wire.NewEvent{{Type: "tool.completed"}}, Publish: []*wire.Publish{{Channel: "results",
			Payload: fmt.Appendf(nil, `{"role":"tool","tool_call_id":"%s","content":"x"}`, task.Input)}}}
	}
	end := func(typ string, items ...[]byte) *wire.StepResult {
		return &wire.StepResult{Events: []*wire.NewEvent{{Type: "message.completed", Items: items}, {Type: typ}}, Next: []*wire.StepSpec{turnStep}}
	}
	tools := s.rnd.IntN(4)
	switch {
	case task.Cancel && s.rnd.IntN(2) == 0:
		return end("turn.cancelled", []byte(`{"role":"assistant","content":"ha"}`))
	case tools == 0:
		return end("turn.completed", []byte(`{"role":"assistant","content":"done"}`))
	}
	r, list := &wire.StepResult{}, ""
	for i := range tools {
		s.calls++
		id := fmt.Sprint("c", s.calls)
		list += fmt.Sprintf(`,{"id":"%s"}`, id)
		if i == 2 { // one call too many: answered at once
			r.Publish = append(r.Publish, &wire.Publish{Channel: "results", Payload: fmt.Appendf(nil, `{"role":"tool","tool_call_id":"%s"}`, id)})
			continue
		}
		r.Next = append(r.Next, &wire.StepSpec{Name: "tool", Input: []byte(id), Retry: retryPolicy})
	}
	r.Events = []*wire.NewEvent{{Type: "message.completed", Items: [][]byte{fmt.Appendf(nil, `{"role":"assistant","tool_calls":[%s]}`, list[1:])}}}
	r.Next = append(r.Next, &wire.StepSpec{Name: "continue", Retry: retryPolicy, Wait: &wire.Wait{Channel: "results", Count: uint32(tools)}})
	return r
}

func run(t *testing.T, seed uint64, steps int, bend func(*session)) error {
	s := &session{t: t, rnd: rand.New(rand.NewPCG(seed, 3)), o: oracle.New()}
	if bend != nil {
		bend(s)
	}
	for range steps {
		switch {
		case s.f == nil:
			s.do(oracle.Op{Kind: oracle.Start}, &wire.Entry{Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "agent", Steps: []*wire.StepSpec{turnStep}}}})
		case s.rnd.IntN(3) == 0:
			s.client()
		default:
			s.worker()
		}
	}
	flows := func() map[string]*wire.Flow {
		if s.f == nil {
			return nil
		}
		return map[string]*wire.Flow{"s1": s.f}
	}
	s.o.Final(flows())
	// Nobody disturbs any more: everything must end.
	for i := 0; s.f != nil && (core.IsBusy(s.f) || len(s.f.Channels) > 0); i++ {
		if i > 10_000 {
			break // Settled will say what hangs
		}
		s.worker()
	}
	s.o.Settled(flows())
	return s.o.Err()
}

func TestCoreKeepsItsPromises(t *testing.T) {
	for seed := range uint64(120) {
		if err := run(t, seed, 400, nil); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// TestLostEvents: whichever kind of event is lost once, it is noticed.
func TestLostEvents(t *testing.T) {
	for _, typ := range []string{"flow.started", "channel.published", "channel.dropped", "step.started", "cancel.requested",
		"message.completed", "tool.completed", "turn.completed", "turn.cancelled", "step.restarted", "step.retrying"} {
		seen := 0
		err := run(t, 1, 2000, func(s *session) {
			s.kept = true
			s.lose = func(ev *wire.Event) bool {
				if ev.Type == typ {
					seen++
				}
				return ev.Type == typ && seen == 1
			}
		})
		if seen == 0 || err == nil {
			t.Errorf("%s: seen %d times, its loss gave %v", typ, seen, err)
		}
	}
}
