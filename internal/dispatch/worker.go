package dispatch

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Protocol is the newest version of the workers' protocol that is spoken here.
const Protocol = 1

// Outlet is where a worker's frames go. Its methods may be called with a lock
// held, and never block.
type Outlet interface {
	// Put lets fn add to the next frame; weight is about its bytes. It gives
	// mux.ErrFull when too much waits: then it calls Worker.Sent when a frame is
	// sent. After any other error nothing is sent any more.
	Put(weight int, fn func(*wire.ServerFrame)) error
	// Close ends the stream: with an error at once, without one when what was
	// put is sent. The stream's owner calls Leave then.
	Close(err error)
}

// Worker is one stream of a worker. A worker may have several: they share its ID,
// and nothing else. What is lost with a stream is what was handed out over it.
type Worker struct {
	t       *tenant
	id      string
	build   string
	sdk     string
	address string
	types   []string
	sinceUs int64 // wall time
	out     Outlet

	attention atomic.Bool // Sent has something to do

	// Guarded by t.mu:
	links    []*link
	linkOf   map[*lane]*link
	free     int // task credits
	rpcFree  int
	canTask  bool // it is in its lanes' canTask
	canRPC   bool
	tasks    list[attempt]
	rpcs     list[call]
	sent     uint64 // tasks and RPCs it was given
	answers  uint64 // that it gave
	draining bool
	gone     bool
	stalled  bool // too much waits to be sent: it gets nothing new until some is
	nags     int  // cancels of attempts it should not have, since the last frame
	seenUs   int64
	atWork   bool // a frame of it is being taken

	// Owner: the stream's goroutine, in Frame.
	results []answer
	calls   []finished
	later   after
}

type answer struct {
	a *attempt
	r *wire.StepResult
}

func checkName(what, name string, wild bool) error {
	if wild {
		name = strings.TrimSuffix(name, "*")
	}
	if name == "" && !wild || len(name) > MaxName || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < 32 || r == 127 }) {
		return refuse(core.Invalid, "the name %.40q of %s must be 1 to %d bytes of text", name, what, MaxName)
	}
	return nil
}

// checkHello refuses what a worker may not say of itself.
func checkHello(h *wire.Hello) error {
	switch {
	case h == nil:
		return refuse(core.Invalid, "the first frame of a worker must be a Hello; see proto/perdure/v1/worker.proto")
	case h.Protocol < Protocol:
		return refuse(Unsupported, "the worker speaks protocol %d at most, this server %d: build the worker with a newer SDK", h.Protocol, Protocol)
	case len(h.FlowTypes) == 0 || len(h.FlowTypes) > MaxTypes:
		return refuse(core.Invalid, "a worker must declare 1 to %d flow types, this one declares %d", MaxTypes, len(h.FlowTypes))
	case len(h.Build) > MaxName || len(h.Sdk) > MaxName:
		return refuse(core.Invalid, "build and SDK of a worker have at most %d bytes", MaxName)
	}
	if err := checkName("the worker", h.WorkerId, false); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, f := range h.FlowTypes {
		if err := checkType(f); err != nil {
			return err
		}
		if seen[f.Name] {
			return refuse(core.Invalid, "flow type %q is declared twice", f.Name)
		}
		seen[f.Name] = true
	}
	return nil
}

func checkType(f *wire.FlowType) error {
	if err := checkName("a flow type", f.GetName(), false); err != nil {
		return err
	}
	if strings.HasPrefix(f.Name, "perdure.") {
		return refuse(core.Invalid, "flow type %q: names that begin with \"perdure.\" are the server's own", f.Name)
	}
	if max(len(f.Steps), len(f.Rpcs), len(f.Attributes), len(f.Channels)) > MaxNames {
		return refuse(core.Invalid, "flow type %q declares more than %d steps, RPCs, attributes or channels", f.Name, MaxNames)
	}
	var errs []error
	for _, s := range f.Steps {
		errs = append(errs, checkName("a step of "+f.Name, s.GetName(), false))
	}
	for _, r := range f.Rpcs {
		errs = append(errs, checkName("an RPC of "+f.Name, r.GetName(), false))
	}
	for _, a := range f.Attributes {
		errs = append(errs, checkName("an attribute of "+f.Name, a.GetName(), true))
		if len(a.GetType()) > MaxName {
			errs = append(errs, refuse(core.Invalid, "the type of attribute %q has more than %d bytes", a.Name, MaxName))
		}
	}
	for _, c := range f.Channels {
		errs = append(errs, checkName("a channel of "+f.Name, c, true))
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Connect takes a worker in: its first frame is a Welcome. address is its, for
// people. The caller passes on each frame with Frame, from one goroutine, and
// calls Leave when the stream has ended.
func (d *Dispatcher) Connect(tenantName, address string, h *wire.Hello, out Outlet) (*Worker, error) {
	if err := checkHello(h); err != nil {
		return nil, err
	}
	if d.draining.Load() {
		return nil, ErrDraining
	}
	if f := d.cfg.Hooks.Declares; f != nil {
		f(tenantName, h.FlowTypes)
	}
	t := d.makeTenant(tenantName)
	now := d.now()
	w := &Worker{t: t, id: h.WorkerId, build: h.Build, sdk: h.Sdk, address: address, sinceUs: d.cfg.Clock.Now().UnixMicro(),
		out: out, linkOf: map[*lane]*link{}, seenUs: now}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.workers) >= MaxWorkers {
		return nil, refuse(core.LimitReached, "tenant %q has %d workers connected, the most: give each more concurrency instead", tenantName, len(t.workers))
	}
	if err := t.declare(h.FlowTypes); err != nil {
		return nil, err
	}
	if t.sticky == nil {
		t.sticky = new([stickySlots]stickySlot)
	}
	t.workers = append(t.workers, w)
	for _, f := range h.FlowTypes {
		w.serve(t.lane(f.Name), f)
	}
	w.tell(func(f *wire.ServerFrame) {
		f.Welcome = &wire.Welcome{Protocol: Protocol, Server: d.cfg.Server, MaxPayload: d.cfg.MaxPayload, HeartbeatUs: d.cfg.Heartbeat.Microseconds()}
	})
	// What began meanwhile may have missed this one.
	if d.draining.Load() {
		w.tell(func(f *wire.ServerFrame) { f.Drain = true })
	}
	if d.stopped.Load() {
		out.Close(ErrDraining)
	}
	d.watch(w, silentBeats*d.cfg.Heartbeat)
	return w, nil
}

// serve makes w one of a lane's workers.
func (w *Worker) serve(l *lane, f *wire.FlowType) {
	k := &link{w: w, l: l, steps: make(map[string]bool, len(f.Steps)), rpcs: make(map[string]bool, len(f.Rpcs))}
	for _, s := range f.Steps {
		k.steps[s.Name] = true
	}
	for _, r := range f.Rpcs {
		k.rpcs[r.Name] = true
	}
	w.links = append(w.links, k)
	w.linkOf[l] = k
	w.types = append(w.types, f.Name)
	l.links.add(k)
	l.unpark()
}

// tell adds something small to the worker's next frame, which is bounded by
// what the worker was given: it weighs nothing. Guarded by t.mu.
func (w *Worker) tell(fn func(*wire.ServerFrame)) {
	if w.gone {
		return
	}
	if err := w.out.Put(0, fn); err != nil {
		w.broken(err)
	}
}

// give adds a task or a call to the worker's next frame; false: it takes nothing
// new until some of what waits is sent. Guarded by t.mu.
func (w *Worker) give(weight int, fn func(*wire.ServerFrame)) bool {
	err := w.out.Put(weight, fn)
	switch {
	case err == nil:
		return true
	case errors.Is(err, mux.ErrFull):
		w.stalled = true
		w.attention.Store(true)
		w.list()
		return false
	}
	w.broken(err)
	return true // Leave hands it out again
}

func (w *Worker) broken(err error) {
	w.out.Close(refuse(WorkerLost, "the worker does not read: %v", err))
}

// Sent is called when a frame was sent.
func (w *Worker) Sent() {
	if !w.attention.Load() {
		return
	}
	t := w.t
	t.mu.Lock()
	w.attention.Store(false)
	w.nags = 0
	if w.stalled && !w.gone {
		w.stalled = false
		w.list()
		w.serveOwed(t.d.now())
	}
	t.mu.Unlock()
	t.d.wake(t)
}

// addFree changes the worker's task credits.
func (w *Worker) addFree(n int) {
	if !w.gone && !w.draining {
		w.free += n
		w.list()
	}
}

// addRPCFree changes the worker's RPC credits.
func (w *Worker) addRPCFree(n int) {
	if !w.gone && !w.draining {
		w.rpcFree += n
		w.list()
	}
}

// list keeps the worker among those that can take something as long as it can.
func (w *Worker) list() {
	if can := w.free > 0 && !w.stalled; can != w.canTask {
		w.canTask = can
		for _, k := range w.links {
			k.l.canTask.set(k, can)
		}
	}
	if can := w.rpcFree > 0 && !w.stalled; can != w.canRPC {
		w.canRPC = can
		for _, k := range w.links {
			k.l.canRPC.set(k, can)
		}
	}
}

// retire lets nothing new come to the worker; slots reserved with it are given
// to others by and by.
func (w *Worker) retire() {
	w.free, w.rpcFree = 0, 0
	w.list()
	for _, k := range w.links {
		k.l.held.remove(k)
		k.l.orphaned += k.reserved
		k.reserved = 0
	}
}

// endIfDrained ends the stream of a worker that wanted to go and has answered.
func (w *Worker) endIfDrained() {
	if w.draining && !w.gone && w.tasks.n == 0 && w.rpcs.n == 0 {
		w.out.Close(nil)
	}
}

// Frame takes one frame of the worker. An error ends the stream. It may wait for
// room in a partition's queue: so a worker is slowed down, not refused.
func (w *Worker) Frame(f *wire.WorkerFrame) error {
	t := w.t
	if f.Hello != nil {
		return refuse(core.Invalid, "a worker says Hello once")
	}
	now := t.d.now()
	t.mu.Lock()
	err := w.take(f, now)
	t.mu.Unlock()
	w.settle()
	return err
}

// take does what needs the lock, and leaves the rest to settle.
func (w *Worker) take(f *wire.WorkerFrame, now int64) error {
	if w.gone {
		return nil
	}
	w.seenUs, w.atWork = now, true
	for _, r := range f.Results {
		w.takeResult(r, now)
	}
	for _, r := range f.RpcResults {
		w.takeRPC(r, now)
	}
	for _, h := range f.Heartbeats {
		w.takeHeartbeat(h, now)
	}
	for _, o := range f.Outputs {
		w.takeOutput(o)
	}
	if w.answers > w.sent+floodSlack {
		return refuse(Flood, "the worker gave %d answers to %d tasks and calls: answer each once", w.answers, w.sent)
	}
	if err := w.grant(f.TaskCredits, f.RpcCredits); err != nil {
		return err
	}
	if f.Drain && !w.draining {
		w.retire()
		w.draining = true
	}
	w.endIfDrained()
	w.serveOwed(now)
	return nil
}

func (w *Worker) grant(tasks, rpcs uint32) error {
	if uint64(w.free)+uint64(tasks) > MaxCredits || uint64(w.rpcFree)+uint64(rpcs) > MaxCredits {
		return refuse(Flood, "with %d task and %d RPC credits more the worker has over %d: grant one for each answer given", tasks, rpcs, MaxCredits)
	}
	w.addFree(int(tasks))
	w.addRPCFree(int(rpcs))
	return nil
}

// serveOwed gives the worker's credits to what waits for one.
func (w *Worker) serveOwed(now int64) {
	for _, k := range w.links {
		for k.l.owed.n > 0 && w.canTask {
			a := k.l.owed.next(k.steps)
			if a == nil {
				break
			}
			k.l.owed.remove(&a.elem)
			w.addFree(-1)
			a.hand(w, now)
		}
		for k.l.calls.n > 0 && w.canRPC {
			c := k.l.calls.next(k.rpcs)
			if c == nil {
				break
			}
			k.l.calls.remove(&c.elem)
			if !c.hand(w) {
				k.l.calls.push(c.task.Name, &c.elem, c)
			}
		}
	}
}

// takeResult matches a result with its attempt. One that has none was too late,
// or somebody else's.
func (w *Worker) takeResult(r *wire.TaskResult, now int64) {
	w.answers++
	res := r.GetResult()
	a := w.t.find(r.GetFlowId(), res.GetExec())
	if a == nil || a.w != w || a.phase != running || !sameAttempt(a, res.GetAttempt()) {
		w.t.d.late.Add(1)
		return
	}
	a.stop()
	a.outcome, a.tookUs = outcomeOfResult(res), now-a.handedUs
	if res.Retry != nil && len(res.Checkpoint) == 0 {
		res.Checkpoint = a.checkpoint
	}
	if len(res.Next) > 0 || res.Wait != nil {
		a.continues = true
		a.l.arriving++
	}
	w.results = append(w.results, answer{a, res})
}

func sameAttempt(a *attempt, at *wire.AttemptID) bool {
	return at != nil && a.at.Epoch == at.Epoch && a.at.LSN == at.Lsn && a.at.N == at.N
}

// takeHeartbeat notes that an attempt is alive. To one that is over the worker
// is told to stop.
func (w *Worker) takeHeartbeat(h *wire.Heartbeat, now int64) {
	a := w.t.find(h.GetFlowId(), h.GetExec())
	if a == nil || a.w != w || a.phase != running || !sameAttempt(a, h.Attempt) {
		if w.nags++; w.nags <= floodSlack {
			c := &wire.CancelTask{FlowId: h.GetFlowId(), Exec: h.GetExec(), Attempt: h.GetAttempt(), Reason: "the attempt is over", Forget: true}
			w.tell(func(f *wire.ServerFrame) { f.Cancels = append(f.Cancels, c) })
			w.attention.Store(true)
		}
		return
	}
	a.lastBeatUs = now
	if len(h.Checkpoint) == 0 || bytes.Equal(h.Checkpoint, a.checkpoint) {
		return
	}
	a.checkpoint = bytes.Clone(h.Checkpoint) // not the whole frame
	if a.checkpointAtUs == 0 {
		a.checkpointAtUs = max(now, a.checkpointedUs+checkpointRest.Microseconds())
		if a.checkpointAtUs == now {
			a.saveCheckpoint(now, &w.later)
			return
		}
		w.t.schedule(a)
	}
}

// takeOutput shows what a step puts out, when its start is durable.
func (w *Worker) takeOutput(o *wire.Output) {
	a := w.t.find(o.GetFlowId(), o.GetExec())
	if a == nil || a.w != w || a.phase != running || !sameAttempt(a, o.Attempt) || a.shown+len(o.Text) > MaxOutput {
		return
	}
	a.shown += len(o.Text)
	if !a.committed {
		a.early = append(a.early, o.Text...)
		return
	}
	w.t.d.cfg.Hub.Delta(a.flowID, a.scope, a.exec, a.number, o.Text)
}

// settle proposes the results of a frame and tells the callers, in order. The
// results are proposed even when the stream ended meanwhile: they were given.
func (w *Worker) settle() {
	d := w.t.d
	for i := range w.results {
		w.propose(w.results[i].a, w.results[i].r)
		w.results[i] = answer{}
	}
	w.results = w.results[:0]
	for i := range w.calls {
		w.calls[i].tell()
		w.calls[i] = finished{}
	}
	w.calls = w.calls[:0]
	w.later.run(w.t)
	w.later = after{}
	w.t.mu.Lock()
	w.atWork = false
	w.t.mu.Unlock()
	d.wake(w.t)
}

func (w *Worker) propose(a *attempt, r *wire.StepResult) {
	d := w.t.d
	if d.cfg.Check != nil {
		if err := d.cfg.Check(w.t.name, a.l.name, r); err != nil {
			w.t.mu.Lock()
			e := a.refused(err)
			w.t.mu.Unlock()
			d.propose(a, e)
			return
		}
	}
	a.span.inherit(r.Sends, r.Wait, r.Next)
	a.cmd.StepResult = r
	a.entry.FlowId, a.entry.Command = a.flowID, &a.cmd
	if err := d.submitWait(a.flowID, partition.Proposal{Entry: &a.entry, Reply: a.replied}); err != nil {
		w.t.mu.Lock()
		a.span.ended("unknown")
		w.t.forget(a) // the server stops; the next owner hands it out again
		w.t.mu.Unlock()
	}
}

// watch looks after the worker's silence, first after wait.
func (d *Dispatcher) watch(w *Worker, wait time.Duration) {
	d.cfg.Clock.AfterFunc(wait, func() {
		w.t.mu.Lock()
		defer w.t.mu.Unlock()
		if w.gone || d.stopped.Load() {
			return
		}
		limit := silentBeats * d.cfg.Heartbeat
		silent := micros(d.now() - w.seenUs)
		switch {
		case w.atWork:
			d.watch(w, limit)
		case silent < limit:
			d.watch(w, limit-silent)
		default:
			w.out.Close(refuse(WorkerLost, "the worker sent nothing for %v: connect again", silent.Round(time.Millisecond)))
		}
	})
}

// Leave ends what is known of the worker: its stream has ended, because of
// reason. What it had is handed out again.
func (w *Worker) Leave(reason error) {
	t, d := w.t, w.t.d
	text := "worker lost: " + w.id
	if reason != nil {
		text += ": " + reason.Error()
	}
	var again []outcomeOf
	var out after
	t.mu.Lock()
	if w.gone {
		t.mu.Unlock()
		return
	}
	w.retire()
	w.gone = true
	t.remove(w)
	now := d.now()
	for w.tasks.n > 0 {
		a := w.tasks.first()
		again = append(again, outcomeOf{a, a.lose(now, text)})
	}
	for w.rpcs.n > 0 {
		w.rpcs.first().lose(text, &out)
	}
	t.mu.Unlock()
	out.run(t)
	for _, p := range again {
		err := d.submitWait(p.a.flowID, partition.Proposal{Entry: p.e, Reply: p.a.replied})
		if err == nil {
			continue
		}
		t.mu.Lock()
		p.a.span.ended(workerLost.String())
		t.mu.Unlock()
		if !errors.Is(err, partition.ErrStopped) && d.ctx.Err() == nil {
			d.cfg.Log.Error("step of a lost worker not handed out again", "flow", p.a.flowID, "step", p.a.step, "error", err)
		}
	}
	d.wake(t)
}

// remove takes w out of the tenant's workers.
func (t *tenant) remove(w *Worker) {
	for i, o := range t.workers {
		if o == w {
			t.workers = append(t.workers[:i], t.workers[i+1:]...)
			break
		}
	}
	for _, k := range w.links {
		k.l.links.remove(k)
	}
	for i := range t.sticky {
		if t.sticky[i].w == w {
			t.sticky[i] = stickySlot{}
		}
	}
}
