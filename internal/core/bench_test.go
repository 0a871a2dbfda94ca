package core

import (
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func benchTurn() *wire.StepSpec {
	return &wire.StepSpec{Name: "turn", Prefetch: true, Wait: &wire.Wait{Channel: "input", Count: 1, Idle: true}}
}

func benchEntry(lsn uint64) wire.Entry {
	return wire.Entry{Version: EntryVersion, Lsn: lsn, TimeUs: int64(lsn), Epoch: 1, Seed: lsn * 0x2545f4914f6cdd1d, FlowId: "s1"}
}

func benchApply(b *testing.B, f *wire.Flow, e *wire.Entry) Output {
	out, err := Apply(f, e)
	if err != nil {
		b.Fatal(err)
	}
	return out
}

// BenchmarkApply is one turn of a session: two entries, of which the first
// publishes and starts, the second ends the turn and rests. Allocations are of
// Apply alone as far as the entries are made outside the timer's loop.
func BenchmarkApply(b *testing.B) {
	start := benchEntry(1)
	start.Command = &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "agent", Steps: []*wire.StepSpec{benchTurn()},
		Attributes: []*wire.Attribute{{Name: "agent", Value: []byte("demo")}}}}
	payload := []byte(`{"role":"user","content":"hello"}`)
	items := [][]byte{[]byte(`{"role":"assistant","content":"hi"}`)}
	result := func(st *wire.Step, next *wire.StepSpec) *wire.StepResult {
		return &wire.StepResult{Exec: st.Exec, Attempt: st.Attempt, Next: []*wire.StepSpec{next},
			Events: []*wire.NewEvent{{Type: "message.completed", Items: items}, {Type: "turn.completed"}}}
	}
	b.Run("publish-start", func(b *testing.B) {
		f := benchApply(b, nil, &start).Flow
		next := benchTurn()
		publish := &wire.Entry_Publish{Publish: &wire.Publish{Channel: "input", Payload: payload, OnBusy: wire.Publish_INTERRUPT}}
		lsn := uint64(1)
		b.ReportAllocs()
		for b.Loop() {
			lsn++
			e := benchEntry(lsn)
			e.Command = publish
			f = benchApply(b, f, &e).Flow
			// Back to rest by hand, so that only the publish is measured.
			s := f.Steps[0]
			*s = wire.Step{Exec: s.Exec, Spec: next}
		}
	})
	b.Run("result-next", func(b *testing.B) {
		f := benchApply(b, nil, &start).Flow
		f.Steps[0].State, f.Steps[0].Attempt, f.Steps[0].Scope = wire.Step_STARTED, &wire.AttemptID{}, "turn_1"
		r := result(f.Steps[0], benchTurn())
		command := &wire.Entry_StepResult{StepResult: r}
		lsn := uint64(1)
		b.ReportAllocs()
		for b.Loop() {
			lsn++
			e := benchEntry(lsn)
			e.Command = command
			f = benchApply(b, f, &e).Flow
			s := f.Steps[0]
			s.State, s.Attempt, s.Scope = wire.Step_STARTED, r.Attempt, "turn_1"
			r.Exec = s.Exec
		}
	})
	b.Run("turn", func(b *testing.B) {
		f := benchApply(b, nil, &start).Flow
		lsn := uint64(1)
		b.ReportAllocs()
		for b.Loop() {
			lsn++
			e := benchEntry(lsn)
			e.Command = &wire.Entry_Publish{Publish: &wire.Publish{Channel: "input", Payload: payload}}
			f = benchApply(b, f, &e).Flow
			lsn++
			e2 := benchEntry(lsn)
			e2.Command = &wire.Entry_StepResult{StepResult: result(f.Steps[0], benchTurn())}
			f = benchApply(b, f, &e2).Flow
		}
	})
}
