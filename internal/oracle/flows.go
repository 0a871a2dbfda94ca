package oracle

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// The promises about flows that close, beside those about sessions.
const (
	Runs       Rule = "runs"       // a run begins once, ends once, and nothing of it comes after
	Steps      Rule = "steps"      // a step goes its way from its first hand-out to one end; no number is used twice
	Attributes Rule = "attributes" // the log tells every change of an attribute
	Messages   Rule = "messages"   // a message is taken once, in the order of its channel
	Waits      Rule = "waits"      // nothing sleeps that could go on
)

// Flows is the reference model of flows that close: it follows their logs, event
// by event, and compares what must follow from these with their states. It is
// used from one goroutine.
type Flows struct {
	flows  map[string]*flowModel
	broken []error
}

// flowModel is what the log of one flow has said.
type flowModel struct {
	exists  bool
	open    bool // a run has not ended
	seen    bool // an event
	status  wire.Status
	starts  int // runs that were started
	runs    int // and resets
	last    cursor
	events  uint64
	items   uint64
	maxExec uint64
	steps   map[uint64]*stepModel // begun and not over
	over    map[uint64]bool       // ended; an exec is never used again
	attrs   map[string]string
	waiting map[string]string // message ID to payload, of those that were told
	output  string
	reason  string
	done    uint64 // results of this run that ended their step
}

type stepPhase uint8

const (
	preparing stepPhase = iota + 1
	pausing             // its WaitFor is over
	running
	failing // failed, will be tried again
)

type stepModel struct {
	name    string
	phase   stepPhase
	inWait  bool   // attempts call its WaitFor
	attempt uint32 // the newest
}

// NewFlows gives a model that was told nothing.
func NewFlows() *Flows { return &Flows{flows: map[string]*flowModel{}} }

// Err gives the broken promises, or nil. Each is a *Violation.
func (o *Flows) Err() error { return errors.Join(o.broken...) }

func (o *Flows) fail(id string, rule Rule, format string, args ...any) {
	if len(o.broken) < maxViolations {
		o.broken = append(o.broken, &Violation{rule, id, fmt.Sprintf(format, args...)})
	}
}

// Starts counts the runs that starts, not resets, have begun under an ID.
func (o *Flows) Starts(id string) int {
	if m := o.flows[id]; m != nil {
		return m.starts
	}
	return 0
}

// LastLSN gives the entry of the newest event of a flow, 0 when there is none.
func (o *Flows) LastLSN(id string) uint64 {
	if m := o.flows[id]; m != nil {
		return m.last.lsn
	}
	return 0
}

// Runs counts all runs, resets included.
func (o *Flows) Runs() int {
	n := 0
	for _, m := range o.flows {
		n += m.runs
	}
	return n
}

// Events tells of the events of one entry, in order. All entries that give events
// must be told.
func (o *Flows) Events(id string, events []*wire.Event) {
	m := o.flows[id]
	if m == nil {
		m = &flowModel{over: map[uint64]bool{}}
		o.flows[id] = m
	}
	for i, ev := range events {
		at := cursor{ev.Lsn, ev.N}
		if m.seen && !m.last.before(at) || int(ev.N) != i {
			o.fail(id, Cursors, "%s at %v, number %d of its entry, came after %v", ev.Type, at, i, m.last)
		}
		m.last, m.seen = at, true
		m.events++
		m.items += uint64(len(ev.Items))
		if err := m.add(ev); err != nil {
			o.fail(id, err.rule, "%s at %v of step %d: %s", ev.Type, at, ev.Exec, err.text)
		}
	}
}

// breach is a rule that an event breaks, or nil.
type breach struct {
	rule Rule
	text string
}

func breaks(rule Rule, format string, args ...any) *breach {
	return &breach{rule, fmt.Sprintf(format, args...)}
}

func (m *flowModel) add(ev *wire.Event) *breach {
	switch ev.Type {
	case "flow.started":
		if m.open {
			return breaks(Runs, "the run before has not ended")
		}
		if !m.exists {
			m.events, m.items, m.over, m.maxExec = 1, uint64(len(ev.Items)), map[uint64]bool{}, 0
		}
		m.starts++
		m.begin(ev)
		return nil
	case "flow.reset":
		if !m.exists || len(m.steps) > 0 {
			return breaks(Runs, "%d steps of the run before have not ended", len(m.steps))
		}
		m.begin(ev)
		return nil
	case "flow.deleted":
		if !m.exists || m.open {
			return breaks(Runs, "the run has not ended")
		}
		m.exists = false
		return nil
	}
	if !m.open {
		return breaks(Runs, "the run has ended, as %v", m.status)
	}
	if b := m.change(ev.Attributes); b != nil {
		return b
	}
	if status, ok := closers[ev.Type]; ok {
		return m.end(ev, status)
	}
	switch ev.Type {
	case "channel.published":
		m.waiting[ev.Scope] = string(ev.Data)
		return nil
	case "channel.dropped":
		delete(m.waiting, ev.Scope)
		return nil
	}
	return m.step(ev)
}

// begin opens a run.
func (m *flowModel) begin(ev *wire.Event) {
	m.exists, m.open, m.status, m.output, m.reason, m.done = true, true, wire.Status_RUNNING, "", "", 0
	m.runs++
	m.steps, m.attrs, m.waiting = map[uint64]*stepModel{}, map[string]string{}, map[string]string{}
	_ = m.change(ev.Attributes) // of none there is nothing to remove
}

var closers = map[string]wire.Status{
	"flow.completed": wire.Status_COMPLETED, "flow.failed": wire.Status_FAILED, "flow.cancelled": wire.Status_CANCELLED,
	"flow.terminated": wire.Status_TERMINATED, "flow.timed_out": wire.Status_TIMED_OUT,
}

func (m *flowModel) end(ev *wire.Event, status wire.Status) *breach {
	m.open, m.status = false, status
	if status == wire.Status_COMPLETED && len(ev.Items) > 0 {
		m.output = string(ev.Items[0])
	}
	m.reason = string(ev.Data)
	if len(m.steps) > 0 {
		return breaks(Runs, "%d of its steps have not ended", len(m.steps))
	}
	return nil
}

// change takes what an event says of attributes.
func (m *flowModel) change(as []*wire.Attribute) *breach {
	for _, a := range as {
		if len(a.Value) > 0 || a.Blob != "" {
			m.attrs[a.Name] = string(a.Value) + a.Blob
			continue
		}
		delete(m.attrs, a.Name)
	}
	return nil
}

// step follows a step from its first hand-out to its end.
func (m *flowModel) step(ev *wire.Event) *breach {
	if ev.Exec == 0 {
		return nil // of the flow
	}
	if m.over[ev.Exec] {
		return breaks(Steps, "the step is over")
	}
	m.maxExec = max(m.maxExec, ev.Exec)
	s := m.steps[ev.Exec]
	if s == nil {
		return m.first(ev)
	}
	if s.name != ev.Step {
		return breaks(Steps, "it was %q and is %q", s.name, ev.Step)
	}
	live := s.phase == preparing || s.phase == running
	switch ev.Type {
	case "step.waiting":
		if s.phase != preparing || ev.Attempt != s.attempt {
			return breaks(Steps, "of attempt %d in phase %d, the newest is %d", ev.Attempt, s.phase, s.attempt)
		}
		s.phase, s.inWait, s.attempt = pausing, false, 0
	case "step.started":
		if s.phase != pausing || ev.Attempt != 1 {
			return breaks(Steps, "it was in phase %d", s.phase)
		}
		s.phase, s.attempt = running, 1
	case "step.retrying":
		if !live || ev.Attempt != s.attempt {
			return breaks(Steps, "of attempt %d in phase %d, the newest is %d", ev.Attempt, s.phase, s.attempt)
		}
		s.phase = failing
	case "step.restarted":
		if s.phase == pausing || ev.Attempt != s.attempt+1 {
			return breaks(Steps, "attempt %d in phase %d after %d", ev.Attempt, s.phase, s.attempt)
		}
		s.attempt = ev.Attempt
		if s.phase = running; s.inWait {
			s.phase = preparing
		}
	case "step.completed", "step.failed":
		if !live || ev.Attempt != s.attempt || s.phase == preparing && ev.Type == "step.completed" {
			return breaks(Steps, "of attempt %d in phase %d, the newest is %d", ev.Attempt, s.phase, s.attempt)
		}
		m.done++
		m.leave(ev.Exec)
	case "step.cancelled":
		m.leave(ev.Exec)
	}
	return nil
}

// first is the first event of a step.
func (m *flowModel) first(ev *wire.Event) *breach {
	switch ev.Type {
	case "step.started", "step.preparing":
		if ev.Attempt != 1 {
			return breaks(Steps, "begins with attempt %d", ev.Attempt)
		}
		s := &stepModel{name: ev.Step, phase: running, attempt: 1, inWait: ev.Type == "step.preparing"}
		if s.inWait {
			s.phase = preparing
		}
		m.steps[ev.Exec] = s
	case "step.cancelled":
		m.over[ev.Exec] = true
	case "timer.fired", "timer.skipped":
	default:
		return breaks(Steps, "nobody has started it")
	}
	return nil
}

func (m *flowModel) leave(exec uint64) {
	delete(m.steps, exec)
	m.over[exec] = true
}

// Final compares with the durable state, when every event has been told. A flow
// that does not exist is not in the map.
func (o *Flows) Final(states map[string]*wire.Flow) {
	for _, id := range slices.Sorted(maps.Keys(o.flows)) {
		m, f := o.flows[id], states[id]
		if m.exists != (f != nil) {
			o.fail(id, Durability, "it exists: %v, by its log: %v", f != nil, m.exists)
			continue
		}
		if f != nil {
			o.compare(id, m, f)
		}
	}
	for id := range states {
		if o.flows[id] == nil {
			o.fail(id, Durability, "its log has no event")
		}
	}
}

func (o *Flows) compare(id string, m *flowModel, f *wire.Flow) {
	if at := (cursor{f.LastEvent.GetLsn(), f.LastEvent.GetN()}); at != m.last || f.EventCount != m.events || f.ItemCount != m.items {
		o.fail(id, Durability, "it has %d events and %d items up to %v, its log %d and %d up to %v", f.EventCount, f.ItemCount, at, m.events, m.items, m.last)
	}
	if f.Status != m.status || string(f.Output) != m.output || f.Status != wire.Status_RUNNING && f.Error != m.reason {
		o.fail(id, Runs, "it is %v with output %q and error %q, by its log %v, %q and %q", f.Status, f.Output, f.Error, m.status, m.output, m.reason)
	}
	attrs := map[string]string{}
	for _, a := range f.Attributes {
		attrs[a.Name] = string(a.Value) + a.Blob
	}
	if !maps.Equal(attrs, m.attrs) {
		o.fail(id, Attributes, "they are %.500v, by the log %.500v", attrs, m.attrs)
	}
	open := map[uint64]bool{}
	for _, s := range f.Steps {
		open[s.Exec] = true
		o.compareStep(id, m, s)
	}
	for exec, s := range m.steps {
		if !open[exec] {
			o.fail(id, Steps, "step %d %s is gone, and its log does not say how", exec, s.name)
		}
	}
}

func (o *Flows) compareStep(id string, m *flowModel, s *wire.Step) {
	known := m.steps[s.Exec]
	ok := !m.over[s.Exec]
	switch s.State {
	case wire.Step_STARTED:
		ok = ok && known != nil && (known.phase == running || known.phase == preparing) && known.attempt == s.Attempts
	case wire.Step_BACKOFF:
		ok = ok && known != nil && known.phase == failing
	case wire.Step_WAITING:
		ok = ok && (known == nil || known.phase == pausing)
	case wire.Step_DELAYED:
		ok = ok && known == nil
	}
	if !ok {
		o.fail(id, Steps, "step %d %s is %v at attempt %d, by its log %+v", s.Exec, s.Spec.GetName(), s.State, s.Attempts, known)
	}
}

// Settled is Final for a world that was left in peace for long enough: nothing is
// on its way, and nothing waits for what has come.
func (o *Flows) Settled(states map[string]*wire.Flow) {
	o.Final(states)
	for _, id := range slices.Sorted(maps.Keys(states)) {
		f := states[id]
		if n := len(f.Outbox); n > 0 {
			o.fail(id, Liveness, "%d sends have no answer", n)
		}
		for _, s := range f.Steps {
			if s.State != wire.Step_WAITING {
				o.fail(id, Liveness, "step %d %s is still %v", s.Exec, s.Spec.GetName(), s.State)
			}
			if channel := sleeps(f, s); channel != "" {
				o.fail(id, Waits, "step %d %s sleeps, and messages wait in %q", s.Exec, s.Spec.GetName(), channel)
			}
		}
	}
}

// sleeps gives the channel that has what a step waits for alone, or "".
func sleeps(f *wire.Flow, s *wire.Step) string {
	w := s.Spec.GetWait()
	if s.State != wire.Step_WAITING || len(w.GetConditions()) != 1 {
		return ""
	}
	on := w.Conditions[0].GetChannel()
	for _, c := range f.Channels {
		if on != nil && c.Name == on.Name && len(c.Pending) >= max(1, int(on.AtLeast)) {
			return c.Name
		}
	}
	return ""
}
