package perduretest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/wire"
)

const maxPayload = 64 << 10

// worker is one stream's worth of a worker, without the stream. It is the host
// of its handlers and the outlet of the dispatcher.
type worker struct {
	e   *Env
	ctx context.Context // of its handlers
	end context.CancelCauseFunc
	log *slog.Logger
	in  queue[*wire.ServerFrame]
	out queue[*wire.WorkerFrame]

	mu    sync.Mutex
	tasks map[taskID]*flow.StepCall // guarded by mu
	calls map[uint64]*flow.RPCCall  // guarded by mu
	all   sync.WaitGroup
}

type taskID struct {
	flow       string
	exec       uint64
	epoch, lsn uint64
	n          uint32
}

func idOf(flowID string, exec uint64, a *wire.AttemptID) taskID {
	return taskID{flowID, exec, a.GetEpoch(), a.GetLsn(), a.GetN()}
}

// connect makes a new worker for the engine.
func (e *Env) connect() {
	e.helper()
	w := &worker{e: e, tasks: map[taskID]*flow.StepCall{}, calls: map[uint64]*flow.RPCCall{}}
	w.ctx, w.end = context.WithCancelCause(context.Background())
	w.log = slog.New(slog.NewTextHandler(logTo{e}, nil))
	hello := &wire.Hello{Protocol: dispatch.Protocol, WorkerId: "perduretest", Sdk: flow.SDK, FlowTypes: e.rt.Types()}
	w.in.init(e)
	w.out.init(e)
	w.all.Go(func() { w.in.run(w.take) })
	link, err := e.d.Connect(tenant, "in-process", hello, w)
	if err != nil {
		w.stop()
		e.fatal("the engine refuses the flows: %v", err)
	}
	w.all.Go(func() {
		w.out.run(func(f *wire.WorkerFrame) {
			if err := link.Frame(f); err != nil {
				w.log.Error("the engine refuses what a handler gave", "error", err)
			}
		})
		link.Leave(errors.New("the test ends it"))
	})
	e.w = w
	w.send(&wire.WorkerFrame{TaskCredits: Concurrency, RpcCredits: Concurrency})
}

// stop ends the worker as a crash would: nothing more comes of it.
func (w *worker) stop() {
	w.Close(nil)
	w.all.Wait()
}

// Put implements dispatch.Outlet.
func (w *worker) Put(_ int, fn func(*wire.ServerFrame)) error {
	f := &wire.ServerFrame{}
	fn(f)
	return w.in.put(f)
}

// Close implements dispatch.Outlet.
func (w *worker) Close(error) {
	w.end(flow.ErrLost)
	w.in.close()
	w.out.close()
}

func (w *worker) send(f *wire.WorkerFrame) { _ = w.out.put(f) }

// take begins what a frame brings.
func (w *worker) take(f *wire.ServerFrame) {
	for _, t := range f.Tasks {
		w.begin(t)
	}
	for _, t := range f.Rpcs {
		w.beginRPC(t)
	}
	for _, c := range f.Cancels {
		w.cancel(c)
	}
	for _, r := range f.Refusals {
		w.log.Error("the engine refused what a handler returned", "flow", r.FlowId, "code", r.Code, "error", r.Message)
	}
}

func (w *worker) begin(t *wire.Task) {
	id := idOf(t.FlowId, t.Exec, t.Attempt)
	call := w.e.rt.Step(w.ctx, t, w)
	w.mu.Lock()
	w.tasks[id] = call
	w.mu.Unlock()
	w.e.begin()
	go func() {
		defer w.e.done()
		f := &wire.WorkerFrame{TaskCredits: 1}
		if res := call.Run(); res != nil {
			f.Results = []*wire.TaskResult{{FlowId: t.FlowId, Result: res}}
		}
		w.mu.Lock()
		delete(w.tasks, id)
		w.mu.Unlock()
		w.send(f)
	}()
}

func (w *worker) beginRPC(t *wire.RpcTask) {
	call := w.e.rt.RPC(w.ctx, t, w)
	w.mu.Lock()
	w.calls[t.Call] = call
	w.mu.Unlock()
	w.e.begin()
	go func() {
		defer w.e.done()
		res := call.Run()
		w.mu.Lock()
		delete(w.calls, t.Call)
		w.mu.Unlock()
		w.send(&wire.WorkerFrame{RpcCredits: 1, RpcResults: []*wire.RpcResult{res}})
	}()
}

func (w *worker) cancel(c *wire.CancelTask) {
	var cause error = &flow.CancelledError{Reason: c.Reason}
	if c.Forget {
		cause = flow.ErrLost
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if call := w.calls[c.Call]; c.Call != 0 && call != nil {
		call.Cancel(cause)
	}
	if call := w.tasks[idOf(c.FlowId, c.Exec, c.Attempt)]; call != nil {
		call.Cancel(cause, c.Forget)
	}
}

// MaxPayload implements flow.Host.
func (w *worker) MaxPayload() uint64 { return maxPayload }

// Now implements flow.Host.
func (w *worker) Now() time.Time { return w.e.clock.Now() }

// Logger implements flow.Host.
func (w *worker) Logger() *slog.Logger { return w.log }

// Heartbeat implements flow.Host.
func (w *worker) Heartbeat(t *wire.Task, checkpoint []byte) {
	w.send(&wire.WorkerFrame{Heartbeats: []*wire.Heartbeat{{FlowId: t.FlowId, Exec: t.Exec, Attempt: t.Attempt, Checkpoint: checkpoint}}})
}

// Output implements flow.Host.
func (w *worker) Output(_ context.Context, t *wire.Task, text string) error {
	w.e.mu.Lock()
	w.e.shown[t.FlowId] += text
	w.e.mu.Unlock()
	w.send(&wire.WorkerFrame{Outputs: []*wire.Output{{FlowId: t.FlowId, Exec: t.Exec, Attempt: t.Attempt, Text: text}}})
	return nil
}

// PutBlob implements flow.Host.
func (w *worker) PutBlob(ctx context.Context, flowID, from string, data []byte) (string, error) {
	ref, err := w.e.svc.PutBlob(ctx, tenant, flowID, from, func() ([]byte, error) {
		if len(data) == 0 {
			return nil, io.EOF
		}
		n := min(len(data), 256<<10)
		piece := data[:n]
		data = data[n:]
		return piece, nil
	})
	if err != nil {
		return "", err
	}
	return ref.Blob, nil
}

// GetBlob implements flow.Host.
func (w *worker) GetBlob(ctx context.Context, flowID, blob string) ([]byte, error) {
	var data []byte
	err := w.e.svc.GetBlob(ctx, tenant, &wire.BlobRef{FlowId: flowID, Blob: blob}, func(p []byte) error {
		data = append(data, p...)
		return nil
	})
	return data, err
}

// Attribute implements flow.Host.
func (w *worker) Attribute(ctx context.Context, flowID, name string) (*wire.Attribute, error) {
	a := w.e.ask(ctx, &wire.Call{Verb: &wire.Call_GetAttributes{GetAttributes: &wire.GetAttributesRequest{FlowId: flowID, Names: []string{name}}}})
	if a.Error != nil {
		return nil, errors.New(a.Error.Message)
	}
	if all := a.GetAttributes().GetAttributes(); len(all) > 0 {
		return all[0], nil
	}
	return nil, nil
}

// logTo writes to the test's log while the test runs.
type logTo struct{ e *Env }

// Write implements io.Writer.
func (l logTo) Write(p []byte) (int, error) {
	if l.e.t != nil && l.e.ctx.Err() == nil {
		l.e.t.Log(string(p))
	}
	return len(p), nil
}

// queue hands values to one goroutine, in order. What is in it counts as under
// way. It is bounded by what the engine has handed out.
type queue[T any] struct {
	e      *Env
	mu     sync.Mutex
	wake   sync.Cond
	values []T  // guarded by mu
	atWork bool // guarded by mu; on a value that is not in values any more
	closed bool // guarded by mu
}

// flush waits until what was put is done.
func (q *queue[T]) flush() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.values) > 0 || q.atWork {
		q.wake.Wait()
	}
}

func (q *queue[T]) init(e *Env) { q.e, q.wake.L = e, &q.mu }

var errClosed = errors.New("perduretest: the worker has ended")

func (q *queue[T]) put(v T) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return errClosed
	}
	q.e.begin()
	q.values = append(q.values, v)
	q.wake.Broadcast()
	return nil
}

// close drops what is in the queue.
func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for range q.values {
		q.e.done()
	}
	q.values = nil
	q.wake.Broadcast()
}

func (q *queue[T]) run(fn func(T)) {
	for {
		q.mu.Lock()
		for len(q.values) == 0 && !q.closed {
			q.wake.Wait()
		}
		if q.closed {
			q.mu.Unlock()
			return
		}
		v := q.values[0]
		q.values, q.atWork = q.values[1:], true
		q.mu.Unlock()
		fn(v)
		q.e.done()
		q.mu.Lock()
		q.atWork = false
		q.wake.Broadcast()
		q.mu.Unlock()
	}
}
