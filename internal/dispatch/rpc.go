package dispatch

import (
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// call is one RPC, from Call until it is answered. Guarded by t.mu of its lane.
type call struct {
	l       *lane
	w       *Worker // that has it; nil while it waits
	task    *wire.RpcTask
	done    func(*wire.RpcResult, error)
	elem    elem[call] // in the worker's, or in l.calls
	due     due
	begunUs int64
	timeout time.Duration
	retried bool
	span    *span // of the newest hand-out
}

// finished is a call that is answered: its caller is told without the lock held.
type finished struct {
	c       *call
	res     *wire.RpcResult
	err     error
	outcome string
	tookUs  int64
}

func (f *finished) tell() {
	if h := f.c.l.t.d.cfg.Hooks.RPC; h != nil {
		h(f.c.l.name, f.c.task.Name, f.outcome, micros(f.tookUs))
	}
	f.c.done(f.res, f.err)
}

// Call hands an RPC to a worker of the flow's type that knows it, and calls done
// once, on any goroutine, with what the worker answered, or with a
// *core.Error. A
// call that finds no credit waits its turn, until timeout (0 = the default). One
// whose worker is lost is given to another one if it only reads, and only once.
// The dispatcher sets t.Call and owns t from now on.
func (d *Dispatcher) Call(flowID, flowType string, t *wire.RpcTask, timeout time.Duration, done func(*wire.RpcResult, error)) {
	name, id, ok := split(flowID)
	if !ok {
		done(nil, refuse(core.Invalid, "flow %q is of no tenant", flowID))
		return
	}
	if timeout <= 0 {
		timeout = d.cfg.RPCTimeout
	}
	t.Call, t.FlowId, t.TimeoutUs = d.lastCall.Add(1), id, timeout.Microseconds()
	if t.FlowType == "" {
		t.FlowType = flowType
	}
	te := d.makeTenant(name)
	now := d.now()
	te.mu.Lock()
	l := te.lane(flowType)
	c := &call{l: l, task: t, done: done, begunUs: now, timeout: timeout}
	c.due.c = c
	var err *core.Error
	switch {
	case d.draining.Load(): // also when it is stopped: who stops it looks at the calls under the lock
		err = ErrDraining
	case callWeight(t) > MaxTask:
		err = refuse(TooLarge, "the RPC and what it would get of its flow have %d bytes, at most %d fit: keep large values in blobs", callWeight(t), MaxTask)
	case !c.send():
		if l.calls.n >= MaxWaitingCalls {
			err = refuse(Overloaded, "%d calls wait for a worker of type %q: try again later, or run more workers", l.calls.n, flowType)
			break
		}
		l.calls.push(t.Name, &c.elem, c)
	}
	if err != nil {
		te.mu.Unlock()
		f := finished{c, nil, err, string(err.Code), 0}
		f.tell()
		return
	}
	te.dues.set(&c.due, now+timeout.Microseconds())
	te.arm()
	te.calls[t.Call] = c
	te.mu.Unlock()
}

// send gives the call to a worker that has room and knows it.
func (c *call) send() bool {
	l := c.l
	n := len(l.canRPC.all)
	if n == 0 {
		return false
	}
	var best *link
	for i := range n {
		if best != nil && i >= chooseScan {
			break
		}
		k := l.canRPC.all[(l.cursor+i)%n]
		if k.rpcs[c.task.Name] && (best == nil || k.w.rpcFree > best.w.rpcFree) {
			best = k
		}
	}
	if n > 1 {
		l.cursor++
	}
	if best == nil {
		return false
	}
	return c.hand(best.w)
}

// hand gives the call to w, for one of its RPC credits; false: it cannot take it
// now.
func (c *call) hand(w *Worker) bool {
	if !w.give(callWeight(c.task), func(f *wire.ServerFrame) { f.Rpcs = append(f.Rpcs, c.out()) }) {
		return false
	}
	c.w = w
	w.addRPCFree(-1)
	w.sent++
	w.rpcs.push(&c.elem, c)
	return true
}

// out is the call for a worker's frame. With a trace it is a copy: the frame of
// a former worker may still be written.
func (c *call) out() *wire.RpcTask {
	t := c.task
	if len(t.Trace) == 0 {
		return t
	}
	number := uint32(1)
	if c.retried {
		number = 2
	}
	c.span = c.l.t.d.begin(t.Trace, "rpc", t.FlowId, c.l.name, t.Name, number)
	return &wire.RpcTask{Call: t.Call, FlowId: t.FlowId, FlowType: t.FlowType, RunId: t.RunId, Name: t.Name, Input: t.Input,
		Attributes: t.Attributes, Locked: t.Locked, TimeoutUs: t.TimeoutUs, Trace: c.span.child}
}

// callWeight is about the bytes of a call in a frame.
func callWeight(t *wire.RpcTask) int {
	n := 96 + len(t.Input)
	for _, a := range t.Attributes {
		n += 24 + len(a.Name) + len(a.Value)
	}
	return n
}

// end takes the call from where it is, answered.
func (c *call) end(now int64, res *wire.RpcResult, err error, outcome string) finished {
	if c.w != nil {
		c.elem.leave()
	} else if c.elem.in != nil {
		c.l.calls.remove(&c.elem)
	}
	delete(c.l.t.calls, c.task.Call)
	c.l.t.dues.unset(&c.due)
	c.span.ended(outcome)
	return finished{c, res, err, outcome, now - c.begunUs}
}

// takeRPC matches an answer with its call.
func (w *Worker) takeRPC(r *wire.RpcResult, now int64) {
	w.answers++
	c := w.t.calls[r.GetCall()]
	if c == nil || c.w != w {
		w.t.d.late.Add(1)
		return
	}
	outcome := "completed"
	if r.Error != "" {
		outcome = "failed"
	}
	c.span.inherit(r.GetUpdate().GetSends(), nil, r.GetUpdate().GetNext())
	w.calls = append(w.calls, c.end(now, r, nil, outcome))
}

// isDue ends a call that took too long.
func (c *call) isDue(now int64, out *after) {
	w := c.w
	err := refuse(NoWorker, "no worker of type %q took RPC %q within %v: run one that declares it, or grant more RPC credits", c.l.name, c.task.Name, c.timeout)
	if w != nil {
		err = refuse(Deadline, "RPC %q was not answered within %v", c.task.Name, c.timeout)
		c.recall("deadline exceeded")
	}
	out.calls = append(out.calls, c.end(now, nil, err, "timeout"))
	if w != nil {
		w.endIfDrained()
	}
}

// recall tells the call's worker that no answer is wanted any more.
func (c *call) recall(reason string) {
	m := &wire.CancelTask{FlowId: c.task.FlowId, Call: c.task.Call, Reason: reason, Forget: true}
	c.w.tell(func(f *wire.ServerFrame) { f.Cancels = append(f.Cancels, m) })
}

// lose ends or repeats a call whose worker is gone.
func (c *call) lose(reason string, out *after) {
	now := c.l.t.d.now()
	c.elem.leave()
	c.w = nil
	if !c.task.Locked && !c.retried && !c.l.t.d.stopped.Load() {
		c.retried = true
		c.span.ended("lost")
		if !c.send() {
			c.l.calls.push(c.task.Name, &c.elem, c)
		}
		return
	}
	out.calls = append(out.calls, c.end(now, nil, refuse(WorkerLost, "RPC %q: %s; nothing of it took effect: call again", c.task.Name, reason), "lost"))
}

// CancelCall ends a call whose answer is no longer wanted: t as it was given to
// Call. done is called with a *core.Error of code cancelled, unless it was before.
func (d *Dispatcher) CancelCall(flowID string, t *wire.RpcTask) {
	name, _, _ := split(flowID)
	te := d.tenantOf(name)
	if te == nil {
		return
	}
	te.mu.Lock()
	c := te.calls[t.Call]
	if c == nil || c.task != t {
		te.mu.Unlock()
		return
	}
	w := c.w
	if w != nil {
		c.recall("cancelled by the caller")
	}
	f := c.end(d.now(), nil, refuse(Cancelled, "the call was cancelled"), "cancelled")
	if w != nil {
		w.endIfDrained()
	}
	te.mu.Unlock()
	f.tell()
}
