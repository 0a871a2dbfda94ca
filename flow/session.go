package flow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	protocol       = 1
	defaultPayload = 64 << 10
	maxUnsent      = 256 << 20       // weight of what waits for the network; results weigh nothing
	defaultBeat    = 5 * time.Second // of the connection
	flushPause     = 250 * time.Millisecond
	maxBeat        = time.Second // between two signs of life of one attempt
	minBeat        = 10 * time.Millisecond
	deafAfter      = 10 * time.Second // past the deadline a handler is said to ignore it
)

// session is one stream to a server, and the host of the handlers whose tasks
// came over it.
type session struct {
	w      *Worker
	ctx    context.Context // ends with the stream; handlers' contexts come from it
	cancel context.CancelCauseFunc
	stream grpc.BidiStreamingClient[wire.WorkerFrame, wire.ServerFrame]
	send   *mux.Sender[wire.WorkerFrame] // nil until it is welcomed
	remote

	beat    time.Duration // send something at least this often
	writing writeClock
	room    [kinds]room // guarded by w.mu
	retired bool        // guarded by w.mu; no further credits are to go there

	mu       sync.Mutex
	tasks    map[stepID]*stepJob // guarded by mu; handed out and not answered
	calls    map[uint64]*rpcJob  // guarded by mu
	late     map[*stepJob]bool   // guarded by mu; with a sign of life that was not sent
	draining bool                // guarded by mu; the server was asked for nothing more
	limited  bool                // guarded by mu; it is cut off when that takes too long
}

type stepID struct {
	flow string
	exec uint64
}

func newSession(w *Worker, conn *grpc.ClientConn) *session {
	s := &session{w: w, tasks: map[stepID]*stepJob{}, calls: map[uint64]*rpcJob{}, late: map[*stepJob]bool{},
		remote: remote{conn: conn, key: w.opts.Key, out: budget{most: maxUnsentOutput}, log: w.log}}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// open connects, says hello and waits for the welcome.
func (s *session) open() (*wire.Welcome, error) {
	late := time.AfterFunc(welcomeTimeout, func() { s.cancel(context.DeadlineExceeded) })
	defer late.Stop()
	stream, err := wire.NewWorkersClient(s.conn).Work(s.credentials(s.ctx))
	if err != nil {
		return nil, err
	}
	s.stream = stream
	hello := &wire.Hello{Protocol: protocol, WorkerId: s.w.opts.ID, Build: s.w.opts.Build, Sdk: SDK, FlowTypes: s.w.rt.Types()}
	if err := stream.Send(&wire.WorkerFrame{Hello: hello}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	f, err := stream.Recv()
	switch {
	case err != nil:
		return nil, err
	case f.Welcome == nil:
		return nil, fmt.Errorf("%w: its first frame is no welcome", errProtocol)
	case f.Welcome.Protocol != protocol:
		return nil, fmt.Errorf("%w: it wants version %d, this SDK speaks version %d", errProtocol, f.Welcome.Protocol, protocol)
	}
	if s.payload = f.Welcome.MaxPayload; s.payload == 0 {
		s.payload = defaultPayload
	}
	if s.beat = time.Duration(f.Welcome.HeartbeatUs) * time.Microsecond / 3; s.beat <= 0 {
		s.beat = defaultBeat
	}
	s.send = mux.NewSender(maxUnsent, s.write)
	return f.Welcome, nil
}

// write sends one frame; the sender calls it.
func (s *session) write(f *wire.WorkerFrame) error {
	n := 0
	for _, o := range f.Outputs {
		n += len(o.Text)
	}
	s.writing.begin(time.Now())
	err := s.stream.Send(f)
	s.writing.end(time.Now())
	s.out.give(n)
	return err
}

// work runs what comes until the stream ends, or, when ctx has ended, all is
// done. It gives nil when the server has ended the stream in good order.
func (s *session) work(ctx context.Context) error {
	go s.keepAlive()
	stop := context.AfterFunc(ctx, s.drain)
	defer stop()
	for {
		f, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = s.take(f)
		}
		if err != nil {
			return err
		}
	}
}

// drain asks the server for nothing more; it ends the stream when all that is
// out was answered, or is cut off when that takes too long.
func (s *session) drain() {
	s.giveBack()
	s.mu.Lock()
	again := s.limited
	s.limited = true
	s.mu.Unlock()
	if !again {
		time.AfterFunc(max(0, s.w.opts.DrainTimeout), func() { s.cancel(ErrStopping) })
	}
}

// giveBack asks the server for nothing more; it ends the stream when all that is
// out was answered, however long that takes.
func (s *session) giveBack() {
	s.w.retire(s)
	s.mu.Lock()
	again := s.draining
	s.draining = true
	s.mu.Unlock()
	if !again {
		_ = s.send.Put(0, func(f *wire.WorkerFrame) { f.Drain = true })
	}
}

// end closes the stream. Handlers that still run are told why.
func (s *session) end(cause error) {
	s.cancel(cause)
	if s.send != nil {
		s.send.Close(nil, false)
	}
}

// take begins what a frame brings.
func (s *session) take(f *wire.ServerFrame) error {
	if len(f.Tasks) > 0 || len(f.Rpcs) > 0 {
		if err := s.w.took(s, len(f.Tasks), len(f.Rpcs)); err != nil {
			return err
		}
		s.begin(f.Tasks)
		s.beginRPCs(f.Rpcs)
	}
	for _, c := range f.Cancels {
		s.cancelOne(c)
	}
	for _, r := range f.Refusals {
		s.log.Error("the server refused what a handler returned", "flow", r.FlowId, "exec", r.Exec, "code", r.Code, "error", r.Message)
	}
	if f.Drain {
		s.drain()
	}
	return nil
}

func (s *session) begin(tasks []*wire.Task) {
	if len(tasks) == 0 {
		return
	}
	jobs := make([]job, 0, len(tasks))
	s.mu.Lock()
	for _, t := range tasks {
		j := &stepJob{s: s, id: stepID{t.FlowId, t.Exec}, call: s.w.rt.Step(s.ctx, t, s)}
		if before := s.tasks[j.id]; before != nil {
			before.call.Cancel(ErrLost, true) // its time was over for the server
		}
		s.tasks[j.id] = j
		jobs = append(jobs, j)
	}
	s.mu.Unlock()
	s.w.tasks.put(jobs...)
}

func (s *session) beginRPCs(tasks []*wire.RpcTask) {
	if len(tasks) == 0 {
		return
	}
	jobs := make([]job, 0, len(tasks))
	s.mu.Lock()
	for _, t := range tasks {
		j := &rpcJob{s: s, call: s.w.rt.RPC(s.ctx, t, s)}
		s.calls[t.Call] = j
		jobs = append(jobs, j)
	}
	s.mu.Unlock()
	s.w.rpcs.put(jobs...)
}

// cancelOne tells a handler that its work is cancelled.
func (s *session) cancelOne(c *wire.CancelTask) {
	var cause error = &CancelledError{Reason: c.Reason}
	if c.Forget {
		cause = ErrLost
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Call != 0 {
		if j := s.calls[c.Call]; j != nil {
			j.call.Cancel(cause)
		}
		return
	}
	if j := s.tasks[stepID{c.FlowId, c.Exec}]; j != nil && j.call.c.task.Attempt.EqualVT(c.Attempt) {
		j.call.Cancel(cause, c.Forget)
	}
}

// granted gives the server credits.
func (s *session) granted(tasks, rpcs int) {
	_ = s.send.Put(0, func(f *wire.WorkerFrame) {
		f.TaskCredits += uint32(tasks)
		f.RpcCredits += uint32(rpcs)
	})
}

// stepJob is one attempt on its way.
type stepJob struct {
	s    *session
	id   stepID
	call *StepCall

	lastBeat time.Time // guarded by s.mu
	mark     []byte    // guarded by s.mu; the newest checkpoint
	told     bool      // guarded by s.mu; that it ignores its deadline
}

func (j *stepJob) run() {
	res := j.call.Run()
	s := j.s
	s.mu.Lock()
	if s.tasks[j.id] == j {
		delete(s.tasks, j.id)
	}
	delete(s.late, j)
	s.mu.Unlock()
	own := s.w.freed(s, stepRoom)
	// A closed stream takes nothing: then the server hands the step out again.
	_ = s.send.Put(0, func(f *wire.WorkerFrame) {
		if own {
			f.TaskCredits++
		}
		if res != nil {
			f.Results = append(f.Results, &wire.TaskResult{FlowId: j.id.flow, Result: res})
		}
	})
}

// rpcJob is one call on its way.
type rpcJob struct {
	s    *session
	call *RPCCall
}

func (j *rpcJob) run() {
	res := j.call.Run()
	s := j.s
	s.mu.Lock()
	delete(s.calls, res.Call)
	s.mu.Unlock()
	own := s.w.freed(s, rpcRoom)
	_ = s.send.Put(0, func(f *wire.WorkerFrame) {
		if own {
			f.RpcCredits++
		}
		f.RpcResults = append(f.RpcResults, res)
	})
}

// Heartbeat implements Host. A sign of life is sent at once if the last one is
// long enough ago, and otherwise by keepAlive.
func (s *session) Heartbeat(t *wire.Task, checkpoint []byte) {
	pause := min(max(time.Duration(t.HeartbeatUs)*time.Microsecond/4, minBeat), maxBeat)
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.tasks[stepID{t.FlowId, t.Exec}]
	if j == nil || j.call.c.task != t {
		return
	}
	j.mark = checkpoint
	if now.Sub(j.lastBeat) < pause {
		s.late[j] = true
		return
	}
	s.sendBeat(j, now)
}

// sendBeat is called under mu.
func (s *session) sendBeat(j *stepJob, now time.Time) {
	j.lastBeat = now
	delete(s.late, j)
	t := j.call.c.task
	_ = s.send.Put(len(j.mark), func(f *wire.WorkerFrame) {
		f.Heartbeats = append(f.Heartbeats, &wire.Heartbeat{FlowId: t.FlowId, Exec: t.Exec, Attempt: t.Attempt, Checkpoint: j.mark})
	})
}

// keepAlive sends what signs of life were kept back, and something in any case
// as often as the server wants.
func (s *session) keepAlive() {
	tick := time.NewTicker(min(flushPause, s.beat))
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-s.ctx.Done():
			return
		case now := <-tick.C:
			s.mu.Lock()
			for j := range s.late {
				s.sendBeat(j, now)
			}
			s.mu.Unlock()
			if now.Sub(last) >= s.beat {
				last = now
				s.noteDeaf(now)
				_ = s.send.Put(0, func(*wire.WorkerFrame) {})
			}
		}
	}
}

// noteDeaf logs handlers that ignore their deadline: they keep a place of the
// worker's concurrency, although the server has given them up.
func (s *session) noteDeaf(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, j := range s.tasks {
		l := &j.call.life
		if over := now.Sub(l.begin) - l.limit; l.limit > 0 && over > deafAfter && !j.told {
			j.told = true
			s.log.Warn("a handler ignores its deadline: it should heed its context", "flow", id.flow, "step", j.call.c.step, "over", over)
		}
	}
}

// Output implements Host.
func (s *session) Output(ctx context.Context, t *wire.Task, text string) error {
	for text != "" {
		piece := cutText(text, outputPiece)
		text = text[len(piece):]
		if err := s.out.take(ctx, len(piece)); err != nil {
			return err
		}
		err := s.send.Put(0, func(f *wire.WorkerFrame) {
			if n := len(f.Outputs); n > 0 && f.Outputs[n-1].Exec == t.Exec && f.Outputs[n-1].FlowId == t.FlowId {
				f.Outputs[n-1].Text += piece
				return
			}
			f.Outputs = append(f.Outputs, &wire.Output{FlowId: t.FlowId, Exec: t.Exec, Attempt: t.Attempt, Text: piece})
		})
		if err != nil {
			return ErrLost
		}
	}
	return nil
}
