package core

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/perdure-dev/perdure/internal/wire"
)

// The commands of a story, read from its lines.

func (s *story) start(t *testing.T, d *datadriven.TestData) *wire.StartFlow {
	c := &wire.StartFlow{Type: "agent"}
	d.MaybeScanArgs(t, "request", &c.RequestId)
	s.startArgs(t, d, c)
	for _, line := range lines(d) {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "item":
			c.Items = append(c.Items, []byte(rest))
		case "attr":
			c.Attributes = append(c.Attributes, attr(rest))
		case "step":
			c.Steps = append(c.Steps, s.spec(t, d, rest)...)
		case "publish":
			c.Publish = append(c.Publish, s.publishLine(t, d, rest)...)
		default:
			d.Fatalf(t, "unknown line %q", line)
		}
	}
	return c
}

func (s *story) result(t *testing.T, d *datadriven.TestData) *wire.StepResult {
	c := &wire.StepResult{}
	d.ScanArgs(t, "exec", &c.Exec)
	c.Attempt = s.attempt(t, d, c.Exec)
	for _, line := range lines(d) {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "event":
			typ, items, _ := strings.Cut(rest, " ")
			ev := &wire.NewEvent{Type: typ}
			for it := range strings.SplitSeq(items, " | ") {
				if it != "" {
					ev.Items = append(ev.Items, []byte(it))
				}
			}
			c.Events = append(c.Events, ev)
		case "attr":
			c.Attributes = append(c.Attributes, attr(rest))
		case "step":
			c.Next = append(c.Next, s.spec(t, d, rest)...)
		case "publish":
			c.Publish = append(c.Publish, s.publishLine(t, d, rest)...)
		case "retry":
			text, after, _ := strings.Cut(rest, " after=")
			text, permanent := strings.CutSuffix(text, " permanent")
			c.Retry = &wire.Retry{Error: text, Permanent: permanent}
			if after != "" {
				c.Retry.AfterUs = duration(t, d, after)
			}
		default:
			s.resultLine(t, d, c, word, rest)
		}
	}
	return c
}

// attempt is the current one of the step, unless attempt=(epoch,lsn,n) says another.
func (s *story) attempt(t *testing.T, d *datadriven.TestData, exec uint64) *wire.AttemptID {
	if d.HasArg("attempt") {
		a := &wire.AttemptID{}
		d.ScanArgs(t, "attempt", &a.Epoch, &a.Lsn, &a.N)
		return a
	}
	if s.b.f != nil {
		if st := stepOf(s.b.f, exec); st != nil {
			return st.Attempt
		}
	}
	return &wire.AttemptID{}
}

// set writes attributes: name=value, or times=N for a0, a1 and so on.
func (s *story) set(t *testing.T, d *datadriven.TestData) string {
	return s.repeat(t, d, func(i int) *wire.Entry {
		c := &wire.SetAttributes{}
		for _, line := range lines(d) {
			c.Attributes = append(c.Attributes, attr(strings.ReplaceAll(line, "*", fmt.Sprint(i))))
		}
		e := s.b.entry()
		e.Command = &wire.Entry_SetAttributes{SetAttributes: c}
		return e
	})
}

func attr(text string) *wire.Attribute {
	name, value, _ := strings.Cut(text, "=")
	return &wire.Attribute{Name: name, Value: []byte(value)}
}

// spec reads `name [wait=channel:count] [idle] [prefetch] [input=x]
// [retry=attempts,initial,max,total] [times=n] [waitfor] [async] [recover=step]
// [key=name:limit]`, and conditions: `on[.name]=channel:NAME:least[-most]`,
// `on=timer:1m`, `on=at:1h`, `on=flow:ID[:type:step]`, of which all must hold, or
// with `any` one, or with `sets=0,1|2` the first or both others.
func (s *story) spec(t *testing.T, d *datadriven.TestData, text string) []*wire.StepSpec {
	words := strings.Fields(text)
	spec := &wire.StepSpec{Name: words[0]}
	times := 1
	for _, w := range words[1:] {
		key, val, _ := strings.Cut(w, "=")
		switch key {
		case "wait":
			ch, n, _ := strings.Cut(val, ":")
			spec.Wait = &wire.Wait{Channel: ch, Count: uint32(number(t, d, n))}
		case "idle":
			spec.Wait.Idle = true
		case "waitfor":
			spec.WaitFor = true
		case "async":
			spec.Async = true
		case "any", "sets":
			spec.Wait.Combinations = combinations(t, d, val, len(spec.Wait.Conditions))
		case "recover":
			spec.Recover = &wire.StepSpec{Name: val}
		case "key":
			k, n, _ := strings.Cut(val, ":")
			spec.ConcurrencyKey, spec.ConcurrencyLimit = k, uint32(number(t, d, n))
		case "prefetch":
			spec.Prefetch = true
		case "input":
			spec.Input = []byte(val)
		case "times":
			times = number(t, d, val)
		case "retry":
			p := strings.Split(val, ",")
			spec.Retry = &wire.RetryPolicy{MaxAttempts: uint32(number(t, d, p[0])), InitialUs: duration(t, d, p[1]), MaxUs: duration(t, d, p[2])}
			if len(p) > 3 {
				spec.Retry.TotalUs = duration(t, d, p[3])
			}
		default:
			cond, ok := strings.CutPrefix(key, "on")
			if !ok {
				d.Fatalf(t, "unknown word %q", w)
			}
			if spec.Wait == nil {
				spec.Wait = &wire.Wait{}
			}
			spec.Wait.Conditions = append(spec.Wait.Conditions, s.condition(t, d, strings.TrimPrefix(cond, "."), val))
		}
	}
	var specs []*wire.StepSpec
	for range times {
		specs = append(specs, spec)
	}
	return specs
}

// publishLine reads `channel payload [request=id] [times=n] [large]`. A * in the
// channel becomes the number.
func (s *story) publishLine(t *testing.T, d *datadriven.TestData, text string) []*wire.Publish {
	words := strings.Fields(text)
	times, large := 1, false
	p := &wire.Publish{}
	for _, w := range words[2:] {
		key, val, _ := strings.Cut(w, "=")
		switch key {
		case "request":
			p.RequestId = val
		case "times":
			times = number(t, d, val)
		case "large":
			large = true
		default:
			d.Fatalf(t, "unknown word %q", w)
		}
	}
	var ps []*wire.Publish
	for i := range times {
		q := p.CloneVT()
		q.Channel = strings.ReplaceAll(words[0], "*", fmt.Sprint(i))
		q.Payload = s.payload(q.Channel, words[1])
		if large {
			moved(q)
		}
		ps = append(ps, q)
	}
	return ps
}

func (s *story) publishArgs(t *testing.T, d *datadriven.TestData, args []datadriven.CmdArg, p *wire.Publish) {
	for i, a := range args {
		switch {
		case i == 0:
			p.Channel = a.Key
		case a.Key == "on_busy":
			p.OnBusy = wire.Publish_OnBusy(wire.Publish_OnBusy_value[strings.ToUpper(a.Vals[0])])
		case a.Key == "max_pending":
			p.MaxPending = uint32(number(t, d, a.Vals[0]))
		case a.Key == "request":
			p.RequestId = a.Vals[0]
		case a.Key == "times", a.Key == "slots", a.Key == "large":
		default:
			d.Fatalf(t, "unknown argument %q", a.Key)
		}
	}
}

func lines(d *datadriven.TestData) []string {
	if d.Input == "" {
		return nil
	}
	return strings.Split(d.Input, "\n")
}
