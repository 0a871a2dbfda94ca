package core

import (
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Events of timers.
const (
	EventTimerFired   = "timer.fired"
	EventTimerSkipped = "timer.skipped"
)

func checkWait(f *wire.Flow, step string, w *wire.Wait) error {
	if len(w.Conditions) == 0 {
		if w.Channel == "" || w.Count == 0 || w.Count > MaxPending {
			return refuse(Invalid, "step %q must wait for 1 to %d messages of a named channel", step, MaxPending)
		}
		if len(w.Channel) > MaxName {
			return refuse(LimitReached, "channel name of step %q has more than %d bytes", step, MaxName)
		}
		return nil
	}
	switch {
	case w.Channel != "" || w.Count != 0 || w.Idle:
		return refuse(Invalid, "step %q mixes the short form of a wait with conditions", step)
	case len(w.Conditions) > MaxConditions || len(w.Combinations) > MaxConditions:
		return refuse(LimitReached, "step %q waits for %d conditions in %d sets, at most %d", step, len(w.Conditions), len(w.Combinations), MaxConditions)
	}
	for _, set := range w.Combinations {
		if len(set.Of) == 0 || len(set.Of) > MaxConditions {
			return refuse(Invalid, "step %q has a set of %d conditions, must be 1 to %d", step, len(set.Of), MaxConditions)
		}
		for n, i := range set.Of {
			if int(i) >= len(w.Conditions) {
				return refuse(Invalid, "step %q has no condition %d", step, i)
			}
			if slices.Contains(set.Of[:n], i) {
				return refuse(Invalid, "step %q has condition %d twice in a set", step, i)
			}
		}
	}
	for i, c := range w.Conditions {
		if err := checkCondition(f, step, i, c); err != nil {
			return err
		}
	}
	return nil
}

func checkCondition(f *wire.Flow, step string, i int, c *wire.Condition) error {
	if len(c.Name) > MaxName {
		return refuse(LimitReached, "condition %d of step %q has a name of more than %d bytes", i, step, MaxName)
	}
	switch on := c.On.(type) {
	case *wire.Condition_Channel:
		if err := checkName("channel name", on.Channel.GetName()); err != nil {
			return err
		}
		if n, m := on.Channel.AtLeast, on.Channel.AtMost; n > MaxPending || m > MaxPending || m != 0 && m < n {
			return refuse(Invalid, "condition %d of step %q wants %d to %d messages, must be within 1 to %d", i, step, n, m, MaxPending)
		}
	case *wire.Condition_TimerUs:
		if on.TimerUs < 0 || on.TimerUs > MaxDelayUs {
			return refuse(Invalid, "timer %d of step %q is of %d microseconds, must be 0 to %d", i, step, on.TimerUs, int64(MaxDelayUs))
		}
	case *wire.Condition_AtUs:
		if on.AtUs < 0 {
			return refuse(Invalid, "timer %d of step %q is at a negative instant", i, step)
		}
	case *wire.Condition_Flow:
		if err := sameTenant(f, on.Flow.GetFlowId()); err != nil {
			return err
		}
		if on.Flow.FlowId == f.GetId() {
			return refuse(Invalid, "step %q would wait for its own flow", step)
		}
		if on.Flow.Start != nil {
			return checkStart(on.Flow.FlowId, on.Flow.Start)
		}
	default:
		return refuse(Invalid, "condition %d of step %q is of an unknown kind", i, step)
	}
	return nil
}

// beginWait sets timers and starts children, and starts s if its wait holds
// already.
func (t *tx) beginWait(s *wire.Step) {
	w := s.Spec.Wait
	if len(w.Conditions) == 0 {
		t.match(w.Channel)
		return
	}
	s.Conditions = make([]*wire.ConditionState, len(w.Conditions))
	for i, c := range w.Conditions {
		st := &wire.ConditionState{}
		s.Conditions[i] = st
		switch on := c.On.(type) {
		case *wire.Condition_TimerUs:
			st.DueUs = t.e.TimeUs + on.TimerUs
		case *wire.Condition_AtUs:
			st.DueUs = max(on.AtUs, 1)
		case *wire.Condition_Flow:
			t.sendChild(s, uint32(i), on.Flow)
		}
		if st.DueUs == 0 {
			continue
		}
		if st.DueUs <= t.e.TimeUs {
			st.Done = true
		} else {
			t.setTimer(s.Exec, st.DueUs)
		}
	}
	t.evaluate(s)
}

func (t *tx) setTimer(exec uint64, atUs int64) {
	t.effects = append(t.effects, Effect{Kind: SetTimer, FlowID: t.f.Id, Exec: exec, AtUs: atUs})
}

// clearTimer takes a timer back before it is due.
func (t *tx) clearTimer(exec uint64, atUs int64) {
	if atUs > t.e.TimeUs {
		t.effects = append(t.effects, Effect{Kind: ClearTimer, FlowID: t.f.Id, Exec: exec, AtUs: atUs})
	}
}

// clearTimers takes the timers of a step back.
func (t *tx) clearTimers(s *wire.Step) {
	t.clearTimer(s.Exec, s.RetryAtUs)
	if s.State != wire.Step_WAITING {
		return
	}
	for _, c := range s.Conditions {
		if !c.Done {
			t.clearTimer(s.Exec, c.DueUs)
		}
	}
}

// clearFlowTimers takes the flow's own timers back.
func (t *tx) clearFlowTimers() {
	for _, at := range [...]int64{t.f.ExpireUs, t.f.TimeoutAtUs, t.f.GraceAtUs} {
		t.clearTimer(0, at)
	}
}

// evaluate starts a waiting step when a set of its conditions holds.
func (t *tx) evaluate(s *wire.Step) bool {
	w := s.Spec.Wait
	if len(w.Combinations) == 0 {
		if t.holds(s, nil) {
			t.startHeld(s, nil)
			return true
		}
		return false
	}
	for _, set := range w.Combinations {
		if t.holds(s, set.Of) {
			t.startHeld(s, set.Of)
			return true
		}
	}
	return false
}

// holds says whether all conditions of a set hold; nil = of the step.
func (t *tx) holds(s *wire.Step, set []uint32) bool {
	n := len(set)
	if set == nil {
		n = len(s.Conditions)
	}
	for i := range n {
		c := condIndex(set, i)
		if s.Conditions[c].Done {
			continue
		}
		on, ok := s.Spec.Wait.Conditions[c].On.(*wire.Condition_Channel)
		if !ok {
			return false
		}
		// Conditions of the set on the same channel need their sum.
		need := 0
		for j := range n {
			if o, ok := s.Spec.Wait.Conditions[condIndex(set, j)].On.(*wire.Condition_Channel); ok && o.Channel.Name == on.Channel.Name {
				need += atLeast(o.Channel)
			}
		}
		if t.available(s, on.Channel.Name) < need {
			return false
		}
	}
	return true
}

// available counts the messages that s may take from a channel: none while an
// older step waits for this channel alone, see match.
func (t *tx) available(s *wire.Step, channel string) int {
	for _, o := range t.f.Steps {
		if o == s {
			break
		}
		if waits, only := waitsOn(o, channel); waits && only {
			return 0
		}
	}
	return pendingCount(t.f, channel)
}

// unblock starts what waited behind s, which waits no more, for its channel.
func (t *tx) unblock(s *wire.Step) {
	w := s.Spec.Wait
	if w == nil || s.State != wire.Step_WAITING {
		return
	}
	if len(w.Conditions) == 0 {
		t.match(w.Channel)
	} else if c := w.Conditions[0].GetChannel(); c != nil && len(w.Conditions) == 1 {
		t.match(c.Name)
	}
}

func condIndex(set []uint32, i int) int {
	if set == nil {
		return i
	}
	return int(set[i])
}

func atLeast(c *wire.OnChannel) int { return max(int(c.AtLeast), 1) }

// startHeld takes the messages of the set's conditions and starts the step. A
// condition that wants more than its minimum leaves what the others need.
func (t *tx) startHeld(s *wire.Step, set []uint32) {
	n := len(set)
	if set == nil {
		n = len(s.Conditions)
	}
	t.clearTimers(s)
	// The states are shared with no one yet: only a hand-out shares them.
	for i := range n {
		c := condIndex(set, i)
		st := s.Conditions[c]
		on, ok := s.Spec.Wait.Conditions[c].On.(*wire.Condition_Channel)
		if !ok || st.Done {
			continue
		}
		take := atLeast(on.Channel)
		if extra := int(on.Channel.AtMost) - take; extra > 0 {
			reserved := 0
			for j := i + 1; j < n; j++ {
				if o, ok := s.Spec.Wait.Conditions[condIndex(set, j)].On.(*wire.Condition_Channel); ok && o.Channel.Name == on.Channel.Name {
					reserved += atLeast(o.Channel)
				}
			}
			take += max(0, min(extra, pendingCount(t.f, on.Channel.Name)-take-reserved))
		}
		s.Matched = append(s.Matched, t.take(on.Channel.Name, take)...)
		st.Done, st.Messages = true, uint32(take)
	}
	if s.Scope == "" && len(s.Matched) > 0 && !t.f.Closes {
		s.Scope = s.Matched[0].Id
	}
	s.Executing = true
	t.start(s)
}

// take removes the first n messages of a channel.
func (t *tx) take(channel string, n int) []*wire.Message {
	ch := channelOf(t.f, channel)
	if n == 0 || ch == nil {
		return nil
	}
	// The rest moves to a list of its own: tasks share the matched one.
	got := ch.Pending[:n:n]
	ch.Pending = append([]*wire.Message(nil), ch.Pending[n:]...)
	if len(ch.Pending) == 0 {
		removeChannel(t.f, ch.Name)
	}
	t.changed = true
	return got
}

// waitsOn says whether a waiting step has a condition on the channel, and
// whether that is all it waits for.
func waitsOn(s *wire.Step, channel string) (waits, only bool) {
	w := s.Spec.Wait
	if s.State != wire.Step_WAITING || w == nil {
		return false, false
	}
	if len(w.Conditions) == 0 {
		return w.Channel == channel, true
	}
	for _, c := range w.Conditions {
		if on, ok := c.On.(*wire.Condition_Channel); ok && on.Channel.Name == channel {
			return true, len(w.Conditions) == 1
		}
	}
	return false, false
}

// match starts waiting steps while their conditions hold, the oldest first. One
// that waits for this channel alone keeps it from younger ones, which might
// starve it with their smaller needs; one that waits for other things too does
// not, or what it lacks elsewhere would hold up the channel.
func (t *tx) match(channel string) {
	for t.matchOne(channel) {
	}
}

func (t *tx) matchOne(channel string) bool {
	if channelOf(t.f, channel) == nil {
		return false
	}
	for _, s := range t.f.Steps {
		waits, only := waitsOn(s, channel)
		if !waits {
			continue
		}
		if n := int(s.Spec.Wait.Count); len(s.Spec.Wait.Conditions) == 0 {
			if n > pendingCount(t.f, channel) {
				return false
			}
			t.startMatched(s, n)
			return true
		}
		if t.evaluate(s) {
			return true
		}
		if only {
			return false
		}
	}
	return false
}

// startMatched starts a step of the short form with the first n messages of its
// channel.
func (t *tx) startMatched(s *wire.Step, n int) {
	s.Matched = t.take(s.Spec.Wait.Channel, n)
	if s.Scope == "" && len(s.Matched) > 0 && !t.f.Closes {
		s.Scope = s.Matched[0].Id
	}
	s.Executing = true
	t.start(s)
}

// oldestWaiter is the step that the next message of the channel would go to by
// the short form.
func oldestWaiter(f *wire.Flow, channel string) *wire.Step {
	for _, s := range f.Steps {
		if waits, _ := waitsOn(s, channel); waits {
			return s
		}
	}
	return nil
}

// fireStepTimers marks the timers of a waiting step that are due.
func (t *tx) fireStepTimers(s *wire.Step) error {
	fired, later := false, false
	for i, st := range s.Conditions {
		switch {
		case st.DueUs == 0 || st.Done:
		case st.DueUs <= t.e.TimeUs:
			st.Done, fired = true, true
			t.timerEvent(EventTimerFired, s, i)
		default:
			later = true
		}
	}
	switch {
	case fired:
		t.changed = true
		t.evaluate(s)
		return nil
	case later:
		return refuse(NotDue, "timer of step %d of flow %q is not due", s.Exec, t.f.Id)
	}
	return refuse(StaleAttempt, "step %d of flow %q has no timer", s.Exec, t.f.Id)
}

func (t *tx) timerEvent(typ string, s *wire.Step, cond int) {
	t.event(&wire.Event{Type: typ, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec, Data: []byte(s.Spec.Wait.Conditions[cond].Name)})
}

// applySkipTimer makes a timer due: of a wait, of a delayed start or a backoff.
func (t *tx) applySkipTimer(c *wire.SkipTimer) error {
	s, cond := t.findTimer(c)
	if s == nil {
		return refuse(NotFound, "flow %q has no such timer", t.f.Id)
	}
	if cond < 0 {
		t.clearTimers(s)
		t.event(&wire.Event{Type: EventTimerSkipped, Scope: s.Scope, Step: s.Spec.Name, Exec: s.Exec})
		if s.State == wire.Step_DELAYED {
			t.ready(s)
		} else {
			t.handOutAgain(s, "its timer was skipped")
		}
	} else {
		s.Conditions[cond].Done = true
		t.clearTimer(s.Exec, s.Conditions[cond].DueUs)
		t.timerEvent(EventTimerSkipped, s, cond)
		t.evaluate(s)
	}
	t.reply = Reply{RunID: t.f.RunId}
	return nil
}

// findTimer gives the oldest timer that is meant; cond is -1 for the step's own.
func (t *tx) findTimer(c *wire.SkipTimer) (s *wire.Step, cond int) {
	for _, s := range t.f.Steps {
		if c.Exec != 0 && s.Exec != c.Exec || c.Step != "" && s.Spec.Name != c.Step {
			continue
		}
		if (s.State == wire.Step_DELAYED || s.State == wire.Step_BACKOFF) && c.Condition == "" {
			return s, -1
		}
		if s.State != wire.Step_WAITING {
			continue
		}
		for i, st := range s.Conditions {
			if st.DueUs != 0 && !st.Done && (c.Condition == "" || s.Spec.Wait.Conditions[i].Name == c.Condition) {
				return s, i
			}
		}
	}
	return nil, 0
}
