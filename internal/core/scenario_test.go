package core

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/perdure-dev/perdure/internal/wire"
)

// TestScenarios runs the stories of testdata. Each line of a story is one
// command; below it stand the reply, then the events and the effects in order.
// Message and run IDs are shown as m1, run1 and so on, times since the start.
// Every command is also checked against the book. See the head of turn.txt.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if strings.Contains(path, "fuzz") {
			return
		}
		s := newStory()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
		if err := s.b.replay(); err != nil {
			t.Error(err)
		}
	})
}

type story struct {
	b     *book
	names map[string]string // ID to the name shown
	ids   map[string]string // the other way
	kinds map[string]int
	msgs  int

	requests map[string][]byte // payload by request
}

// payload numbers a message for the book; readable takes the number away again.
func (s *story) payload(channel, text string) []byte {
	s.msgs++
	return fmt.Appendf(nil, "%s/%d %s", channel, s.msgs, text)
}

// repeated gives the same payload again for the same request.
func (s *story) repeated(request, channel, text string) []byte {
	key := request + " " + channel + " " + text
	if p := s.requests[key]; p != nil && request != "" {
		return p
	}
	p := s.payload(channel, text)
	s.requests[key] = p
	return p
}

var (
	numbering = regexp.MustCompile(`"[a-z0-9-]+/[0-9]+ `)
	anyID     = regexp.MustCompile(`(run|turn|msg)_[0-9a-f]{16}`)
)

func newStory() *story {
	s := &story{b: newBook(), names: map[string]string{}, ids: map[string]string{}, kinds: map[string]int{}, requests: map[string][]byte{}}
	s.b.nowUs = 0
	return s
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	e := s.b.entry()
	switch d.Cmd {
	case "reset":
		*s = *newStory()
		return ""
	case "advance":
		s.b.nowUs += duration(t, d, d.CmdArgs[0].Key)
		return ""
	case "show":
		return s.show()
	case "owner":
		d.ScanArgs(t, "epoch", &s.b.epoch)
		return s.outstanding()
	case "start":
		e.Command = &wire.Entry_StartFlow{StartFlow: s.start(t, d)}
	case "publish":
		p := &wire.Publish{}
		s.publishArgs(t, d, d.CmdArgs, p)
		return s.repeat(t, d, func(i int) *wire.Entry {
			e, p := s.b.entry(), p.CloneVT()
			p.RequestId = strings.ReplaceAll(p.RequestId, "*", fmt.Sprint(i+1))
			p.Payload = s.repeated(p.RequestId, p.Channel, d.Input)
			if d.HasArg("large") {
				moved(p)
			}
			e.Command = &wire.Entry_Publish{Publish: p}
			return e
		})
	case "cancel":
		c := &wire.Cancel{}
		d.MaybeScanArgs(t, "channel", &c.Channel)
		d.MaybeScanArgs(t, "reason", &c.Reason)
		d.MaybeScanArgs(t, "scope", &c.Scope)
		if id := s.ids[c.Scope]; id != "" {
			c.Scope = id
		}
		e.Command = &wire.Entry_Cancel{Cancel: c}
	case "result":
		e.Command = &wire.Entry_StepResult{StepResult: s.result(t, d)}
	case "redispatch":
		c := &wire.Redispatch{Reason: "worker lost"}
		d.ScanArgs(t, "exec", &c.Exec)
		c.Attempt = s.attempt(t, d, c.Exec)
		e.Command = &wire.Entry_Redispatch{Redispatch: c}
	case "fire":
		c := &wire.FireTimer{}
		d.MaybeScanArgs(t, "exec", &c.Exec)
		e.Command = &wire.Entry_FireTimer{FireTimer: c}
	case "delete":
		e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "user"}}
	case "set":
		return s.set(t, d)
	default:
		s.flowCommand(t, d, e)
	}
	if n, ok := d.Arg("slots"); ok {
		e.Slots = uint32(number(t, d, n.Vals[0]))
	}
	return s.apply(t, d, e)
}

// repeat runs times=N commands and tells only the last one.
func (s *story) repeat(t *testing.T, d *datadriven.TestData, make func(i int) *wire.Entry) string {
	times := 1
	d.MaybeScanArgs(t, "times", &times)
	for i := range times - 1 {
		if _, err, broken := s.b.apply(make(i)); err != nil || broken != nil {
			d.Fatalf(t, "%d of %d: %v, %v", i+1, times, err, broken)
		}
	}
	return s.apply(t, d, make(times-1))
}

func (s *story) apply(t *testing.T, d *datadriven.TestData, e *wire.Entry) string {
	out, err, broken := s.b.apply(e)
	if broken != nil {
		d.Fatalf(t, "broken promise: %v", broken)
	}
	if err != nil {
		var r *Error
		errors.As(err, &r)
		return fmt.Sprintf("refused: %s: %s\n", r.Code, s.readable(r.Message))
	}
	var w strings.Builder
	w.WriteString("ok")
	s.name("run", out.Reply.RunID)
	for _, id := range out.Reply.MessageIDs {
		fmt.Fprintf(&w, " %s", s.name("m", id))
	}
	for _, f := range []struct {
		is   bool
		word string
	}{{out.Reply.Created, " created"}, {out.Reply.Started, " started"}, {out.Reply.Duplicate, " duplicate"}, {!out.Changed, " unchanged"}} {
		if f.is {
			w.WriteString(f.word)
		}
	}
	if n := out.Reply.Cancelled; n > 0 {
		fmt.Fprintf(&w, " cancelled=%d", n)
	}
	if len(out.Reply.Output) > 0 {
		fmt.Fprintf(&w, " output %q", out.Reply.Output)
	}
	w.WriteString("\n")
	some(&w, out.Events, s.eventLine)
	some(&w, out.Effects, s.effectLine)
	if out.Flow == nil {
		w.WriteString("the flow is gone\n")
	}
	return s.readable(w.String())
}

// some tells the first few of a list, and how many there are.
func some[T any](w *strings.Builder, list []T, line func(T) string) {
	for i, x := range list {
		if i == 5 {
			fmt.Fprintf(w, "  ... %d in all\n", len(list))
			return
		}
		w.WriteString(line(x))
	}
}

// name gives an ID the next name of its kind, at its first sight.
func (s *story) name(kind, id string) string {
	if id == "" {
		return ""
	}
	if s.names[id] == "" {
		s.kinds[kind]++
		n := fmt.Sprint(kind, s.kinds[kind])
		s.names[id], s.ids[n] = n, id
	}
	return s.names[id]
}

func (s *story) readable(text string) string {
	text = anyID.ReplaceAllStringFunc(text, func(id string) string {
		if n := s.names[id]; n != "" {
			return n
		}
		return id
	})
	return numbering.ReplaceAllString(text, `"`)
}

func (s *story) eventLine(ev *wire.Event) string {
	var w strings.Builder
	fmt.Fprintf(&w, "  %d.%d %s", ev.Lsn, ev.N, ev.Type)
	if ev.Scope != "" {
		fmt.Fprintf(&w, " of %s", s.name("m", ev.Scope))
	}
	if ev.Step != "" {
		fmt.Fprintf(&w, " %s#%d", ev.Step, ev.Exec)
	}
	if len(ev.Data) > 0 {
		fmt.Fprintf(&w, " %q", ev.Data)
	}
	if ev.DataBlob != "" {
		fmt.Fprintf(&w, " blob %q", ev.DataBlob)
	}
	for i, it := range ev.Items {
		if len(ev.ItemBlobs) > 0 && ev.ItemBlobs[i] != "" {
			fmt.Fprintf(&w, " item blob %q", ev.ItemBlobs[i])
			continue
		}
		fmt.Fprintf(&w, " item %q", it)
	}
	for _, a := range ev.Attributes {
		fmt.Fprintf(&w, " %s=%s", a.Name, a.Value)
	}
	if len(ev.Next) > 0 {
		fmt.Fprintf(&w, " next %s", strings.Join(ev.Next, ", "))
	}
	return w.String() + "\n"
}

func (s *story) effectLine(fx Effect) string {
	a := fmt.Sprintf("%d.%d.%d", fx.Attempt.Epoch, fx.Attempt.LSN, fx.Attempt.N)
	switch fx.Kind {
	case CancelAttempt:
		if fx.Forget {
			a += ", no result is wanted"
		}
		return fmt.Sprintf("  -> stop #%d attempt %s\n", fx.Exec, a)
	case Queue:
		return fmt.Sprintf("  -> queue %s#%d%s\n", fx.Step, fx.Exec, keyWords(fx))
	case ReleaseKey:
		return fmt.Sprintf("  -> give back key %s of #%d\n", fx.Key, fx.Exec)
	case Send:
		return fmt.Sprintf("  -> send %d to %s: %s\n", fx.Out.Id, fx.Out.Send.FlowId, s.sendWords(fx.Out.Send))
	case SetTimer, ClearTimer:
		who, set := "retention", ""
		if fx.Kind == ClearTimer {
			set = "no "
		}
		if s.b.f.GetCloses() && (fx.Kind == ClearTimer || fx.AtUs != s.b.f.ExpireUs) {
			who = "run"
		}
		if fx.Exec != 0 {
			who = fmt.Sprint("#", fx.Exec)
		}
		return fmt.Sprintf("  -> %stimer %s at %v\n", set, who, us(fx.AtUs))
	}
	var w strings.Builder
	fmt.Fprintf(&w, "  -> dispatch %s#%d attempt %s (%d)", fx.Task.Name, fx.Exec, a, fx.Task.Number)
	for _, m := range fx.Task.Matched {
		fmt.Fprintf(&w, " %s=%s", s.name("m", m.Id), words(m))
	}
	for i, c := range fx.Task.Conditions {
		fmt.Fprintf(&w, " %s", conditionWords(fx.Task.Spec.Wait.Conditions[i], c))
	}
	if fx.Task.Prefetch {
		w.WriteString(" prefetch")
	}
	for _, f := range []struct {
		is   bool
		word string
	}{{fx.Task.WaitPhase, " WaitFor"}, {fx.Task.Spec.Async, " async"}} {
		if f.is {
			w.WriteString(f.word)
		}
	}
	for _, f := range []struct{ word, text string }{
		{"checkpoint", string(fx.Task.Checkpoint)}, {"locals", string(fx.Task.Locals)}, {"failure", fx.Task.Spec.Failure}} {
		if f.text != "" {
			fmt.Fprintf(&w, " %s %q", f.word, f.text)
		}
	}
	if fx.Task.Cancel {
		fmt.Fprintf(&w, " cancelled %q", fx.Task.Reason)
	}
	return w.String() + "\n"
}

// words shows what a message holds.
func words(m interface {
	GetPayload() []byte
	GetBlob() string
	GetSize() uint64
}) string {
	if m.GetBlob() != "" {
		return fmt.Sprintf("blob %q", m.GetBlob())
	}
	return fmt.Sprintf("%q", m.GetPayload())
}

func us(v int64) time.Duration { return time.Duration(v) * time.Microsecond }

func (s *story) outstanding() string {
	var w strings.Builder
	for _, fx := range Outstanding(s.b.f) {
		w.WriteString(s.effectLine(fx))
	}
	return s.readable(w.String())
}

func (s *story) show() string {
	f := s.b.f
	if f == nil {
		return "no flow\n"
	}
	var w strings.Builder
	if f.Closes {
		fmt.Fprintf(&w, "%s %s events=%d", s.name("run", f.RunId), statusWord(f.Status), f.EventCount)
		for _, x := range []struct{ word, text string }{{"output", string(f.Output)}, {"error", f.Error}} {
			if x.text != "" {
				fmt.Fprintf(&w, " %s %q", x.word, x.text)
			}
		}
		w.WriteString("\n")
	} else {
		fmt.Fprintf(&w, "busy=%v events=%d items=%d\n", IsBusy(f), f.EventCount, f.ItemCount)
	}
	some(&w, f.Steps, s.stepLine)
	some(&w, f.Channels, s.channelLine)
	some(&w, f.Outbox, func(o *wire.Outgoing) string {
		return fmt.Sprintf("  sent %d to %s: %s\n", o.Id, o.Send.FlowId, s.sendWords(o.Send))
	})
	some(&w, f.Attributes, func(a *wire.Attribute) string { return fmt.Sprintf("  attribute %s=%q\n", a.Name, a.Value) })
	return s.readable(w.String())
}

func (s *story) stepLine(st *wire.Step) string {
	var w strings.Builder
	fmt.Fprintf(&w, "  %s#%d %s", st.Spec.Name, st.Exec, strings.ToLower(st.State.String()))
	if st.Scope != "" {
		fmt.Fprintf(&w, " of %s", s.name("m", st.Scope))
	}
	if wt := st.Spec.Wait; wt != nil && st.State == wire.Step_WAITING {
		if len(wt.Conditions) == 0 {
			fmt.Fprintf(&w, " for %d of %s", wt.Count, wt.Channel)
		}
		for i, c := range st.Conditions {
			fmt.Fprintf(&w, " %s", conditionWords(wt.Conditions[i], c))
		}
	}
	if st.Cancel {
		w.WriteString(" cancelled")
	}
	return w.String() + "\n"
}

func (s *story) channelLine(c *wire.Channel) string {
	var w strings.Builder
	fmt.Fprintf(&w, "  channel %s:", c.Name)
	for i, m := range c.Pending {
		if i == 3 {
			fmt.Fprintf(&w, " ... %d in all", len(c.Pending))
			break
		}
		fmt.Fprintf(&w, " %s=%s", s.name("m", m.Id), words(m))
	}
	return w.String() + "\n"
}

func duration(t *testing.T, d *datadriven.TestData, text string) int64 {
	v, err := time.ParseDuration(text)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return v.Microseconds()
}

func number(t *testing.T, d *datadriven.TestData, text string) int {
	v, err := strconv.Atoi(text)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return v
}
