package model

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Demo is the built-in model: no key, no network, and the same answer to the
// same messages every time. It streams word by word, echoes the user's
// message, and follows a few commands in the last user message:
//
//	/tool NAME {"arg":1}   on a line: call the tool (several lines, several calls)
//	use NAME               anywhere: call the tool with arguments made from its schema
//	/words N               answer with N words (at most 2000)
//
// After a tool's result it sums the result up. Safe for concurrent use; it
// holds nothing but its options.
type Demo struct {
	clock env.Clock
	delay time.Duration
}

// DemoDelay is the usual time between two words.
const DemoDelay = 20 * time.Millisecond

// Bounds of the demo model.
const (
	maxDemoWords = 2000
	maxDemoEcho  = 400 // bytes of a message or result that are repeated
)

// NewDemo makes a demo model that waits delay before each word; 0 streams
// without waiting.
func NewDemo(clock env.Clock, delay time.Duration) *Demo { return &Demo{clock: clock, delay: delay} }

// Check implements Provider: the demo model is always there.
func (d *Demo) Check(context.Context) error { return nil }

// Close implements Provider.
func (d *Demo) Close() {}

// Generate implements Provider.
func (d *Demo) Generate(ctx context.Context, req Request, sink Sink) (Result, error) {
	if ctx.Err() != nil {
		return Result{}, cancelled(ctx)
	}
	plan, err := planDemo(req)
	if err != nil {
		return Result{}, &Error{Kind: KindPermanent, Code: CodeInvalidRequest, Message: redactor{}.clean(err.Error(), maxMessage)}
	}
	res, fail := d.speak(ctx, plan.text, sink)
	res.Usage.Prompt = plan.promptWords
	if fail != nil {
		return res, fail
	}
	res.FinishReason = "stop"
	if len(plan.calls) > 0 {
		res.FinishReason = "tool_calls"
		for i, c := range plan.calls {
			c.ID = "call_" + strconv.Itoa(len(req.Messages)) + "_" + strconv.Itoa(i)
			res.ToolCalls = append(res.ToolCalls, c)
			res.Usage.Completion += 1 + len(strings.Fields(c.Arguments))
		}
	}
	return res, nil
}

// speak streams text word by word.
func (d *Demo) speak(ctx context.Context, text string, sink Sink) (Result, *Error) {
	var res Result
	tick := make(chan struct{}, 1)
	ring := func() { tick <- struct{}{} }
	for done := 0; done < len(text); {
		if d.delay > 0 {
			t := d.clock.AfterFunc(d.delay, ring)
			select {
			case <-tick:
			case <-ctx.Done():
				t.Stop()
			}
		}
		if ctx.Err() != nil {
			res.Text = text[:done]
			return res, cancelled(ctx)
		}
		next := done + wordLen(text[done:])
		res.Usage.Completion++
		if sink != nil {
			res.Shown = true
			if err := sink.Delta([]byte(text[done:next])); err != nil {
				res.Text = text[:next]
				return res, &Error{Kind: KindCancelled, Code: CodeSink, cause: err,
					Message: redactor{}.clean("the reader of the answer failed: "+err.Error(), maxMessage)}
			}
		}
		done = next
	}
	res.Text = text
	return res, nil
}

// wordLen is the length of the next word with the spaces before it.
func wordLen(s string) int {
	lead := len(s) - len(strings.TrimLeft(s, " \n"))
	if i := strings.IndexAny(s[lead:], " \n"); i >= 0 {
		return lead + i
	}
	return len(s)
}

// demoPlan is what the model has decided to answer.
type demoPlan struct {
	text        string
	calls       []ToolCall
	promptWords int
}

type demoMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCallID string          `json:"tool_call_id"`
	ToolCalls  []wireToolCall  `json:"tool_calls"`
	text       string
}

type demoTool struct {
	Function struct {
		Name       string     `json:"name"`
		Parameters demoSchema `json:"parameters"`
	} `json:"function"`
}

type demoSchema struct {
	Properties map[string]struct {
		Type json.RawMessage   `json:"type"`
		Enum []json.RawMessage `json:"enum"`
	} `json:"properties"`
	Required []string `json:"required"`
}

func planDemo(req Request) (demoPlan, error) {
	var p demoPlan
	if len(req.Messages) == 0 {
		return p, fmt.Errorf("there are no messages")
	}
	var tools []demoTool
	if len(bytes.TrimSpace(req.Tools)) > 0 {
		if err := json.Unmarshal(req.Tools, &tools); err != nil {
			return p, fmt.Errorf("tools cannot be decoded: %w", err)
		}
	}
	msgs := make([]demoMessage, len(req.Messages))
	turns := 0
	for i, raw := range req.Messages {
		m := &msgs[i]
		err := json.Unmarshal(raw, m)
		if err == nil {
			m.text, err = contentText(m.Content)
		}
		if err != nil {
			return p, fmt.Errorf("message %d cannot be decoded: %w", i, err)
		}
		p.promptWords += len(strings.Fields(m.text))
		if m.Role == "user" {
			turns++
		}
	}
	last := msgs[len(msgs)-1]
	if last.Role == "tool" {
		p.text = sumUp(msgs)
		return p, nil
	}
	p.answer(last.text, turns, tools)
	return p, nil
}

// sumUp tells the results of the tools that ran last.
func sumUp(msgs []demoMessage) string {
	first := len(msgs)
	for first > 0 && msgs[first-1].Role == "tool" {
		first--
	}
	names := map[string]string{}
	if first > 0 {
		for _, c := range msgs[first-1].ToolCalls {
			names[c.ID] = c.Function.Name
		}
	}
	var b strings.Builder
	for _, m := range msgs[first:] {
		name := names[m.ToolCallID]
		if name == "" {
			name = m.ToolCallID
		}
		if b.Len() > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "The tool %s answered: %s", name, redactor{}.clean(m.text, maxDemoEcho))
	}
	return b.String()
}

// answer decides what to say or call after a user's message.
func (p *demoPlan) answer(text string, turns int, tools []demoTool) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		switch {
		case len(fields) >= 2 && fields[0] == "/tool":
			if !p.command(line, fields[1], tools) {
				p.calls = nil
				return
			}
		case len(fields) == 2 && fields[0] == "/words":
			if n, err := strconv.Atoi(fields[1]); err == nil && n > 0 {
				p.text = count(min(n, maxDemoWords))
				return
			}
		}
	}
	if len(p.calls) > 0 {
		return
	}
	for _, t := range tools {
		if mentions(text, t.Function.Name) {
			p.calls = append(p.calls, ToolCall{Name: t.Function.Name, Arguments: t.arguments(text)})
			if len(p.calls) == maxTools {
				break
			}
		}
	}
	if len(p.calls) > 0 {
		return
	}
	p.text = fmt.Sprintf("This is turn %d. You wrote %d words: %q. I am the demo model built into Perdure, so I only echo; "+
		"add a provider of type openai for real answers.", turns, len(strings.Fields(text)), redactor{}.clean(text, maxDemoEcho))
	if len(tools) > 0 {
		p.text += " I can call tools (" + toolNames(tools) + "): try \"/tool " + tools[0].Function.Name + " {}\"."
	}
}

// command handles one /tool line; false means that p.text says what is wrong.
func (p *demoPlan) command(line, name string, tools []demoTool) bool {
	known := false
	for _, t := range tools {
		known = known || t.Function.Name == name
	}
	if !known {
		p.text = fmt.Sprintf("I have no tool named %q.", redactor{}.clean(name, maxCode))
		if len(tools) > 0 {
			p.text += " I have: " + toolNames(tools) + "."
		}
		return false
	}
	if len(p.calls) == maxTools {
		p.text = fmt.Sprintf("I call at most %d tools at a time.", maxTools)
		return false
	}
	_, args, _ := strings.Cut(line, "/tool")
	_, args, _ = strings.Cut(args, name)
	if args = strings.TrimSpace(args); args == "" {
		args = "{}"
	}
	p.calls = append(p.calls, ToolCall{Name: name, Arguments: args})
	return true
}

func toolNames(tools []demoTool) string {
	names := make([]string, len(tools))
	for i, t := range tools {
		names[i] = t.Function.Name
	}
	return strings.Join(names, ", ")
}

// mentions reports whether text says "use NAME", as words.
func mentions(text, name string) bool {
	words := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n.,;:!?\"'()`", r) })
	use := false // "use" is open, with at most "the" and "tool" since
	for _, w := range words {
		switch {
		case use && w == name:
			return true
		case strings.EqualFold(w, "use"):
			use = true
		case !strings.EqualFold(w, "the") && !strings.EqualFold(w, "tool"):
			use = false
		}
	}
	return false
}

// arguments gives a JSON object in the text, or makes one that has what the
// tool's schema requires: numbers and strings come from the text.
func (t demoTool) arguments(text string) string {
	if i := strings.IndexByte(text, '{'); i >= 0 {
		var obj map[string]json.RawMessage
		dec := json.NewDecoder(strings.NewReader(text[i:]))
		if dec.Decode(&obj) == nil {
			return strings.TrimSpace(text[i : i+int(dec.InputOffset())])
		}
	}
	args := make(map[string]json.RawMessage, len(t.Function.Parameters.Required))
	for _, name := range t.Function.Parameters.Required {
		prop := t.Function.Parameters.Properties[name]
		if len(prop.Enum) > 0 {
			args[name] = prop.Enum[0]
			continue
		}
		args[name] = demoValue(strings.Trim(string(prop.Type), `"`), text)
	}
	b, err := json.Marshal(args) // sorted by name
	if err != nil {
		return "{}"
	}
	return string(b)
}

func demoValue(kind, text string) json.RawMessage {
	switch kind {
	case "integer", "number":
		for _, w := range strings.FieldsFunc(text, func(r rune) bool { return (r < '0' || r > '9') && r != '-' }) {
			if n, err := strconv.ParseInt(w, 10, 53); err == nil {
				return json.RawMessage(strconv.FormatInt(n, 10))
			}
		}
		return json.RawMessage("1")
	case "boolean":
		return json.RawMessage("true")
	case "array":
		return json.RawMessage("[]")
	case "object":
		return json.RawMessage("{}")
	case "null":
		return json.RawMessage("null")
	}
	b, _ := json.Marshal(redactor{}.clean(text, maxDemoEcho)) // a string always encodes
	return b
}

// count is n words: one, two, … by their numbers.
func count(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		if i > 1 {
			b.WriteByte(' ')
		}
		b.WriteString(strconv.Itoa(i))
	}
	return b.String()
}
