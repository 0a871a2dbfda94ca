package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/anishathalye/porcupine"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// checkOutstandingFlow: what a flow waits for is with somebody.
func (p *part) checkOutstandingFlow(ef core.Effect) {
	w := p.n.w
	switch ef.Kind {
	case core.Dispatch:
		if !p.flows.live[attemptKey{p.id, ef.FlowID, ef.Exec, ef.Attempt}] && !p.n.draining {
			w.violate("outstanding", ef.FlowID, "step %d, attempt %v, is outstanding and was not handed out", ef.Exec, ef.Attempt)
		}
	case core.Queue:
		if !p.flows.queued[stepKey{ef.FlowID, ef.Exec}] {
			w.violate("outstanding", ef.FlowID, "step %d waits for a worker, and nobody was told", ef.Exec)
		}
	case core.Send:
		if !p.n.flows.carrying[sendKey{ef.FlowID, ef.Out.Id}] {
			w.violate("outstanding", ef.FlowID, "send %d is outstanding, and nobody carries it", ef.Out.Id)
		}
	}
}

// flowAtRest: it has ended, or waits for what only a client could send.
func flowAtRest(f *wire.Flow) bool { return !core.HasOutstanding(f) }

// flows gives the durable flows of users, with all their values.
func (w *world) userFlows() map[string]*wire.Flow {
	out := map[string]*wire.Flow{}
	for _, p := range w.active().parts {
		var ids []string
		err := p.tables.Flows("", "", 0, false, func(f *wire.Flow) error {
			if isFlow(f.Id) {
				ids = append(ids, f.Id)
			}
			return nil
		})
		for _, id := range ids {
			var f *wire.Flow
			if f, err = p.tables.Flow(id); err != nil {
				break
			}
			out[id] = f
		}
		if err != nil {
			w.violate("tables", "", "partition %d: %v", p.id, err)
		}
	}
	return out
}

// judgeFlows is the verdict on flows, of a world at rest.
func (w *world) judgeFlows() {
	flows := w.userFlows()
	w.model.Settled(flows)
	if err := w.model.Err(); err != nil && w.broken == nil {
		w.broken = err
	}
	for _, id := range w.strict {
		w.judgeStrict(id, flows)
	}
	for i := range w.p.mailboxes {
		w.judgeMail(flowPrefix+nameOf("mail", i), flows)
	}
	w.judgeCounters(flows)
	w.judgeDispatch()
}

// judgeDispatch: the dispatcher has nothing left, and knows of each worker's
// credits what the worker knows.
func (w *world) judgeDispatch() {
	d := w.active().flows.dispatch
	for _, q := range d.Queues(tenant) {
		if q.Queued+q.Running > 0 {
			w.violate("dispatch", "", "of type %s %d steps are queued and %d run, by the dispatcher", q.FlowType, q.Queued, q.Running)
		}
		for _, k := range q.Keys {
			w.violate("dispatch", "", "key %s has %d queued and %d running, by the dispatcher", k.Key, k.Queued, k.Running)
		}
	}
	for _, info := range d.Workers(tenant) {
		for _, f := range w.workers {
			s := f.stream
			quiet := s != nil && !s.broken && s.out == nil && s.upUs < w.nowUs && s.downUs < w.nowUs &&
				info.Streams == 1 // else a former one, whose end the server has not seen, counts as well
			if nameOf("w", f.id) == info.WorkerId && quiet && !info.Draining && int(info.TaskCredits) != s.credits {
				w.violate("slots", "", "worker %d has granted %d credits, the dispatcher has %d", f.id, s.credits, info.TaskCredits)
			}
		}
	}
}

// judgeStrict: a flow that nobody disturbed has ended, with what it should say.
func (w *world) judgeStrict(id string, flows map[string]*wire.Flow) {
	f := flows[id]
	if f == nil {
		return // its start was given up
	}
	if n := w.model.Starts(id); n != 1 {
		w.violate("once", id, "it was started %d times", n)
	}
	if f.Status == wire.Status_FAILED && f.Type != typeSaga && f.Error != "late" && f.Error != "too many bad days" && !timedOut(f.Error) {
		w.violate("results", id, "it failed with %q", f.Error)
	}
	switch {
	case f.Status != wire.Status_COMPLETED && f.Status != wire.Status_FAILED:
		w.violate("liveness", id, "it is %v", f.Status)
	case f.Status == wire.Status_FAILED:
	case f.Type == typeCount:
		if k := intOf(f.Attributes, "k"); string(f.Output) != strconv.Itoa(k) {
			w.violate("results", id, "%d steps that add one gave %s", k, f.Output)
		}
	case f.Type == typeParent:
		w.judgeParent(f, flows)
	}
}

func timedOut(text string) bool { return bytes.Contains([]byte(text), []byte("timed out")) }

// judgeParent: each child was started once, and the parent knows what all said.
func (w *world) judgeParent(f *wire.Flow, flows map[string]*wire.Flow) {
	var sum, n, bad int
	if _, err := fmt.Sscanf(string(f.Output), `"%d of %d children, %d bad"`, &sum, &n, &bad); err != nil {
		w.violate("results", f.Id, "its output is %s", f.Output)
	}
	for i := range n {
		id := fmt.Sprintf("%s-c%d", f.Id, i)
		child := flows[id]
		if starts := w.model.Starts(id); child == nil || starts != 1 {
			w.violate("once", id, "the child was started %d times", starts)
			return
		}
		if child.Status == wire.Status_COMPLETED {
			out, _ := strconv.Atoi(string(child.Output))
			sum -= out
		} else {
			bad--
		}
	}
	if sum != 0 || bad != 0 {
		w.violate("results", f.Id, "it says %s, its children something else", f.Output)
	}
}

// judgeMail: a mailbox keeps every letter once, in the order in which they were
// acknowledged, and of each saga that was undone its one message.
func (w *world) judgeMail(id string, flows map[string]*wire.Flow) {
	f := flows[id]
	if f == nil {
		w.violate("results", id, "the mailbox is not there")
		return
	}
	var log []string
	if err := json.Unmarshal(orEmpty(valueOf(f.Attributes, "log")), &log); err != nil {
		w.violate("attributes", id, "log: %v", err)
	}
	at := map[string]int{}
	for i, text := range log {
		if _, ok := at[text]; ok {
			w.violate("once", id, "%q was taken twice", text)
		}
		at[text] = i
	}
	var last []*letter
	for _, m := range w.letters {
		i, ok := at[m.text]
		if m.flow != id {
			continue
		}
		if !ok {
			w.violate("messages", id, "%q was acknowledged, and is not there", m.text)
		}
		for _, before := range last {
			if before.to < m.from && at[before.text] > i {
				w.violate("messages", id, "%q was acknowledged before %q was sent, and came after it", before.text, m.text)
			}
		}
		last = append(last, m)
	}
	w.judgeUndone(id, at)
}

func (w *world) judgeUndone(id string, at map[string]int) {
	for _, p := range w.active().parts {
		for _, flow := range slices.Sorted(maps.Keys(p.hist.fold.shown)) {
			for _, s := range p.hist.fold.undone[flow] {
				if s.to != id {
					continue
				}
				if _, ok := at[s.text]; !ok {
					w.violate("sends", flow, "%q was sent to %s and has not come", s.text, shortFlow(id))
				}
			}
		}
	}
}

// sent is a message that a committed result sent to another flow.
type sent struct{ to, text string }

// countSends keeps what entries have sent.
func (f *fold) countSends(e *wire.Entry, effects []core.Effect) {
	for _, fx := range effects {
		if p := fx.Out.GetSend().GetPublish(); fx.Kind == core.Send && p != nil {
			f.undone[e.FlowId] = append(f.undone[e.FlowId], sent{fx.Out.Send.FlowId, string(p.Payload)})
		}
	}
}

// counterInput and its output, an int, are one operation on a counter.
type counterInput struct{ add bool }

// counter is what an entity promises: add gives the sum it made, get the sum.
var counter = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(state, input, output any) (bool, any) {
		n, out := state.(int), output.(int)
		if input.(counterInput).add {
			return out == n+1 || out == unknown, n + 1
		}
		return out == n, n
	},
	Equal: func(a, b any) bool { return a.(int) == b.(int) },
}

const unknown = -1

// judgeCounters: calls on counters are linearizable, and no update is lost.
func (w *world) judgeCounters(flows map[string]*wire.Flow) {
	end := w.instant()
	for i := range w.p.mailboxes {
		id := flowPrefix + nameOf("entity", i)
		f := flows[id]
		if f == nil {
			w.violate("results", id, "the counter is not there")
			return
		}
		var ops []porcupine.Operation
		for _, h := range w.counted {
			if h.flow != id || h.never || !h.add && (!h.known || w.p.liars) {
				continue
			}
			// Without an answer it may have happened at any time, or never: that is,
			// after the end.
			op := porcupine.Operation{ClientId: 1000 + len(ops), Input: counterInput{h.add}, Call: h.call, Output: unknown, Return: end + 3}
			if h.known {
				op.ClientId, op.Output, op.Return = h.client, h.value, h.ret
			}
			ops = append(ops, op)
		}
		ops = append(ops, porcupine.Operation{ClientId: 999, Input: counterInput{}, Call: end + 1, Output: intOf(f.Attributes, "n"), Return: end + 2})
		if !porcupine.CheckOperations(counter, ops) {
			w.violate("linearizable", id, "%d operations on the counter have no order that explains them; it is %d", len(ops), intOf(f.Attributes, "n"))
		}
	}
}

var _ partition.Outbox = (*router)(nil)
