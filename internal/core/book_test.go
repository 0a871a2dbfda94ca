package core

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// book drives one flow ID and keeps, from the outside, what the promises of the
// core say must hold after each entry: it never looks at how Apply came to its
// answer. Every message's payload begins with "channel/number", the numbers growing
// with each proposal, so that order and single use can be read off the payloads.
type book struct {
	f     *wire.Flow
	epoch uint64
	lsn   uint64
	nowUs int64

	entries  []*wire.Entry // accepted and changing ones
	events   []*wire.Event
	born     int               // the index of the flow's first event
	open     map[string]Effect // emitted and not finished, by effectKey
	timers   map[string]int    // set, not taken back and not due, by effectKey
	keys     map[uint64]bool   // steps that hold their concurrency key
	stopped  map[uint64]bool   // told to stop, by step
	attempts map[Attempt]bool
	tasks    []keptTask
	sends    []keptSend
	requests []string // keys that the flow should remember, oldest first
	startID  string   // of the run
	last     Cursor

	messages
}

type keptTask struct {
	task   *Task
	digest string
}

type keptSend struct {
	out  *wire.Outgoing
	text []byte
}

func newBook() *book {
	b := &book{epoch: 1, nowUs: 1_000_000}
	b.forget()
	b.attempts = map[Attempt]bool{}
	return b
}

// forget drops what belongs to one life of the flow.
func (b *book) forget() {
	b.open, b.timers, b.stopped, b.keys = map[string]Effect{}, map[string]int{}, map[uint64]bool{}, map[uint64]bool{}
	b.requests, b.startID = nil, ""
	b.messages.forget()
}

// effectKey is the stable ID of an effect.
func effectKey(fx Effect) string {
	switch fx.Kind {
	case Dispatch:
		return fmt.Sprintf("dispatch %d %v", fx.Exec, fx.Attempt)
	case SetTimer:
		return fmt.Sprintf("timer %d %d", fx.Exec, fx.AtUs)
	case Queue:
		return fmt.Sprintf("queue %d", fx.Exec)
	case Send:
		return fmt.Sprintf("send %d", fx.Out.Id)
	}
	return fmt.Sprintf("kind %d", fx.Kind)
}

func (b *book) entry() *wire.Entry {
	return &wire.Entry{Version: EntryVersion, Slots: math.MaxUint32, Lsn: b.lsn + 1, TimeUs: b.nowUs, Epoch: b.epoch,
		Seed: (b.lsn + 1) * 0x2545f4914f6cdd1d, FlowId: "s1"}
}

// step is what one entry did, for the checks.
type step struct {
	e      *wire.Entry
	out    Output
	before *wire.Flow // a copy; nil = there was none
}

// apply runs one entry and checks every promise. broken is a broken promise;
// err is the core's refusal.
func (b *book) apply(e *wire.Entry) (out Output, err, broken error) {
	before := b.f.CloneVT()
	text := mustMarshal(b.f)
	entryBefore, _ := e.MarshalVT()
	out, err = Apply(b.f, e)
	if after, _ := e.MarshalVT(); !bytes.Equal(entryBefore, after) {
		return out, err, fmt.Errorf("the entry was changed")
	}
	if err != nil {
		if _, ok := err.(*Error); !ok {
			return out, err, fmt.Errorf("refusal %v is no *Error", err)
		}
		if out.Flow != nil || out.Events != nil || out.Effects != nil || out.Changed {
			return out, err, fmt.Errorf("refused, with output")
		}
		if !bytes.Equal(text, mustMarshal(b.f)) {
			return out, err, fmt.Errorf("refused with %v, but the flow changed", err)
		}
		return out, err, nil
	}
	if !out.Changed {
		if len(out.Events)+len(out.Effects) > 0 || !bytes.Equal(text, mustMarshal(out.Flow)) {
			return out, nil, fmt.Errorf("not changed, but has events or effects or another flow")
		}
		return out, nil, nil
	}
	b.entries, b.lsn, b.f = append(b.entries, e), e.Lsn, out.Flow
	if before == nil {
		b.forget()
		b.born = len(b.events)
	}
	s := step{e, out, before}
	for _, check := range []func(step) error{b.takeEvents, b.takeRequests, b.takeMessages, b.takeEffects, checkRemoved, checkParentsTold} {
		if err := check(s); err != nil {
			return out, nil, err
		}
	}
	if out.Flow == nil {
		b.forget()
		return out, nil, nil
	}
	for _, check := range []func(*wire.Flow) error{b.checkTasks, b.checkLog, b.checkChannels, b.checkRequests, checkShape, checkAwake, checkClosed} {
		if err := check(out.Flow); err != nil {
			return out, nil, err
		}
	}
	return out, nil, nil
}

func mustMarshal(f *wire.Flow) []byte {
	if f == nil {
		return nil
	}
	p, err := f.MarshalVT()
	if err != nil {
		panic(err)
	}
	return p
}

// takeEffects moves the book of emitted and finished effects, and the slots and
// keys with it.
func (b *book) takeEffects(s step) error {
	handed, queued := uint32(0), 0
	for _, fx := range s.out.Effects {
		switch fx.Kind {
		case CancelAttempt:
			fx.Kind = Dispatch
			if _, ok := b.open[effectKey(fx)]; !ok {
				return fmt.Errorf("stop of attempt %v of step %d, which is not out", fx.Attempt, fx.Exec)
			}
			b.stopped[fx.Exec] = true
			if fx.Forget {
				delete(b.open, effectKey(fx))
			}
			continue
		case ReleaseKey:
			queue := effectKey(Effect{Kind: Queue, Exec: fx.Exec})
			if _, waits := b.open[queue]; waits && (b.f == nil || stepOf(b.f, fx.Exec) == nil) {
				delete(b.open, queue) // its place
				continue
			}
			if !b.keys[fx.Exec] || fx.Key == "" {
				return fmt.Errorf("step %d gives a key back that it does not hold", fx.Exec)
			}
			delete(b.keys, fx.Exec)
			continue
		case ClearTimer:
			fx.Kind = SetTimer
			if b.timers[effectKey(fx)]--; b.timers[effectKey(fx)] < 0 || fx.AtUs <= s.e.TimeUs {
				return fmt.Errorf("%s is taken back, and is not set", effectKey(fx))
			}
			if b.timers[effectKey(fx)] == 0 {
				delete(b.open, effectKey(fx))
			}
			continue
		case SetTimer:
			b.timers[effectKey(fx)]++
		case Dispatch:
			handed++
			if err := b.handedOut(s, fx); err != nil {
				return err
			}
		case Queue:
			if fx.Key == "" {
				queued++
			}
		case Send:
			p, _ := fx.Out.MarshalVT()
			b.sends = append(b.sends, keptSend{fx.Out, p})
		}
		b.open[effectKey(fx)] = fx
	}
	if handed > s.e.Slots || queued > 0 && handed < s.e.Slots {
		return fmt.Errorf("%d steps handed out and %d queued with %d slots", handed, queued, s.e.Slots)
	}
	return b.checkOutstanding(s)
}

func (b *book) handedOut(s step, fx Effect) error {
	if b.attempts[fx.Attempt] {
		return fmt.Errorf("attempt %v was minted twice", fx.Attempt)
	}
	b.attempts[fx.Attempt] = true
	b.tasks = append(b.tasks, keptTask{fx.Task, digest(fx.Task)})
	for _, have := range b.open {
		if have.Kind == Dispatch && have.Exec == fx.Exec && !answers(s.e, have) {
			return fmt.Errorf("step %d has two attempts out", fx.Exec)
		}
	}
	if fx.Task.Spec.ConcurrencyKey != "" {
		if b.keys[fx.Exec] || s.e.GetStartQueued().GetExec() != fx.Exec {
			return fmt.Errorf("step %d takes its key, held %v, outside of its queue", fx.Exec, b.keys[fx.Exec])
		}
		b.keys[fx.Exec] = true
	}
	return nil
}

// answers says whether an entry ends an attempt by its result, or by its loss.
func answers(e *wire.Entry, fx Effect) bool {
	var exec uint64
	var a *wire.AttemptID
	switch c := e.Command.(type) {
	case *wire.Entry_StepResult:
		exec, a = c.StepResult.Exec, c.StepResult.Attempt
	case *wire.Entry_Redispatch:
		exec, a = c.Redispatch.Exec, c.Redispatch.Attempt
	}
	return exec == fx.Exec && attemptOf(a) == fx.Attempt
}

// checkOutstanding: what is emitted and not finished is what the state says, and
// what is finished has a reason.
func (b *book) checkOutstanding(s step) error {
	f := s.out.Flow
	if f == nil {
		return b.checkSent(s)
	}
	got, timers := map[string]bool{}, map[string]int{}
	list := Outstanding(f)
	for _, fx := range list {
		key := effectKey(fx)
		want, ok := b.open[key]
		if !ok || fx.FlowID != want.FlowID || fx.Key != want.Key || fx.AtUs != want.AtUs || fx.Out != want.Out {
			return fmt.Errorf("outstanding is %+v, the book says %+v", fx, want)
		}
		got[key] = true
		if fx.Kind == SetTimer {
			timers[key]++
			if fx.AtUs > s.e.TimeUs && timers[key] > b.timers[key] {
				return fmt.Errorf("%s is outstanding %d times, and was set %d times", key, timers[key], b.timers[key])
			}
		}
	}
	for key, n := range b.timers {
		if n != timers[key] {
			if fx := b.open[key]; fx.AtUs > s.e.TimeUs {
				return fmt.Errorf("%s is set %d times, and outstanding %d times", key, n, timers[key])
			}
			delete(b.timers, key) // due: it fires and finds nothing
		}
	}
	if HasOutstanding(f) != (len(list) > 0) {
		return fmt.Errorf("HasOutstanding is %v of %d", HasOutstanding(f), len(list))
	}
	for key, fx := range b.open {
		if got[key] {
			continue
		}
		if !finishes(s, fx) {
			return fmt.Errorf("%s was emitted, is not outstanding, and nothing has ended it", key)
		}
		delete(b.open, key)
	}
	held := 0
	for _, st := range f.Steps {
		if st.State == wire.Step_STARTED && st.Spec.ConcurrencyKey != "" {
			held++
			if !b.keys[st.Exec] {
				return fmt.Errorf("step %d runs without its key", st.Exec)
			}
		}
	}
	if held != len(b.keys) {
		return fmt.Errorf("%d steps hold keys, %d by the book", held, len(b.keys))
	}
	return nil
}

// checkSent: a run that was waited for does not go before all is sent.
func (b *book) checkSent(s step) error {
	for key, fx := range b.open {
		if fx.Kind == Send && s.before.Closes && s.e.GetOutboxDone().GetId() != fx.Out.Id {
			return fmt.Errorf("the flow is deleted, and %s is lost", key)
		}
	}
	return nil
}

// finishes says whether a step of the world may have ended an effect.
func finishes(s step, fx Effect) bool {
	handed := func(o Effect) bool { return o.Exec == fx.Exec && o.Kind == Dispatch }
	switch fx.Kind {
	case Dispatch:
		return answers(s.e, fx)
	case Queue:
		return slices.ContainsFunc(s.out.Effects, handed)
	case SetTimer:
		return fx.AtUs <= s.e.TimeUs // one that is not due is taken back
	case Send:
		return s.e.GetOutboxDone().GetId() == fx.Out.Id
	}
	return false
}

func digest(t *Task) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %s %d %v %d %d %s %q %s %v %q %v %v %d %q %q %d", t.FlowID, t.Key(), t.Exec, t.Attempt, t.Number, t.Retries,
		t.Name, t.Input, t.Scope, t.Cancel, t.Reason, t.Before, t.WaitPhase, t.Priority, t.Checkpoint, t.Locals, t.StartedUs)
	for _, m := range t.Matched {
		fmt.Fprintf(&s, " %s=%q %q %d@%d", m.Id, m.Payload, m.Blob, m.Size, m.AtUs)
	}
	for _, a := range t.Attributes {
		fmt.Fprintf(&s, " %s=%q", a.Name, a.Value)
	}
	for _, c := range t.Conditions {
		p, _ := c.MarshalVT()
		fmt.Fprintf(&s, " %x", p)
	}
	p, _ := t.Spec.MarshalVT()
	fmt.Fprintf(&s, " %x", p)
	return s.String()
}

// checkTasks: a task that is handed out anew from the state is the one that was
// handed out, but for what may change meanwhile.
func (b *book) checkTasks(f *wire.Flow) error {
	for _, fx := range Outstanding(f) {
		if fx.Kind != Dispatch {
			continue
		}
		was, is := *b.open[effectKey(fx)].Task, *fx.Task
		if is.Cancel != (was.Cancel || b.stopped[fx.Exec]) {
			return fmt.Errorf("step %d: cancel is %v in the state", fx.Exec, is.Cancel)
		}
		was.Cancel, was.Reason, was.Before, was.Attributes, was.Checkpoint = is.Cancel, is.Reason, is.Before, is.Attributes, is.Checkpoint
		if digest(&was) != digest(&is) {
			return fmt.Errorf("step %d: task is %s, was %s", fx.Exec, digest(&is), digest(&was))
		}
	}
	return nil
}

// checkRemoved: an attribute that is gone is told as removed, for its row.
func checkRemoved(s step) error {
	for _, a := range s.before.GetAttributes() {
		there := slices.ContainsFunc(s.out.Flow.GetAttributes(), func(o *wire.Attribute) bool { return o.Name == a.Name })
		if !there && s.out.Flow != nil && !slices.Contains(s.out.Removed, a.Name) {
			return fmt.Errorf("attribute %q is gone and was not told", a.Name)
		}
	}
	return nil
}

// checkParentsTold: when a run ends, each step that waits for it is sent its end.
func checkParentsTold(s step) error {
	closed := slices.ContainsFunc(s.out.Events, func(ev *wire.Event) bool { return IsCloser(ev.Type) })
	if !closed || s.before == nil {
		return nil
	}
	for _, p := range s.before.Parents {
		told := slices.ContainsFunc(s.out.Effects, func(fx Effect) bool {
			c := fx.Out.GetSend().GetChildClosed()
			return fx.Kind == Send && fx.Out.Send.FlowId == p.FlowId && c.GetExec() == p.Exec && c.GetCondition() == p.Condition && c.GetRunId() == s.before.RunId
		})
		if !told {
			return fmt.Errorf("the run closed and %v is not told", p)
		}
	}
	return nil
}

// replay runs the accepted entries from the start, each entry and each state
// through its encoding, as a restart would.
func (b *book) replay() error {
	var f *wire.Flow
	var events []*wire.Event
	for _, e := range b.entries {
		p, err := e.MarshalVT()
		if err != nil {
			return err
		}
		again := &wire.Entry{}
		if err := again.UnmarshalVT(p); err != nil {
			return err
		}
		if f != nil {
			p, g := mustMarshal(f), &wire.Flow{}
			if err := g.UnmarshalVT(p); err != nil {
				return err
			}
			f = g
		}
		out, err := Apply(f, again)
		if err != nil {
			return fmt.Errorf("replay of entry %d: %w", e.Lsn, err)
		}
		f, events = out.Flow, append(events, out.Events...)
	}
	if !bytes.Equal(mustMarshal(f), mustMarshal(b.f)) {
		return fmt.Errorf("replay gives another flow:\n%v\n%v", f, b.f)
	}
	if len(events) != len(b.events) {
		return fmt.Errorf("replay gives %d events, not %d", len(events), len(b.events))
	}
	for i := range events {
		p, _ := events[i].MarshalVT()
		q, _ := b.events[i].MarshalVT()
		if !bytes.Equal(p, q) {
			return fmt.Errorf("replay gives event %v, not %v", events[i], b.events[i])
		}
	}
	return nil
}

// tasksKept: what is out shares no memory that changes with its flow.
func (b *book) tasksKept() error {
	for _, k := range b.tasks {
		if d := digest(k.task); d != k.digest {
			return fmt.Errorf("a task changed after its hand-out:\n%s\n%s", k.digest, d)
		}
	}
	for _, k := range b.sends {
		if p, _ := k.out.MarshalVT(); !bytes.Equal(p, k.text) {
			return fmt.Errorf("send %d changed after it was given away", k.out.Id)
		}
	}
	return nil
}
