package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// pool is the workers of one partition's life: it does what effect/worker and
// the agent's handler do, with actors in place of models and tools, and checks
// what it is handed.
type pool struct {
	partition.Slotless
	p    *part
	runs map[attemptKey]*run // handed out, and not answered durably
	list []*run              // the same, in order
}

type attemptKey struct {
	part    int
	flow    string
	exec    uint64
	attempt core.Attempt
}

// run is one attempt.
type run struct {
	pool      *pool
	w         *partition.Work
	key       attemptKey
	committed bool
	cancelled string // the reason, when it was asked to stop
	asked     bool
	over      bool // has its result
	text      string
	early     []string // text held back until the commit
	asks      *conversation
}

func limits() agent.Limits { return agent.Limits{MaxToolRounds: 3, MaxToolCalls: 2} }

var modelRetry = &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 100_000, MaxUs: 2_000_000}

func decisions() agent.Decisions { return agent.NewDecisions(limits(), modelRetry) }

func (x *pool) world() *world { return x.p.n.w }

// later plans do for the process that runs the attempt.
func (r *run) later(us int64, do func()) { r.pool.p.n.inLife(us, do) }

// Dispatch implements partition.Executor.
func (x *pool) Dispatch(pw *partition.Work) {
	w := x.world()
	key := attemptKey{x.p.id, pw.FlowID, pw.Exec, pw.Attempt}
	w.tell(pw.FlowID, "attempt %d.%d.%d of step %d %s is handed out, committed %v", pw.Attempt.Epoch, pw.Attempt.LSN, pw.Attempt.N, pw.Exec, pw.Name, pw.Committed())
	if w.attempts[key] {
		w.violate("attempts", pw.FlowID, "attempt %v of step %d was handed out before", pw.Attempt, pw.Exec)
	}
	w.attempts[key] = true
	switch {
	case pw.Committed() && pw.Attempt.LSN > x.p.durable:
		w.violate("gate", pw.FlowID, "step %d runs before its start, entry %d, is durable", pw.Exec, pw.Attempt.LSN)
	case !pw.Committed() && !pw.Prefetch:
		w.violate("gate", pw.FlowID, "step %d may not run before its commit", pw.Exec)
	}
	if w.mutant.dropDispatch && w.rng.percent(10) {
		return
	}
	r := &run{pool: x, w: pw, key: key, committed: pw.Committed()}
	x.runs[key] = r
	x.list = append(x.list, r)
	r.later(w.rng.between(0, 300), r.start)
}

// Commit implements partition.Executor.
func (x *pool) Commit(pw *partition.Work) {
	key := attemptKey{x.p.id, pw.FlowID, pw.Exec, pw.Attempt}
	r := x.runs[key]
	if pw.Attempt.LSN > x.p.durable {
		x.world().violate("gate", pw.FlowID, "start of step %d is called durable, its entry %d is not", pw.Exec, pw.Attempt.LSN)
	}
	if r == nil {
		if !x.world().mutant.dropDispatch {
			x.world().violate("attempts", pw.FlowID, "commit of attempt %v, which does not run", pw.Attempt)
		}
		return
	}
	r.committed = true
	r.checkConversation()
	if !r.over { // a result is there: its event says all
		for _, text := range r.early {
			r.delta(text)
		}
	}
	r.early = nil
}

// Cancel implements partition.Executor.
func (x *pool) Cancel(flow string, exec uint64, attempt core.Attempt, reason string, _ bool) {
	r := x.runs[attemptKey{x.p.id, flow, exec, attempt}]
	w := x.world()
	w.tell(flow, "step %d is asked to stop: %s", exec, reason)
	if r == nil || r.over || r.asked {
		return
	}
	r.asked, r.cancelled = true, reason
	r.later(w.rng.between(50, 30_000), func() {
		if r.over {
			return
		}
		if r.w.Name == agent.StepTool {
			r.finish(decisions().ToolDone(r.w, "cancelled while it ran; whether it took effect is unknown", true, nil))
			return
		}
		r.finish(decisions().Cancelled(r.w, r.text, reason))
	})
}

// Abort implements partition.Executor.
func (x *pool) Abort() {
	for _, r := range x.list {
		r.over = true
	}
}

// Publish implements partition.Observer.
func (x *pool) Publish(flow string, events []*wire.Event) {
	for _, ev := range events {
		if ev.Lsn > x.p.durable {
			x.world().violate("gate", flow, "event %s of entry %d is shown, durable are entries up to %d", ev.Type, ev.Lsn, x.p.durable)
		}
		x.world().tell(flow, "event %d.%d %s of %s step %d", ev.Lsn, ev.N, ev.Type, shortScope(ev.Scope), ev.Exec)
	}
	x.p.n.hub.Publish(flow, events)
}

func shortScope(s string) string { return s[:min(len(s), 9)] }

// ghosts gives the attempts that do not notice the end of their process.
func (x *pool) ghosts() []*run {
	var out []*run
	for _, r := range x.list {
		if !r.over && x.world().rng.percent(30) {
			out = append(out, r)
		}
	}
	return out
}

// done forgets an attempt whose result is durable or refused.
func (x *pool) done(r *run) {
	delete(x.runs, r.key)
	for i, o := range x.list {
		if o == r {
			x.list = append(x.list[:i], x.list[i+1:]...)
			return
		}
	}
}

func (r *run) start() {
	if r.over {
		return
	}
	if r.w.Name == agent.StepTool {
		r.tool()
		return
	}
	if r.w.Task.Cancel {
		r.finish(decisions().Cancelled(r.w, "", r.w.Reason))
		return
	}
	msgs, err := agent.Conversation(r.w)
	r.asks = &conversation{msgs, err}
	if r.committed {
		r.checkConversation()
	}
	r.think()
}

// conversation is what a model call is made from.
type conversation struct {
	messages []json.RawMessage
	err      error
}

// checkConversation: what the model got is what the flow's log holds up to the
// attempt. It waits for the commit, when the log is known.
func (r *run) checkConversation() {
	w, flow := r.pool.world(), r.w.FlowID
	fold := r.pool.p.hist.fold
	f := fold.flows[flow]
	if r.asks == nil || f == nil || f.RunId != r.w.RunID {
		return // not begun, or deleted meanwhile
	}
	var want []json.RawMessage
	for _, ev := range fold.rows[flow] {
		if !r.w.Before.Before(ev) {
			for _, it := range ev.Items {
				want = append(want, it)
			}
		}
	}
	got := r.asks.messages
	switch {
	case r.asks.err != nil:
		w.violate("conversation", flow, "step %d cannot read it: %v", r.w.Exec, r.asks.err)
	case len(want) <= agent.DefaultContextMessages && fmt.Sprintf("%s", got) != fmt.Sprintf("%s", want):
		w.violate("conversation", flow, "step %d gets %d messages that are not the %d of the log:\n%.2000s\nwant\n%.2000s", r.w.Exec, len(got), len(want), got, want)
	}
}

// think is a model call: pieces of text, and then an answer, a failure, or
// nothing until it is stopped.
func (r *run) think() {
	w := r.pool.world()
	at := w.rng.between(200, 60_000)
	fails := !w.calm && w.rng.percent(w.p.modelRetryable)
	if fails {
		w.fault("model-retryable")
		r.later(at, func() { r.fail(model.KindRetryable, model.CodeUpstream) })
		return
	}
	for range w.rng.intn(6) {
		at += w.rng.between(100, 40_000)
		r.later(at, func() { r.show(fmt.Sprintf("word%d ", w.rng.intn(1000)) + w.bulk()) })
	}
	at += w.rng.between(100, 20_000)
	switch {
	case !w.calm && w.rng.percent(w.p.modelPermanent):
		w.fault("model-permanent")
		r.later(at, func() { r.fail(model.KindPermanent, model.CodeConnection) })
	case !w.calm && w.rng.percent(w.p.modelHangs):
		w.fault("model-hangs")
		r.later(at+w.rng.between(2_000_000, 8_000_000), func() { r.fail(model.KindPermanent, model.CodeTimeout) })
	default:
		r.later(at, r.answer)
	}
}

// show is worker.Call.Show: nothing is seen before the commit.
func (r *run) show(text string) {
	if r.over || r.asked {
		return
	}
	r.text += text
	if !r.committed && !r.pool.world().mutant.showEarly {
		r.early = append(r.early, text)
		return
	}
	r.delta(text)
}

func (r *run) delta(text string) {
	x := r.pool
	if r.w.Attempt.LSN > x.p.durable {
		x.world().violate("gate", r.w.FlowID, "text of step %d is shown before its start, entry %d, is durable", r.w.Exec, r.w.Attempt.LSN)
	}
	x.p.n.hub.Delta(r.w.FlowID, r.w.Scope, r.w.Exec, r.w.Number, text)
}

func (r *run) fail(kind model.Kind, code string) {
	if r.over || r.asked {
		return
	}
	res := model.Result{Text: r.text, Shown: r.text != ""}
	r.finish(decisions().ModelFailed(r.w, res, &model.Error{Kind: kind, Code: code, Message: "the model failed"}))
}

func (r *run) answer() {
	if r.over || r.asked {
		return
	}
	w := r.pool.world()
	res := model.Result{Text: r.text, Shown: r.text != "", FinishReason: "stop", Usage: model.Usage{Prompt: 10, Completion: len(r.text)}}
	if w.rng.percent(w.p.toolCalls) {
		for range 1 + w.rng.intn(3) {
			id := fmt.Sprintf("c%d", w.rng.intn(1_000_000))
			if w.rng.percent(5) {
				id = "" // some providers give none
			}
			res.ToolCalls = append(res.ToolCalls, model.ToolCall{ID: id, Name: "look", Arguments: `{"at":"it"}`})
		}
		res.FinishReason = "tool_calls"
	}
	r.finish(decisions().Answered(r.w, res))
}

func (r *run) tool() {
	w := r.pool.world()
	if r.w.Task.Cancel {
		r.finish(decisions().ToolDone(r.w, "cancelled before it ran", true, nil))
		return
	}
	if !r.w.Committed() {
		w.violate("gate", r.w.FlowID, "tool step %d runs before its commit", r.w.Exec)
	}
	took := w.rng.between(500, 50_000)
	if w.rng.percent(10) {
		took += w.rng.between(0, 3_000_000)
	}
	fails := !w.calm && w.rng.percent(w.p.toolRetryable)
	r.later(took, func() {
		switch {
		case r.over || r.asked:
		case fails:
			w.fault("tool-retryable")
			r.finish(decisions().ToolDone(r.w, "the tool is overloaded", true, &wire.Retry{Error: "overloaded", AfterUs: w.rng.between(0, 400_000)}))
		default:
			r.finish(decisions().ToolDone(r.w, fmt.Sprintf("result %d", w.rng.intn(100))+w.bulk(), w.rng.percent(20), nil))
		}
	})
}

// finish sends the attempt's result to its partition.
func (r *run) finish(res *wire.StepResult) {
	w := r.pool.world()
	r.over = true
	r.later(w.rng.between(10, 5_000), func() { r.propose(res) })
	if !w.calm && w.rng.percent(w.p.resultTwice) {
		w.fault("result-twice")
		again := res.CloneVT()
		r.later(w.rng.between(5_001, 400_000), func() { propose(r.pool.p, r, again, "a second result") })
	}
}

func (r *run) entry(res *wire.StepResult) *wire.Entry {
	res.Exec, res.Attempt = r.w.Exec, r.w.Attempt.Wire()
	return &wire.Entry{FlowId: r.w.FlowID, Command: &wire.Entry_StepResult{StepResult: res}}
}

func (r *run) propose(res *wire.StepResult) {
	x, w := r.pool, r.pool.world()
	x.p.submit(request{flow: r.w.FlowID, entry: r.entry(res), reply: func(o outcome) {
		if errors.Is(o.err, partition.ErrLost) {
			return
		}
		x.done(r)
		var refused *core.Error
		switch {
		case o.err == nil:
			w.tell(r.w.FlowID, "step %d has its result, entry %d", r.w.Exec, o.lsn)
		case errors.As(o.err, &refused) && (refused.Code == core.StaleAttempt || refused.Code == core.NotFound):
			f := x.p.hist.fold.flows[r.w.FlowID]
			if f == nil || f.RunId == r.w.RunID { // else a new run's message may be there
				x.p.n.hub.Drop(r.w.FlowID, r.w.Exec)
			}
			if f != nil && f.RunId == r.w.RunID {
				w.violate("attempts", r.w.FlowID, "the result of attempt %v of step %d is refused: %v", r.w.Attempt, r.w.Exec, o.err)
			}
		default:
			w.violate("attempts", r.w.FlowID, "the result of step %d is refused: %v", r.w.Exec, o.err)
		}
	}})
}

// propose sends a result that must be refused.
func propose(p *part, r *run, res *wire.StepResult, what string) {
	p.submit(request{flow: r.w.FlowID, entry: r.entry(res), reply: func(o outcome) {
		var refused *core.Error
		if errors.Is(o.err, partition.ErrLost) || errors.As(o.err, &refused) && (refused.Code == core.StaleAttempt || refused.Code == core.NotFound) {
			return
		}
		p.n.w.violate("attempts", r.w.FlowID, "%s of attempt %v is taken: %v", what, r.w.Attempt, o.err)
	}})
}

// haunt lets attempts of former lives answer in this one.
func (n *node) haunt() {
	w := n.w
	for _, r := range w.ghosts {
		w.fault("late-result")
		n.inLife(w.rng.between(0, int64(time.Second/time.Microsecond)), func() {
			res := decisions().ToolDone(r.w, "late", false, nil)
			if r.w.Name != agent.StepTool {
				res = decisions().Answered(r.w, model.Result{Text: "late"})
			}
			propose(n.parts[r.key.part], r, res, "a result of a former life")
		})
	}
	w.ghosts = nil
}
