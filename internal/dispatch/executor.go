package dispatch

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Reserve sets up to want slots of workers aside for steps that a command is
// about to start, and gives how many. While steps are queued, only their own
// starts and flows that go on get one: others wait behind them.
func (d *Dispatcher) Reserve(flowID, flowType string, want int) int {
	name, id, ok := split(flowID)
	t := d.tenantOf(name)
	if !ok || t == nil || want <= 0 {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.claimMarked(id, flowType, want)
	l := t.lanes[flowType]
	if l == nil || n == want || d.draining.Load() || l.nReady > 0 && !t.goesOn(id) {
		return n
	}
	for ; n < want; n++ {
		k := l.choose(id)
		if k == nil {
			break
		}
		l.reserve(k)
		if l.nReady > 0 {
			l.inline++
		}
	}
	return n
}

// claimMarked gives the flow the slots that were reserved for the starts of its
// queued steps.
func (t *tenant) claimMarked(id, flowType string, want int) (n int) {
	if t.marked == 0 {
		return 0
	}
	for e := t.queued[id]; e != nil && n < want; e = e.sibling {
		if e.marked && e.l.name == flowType {
			e.marked = false
			t.marked--
			n++
		}
	}
	return n
}

// goesOn reports whether a result of the flow is being applied.
func (t *tenant) goesOn(id string) bool {
	for a := t.runs[id]; a != nil; a = a.sibling {
		if a.continues {
			return true
		}
	}
	return false
}

// Release gives reserved slots back that no step was started with.
func (d *Dispatcher) Release(flowID, flowType string, n int) {
	name, _, _ := split(flowID)
	t := d.tenantOf(name)
	if t == nil || n <= 0 {
		return
	}
	t.mu.Lock()
	if l := t.lanes[flowType]; l != nil {
		for range n {
			l.giveBack()
		}
	}
	t.mu.Unlock()
	d.wake(t)
}

// Dispatch hands an attempt to a worker, for one reserved slot. If the worker of
// the slot left meanwhile, or none knows the step, it is owed to the next credit
// of one that does.
func (d *Dispatcher) Dispatch(w *partition.Work) {
	name, id, ok := split(w.FlowID)
	if !ok {
		d.cfg.Log.Error("a flow of no tenant has no workers", "flow", w.FlowID)
		return
	}
	t := d.makeTenant(name)
	now := d.now()
	a := d.newAttempt(w, id, now)
	size := taskWeight(a.task)
	t.mu.Lock()
	l := t.lane(w.FlowType)
	t.adopt(a, l, w)
	if size > MaxTask {
		l.giveBack()
		a.phase, a.outcome, a.handedUs = ended, failed, now
		e := a.failure(fmt.Sprintf("the step and what it would get of its flow have %d bytes, at most %d fit: keep large values in blobs", size, MaxTask), string(TooLarge), true)
		t.mu.Unlock()
		d.propose(a, e)
		return
	}
	if to := l.claim(id, w.Name); to != nil {
		a.hand(to, now)
	} else {
		l.owed.push(w.Name, &a.elem, a)
	}
	t.mu.Unlock()
}

// adopt makes a the attempt of its step, with what the step had when it was
// queued.
func (t *tenant) adopt(a *attempt, l *lane, w *partition.Work) {
	a.l = l
	a.series = l.seriesOf(w.Name)
	if e := t.waitingFor(a.id, a.exec); e != nil {
		a.queuedUs = e.sinceUs
		if e.holds {
			a.key = e.key
		}
		t.dropEntry(e, e.holds)
	}
	t.put(a)
	if a.key == nil && w.Spec.GetConcurrencyKey() != "" {
		// Started by an entry from before: it runs already, so it counts.
		a.key = l.keyOf(w.Spec.ConcurrencyKey, w.Spec.ConcurrencyLimit)
		a.key.held++
		l.retoken(a.key)
	}
}

// Commit implements partition.Executor: what an early attempt put out may be
// shown now.
func (d *Dispatcher) Commit(w *partition.Work) {
	name, id, _ := split(w.FlowID)
	t := d.tenantOf(name)
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.find(id, w.Exec)
	if a == nil || a.at != w.Attempt {
		return
	}
	a.committed = true
	if len(a.early) > 0 {
		// Under the lock, so that what comes after is shown after.
		d.cfg.Hub.Delta(a.flowID, a.scope, a.exec, a.number, string(a.early))
		a.early = nil
	}
}

var _ partition.Executor = (*Dispatcher)(nil)

// Cancel implements partition.Executor.
func (d *Dispatcher) Cancel(flowID string, exec uint64, attempt core.Attempt, reason string, forget bool) {
	name, id, _ := split(flowID)
	t := d.tenantOf(name)
	if t == nil {
		return
	}
	t.mu.Lock()
	a := t.find(id, exec)
	if a == nil || a.at != attempt || a.phase == ended {
		t.mu.Unlock()
		return
	}
	drop := false
	switch {
	case forget:
		drop = t.recall(a, reason)
	case a.phase == owed:
		a.task.Cancelled, a.task.CancelReason = true, reason
	default:
		a.w.tell(a.cancelFrame(reason, false))
	}
	t.mu.Unlock()
	if drop {
		d.cfg.Hub.Drop(flowID, exec)
	}
	d.wake(t)
}

// Queue lets a step wait for a worker: its start is proposed when its turn
// comes.
func (d *Dispatcher) Queue(q core.Effect) {
	name, id, ok := split(q.FlowID)
	if !ok {
		d.cfg.Log.Error("a flow of no tenant has no workers", "flow", q.FlowID)
		return
	}
	t := d.makeTenant(name)
	t.mu.Lock()
	l := t.lane(q.FlowType)
	if old := t.waitingFor(id, q.Exec); old != nil {
		t.dropEntry(old, false)
	}
	e := &entry{l: l, flowID: q.FlowID, id: id, step: q.Step, exec: q.Exec, priority: int(min(q.Priority, core.MaxPriority)),
		sinceUs: d.now(), atUs: q.AtUs, keyName: q.Key, keyLimit: q.KeyLimit}
	if a := t.find(id, q.Exec); a != nil {
		// A former attempt of it: the step keeps its key.
		e.key, a.key = a.key, nil
		e.holds = e.key != nil
		t.recall(a, "the step is queued again")
	}
	t.remember(e)
	l.enqueue(e, false)
	t.mu.Unlock()
	d.wake(t)
}

// Done says that a step is over, or at least not with a worker any more: it
// holds its concurrency key no longer.
func (d *Dispatcher) Done(flowID, flowType string, exec uint64, key string) {
	name, id, _ := split(flowID)
	t := d.tenantOf(name)
	if t == nil {
		return
	}
	t.mu.Lock()
	drop := false
	if e := t.waitingFor(id, exec); e != nil {
		t.dropEntry(e, false)
	} else if a := t.find(id, exec); a != nil && a.phase == ended {
		// Its outcome is known to the partition, whose reply forgets it. One whose
		// worker was lost keeps its key, and is queued next with it.
		if a.key != nil && a.outcome != workerLost {
			a.l.free(a.key)
			a.key = nil
		}
	} else if a != nil {
		drop = t.recall(a, "the step is over")
	}
	t.mu.Unlock()
	if drop {
		d.cfg.Hub.Drop(flowID, exec)
	}
	d.wake(t)
}

// recall takes an attempt back whose result nobody wants; drop says that what it
// put out is to be forgotten too.
func (t *tenant) recall(a *attempt, reason string) (drop bool) {
	w := a.w
	if a.phase == running {
		w.tell(a.cancelFrame(reason, true))
	}
	t.forget(a)
	if w != nil {
		w.endIfDrained()
	}
	return a.shown > 0
}

// newAttempt is the record of one hand-out, with the task as the worker gets it.
func (d *Dispatcher) newAttempt(w *partition.Work, id string, now int64) *attempt {
	spec := w.Spec
	a := &attempt{flowID: w.FlowID, id: id, scope: w.Scope, step: w.Name, exec: w.Exec, at: w.Attempt, number: w.Number,
		committed: w.Committed(), queuedUs: now, beatUs: spec.GetHeartbeatUs(), checkpoint: w.Checkpoint}
	a.due.a = a
	a.task = newTask(w.Task, id)
	if a.task.TimeoutUs == 0 {
		a.task.TimeoutUs = d.cfg.Timeout.Microseconds()
	}
	return a
}

// newTask is what a worker gets of an attempt. It shares what does not change.
func newTask(t *core.Task, id string) *wire.Task {
	spec := t.Spec
	m := &struct {
		task wire.Task
		at   wire.AttemptID
	}{
		task: wire.Task{
			FlowId: id, FlowType: t.FlowType, RunId: t.RunID, Exec: t.Exec, Number: t.Number, Retries: t.Retries,
			Step: t.Name, Input: t.Input, InputBlob: spec.GetInputBlob(), Scope: t.Scope,
			Messages: t.Matched, Conditions: t.Conditions, Attributes: t.Attributes,
			Cancelled: t.Cancel, CancelReason: t.Reason, StartedUs: t.StartedUs,
			Checkpoint: t.Checkpoint, Locals: t.Locals, Failure: spec.GetFailure(),
			TimeoutUs: spec.GetTimeoutUs(), HeartbeatUs: spec.GetHeartbeatUs(), Trace: t.Trace,
			RetryTotalUs: spec.GetRetry().GetTotalUs(),
		},
		at: wire.AttemptID{Epoch: t.Attempt.Epoch, Lsn: t.Attempt.LSN, N: t.Attempt.N},
	}
	m.task.Attempt = &m.at
	if t.WaitPhase {
		m.task.Phase = wire.Task_WAIT_FOR
	}
	if cs := spec.GetWait().GetConditions(); len(cs) > 0 && len(t.Conditions) > 0 {
		m.task.ConditionNames = make([]string, len(cs))
		for i, c := range cs {
			m.task.ConditionNames[i] = c.Name
		}
	}
	return &m.task
}

// taskWeight is about the bytes of a task in a frame.
func taskWeight(t *wire.Task) int {
	n := 160 + len(t.Input) + len(t.Checkpoint) + len(t.Locals)
	for _, m := range t.Messages {
		n += 48 + len(m.Payload)
	}
	for _, a := range t.Attributes {
		n += 24 + len(a.Name) + len(a.Value)
	}
	return n
}
