package core

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
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
	open     map[uint64]Effect // emitted and not finished, by step; 0 is the retention
	stopped  map[uint64]bool   // told to stop, by step
	attempts map[Attempt]bool
	tasks    []keptTask
	requests []string // keys that the flow should remember, oldest first
	last     Cursor

	published, consumed, dropped map[string]int // messages by channel
	lastUsed                     map[string]int // highest number consumed, by channel
	channelOf                    map[string]string
}

type keptTask struct {
	task   *Task
	digest string
}

func newBook() *book {
	b := &book{epoch: 1, nowUs: 1_000_000}
	b.forget()
	b.attempts = map[Attempt]bool{}
	return b
}

// forget drops what belongs to one run of the flow.
func (b *book) forget() {
	b.open, b.stopped = map[uint64]Effect{}, map[uint64]bool{}
	b.published, b.consumed, b.dropped = map[string]int{}, map[string]int{}, map[string]int{}
	b.lastUsed, b.channelOf = map[string]int{}, map[string]string{}
	b.requests = nil
}

func (b *book) entry() *wire.Entry {
	return &wire.Entry{Version: EntryVersion, Slots: math.MaxUint32, Lsn: b.lsn + 1, TimeUs: b.nowUs, Epoch: b.epoch,
		Seed: (b.lsn + 1) * 0x2545f4914f6cdd1d, FlowId: "s1"}
}

// apply runs one entry and checks every promise. broken is a broken promise;
// err is the core's refusal.
func (b *book) apply(e *wire.Entry) (out Output, err, broken error) {
	before := mustMarshal(b.f)
	entryBefore, _ := e.MarshalVT()
	hadFlow := b.f != nil
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
		if !bytes.Equal(before, mustMarshal(b.f)) {
			return out, err, fmt.Errorf("refused with %v, but the flow changed", err)
		}
		return out, err, nil
	}
	if !out.Changed {
		if len(out.Events)+len(out.Effects) > 0 || !bytes.Equal(before, mustMarshal(out.Flow)) {
			return out, nil, fmt.Errorf("not changed, but has events or effects or another flow")
		}
		return out, nil, nil
	}
	b.entries, b.lsn, b.f = append(b.entries, e), e.Lsn, out.Flow
	if !hadFlow {
		b.forget()
	}
	for _, check := range []func(*wire.Entry, Output) error{b.takeEvents, b.takeMessages, b.takeEffects} {
		if err := check(e, out); err != nil {
			return out, nil, err
		}
	}
	if out.Flow == nil {
		b.forget()
		return out, nil, nil
	}
	for _, check := range []func(*wire.Flow) error{b.checkOutstanding, b.checkLog, b.checkChannels, checkShape, checkAwake} {
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

func (b *book) takeEvents(e *wire.Entry, out Output) error {
	for _, ev := range out.Events {
		if !b.last.Before(ev) || ev.Lsn != e.Lsn || ev.AtUs != e.TimeUs {
			return fmt.Errorf("event %s at %d.%d after %v", ev.Type, ev.Lsn, ev.N, b.last)
		}
		b.last = CursorOf(ev)
	}
	b.events = append(b.events, out.Events...)
	return nil
}

// takeMessages counts what was published, dropped and consumed.
func (b *book) takeMessages(e *wire.Entry, out Output) error {
	var ps []*wire.Publish
	switch c := e.Command.(type) {
	case *wire.Entry_Publish:
		ps = []*wire.Publish{c.Publish}
	case *wire.Entry_StartFlow:
		ps = c.StartFlow.Publish
	case *wire.Entry_StepResult:
		if c.StepResult.Retry == nil || !slices.ContainsFunc(out.Events, restarted) {
			ps = c.StepResult.Publish
		}
	}
	for _, p := range ps {
		if p.RequestId != "" && slices.Contains(b.requests, p.RequestId) {
			continue
		}
		if p.RequestId != "" {
			b.requests = append(b.requests, p.RequestId)
			b.requests = b.requests[max(0, len(b.requests)-MaxRequests):]
		}
		b.published[p.Channel]++
	}
	for _, fx := range out.Effects {
		if fx.Kind != Dispatch || fx.Task.Number != 1 {
			continue
		}
		for _, m := range fx.Task.Matched {
			ch, n := splitPayload(m.Payload)
			if n <= b.lastUsed[ch] {
				return fmt.Errorf("message %s consumed after number %d", m.Payload, b.lastUsed[ch])
			}
			b.lastUsed[ch] = n
			b.consumed[ch]++
		}
	}
	for _, ev := range out.Events {
		if ev.Type == EventDropped {
			ch := b.channelOf[ev.Scope]
			if ch == "" {
				return fmt.Errorf("dropped message %s was not waiting", ev.Scope)
			}
			b.dropped[ch]++
		}
	}
	return nil
}

func restarted(ev *wire.Event) bool {
	return ev.Type == EventStepRetrying || ev.Type == EventStepRestarted
}

func splitPayload(p []byte) (string, int) {
	head, _, _ := strings.Cut(string(p), " ")
	ch, num, _ := strings.Cut(head, "/")
	n, _ := strconv.Atoi(num)
	return ch, n
}

// takeEffects moves the book of emitted and finished effects.
func (b *book) takeEffects(e *wire.Entry, out Output) error {
	switch c := e.Command.(type) {
	case *wire.Entry_StepResult:
		delete(b.open, c.StepResult.Exec)
	case *wire.Entry_Redispatch:
		delete(b.open, c.Redispatch.Exec)
	case *wire.Entry_FireTimer:
		delete(b.open, c.FireTimer.Exec)
	}
	for _, fx := range out.Effects {
		have, isOpen := b.open[fx.Exec]
		if fx.Kind == CancelAttempt {
			if !isOpen || have.Kind != Dispatch || have.Attempt != fx.Attempt {
				return fmt.Errorf("stop of attempt %v of step %d, which is not out", fx.Attempt, fx.Exec)
			}
			b.stopped[fx.Exec] = true
			continue
		}
		_, isCancel := e.Command.(*wire.Entry_Cancel)
		_, isPublish := e.Command.(*wire.Entry_Publish)
		if isOpen && !(have.Kind == SetTimer && fx.Kind == Dispatch && (isCancel || isPublish)) {
			return fmt.Errorf("step %d has two effects out", fx.Exec)
		}
		b.open[fx.Exec] = fx
		if fx.Kind == Dispatch {
			if b.attempts[fx.Attempt] {
				return fmt.Errorf("attempt %v was minted twice", fx.Attempt)
			}
			b.attempts[fx.Attempt] = true
			b.tasks = append(b.tasks, keptTask{fx.Task, digest(fx.Task)})
		}
	}
	return nil
}

func digest(t *Task) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %s %d %v %d %d %s %q %s %v %q %v", t.FlowID, t.Key(), t.Exec, t.Attempt, t.Number, t.Retries,
		t.Name, t.Input, t.Scope, t.Cancel, t.Reason, t.Before)
	for _, m := range t.Matched {
		fmt.Fprintf(&s, " %s=%q@%d", m.Id, m.Payload, m.AtUs)
	}
	for _, a := range t.Attributes {
		fmt.Fprintf(&s, " %s=%q", a.Name, a.Value)
	}
	return s.String()
}

func (b *book) checkOutstanding(f *wire.Flow) error {
	got := Outstanding(f)
	if len(got) != len(b.open) || HasOutstanding(f) != (len(got) > 0) {
		return fmt.Errorf("%d effects outstanding by state, %d by the book", len(got), len(b.open))
	}
	for _, fx := range got {
		want, ok := b.open[fx.Exec]
		if !ok || fx.Kind != want.Kind || fx.Attempt != want.Attempt || fx.AtUs != want.AtUs || fx.FlowID != want.FlowID {
			return fmt.Errorf("step %d: outstanding %+v, the book says %+v", fx.Exec, fx, want)
		}
		if fx.Kind != Dispatch {
			continue
		}
		// What may have changed since the hand-out: attributes, log and cancel.
		was, is := *want.Task, *fx.Task
		if is.Cancel != (was.Cancel || b.stopped[fx.Exec]) {
			return fmt.Errorf("step %d: cancel is %v in the state", fx.Exec, is.Cancel)
		}
		was.Cancel, was.Reason, was.Before, was.Attributes = is.Cancel, is.Reason, is.Before, is.Attributes
		if digest(&was) != digest(&is) {
			return fmt.Errorf("step %d: task is %s, was %s", fx.Exec, digest(&is), digest(&was))
		}
	}
	return nil
}

func (b *book) checkLog(f *wire.Flow) error {
	n, items := uint64(0), uint64(0)
	for i := len(b.events) - 1; i >= 0; i-- {
		n, items = n+1, items+uint64(len(b.events[i].Items))
		if b.events[i].Type == EventStarted {
			break
		}
	}
	if f.EventCount != n || f.ItemCount != items || f.LastEvent.Lsn != b.last.LSN || f.LastEvent.N != b.last.N {
		return fmt.Errorf("flow counts %d events and %d items to %v, log has %d and %d to %v",
			f.EventCount, f.ItemCount, f.LastEvent, n, items, b.last)
	}
	return nil
}

// checkChannels: what was published is consumed, dropped or waiting, in order.
func (b *book) checkChannels(f *wire.Flow) error {
	waiting := map[string]int{}
	for _, c := range f.Channels {
		low := b.lastUsed[c.Name]
		for _, m := range c.Pending {
			ch, n := splitPayload(m.Payload)
			if ch != c.Name || n <= low {
				return fmt.Errorf("message %s waits in %q behind number %d", m.Payload, c.Name, low)
			}
			low = n
			b.channelOf[m.Id] = ch
		}
		waiting[c.Name] = len(c.Pending)
	}
	for ch, n := range b.published {
		if got := b.consumed[ch] + b.dropped[ch] + waiting[ch]; got != n {
			return fmt.Errorf("channel %q: %d published, %d consumed, %d dropped, %d waiting",
				ch, n, b.consumed[ch], b.dropped[ch], waiting[ch])
		}
	}
	var keys []string
	for _, r := range f.Requests {
		keys = append(keys, r.RequestId)
	}
	if !slices.Equal(keys, b.requests) {
		return fmt.Errorf("flow remembers requests %q, not %q", keys, b.requests)
	}
	return nil
}

// checkShape: order and bounds of the lists, and what each step state implies.
func checkShape(f *wire.Flow) error {
	if !sort.SliceIsSorted(f.Attributes, func(i, j int) bool { return f.Attributes[i].Name < f.Attributes[j].Name }) {
		return fmt.Errorf("attributes are not sorted")
	}
	for i, a := range f.Attributes {
		if len(a.Value) == 0 || i > 0 && a.Name == f.Attributes[i-1].Name {
			return fmt.Errorf("attribute %q is empty or twice", a.Name)
		}
	}
	for i, c := range f.Channels {
		if len(c.Pending) == 0 || len(c.Pending) > MaxPending || i > 0 && c.Name <= f.Channels[i-1].Name {
			return fmt.Errorf("channel %q has %d messages, or is out of order", c.Name, len(c.Pending))
		}
	}
	if len(f.Steps) > MaxSteps || len(f.Channels) > MaxChannels || len(f.Attributes) > MaxAttributes || len(f.Requests) > MaxRequests {
		return fmt.Errorf("a bound is broken")
	}
	exec := uint64(0)
	for _, s := range f.Steps {
		if s.Exec <= exec || s.Exec >= f.NextExec {
			return fmt.Errorf("step %d after %d, next is %d", s.Exec, exec, f.NextExec)
		}
		exec = s.Exec
		ok := s.Retries <= s.Attempts
		switch s.State {
		case wire.Step_WAITING:
			ok = s.Attempt == nil && s.Attempts == 0 && s.Spec.Wait != nil && s.RetryAtUs == 0 && s.Matched == nil
		case wire.Step_STARTED:
			ok = ok && s.Attempt != nil && s.Attempts > 0 && s.RetryAtUs == 0
		case wire.Step_BACKOFF:
			ok = ok && s.RetryAtUs > 0 && s.Retries > 0 && !s.Cancel
		}
		if !ok || atRest(s) && (s.Cancel || s.Scope != "") {
			return fmt.Errorf("step %d makes no sense: %v", s.Exec, s)
		}
	}
	return nil
}

// checkAwake: nothing sleeps that should have been woken. The oldest waiter of
// a channel has too few messages, and a cancelled waiter has running company.
func checkAwake(f *wire.Flow) error {
	first := map[string]bool{}
	for _, s := range f.Steps {
		if s.State != wire.Step_WAITING {
			continue
		}
		w := s.Spec.Wait
		if !first[w.Channel] && pendingCount(f, w.Channel) >= int(w.Count) {
			return fmt.Errorf("step %d sleeps with %d messages for it", s.Exec, pendingCount(f, w.Channel))
		}
		first[w.Channel] = true
		if !s.Cancel {
			continue
		}
		if !slices.ContainsFunc(f.Steps, func(o *wire.Step) bool { return o.State != wire.Step_WAITING && o.Scope == s.Scope }) {
			return fmt.Errorf("cancelled step %d sleeps, and nobody is left to wake it", s.Exec)
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

// tasksKept: a task that is out shares no memory that changes with its flow.
func (b *book) tasksKept() error {
	for _, k := range b.tasks {
		if d := digest(k.task); d != k.digest {
			return fmt.Errorf("a task changed after its hand-out:\n%s\n%s", k.digest, d)
		}
	}
	return nil
}
