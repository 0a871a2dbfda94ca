package sim

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// flowClient makes one request on flows after the other.
type flowClient struct {
	w    *world
	id   int
	rng  *source
	left int
	at   int // the machine that it asks
	busy bool
	sent int
}

// ask is one request over all its tries: a command, a read or a call.
type ask struct {
	c      *flowClient
	flow   string
	what   string
	safe   bool // may be tried again when nobody knows what became of it
	serve  func(n *node, reply func(outcome, *wire.Flow))
	done   func(o outcome, f *wire.Flow) // may be nil
	refuse func(unsure bool)             // refused, or given up; may be nil
	tries  int
	try    int
	maybe  bool
	copies int
}

func (w *world) startFlowClients() {
	for i := range w.p.flowClients {
		c := &flowClient{w: w, id: i, rng: w.rng.fork(), left: w.p.flowOps}
		w.flowClients = append(w.flowClients, c)
		w.after(c.rng.between(0, 100_000), c.next)
	}
}

// founder is a client that never gives up: it makes what must be there.
const founder = 99

func (w *world) setUpFlows() {
	c := &flowClient{w: w, id: founder, rng: w.rng.fork()}
	w.flowClients = append(w.flowClients, c)
	for i := range w.p.mailboxes {
		c.start(flowPrefix+nameOf("mail", i), typeMail, nil)
		c.start(flowPrefix+nameOf("entity", i), typeEntity, nil)
	}
}

func (c *flowClient) next() {
	if c.left--; c.left < 0 || c.w.calm {
		return
	}
	c.busy = true
	c.at = c.w.astray(c.rng, c.at)
	box := c.rng.intn(c.w.p.mailboxes)
	switch roll := c.rng.intn(100); {
	case roll < 26:
		c.w.started++
		typ := pick(c.rng, typeCount, typeCount, typeParent, typePay, typeKeyed, typeSaga, typeRace)
		id := flowPrefix + nameOf("f", c.w.started)
		c.w.strict = append(c.w.strict, id)
		c.start(id, typ, nil)
	case roll < 40:
		c.mail(flowPrefix + nameOf("mail", box))
	case roll < 52:
		c.add(flowPrefix + nameOf("entity", box))
	case roll < 58:
		c.get(flowPrefix + nameOf("entity", box))
	case roll < 61:
		id := flowPrefix + nameOf("entity", box)
		c.command(id, "sets an attribute", true, &wire.Entry{FlowId: id, Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{
			Attributes: []*wire.Attribute{attrInt("other", c.rng.intn(100))}}}}, nil)
	case roll < 65 && c.w.started > 0:
		id := flowPrefix + nameOf("f", 1+c.rng.intn(c.w.started))
		c.command(id, "pays", true, &wire.Entry{FlowId: id, Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: "payments", Payload: []byte(`"card"`), RequestId: c.key()}}}, nil)
	case roll < 68 && c.w.started > 0:
		c.read(flowPrefix + nameOf("f", 1+c.rng.intn(c.w.started)))
	default:
		c.disturb(flowPrefix + nameOf("x", c.rng.intn(2)))
	}
}

// key is a request ID of its own.
func (c *flowClient) key() string {
	c.sent++
	return fmt.Sprintf("q%d-%d", c.id, c.sent)
}

func (c *flowClient) start(id, typ string, change func(*wire.StartFlow)) {
	steps, attrs := firstSteps(typ, id, c.rng)
	s := &wire.StartFlow{Type: typ, Closes: true, Steps: steps, Attributes: attrs, RequestId: c.key(), Priority: uint32(c.rng.intn(3))}
	s.Quiet = c.rng.percent(15)
	if change != nil {
		change(s)
	}
	c.command(id, "starts "+typ, true, &wire.Entry{FlowId: id, Command: &wire.Entry_StartFlow{StartFlow: s}}, nil)
}

// mail publishes what the mailbox must keep.
func (c *flowClient) mail(id string) {
	p := &wire.Publish{Channel: "in", RequestId: c.key(), MaxPending: 50}
	p.Payload = []byte("letter " + p.RequestId)
	m := &letter{flow: id, text: string(p.Payload), from: c.w.instant()}
	c.command(id, "writes "+m.text, true, &wire.Entry{FlowId: id, Command: &wire.Entry_Publish{Publish: p}}, func(outcome) {
		m.to = c.w.instant()
		c.w.letters = append(c.w.letters, m)
	})
}

// letter is a message that was acknowledged.
type letter struct {
	flow, text string
	from, to   int64
}

// command proposes an entry; each copy is made anew, since the engine keeps what
// it takes.
func (c *flowClient) command(id, what string, safe bool, e *wire.Entry, acked func(outcome)) {
	a := &ask{c: c, flow: id, what: what, safe: safe}
	a.serve = func(n *node, reply func(outcome, *wire.Flow)) {
		n.flows.part(id).submit(request{flow: id, entry: e.CloneVT(), reply: func(o outcome) { reply(o, nil) }})
	}
	a.done = func(o outcome, _ *wire.Flow) {
		if acked != nil {
			acked(o)
		}
	}
	a.begin()
}

// read looks at a flow: it shows every event that was durable before.
func (c *flowClient) read(id string) {
	floor := c.w.model.LastLSN(id)
	a := &ask{c: c, flow: id, what: "reads", safe: true}
	a.serve = func(n *node, reply func(outcome, *wire.Flow)) {
		n.flows.part(id).submit(request{flow: id, read: func(f *wire.Flow, err error) { reply(outcome{err: err}, f) }})
	}
	a.done = func(_ outcome, f *wire.Flow) {
		if f == nil {
			return
		}
		if f.LastEvent.GetLsn() < floor && !c.w.p.liars {
			c.w.violate("reads", id, "a read shows events up to %d, %d was durable before", f.LastEvent.GetLsn(), floor)
		}
	}
	a.begin()
}

// add calls the transactional RPC that adds one.
func (c *flowClient) add(id string) {
	key := c.key()
	h := &counted{flow: id, add: true, client: c.id, call: c.w.instant()}
	c.w.counted = append(c.w.counted, h)
	a := &ask{c: c, flow: id, what: "adds", safe: true}
	a.serve = func(n *node, reply func(outcome, *wire.Flow)) { n.flows.locked(id, key, 0, reply) }
	a.done = func(o outcome, _ *wire.Flow) { h.answer(c.w, o.Output) }
	a.refuse = func(unsure bool) {
		if !unsure {
			h.never = true
		}
	}
	a.begin()
}

func (c *flowClient) get(id string) {
	h := &counted{flow: id, client: c.id, call: c.w.instant()}
	a := &ask{c: c, flow: id, what: "gets", safe: true}
	a.serve = func(n *node, reply func(outcome, *wire.Flow)) { n.flows.reading(id, reply) }
	a.done = func(o outcome, _ *wire.Flow) {
		h.answer(c.w, o.Output)
		c.w.counted = append(c.w.counted, h)
	}
	a.begin()
}

// counted is one operation on a counter.
type counted struct {
	flow      string
	client    int
	add       bool
	call, ret int64
	value     int
	known     bool // the answer came
	never     bool // it was refused, and has done nothing
}

func (h *counted) answer(w *world, out []byte) {
	n, err := strconv.Atoi(string(out))
	if err != nil {
		w.violate("calls", h.flow, "a call answered with %q", out)
	}
	h.ret, h.value, h.known = w.instant(), n, true
}

// maxConflicts bounds the tries of one locked call.
const maxConflicts = 20

// locked is the server's way of a transactional RPC: look, call a worker with
// what was seen, and write on the condition that nothing has changed.
func (f *flowNode) locked(id, key string, tries int, reply func(outcome, *wire.Flow)) {
	w := f.n.w
	f.look(id, func(fl *wire.Flow, lost error) {
		switch {
		case lost != nil:
			reply(outcome{err: lost}, nil)
			return
		case fl == nil:
			reply(outcome{err: &core.Error{Code: core.NotFound, Message: "no such flow"}}, nil)
			return
		}
		lsn, run := fl.AttributesLsn, fl.RunId
		t := &wire.RpcTask{FlowId: id[len(flowPrefix):], FlowType: fl.Type, RunId: run, Name: "add", Attributes: fl.Attributes, Locked: true}
		f.dispatch.Call(id, fl.Type, t, 0, func(r *wire.RpcResult, err error) {
			if err != nil {
				reply(outcome{err: partition.ErrOverloaded}, nil) // nothing was done
				return
			}
			u := r.Update
			u.Name, u.RequestId, u.RunId, u.IfAttributesLsn = "add", key, run, lsn
			if w.mutant.loseUpdates {
				u.IfAttributesLsn = 0
			}
			f.part(id).submit(request{flow: id, entry: &wire.Entry{FlowId: id, Command: &wire.Entry_Update{Update: u}}, reply: func(o outcome) {
				var refused *core.Error
				if errors.As(o.err, &refused) && refused.Code == core.Conflict {
					if w.fault("conflict"); tries < maxConflicts {
						f.locked(id, key, tries+1, reply)
						return
					}
					o.err = partition.ErrOverloaded
				}
				reply(o, nil)
			}})
		})
	})
}

// reading is the server's way of an RPC that reads: it answers when what it saw
// is durable, and the worker has answered.
func (f *flowNode) reading(id string, reply func(outcome, *wire.Flow)) {
	f.look(id, func(fl *wire.Flow, lost error) {
		if lost != nil || fl == nil {
			reply(outcome{err: cmpErr(lost)}, nil)
			return
		}
		t := &wire.RpcTask{FlowId: id[len(flowPrefix):], FlowType: fl.Type, RunId: fl.RunId, Name: "get", Attributes: fl.Attributes}
		f.dispatch.Call(id, fl.Type, t, 0, func(r *wire.RpcResult, err error) {
			if err != nil {
				reply(outcome{err: partition.ErrOverloaded}, nil)
				return
			}
			reply(outcome{Reply: core.Reply{Output: r.Update.Output}}, nil)
		})
	})
}

func cmpErr(lost error) error {
	if lost != nil {
		return lost
	}
	return &core.Error{Code: core.NotFound, Message: "no such flow"}
}

// look reads a flow, durably: half of the times by a view, of which only the copy
// made at once may be used.
func (f *flowNode) look(id string, fn func(*wire.Flow, error)) {
	f.part(id).submit(request{flow: id, read: fn, view: f.n.w.rng.percent(50)})
}

// disturb does to a flow whatever a client may do.
func (c *flowClient) disturb(id string) {
	e := &wire.Entry{FlowId: id}
	what, safe := "", true
	switch c.rng.intn(11) {
	case 0, 1, 2:
		typ := pick(c.rng, typeCount, typeMail, typeParent, typePay, typeKeyed, typeSaga, typeRace)
		c.start(id, typ, func(s *wire.StartFlow) {
			s.Reuse = wire.StartFlow_Reuse(c.rng.intn(5))
			s.RetentionUs = pick(c.rng, 0, 0, c.rng.between(300_000, 4_000_000))
			s.TimeoutUs = pick(c.rng, 0, 0, c.rng.between(50_000, 5_000_000))
			s.DelayUs = pick(c.rng, 0, 0, c.rng.between(1_000, 500_000))
		})
		return
	case 3, 4:
		what = "publishes"
		text := pick(c.rng, "end", "a", "b")
		e.Command = &wire.Entry_Publish{Publish: &wire.Publish{Channel: pick(c.rng, "in", "payments", "spare"), Payload: []byte(text), RequestId: c.key(), MaxPending: 20}}
	case 5:
		what = "stops"
		e.Command = &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_How(c.rng.intn(3)), Reason: "by a client", GraceUs: c.rng.between(1_000, 400_000)}}
	case 6:
		what = "deletes"
		e.Command = &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "by a client"}}
	case 7:
		what = "skips a timer of"
		e.Command = &wire.Entry_SkipTimer{SkipTimer: &wire.SkipTimer{}}
	case 8:
		what = "drops messages of"
		e.Command = &wire.Entry_DropMessages{DropMessages: &wire.DropMessages{Channel: pick(c.rng, "in", "spare", "spare")}}
	case 9:
		c.reset(id)
		return
	default:
		what, safe = "adds to", false
		if n := c.w.serving(nil); n != nil && n.disk.fired() == nil {
			n.flows.locked(id, c.key(), 0, func(outcome, *wire.Flow) {})
		}
		c.rest()
		return
	}
	c.command(id, what, safe, e, nil)
}

// reset goes back to the flow's first steps, with a state of its own making.
func (c *flowClient) reset(id string) {
	a := &ask{c: c, flow: id, what: "resets"}
	a.serve = func(n *node, reply func(outcome, *wire.Flow)) {
		f := n.flows
		f.look(id, func(fl *wire.Flow, err error) {
			if err != nil || fl == nil || !fl.Closes {
				reply(outcome{err: cmpErr(err)}, nil)
				return
			}
			steps, attrs := firstSteps(fl.Type, id, c.rng)
			e := &wire.Entry{FlowId: id, Command: &wire.Entry_Reset_{Reset_: &wire.Reset{Exec: 1, IfLastEvent: fl.LastEvent, Attributes: attrs, Steps: steps, Reason: "again"}}}
			f.part(id).submit(request{flow: id, entry: e, reply: func(o outcome) { reply(o, nil) }})
		})
	}
	a.begin()
}

func (a *ask) begin() {
	a.c.w.tell(a.flow, "client q%d %s", a.c.id, a.what)
	a.c.w.asks++
	a.send()
}

// send sends one try: a copy, two, or none arrives.
func (a *ask) send() {
	w := a.c.w
	a.tries++
	a.try = a.tries
	try := a.try
	if !w.calm && w.rng.percent(w.p.requestLost) {
		w.fault("request-lost")
	} else {
		a.copies++
		w.arriveAt(a.c.at, w.rng.between(50, 3_000), func(n *node) { a.arrive(n, try) })
	}
	if !w.calm && a.safe && w.rng.percent(w.p.requestTwice) {
		w.fault("request-twice")
		a.copies++
		w.arriveAt(a.c.at, w.rng.between(50, 1_000_000), func(n *node) { a.arrive(n, try) })
	}
	w.after(2*clientTimeoutUs, func() { a.answered(try, outcome{err: errTimeout}, nil) })
}

func (a *ask) arrive(n *node, try int) {
	w := a.c.w
	switch {
	case n == nil:
		a.reply(n, try, outcome{err: errDown}, nil)
		return
	case n.draining:
		a.reply(n, try, outcome{err: partition.ErrStopped}, nil)
		return
	case len(n.flows.part(a.flow).queue) >= w.p.queueBound:
		w.fault("overloaded")
		a.reply(n, try, outcome{err: partition.ErrOverloaded}, nil)
		return
	}
	a.serve(n, func(o outcome, f *wire.Flow) { a.reply(n, try, o, f) })
}

// reply sends an answer back, if the process still can.
func (a *ask) reply(n *node, try int, o outcome, f *wire.Flow) {
	w := a.c.w
	if n != nil && n.disk.fired() != nil {
		return
	}
	if !w.calm && w.rng.percent(w.p.answerLost) {
		w.fault("answer-lost")
		return
	}
	w.after(w.rng.between(50, 3_000), func() { a.answered(try, o, f) })
}

func (a *ask) answered(try int, o outcome, f *wire.Flow) {
	if try != a.try {
		return
	}
	a.try = 0
	w := a.c.w
	var refused *core.Error
	switch {
	case o.err == nil:
		w.tell(a.flow, "client q%d is answered: entry %d, run %s", a.c.id, o.lsn, o.RunID)
		if a.done != nil {
			a.done(o, f)
		}
		a.end()
	case errors.As(o.err, &refused):
		w.tell(a.flow, "client q%d is refused: %v", a.c.id, refused)
		a.giveUp(a.copies > 1 || a.maybe)
	default:
		sure := errors.Is(o.err, errDown) || errors.Is(o.err, partition.ErrOverloaded) || errors.Is(o.err, partition.ErrStopped)
		a.maybe = a.maybe || !sure
		if !a.safe && a.maybe || a.tries > 6 && !w.calm && a.c.id != founder {
			w.tell(a.flow, "client q%d gives up: %v", a.c.id, o.err)
			a.giveUp(a.maybe || a.copies > 0)
			return
		}
		a.c.at = w.elsewhere(a.c.rng, a.c.at)
		w.after(a.c.rng.between(20_000, 300_000), a.send)
	}
}

func (a *ask) giveUp(unsure bool) {
	if a.refuse != nil {
		a.refuse(unsure)
	}
	a.end()
}

func (a *ask) end() {
	a.c.w.asks--
	a.c.rest()
}

// rest goes on with the next request.
func (c *flowClient) rest() {
	c.busy = false
	c.w.after(c.rng.between(0, 150_000), c.next)
}
