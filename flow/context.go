package flow

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Reader is what can read a flow: *Context, *UpdateContext and *ReadContext.
type Reader interface {
	context.Context
	reading() *handling
}

// Writer is what can also write: *Context and *UpdateContext. What is written
// is kept until the handler returns, and takes effect with its result.
type Writer interface {
	Reader
	writing() *handling
}

// handling is what all handler calls have. Of one handler's goroutine only, but
// for its lifetime.
type handling struct {
	*lifetime
	flow          *Flow
	host          Host
	flowID, runID string
	attrs         []*wire.Attribute // as of the start; never changed
	fetched       map[string][]byte // large values that were read: "attribute name", or a message's ID
	w             *writes
}

// FlowID is the ID that whoever started the flow chose.
func (h *handling) FlowID() string { return h.flowID }

// RunID is the server's ID of this run of the flow.
func (h *handling) RunID() string { return h.runID }

// Now is the time; in package perduretest, that of the test. It is not the same
// again when the handler is called again.
func (h *handling) Now() time.Time { return h.host.Now() }

// Logger logs with the flow's ID and type.
func (h *handling) Logger() *slog.Logger {
	return h.host.Logger().With("flow", h.flowID, "type", h.flow.name)
}

func (h *handling) reading() *handling { return h }

// attribute gives the JSON of a value; nothing = there is none.
func (h *handling) attribute(declared, name string) ([]byte, error) {
	if _, ok := h.flow.attrs[declared]; !ok {
		return nil, &UnknownNameError{Flow: h.flow.name, Kind: "attribute", Name: declared}
	}
	if a := h.w.attribute(name); a != nil {
		return a.Value, nil
	}
	i, ok := slices.BinarySearchFunc(h.attrs, name, func(a *wire.Attribute, n string) int { return cmp.Compare(a.Name, n) })
	if !ok {
		return nil, nil
	}
	a := h.attrs[i]
	if len(a.Value) > 0 || a.Size == 0 && a.Blob == "" {
		return a.Value, nil
	}
	if b, ok := h.fetched["attribute "+name]; ok {
		return b, nil
	}
	b, err := h.fetch(a)
	if err != nil {
		return nil, fmt.Errorf("flow: attribute %q of %d bytes cannot be read: %w", name, a.Size, err)
	}
	h.keepFetched("attribute "+name, b)
	return b, nil
}

// fetch reads a value that did not come with the task.
func (h *handling) fetch(a *wire.Attribute) ([]byte, error) {
	if a.Blob == "" {
		now, err := h.host.Attribute(h, h.flowID, a.Name)
		if err != nil || now == nil || now.Blob == "" {
			return now.GetValue(), err
		}
		a = now
	}
	return h.host.GetBlob(h, h.flowID, a.Blob)
}

// attributeNames lists the names that have a value, sorted.
func (h *handling) attributeNames(declared, prefix string) []string {
	if _, ok := h.flow.attrs[declared]; !ok {
		h.w.fail(&UnknownNameError{Flow: h.flow.name, Kind: "attribute", Name: declared})
		return nil
	}
	var names []string
	for _, a := range h.attrs {
		if strings.HasPrefix(a.Name, prefix) && h.w.attribute(a.Name) == nil {
			names = append(names, a.Name)
		}
	}
	for i, a := range h.w.attrs {
		if strings.HasPrefix(a.Name, prefix) && len(a.Value) > 0 && h.w.attribute(a.Name) == h.w.attrs[i] {
			names = append(names, a.Name)
		}
	}
	slices.Sort(names)
	return names
}

// setAttribute writes a record; one without value removes.
func (h *handling) setAttribute(declared string, a *wire.Attribute) {
	if _, ok := h.flow.attrs[declared]; !ok {
		h.w.fail(&UnknownNameError{Flow: h.flow.name, Kind: "attribute", Name: declared})
		return
	}
	h.w.set(a)
}

func (h *handling) send(s *wire.Send) {
	if err := checkFlowID(s.FlowId); err != nil {
		h.w.fail(err)
		return
	}
	h.w.sends = append(h.w.sends, s)
}

// Context is what a step's handler has: a context.Context that ends at once when
// the work is cancelled, what the flow is, and the place for what the handler
// writes. The context half is safe for concurrent use; the rest is for the
// handler's own goroutine, and ends with its return.
type Context struct {
	handling
	task       *wire.Task
	step       string
	keyTail    string // of a WaitFor that runs with the decision before it
	waiting    bool
	locals     []byte
	checkpoint []byte
	split      []byte // of Output: a character that has only begun
}

func (c *Context) writing() *handling { return &c.handling }

// Step is the step's stored name.
func (c *Context) Step() string { return c.step }

// Key is the same for each attempt of this handler of the step (WaitFor and
// Execute have their own) and different for any other: give it to the outside as
// an idempotency key.
func (c *Context) Key() string {
	b := make([]byte, 0, len(c.runID)+22+len(c.keyTail))
	b = append(append(b, c.runID...), '-')
	b = strconv.AppendUint(b, c.task.Exec, 10)
	if c.task.Phase == wire.Task_WAIT_FOR {
		b = append(b, "-wait"...)
	}
	return string(append(b, c.keyTail...))
}

// Attempt is 1 for the first attempt; a step whose worker was lost is tried
// again, too.
func (c *Context) Attempt() int { return int(c.task.Number) }

// Retries is how many attempts have failed so far, as the retry policy counts.
func (c *Context) Retries() int { return int(c.task.Retries) }

// Started is when the step was handed out for the first time.
func (c *Context) Started() time.Time { return time.UnixMicro(c.task.StartedUs) }

// Failure is, in a recovery step, why the other step failed: a
// *StepFailedError. It is nil in any other step.
func (c *Context) Failure() error {
	if c.task.Failure == "" {
		return nil
	}
	return &StepFailedError{Message: c.task.Failure}
}

// Fired says whether the timer, or any other condition, of that name held when
// the wait was over.
func (c *Context) Fired(condition string) bool {
	s, _ := c.condition(condition)
	return s.GetDone()
}

func (c *Context) condition(name string) (state *wire.ConditionState, ok bool) {
	for i, n := range c.task.ConditionNames {
		if n == name && i < len(c.task.Conditions) {
			if s := c.task.Conditions[i]; s.Done || !ok {
				state, ok = s, true
			}
		}
	}
	return state, ok
}

// messages calls fn with each payload that was taken by conditions of a name.
func (c *Context) messages(channel string, fn func([]byte) error) error {
	if err := c.flow.checkChannel(channel); err != nil {
		return err
	}
	at := 0
	for i, s := range c.task.Conditions {
		n := min(int(s.Messages), len(c.task.Messages)-at)
		if i < len(c.task.ConditionNames) && c.task.ConditionNames[i] == channel {
			for _, m := range c.task.Messages[at : at+n] {
				b, err := c.payload(m)
				if err == nil {
					err = fn(b)
				}
				if err != nil {
					return err
				}
			}
		}
		at += n
	}
	return nil
}

// SetLocals keeps a value, as JSON, from WaitFor for Execute of the same step.
func (c *Context) SetLocals(v any) {
	b, err := Encode(v)
	if err == nil {
		err = c.checkSize("the locals", b)
	}
	if err == nil && !c.waiting {
		err = fmt.Errorf("flow: SetLocals in Execute of step %q: only WaitFor can set them", c.step)
	}
	if err != nil {
		c.w.fail(err)
		return
	}
	c.locals = b
}

// Locals reads what WaitFor kept into v, a pointer. Without any, v stays as it is.
func (c *Context) Locals(v any) error {
	if len(c.locals) == 0 {
		return nil
	}
	return decodeInto(c.locals, v)
}

// Heartbeat says that the attempt is alive, and how far it is: checkpoint is
// kept as JSON for the next attempt, should this one be lost or fail; nil leaves
// the last one. Call it as often as you like: it is sent at most a few times a
// second, and written to disk at most once in five.
func (c *Context) Heartbeat(checkpoint any) error {
	if err := c.why(); err != nil {
		return err
	}
	if checkpoint != nil {
		b, err := Encode(checkpoint)
		if err == nil {
			err = c.checkSize("a checkpoint", b)
		}
		if err != nil {
			return err
		}
		c.checkpoint = b
	}
	c.host.Heartbeat(c.task, c.checkpoint)
	return nil
}

// Checkpoint reads the newest checkpoint of former attempts, or of this one,
// into v, a pointer; false when there is none.
func (c *Context) Checkpoint(v any) (bool, error) {
	b := c.checkpoint
	if len(b) == 0 {
		b = c.task.Checkpoint
	}
	if len(b) == 0 {
		return false, nil
	}
	return true, decodeInto(b, v)
}

func (c *Context) checkSize(what string, b []byte) error {
	if most := c.host.MaxPayload(); uint64(len(b)) > most {
		return &SizeError{What: what, Bytes: uint64(len(b)), Most: most}
	}
	return nil
}

// Output is for text, tokens say, that those who watch the flow see at once. It
// is not kept, and an attempt that is made again shows it again. Writing waits
// while more is under way than the network takes, until the context ends.
func (c *Context) Output() io.Writer { return (*output)(c) }

type output Context

// Write implements io.Writer. Bytes that begin a character are kept until the
// rest of it comes.
func (o *output) Write(p []byte) (int, error) {
	n := len(p)
	if len(o.split) > 0 {
		p = append(o.split, p...)
	}
	whole := wholeText(p)
	o.split = append([]byte(nil), p[whole:]...)
	if _, err := o.WriteString(string(p[:whole])); err != nil {
		return 0, err
	}
	return n, nil
}

// wholeText is how many bytes of p are left without a last character that has
// only begun.
func wholeText(p []byte) int {
	for back := 1; back < utf8.UTFMax && back <= len(p); back++ {
		if c := p[len(p)-back]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(p[len(p)-back:]) {
				return len(p) - back
			}
			break
		}
	}
	return len(p)
}

// WriteString implements io.StringWriter.
func (o *output) WriteString(s string) (int, error) {
	c := (*Context)(o)
	if s == "" {
		return 0, nil
	}
	if err := c.host.Output(c, c.task, s); err != nil {
		return 0, err
	}
	return len(s), nil
}

// ReadContext is what the handler of a read-only RPC has. See Context for how
// it may be used.
type ReadContext struct{ handling }

// UpdateContext is what the handler of a locked RPC has: it is alone on its
// flow, and all that it writes takes effect together with its reply, or not at
// all. See Context for how it may be used.
type UpdateContext struct{ handling }

func (c *UpdateContext) writing() *handling { return &c.handling }

// Start starts steps of the flow.
func (c *UpdateContext) Start(next ...Next) {
	for _, n := range next {
		s, err := c.flow.spec(n)
		if err != nil {
			c.w.fail(err)
			return
		}
		c.w.next = append(c.w.next, s)
	}
}

// Close ends the run as a step's decision would: Complete, ForceComplete, Fail
// or CompleteIfEmpty. The last call counts.
func (c *UpdateContext) Close(d Decision) {
	if d.kind != graceful && d.kind != force && d.kind != fail && d.kind != ifEmpty {
		c.w.fail(fmt.Errorf("flow: an RPC can close its flow by Complete, ForceComplete, Fail and CompleteIfEmpty only"))
		return
	}
	if len(d.cancels) > 0 {
		c.w.fail(fmt.Errorf("flow: an RPC cannot cancel steps"))
		return
	}
	end, err := c.closing(d)
	if err == nil && d.otherwise {
		end.Otherwise, err = c.flow.spec(d.first)
	}
	if err != nil {
		c.w.fail(err)
		return
	}
	c.w.close = end
}

// closing makes the record of a decision that ends the run; nil = it does not.
func (h *handling) closing(d Decision) (*wire.Close, error) {
	end := &wire.Close{Output: d.output}
	switch d.kind {
	case graceful:
		end.How = wire.Close_GRACEFUL
	case force:
		end.How = wire.Close_FORCE
	case fail:
		return &wire.Close{How: wire.Close_FAIL, Error: errorText(d.err)}, nil
	case ifEmpty:
		end.How = wire.Close_IF_EMPTY
		for _, name := range d.channels {
			if err := h.flow.checkChannel(name); err != nil {
				return nil, err
			}
		}
		end.Channels = d.channels
	default:
		return nil, nil
	}
	if d.err != nil {
		return nil, fmt.Errorf("flow: the output of the run: %w", d.err)
	}
	if most := h.host.MaxPayload(); uint64(len(d.output)) > most {
		return nil, &SizeError{What: "the output of the run", Bytes: uint64(len(d.output)), Most: most}
	}
	return end, nil
}
