package core

import (
	"fmt"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

// TestEntriesOfSequentialSteps: a result and the next start are one entry when
// there is a slot, so k steps take k+1 entries; without one each start takes an
// entry more.
func TestEntriesOfSequentialSteps(t *testing.T) {
	const k = 20
	for _, c := range []struct {
		slots uint32
		want  int
	}{{1, k + 1}, {0, 2*k + 1}} {
		b := newBook()
		ofStep := 0
		do := func(slots uint32, command func(e *wire.Entry)) {
			t.Helper()
			e := b.entry()
			e.Slots = slots
			command(e)
			out, err, broken := b.apply(e)
			if err != nil || broken != nil {
				t.Fatalf("%v, %v", err, broken)
			}
			switch step := StepOfEntry(e, out); {
			case step == "s":
				ofStep++
			case step != "" || e.GetStartFlow() == nil:
				t.Errorf("%T is of step %q", e.Command, step)
			}
		}
		spec := &wire.StepSpec{Name: "s"}
		do(c.slots, func(e *wire.Entry) {
			e.Command = &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Closes: true, Steps: []*wire.StepSpec{spec}}}
		})
		for i := range k {
			st := b.f.Steps[0]
			if st.State == wire.Step_QUEUED {
				do(1, func(e *wire.Entry) {
					e.Command = &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: st.Exec}}
				})
			}
			r := &wire.StepResult{Exec: st.Exec, Attempt: st.Attempt, Next: []*wire.StepSpec{spec}}
			if i == k-1 {
				r.Next, r.Close = nil, &wire.Close{How: wire.Close_GRACEFUL}
			}
			do(c.slots, func(e *wire.Entry) { e.Command = &wire.Entry_StepResult{StepResult: r} })
		}
		if ofStep != c.want-1 {
			t.Errorf("%d entries are of the step, want %d", ofStep, c.want-1)
		}
		if b.f.Status != wire.Status_COMPLETED || len(b.entries) != c.want {
			t.Errorf("%d steps with %d slots took %d entries, want %d; the run is %v", k, c.slots, len(b.entries), c.want, b.f.Status)
		}
	}
}

// TestNestedStarts: a start may hold the start of a child that holds one, but not
// for ever.
func TestNestedStarts(t *testing.T) {
	nested := func(depth int) *wire.StepSpec {
		s := &wire.StepSpec{Name: "s"}
		for i := range depth {
			s = &wire.StepSpec{Name: "s", Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{
				FlowId: fmt.Sprint("s1/c", i), Start: &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{s}}}}}}}}
		}
		return s
	}
	for depth, ok := range map[int]bool{1: true, MaxNesting: true, MaxNesting + 1: false, 100_000: false} {
		b := newBook()
		e := b.entry()
		e.Command = &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Closes: true, Steps: []*wire.StepSpec{nested(depth)}}}
		if _, err := Apply(nil, e); (err == nil) != ok {
			t.Errorf("nested %d deep: %v", depth, err)
		}
	}
}

// TestStepOfEntry: every command that is about a step is counted as of it, also
// when the step is gone or says nothing.
func TestStepOfEntry(t *testing.T) {
	b := newBook()
	b.nowUs = 0
	exec := uint64(1)
	retry := &wire.RetryPolicy{MaxAttempts: 9, InitialUs: 1}
	for i, c := range []struct {
		slots   uint32
		want    string
		command func(st *wire.Step, e *wire.Entry)
	}{
		{1, "", func(_ *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Closes: true, Steps: []*wire.StepSpec{{Name: "a", Retry: retry}}}}
		}},
		{0, "a", func(st *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_Checkpoint{Checkpoint: &wire.Checkpoint{Exec: exec, Attempt: st.Attempt, Data: []byte("1")}}
		}},
		{0, "a", func(st *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{Exec: exec, Attempt: st.Attempt}}
		}},
		{1, "a", func(_ *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: exec}}
		}},
		{1, "a", func(st *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_StepResult{StepResult: &wire.StepResult{Exec: exec, Attempt: st.Attempt, Retry: &wire.Retry{Error: "no"}}}
		}},
		{1, "a", func(_ *wire.Step, e *wire.Entry) {
			b.nowUs += 10
			e.TimeUs = b.nowUs
			e.Command = &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: exec}}
		}},
		{1, "", func(_ *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: []*wire.Attribute{attr("x=1")}}}
		}},
		{1, "a", func(st *wire.Step, e *wire.Entry) {
			e.Command = &wire.Entry_StepResult{StepResult: &wire.StepResult{Exec: exec, Attempt: st.Attempt, Next: []*wire.StepSpec{{Name: "b"}}}}
		}},
	} {
		e := b.entry()
		e.Slots = c.slots
		var st *wire.Step
		if b.f != nil {
			st = b.f.Steps[0]
		}
		c.command(st, e)
		out, err, broken := b.apply(e)
		if err != nil || broken != nil {
			t.Fatalf("%d: %v, %v", i, err, broken)
		}
		if got := StepOfEntry(e, out); got != c.want {
			t.Errorf("%T is of step %q, want %q", e.Command, got, c.want)
		}
	}
}
