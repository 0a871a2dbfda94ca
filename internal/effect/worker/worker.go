// Package worker runs the steps of flows in this process: one goroutine an
// attempt, cancelled through its context, answered by exactly one result.
package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Cancelled is the cause of a context whose step was asked to stop.
type Cancelled struct{ Reason string }

func (c *Cancelled) Error() string { return "step cancelled: " + c.Reason }

// errAborted is the cause when the ownership was lost or the process stops:
// no result is wanted.
var errAborted = errors.New("worker stopped")

// earlyBound is how many bytes of a message are held back before the start of
// its step is committed; then the handler waits.
const earlyBound = 64 << 10

// Handler runs steps. Its methods are called on many goroutines.
type Handler interface {
	// Run does one attempt and gives its result; Exec and Attempt are filled in
	// by the pool. When ctx ends with a *Cancelled it returns soon, with a
	// result that says what had been done.
	Run(ctx context.Context, call *Call) *wire.StepResult
	// Fail gives the result of an attempt that panicked or whose result was
	// refused. It must be small and must not fail.
	Fail(w *partition.Work, err error) *wire.StepResult
}

// Call is one attempt: the work, and where to show what it writes.
type Call struct {
	*partition.Work
	pool      *Pool
	committed chan struct{} // closed when the start is durable

	mu      sync.Mutex
	early   []byte // guarded by mu; shown at the commit
	durable bool   // guarded by mu
}

// Pool runs attempts. Make it before the partitions, then Bind them.
type Pool struct {
	partition.Slotless // attempts are goroutines

	hub     *stream.Hub
	handler Handler
	log     *slog.Logger
	ctx     context.Context
	abort   context.CancelCauseFunc
	bound   chan struct{}
	set     partition.Set
	wg      sync.WaitGroup
	running atomic.Int64

	mu      sync.Mutex
	runs    map[runKey]*run // guarded by mu; attempts of this process
	stopped bool            // guarded by mu: nothing is dispatched any more
}

type runKey struct {
	flow    string
	exec    uint64
	attempt core.Attempt
}

type run struct {
	call   *Call
	cancel context.CancelCauseFunc
}

// New makes a pool that shows deltas on hub.
func New(hub *stream.Hub, handler Handler, log *slog.Logger) *Pool {
	p := &Pool{hub: hub, handler: handler, log: log, bound: make(chan struct{}), runs: map[runKey]*run{}}
	p.ctx, p.abort = context.WithCancelCause(context.Background())
	return p
}

// Bind says where results go. Attempts handed out before wait for it.
func (p *Pool) Bind(set partition.Set) {
	p.set = set
	close(p.bound)
}

// Running counts the attempts that run.
func (p *Pool) Running() int { return int(p.running.Load()) }

func keyOf(w *partition.Work) runKey { return runKey{w.FlowID, w.Exec, w.Attempt} }

// Dispatch implements partition.Executor.
func (p *Pool) Dispatch(w *partition.Work) {
	call := &Call{Work: w, pool: p, committed: make(chan struct{})}
	if w.Committed() {
		call.durable = true
		close(call.committed)
	}
	ctx, cancel := context.WithCancelCause(p.ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		cancel(errAborted) // the next owner hands it out again
		return
	}
	p.runs[keyOf(w)] = &run{call: call, cancel: cancel}
	p.running.Add(1)
	p.wg.Add(1) // never beside Stop's Wait
	go p.run(ctx, call)
}

// Queue implements partition.Executor. Steps in this process are queued only by
// a server that did not run them, so they are started at once.
func (p *Pool) Queue(q core.Effect) {
	entry := &wire.Entry{FlowId: q.FlowID, Command: &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: q.Exec}}}
	go func() {
		select {
		case <-p.bound:
		case <-p.ctx.Done():
			return
		}
		_ = p.set.For(q.FlowID).SubmitWait(p.ctx, partition.Proposal{Entry: entry}) // a loss is the next owner's
	}()
}

// Commit implements partition.Executor.
func (p *Pool) Commit(w *partition.Work) {
	p.mu.Lock()
	r := p.runs[keyOf(w)]
	p.mu.Unlock()
	if r != nil {
		r.call.commit()
	}
}

// Cancel implements partition.Executor.
func (p *Pool) Cancel(flowID string, exec uint64, attempt core.Attempt, reason string, _ bool) {
	p.mu.Lock()
	r := p.runs[runKey{flowID, exec, attempt}]
	p.mu.Unlock()
	if r != nil {
		r.cancel(&Cancelled{reason})
	}
}

// Abort implements partition.Executor: all attempts end, none is answered.
func (p *Pool) Abort() { p.abort(errAborted) }

// Stop ends all attempts without an answer (they are handed out again by the
// next owner) and waits for their goroutines.
func (p *Pool) Stop() {
	p.abort(errAborted)
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *Pool) run(ctx context.Context, call *Call) {
	defer p.wg.Done()
	select {
	case <-p.bound:
	case <-p.ctx.Done(): // not ctx: an attempt that is cancelled already is answered too
		p.forget(call)
		return
	}
	res := p.guarded(ctx, call)
	p.forget(call)
	if p.ctx.Err() != nil {
		return
	}
	p.answer(call.Work, res, false)
}

func (p *Pool) forget(call *Call) {
	k := keyOf(call.Work)
	p.mu.Lock()
	r := p.runs[k]
	delete(p.runs, k)
	p.mu.Unlock()
	if r != nil {
		r.cancel(nil)
		p.running.Add(-1)
	}
}

// guarded turns a panic of a handler into the failure of its step.
func (p *Pool) guarded(ctx context.Context, call *Call) (res *wire.StepResult) {
	defer func() {
		if v := recover(); v != nil {
			p.log.Error("step panicked", "flow", call.FlowID, "step", call.Name, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			res = p.handler.Fail(call.Work, errors.New("internal error: the step panicked"))
		}
	}()
	return p.handler.Run(ctx, call)
}

// answer proposes the result; a result that the core refuses for its content
// is replaced by a failure, so that the step never stays open.
func (p *Pool) answer(w *partition.Work, res *wire.StepResult, last bool) {
	res.Exec, res.Attempt = w.Exec, w.Attempt.Wire()
	entry := &wire.Entry{FlowId: w.FlowID, Command: &wire.Entry_StepResult{StepResult: res}}
	err := p.set.For(w.FlowID).SubmitWait(p.ctx, partition.Proposal{Entry: entry, Reply: func(_ core.Reply, err error) {
		var refused *core.Error
		if err == nil || !errors.As(err, &refused) {
			return // done, or the ownership is lost
		}
		if refused.Code == core.StaleAttempt || refused.Code == core.NotFound {
			p.hub.Drop(w.FlowID, w.Exec)
			return
		}
		p.log.Error("step result refused", "flow", w.FlowID, "step", w.Name, "error", err)
		if !last {
			go p.answer(w, p.handler.Fail(w, err), true)
			return
		}
		p.hub.Drop(w.FlowID, w.Exec)
	}})
	if err != nil && p.ctx.Err() == nil && !errors.Is(err, partition.ErrStopped) {
		p.log.Error("step result not proposed", "flow", w.FlowID, "step", w.Name, "error", err)
	}
}

// Durable is closed when the start of the attempt is committed. Until then
// nothing of it may be shown or done outside, but for a model call.
func (c *Call) Durable() <-chan struct{} { return c.committed }

// Show appends text to the message this step is writing: at once when the
// step's start is committed, else when it is. It returns ctx's error.
func (c *Call) Show(ctx context.Context, text string) error {
	c.mu.Lock()
	if !c.durable && len(c.early)+len(text) > earlyBound {
		c.mu.Unlock()
		select {
		case <-c.committed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	if !c.durable {
		c.early = append(c.early, text...)
		return nil
	}
	c.pool.hub.Delta(c.FlowID, c.Scope, c.Exec, c.Number, text)
	return nil
}

func (c *Call) commit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.durable {
		return
	}
	c.durable = true
	if len(c.early) > 0 {
		c.pool.hub.Delta(c.FlowID, c.Scope, c.Exec, c.Number, string(c.early))
		c.early = nil
	}
	close(c.committed)
}
