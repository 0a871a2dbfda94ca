package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/oracle"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/wire"
)

// client makes one request after the other, tries again what had no answer,
// and tells the oracle what it was told.
type client struct {
	w    *world
	id   int
	rng  *source
	left int
	at   int // the machine that it asks
	op   *op // in progress
}

// op is one operation of a client, over all its tries.
type op struct {
	oracle.Op
	c      *client
	first  *oracle.Op // the turn that a creation begins with
	read   bool
	keep   int64 // a creation's retention, microseconds
	copies int   // requests sent
	maybe  bool  // one of them may have done something unheard of
	tries  int
	try    int // the one that is waited for
	floor  uint64
	over   bool
}

// Errors of the way, beside those of the engine.
var (
	errDown    = errors.New("connection refused")
	errTimeout = errors.New("no answer")
)

const clientTimeoutUs = 1_500_000

func (w *world) startClients() {
	for i := range w.p.clients {
		c := &client{w: w, id: i, rng: w.rng.fork(), left: w.p.opsPerClient}
		w.clients = append(w.clients, c)
		w.after(c.rng.between(0, 200_000), c.next)
	}
}

func (w *world) sessionID(i int) string { return fmt.Sprintf("default/s/s%d", i) }

// next begins the next operation.
func (c *client) next() {
	if c.left--; c.left < 0 || c.w.calm {
		return
	}
	o := &op{c: c, Op: oracle.Op{FlowID: c.w.sessionID(c.rng.intn(c.w.p.sessions))}}
	w := c.w
	c.at = w.astray(c.rng, c.at)
	o.From = w.instant()
	known := w.known[o.FlowID]
	switch roll := c.rng.intn(100); {
	case !known || roll < 4:
		o.create()
	case roll < 4+w.p.cancels:
		o.Kind = oracle.Cancel
		if turn := w.anyTurn(o.FlowID, c.rng); c.rng.percent(50) && turn != "" {
			o.Scope = turn
		}
	case roll < 4+w.p.cancels+w.p.deletes:
		o.Kind = oracle.Delete
	case roll < 14+w.p.cancels+w.p.deletes:
		o.read, o.floor = true, w.acked[o.FlowID]
	case roll < 19+w.p.cancels+w.p.deletes:
		w.watch(o.FlowID, false)
		w.after(c.rng.between(0, 100_000), c.next)
		return
	default:
		o.turn(&o.Op)
	}
	c.op = o
	w.tell(o.FlowID, "client %d %v", c.id, o)
	if w.mutant.inventAnswer && o.Kind == oracle.Publish && c.rng.percent(5) {
		o.succeed(outcome{Reply: core.Reply{MessageIDs: []string{"turn_invented"}}}, nil)
		return
	}
	o.send()
}

// String says what the client wants.
func (o *op) String() string {
	switch {
	case o.read:
		return "reads"
	case o.Kind == oracle.Start && o.first != nil:
		return "creates with a turn, request " + o.RequestID
	case o.Kind == oracle.Start:
		return "creates, request " + o.RequestID
	case o.Kind == oracle.Cancel:
		return fmt.Sprintf("cancels %q", o.Scope)
	case o.Kind == oracle.Delete:
		return "deletes"
	}
	return fmt.Sprintf("says %.60s, %s, request %q", o.Payload, []string{"enqueue", "reject", "interrupt"}[o.OnBusy], o.RequestID)
}

func (o *op) requestID() string { return fmt.Sprintf("r%d-%d", o.c.id, o.From) }

func (o *op) create() {
	o.Kind, o.RequestID = oracle.Start, o.requestID()
	if o.c.rng.percent(20) {
		o.keep, o.Retention = o.c.rng.between(500_000, 20_000_000), true
	}
	if o.c.rng.percent(50) {
		o.first = &oracle.Op{FlowID: o.FlowID, From: o.From}
		o.turn(o.first)
		o.first.RequestID, o.first.OnBusy = o.RequestID, oracle.Enqueue
	}
}

func (o *op) turn(t *oracle.Op) {
	t.Kind = oracle.Publish
	content, err := json.Marshal(fmt.Sprintf("question %d", o.From) + o.c.w.bulk())
	if err != nil {
		o.c.w.violate("simulator", o.FlowID, "%v", err)
	}
	t.Payload = session.UserMessage(content)
	t.OnBusy = pick(o.c.rng, oracle.Enqueue, oracle.Enqueue, oracle.Reject, oracle.Interrupt, oracle.Interrupt)
	if !o.c.rng.percent(10) {
		t.RequestID = o.requestID()
	}
}

// bulk is what makes a few messages long: over many sectors, over a segment, or
// worth compressing.
func (w *world) bulk() string {
	if !w.rng.percent(3) {
		return ""
	}
	n := pick(w.rng, 600, 5_000, 30_000)
	if w.rng.percent(30) {
		return strings.Repeat(" again", n/6)
	}
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = fmt.Appendf(b, "%016x", w.rng.Uint64())
	}
	return string(b)
}

// entry makes the command anew for each copy: the engine keeps what it takes.
func (o *op) entry() *wire.Entry {
	e := &wire.Entry{FlowId: o.FlowID}
	switch o.Kind {
	case oracle.Start:
		s := &wire.StartFlow{
			Type: agent.FlowType, RequestId: o.RequestID, RetentionUs: o.keep, Steps: []*wire.StepSpec{agent.TurnStep(modelRetry)},
			Attributes: []*wire.Attribute{{Name: agent.AttributeAgent, Value: []byte("sim")}},
		}
		if o.first != nil {
			s.Publish = []*wire.Publish{publish(o.first)}
		}
		e.Command = &wire.Entry_StartFlow{StartFlow: s}
	case oracle.Publish:
		e.Command = &wire.Entry_Publish{Publish: publish(&o.Op)}
	case oracle.Cancel:
		e.Command = &wire.Entry_Cancel{Cancel: &wire.Cancel{Scope: o.Scope, Channel: agent.Input, Reason: "by a client"}}
	case oracle.Delete:
		e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "by a client"}}
	}
	return e
}

func publish(t *oracle.Op) *wire.Publish {
	policy := map[oracle.OnBusy]wire.Publish_OnBusy{oracle.Enqueue: wire.Publish_ENQUEUE, oracle.Reject: wire.Publish_REJECT, oracle.Interrupt: wire.Publish_INTERRUPT}
	return &wire.Publish{Channel: agent.Input, Payload: t.Payload, OnBusy: policy[t.OnBusy], MaxPending: 5, RequestId: t.RequestID}
}

// send sends one try: a copy, two, or none arrives.
func (o *op) send() {
	w := o.c.w
	o.tries++
	o.try = o.tries
	try := o.try
	lost := !w.calm && w.rng.percent(w.p.requestLost)
	twice := !w.calm && o.RequestID != "" && w.rng.percent(w.p.requestTwice)
	if lost {
		w.fault("request-lost")
	} else {
		o.copies++
		w.arriveAt(o.c.at, o.delay(), func(n *node) { w.arrive(n, o, try) })
	}
	if twice {
		w.fault("request-twice")
		o.copies++
		w.arriveAt(o.c.at, o.delay()+w.rng.between(0, 2_000_000), func(n *node) { w.arrive(n, o, try) })
	}
	w.after(clientTimeoutUs, func() { o.answered(try, outcome{err: errTimeout}, nil) })
}

// delay is the time on the way. Now and then a request is overtaken by others.
func (o *op) delay() int64 {
	w := o.c.w
	if !w.calm && w.rng.percent(3) {
		w.fault("request-late")
		return w.rng.between(1_000, 3_000_000)
	}
	return w.rng.between(50, 3_000)
}

// arrive is the server's side.
func (w *world) arrive(n *node, o *op, try int) {
	if n == nil {
		w.reply(n, o, try, outcome{err: errDown}, nil)
		return
	}
	if n.draining && (o.Kind == oracle.Start || o.Kind == oracle.Publish) {
		w.reply(n, o, try, outcome{err: partition.ErrStopped}, nil)
		return
	}
	p := n.parts[partition.Of(o.FlowID, len(n.parts))]
	if len(p.queue) >= w.p.queueBound {
		w.fault("overloaded")
		w.reply(n, o, try, outcome{err: partition.ErrOverloaded}, nil)
		return
	}
	if o.read {
		p.submit(request{flow: o.FlowID, read: func(f *wire.Flow, err error) { w.reply(n, o, try, outcome{err: err}, f) }})
		return
	}
	p.submit(request{flow: o.FlowID, entry: o.entry(), reply: func(out outcome) { w.reply(n, o, try, out, nil) }})
}

// reply sends an answer back, if the process still can.
func (w *world) reply(n *node, o *op, try int, out outcome, f *wire.Flow) {
	if n != nil && n.disk.fired() != nil {
		return
	}
	if !w.calm && w.rng.percent(w.p.answerLost) {
		w.fault("answer-lost")
		return
	}
	w.after(w.rng.between(50, 3_000), func() { o.answered(try, out, f) })
}

// answered takes the first answer of the try that is waited for.
func (o *op) answered(try int, out outcome, f *wire.Flow) {
	if o.over || try != o.try {
		return
	}
	o.try = 0 // later ones are not listened to
	w := o.c.w
	var refused *core.Error
	switch {
	case out.err == nil:
		o.succeed(out, f)
	case errors.As(out.err, &refused):
		w.tell(o.FlowID, "client %d is refused: %v", o.c.id, refused)
		if refused.Code == core.NotFound {
			w.known[o.FlowID] = false
		}
		o.end(o.copies > 1 || o.maybe)
	default:
		o.retry(out.err)
	}
}

// retry tries again, unless it must not: without a request ID a turn could be
// taken twice.
func (o *op) retry(why error) {
	w := o.c.w
	if !errors.Is(why, errDown) && !errors.Is(why, partition.ErrOverloaded) && !errors.Is(why, partition.ErrStopped) {
		o.maybe = true
	}
	safe := o.RequestID != "" || o.Kind != oracle.Publish || !o.maybe
	if !safe || o.tries > 5 && !w.calm {
		w.tell(o.FlowID, "client %d gives up: %v", o.c.id, why)
		o.end(o.maybe || o.copies > 1)
		return
	}
	o.c.at = w.elsewhere(o.c.rng, o.c.at)
	w.after(o.c.rng.between(20_000, 400_000), o.send)
}

func (o *op) succeed(out outcome, f *wire.Flow) {
	w := o.c.w
	if o.read {
		o.checkRead(f)
		o.end(false)
		return
	}
	o.To = w.instant()
	o.RunID = out.RunID
	switch o.Kind {
	case oracle.Publish:
		o.MessageID = out.MessageIDs[0]
	case oracle.Start:
		if o.first != nil && len(out.MessageIDs) > 0 {
			t := *o.first
			t.RunID, t.MessageID, t.To = out.RunID, out.MessageIDs[0], o.To
			w.acknowledge(t, 0)
		}
	}
	w.tell(o.FlowID, "client %d is answered: %s %v, entry %d", o.c.id, shortScope(o.MessageID), out.RunID, out.lsn)
	w.acknowledge(o.Op, out.lsn)
	o.end(o.copies > 1 || o.maybe)
}

// acknowledge tells the oracle, and remembers what other clients may refer to.
func (w *world) acknowledge(op oracle.Op, lsn uint64) {
	w.oracle.Acked(op)
	w.acked[op.FlowID] = max(w.acked[op.FlowID], lsn)
	switch op.Kind {
	case oracle.Start:
		w.known[op.FlowID] = true
	case oracle.Delete:
		w.known[op.FlowID] = false
	case oracle.Publish:
		w.turns[op.FlowID] = append(w.turns[op.FlowID], op.MessageID)
	}
}

// anyTurn gives one of the newest turns of a session, or "".
func (w *world) anyTurn(flow string, rng *source) string {
	turns := w.turns[flow]
	if len(turns) == 0 {
		return ""
	}
	return turns[len(turns)-1-rng.intn(min(3, len(turns)))]
}

// checkRead: a read shows all that was acknowledged before it was asked for.
func (o *op) checkRead(f *wire.Flow) {
	if f != nil && f.LastEvent.GetLsn() < o.floor && !o.c.w.p.liars {
		o.c.w.violate("reads", o.FlowID, "a read shows entries up to %d, %d was acknowledged before", f.LastEvent.GetLsn(), o.floor)
	}
}

// end finishes the operation. unsure: a copy of it may have done, or may yet
// do, what nobody hears of.
func (o *op) end(unsure bool) {
	o.over = true
	if unsure && !o.read {
		op := o.Op
		op.To, op.RunID, op.MessageID = 0, "", ""
		o.c.w.oracle.Sent(op)
		if o.first != nil {
			o.c.w.oracle.Sent(*o.first)
		}
	}
	o.c.op = nil
	o.c.w.after(o.c.rng.between(0, 1_000_000), o.c.next)
}
