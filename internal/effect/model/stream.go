package model

import (
	"bytes"
	"context"
	"io"

	"github.com/perdure-dev/perdure/internal/effect/model/http1"
)

// stream reads the answer. Text that came in one read goes to the sink as one
// piece, just before the next read could block.
func (c *call) stream(ctx context.Context) *Error {
	var body []byte // collects an answer that is not a stream
	plain, sniffed := false, false
	for !c.done {
		data, err := c.x.Next()
		if err == http1.ErrWait {
			if e := c.flush(ctx); e != nil {
				return e
			}
			err = c.x.Fill()
		}
		if err == io.EOF {
			return c.bodyEnded(ctx, plain, body)
		}
		if err != nil {
			return c.broken(ctx, err)
		}
		if !sniffed {
			// Content types lie; the first byte of a JSON answer starts no event.
			if data = bytes.TrimLeft(data, " \t\r\n"); len(data) == 0 {
				continue
			}
			plain, sniffed = data[0] == '{', true
		}
		if plain {
			if body = append(body, data...); len(body) > 2*c.p.maxOutput {
				return c.tooLarge()
			}
			continue
		}
		if e := c.feed(data); e != nil {
			_ = c.flush(ctx)
			return e
		}
	}
	if e := c.flush(ctx); e != nil {
		return e
	}
	c.x.Drain(drainBytes, drainTime)
	return c.complete()
}

// feed takes body bytes of a stream.
func (c *call) feed(data []byte) *Error {
	for len(data) > 0 && !c.done {
		event, n, ok, err := c.dec.Next(data)
		if err != nil {
			return c.tooLarge()
		}
		data = data[n:]
		if !ok {
			break
		}
		if e := c.event(event); e != nil {
			return e
		}
	}
	return nil
}

// event takes one event of a stream.
func (c *call) event(data []byte) *Error {
	if text, more, ok := c.scan.scan(data, c.text); ok {
		c.text = text
		if more.finish != "" {
			c.finish = more.finish
		}
		if more.hasUsage {
			c.usage = more.usage
		}
		return c.checkSize()
	}
	data = bytes.TrimSpace(data)
	switch {
	case len(data) == 0:
		return nil
	case string(data) == "[DONE]":
		c.done = true
		return nil
	}
	p, err := decodeChunk(data)
	if err != nil {
		return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeMalformed,
			Message: c.p.redact.clean("an event of the stream cannot be decoded: "+err.Error(), maxMessage)}
	}
	return c.take(p)
}

// take adds a decoded part to the answer.
func (c *call) take(p part) *Error {
	c.text = append(c.text, p.text...)
	if p.finish != "" {
		c.finish = p.finish
	}
	if p.usage != nil {
		c.usage = Usage{Prompt: max(p.usage.PromptTokens, 0), Completion: max(p.usage.CompletionTokens, 0)}
	}
	for i := range p.tools {
		if e := c.toolDelta(&p.tools[i]); e != nil {
			return e
		}
	}
	if p.fault != nil {
		return c.p.redact.streamFault(p.fault)
	}
	return c.checkSize()
}

// toolDelta adds to the call it belongs to, or begins one.
func (c *call) toolDelta(d *wireToolCall) *Error {
	args, err := argumentsText(d.Function.Arguments)
	if err != nil {
		return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeMalformed,
			Message: "the arguments of a tool call cannot be decoded"}
	}
	t := c.findTool(d)
	if t == nil {
		if len(c.tools) >= maxTools {
			return c.tooLarge()
		}
		index := len(c.tools)
		if d.Index != nil {
			index = *d.Index
		}
		c.tools = append(c.tools, toolState{index: index})
		t = &c.tools[len(c.tools)-1]
	}
	if t.id == "" {
		t.id = d.ID
	}
	// Some servers send the name once, some in every piece, some in pieces.
	if d.Function.Name != t.name {
		t.name += d.Function.Name
	}
	t.args = append(t.args, args...)
	c.size += len(d.ID) + len(d.Function.Name) + len(args)
	return c.checkSize()
}

// findTool finds the call that a delta continues. The index says so; but some
// servers leave it out, or send 0 for every call, so that a new ID together
// with a name begins a new call.
func (c *call) findTool(d *wireToolCall) *toolState {
	for i := len(c.tools) - 1; i >= 0; i-- {
		t := &c.tools[i]
		if d.Index != nil && t.index != *d.Index {
			continue
		}
		if d.ID != "" && t.id != "" && d.ID != t.id && d.Function.Name != "" {
			if d.Index == nil {
				continue
			}
			return nil
		}
		return t
	}
	return nil
}

func (c *call) checkSize() *Error {
	if len(c.text)+c.size > c.p.maxOutput {
		return c.tooLarge()
	}
	return nil
}

func (c *call) tooLarge() *Error {
	return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeTooLarge,
		Message: "the answer is larger than the provider's limit",
		Hint:    "set max_tokens in the agent's parameters"}
}

// flush gives the text that is new to the sink.
func (c *call) flush(ctx context.Context) *Error {
	if c.sink == nil || len(c.text) == c.sent || c.x.Cancelled() {
		return nil
	}
	piece := c.text[c.sent:]
	c.sent, c.shown = len(c.text), true
	if err := c.sink.Delta(piece); err != nil {
		if ctx.Err() != nil {
			return cancelled(ctx)
		}
		return &Error{Kind: KindCancelled, Code: CodeSink, cause: err,
			Message: c.p.redact.clean("the reader of the answer failed: "+err.Error(), maxMessage)}
	}
	return nil
}

// bodyEnded handles the proper end of the body.
func (c *call) bodyEnded(ctx context.Context, plain bool, body []byte) *Error {
	var e *Error
	if plain {
		e = c.answer(body)
	} else if last, ok := c.dec.Last(); ok {
		e = c.event(last)
	}
	if fe := c.flush(ctx); e == nil {
		e = fe
	}
	if e != nil {
		return e
	}
	if !plain && !c.done && c.finish == "" {
		return c.endedEarly("the stream ended before the answer was finished")
	}
	return c.complete()
}

// answer takes an answer that came whole.
func (c *call) answer(body []byte) *Error {
	p, err := decodeAnswer(body)
	if err != nil {
		return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeMalformed,
			Message: c.p.redact.clean("the answer cannot be decoded: "+err.Error(), maxMessage)}
	}
	if e := c.take(p); e != nil {
		return e
	}
	if p.finish == "" && p.text == "" && len(p.tools) == 0 {
		return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeMalformed,
			Message: "the answer is JSON, but no chat completion",
			Hint:    "check that base_url names an OpenAI-compatible server"}
	}
	return nil
}

// broken handles a body that ended badly. An answer that said it was finished
// is whole: only its usage and the end of the stream may be missing.
func (c *call) broken(ctx context.Context, err error) *Error {
	if ctx.Err() != nil {
		return cancelled(ctx)
	}
	if c.finish != "" {
		return c.complete()
	}
	return c.p.redact.transportError(err)
}

func (c *call) endedEarly(msg string) *Error {
	return &Error{Kind: KindRetryable, Status: c.x.Status, Code: CodeConnection, Message: msg}
}

// complete checks a finished answer.
func (c *call) complete() *Error {
	for i := range c.tools {
		if c.tools[i].name == "" {
			return &Error{Kind: KindPermanent, Status: c.x.Status, Code: CodeMalformed,
				Message: "the answer calls a tool without naming it"}
		}
	}
	if c.finish == "" {
		c.finish = "stop"
		if len(c.tools) > 0 {
			c.finish = "tool_calls"
		}
	}
	return nil
}
