package flows

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// rpcRun is one RPC on its way.
//
// A read looks at the flow, and, when what it saw is durable, calls the worker,
// whose result is the answer. A locked one takes the flow's lock, looks, calls
// the worker at once, and proposes what the handler wrote under the condition
// that no attribute has changed since; when a step has changed one meanwhile it
// looks and calls again. It gives the lock on when it has proposed: a partition
// takes what it is asked in order, so the next one sees what this one wrote, and
// is answered behind its commit, without waiting for it.
type rpcRun struct {
	c         *call
	req       *wire.RpcRequest
	flowID    string
	conflicts int
	holding   bool // the flow's lock; changed by whoever takes the next step

	// Of one that waits for the lock; guarded by the lock table.
	timer env.Timer
	stop  func() bool
}

// rpcTry is one look at the flow with one call of the handler. Its fields are
// set on the partition's goroutine, before the worker is called.
type rpcTry struct {
	*rpcRun
	d      declaration
	rpc    *wire.RpcType
	task   *wire.RpcTask
	lsn    uint64       // of the newest change of an attribute
	early  *wire.Answer // of a request that was seen before
	queued bool         // for the lock: the run goes on with another try
	err    error

	// Two things must be there before a try ends without a proposal: the
	// durability of what was seen, and the handler's result.
	parts  atomic.Int32
	done   atomic.Bool                 // the worker has answered
	watch  atomic.Pointer[func() bool] // undoes the watch over the caller's context
	run    string                      // of the view
	have   []*wire.Attribute           // of the view
	lost   error                       // written before its part is counted
	result *wire.Answer
	failed error // instead of result
}

func (c *call) rpc(req *wire.RpcRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil {
		err = checkName("name of the RPC", req.Name)
	}
	if err == nil {
		err = checkRequestID(req.RequestId)
	}
	if err == nil {
		err = checkTrace(c.req.Trace)
	}
	if err == nil {
		err = c.s.rpcInput(req)
	}
	if err == nil && req.LockTimeoutUs < 0 {
		err = refuse(Invalid, "the time to wait for the lock is negative")
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.remaining() // the time runs from here
	r := &rpcRun{c: c, req: req, flowID: flowID}
	if req.InputBlob == "" {
		r.look()
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		if err := c.s.presentBlobs(ctx, flowID, []string{req.InputBlob}); err != nil {
			return nil, err
		}
		r.look()
		return nil, nil
	})
}

// rpcInput checks the input of an RPC. A large one is in a blob that nothing
// names: the caller makes it for the call and drops it, and a sweep takes what is
// left behind. A call whose handler begins more than an hour later may find the
// blob swept; it fails then, and nothing of it takes effect.
func (s *Service) rpcInput(req *wire.RpcRequest) error {
	if req.InputBlob == "" {
		return s.checkJSON("the input of RPC "+req.Name, req.Input)
	}
	if len(req.Input) > 0 {
		return refuse(Invalid, "RPC %q has an input and an input blob", req.Name)
	}
	_, err := parseBlobID(req.InputBlob)
	return err
}

// look begins a try.
func (r *rpcRun) look() {
	if err := r.over(); err != nil {
		r.end(nil, err)
		return
	}
	t := &rpcTry{rpcRun: r}
	r.c.s.view(r.flowID, t.saw, t.durable)
}

// over says why it is of no use to go on.
func (r *rpcRun) over() error {
	switch {
	case r.c.ctx.Err() != nil:
		return r.c.gone()
	case r.c.remaining() <= 0:
		return r.c.late()
	}
	return nil
}

// end gives the lock to the next one and answers.
func (r *rpcRun) end(a *wire.Answer, err error) {
	if r.holding {
		r.holding = false
		r.c.s.locks.release(r.flowID)
	}
	if err != nil {
		r.c.fail(err)
		return
	}
	r.c.answer(a)
}

// patience bounds the wait for the lock.
func (r *rpcRun) patience() {
	d := r.c.remaining()
	if us := r.req.LockTimeoutUs; us > 0 && us < d.Microseconds() {
		d = time.Duration(us) * time.Microsecond
	}
	r.timer = r.c.s.cfg.Env.Clock.AfterFunc(d, func() {
		if r.c.s.locks.abandon(r) {
			r.end(nil, refuse(Deadline, "flow %q was locked by other RPCs for %s", UserID(r.flowID), d.Round(time.Microsecond)))
		}
	})
	if r.c.ctx.Done() != nil {
		r.stop = context.AfterFunc(r.c.ctx, func() {
			if r.c.s.locks.abandon(r) {
				r.end(nil, r.c.gone())
			}
		})
	}
}

// impatient undoes patience.
func (r *rpcRun) impatient() {
	r.timer.Stop()
	if r.stop != nil {
		r.stop()
	}
}

// granted goes on with the lock.
func (r *rpcRun) granted() {
	r.holding = true
	r.look()
}

// saw runs on the partition's goroutine, with the live flow. A locked RPC that
// has its lock calls the worker at once: its answer comes behind the commit of
// its own update anyway.
func (t *rpcTry) saw(f *wire.Flow) {
	if t.err = t.take(f); t.err != nil || t.early != nil || t.queued || !t.rpc.Locked {
		return
	}
	t.call()
}

func (t *rpcTry) take(f *wire.Flow) error {
	if f == nil {
		return noFlow(t.flowID)
	}
	s := t.c.s
	t.d = s.declared(t.c.tenant, f.Type)
	if !t.d.known && f.Type != stateType {
		return s.unknownType(t.c.tenant, f.Type)
	}
	var err error
	if t.rpc, err = t.d.rpc(t.req.Name); err != nil {
		return err
	}
	if t.rpc.Locked {
		if err := t.lock(f); err != nil || t.early != nil || t.queued {
			return err
		}
	}
	t.lsn, t.run, t.have = f.AttributesLsn, f.RunId, f.Attributes
	t.task = &wire.RpcTask{
		FlowId: t.req.FlowId, FlowType: f.Type, RunId: f.RunId, Name: t.req.Name, Input: t.req.Input, InputBlob: t.req.InputBlob,
		Attributes: f.Attributes, Locked: t.rpc.Locked, Trace: t.c.req.Trace,
	}
	return nil
}

// lock takes the flow's lock, unless the request is an old one or of no use.
func (t *rpcTry) lock(f *wire.Flow) error {
	if t.req.RequestId != "" {
		for _, seen := range f.Requests {
			if seen.RequestId == t.req.RequestId {
				t.early = rpcAnswer(seen.Output, "", true)
				return nil
			}
		}
	}
	if f.Status != wire.Status_RUNNING {
		return refuse(Closed, "the run of flow %q has ended, RPC %q could not write to it", UserID(t.flowID), t.req.Name)
	}
	if t.holding {
		return nil
	}
	switch got, err := t.c.s.locks.acquire(t.rpcRun); {
	case err != nil:
		return err
	case got:
		t.holding = true
	default:
		t.queued = true // nothing of the run may be touched from here
	}
	return nil
}

// durable follows saw when what was seen is committed, or never will be.
func (t *rpcTry) durable(lost error) {
	switch {
	case t.queued:
	case t.task == nil: // not seen at all, or nothing to call for
		t.lost = lost
		switch {
		case lost != nil:
			t.end(nil, lost)
		case t.err != nil:
			t.end(nil, t.err)
		default:
			t.end(t.early, nil)
		}
	case t.rpc.Locked:
		t.lost = lost
		t.part()
	case lost != nil:
		t.end(nil, lost)
	default:
		t.parts.Store(1)
		t.call()
	}
}

// part counts what must be there; the second one ends the try.
func (t *rpcTry) part() {
	if t.parts.Add(1) < 2 {
		return
	}
	if t.lost != nil {
		t.end(nil, t.lost)
		return
	}
	t.end(t.result, t.failed)
}

func (t *rpcTry) call() {
	left := t.c.remaining()
	if left <= 0 {
		t.failed = t.c.late()
		t.part()
		return
	}
	t.c.s.cfg.Workers.Call(t.flowID, t.task.FlowType, t.task, left, t.called)
	if t.done.Load() || t.c.ctx.Done() == nil {
		return
	}
	// A result that comes between the two leaves the watch behind until the
	// caller's context ends; the call is over by then, and nothing is cancelled.
	stop := context.AfterFunc(t.c.ctx, func() { t.c.s.cfg.Workers.CancelCall(t.flowID, t.task) })
	t.watch.Store(&stop)
}

// called takes the worker's result.
func (t *rpcTry) called(res *wire.RpcResult, err error) {
	t.done.Store(true)
	if stop := t.watch.Load(); stop != nil {
		(*stop)()
	}
	wrong := t.c.s.rpcOutput(t.req.Name, res)
	switch {
	case err != nil:
		t.failed = t.unanswered(err)
	case res == nil:
		t.failed = refuse(Internal, "the worker gave no result of RPC %q", t.req.Name)
	case res.Error != "" && res.ErrorKind == "timeout" && t.c.remaining() <= 0:
		t.failed = t.c.late() // the handler's time is the call's: whoever notices first
	case res.Error != "":
		t.failed = &Error{Code: RPCFailed, Message: res.Error, Kind: res.ErrorKind, Position: -1}
	case wrong != nil:
		t.failed = refuse(RPCFailed, "its worker answered wrongly: %v", wrong)
	case !t.rpc.Locked:
		if writes(res.Update) {
			t.failed = refuse(RPCFailed, "RPC %q is declared as a read, but its handler wrote something", t.req.Name)
			break
		}
		t.result = rpcAnswer(res.Update.GetOutput(), res.OutputBlob, false)
	case !writes(res.Update) && t.req.RequestId == "":
		t.result = rpcAnswer(res.Update.GetOutput(), res.OutputBlob, false)
	default:
		if t.failed = t.propose(given(res.Update), res.OutputBlob); t.failed == nil {
			return
		}
	}
	t.part()
}

// unanswered says why there is no result: an error with a code of its own, or
// that no worker has answered.
func (t *rpcTry) unanswered(err error) error {
	switch code := codeOf(err); {
	case t.c.ctx.Err() != nil:
		return t.c.gone()
	case code == Deadline:
		return refuse(Deadline, "no worker has answered RPC %q within the call's %s", t.req.Name, t.c.timeout())
	case code == Internal:
		return refuse(NoWorker, "RPC %q: %v", t.req.Name, err)
	}
	return err
}

// writes reports whether an update does something besides giving an output.
func writes(u *wire.Update) bool {
	return u != nil && (len(u.Attributes) > 0 || len(u.Publish) > 0 || len(u.Next) > 0 || len(u.Sends) > 0 ||
		len(u.Events) > 0 || u.Close != nil && u.Close.How != wire.Close_NONE)
}

// propose writes what the handler wrote. On an error nothing was proposed.
func (t *rpcTry) propose(u *wire.Update, outputBlob string) error {
	if t.c.ctx.Err() != nil {
		return t.c.gone()
	}
	if err := t.c.s.update(t.c.tenant, t.d, u, t.have); err != nil {
		return err
	}
	u.IfAttributesLsn, u.RequestId, u.Name, u.RunId = t.lsn, t.req.RequestId, t.req.Name, t.run
	e := &wire.Entry{FlowId: t.flowID, Command: &wire.Entry_Update{Update: u}}
	t.holding = false // by the reply the lock may be another one's
	err := t.c.s.cfg.Set.For(t.flowID).Submit(partition.Proposal{Entry: e, Reply: func(rep core.Reply, err error) {
		var ce *core.Error
		switch {
		case err == nil && rep.Duplicate:
			t.end(rpcAnswer(rep.Output, "", true), nil)
		case err == nil:
			t.end(rpcAnswer(u.Output, outputBlob, false), nil)
		case errors.As(err, &ce) && ce.Code == core.Conflict:
			t.conflict()
		default:
			t.end(nil, err)
		}
	}})
	if err != nil {
		t.holding = true
		return err
	}
	t.c.s.locks.release(t.flowID)
	return nil
}

// conflict tries again.
func (t *rpcTry) conflict() {
	if t.conflicts++; t.conflicts >= maxConflicts {
		t.end(nil, refuse(Conflict, "steps of flow %q changed its attributes during each of %d runs of RPC %q", UserID(t.flowID), maxConflicts, t.req.Name))
		return
	}
	if t.c.s.locks.again(t.rpcRun) {
		t.granted()
	}
}

// rpcOutput checks what a handler gave. A large output is in a blob that nothing
// names, which the caller gets and drops.
func (s *Service) rpcOutput(name string, res *wire.RpcResult) error {
	output := res.GetUpdate().GetOutput()
	if res.GetOutputBlob() == "" {
		return s.checkJSON("the output of RPC "+name, output)
	}
	if len(output) > 0 {
		return refuse(Invalid, "RPC %q has an output and an output blob", name)
	}
	_, err := parseBlobID(res.OutputBlob)
	return err
}

func rpcAnswer(output []byte, blob string, duplicate bool) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: output, OutputBlob: blob, Duplicate: duplicate}}}
}
