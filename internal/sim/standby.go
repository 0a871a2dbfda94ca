package sim

import (
	"context"
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
)

// manifestEvery is how many looks of a standby that find nothing bring one at the
// manifest.
const manifestEvery = 4

// place is where a log goes on.
type place struct{ seq, lsn uint64 }

// standBy keeps the tables behind the owner's log until the process is elected.
func (p *part) standBy(c *routine) {
	p.following = true
	defer func() { p.following = false }()
	w, at, empty := p.n.w, place{}, 0
	for !p.n.dead && !p.n.member.taking {
		if at.seq == 0 || empty%manifestEvery == 0 {
			m, err := cluster.Read(context.Background(), store{p.n}, p.id)
			switch {
			case p.n.dead:
				return
			case errors.Is(err, blob.ErrNotFound):
				m.HeadSeq, m.HeadLSN = 1, 1
			case err != nil:
				c.sleep(w.rng.between(1_000, 100_000))
				continue
			}
			if p.reach(c, m.HeadLSN) != nil {
				c.sleep(w.rng.between(1_000, 100_000))
				continue
			}
			if m.HeadSeq > at.seq {
				at = place{m.HeadSeq, m.HeadLSN}
			}
		}
		if at, empty = p.follow(c, at, empty); !c.sleep(w.rng.between(20_000, 200_000)) {
			return
		}
	}
}

// follow applies what has come since the last look.
func (p *part) follow(c *routine, at place, empty int) (place, int) {
	r := objectlog.NewReader(objectlog.ReaderOptions{Prefix: p.judge().prefix, HeadSeq: at.seq, HeadLSN: at.lsn, GiveUp: -1})
	err := c.read(r, p.follower.Apply)
	if p.n.dead {
		return at, empty
	}
	var bad *objectlog.ObjectError
	if errors.As(err, &bad) && at.seq >= p.judge().manifest.HeadSeq {
		p.n.w.violate("follow", "", "partition %d: %v", p.id, err)
	}
	seq, lsn := r.Place()
	if seq == at.seq {
		return at, empty + 1
	}
	p.checkFollower()
	return place{seq, lsn}, 1
}

// checkFollower: a standby's tables are what the history says.
func (p *part) checkFollower() {
	w := p.n.w
	at := p.tables.AppliedLSN()
	if at > p.hist.last() {
		w.violate("follow", "", "partition %d: a standby is at entry %d, the store has %d", p.id, at, p.hist.last())
	}
	if w.broken == nil && w.rng.percent(3) {
		if diff := p.hist.upTo(at).differs(p.tables); diff != "" {
			w.violate("follow", "", "partition %d: a standby at entry %d: %s", p.id, at, diff)
		}
	}
}

// reach opens the tables so that the log goes on where they end: those of the disk,
// or the newest snapshot's.
func (p *part) reach(c *routine, head uint64) error {
	d, w := p.n.disk, p.n.w
	if p.tables == nil {
		if _, err := d.Stat(tablesDir(p.id)); err != nil {
			if err := p.restore(c, head); err != nil {
				return err
			}
		}
		if err := p.openTables(); err != nil {
			return err
		}
	}
	if p.follower.NextLSN() >= head {
		return nil
	}
	w.fault("standby-trimmed")
	w.tell("", "partition %d: machine %d is at entry %d, the log begins at %d: back to a snapshot", p.id, p.n.m.id, p.follower.NextLSN(), head)
	err := p.tables.Close()
	p.tables, p.follower, p.n.m.flushed[p.id] = nil, nil, 0
	if err == nil {
		err = d.RemoveAll(tablesDir(p.id))
	}
	if err == nil {
		err = syncDir(d, fmt.Sprintf("%s/p%03d", dataDir, p.id))
	}
	if err == nil {
		err = p.restore(c, head)
	}
	if err != nil {
		return err
	}
	return p.openTables()
}

// restore brings the newest snapshot onto the disk. There is one if the log does not
// begin at the first entry.
func (p *part) restore(c *routine, head uint64) error {
	w := p.n.w
	_, err := state.Restore(context.Background(), store{p.n}, snapshotPrefix(p.id), p.n.disk, tablesDir(p.id))
	switch {
	case p.n.dead:
		return errDead
	case errors.Is(err, state.ErrNoSnapshot) && head <= 1:
		return nil
	case err != nil && !errors.Is(err, blob.ErrUnavailable) && p.n.disk.fired() == nil:
		w.violate("restore", "", "partition %d: %v", p.id, err)
	case err == nil:
		w.fault("restored")
	}
	return err
}

func (p *part) openTables() (err error) {
	d := p.n.disk
	if p.tables, err = state.Open(tablesDir(p.id), stateOptions(d, p.n.shared)); err != nil {
		return err
	}
	p.follower = partition.Follow(p.config(silence{}))
	if d.fired() == nil {
		p.checkPrefix()
	}
	return nil
}

// take makes this node the owner of the partition.
func (p *part) take(c *routine) error {
	w, n := p.n.w, p.n
	window := 1 + w.rng.intn(w.p.window)
	owned, err := cluster.Take(context.Background(), store{p.n}, p.id, cluster.Claim{
		Node: n.member.self.Node, Window: window, Valid: n.valid, Rand: w.rng, Clock: sleeper{c}})
	if err != nil {
		return err
	}
	m := owned.Manifest()
	p.epoch, p.nonce = m.Epoch, w.rng.Uint64()
	p.judge().writers[p.nonce] = p
	if err := p.reach(c, m.HeadLSN); err != nil {
		return err
	}
	o := objectlog.Owner{Epoch: p.epoch, Nonce: p.nonce, Window: m.Window}
	ro := objectlog.ReaderOptions{Prefix: p.judge().prefix, HeadSeq: m.HeadSeq, HeadLSN: m.HeadLSN, Owner: &o, Rand: w.rng}
	if former := owned.Former(); former.Released {
		ro.Tail = former.TailSeq
	}
	r := objectlog.NewReader(ro)
	if err := c.read(r, p.follower.Apply); err != nil {
		return err
	}
	if err := owned.Confirm(context.Background()); err != nil {
		return err
	}
	if !n.valid() {
		return objectlog.ErrLeaseOver
	}
	seq, lsn := r.Place()
	if lsn != p.follower.NextLSN() {
		w.violate("recovery", "", "partition %d: the log goes on at entry %d, the tables at %d", p.id, lsn, p.follower.NextLSN())
	}
	p.far = &farLog{p: p, index: r.Index(), owned: owned, head: m.HeadLSN, wr: objectlog.NewWriter(objectlog.WriterOptions{
		Prefix: p.judge().prefix, Owner: o, Seq: seq, LSN: lsn, MaxInFlight: window, Rand: w.rng})}
	p.log = p.far
	p.far.OnRoom(p.kick)
	return p.own()
}

// own begins to work on a partition whose log was read to its end.
func (p *part) own() error {
	w := p.n.w
	p.checkPrefix()
	if at := p.tables.AppliedLSN(); w.broken == nil && at != p.hist.last() && p.judge().epoch == p.epoch {
		w.violate("recovery", "", "partition %d: epoch %d begins after entry %d, the store has %d", p.id, p.epoch, at, p.hist.last())
	}
	if w.broken != nil {
		return w.broken
	}
	p.pool = &pool{p: p, runs: map[attemptKey]*run{}}
	p.flows = newRouter(p)
	p.openLSN = p.tables.AppliedLSN()
	p.durable = p.openLSN
	m, rec, err := p.follower.TakeOver(p.config(p.flows))
	if err != nil {
		return err
	}
	p.m, p.follower = m, nil
	w.tell("", "partition %d: epoch %d, goes on after entry %d, %d steps handed out again, %d timers", p.id, p.epoch, p.openLSN, rec.Redispatched, rec.Timers)
	return nil
}
