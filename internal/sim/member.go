package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/stream"
)

// member is a process's place in the cluster: its lease and its candidacy, driven
// as cluster.Lease and cluster.Elect do.
type member struct {
	self   cluster.Active
	holder *cluster.Holder
	cand   *cluster.Candidate // nil until the lease is held
	looks  int                // the newest plan to look at the lease
	held   bool               // the lease was held once
	over   bool               // and is over, for good
	taking bool               // elected: the partitions are being taken over
	leave  bool               // releases everything, and ends
}

// valid is what the process takes for the truth about its lease.
func (n *node) valid() bool {
	return n.leased() || n.w.lying() && n.member.held
}

// lying: see params.liars.
func (w *world) lying() bool { return (w.p.liars || w.mutant.ignoreLease) && !w.calm }

// leased is cluster.Lease.Valid.
func (n *node) leased() bool {
	m := n.member
	if m.over {
		return false
	}
	until := m.holder.Until()
	if until > 0 && n.m.uptime() < until {
		m.held = true
		return true
	}
	m.over = m.held
	return false
}

// join begins a life as a member of the cluster: it takes its lease, stands by, and
// follows the partitions.
func (m *machine) join() {
	w := m.w
	n := &node{w: w, m: m, disk: m.disk, hub: stream.NewHub()}
	m.node = n
	err := n.prepare()
	if m.disk.fired() != nil {
		return // the event's end finds it dead
	}
	if err == nil {
		err = n.enter()
	}
	if err != nil {
		w.violate("recovery", "", "life %d of machine %d does not start: %v", m.lives, m.id, err)
		return
	}
	w.tell("", "machine %d: life %d is up", m.id, m.lives)
	for _, p := range n.parts {
		n.spawn(p.standBy)
	}
}

// enter begins the lease and the candidacy.
func (n *node) enter() error {
	w := n.w
	id, nonce, ms := fmt.Sprintf("n%d", n.m.id), fmt.Sprintf("%016x", w.rng.Uint64()), w.p.ttlUs/1000
	holder, err := cluster.NewHolder(cluster.Node{ID: id, Nonce: nonce, TTLms: ms}, n.m.uptime())
	if err != nil {
		return err
	}
	n.member = &member{self: cluster.Active{Node: id, Nonce: nonce, TTLms: ms}, holder: holder}
	for i := range w.p.partitions {
		n.parts = append(n.parts, &part{n: n, id: i, hist: w.hist[i]})
	}
	n.inLife(0, n.hold)
	return nil
}

// request makes a request of one of the machines of the cluster.
func (n *node) request(op cluster.Op, answer func(cluster.Answer)) {
	q := storeCall{kind: blob.KindGet, key: op.Key}
	if op.Data != nil {
		q = storeCall{kind: blob.KindPut, key: op.Key, data: op.Data, put: op.If}
	}
	asked := n.m.uptime()
	n.ask(q, func(got storeAnswer) {
		a := cluster.Answer{Data: got.obj.Data, Token: got.obj.Token, Err: got.err, Asked: asked, Now: n.m.uptime()}
		if !n.w.calm && n.w.rng.percent(1) { // stopped between the look at the clock and what follows
			n.freeze(n.w.rng.between(0, 2*n.w.p.ttlUs))
		}
		n.inLife(0, func() { answer(a) })
	})
}

// freeze stops the process: whatever it would do waits.
func (n *node) freeze(us int64) {
	n.w.fault("stopped")
	n.w.tell("", "machine %d is stopped for %d ms", n.m.id, us/1000)
	n.m.stoppedUs = max(n.m.stoppedUs, n.w.nowUs+us)
}

// lieUs is how often a process whose lease is over looks whether the lies are, too.
const lieUs = 100_000

// slowEndUs is how long a process may take to end that has lost its lease.
const slowEndUs = 600_000

// hold drives the lease. A process without its lease ends.
func (n *node) hold() {
	m := n.member
	op, ok := m.holder.Next(n.m.uptime())
	m.looks++
	look := m.looks
	switch {
	case m.holder.Over() != nil:
		if n.w.lying() && !m.leave {
			n.inLife(lieUs, n.hold)
			return
		}
		n.w.tell("", "machine %d: %v", n.m.id, m.holder.Over())
		n.inLife(n.w.rng.between(0, slowEndUs), func() { n.lost = true })
	case ok:
		n.request(op, func(a cluster.Answer) {
			m.holder.Answer(a)
			if m.cand == nil && n.valid() {
				n.candidate()
			}
			n.hold()
		})
	default:
		n.at(max(m.holder.Wake(), n.m.uptime()+time.Millisecond), func() {
			if m.looks == look {
				n.hold()
			}
		})
	}
}

// candidate begins to stand for election, as cluster.Elect does with a lease that is
// held: who was elected before would not know for how long that is true.
func (n *node) candidate() {
	cand, err := cluster.NewCandidate(n.member.self, n.m.uptime())
	if err != nil {
		n.w.violate("election", "", "machine %d: %v", n.m.id, err)
		return
	}
	n.member.cand = cand
	n.stand()
}

// stand drives the election.
func (n *node) stand() {
	m := n.member
	if active, elected := m.cand.Elected(); elected {
		if n.valid() {
			m.taking = true
			n.w.tell("", "machine %d is elected, term %d", n.m.id, active.Epoch)
			n.spawn(n.takeOver)
		}
		return
	}
	if err := m.cand.Over(); err != nil {
		n.w.violate("election", "", "machine %d: %v", n.m.id, err)
		return
	}
	op, ok := m.cand.Next(n.m.uptime())
	if !ok {
		n.at(max(m.cand.Wake(), n.m.uptime()+time.Millisecond), n.stand)
		return
	}
	n.request(op, func(a cluster.Answer) {
		m.cand.Answer(a)
		n.stand()
	})
}

// takeOver makes this node the owner of all partitions.
func (n *node) takeOver(c *routine) {
	w := n.w
	for _, p := range n.parts {
		for p.following && c.sleep(1_000) {
			continue
		}
		err := p.take(c)
		if n.dead {
			return
		}
		if err != nil {
			w.tell("", "machine %d: partition %d is not taken over: %v", n.m.id, p.id, err)
			w.fault("take-over-failed")
			if !p.fenced(err) && !errors.Is(err, cluster.ErrFenced) && !errors.Is(err, cluster.ErrLost) && !errors.Is(err, blob.ErrUnavailable) && !errors.Is(err, blob.ErrAmbiguous) {
				w.violate("recovery", "", "partition %d is not taken over by machine %d: %v", p.id, n.m.id, err)
			}
			n.lost = true
			return
		}
	}
	n.serving = true
	w.tell("", "machine %d serves", n.m.id)
	for _, p := range n.parts {
		p.kick()
	}
	n.flows.dispatch.Bind(n.flows)
	n.haunt()
}

// quit is an orderly end: nothing new, what is on its way is waited for, and the
// partitions and the lease are released.
func (n *node) quit(c *routine) {
	w := n.w
	for _, p := range n.parts {
		for p.far != nil && p.far.busy && c.sleep(1_000) {
			continue
		}
		if n.dead || p.far == nil {
			continue
		}
		if err := p.far.owned.Release(context.Background(), p.far.wr.NextSeq()); err != nil {
			p.troubled("release", err)
		}
	}
	if !n.dead {
		w.fault("release")
		n.member.leave = true
		n.member.holder.Release(n.m.uptime())
		n.hold()
	}
}
