package flow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Host is what handlers need of the outside. It is for Perdure's own packages;
// its methods are called on the handlers' goroutines.
type Host interface {
	// MaxPayload is the size in bytes beyond which values go to blobs.
	MaxPayload() uint64
	// Heartbeat takes a sign of life; it must not block.
	Heartbeat(t *wire.Task, checkpoint []byte)
	// Output shows text; it may block until ctx ends.
	Output(ctx context.Context, t *wire.Task, text string) error
	// PutBlob stores a large value of a flow and gives its name. from is the flow
	// that carries it there, if it is another one.
	PutBlob(ctx context.Context, flowID, from string, data []byte) (string, error)
	// GetBlob reads one.
	GetBlob(ctx context.Context, flowID, blob string) ([]byte, error)
	// Attribute reads one attribute as it is now: its value, or the blob that has
	// it; nil = there is none.
	Attribute(ctx context.Context, flowID, name string) (*wire.Attribute, error)
	// Now is the time.
	Now() time.Time
	// Logger is where handlers and failures are logged.
	Logger() *slog.Logger
}

// Runtime runs the handlers of some flows: a task becomes a result, without any
// network. The Worker and package perduretest share it. It is for Perdure's own
// packages. Safe for concurrent use.
type Runtime struct {
	flows  map[string]*Flow
	types  []*wire.FlowType
	tracer trace.Tracer // nil = none
}

// NewRuntime refuses two flows of one name, and external ones.
func NewRuntime(flows ...*Flow) (*Runtime, error) {
	r := &Runtime{flows: make(map[string]*Flow, len(flows))}
	for i, f := range flows {
		switch {
		case f == nil:
			return nil, fmt.Errorf("flow: definition %d is nil", i)
		case f.external:
			return nil, fmt.Errorf("flow: %q is external: only its own program can run it", f.name)
		case r.flows[f.name] != nil:
			return nil, fmt.Errorf("flow: two definitions have the name %q", f.name)
		}
		r.flows[f.name] = f
		r.types = append(r.types, f.typ)
	}
	return r, nil
}

// Types gives the declarations, in order.
func (r *Runtime) Types() []*wire.FlowType { return r.types }

// StepCall is one attempt of a step. Run it once; Cancel is safe for concurrent
// use.
type StepCall struct {
	rt      *Runtime
	c       Context
	life    lifetime
	w       writes
	def     *stepDef
	unwell  error // why there is no handler to call
	forgets atomic.Bool
}

// Step prepares an attempt. base ends its context, too.
func (r *Runtime) Step(base context.Context, t *wire.Task, h Host) *StepCall {
	s := &StepCall{rt: r}
	f := r.flows[t.FlowType]
	s.c = Context{
		handling: handling{lifetime: &s.life, flow: f, host: h, flowID: t.FlowId, runID: t.RunId, attrs: t.Attributes, w: &s.w},
		task:     t, step: t.Step, waiting: t.Phase == wire.Task_WAIT_FOR, locals: t.Locals,
	}
	s.life.start(base, time.Duration(t.TimeoutUs)*time.Microsecond)
	if f == nil {
		s.unwell = fmt.Errorf("flow: this worker has no flow type %q", t.FlowType)
	} else if s.def = f.steps[t.Step]; s.def == nil {
		s.unwell = &UnknownNameError{Flow: f.name, Kind: "step", Name: t.Step}
	}
	if t.Cancelled {
		s.life.cancel(&CancelledError{Reason: t.CancelReason})
	}
	return s
}

// Cancel ends the attempt's context. With forget no result is wanted any more.
func (s *StepCall) Cancel(cause error, forget bool) {
	if forget {
		s.forgets.Store(true)
	}
	s.life.cancel(cause)
}

// Run calls the handler and gives its result, nil when none is wanted.
func (s *StepCall) Run() *wire.StepResult {
	t := s.c.task
	var end func(error)
	if len(t.Trace) > 0 {
		end = s.rt.traced(&s.life, t.Trace, "step", t.Step, t.FlowId, t.FlowType)
	}
	res, err := s.run()
	if end != nil {
		end(err)
	}
	if s.forgets.Load() {
		s.life.finish()
		return nil
	}
	if err != nil {
		res = s.failure(err)
	}
	s.life.finish()
	res.Exec, res.Attempt = t.Exec, t.Attempt
	return res
}

func (s *StepCall) run() (*wire.StepResult, error) {
	if s.unwell != nil {
		return nil, s.unwell
	}
	in, err := s.input()
	if err != nil {
		return nil, err
	}
	if s.c.waiting {
		return s.runWaitFor(in)
	}
	d, err := s.execute(in)
	if err != nil {
		return nil, err
	}
	return s.decide(d)
}

func (s *StepCall) input() ([]byte, error) {
	t := s.c.task
	if t.InputBlob == "" {
		return t.Input, nil
	}
	b, err := s.c.host.GetBlob(&s.life, t.FlowId, t.InputBlob)
	if err != nil {
		return nil, fmt.Errorf("flow: the input of step %q cannot be read: %w", t.Step, err)
	}
	return b, nil
}

func (s *StepCall) execute(in []byte) (d Decision, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.c.panicked(p, "Execute", s.c.step)
		}
	}()
	return s.def.execute(&s.c, in)
}

// waitFor calls a WaitFor and makes its record.
func waitFor(d *stepDef, c *Context, in []byte) (w *wire.Wait, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.panicked(p, "WaitFor", d.name)
		}
	}()
	if d.wait == nil {
		return nil, nil
	}
	wait, err := d.wait(c, in)
	if err != nil {
		return nil, err
	}
	return wait.wire(c.flow)
}

func (h *handling) panicked(value any, method, name string) error {
	e := &PanicError{Value: value, Stack: debug.Stack()}
	h.host.Logger().Error("a handler panicked", "flow", h.flowID, "type", h.flow.name, "handler", name, "method", method,
		"panic", fmt.Sprint(value), "stack", string(e.Stack))
	return e
}

func (s *StepCall) runWaitFor(in []byte) (*wire.StepResult, error) {
	wait, err := waitFor(s.def, &s.c, in)
	if err != nil {
		return nil, err
	}
	if err := s.c.moveChildren(wait); err != nil {
		return nil, err
	}
	res := &wire.StepResult{Wait: wait, Locals: s.c.locals}
	return res, s.collect(res)
}

// decide makes the result of a decision.
func (s *StepCall) decide(d Decision) (*wire.StepResult, error) {
	c := &s.c
	if s.w.err != nil {
		return nil, s.w.err
	}
	res := &wire.StepResult{CancelSteps: d.cancels}
	for _, name := range d.cancels {
		if c.flow.steps[name] == nil {
			return nil, &UnknownNameError{Flow: c.flow.name, Kind: "step", Name: name}
		}
	}
	switch d.kind {
	case undecided:
		return nil, fmt.Errorf("flow: step %q returned neither a decision nor an error", c.step)
	case goOn:
		s.w.next = make([]*wire.StepSpec, 0, 1+len(d.rest))
		if err := s.goTo(d.first); err != nil {
			return nil, err
		}
		for _, n := range d.rest {
			if err := s.goTo(n); err != nil {
				return nil, err
			}
		}
	case deadEnd:
	default:
		end, err := c.closing(d)
		if err != nil {
			return nil, err
		}
		if d.otherwise {
			if end.Otherwise, err = s.prepare(d.first); err != nil {
				return nil, err
			}
		}
		s.w.close = end
	}
	return res, s.collect(res)
}

// collect puts what was written into the result.
func (s *StepCall) collect(res *wire.StepResult) error {
	w := &s.w
	if err := w.check(); err != nil {
		return err
	}
	if err := s.c.moveLarge(); err != nil {
		return err
	}
	res.Attributes, res.Publish, res.Sends, res.Next, res.Close = w.attrs, w.publish, w.sends, w.next, w.close
	return nil
}

func (s *StepCall) goTo(n Next) error {
	spec, err := s.prepare(n)
	if err == nil {
		s.w.next = append(s.w.next, spec)
	}
	return err
}

// prepare makes the record of a step that follows. Its WaitFor runs here and
// now, where that works: it sees what was written, and saves a commit and a
// hand-out. Otherwise what it wrote is dropped, and the server hands it out as
// an attempt of its own.
func (s *StepCall) prepare(n Next) (*wire.StepSpec, error) {
	spec, err := s.c.flow.spec(n)
	if err != nil || !spec.WaitFor {
		return spec, err
	}
	c := &Context{handling: s.c.handling, task: s.c.task, step: n.name, waiting: true,
		keyTail: fmt.Sprintf("-%s-%d", n.name, len(s.w.next))}
	task := &wire.Task{FlowId: c.flowID, FlowType: c.flow.name, RunId: c.runID, Exec: s.c.task.Exec, Attempt: s.c.task.Attempt,
		Step: n.name, Number: 1, StartedUs: s.c.task.StartedUs}
	c.task = task
	before := s.w.mark()
	wait, err := waitFor(c.flow.steps[n.name], c, n.in)
	if err != nil || s.w.err != nil {
		s.w = before
		return spec, nil
	}
	s.w.settle(before)
	spec.WaitFor, spec.Wait, spec.Locals = false, wait, c.locals
	return spec, nil
}

// failure makes the result of an attempt that failed. Nothing it wrote is in it.
func (s *StepCall) failure(err error) *wire.StepResult {
	why := s.life.why()
	if _, ok := errors.AsType[*CancelledError](why); ok {
		return &wire.StepResult{} // cancelled work that ends with an error has just ended
	}
	if t, ok := errors.AsType[*TimeoutError](why); ok && !errors.Is(err, t) {
		err = fmt.Errorf("%w: %w", t, err)
	}
	text := errorText(err)
	r := &wire.Retry{Error: text, Kind: kindOf(err)}
	if e, ok := errors.AsType[*retryError](err); ok {
		r.Permanent, r.AfterUs = e.permanent, max(0, e.after.Microseconds())
	}
	return &wire.StepResult{Retry: r, Checkpoint: s.c.checkpoint, Close: &wire.Close{How: wire.Close_FAIL, Error: text}}
}

// RPCCall is one call of an RPC. Run it once; Cancel is safe for concurrent use.
type RPCCall struct {
	rt   *Runtime
	h    handling
	life lifetime
	w    writes
	t    *wire.RpcTask

	outputBlob string // of a large output
}

// RPC prepares a call. base ends its context, too.
func (r *Runtime) RPC(base context.Context, t *wire.RpcTask, h Host) *RPCCall {
	c := &RPCCall{rt: r, t: t}
	c.h = handling{lifetime: &c.life, flow: r.flows[t.FlowType], host: h, flowID: t.FlowId, runID: t.RunId, attrs: t.Attributes, w: &c.w}
	c.life.start(base, time.Duration(t.TimeoutUs)*time.Microsecond)
	return c
}

// Cancel ends the call's context.
func (c *RPCCall) Cancel(cause error) { c.life.cancel(cause) }

// Run calls the handler and gives its result.
func (c *RPCCall) Run() *wire.RpcResult {
	var end func(error)
	if len(c.t.Trace) > 0 {
		end = c.rt.traced(&c.life, c.t.Trace, "rpc", c.t.Name, c.t.FlowId, c.t.FlowType)
	}
	u, err := c.run()
	if end != nil {
		end(err)
	}
	c.life.finish()
	if err != nil {
		return &wire.RpcResult{Call: c.t.Call, Error: errorText(err), ErrorKind: kindOf(err)}
	}
	return &wire.RpcResult{Call: c.t.Call, Update: u, OutputBlob: c.outputBlob}
}

func (c *RPCCall) run() (*wire.Update, error) {
	f := c.h.flow
	if f == nil {
		return nil, fmt.Errorf("flow: this worker has no flow type %q", c.t.FlowType)
	}
	def := f.rpcs[c.t.Name]
	if def == nil {
		return nil, &UnknownNameError{Flow: f.name, Kind: "RPC", Name: c.t.Name}
	}
	if c.t.Locked != (def.update != nil) {
		return nil, fmt.Errorf("flow: RPC %q of %s was called as if locked were %v: the server knows another version of the flow", c.t.Name, f.name, c.t.Locked)
	}
	out, err := c.call(def)
	if err != nil {
		return nil, err
	}
	if err := c.w.check(); err != nil {
		return nil, err
	}
	if err := c.h.move(c.h.flowID, &out, &c.outputBlob, "the output of RPC", c.t.Name); err != nil {
		return nil, err
	}
	u := &wire.Update{Name: c.t.Name, Output: out}
	if def.update == nil {
		return u, nil
	}
	if err := c.h.moveLarge(); err != nil {
		return nil, err
	}
	u.Attributes, u.Publish, u.Next, u.Sends, u.Close = c.w.attrs, c.w.publish, c.w.next, c.w.sends, c.w.close
	return u, nil
}

func (c *RPCCall) call(def *rpcDef) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.h.panicked(p, "RPC", c.t.Name)
		}
	}()
	in := c.t.Input
	if c.t.InputBlob != "" {
		if in, err = c.h.host.GetBlob(&c.life, c.t.FlowId, c.t.InputBlob); err != nil {
			return nil, fmt.Errorf("flow: the input of RPC %q cannot be read: %w", c.t.Name, err)
		}
	}
	if def.read != nil {
		return def.read(&ReadContext{c.h}, in)
	}
	return def.update(&UpdateContext{c.h}, in)
}
