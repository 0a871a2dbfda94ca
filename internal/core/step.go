package core

import (
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Events of steps. Data is the step's input; the items of the first start are
// the payloads of the matched messages.
const (
	EventStepStarted   = "step.started"
	EventStepRestarted = "step.restarted" // handed out again; data says why
	EventStepRetrying  = "step.retrying"  // failed, will be tried again; data is the error
)

func checkSpecs(specs []*wire.StepSpec, live int) error {
	if live+len(specs) > MaxSteps {
		return refuse(LimitReached, "%d live steps, at most %d", live+len(specs), MaxSteps)
	}
	for _, s := range specs {
		if err := checkName("step name", s.GetName()); err != nil {
			return err
		}
		switch {
		case len(s.Input) > MaxPayload:
			return refuse(LimitReached, "input of step %q has %d bytes, at most %d", s.Name, len(s.Input), MaxPayload)
		case s.Wait != nil && (s.Wait.Channel == "" || s.Wait.Count == 0 || s.Wait.Count > MaxPending):
			return refuse(Invalid, "step %q must wait for 1 to %d messages of a named channel", s.Name, MaxPending)
		case s.Wait != nil && len(s.Wait.Channel) > MaxName:
			return refuse(LimitReached, "channel name of step %q has more than %d bytes", s.Name, MaxName)
		}
		if err := checkPolicy(s.Name, s.Retry); err != nil {
			return err
		}
	}
	return nil
}

func checkPolicy(step string, p *wire.RetryPolicy) error {
	if p == nil {
		return nil
	}
	for _, us := range [...]int64{p.InitialUs, p.MaxUs, p.TotalUs} {
		if us < 0 || us > MaxDelayUs {
			return refuse(Invalid, "retry policy of step %q has an interval of %d microseconds, must be 0 to %d", step, us, int64(MaxDelayUs))
		}
	}
	return nil
}

// addStep puts a step in place: waiting, or started when nothing holds it back.
func (t *tx) addStep(spec *wire.StepSpec, scope string, cancel bool, reason string) {
	s := &wire.Step{Exec: t.f.NextExec, Spec: spec, Scope: scope, Cancel: cancel, CancelReason: reason}
	t.f.NextExec++
	t.f.Steps = append(t.f.Steps, s)
	t.changed = true
	if spec.Wait == nil {
		t.startStep(s)
		return
	}
	if spec.Wait.Idle {
		// At rest begins new work: nothing of the old is carried over.
		s.Scope, s.Cancel, s.CancelReason = "", false, ""
	}
	t.match(spec.Wait.Channel)
}

// startStep hands s out for the first time.
func (t *tx) startStep(s *wire.Step) {
	s.FirstStartUs = t.e.TimeUs
	var items [][]byte
	if len(s.Matched) > 0 {
		items = make([][]byte, 0, len(s.Matched))
		for _, m := range s.Matched {
			items = append(items, m.Payload)
		}
	}
	t.handOut(s)
	t.event(&wire.Event{Type: EventStepStarted, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: s.Spec.Input, Items: items})
	t.effects = append(t.effects, dispatch(t.f, s))
}

// handOut mints the next attempt of s.
func (t *tx) handOut(s *wire.Step) {
	s.State = wire.Step_STARTED
	s.RetryAtUs = 0
	s.Attempt = &wire.AttemptID{Epoch: t.e.Epoch, Lsn: t.e.Lsn, N: t.attempts}
	t.attempts++
	s.Attempts++
	t.changed = true
}

// handOutAgain hands s out for a further time, visibly.
func (t *tx) handOutAgain(s *wire.Step, reason string) {
	t.handOut(s)
	t.event(&wire.Event{Type: EventStepRestarted, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: []byte(reason)})
	t.effects = append(t.effects, dispatch(t.f, s))
}

// running gives the step if the attempt is its current one.
func (t *tx) running(exec uint64, a *wire.AttemptID) (*wire.Step, error) {
	s := stepOf(t.f, exec)
	if s == nil || s.State != wire.Step_STARTED || attemptOf(s.Attempt) != attemptOf(a) {
		return nil, refuse(StaleAttempt, "step %d of flow %q is not running that attempt", exec, t.f.Id)
	}
	return s, nil
}

func stepOf(f *wire.Flow, exec uint64) *wire.Step {
	for _, s := range f.Steps {
		if s.Exec == exec {
			return s
		}
	}
	return nil
}

func (t *tx) removeStep(exec uint64) {
	for i, s := range t.f.Steps {
		if s.Exec == exec {
			t.f.Steps = slices.Delete(t.f.Steps, i, i+1)
			return
		}
	}
}

// applyRedispatch hands a started step out again as a new attempt: not charged
// to the retry policy, since the step did nothing wrong.
func (t *tx) applyRedispatch(c *wire.Redispatch) error {
	s, err := t.running(c.Exec, c.Attempt)
	if err != nil {
		return err
	}
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	t.handOutAgain(s, c.Reason)
	return nil
}
