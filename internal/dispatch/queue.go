package dispatch

import (
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

const priorities = core.MaxPriority + 1

// queue is the steps of a lane that wait for a worker. Guarded by t.mu.
type queue struct {
	ready    [priorities]list[entry] // oldest first; a key's token stands for its waiting steps
	nReady   int
	keys     map[string]*key
	parked   list[entry] // no connected worker knows their step
	arrivals list[entry] // all of them, by arrival
	counts   [priorities]int
	hungry   int // place in t.hungry, from 1; 0 = not in it
}

// entry is one step that waits, or the token of a key.
type entry struct {
	l        *lane
	flowID   string
	id       string // without the tenant
	step     string
	exec     uint64
	priority int
	sinceUs  int64 // of Dispatcher.now
	atUs     int64 // wall time, for people
	keyName  string
	keyLimit uint32
	key      *key // while it waits in one, or holds it
	token    bool
	holds    bool // counted in key.held

	proposed bool // its start is
	marked   bool // a slot is reserved for its start, and nobody claimed it
	sibling  *entry

	place   elem[entry] // in ready, key.waiting or parked
	arrival elem[entry]
}

// key bounds how many steps of one concurrency key run at a time.
type key struct {
	name    string
	limit   int
	held    int // steps that run, or whose start is proposed
	waiting [priorities]list[entry]
	n       int // of waiting
	token   entry
}

// keyOf gives the lane's key, made when it is new.
func (l *lane) keyOf(name string, limit uint32) *key {
	if name == "" {
		return nil
	}
	k := l.keys[name]
	if k == nil {
		if l.keys == nil {
			l.keys = map[string]*key{}
		}
		k = &key{name: name}
		k.token = entry{l: l, key: k, token: true}
		l.keys[name] = k
	}
	k.limit = max(int(limit), 1) // the newest step's limit counts
	return k
}

// free ends one hold of a key.
func (l *lane) free(k *key) {
	k.held--
	l.retoken(k)
	if k.held == 0 && k.n == 0 {
		delete(l.keys, k.name)
	}
}

// retoken puts the key's token where its first waiting step belongs, or away
// when none may start.
func (l *lane) retoken(k *key) {
	want := -1
	if k.held < k.limit && k.n > 0 {
		for p := priorities - 1; p >= 0; p-- {
			if k.waiting[p].n > 0 {
				want = p
				break
			}
		}
	}
	if k.token.place.in != nil {
		if k.token.priority == want {
			return
		}
		l.unready(&k.token)
	}
	if want >= 0 {
		k.token.priority = want
		l.makeReady(&k.token, false)
	}
}

func (l *lane) makeReady(e *entry, front bool) {
	if front {
		l.ready[e.priority].pushFront(&e.place, e)
	} else {
		l.ready[e.priority].push(&e.place, e)
	}
	l.nReady++
	l.t.startable.Add(1)
	if l.hungry == 0 {
		l.t.hungry = append(l.t.hungry, l)
		l.hungry = len(l.t.hungry)
	}
}

func (l *lane) unready(e *entry) {
	e.place.leave()
	l.nReady--
	l.t.startable.Add(-1)
	if l.nReady == 0 {
		t := l.t
		last := len(t.hungry) - 1
		t.hungry[l.hungry-1] = t.hungry[last]
		t.hungry[l.hungry-1].hungry = l.hungry
		t.hungry[last] = nil
		t.hungry = t.hungry[:last]
		l.hungry = 0
	}
}

// enqueue lets an entry wait for its turn.
func (l *lane) enqueue(e *entry, front bool) {
	if !e.holds {
		e.key = l.keyOf(e.keyName, e.keyLimit)
	}
	if e.key == nil || e.holds {
		l.makeReady(e, front)
		return
	}
	if front {
		e.key.waiting[e.priority].pushFront(&e.place, e)
	} else {
		e.key.waiting[e.priority].push(&e.place, e)
	}
	e.key.n++
	l.retoken(e.key)
}

// dequeue takes an entry from where it waits; nothing when it is proposed.
func (l *lane) dequeue(e *entry) {
	switch {
	case e.place.in == nil:
	case e.place.in == &l.parked:
		e.place.leave()
	case e.key == nil || e.holds:
		l.unready(e)
	default:
		e.place.leave()
		e.key.n--
		l.retoken(e.key)
	}
}

// next takes the first entry of the highest priority whose step a worker knows,
// with its key; nil when there is none.
func (l *lane) next() *entry {
	for p := priorities - 1; p >= 0; {
		e := l.ready[p].first()
		if e == nil {
			p--
			continue
		}
		l.unready(e)
		if e.token {
			k := e.key
			e = k.waiting[p].first()
			e.place.leave()
			k.n--
			k.held++
			e.holds = true
			l.retoken(k)
		}
		if l.declares(e.step) {
			return e
		}
		if e.holds {
			e.holds = false
			l.free(e.key)
		}
		e.key = nil
		l.parked.push(&e.place, e)
	}
	return nil
}

// unpark lets those wait in turn whose step a worker knows by now.
func (l *lane) unpark() {
	for x := l.parked.head; x != nil; {
		e := x.of
		x = x.next
		if l.declares(e.step) {
			e.place.leave()
			l.enqueue(e, false)
		}
	}
}

// remember makes e one of the tenant's queued steps.
func (t *tenant) remember(e *entry) {
	e.sibling = t.queued[e.id]
	t.queued[e.id] = e
	e.l.arrivals.push(&e.arrival, e)
	e.l.counts[e.priority]++
}

// waitingFor gives the queued step of a flow.
func (t *tenant) waitingFor(id string, exec uint64) *entry {
	for e := t.queued[id]; e != nil; e = e.sibling {
		if e.exec == exec {
			return e
		}
	}
	return nil
}

// dropEntry ends an entry; its hold of a key goes to the caller, or is freed.
func (t *tenant) dropEntry(e *entry, keepKey bool) {
	e.l.dequeue(e)
	e.arrival.leave()
	e.l.counts[e.priority]--
	t.unmark(e)
	if k := e.key; k != nil {
		switch {
		case e.holds && !keepKey:
			e.l.free(k)
		case !e.holds && k.held == 0 && k.n == 0:
			delete(e.l.keys, k.name)
		}
	}
	e.proposed = false
	if head := t.queued[e.id]; head == e {
		if e.sibling == nil {
			delete(t.queued, e.id)
		} else {
			t.queued[e.id] = e.sibling
		}
	} else {
		for ; head != nil; head = head.sibling {
			if head.sibling == e {
				head.sibling = e.sibling
				break
			}
		}
	}
	e.sibling = nil
}

// start takes up to n steps whose start is to be proposed, a slot reserved for
// each; the lanes take turns. more says that n was the bound.
func (t *tenant) start(n int, into []*entry) (_ []*entry, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for misses := 0; misses < len(t.hungry); {
		if len(into) >= n {
			return into, true
		}
		l := t.hungry[t.turn%len(t.hungry)]
		t.turn++
		if e := l.startOne(); e != nil {
			into, misses = append(into, e), 0
		} else {
			misses++
		}
	}
	return into, false
}

// startOne takes one step. While results are on their way whose flows may go on
// with a step, credits are kept for those: a flow that was begun is finished
// sooner, and its next start costs no entry of its own. Each fifth credit goes
// to the queue all the same.
func (l *lane) startOne() *entry {
	if len(l.canTask.all) == 0 || l.t.d.draining.Load() {
		return nil
	}
	short := l.arriving > 0 && l.spare(l.arriving+1) <= l.arriving
	if short && l.inline < inlineShare {
		return nil
	}
	e := l.next()
	if e == nil {
		return nil
	}
	if short {
		l.inline = 0
	}
	l.reserve(l.choose(e.id))
	e.marked, e.proposed = true, true
	l.t.marked++
	return e
}

// proposeStart asks the partition to start a queued step.
func (d *Dispatcher) proposeStart(e *entry) {
	cmd := &wire.Entry{FlowId: e.flowID, Command: &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: e.exec}}}
	err := d.submit(e.flowID, partition.Proposal{Entry: cmd, Reply: e.replied})
	if err != nil {
		e.answered(busy, true)
	}
}

// replied takes what became of a start. The step was dispatched before, unless
// it was refused, or its slot went to another step of its flow.
func (e *entry) replied(_ core.Reply, err error) { e.answered(judge(err), false) }

// answered ends a proposal; with pause the partition had no room for it.
func (e *entry) answered(v verdict, pause bool) {
	t := e.l.t
	t.mu.Lock()
	if t.waitingFor(e.id, e.exec) == e {
		if v == accepted || v == busy {
			t.unmark(e)
			e.proposed = false
			e.l.enqueue(e, true)
		} else {
			t.dropEntry(e, false)
		}
	}
	t.mu.Unlock()
	t.d.sched.answered(t.d, t, pause)
}

// unmark gives the slot of a proposed start back, unless it was claimed.
func (t *tenant) unmark(e *entry) {
	if e.marked {
		e.marked = false
		t.marked--
		e.l.giveBack()
	}
}
