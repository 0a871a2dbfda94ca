package sim

import (
	"errors"

	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/wire"
)

// flowWorker is a process of users' handlers. It outlives the server: what it
// runs goes on when its stream breaks, and is answered too late then.
type flowWorker struct {
	w       *world
	id      int
	rng     *source
	slots   int
	stream  *workerStream // nil: none
	running map[taskKey]*flowTask
	lives   int // of the process
}

type taskKey struct {
	flow    string
	exec    uint64
	attempt [3]uint64
}

func taskKeyOf(flow string, exec uint64, a *wire.AttemptID) taskKey {
	return taskKey{flow, exec, [3]uint64{a.GetEpoch(), a.GetLsn(), uint64(a.GetN())}}
}

// flowTask is an attempt that a worker runs.
type flowTask struct {
	task  *wire.Task
	over  bool
	hangs bool
}

// workerStream is one stream of a worker: the server's side of it is a
// dispatch.Worker, and both sides notice its end by themselves.
type workerStream struct {
	f       *flowWorker
	n       *node
	server  *dispatch.Worker
	out     *wire.ServerFrame // gathers
	broken  bool              // no frame arrives any more, either way
	left    bool
	credits int // granted and not used
	calls   int
	downUs  int64 // when the last frame arrives
	upUs    int64
}

func (w *world) startWorkers() {
	for i := range w.p.workers {
		f := &flowWorker{w: w, id: i, rng: w.rng.fork(), slots: 1 + w.rng.intn(w.p.workerSlots), running: map[taskKey]*flowTask{}}
		w.workers = append(w.workers, f)
		w.after(f.rng.between(0, 50_000), f.connect)
	}
}

// connect opens a stream when there is a server.
func (f *flowWorker) connect() {
	w := f.w
	if f.stream != nil {
		return
	}
	again := func() { w.after(f.rng.between(20_000, 300_000), f.connect) }
	n := w.serving(f.rng)
	if n == nil || n.disk.fired() != nil || n.draining {
		again()
		return
	}
	for _, k := range f.sorted() {
		if f.running[k].hangs { // nobody will tell it
			delete(f.running, k)
		}
	}
	s := &workerStream{f: f, n: n}
	f.stream = s
	hello := &wire.Hello{Protocol: dispatch.Protocol, WorkerId: nameOf("w", f.id), FlowTypes: flowTypes()}
	server, err := n.flows.dispatch.Connect(tenant, "sim", hello, s)
	if err != nil {
		w.tell("", "worker %d is not taken: %v", f.id, err)
		f.stream = nil
		again()
		return
	}
	s.server = server
	w.tell("", "worker %d is connected", f.id)
	s.send(&wire.WorkerFrame{TaskCredits: s.grant(max(0, f.slots-len(f.running))), RpcCredits: s.grantCalls(2)})
	s.beat()
}

func (s *workerStream) grant(n int) uint32 {
	s.credits += n
	if s.f.w.mutant.doubleSlots {
		return uint32(2 * n)
	}
	return uint32(n)
}

func (s *workerStream) grantCalls(n int) uint32 {
	s.calls += n
	return uint32(n)
}

// beat sends a frame now and then, so that the server knows that it is there.
func (s *workerStream) beat() {
	f := s.f
	f.w.after(flowHeartbeat.Microseconds()/2, func() {
		if s.broken || f.stream != s {
			return
		}
		m := &wire.WorkerFrame{}
		for _, k := range f.sorted() {
			if t := f.running[k]; t.task.HeartbeatUs > 0 {
				m.Heartbeats = append(m.Heartbeats, heartbeat(t.task))
			}
		}
		s.send(m)
		s.beat()
	})
}

func heartbeat(t *wire.Task) *wire.Heartbeat {
	return &wire.Heartbeat{FlowId: t.FlowId, Exec: t.Exec, Attempt: t.Attempt, Checkpoint: []byte(`"half"`)}
}

// Put implements dispatch.Outlet.
func (s *workerStream) Put(_ int, fn func(*wire.ServerFrame)) error {
	if s.out == nil {
		s.out = &wire.ServerFrame{}
		s.n.inLife(s.f.w.rng.between(0, 200), s.flush)
	}
	fn(s.out)
	return nil
}

// flush sends what was gathered; it arrives in order, after the server's end,
// too.
func (s *workerStream) flush() {
	m, w := s.out.CloneVT(), s.f.w
	s.out = nil
	s.downUs = max(s.downUs+1, w.nowUs+w.rng.between(50, 2_000))
	w.after(s.downUs-w.nowUs, func() {
		if !s.broken && s.f.stream == s {
			s.f.take(s, m)
		}
	})
}

// Close implements dispatch.Outlet.
func (s *workerStream) Close(err error) { s.breakOff("closed by the server: " + reasonOf(err)) }

func reasonOf(err error) string {
	if err == nil {
		return "drained"
	}
	return err.Error()
}

// send sends a frame; it arrives in order.
func (s *workerStream) send(m *wire.WorkerFrame) {
	w := s.f.w
	s.upUs = max(s.upUs+1, w.nowUs+w.rng.between(50, 2_000))
	s.n.inLife(s.upUs-w.nowUs, func() {
		if s.broken {
			return
		}
		if err := s.server.Frame(m); err != nil {
			w.violate("workers", "", "a frame of worker %d is refused: %v", s.f.id, err)
		}
	})
}

// breakOff ends the stream: the server notices soon, and so does the worker.
func (s *workerStream) breakOff(why string) {
	if s.broken {
		return
	}
	s.broken = true
	w := s.f.w
	w.tell("", "the stream of worker %d breaks: %s", s.f.id, why)
	s.n.inLife(w.rng.between(10, 500_000), func() { s.leave(why) })
	s.f.lost(s)
}

func (s *workerStream) leave(why string) {
	if !s.left {
		s.left = true
		s.server.Leave(errors.New(why))
	}
}

// lost is the worker's side of a broken stream.
func (f *flowWorker) lost(s *workerStream) {
	f.w.after(f.rng.between(100, 400_000), func() {
		if f.stream == s {
			f.stream = nil
			f.connect()
		}
	})
}

// take runs what a frame brings.
func (f *flowWorker) take(s *workerStream, m *wire.ServerFrame) {
	w := f.w
	for _, t := range m.Tasks {
		if s.credits--; s.credits < 0 {
			w.violate("slots", flowPrefix+t.FlowId, "worker %d gets step %d %s, and has granted no credit for it", f.id, t.Exec, t.Step)
		}
		f.start(t)
	}
	for _, r := range m.Rpcs {
		if s.calls--; s.calls < 0 {
			w.violate("slots", flowPrefix+r.FlowId, "worker %d gets call %s, and has granted no credit for it", f.id, r.Name)
		}
		f.call(s, r)
	}
	for _, c := range m.Cancels {
		f.cancel(c)
	}
	for _, r := range m.Refusals {
		w.violate("results", flowPrefix+r.FlowId, "the result of step %d is refused: %s: %s", r.Exec, r.Code, r.Message)
	}
}

func (f *flowWorker) start(t *wire.Task) {
	w, key := f.w, taskKeyOf(t.FlowId, t.Exec, t.Attempt)
	if w.given[key] {
		w.violate("attempts", flowPrefix+t.FlowId, "attempt %v of step %d comes to a worker twice", t.Attempt, t.Exec)
	}
	w.given[key] = true
	if len(f.running) >= f.slots*4+8 {
		w.violate("slots", flowPrefix+t.FlowId, "worker %d runs %d steps with %d slots", f.id, len(f.running), f.slots)
	}
	ft := &flowTask{task: t}
	f.running[key] = ft
	if s := f.stream; t.HeartbeatUs > 0 && s != nil && f.rng.percent(50) {
		s.send(&wire.WorkerFrame{Heartbeats: []*wire.Heartbeat{heartbeat(t)}})
	}
	took := f.rng.between(100, 20_000)
	if f.rng.percent(8) {
		took += f.rng.between(0, 800_000)
	}
	if !w.calm && f.rng.percent(w.p.workerHangs) {
		w.fault("worker-hangs")
		ft.hangs = true
		return // until it is told to stop
	}
	life := f.lives
	w.after(took, func() {
		if !ft.over && f.lives == life {
			f.finish(ft, f.handle(t))
		}
	})
}

// finish gives a result, on the stream that there is then.
func (f *flowWorker) finish(ft *flowTask, r *wire.StepResult) {
	w, t := f.w, ft.task
	ft.over = true
	delete(f.running, taskKeyOf(t.FlowId, t.Exec, t.Attempt))
	r.Exec, r.Attempt = t.Exec, t.Attempt
	for _, next := range r.Next {
		next.Async = next.Async || w.mutant.runEarly
	}
	s := f.stream
	if s == nil || s.broken {
		return // it is handed out again
	}
	s.send(&wire.WorkerFrame{Results: []*wire.TaskResult{{FlowId: t.FlowId, Result: r}}, TaskCredits: s.grant(f.room(s))})
	if !w.calm && f.rng.percent(w.p.resultTwice) {
		w.fault("result-twice")
		again := &wire.WorkerFrame{Results: []*wire.TaskResult{{FlowId: t.FlowId, Result: r.CloneVT()}}}
		w.after(f.rng.between(10, 400_000), func() {
			if f.stream == s && !s.broken {
				s.send(again)
			}
		})
	}
}

// room is how many credits the worker can grant more.
func (f *flowWorker) room(s *workerStream) int { return max(0, f.slots-len(f.running)-s.credits) }

func (f *flowWorker) cancel(c *wire.CancelTask) {
	w, key := f.w, taskKeyOf(c.FlowId, c.Exec, c.Attempt)
	ft := f.running[key]
	if ft == nil || ft.over {
		return
	}
	if c.Forget {
		ft.over = true
		delete(f.running, key)
		if s := f.stream; s != nil && !s.broken {
			s.send(&wire.WorkerFrame{TaskCredits: s.grant(f.room(s))})
		}
		return
	}
	w.after(f.rng.between(50, 50_000), func() {
		if !ft.over {
			f.finish(ft, cancelled(ft.task))
		}
	})
}

// call runs an RPC.
func (f *flowWorker) call(s *workerStream, t *wire.RpcTask) {
	f.w.after(f.rng.between(50, 10_000), func() {
		if f.stream == s && !s.broken {
			r := f.handleCall(t)
			r.Call = t.Call
			s.send(&wire.WorkerFrame{RpcResults: []*wire.RpcResult{r}, RpcCredits: s.grantCalls(1)})
		}
	})
}

// disturb ends workers and their streams now and then.
func (w *world) disturbWorkers() {
	if w.calm || len(w.workers) == 0 {
		return
	}
	w.after(w.rng.between(w.p.workerEveryUs/2, 2*w.p.workerEveryUs), w.disturbWorkers)
	f := w.workers[w.rng.intn(len(w.workers))]
	s := f.stream
	if s == nil || s.broken {
		return
	}
	switch w.rng.intn(3) {
	case 0:
		w.fault("worker-dies")
		f.lives++
		clear(f.running)
		s.breakOff("the worker died")
	case 1:
		w.fault("stream-breaks")
		s.breakOff("the network failed")
	default:
		w.fault("worker-drains")
		s.send(&wire.WorkerFrame{Drain: true})
	}
}

// sorted gives the running tasks in an order that is the same each time.
func (f *flowWorker) sorted() []taskKey { return sortedTasks(f.running) }
