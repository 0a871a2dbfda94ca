package core

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/perdure-dev/perdure/internal/wire"
)

// The commands of stories about flows that close.

func (s *story) startArgs(t *testing.T, d *datadriven.TestData, c *wire.StartFlow) {
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "request", "slots":
		case "retention":
			c.RetentionUs = duration(t, d, a.Vals[0])
		case "closes":
			c.Type, c.Closes = "order", true
		case "reuse":
			c.Reuse = wire.StartFlow_Reuse(wire.StartFlow_Reuse_value[strings.ToUpper(a.Vals[0])])
		case "delay":
			c.DelayUs = duration(t, d, a.Vals[0])
		case "timeout":
			c.TimeoutUs = duration(t, d, a.Vals[0])
		case "parent": // flow:exec:condition
			p := strings.Split(a.Vals[0], ":")
			c.Parent = &wire.Link{FlowId: p[0], RunId: "run_of_parent", Exec: uint64(number(t, d, p[1])), Condition: uint32(number(t, d, p[2]))}
		case "attach": // a parent waits for what is there
			c.Type, c.Reuse = "", wire.StartFlow_ATTACH
		default:
			d.Fatalf(t, "unknown argument %q", a.Key)
		}
	}
}

func (s *story) flowCommand(t *testing.T, d *datadriven.TestData, e *wire.Entry) {
	switch d.Cmd {
	case "stop":
		c := &wire.StopFlow{}
		how, grace := "", ""
		d.ScanArgs(t, "how", &how)
		d.MaybeScanArgs(t, "reason", &c.Reason)
		if d.MaybeScanArgs(t, "grace", &grace); grace != "" {
			c.GraceUs = duration(t, d, grace)
		}
		d.MaybeScanArgs(t, "key", &c.RequestId)
		d.MaybeScanArgs(t, "run", &c.RunId)
		if id := s.ids[c.RunId]; id != "" {
			c.RunId = id
		}
		c.How = wire.StopFlow_How(wire.StopFlow_How_value[strings.ToUpper(how)])
		e.Command = &wire.Entry_StopFlow{StopFlow: c}
	case "start-queued":
		c := &wire.StartQueued{}
		d.ScanArgs(t, "exec", &c.Exec)
		e.Command = &wire.Entry_StartQueued{StartQueued: c}
	case "update":
		e.Command = &wire.Entry_Update{Update: s.update(t, d)}
	case "checkpoint":
		c := &wire.Checkpoint{Data: []byte(d.Input)}
		d.ScanArgs(t, "exec", &c.Exec)
		c.Attempt = s.attempt(t, d, c.Exec)
		e.Command = &wire.Entry_Checkpoint{Checkpoint: c}
	case "skip":
		c := &wire.SkipTimer{}
		d.MaybeScanArgs(t, "exec", &c.Exec)
		d.MaybeScanArgs(t, "step", &c.Step)
		d.MaybeScanArgs(t, "condition", &c.Condition)
		e.Command = &wire.Entry_SkipTimer{SkipTimer: c}
	case "drop":
		c := &wire.DropMessages{}
		d.ScanArgs(t, "channel", &c.Channel)
		for _, name := range strings.Fields(d.Input) {
			c.Ids = append(c.Ids, s.ids[name])
		}
		e.Command = &wire.Entry_DropMessages{DropMessages: c}
	case "go-back":
		e.Command = &wire.Entry_Reset_{Reset_: s.goBack(t, d)}
	case "child-closed":
		c := &wire.ChildClosed{RunId: "run_of_child"}
		status := ""
		d.ScanArgs(t, "exec", &c.Exec)
		d.MaybeScanArgs(t, "condition", &c.Condition)
		d.ScanArgs(t, "flow", &c.FlowId)
		d.ScanArgs(t, "status", &status)
		d.MaybeScanArgs(t, "parent", &c.ParentRunId)
		if id := s.ids[c.ParentRunId]; id != "" {
			c.ParentRunId = id
		}
		c.Status = wire.Status(wire.Status_value[strings.ToUpper(status)])
		if c.Output = []byte(d.Input); c.Status != wire.Status_COMPLETED {
			c.Output, c.Error = nil, d.Input
		}
		e.Command = &wire.Entry_ChildClosed{ChildClosed: c}
	case "answered": // a send
		c := &wire.OutboxDone{Error: d.Input}
		d.ScanArgs(t, "send", &c.Id)
		d.MaybeScanArgs(t, "run", &c.RunId)
		e.Command = &wire.Entry_OutboxDone{OutboxDone: c}
	default:
		d.Fatalf(t, "unknown command")
	}
}

// update reads what a call wrote, in the lines of a result.
func (s *story) update(t *testing.T, d *datadriven.TestData) *wire.Update {
	c := &wire.Update{}
	d.ScanArgs(t, "name", &c.Name)
	d.MaybeScanArgs(t, "request", &c.RequestId)
	d.MaybeScanArgs(t, "if-lsn", &c.IfAttributesLsn)
	for _, line := range lines(d) {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "attr":
			c.Attributes = append(c.Attributes, attr(rest))
		case "step":
			c.Next = append(c.Next, s.spec(t, d, rest)...)
		case "publish":
			c.Publish = append(c.Publish, s.publishLine(t, d, rest)...)
		case "output":
			c.Output = []byte(rest)
		case "send":
			c.Sends = append(c.Sends, s.send(t, d, rest))
		case "close":
			c.Close = s.close(t, d, rest)
		default:
			d.Fatalf(t, "unknown line %q", line)
		}
	}
	return c
}

// goBack resets to a step, with the messages consumed since.
func (s *story) goBack(t *testing.T, d *datadriven.TestData) *wire.Reset {
	c := &wire.Reset{IfLastEvent: s.b.f.GetLastEvent().CloneVT(), Reason: "again"}
	d.ScanArgs(t, "exec", &c.Exec)
	if d.HasArg("stale") {
		c.IfLastEvent = &wire.Cursor{Lsn: 1}
	}
	for _, line := range lines(d) {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "attr":
			c.Attributes = append(c.Attributes, attr(rest))
		case "step":
			c.Steps = append(c.Steps, s.spec(t, d, rest)...)
		case "consumed": // what the book knows was consumed, by its text
			for _, p := range s.b.history {
				if strings.HasSuffix(string(content(p)), " "+rest) {
					c.Publish = append(c.Publish, p)
				}
			}
		default:
			d.Fatalf(t, "unknown line %q", line)
		}
	}
	return c
}

func (s *story) resultLine(t *testing.T, d *datadriven.TestData, c *wire.StepResult, word, rest string) {
	switch word {
	case "close":
		c.Close = s.close(t, d, rest)
	case "wait":
		c.Wait = s.spec(t, d, "x "+rest)[0].Wait
	case "locals":
		c.Locals = []byte(rest)
	case "checkpoint":
		c.Checkpoint = []byte(rest)
	case "send":
		c.Sends = append(c.Sends, s.send(t, d, rest))
	case "cancel":
		c.CancelSteps = append(c.CancelSteps, rest)
	default:
		d.Fatalf(t, "unknown line %q %q", word, rest)
	}
}

// close reads `graceful|force [output]`, `fail error`, or
// `if_empty channel,channel step [output]`.
func (s *story) close(t *testing.T, d *datadriven.TestData, text string) *wire.Close {
	how, rest, _ := strings.Cut(text, " ")
	c := &wire.Close{How: wire.Close_How(wire.Close_How_value[strings.ToUpper(how)])}
	switch c.How {
	case wire.Close_FAIL:
		c.Error = rest
	case wire.Close_IF_EMPTY:
		words := strings.SplitN(rest, " ", 3)
		c.Channels, c.Otherwise = strings.Split(words[0], ","), s.spec(t, d, words[1])[0]
		if len(words) > 2 {
			c.Output = []byte(words[2])
		}
	default:
		c.Output = []byte(rest)
	}
	return c
}

// send reads `publish ID channel payload [large]`, `start ID type step` or `stop ID how`.
func (s *story) send(t *testing.T, d *datadriven.TestData, text string) *wire.Send {
	words := strings.Fields(text)
	send := &wire.Send{FlowId: words[1]}
	switch words[0] {
	case "publish":
		p := &wire.Publish{Channel: words[2], Payload: []byte(words[3])}
		if len(words) > 4 && words[4] == "large" {
			moved(p)
		}
		send.Command = &wire.Send_Publish{Publish: p}
	case "start":
		send.Command = &wire.Send_Start{Start: &wire.StartFlow{Type: words[2], Closes: true, Steps: s.spec(t, d, words[3])}}
	case "stop":
		how := wire.StopFlow_How(wire.StopFlow_How_value[strings.ToUpper(words[2])])
		send.Command = &wire.Send_Stop{Stop: &wire.StopFlow{How: how}}
	default:
		d.Fatalf(t, "unknown send %q", text)
	}
	return send
}

func (s *story) condition(t *testing.T, d *datadriven.TestData, name, text string) *wire.Condition {
	c := &wire.Condition{Name: name}
	words := strings.Split(text, ":")
	switch words[0] {
	case "channel":
		on := &wire.OnChannel{Name: words[1]}
		if len(words) > 2 {
			least, most, both := strings.Cut(words[2], "-")
			if on.AtLeast = uint32(number(t, d, least)); both {
				on.AtMost = uint32(number(t, d, most))
			}
		}
		c.On = &wire.Condition_Channel{Channel: on}
	case "timer":
		c.On = &wire.Condition_TimerUs{TimerUs: duration(t, d, words[1])}
	case "at":
		c.On = &wire.Condition_AtUs{AtUs: duration(t, d, words[1])}
	case "flow":
		on := &wire.OnFlow{FlowId: words[1]}
		if len(words) > 2 {
			on.Start = &wire.StartFlow{Type: words[2], Steps: []*wire.StepSpec{{Name: words[3]}}}
		}
		c.On = &wire.Condition_Flow{Flow: on}
	default:
		d.Fatalf(t, "unknown condition %q", text)
	}
	return c
}

func combinations(t *testing.T, d *datadriven.TestData, text string, n int) []*wire.Combination {
	var out []*wire.Combination
	if text == "" {
		for i := range n {
			out = append(out, &wire.Combination{Of: []uint32{uint32(i)}})
		}
		return out
	}
	for set := range strings.SplitSeq(text, "|") {
		c := &wire.Combination{}
		for i := range strings.SplitSeq(set, "+") {
			c.Of = append(c.Of, uint32(number(t, d, i)))
		}
		out = append(out, c)
	}
	return out
}

func conditionWords(c *wire.Condition, st *wire.ConditionState) string {
	var what string
	switch on := c.On.(type) {
	case *wire.Condition_Channel:
		what = fmt.Sprintf("%s(%d", on.Channel.Name, atLeast(on.Channel))
		if on.Channel.AtMost > 0 {
			what += fmt.Sprintf("-%d", on.Channel.AtMost)
		}
		what += ")"
	case *wire.Condition_Flow:
		what = on.Flow.FlowId
	default:
		what = fmt.Sprintf("timer %v", us(st.DueUs))
	}
	if c.Name != "" {
		what = c.Name + ": " + what
	}
	if st.Done {
		what += " holds"
		if st.Messages > 0 {
			what += fmt.Sprintf(" by %d", st.Messages)
		}
		if c.GetFlow() != nil {
			what += " " + statusWord(st.Status) + " " + string(st.Output) + st.Error
		}
	}
	return "[" + strings.TrimSpace(what) + "]"
}

func keyWords(fx Effect) string {
	if fx.Key == "" {
		return ""
	}
	return fmt.Sprintf(" for key %s, at most %d", fx.Key, fx.KeyLimit)
}

func (s *story) sendWords(send *wire.Send) string {
	switch c := send.Command.(type) {
	case *wire.Send_Start:
		if c.Start.Type == "" {
			return "tell how it ends"
		}
		return "start " + c.Start.Type
	case *wire.Send_Publish:
		return fmt.Sprintf("publish %s to %s", words(c.Publish), c.Publish.Channel)
	case *wire.Send_Stop:
		return strings.ToLower(c.Stop.How.String())
	case *wire.Send_ChildClosed:
		return fmt.Sprintf("child ended %s %q", statusWord(c.ChildClosed.Status), string(c.ChildClosed.Output)+c.ChildClosed.Error)
	}
	return "?"
}
