package dispatch

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// phase is where an attempt stands.
type phase uint8

const (
	owed    phase = iota // no worker has it yet
	running              // a worker has it
	ended                // its outcome is proposed
)

// attempt is one hand-out of a step, from Dispatch until its outcome is known
// to its partition. Guarded by t.mu of its lane; what never changes may be read
// without.
type attempt struct {
	l      *lane
	flowID string // with the tenant
	id     string // without
	scope  string
	step   string
	exec   uint64
	at     core.Attempt
	number uint32

	phase     phase
	committed bool // its start is durable
	failing   bool // what is proposed was made here, not by the worker
	continues bool // counted in l.arriving

	w       *Worker
	task    *wire.Task    // until it is handed to a worker
	elem    elem[attempt] // in the worker's tasks, or in l.owed
	sibling *attempt      // of the same flow
	key     *key          // that this attempt holds
	span    *span
	series  *series

	queuedUs, handedUs int64
	due                due
	limitUs            int64 // when it times out
	beatUs             int64 // the longest silence; 0 = any
	lastBeatUs         int64

	checkpoint     []byte // the newest
	checkpointAtUs int64  // when it is to be proposed; 0 = it is kept already
	checkpointedUs int64  // when one was proposed
	shown          int    // bytes of output
	early          []byte // output that waits for the commit
	outcome        outcome
	tookUs         int64
	entry          wire.Entry // the result's
	cmd            wire.Entry_StepResult
	again          *wire.Entry // to be proposed when due
}

// find gives a flow's attempt of a step.
func (t *tenant) find(id string, exec uint64) *attempt {
	for a := t.runs[id]; a != nil; a = a.sibling {
		if a.exec == exec {
			return a
		}
	}
	return nil
}

// put makes a the attempt of its step; a former one is taken back.
func (t *tenant) put(a *attempt) {
	if old := t.find(a.id, a.exec); old != nil {
		t.recall(old, "the step was handed out again")
	}
	a.sibling = t.runs[a.id]
	t.runs[a.id] = a
}

// forget ends what is known of an attempt, its concurrency key included.
func (t *tenant) forget(a *attempt) {
	if a.phase == ended {
		a.span.ended(a.outcome.String())
	}
	a.stop()
	a.span.ended("cancelled")
	if a.continues {
		a.continues = false
		a.l.arriving--
	}
	if a.key != nil {
		a.l.free(a.key)
		a.key = nil
	}
	head := t.runs[a.id]
	if head == a {
		if a.sibling == nil {
			delete(t.runs, a.id)
		} else {
			t.runs[a.id] = a.sibling
		}
		a.sibling = nil
		return
	}
	for ; head != nil; head = head.sibling {
		if head.sibling == a {
			head.sibling, a.sibling = a.sibling, nil
			return
		}
	}
}

// stop takes the attempt from its worker, or from those that are owed.
func (a *attempt) stop() {
	switch a.phase {
	case owed:
		if a.elem.in != nil {
			a.l.owed.remove(&a.elem)
		}
	case running:
		a.elem.leave()
		a.l.running--
	}
	a.phase = ended
	a.l.t.dues.unset(&a.due)
}

// hand gives the attempt to w, which has paid a credit for it. When w cannot
// take it, it is owed to the next one that can, w included.
func (a *attempt) hand(w *Worker, now int64) {
	t := a.l.t
	task := a.task
	if !w.give(taskWeight(task), func(f *wire.ServerFrame) { f.Tasks = append(f.Tasks, a.out()) }) {
		w.addFree(1)
		a.l.owed.push(a.step, &a.elem, a)
		return
	}
	a.w, a.phase, a.task = w, running, nil
	a.handedUs, a.lastBeatUs = now, now
	a.limitUs = now + task.TimeoutUs
	w.tasks.push(&a.elem, a)
	w.sent++
	a.l.running++
	a.series.dispatched++
	t.stick(a.id, w)
	t.schedule(a)
}

// out is the task for a worker's frame.
func (a *attempt) out() *wire.Task {
	if t := a.task; len(t.Trace) > 0 {
		a.span = a.l.t.d.begin(t.Trace, "step", a.id, a.l.name, a.step, a.number)
		t.Trace = a.span.child
	}
	return a.task
}

// schedule sets the instant at which the attempt is looked at next.
func (t *tenant) schedule(a *attempt) {
	at := a.limitUs
	if a.beatUs > 0 {
		at = min(at, a.lastBeatUs+a.beatUs)
	}
	if a.checkpointAtUs > 0 {
		at = min(at, a.checkpointAtUs)
	}
	t.dues.set(&a.due, at)
	t.arm()
}

// isDue looks at an attempt whose instant has come.
func (a *attempt) isDue(now int64, out *after) {
	switch {
	case a.again != nil:
		e := a.again
		a.again = nil
		out.propose(a, e)
		return
	case a.phase != running:
		return
	case now >= a.limitUs:
		a.timeout(now, fmt.Sprintf("timed out after %v", micros(a.limitUs-a.handedUs)), out)
		return
	case a.beatUs > 0 && now >= a.lastBeatUs+a.beatUs:
		a.timeout(now, fmt.Sprintf("timed out: no heartbeat for %v", micros(a.beatUs)), out)
		return
	case a.checkpointAtUs > 0 && now >= a.checkpointAtUs:
		a.saveCheckpoint(now, out)
	}
	a.l.t.schedule(a)
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// timeout ends an attempt that took too long: its policy says what follows.
func (a *attempt) timeout(now int64, text string, out *after) {
	w := a.w
	a.stop()
	a.outcome, a.tookUs = timedOut, now-a.handedUs
	w.tell(a.cancelFrame(text, true))
	w.endIfDrained()
	out.propose(a, a.failure(text, "timeout", false))
}

// failure is the entry that fails the attempt's step.
func (a *attempt) failure(text, kind string, permanent bool) *wire.Entry {
	a.failing = true
	if len(text) > core.MaxReason {
		text = text[:core.MaxReason]
	}
	res := &wire.StepResult{Exec: a.exec, Attempt: a.at.Wire(), Checkpoint: a.checkpoint,
		Retry: &wire.Retry{Error: text, Kind: kind, Permanent: permanent},
		Close: &wire.Close{How: wire.Close_FAIL, Error: text}}
	return &wire.Entry{FlowId: a.flowID, Command: &wire.Entry_StepResult{StepResult: res}}
}

// lose ends an attempt whose worker is gone.
func (a *attempt) lose(now int64, reason string) *wire.Entry {
	a.stop()
	a.outcome, a.tookUs = workerLost, now-a.handedUs
	a.failing = true
	return &wire.Entry{FlowId: a.flowID, Command: &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{
		Exec: a.exec, Attempt: a.at.Wire(), Reason: reason, Checkpoint: a.checkpoint}}}
}

// saveCheckpoint proposes the newest checkpoint. One that is refused or lost
// costs a next attempt some work, and is followed by the next one.
func (a *attempt) saveCheckpoint(now int64, out *after) {
	a.checkpointAtUs, a.checkpointedUs = 0, now
	out.entries = append(out.entries, &wire.Entry{FlowId: a.flowID, Command: &wire.Entry_Checkpoint{
		Checkpoint: &wire.Checkpoint{Exec: a.exec, Attempt: a.at.Wire(), Data: a.checkpoint}}})
}

func (a *attempt) cancelFrame(reason string, forget bool) func(*wire.ServerFrame) {
	c := &wire.CancelTask{FlowId: a.id, Exec: a.exec, Attempt: a.at.Wire(), Reason: reason, Forget: forget}
	return func(f *wire.ServerFrame) { f.Cancels = append(f.Cancels, c) }
}

// replied takes what became of the attempt's outcome. It runs on the
// partition's goroutine.
func (a *attempt) replied(_ core.Reply, err error) {
	t := a.l.t
	v := judge(err)
	if v == busy {
		v = refused
	}
	var again *wire.Entry
	t.mu.Lock()
	switch {
	case v == late && !a.failing:
		a.outcome = tooLate
	case v == refused && !a.failing:
		again = a.refused(err)
	case v == refused:
		t.d.cfg.Log.Error("the failure of a step was refused; it stays open", "flow", a.flowID, "step", a.step, "error", err)
	}
	if again == nil {
		a.series.count(a.outcome)
		if v == lost {
			a.span.ended("unknown")
		}
		a.span.ended(a.outcome.String())
		t.forget(a)
	}
	drop := a.shown > 0 && again == nil
	t.mu.Unlock()
	if drop {
		t.d.cfg.Hub.Drop(a.flowID, a.exec)
	}
	if again != nil {
		t.d.propose(a, again)
		return
	}
	if h := t.d.cfg.Hooks.Attempt; h != nil && v != lost {
		h(a.l.name, a.step, a.outcome.String(), micros(a.tookUs), micros(a.handedUs-a.queuedUs))
	}
	t.d.wake(t)
}

// refused tells the worker that its result was refused, and gives the failure
// of the step that takes its place.
func (a *attempt) refused(err error) *wire.Entry {
	r := &wire.Refusal{FlowId: a.id, Exec: a.exec}
	r.Code, r.Message, _ = strings.Cut(err.Error(), ": ")
	a.outcome = notTaken
	a.w.tell(func(f *wire.ServerFrame) { f.Refusals = append(f.Refusals, r) })
	return a.failure("the result was refused: "+err.Error(), "refused", true)
}

// propose gives an attempt's outcome to its partition; when that has no room,
// it is tried again soon. What waits so is bounded by the attempts there are.
func (d *Dispatcher) propose(a *attempt, e *wire.Entry) {
	err := d.submit(a.flowID, partition.Proposal{Entry: e, Reply: a.replied})
	if err == nil {
		return
	}
	t := a.l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if errors.Is(err, partition.ErrOverloaded) {
		a.again = e
		t.dues.set(&a.due, d.now()+overloadRetry.Microseconds())
		t.arm()
		return
	}
	a.span.ended("unknown")
	t.forget(a) // the next owner hands it out again
}

// after is what is to be done when the tenant's lock is released.
type after struct {
	outcomes []outcomeOf
	entries  []*wire.Entry // whose outcome nobody waits for
	calls    []finished
}

type outcomeOf struct {
	a *attempt
	e *wire.Entry
}

func (o *after) propose(a *attempt, e *wire.Entry) { o.outcomes = append(o.outcomes, outcomeOf{a, e}) }

func (o *after) run(t *tenant) {
	for _, p := range o.outcomes {
		t.d.propose(p.a, p.e)
	}
	for _, e := range o.entries {
		_ = t.d.submit(e.FlowId, partition.Proposal{Entry: e})
	}
	for i := range o.calls {
		o.calls[i].tell()
	}
}

// outcome is how an attempt ended.
type outcome uint8

const (
	completed outcome = iota
	retried           // failed, and may be tried again
	failed            // for good
	timedOut
	workerLost
	tooLate  // the step was over, or not this worker's any more
	notTaken // refused for what the result said
	outcomes
)

var outcomeNames = [outcomes]string{"completed", "retried", "failed", "timeout", "lost", "late", "refused"}

func (o outcome) String() string { return outcomeNames[o] }

func outcomeOfResult(r *wire.StepResult) outcome {
	switch {
	case r.Retry == nil:
		return completed
	case r.Retry.Permanent:
		return failed
	default:
		return retried
	}
}
