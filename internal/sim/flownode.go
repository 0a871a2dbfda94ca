package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Flows of users live beside the sessions: their steps go through the production
// dispatcher to workers that are actors, what they send through a courier.

const (
	tenant     = "default"
	flowPrefix = tenant + "/f/"
)

func isFlow(id string) bool { return strings.HasPrefix(id, flowPrefix) }

// flowNode is what one life of the process has for flows, for all its partitions.
type flowNode struct {
	n        *node
	dispatch *dispatch.Dispatcher
	carrying map[sendKey]bool // sends on their way
	held     map[string]map[stepKey]bool
}

type sendKey struct {
	flow string
	id   uint64
}

type stepKey struct {
	flow string
	exec uint64
}

const (
	flowHeartbeat = 2 * time.Second
	flowTimeout   = 3 * time.Second // of an attempt
)

func newFlowNode(n *node) *flowNode {
	f := &flowNode{n: n, carrying: map[sendKey]bool{}, held: map[string]map[stepKey]bool{}}
	f.dispatch = dispatch.New(dispatch.Config{
		Clock: lifeClock{n}, Hub: n.hub, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Heartbeat: flowHeartbeat, Timeout: flowTimeout, RPCTimeout: flowTimeout,
	})
	return f
}

// Submit implements dispatch.Proposer.
func (f *flowNode) Submit(flowID string, p partition.Proposal) error {
	q := f.part(flowID)
	if len(q.queue) >= f.n.w.p.queueBound {
		f.n.w.fault("overloaded")
		return partition.ErrOverloaded
	}
	q.submit(f.request(flowID, p))
	return nil
}

// SubmitWait implements dispatch.Proposer: nothing waits here, the queue grows.
func (f *flowNode) SubmitWait(_ context.Context, flowID string, p partition.Proposal) error {
	f.part(flowID).submit(f.request(flowID, p))
	return nil
}

func (f *flowNode) part(flowID string) *part {
	return f.n.parts[partition.Of(flowID, len(f.n.parts))]
}

func (f *flowNode) request(flowID string, p partition.Proposal) request {
	return request{flow: flowID, entry: p.Entry, reply: func(o outcome) {
		if o.err == nil {
			f.answered(p.Entry)
		}
		if p.Reply != nil {
			p.Reply(o.Reply, o.err)
		}
	}}
}

// answered notes which attempts are over.
func (f *flowNode) answered(e *wire.Entry) {
	var exec uint64
	var a *wire.AttemptID
	switch c := e.Command.(type) {
	case *wire.Entry_StepResult:
		exec, a = c.StepResult.Exec, c.StepResult.Attempt
	case *wire.Entry_Redispatch:
		exec, a = c.Redispatch.Exec, c.Redispatch.Attempt
	default:
		return
	}
	p := f.part(e.FlowId)
	delete(p.flows.live, attemptKey{p.id, e.FlowId, exec, core.Attempt{Epoch: a.Epoch, LSN: a.Lsn, N: a.N}})
}

// router gives the steps of flows to the dispatcher, and those of sessions to
// the pool; it checks what it is handed.
type router struct {
	*pool
	flows  *flowNode
	live   map[attemptKey]bool            // handed out in this life, and not answered durably
	queued map[stepKey]bool               // wait for a slot
	early  map[attemptKey]*partition.Work // whose start is not durable yet
}

func newRouter(p *part) *router {
	return &router{pool: p.pool, flows: p.n.flows, live: map[attemptKey]bool{}, queued: map[stepKey]bool{}, early: map[attemptKey]*partition.Work{}}
}

// Reserve implements partition.Executor.
func (r *router) Reserve(flowID, flowType string, want int) int {
	if !isFlow(flowID) {
		return r.pool.Reserve(flowID, flowType, want)
	}
	return r.flows.dispatch.Reserve(flowID, flowType, want)
}

// Release implements partition.Executor.
func (r *router) Release(flowID, flowType string, n int) {
	if isFlow(flowID) && !r.world().mutant.leakSlots {
		r.flows.dispatch.Release(flowID, flowType, n)
	}
}

// Dispatch implements partition.Executor.
func (r *router) Dispatch(pw *partition.Work) {
	if !isFlow(pw.FlowID) {
		r.pool.Dispatch(pw)
		return
	}
	w := r.world()
	key := attemptKey{r.p.id, pw.FlowID, pw.Exec, pw.Attempt}
	w.tell(pw.FlowID, "attempt %d.%d.%d of step %d %s is handed out, committed %v", pw.Attempt.Epoch, pw.Attempt.LSN, pw.Attempt.N, pw.Exec, pw.Name, pw.Committed())
	if w.attempts[key] {
		w.violate("attempts", pw.FlowID, "attempt %v of step %d was handed out before", pw.Attempt, pw.Exec)
	}
	w.attempts[key] = true
	switch {
	case pw.Committed() && pw.Attempt.LSN > r.p.durable:
		w.violate("gate", pw.FlowID, "step %d runs before its start, entry %d, is durable", pw.Exec, pw.Attempt.LSN)
	case !pw.Committed() && !mayRunEarly(pw.Name):
		w.violate("gate", pw.FlowID, "step %d %s may not run before its commit", pw.Exec, pw.Name)
	}
	delete(r.queued, stepKey{pw.FlowID, pw.Exec})
	r.flows.holds(pw)
	if w.mutant.dropDispatch && w.rng.percent(10) {
		return
	}
	r.live[key] = true
	if pw.Committed() {
		r.keyNames(pw)
	} else {
		r.early[key] = pw
	}
	r.flows.dispatch.Dispatch(pw)
}

// holds counts the steps that run under a concurrency key.
func (f *flowNode) holds(pw *partition.Work) {
	key := pw.Spec.ConcurrencyKey
	if key == "" {
		return
	}
	if f.held[key] == nil {
		f.held[key] = map[stepKey]bool{}
	}
	f.held[key][stepKey{pw.FlowID, pw.Exec}] = true
	if n := len(f.held[key]); n > int(pw.Spec.ConcurrencyLimit) {
		f.n.w.violate("keys", pw.FlowID, "%d steps run with key %s, at most %d may", n, key, pw.Spec.ConcurrencyLimit)
	}
}

// Commit implements partition.Executor.
func (r *router) Commit(pw *partition.Work) {
	if !isFlow(pw.FlowID) {
		r.pool.Commit(pw)
		return
	}
	if pw.Attempt.LSN > r.p.durable {
		r.world().violate("gate", pw.FlowID, "start of step %d is called durable, its entry %d is not", pw.Exec, pw.Attempt.LSN)
	}
	delete(r.early, attemptKey{r.p.id, pw.FlowID, pw.Exec, pw.Attempt})
	r.keyNames(pw)
	r.flows.dispatch.Commit(pw)
}

// keyNames: of the attempts whose start is durable, all with one idempotency key
// are for the same work. Those that were lost before may have been for other
// work: see docs/adr/0010-async-steps.md.
func (r *router) keyNames(pw *partition.Work) {
	w, key, is := r.world(), workKey(pw), workOf(pw)
	if was, ok := w.works[key]; ok && was != is {
		w.violate("work", pw.FlowID, "key %s stands for %q, and stood for %q", key, is, was)
	}
	w.works[key] = is
	if was, ok := w.lostWorks[key]; ok {
		delete(w.lostWorks, key)
		if was == is {
			w.fault("async-again")
		} else {
			w.fault("async-other-way")
		}
	}
}

// workKey is the idempotency key, of each of a step's two handlers.
func workKey(pw *partition.Work) string {
	if pw.WaitPhase {
		return pw.Key() + "-waitfor"
	}
	return pw.Key()
}

// workOf is what a step is to do.
func workOf(pw *partition.Work) string {
	b := fmt.Appendf(nil, "%s %q", pw.Name, pw.Input)
	for _, m := range pw.Matched {
		b = fmt.Appendf(b, " %q", m.Payload)
	}
	return string(b)
}

// loseEarly is the end of a life: attempts whose start was not durable are lost.
func (r *router) loseEarly() {
	w := r.world()
	for _, pw := range r.early {
		w.lostWorks[workKey(pw)] = workOf(pw)
	}
}

// Cancel implements partition.Executor.
func (r *router) Cancel(flow string, exec uint64, attempt core.Attempt, reason string, forget bool) {
	if !isFlow(flow) {
		r.pool.Cancel(flow, exec, attempt, reason, forget)
		return
	}
	r.flows.dispatch.Cancel(flow, exec, attempt, reason, forget)
}

// Queue implements partition.Executor.
func (r *router) Queue(q core.Effect) {
	w := r.world()
	w.tell(q.FlowID, "step %d %s waits for a worker, key %q", q.Exec, q.Step, q.Key)
	if w.mutant.dropQueue && w.rng.percent(20) {
		return
	}
	r.queued[stepKey{q.FlowID, q.Exec}] = true
	if w.mutant.ignoreKeys {
		q.KeyLimit = 100
	}
	r.flows.dispatch.Queue(q)
}

// Done implements partition.Executor.
func (r *router) Done(flowID, flowType string, exec uint64, key string) {
	if !isFlow(flowID) {
		return
	}
	delete(r.flows.held[key], stepKey{flowID, exec})
	r.flows.dispatch.Done(flowID, flowType, exec, key)
}

// Abort implements partition.Executor.
func (r *router) Abort() {
	r.pool.Abort()
	r.flows.dispatch.Abort()
}

// Send implements partition.Outbox: the courier. A delivery may happen twice.
func (r *router) Send(flowID string, out *wire.Outgoing) {
	f, w := r.flows, r.world()
	w.tell(flowID, "send %d to %s", out.Id, shortFlow(out.Send.FlowId))
	if w.mutant.dropSends && w.rng.percent(20) {
		return
	}
	f.carrying[sendKey{flowID, out.Id}] = true
	f.n.inLife(w.rng.between(10, 5_000), func() { f.carry(flowID, out) })
	if !w.calm && w.rng.percent(w.p.sendTwice) {
		w.fault("send-twice")
		f.n.inLife(w.rng.between(10, 500_000), func() { f.carry(flowID, out) })
	}
}

func (f *flowNode) carry(from string, out *wire.Outgoing) {
	w := f.n.w
	e := partition.Delivery(out)
	if w.mutant.forgetKeys {
		e = withoutKey(e)
	}
	to := f.part(e.FlowId)
	if len(to.queue) >= w.p.queueBound {
		f.n.inLife(w.rng.between(5_000, 50_000), func() { f.carry(from, out) })
		return
	}
	to.submit(request{flow: e.FlowId, entry: e, reply: func(o outcome) {
		var refused *core.Error
		switch {
		case o.err == nil:
			f.report(from, &wire.OutboxDone{Id: out.Id, RunId: o.RunID})
		case errors.As(o.err, &refused) && refused.Code == core.QueueFull:
			f.n.inLife(w.rng.between(5_000, 50_000), func() { f.carry(from, out) })
		case errors.As(o.err, &refused):
			f.report(from, &wire.OutboxDone{Id: out.Id, Error: refused.Message})
		}
	}})
}

// withoutKey is a delivery that its target cannot know again.
func withoutKey(e *wire.Entry) *wire.Entry {
	e = e.CloneVT()
	switch c := e.Command.(type) {
	case *wire.Entry_StartFlow:
		c.StartFlow.RequestId = ""
		c.StartFlow.Reuse = wire.StartFlow_TERMINATE
	case *wire.Entry_Publish:
		c.Publish.RequestId = ""
	}
	return e
}

// report tells the sender that its send was answered.
func (f *flowNode) report(from string, done *wire.OutboxDone) {
	w, p := f.n.w, f.part(from)
	if len(p.queue) >= w.p.queueBound {
		f.n.inLife(w.rng.between(5_000, 50_000), func() { f.report(from, done) })
		return
	}
	e := &wire.Entry{FlowId: from, Command: &wire.Entry_OutboxDone{OutboxDone: done}}
	p.submit(request{flow: from, entry: e, reply: func(o outcome) {
		if !errors.Is(o.err, partition.ErrLost) {
			delete(f.carrying, sendKey{from, done.Id})
		}
	}})
}
