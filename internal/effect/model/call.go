package model

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/effect/model/http1"
	"github.com/perdure-dev/perdure/internal/effect/model/sse"
)

const (
	maxErrorBody = 64 << 10               // bytes read of an error response
	maxTools     = 128                    // tool calls of one answer
	drainBytes   = 64 << 10               // read after the end, to keep the connection
	drainTime    = 100 * time.Millisecond // the same, in time
	maxKeptText  = 16 << 10               // a larger text buffer is not kept for the next call
)

// call is the state of one Generate or Check, pooled with its buffers. It
// belongs to the goroutine of the call.
type call struct {
	// The first fields are used at every read, as in http1.Exchange.
	x    http1.Exchange
	sink Sink
	text []byte // the answer so far
	sent int    // text[:sent] was given to the sink
	scan scanner
	dec  sse.Decoder
	p    *OpenAI
	size int // bytes of tool calls, counted to maxOutput

	req     Request
	params  []byte  // inside of req.Params
	bodyLen counter // bytes of the request body
	num     [20]byte
	check   bool // GET /models instead of a completion

	done   bool // [DONE] came
	shown  bool
	tools  []toolState
	finish string
	usage  Usage
}

// toolState is a tool call under assembly.
type toolState struct {
	index    int
	id, name string
	args     []byte
}

var calls = sync.Pool{New: func() any { return &call{text: make([]byte, 0, 512)} }}

// release closes the exchange, also when a sink panics, and pools the call
// without anything of its request.
func (c *call) release() {
	c.x.Close()
	text := c.text[:0]
	if cap(text) > maxKeptText {
		text = nil
	}
	c.dec.Reset()
	c.scan.frame = c.scan.frame[:0]
	*c = call{x: c.x, dec: c.dec, scan: c.scan, text: text}
	calls.Put(c)
}

// run makes the attempt. A nil error means that the answer is whole.
func (c *call) run(ctx context.Context) *Error {
	if err := c.prepare(); err != nil {
		return err
	}
	if err := c.open(ctx); err != nil {
		return err
	}
	return c.stream(ctx)
}

// open sends the request and gets past the head of a good response.
func (c *call) open(ctx context.Context) *Error {
	if err := c.x.Do(ctx, c.p.http, c); err != nil {
		return c.failed(ctx, err)
	}
	if c.x.Status >= 200 && c.x.Status < 300 {
		return nil
	}
	body, _ := c.readAll(ctx, maxErrorBody) // what came of it is good enough
	if ctx.Err() != nil {
		return cancelled(ctx)
	}
	wait := time.Duration(0)
	if c.x.RetryAfter != "" || c.x.RetryMS != "" {
		wait = parseRetryAfter(c.x.RetryAfter, c.x.RetryMS, c.p.clock.Now())
	}
	return c.p.redact.statusError(c.x.Status, parseErrorBody(body), wait)
}

// failed classifies a transport error; a cancelled context explains them all.
func (c *call) failed(ctx context.Context, err error) *Error {
	if ctx.Err() != nil {
		return cancelled(ctx)
	}
	return c.p.redact.transportError(err)
}

// readAll reads the rest of the body, cut at max bytes.
func (c *call) readAll(ctx context.Context, max int) ([]byte, *Error) {
	var body []byte
	for {
		data, err := c.x.Next()
		if err == http1.ErrWait {
			err = c.x.Fill()
		}
		if err == io.EOF {
			return body, nil
		}
		if err != nil {
			return body, c.failed(ctx, err)
		}
		if body = append(body, data...); len(body) > max {
			return body[:max], nil
		}
	}
}

// prepare checks the request and sizes its body.
func (c *call) prepare() *Error {
	r := &c.req
	inner, ok := trimObject(r.Params)
	var what string
	switch {
	case r.Model == "":
		what = "no model is named"
	case len(r.Messages) == 0:
		what = "there are no messages"
	case !ok:
		what = "the parameters are not a JSON object"
	case len(r.IdempotencyKey) > 255 || !isVisible(r.IdempotencyKey):
		what = "the idempotency key is not 1 to 255 visible ASCII characters"
	}
	if what != "" {
		return &Error{Kind: KindPermanent, Code: CodeInvalidRequest, Message: what}
	}
	c.params = inner
	if tools := bytes.TrimSpace(r.Tools); len(tools) == 0 || string(tools) == "null" || string(tools) == "[]" {
		r.Tools = nil // an empty list is refused upstream
	}
	c.bodyLen = 0
	c.writeBody(&c.bodyLen)
	return nil
}

// bodyWriter is what writeBody needs; a bufio.Writer keeps its first error.
type bodyWriter interface {
	Write(p []byte) (int, error)
	WriteString(s string) (int, error)
}

// counter measures a body.
type counter int

func (n *counter) Write(p []byte) (int, error)       { *n += counter(len(p)); return len(p), nil }
func (n *counter) WriteString(s string) (int, error) { *n += counter(len(s)); return len(s), nil }

// WriteRequest implements http1.RequestWriter. Errors of w are sticky, and
// the exchange flushes it.
func (c *call) WriteRequest(w *bufio.Writer) error {
	if c.check {
		_, err := w.WriteString(c.p.getHead)
		return err
	}
	_, _ = w.WriteString(c.p.postHead)
	if c.req.IdempotencyKey != "" {
		_, _ = w.WriteString("Idempotency-Key: ")
		_, _ = w.WriteString(c.req.IdempotencyKey)
		_, _ = w.WriteString("\r\n")
	}
	_, _ = w.WriteString("Content-Length: ")
	_, _ = w.Write(strconv.AppendInt(c.num[:0], int64(c.bodyLen), 10))
	_, err := w.WriteString("\r\n\r\n")
	if err == nil {
		c.writeBody(w)
	}
	return err
}

// writeBody puts the request together from its encoded parts. Our own members
// come last, where they win in the decoders that meet a name twice.
func (c *call) writeBody(w bodyWriter) {
	_, _ = w.WriteString("{")
	if len(c.params) > 0 {
		_, _ = w.Write(c.params)
		_, _ = w.WriteString(",")
	}
	_, _ = w.WriteString(`"model":`)
	writeJSONString(w, c.req.Model)
	_, _ = w.WriteString(`,"messages":[`)
	for i, m := range c.req.Messages {
		if i > 0 {
			_, _ = w.WriteString(",")
		}
		_, _ = w.Write(m)
	}
	_, _ = w.WriteString("]")
	if c.req.Tools != nil {
		_, _ = w.WriteString(`,"tools":`)
		_, _ = w.Write(c.req.Tools)
	}
	_, _ = w.WriteString(`,"stream":true`)
	if c.p.usage {
		_, _ = w.WriteString(`,"stream_options":{"include_usage":true}`)
	}
	_, _ = w.WriteString("}")
}

func writeJSONString(w bodyWriter, s string) {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] == '"' || s[i] == '\\' || s[i] >= 0x7f {
			b, _ := json.Marshal(s) // a string always encodes
			_, _ = w.Write(b)
			return
		}
	}
	_, _ = w.WriteString(`"`)
	_, _ = w.WriteString(s)
	_, _ = w.WriteString(`"`)
}

// result gives what was assembled; beside an error only what was shown.
func (c *call) result(partial bool) Result {
	r := Result{FinishReason: c.finish, Usage: c.usage, Shown: c.shown}
	if partial && c.sink != nil {
		r.Text = string(c.text[:c.sent])
		return r
	}
	r.Text = string(c.text)
	if partial {
		return r
	}
	if len(c.tools) > 0 {
		r.ToolCalls = make([]ToolCall, len(c.tools))
	}
	for i, t := range c.tools {
		if t.id == "" {
			t.id = "call_" + strconv.Itoa(i) + "_" + c.req.IdempotencyKey
		}
		r.ToolCalls[i] = ToolCall{ID: t.id, Name: t.name, Arguments: string(t.args)}
	}
	return r
}
