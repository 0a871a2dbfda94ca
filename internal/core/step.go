package core

import (
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Events of steps. In the log of a flow that closes, a start carries the spec;
// in others its data is the input. The items of the first start are the payloads
// of the matched messages.
const (
	EventStepPreparing = "step.preparing" // its WaitFor was handed out
	EventStepWaiting   = "step.waiting"   // WaitFor said what Execute waits for
	EventStepStarted   = "step.started"
	EventStepRestarted = "step.restarted" // handed out again; data says why
	EventStepRetrying  = "step.retrying"  // failed, will be tried again; data is the error
	EventStepCompleted = "step.completed" // of a result without events of its own
	EventStepFailed    = "step.failed"    // for good; data is the error
	EventStepCancelled = "step.cancelled" // by a sibling, or with its run
)

func checkSpecs(f *wire.Flow, specs []*wire.StepSpec, live int) error {
	if live+len(specs) > MaxSteps {
		return refuse(LimitReached, "%d live steps, at most %d", live+len(specs), MaxSteps)
	}
	if deeper(specs, MaxNesting) {
		return refuse(LimitReached, "steps hold the starts of child flows or recoveries more than %d deep", MaxNesting)
	}
	for _, s := range specs {
		if err := checkSpec(f, s); err != nil {
			return err
		}
	}
	return nil
}

// deeper reports whether steps hold starts of child flows, or recoveries, that
// hold further ones, more than n deep.
func deeper(specs []*wire.StepSpec, n int) bool {
	for _, s := range specs {
		if s.GetRecover() != nil && (n == 0 || deeper([]*wire.StepSpec{s.Recover}, n-1)) {
			return true
		}
		for _, c := range s.GetWait().GetConditions() {
			if start := c.GetFlow().GetStart(); start != nil && (n == 0 || deeper(start.Steps, n-1)) {
				return true
			}
		}
	}
	return false
}

func checkSpec(f *wire.Flow, s *wire.StepSpec) error {
	if err := checkName("step name", s.GetName()); err != nil {
		return err
	}
	switch {
	case len(s.Input) > MaxPayload:
		return refuse(LimitReached, "input of step %q has %d bytes, at most %d", s.Name, len(s.Input), MaxPayload)
	case len(s.Locals) > MaxPayload:
		return refuse(LimitReached, "locals of step %q have %d bytes, at most %d", s.Name, len(s.Locals), MaxPayload)
	case len(s.ConcurrencyKey) > MaxName:
		return refuse(LimitReached, "concurrency key of step %q has more than %d bytes", s.Name, MaxName)
	case s.ConcurrencyKey != "" && s.ConcurrencyLimit == 0:
		return refuse(Invalid, "step %q has a concurrency key but no limit", s.Name)
	case s.TimeoutUs < 0 || s.HeartbeatUs < 0 || s.TimeoutUs > MaxDelayUs || s.HeartbeatUs > MaxDelayUs:
		return refuse(Invalid, "step %q has a timeout out of 0 to %d microseconds", s.Name, int64(MaxDelayUs))
	case s.Recover != nil && s.Recover.Recover != nil && s.Recover.Recover.Recover != nil:
		return refuse(Invalid, "recovery steps of step %q are nested more than two deep", s.Name)
	}
	if s.Wait != nil {
		if err := checkWait(f, s.Name, s.Wait); err != nil {
			return err
		}
	}
	if s.Recover != nil {
		if err := checkSpec(f, s.Recover); err != nil {
			return err
		}
	}
	return checkPolicy(s.Name, s.Retry)
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
	if p.BackoffPermille != 0 && (p.BackoffPermille < 1000 || p.BackoffPermille > 1_000_000) {
		return refuse(Invalid, "retry policy of step %q has a factor of %d/1000, must be 1 to 1000", step, p.BackoffPermille)
	}
	return nil
}

// addStep puts a step in place: waiting, or started when nothing holds it back.
func (t *tx) addStep(spec *wire.StepSpec, scope string, cancel bool, reason string) {
	s := &wire.Step{Exec: t.f.NextExec, Spec: spec, Scope: scope, Cancel: cancel, CancelReason: reason}
	t.f.NextExec++
	t.f.Steps = append(t.f.Steps, s)
	t.changed = true
	t.ready(s)
}

// delayStep puts a step in place that begins at an instant.
func (t *tx) delayStep(spec *wire.StepSpec, atUs int64) {
	s := &wire.Step{Exec: t.f.NextExec, Spec: spec, State: wire.Step_DELAYED, RetryAtUs: atUs}
	t.f.NextExec++
	t.f.Steps = append(t.f.Steps, s)
	t.changed = true
	t.setTimer(s.Exec, atUs)
}

// ready begins a step: its WaitFor, its wait, or its work.
func (t *tx) ready(s *wire.Step) {
	s.State, s.RetryAtUs = wire.Step_WAITING, 0
	w := s.Spec.Wait
	if w == nil {
		t.start(s)
		return
	}
	if w.Idle {
		// At rest begins new work: nothing of the old is carried over.
		s.Scope, s.Cancel, s.CancelReason = "", false, ""
	}
	t.beginWait(s)
}

func waitPhase(s *wire.Step) bool { return s.Spec.WaitFor && !s.Executing }

// start hands s out when there is a slot, and queues it otherwise. What has a
// concurrency key is always queued: only the dispatcher knows who holds the key.
func (t *tx) start(s *wire.Step) {
	if t.slots == 0 || s.Spec.ConcurrencyKey != "" {
		t.queue(s)
		return
	}
	t.startStep(s)
}

func (t *tx) queue(s *wire.Step) {
	s.State, s.QueuedUs, s.RetryAtUs = wire.Step_QUEUED, t.e.TimeUs, 0
	t.changed = true
	t.effects = append(t.effects, queued(t.f, s))
}

// applyStartQueued hands out a step that waited for a slot.
func (t *tx) applyStartQueued(c *wire.StartQueued) error {
	s := stepOf(t.f, c.Exec)
	if s == nil || s.State != wire.Step_QUEUED {
		return refuse(StaleAttempt, "step %d of flow %q is not queued", c.Exec, t.f.Id)
	}
	if t.slots == 0 {
		return refuse(Busy, "there is no slot for step %d of flow %q", c.Exec, t.f.Id)
	}
	s.QueuedUs = 0
	if s.Attempts > 0 {
		reason := s.AgainReason
		if reason == "" {
			reason = "queued" // by a program from before reasons were kept
		}
		t.handOutAgain(s, reason)
		return nil
	}
	t.startStep(s)
	return nil
}

// startStep hands s out for the first time, or for the first time after its wait.
func (t *tx) startStep(s *wire.Step) {
	if s.FirstStartUs == 0 {
		s.FirstStartUs = t.e.TimeUs
	}
	items, blobs := payloads(s.Matched)
	typ := EventStepStarted
	if waitPhase(s) {
		typ = EventStepPreparing
	}
	t.handOut(s)
	ev := &wire.Event{Type: typ, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Attempt: s.Attempts, Items: items, ItemBlobs: blobs}
	if t.f.Closes {
		ev.Spec = s.Spec
	} else {
		ev.Data = s.Spec.Input
	}
	t.event(ev)
	t.effects = append(t.effects, dispatch(t.f, s))
}

// payloads gives what messages hold: in line, and, when one of them is large, the
// blobs beside it.
func payloads(ms []*wire.Message) (items [][]byte, blobs []string) {
	if len(ms) == 0 {
		return nil, nil
	}
	items = make([][]byte, len(ms))
	for i, m := range ms {
		items[i] = m.Payload
		if m.Blob == "" {
			continue
		}
		if blobs == nil {
			blobs = make([]string, len(ms))
		}
		blobs[i] = m.Blob
	}
	return items, blobs
}

// handOut mints the next attempt of s; the caller has made sure of a slot.
func (t *tx) handOut(s *wire.Step) {
	if t.slots > 0 {
		t.slots--
	}
	s.State = wire.Step_STARTED
	s.RetryAtUs, s.QueuedUs, s.AgainReason = 0, 0, ""
	s.Attempt = &wire.AttemptID{Epoch: t.e.Epoch, Lsn: t.e.Lsn, N: t.attempts}
	t.attempts++
	s.Attempts++
	t.changed = true
}

// handOutAgain hands s out for a further time, visibly; without a slot it is
// queued first.
func (t *tx) handOutAgain(s *wire.Step, reason string) {
	queued := s.State == wire.Step_QUEUED
	if !queued && (t.slots == 0 || s.Spec.ConcurrencyKey != "") {
		t.releaseKey(s)
		t.queue(s)
		s.AgainReason = reason
		return
	}
	t.handOut(s)
	t.event(&wire.Event{Type: EventStepRestarted, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec,
		Attempt: s.Attempts, Data: []byte(reason)})
	t.effects = append(t.effects, dispatch(t.f, s))
}

// releaseKey tells that a step that was handed out holds its key no more.
func (t *tx) releaseKey(s *wire.Step) {
	if s.Spec.ConcurrencyKey != "" && s.State == wire.Step_STARTED {
		t.effects = append(t.effects, t.leave(s))
	}
}

// leave tells the dispatcher that a step is not its any more.
func (t *tx) leave(s *wire.Step) Effect {
	return Effect{Kind: ReleaseKey, FlowID: t.f.Id, Exec: s.Exec, FlowType: t.f.Type, Step: s.Spec.Name, Key: s.Spec.ConcurrencyKey}
}

// dropStep ends a step whose result nobody waits for.
func (t *tx) dropStep(s *wire.Step, reason string) {
	t.clearTimers(s)
	switch s.State {
	case wire.Step_STARTED:
		t.releaseKey(s)
		t.effects = append(t.effects, Effect{Kind: CancelAttempt, FlowID: t.f.Id, Exec: s.Exec,
			Attempt: attemptOf(s.Attempt), Reason: reason, Forget: true})
	case wire.Step_QUEUED:
		t.effects = append(t.effects, t.leave(s))
	}
	t.removeStep(s.Exec)
	t.changed = true
	if t.f.Closes {
		t.event(&wire.Event{Type: EventStepCancelled, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Data: []byte(reason)})
	}
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
	for _, s := range f.GetSteps() {
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
	if len(c.Checkpoint) > MaxPayload {
		return refuse(LimitReached, "checkpoint has %d bytes, at most %d", len(c.Checkpoint), MaxPayload)
	}
	if len(c.Checkpoint) > 0 {
		s.Checkpoint = c.Checkpoint
	}
	t.handOutAgain(s, c.Reason)
	return nil
}

// applyCheckpoint keeps how far an attempt is.
func (t *tx) applyCheckpoint(c *wire.Checkpoint) error {
	s, err := t.running(c.Exec, c.Attempt)
	if err != nil {
		return err
	}
	if len(c.Data) > MaxPayload {
		return refuse(LimitReached, "checkpoint has %d bytes, at most %d", len(c.Data), MaxPayload)
	}
	s.Checkpoint = c.Data
	t.changed, t.keepUpdated = true, true
	return nil
}

// StepOfEntry names the step that an applied entry was about: the one that gave a
// result, was handed out (again), or had a timer. Empty when it was about none.
func StepOfEntry(e *wire.Entry, out Output) string {
	var exec uint64
	switch c := e.Command.(type) {
	case *wire.Entry_StepResult:
		exec = c.StepResult.Exec
	case *wire.Entry_StartQueued:
		exec = c.StartQueued.Exec
	case *wire.Entry_Redispatch:
		exec = c.Redispatch.Exec
	case *wire.Entry_FireTimer:
		exec = c.FireTimer.Exec
	case *wire.Entry_Checkpoint:
		exec = c.Checkpoint.Exec
	}
	if exec == 0 {
		return ""
	}
	for _, ev := range out.Events { // a step that is over is in these only
		if ev.Exec == exec {
			return ev.Step
		}
	}
	if s := stepOf(out.Flow, exec); s != nil {
		return s.Spec.Name
	}
	return ""
}

// sameTenant keeps a flow from reaching those of others.
func sameTenant(f *wire.Flow, target string) error {
	own, _, _ := strings.Cut(f.GetId(), "/")
	other, _, _ := strings.Cut(target, "/")
	switch {
	case target == "" || len(target) > MaxIDBytes:
		return refuse(Invalid, "the target's flow ID must have 1 to %d bytes", MaxIDBytes)
	case own != other:
		return refuse(Invalid, "flow %q is not of the tenant of flow %q", target, f.GetId())
	}
	return nil
}
