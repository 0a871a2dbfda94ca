package core

import (
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// messages is the part of the book that counts messages.
type messages struct {
	published, consumed, dropped map[string]int // by channel
	lastUsed                     map[string]int // highest number consumed, by channel
	channelOf                    map[string]string
	holders                      map[uint64]bool // steps whose messages are counted
	history                      []*wire.Publish // what the run has consumed, in order
}

func (m *messages) forget() {
	m.published, m.consumed, m.dropped = map[string]int{}, map[string]int{}, map[string]int{}
	m.lastUsed, m.channelOf, m.holders, m.history = map[string]int{}, map[string]string{}, map[uint64]bool{}, nil
}

func (b *book) takeEvents(s step) error {
	for _, ev := range s.out.Events {
		if !b.last.Before(ev) || ev.Lsn != s.e.Lsn || ev.AtUs != s.e.TimeUs {
			return fmt.Errorf("event %s at %d.%d after %v", ev.Type, ev.Lsn, ev.N, b.last)
		}
		b.last = CursorOf(ev)
	}
	b.events = append(b.events, s.out.Events...)
	return nil
}

func newRun(s step) bool { return s.out.Flow != nil && s.out.Flow.RunId != s.before.GetRunId() }

// takeRequests keeps the keys that the flow should remember: "m " of messages,
// "u " of updates, "s " of starts, "stop " of stops.
func (b *book) takeRequests(s step) error {
	old := b.startID
	if newRun(s) && old != "" {
		b.remember("s " + old)
		b.startID = ""
	}
	switch c := s.e.Command.(type) {
	case *wire.Entry_StartFlow:
		if !newRun(s) { // attached
			if c.StartFlow.RequestId != "" {
				b.remember("s " + c.StartFlow.RequestId)
			}
			return nil
		}
		b.requests = slices.DeleteFunc(b.requests, func(r string) bool { return r[0] != 's' })
		b.startID = c.StartFlow.RequestId
	case *wire.Entry_Update:
		if c.Update.RequestId != "" {
			b.remember("u " + c.Update.RequestId)
		}
	case *wire.Entry_StopFlow:
		if c.StopFlow.RequestId != "" && !s.out.Reply.Duplicate {
			b.remember("stop " + c.StopFlow.RequestId)
		}
	}
	return nil
}

func (b *book) remember(key string) {
	b.requests = append(b.requests, key)
	b.requests = b.requests[max(0, len(b.requests)-MaxRequests):]
}

// wrote says whether a result's own writes took effect.
func wrote(s step) bool {
	c := s.e.GetStepResult()
	return c != nil && (c.Retry == nil || s.out.Flow.GetStepsDone() > s.before.StepsDone)
}

// publishes gives the messages that an entry brings.
func publishes(s step) []*wire.Publish {
	switch c := s.e.Command.(type) {
	case *wire.Entry_Publish:
		return []*wire.Publish{c.Publish}
	case *wire.Entry_StartFlow:
		if newRun(s) {
			return c.StartFlow.Publish
		}
	case *wire.Entry_Update:
		return c.Update.Publish
	case *wire.Entry_StepResult:
		if wrote(s) {
			return c.StepResult.Publish
		}
	case *wire.Entry_Reset_:
		ps := slices.Clone(c.Reset_.Publish)
		for _, ch := range s.before.Channels {
			for _, m := range ch.Pending {
				ps = append(ps, publishOf(ch.Name, m))
			}
		}
		return ps
	}
	return nil
}

// takeMessages counts what was published, dropped and consumed. What waits when a
// run ends goes with it.
func (b *book) takeMessages(s step) error {
	if newRun(s) {
		b.messages.forget()
	}
	for _, p := range publishes(s) {
		if p.RequestId != "" && slices.ContainsFunc(b.requests, func(r string) bool { return r == "m "+p.RequestId }) {
			continue
		}
		if p.RequestId != "" {
			b.remember("m " + p.RequestId)
		}
		b.published[p.Channel]++
	}
	for _, ev := range s.out.Events {
		if ev.Type == EventDropped {
			ch := b.channelOf[ev.Scope]
			if ch == "" {
				return fmt.Errorf("dropped message %s was not waiting", ev.Scope)
			}
			b.dropped[ch]++
		}
	}
	if slices.ContainsFunc(s.out.Events, func(ev *wire.Event) bool { return IsCloser(ev.Type) }) && s.out.Flow.GetStatus() != wire.Status_RUNNING {
		h := b.history // a reset goes back to it
		b.messages.forget()
		b.history = h
		return nil
	}
	return b.consume(s)
}

// consume counts the messages that steps have taken: by the entry's hand-outs,
// or held while they are queued. They are the oldest of their channels, and each
// is taken once.
func (b *book) consume(s step) error {
	taken, from := map[string][]int{}, len(b.history)
	take := func(exec uint64, ms []*wire.Message) error {
		if b.holders[exec] || len(ms) == 0 {
			return nil
		}
		b.holders[exec] = true
		for _, m := range ms {
			ch, n := splitPayload(content(m))
			taken[ch] = append(taken[ch], n)
			b.consumed[ch]++
			b.history = append(b.history, publishOf(ch, m))
		}
		return nil
	}
	for _, fx := range s.out.Effects {
		if fx.Kind == Dispatch {
			if err := take(fx.Exec, fx.Task.Matched); err != nil {
				return err
			}
		}
	}
	for _, st := range s.out.Flow.GetSteps() {
		if err := take(st.Exec, st.Matched); err != nil {
			return err
		}
	}
	slices.SortStableFunc(b.history[from:], func(p, q *wire.Publish) int {
		_, i := splitPayload(content(p))
		_, j := splitPayload(content(q))
		return i - j
	})
	for ch, ns := range taken {
		sort.Ints(ns)
		if ns[0] <= b.lastUsed[ch] {
			return fmt.Errorf("message %s/%d consumed after number %d", ch, ns[0], b.lastUsed[ch])
		}
		b.lastUsed[ch] = ns[len(ns)-1]
		for i := 1; i < len(ns); i++ {
			if ns[i] == ns[i-1] {
				return fmt.Errorf("message %s/%d consumed twice", ch, ns[i])
			}
		}
	}
	return nil
}

// content is the text that the book knows a message by: its payload, or the name
// of the blob that holds it.
func content(m interface {
	GetPayload() []byte
	GetBlob() string
}) []byte {
	if b := m.GetBlob(); b != "" {
		return []byte(b)
	}
	return m.GetPayload()
}

func publishOf(channel string, m *wire.Message) *wire.Publish {
	return &wire.Publish{Channel: channel, Payload: m.Payload, Blob: m.Blob, Size: m.Size}
}

// moved puts the payload into a blob that is named by it.
func moved(p *wire.Publish) {
	p.Blob, p.Size, p.Payload = string(p.Payload), uint64(len(p.Payload)), nil
}

func splitPayload(p []byte) (string, int) {
	head, _, _ := strings.Cut(string(p), " ")
	ch, num, _ := strings.Cut(head, "/")
	n, _ := strconv.Atoi(num)
	return ch, n
}

func (b *book) checkLog(f *wire.Flow) error {
	n, items := uint64(0), uint64(0)
	for _, ev := range b.events[b.born:] {
		n, items = n+1, items+uint64(len(ev.Items))
	}
	if f.EventCount != n || f.ItemCount != items || f.LastEvent.Lsn != b.last.LSN || f.LastEvent.N != b.last.N {
		return fmt.Errorf("flow counts %d events and %d items to %v, log has %d and %d to %v",
			f.EventCount, f.ItemCount, f.LastEvent, n, items, b.last)
	}
	if !f.Closes {
		return nil
	}
	for i := len(b.events) - 1; ; i-- {
		if ev := b.events[i]; ev.Type == EventStarted || ev.Type == EventReset {
			if f.RunStart.GetLsn() != ev.Lsn || f.RunStart.GetN() != ev.N {
				return fmt.Errorf("the run begins at %v, its first event is at %d.%d", f.RunStart, ev.Lsn, ev.N)
			}
			return nil
		}
	}
}

// checkChannels: what was published is consumed, dropped or waiting, in order.
func (b *book) checkChannels(f *wire.Flow) error {
	waiting := map[string]int{}
	for _, c := range f.Channels {
		low := b.lastUsed[c.Name]
		for _, m := range c.Pending {
			ch, n := splitPayload(content(m))
			if ch != c.Name || n <= low {
				return fmt.Errorf("message %s waits in %q behind number %d", content(m), c.Name, low)
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
	return nil
}

func (b *book) checkRequests(f *wire.Flow) error {
	// Each key has a row by its number: what the tables give back is those from
	// first on.
	first := f.FirstRequest
	if f.NextRequest > MaxRequests {
		first = max(first, f.NextRequest-MaxRequests)
	}
	if n := f.NextRequest - first; n != uint64(len(f.Requests)) {
		return fmt.Errorf("%d keys from %d to %d", len(f.Requests), first, f.NextRequest)
	}
	var keys []string
	for i, r := range f.Requests {
		if r.Seq != first+uint64(i) || r.Lsn == 0 || r.Lsn > b.lsn {
			return fmt.Errorf("key %d has number %d and entry %d, should be %d", i, r.Seq, r.Lsn, first+uint64(i))
		}
		start, isStart := strings.CutPrefix(r.RequestId, startKey)
		stop, isStop := strings.CutPrefix(r.RequestId, stopKey)
		switch {
		case isStart:
			keys = append(keys, "s "+start)
		case isStop:
			keys = append(keys, "stop "+stop)
		case r.MessageId == "":
			keys = append(keys, "u "+r.RequestId)
		default:
			keys = append(keys, "m "+r.RequestId)
		}
	}
	if !slices.Equal(keys, b.requests) || f.StartRequestId != b.startID {
		return fmt.Errorf("flow remembers requests %q and start %q, not %q and %q", keys, f.StartRequestId, b.requests, b.startID)
	}
	return nil
}

// checkShape: order and bounds of the lists, and what each step state implies.
func checkShape(f *wire.Flow) error {
	if !sort.SliceIsSorted(f.Attributes, func(i, j int) bool { return f.Attributes[i].Name < f.Attributes[j].Name }) {
		return fmt.Errorf("attributes are not sorted")
	}
	for i, a := range f.Attributes {
		if isRemoval(a) || i > 0 && a.Name == f.Attributes[i-1].Name || a.Lsn > f.AttributesLsn {
			return fmt.Errorf("attribute %q is empty or twice or newer than the newest", a.Name)
		}
	}
	for i, c := range f.Channels {
		if len(c.Pending) == 0 || len(c.Pending) > MaxPending || i > 0 && c.Name <= f.Channels[i-1].Name {
			return fmt.Errorf("channel %q has %d messages, or is out of order", c.Name, len(c.Pending))
		}
	}
	if len(f.Steps) > MaxSteps || len(f.Channels) > MaxChannels || len(f.Attributes) > MaxAttributes || len(f.Requests) > MaxRequests ||
		len(f.Parents) > MaxParents || len(f.Outbox) > MaxOutbox+MaxConditions {
		return fmt.Errorf("a bound is broken")
	}
	for i, o := range f.Outbox {
		if o.Id > f.NextOutgoing || i > 0 && o.Id <= f.Outbox[i-1].Id {
			return fmt.Errorf("send %d is out of order", o.Id)
		}
	}
	exec := uint64(0)
	for _, s := range f.Steps {
		if s.Exec <= exec || s.Exec >= f.NextExec {
			return fmt.Errorf("step %d after %d, next is %d", s.Exec, exec, f.NextExec)
		}
		exec = s.Exec
		if err := checkStep(s); err != nil {
			return err
		}
	}
	return nil
}

func checkStep(s *wire.Step) error {
	ok := s.Retries <= s.Attempts
	switch s.State {
	case wire.Step_WAITING:
		ok = s.Attempt == nil && s.Attempts == 0 && s.Spec.Wait != nil && s.RetryAtUs == 0 && s.Matched == nil && !s.Executing &&
			len(s.Conditions) == len(s.Spec.Wait.Conditions)
	case wire.Step_STARTED:
		ok = ok && s.Attempt != nil && s.Attempts > 0 && s.RetryAtUs == 0 && s.QueuedUs == 0
	case wire.Step_BACKOFF:
		ok = ok && s.RetryAtUs > 0 && s.Retries > 0 && !s.Cancel
	case wire.Step_QUEUED:
		ok = ok && s.RetryAtUs == 0
	case wire.Step_DELAYED:
		ok = s.RetryAtUs > 0 && s.Attempts == 0 && s.Matched == nil
	default:
		ok = false
	}
	if s.State != wire.Step_WAITING && s.State != wire.Step_DELAYED && s.Spec.Wait != nil && !s.Executing {
		ok = false // its wait is over
	}
	if !ok || atRest(s) && (s.Cancel || s.Scope != "") {
		return fmt.Errorf("step %d makes no sense: %v", s.Exec, s)
	}
	for i, c := range s.Conditions {
		if c.Done && c.Messages > 0 != (s.Spec.Wait.Conditions[i].GetChannel() != nil) {
			return fmt.Errorf("condition %d of step %d makes no sense: %v", i, s.Exec, c)
		}
	}
	return nil
}

// checkAwake: nothing sleeps that should have been woken. A waiting step has no
// set of conditions that holds, and a cancelled waiter has running company.
func checkAwake(f *wire.Flow) error {
	for i, s := range f.Steps {
		if s.State != wire.Step_WAITING {
			continue
		}
		if couldStart(f, i) {
			return fmt.Errorf("step %d sleeps although its wait holds: %v", s.Exec, s)
		}
		if !s.Cancel || f.Closes {
			continue
		}
		if !slices.ContainsFunc(f.Steps, func(o *wire.Step) bool { return o.State != wire.Step_WAITING && o.Scope == s.Scope }) {
			return fmt.Errorf("cancelled step %d sleeps, and nobody is left to wake it", s.Exec)
		}
	}
	return nil
}

// couldStart says by the words of the contract whether a waiting step should run:
// messages are kept by the oldest step that waits for their channel alone.
func couldStart(f *wire.Flow, i int) bool {
	free := func(channel string) int {
		for _, o := range f.Steps[:i] {
			if w := o.Spec.Wait; o.State == wire.Step_WAITING && (len(w.Conditions) == 0 && w.Channel == channel ||
				len(w.Conditions) == 1 && w.Conditions[0].GetChannel().GetName() == channel) {
				return 0
			}
		}
		return pendingCount(f, channel)
	}
	s := f.Steps[i]
	w := s.Spec.Wait
	if len(w.Conditions) == 0 {
		return free(w.Channel) >= int(w.Count)
	}
	sets := [][]uint32{}
	for _, c := range w.Combinations {
		sets = append(sets, c.Of)
	}
	if len(sets) == 0 {
		all := []uint32{}
		for j := range w.Conditions {
			all = append(all, uint32(j))
		}
		sets = append(sets, all)
	}
	return slices.ContainsFunc(sets, func(set []uint32) bool {
		need := map[string]int{}
		for _, j := range set {
			c := w.Conditions[j].GetChannel()
			if c == nil && !s.Conditions[j].Done {
				return false
			}
			if c != nil {
				need[c.Name] += max(1, int(c.AtLeast))
			}
		}
		for ch, n := range need {
			if free(ch) < n {
				return false
			}
		}
		return true
	})
}

// checkClosed: what has ended holds nothing, and what should have ended has.
func checkClosed(f *wire.Flow) error {
	if f.Status == wire.Status_RUNNING {
		if len(f.Steps) == 0 && (f.Closing != nil || f.GraceAtUs != 0) {
			return fmt.Errorf("nothing is left to wait for, and the run has not closed")
		}
		return nil
	}
	if len(f.Steps)+len(f.Channels)+len(f.Parents) > 0 || f.TimeoutAtUs != 0 || f.GraceAtUs != 0 || f.Closing != nil || !f.Closes {
		return fmt.Errorf("a closed run holds on to something: %v", f)
	}
	return nil
}
