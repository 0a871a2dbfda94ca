package cluster

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

// world is a simulation of nodes that want to be active, on one store. Its time is
// the real one, which no node knows.
type world struct {
	r      *rand.Rand
	now    time.Duration
	events events
	seq    int
	store  blob.Store
	nodes  []*node
	ttl    time.Duration
	calm   bool // no faults, for the rest of the run
	mutant mutant

	faults map[string]int
	terms  int
	broken error // two were active at once
}

// mutant is a bug that is planted to see that it is found.
type mutant struct {
	holder    func(h *Holder, before time.Duration, a Answer) // after Holder.Answer
	candidate func(c *Candidate, a *Answer)                   // before Candidate.Answer
	skew      float64                                         // how far apart clocks may run; 0: 1 %
	seed      uint64                                          // the first that finds it
	revive    bool                                            // a lost lease is taken again, by the same life
	early     bool                                            // a node stands before it has its lease
}

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	last := old[len(old)-1]
	*e = old[:len(old)-1]
	return last
}

func (w *world) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{w.now + max(d, 0), w.seq, do})
}

func (w *world) run(until time.Duration) {
	for w.broken == nil && len(w.events) > 0 && w.events[0].at <= until {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
	}
	w.now = until
}

func (w *world) chance(percent int) bool { return w.r.IntN(100) < percent }

// upTo is a duration below d.
func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.r.Int64N(int64(d))) }

// node is a machine, with a process that lives, is stopped, or is dead.
type node struct {
	w      *world
	id     string
	origin time.Duration // of its clock
	rate   float64       // of its clock
	cut    time.Duration // from the store, until then

	life    int // counts the processes
	up      bool
	stopped time.Duration // until then
	holder  *Holder
	cand    *Candidate
	stands  bool // the candidate runs
}

func (n *node) boot() time.Duration { return n.bootAt(n.w.now) }

func (n *node) bootAt(t time.Duration) time.Duration {
	return n.origin + time.Duration(float64(t)*n.rate)
}

// real is when the node's clock shows b.
func (n *node) real(b time.Duration) time.Duration {
	return time.Duration(float64(b-n.origin) / n.rate)
}

// inProcess runs f in the process that lives now, when it is not stopped.
func (n *node) inProcess(d time.Duration, f func()) {
	life := n.life
	var run func()
	run = func() {
		switch {
		case n.life != life || !n.up:
		case n.stopped > n.w.now:
			n.w.after(n.stopped-n.w.now, run)
		default:
			f()
		}
	}
	n.w.after(d, run)
}

func (n *node) start() {
	if n.up {
		return
	}
	n.up, n.life = true, n.life+1
	nonce, ms := fmt.Sprintf("%016x", n.w.r.Uint64()), n.w.ttl.Milliseconds()
	var err, err2 error
	n.holder, err = NewHolder(Node{ID: n.id, Nonce: nonce, TTLms: ms}, n.boot())
	n.cand, err2 = NewCandidate(Active{Node: n.id, Nonce: nonce, TTLms: ms}, n.boot())
	if err := errors.Join(err, err2); err != nil {
		panic(err)
	}
	n.stands = n.w.mutant.early
	n.inProcess(0, n.hold)
	if n.stands {
		n.inProcess(0, n.stand)
	}
}

func (n *node) die() { n.up = false }

// validUntil is the real instant until which this node takes itself for the active
// one, also while it is stopped.
func (n *node) validUntil() time.Duration {
	if !n.up || n.holder.Until() == 0 {
		return 0
	}
	if _, elected := n.cand.Elected(); !elected {
		return 0
	}
	return n.real(n.holder.Until())
}

// check is called when a node may have become active, or active for longer.
func (n *node) check() {
	if n.validUntil() <= n.w.now {
		return
	}
	for _, other := range n.w.nodes {
		if other != n && other.validUntil() > n.w.now {
			n.w.broken = fmt.Errorf("at %v: %s is active until %v and %s until %v", n.w.now, n.id, n.validUntil(), other.id, other.validUntil())
		}
	}
}

// hold drives the lease, stand the election, as the shells do.
func (n *node) hold() {
	op, ok := n.holder.Next(n.boot())
	if n.w.mutant.revive && errors.Is(n.holder.over, ErrLost) {
		n.holder.over, n.holder.until, n.holder.reading, n.holder.due = nil, 0, true, n.boot()
	}
	switch {
	case n.holder.Over() != nil:
		n.die() // a server without its lease ends, and is started again
		n.w.after(n.w.upTo(n.w.ttl), n.start)
	case ok:
		n.request(op, func(a Answer) {
			before := n.holder.Until()
			n.holder.Answer(a)
			if n.w.mutant.holder != nil {
				n.w.mutant.holder(n.holder, before, a)
			}
			n.check()
			if n.holder.Until() > 0 && !n.stands {
				n.stands = true
				n.inProcess(0, n.stand)
			}
			n.hold()
		})
	case !n.holder.busy:
		n.inProcess(n.real(n.holder.Wake())-n.w.now+1, n.hold)
	}
}

func (n *node) stand() {
	if _, elected := n.cand.Elected(); elected {
		n.w.terms++
		return
	}
	op, ok := n.cand.Next(n.boot())
	if !ok {
		n.inProcess(n.real(n.cand.Wake())-n.w.now+1, n.stand)
		return
	}
	n.request(op, func(a Answer) {
		if n.w.mutant.candidate != nil {
			n.w.mutant.candidate(n.cand, &a)
		}
		n.cand.Answer(a)
		n.check()
		n.stand()
	})
}

// request makes a request: it reaches the store after a while, even if the process
// is stopped or dead by then, and the answer comes back after another while, or
// is given up.
func (n *node) request(op Op, answer func(Answer)) {
	w, life := n.w, n.life
	a := Answer{Asked: n.boot()}
	deliver := func(got Answer) {
		got.Asked = a.Asked
		if answer == nil || n.life != life {
			return
		}
		f := answer
		answer = nil
		n.inProcess(0, func() {
			got.Now = n.boot()
			if !w.calm && w.chance(1) { // stopped between reading the clock and going on
				n.stop(w.upTo(2 * w.ttl))
			}
			n.inProcess(0, func() { f(got) })
		})
	}
	there, back := w.latency(), w.latency()
	w.after(there, func() {
		got := w.apply(n, op)
		w.after(back, func() { deliver(got) })
	})
	w.after(n.w.ttl/timeoutShare, func() {
		err := blob.ErrAmbiguous
		if op.Data == nil {
			err = blob.ErrUnavailable
		}
		deliver(Answer{Err: err})
	})
}

func (w *world) latency() time.Duration {
	if !w.calm && w.chance(3) {
		return w.upTo(w.ttl)
	}
	return time.Millisecond + w.upTo(20*time.Millisecond)
}

func (w *world) apply(n *node, op Op) Answer {
	ctx := context.Background()
	switch {
	case n.cut > w.now && op.Data == nil:
		return Answer{Err: blob.ErrUnavailable}
	case n.cut > w.now:
		return Answer{Err: blob.ErrAmbiguous}
	case op.Data == nil:
		obj, err := w.store.Get(ctx, op.Key)
		return Answer{Data: obj.Data, Token: obj.Token, Err: err}
	}
	token, err := w.store.Put(ctx, op.Key, op.Data, op.If)
	return Answer{Token: token, Err: err}
}

func (n *node) giveUp() {
	n.holder.Release(n.boot())
	n.hold()
}

func (n *node) stop(d time.Duration) { n.stopped = max(n.stopped, n.w.now+d) }

// fault breaks something and comes again.
func (w *world) fault() {
	if w.calm {
		return
	}
	n := w.nodes[w.r.IntN(len(w.nodes))]
	long := w.upTo(3 * w.ttl)
	switch w.r.IntN(5) {
	case 0:
		w.faults["stop"]++
		n.stop(long)
	case 1:
		w.faults["cut"]++
		n.cut = w.now + long
	case 2:
		w.faults["kill"]++
		n.die()
		w.after(w.upTo(w.ttl), n.start)
	case 3:
		if n.up && n.stopped <= w.now {
			w.faults["release"]++
			n.giveUp()
		}
	case 4:
		w.faults["outage"]++
		for _, n := range w.nodes {
			n.cut = w.now + long/2
		}
	}
	w.after(w.upTo(4*w.ttl), w.fault)
}

func newWorld(seed uint64, m mutant) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 1)), mutant: m, faults: map[string]int{}}
	w.ttl = []time.Duration{time.Second, 3 * time.Second, 10 * time.Second}[seed%3]
	rates := blob.Rates{Refused: 1, Lost: 1, AnswerLost: 1, Late: 1}
	decide := blob.Seeded(w.r, rates)
	w.store = blob.NewFaulty(mem.New(mem.Options{}), func(op blob.Op) blob.Fault {
		if w.calm {
			return blob.Fault{}
		}
		return decide(op)
	}, blob.FaultHooks{Later: func(write func()) { w.after(w.upTo(2*w.ttl), write) }})
	skew := m.skew
	if skew == 0 {
		skew = 0.01
	}
	for i := range 3 {
		n := &node{w: w, id: fmt.Sprintf("n%d", i), origin: w.upTo(1000 * time.Hour), rate: 1 + skew*(w.r.Float64()-0.5)}
		w.nodes = append(w.nodes, n)
		w.after(w.upTo(w.ttl), n.start)
	}
	return w
}

// active is the node that takes itself for the active one.
func (w *world) active() *node {
	for _, n := range w.nodes {
		if n.validUntil() > w.now {
			return n
		}
	}
	return nil
}

// slack is what requests and clocks add to a take-over in calm.
const slack = 200 * time.Millisecond

// follows checks that another life than this one of gone is active within d.
func (w *world) follows(gone *node, d time.Duration) error {
	end, life := w.now+d, gone.life
	for w.now < end {
		w.run(min(end, w.now+10*time.Millisecond))
		if a := w.active(); a != nil && (a != gone || a.life != life) {
			return w.broken
		}
	}
	return errors.Join(w.broken, fmt.Errorf("at %v: nobody followed %s within %v", w.now, gone.id, d))
}

// simulate runs one seed: faults first, then calm, in which the active node dies
// and the next one gives up.
func simulate(seed uint64, m mutant) (*world, error) {
	w := newWorld(seed, m)
	w.after(w.upTo(w.ttl), w.fault)
	w.run(40 * w.ttl)
	if w.broken != nil {
		return w, w.broken
	}
	w.calm = true
	w.run(w.now + 12*w.ttl) // the last faults end
	first := w.active()
	if first == nil {
		return w, fmt.Errorf("at %v: nobody is active in calm", w.now)
	}
	first.die()
	poll := max(minPoll, w.ttl/pollShare)
	if err := w.follows(first, w.ttl+margin(w.ttl)+poll+slack+w.ttl/100); err != nil {
		return w, err
	}
	second := w.active()
	second.giveUp()
	if err := w.follows(second, poll+slack); err != nil {
		return w, fmt.Errorf("after a release: %w", err)
	}
	return w, nil
}

func TestNeverTwoActiveNodesAndAlwaysASuccessor(t *testing.T) {
	seeds := uint64(150)
	if testing.Short() {
		seeds = 30
	}
	faults, terms := map[string]int{}, 0
	for seed := range seeds {
		w, err := simulate(seed, mutant{})
		if err != nil {
			t.Fatalf("seed %d, TTL %v: %v", seed, w.ttl, err)
		}
		for k, n := range w.faults {
			faults[k] += n
		}
		terms += w.terms
	}
	if terms < int(seeds)*8 {
		t.Errorf("only %d terms", terms)
	}
	t.Logf("%d terms, faults %v", terms, faults)
}

// TestTheCheckerCanFail plants bugs, each of which must be found. The seeds only
// keep the search short; it goes on from them.
func TestTheCheckerCanFail(t *testing.T) {
	extended := func(h *Holder, before time.Duration) bool { return h.over == nil && h.until > before }
	for name, m := range map[string]mutant{
		"no margins": {
			seed: 347,
			holder: func(h *Holder, before time.Duration, a Answer) {
				if extended(h, before) {
					h.until += margin(h.self.TTL())
				}
			},
			candidate: func(c *Candidate, _ *Answer) {
				if c.sight != nil {
					c.sight.ttl = c.cur.ttl() * marginShare / (marginShare + 1)
				}
			},
		},
		"counted from the answer": {seed: 270, holder: func(h *Holder, before time.Duration, a Answer) {
			if extended(h, before) {
				h.until = a.Now + h.self.TTL() - margin(h.self.TTL())
			}
		}},
		"a lapsed lease is renewed":        {revive: true},
		"an expiry judged from the answer": {seed: 289, candidate: func(_ *Candidate, a *Answer) { a.Asked = a.Now }},
		"clocks that are wrong by half":    {seed: 4, skew: 0.5},
		"standing before having the lease": {seed: 206, early: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := m.seed; seed < m.seed+500; seed++ {
				if w, _ := simulate(seed, m); w.broken != nil {
					t.Logf("seed %d, %v", seed, w.broken)
					return
				}
			}
			t.Error("not found")
		})
	}
}
