package sim

import (
	"context"
	"errors"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
)

// farLog drives a Writer as objectlog.Log does; its requests are events.
type farLog struct {
	p      *part
	wr     *objectlog.Writer
	index  *objectlog.Index
	owned  *cluster.Owned
	head   uint64   // LSN
	doomed []uint64 // below the head, not deleted yet
	begun  []begun  // oldest first
	onRoom func()
	wakeAt time.Time // zero: nothing is planned
	starve bool      // MaxInFlight has said 0 since
	busy   bool      // a snapshot is on its way
}

type begun struct {
	frame journal.Frame
	done  func(error)
}

var _ partition.Far = (*farLog)(nil)

func (l *farLog) now() time.Time { return lifeClock{l.p.n}.Now() }

// MaxInFlight implements partition.Journal.
func (l *farLog) MaxInFlight() int {
	n, at := l.wr.Room(l.now())
	if n == 0 {
		l.starve = true
		l.wake(at)
	}
	return n
}

// NextSeq implements partition.Journal.
func (l *farLog) NextSeq() uint64 { return l.wr.NextSeq() }

// FirstLSN implements partition.Journal.
func (l *farLog) FirstLSN() uint64 { return l.head }

// Replay implements partition.Journal: the follower has had all.
func (l *farLog) Replay(uint64, func(journal.Frame) error) error { return nil }

// OnRoom implements partition.Far.
func (l *farLog) OnRoom(fn func()) { l.onRoom = fn }

// Begin implements partition.Far.
func (l *farLog) Begin(f journal.Frame, done func(error)) {
	f.Body = append([]byte(nil), f.Body...)
	if err := l.wr.Add(l.now(), f, journal.AppendFrame(nil, f)); err != nil {
		l.p.n.inLife(0, func() { done(err) })
		if !errors.Is(err, journal.ErrStale) {
			l.p.n.w.violate("journal", "", "partition %d: frame %d is not taken: %v", l.p.id, f.Seq, err)
		}
		return
	}
	l.begun = append(l.begun, begun{f, done})
	l.p.n.inLife(0, l.pump)
}

// pump does what the Writer asks for, and tells what it has decided.
func (l *farLog) pump() {
	for _, a := range l.wr.Actions() {
		q := storeCall{kind: blob.KindGet, key: a.Key}
		if a.Put {
			q = storeCall{kind: blob.KindPut, key: a.Key, data: a.Data, put: blob.PutOptions{IfNoneMatch: true}}
		}
		l.p.n.ask(q, func(got storeAnswer) {
			leased := l.p.n.valid() // after the answer
			if a.Put {
				l.wr.PutDone(l.now(), a.Seq, got.err, leased)
			} else {
				l.wr.GetDone(l.now(), a.Seq, got.obj.Data, got.err, leased)
			}
			l.pump()
		})
	}
	for _, f := range append([]objectlog.Finished(nil), l.wr.Finished()...) {
		b := l.begun[0]
		l.begun = l.begun[1:]
		if f.Err == nil {
			l.index.Add(f.Seq, f.FirstLSN, f.Count, len(f.Data))
			l.p.judge().acknowledged(b.frame)
		}
		b.done(f.Err)
	}
	if l.starve {
		if n, at := l.wr.Room(l.now()); n > 0 {
			l.starve = false
			l.onRoom()
		} else {
			l.wake(at)
		}
	}
	l.wake(l.wr.Wake())
}

// wake plans a look at what is due.
func (l *farLog) wake(at time.Time) {
	if at.IsZero() || !l.wakeAt.IsZero() && !at.Before(l.wakeAt) {
		return
	}
	l.wakeAt = at
	l.p.n.inLife(l.p.n.m.realUs(max(at.Sub(l.now()).Microseconds(), 0)+1), func() {
		if l.wakeAt.Equal(at) {
			l.wakeAt = time.Time{}
			l.wr.Tick(l.now(), l.p.n.valid())
			l.pump()
		}
	})
}

// trim gives up what a snapshot has: the head first, then the objects.
func (l *farLog) trim(c *routine, upTo uint64) {
	p, w := l.p, l.p.n.w
	next, _ := l.wr.Settled()
	seq, lsn := l.index.Head(upTo, next)
	if lsn > l.head {
		if err := l.owned.Advance(context.Background(), seq, lsn); err != nil {
			p.troubled("move the head", err)
			return
		}
		l.head = lsn
		l.doomed = append(l.doomed, l.index.Cut(seq)...)
	}
	w.tell("", "partition %d: the owner's log begins at entry %d, %d objects to delete", p.id, l.head, len(l.doomed))
	for len(l.doomed) > 0 && !p.n.dead {
		err := store{p.n}.Delete(context.Background(), objectlog.Key(p.judge().prefix, l.doomed[0]), blob.DeleteOptions{})
		if err != nil {
			p.troubled("delete", err)
			return // the next trim goes on
		}
		l.doomed = l.doomed[1:]
	}
}

// snapshotFar takes a snapshot into the store and trims the log, as the server does.
func (p *part) snapshotFar(c *routine) {
	l, w := p.far, p.n.w
	defer func() { l.busy = false }()
	m, err := p.tables.Snapshot(context.Background(), store{p.n}, snapshotPrefix(p.id), state.SnapshotOptions{Epoch: p.epoch, Valid: p.n.leased})
	if p.n.dead {
		return
	}
	if err != nil {
		p.troubled("snapshot", err)
		return
	}
	w.fault("snapshot")
	w.tell("", "partition %d: snapshot at entry %d", p.id, m.AppliedLSN)
	if m.AppliedLSN > p.judge().history().last() {
		w.violate("snapshot", "", "partition %d: holds entry %d, the store has %d", p.id, m.AppliedLSN, p.judge().history().last())
	}
	if w.mutant.trimFar {
		m.AppliedLSN += 3
	}
	l.trim(c, m.AppliedLSN)
}

// troubled tells of work on the store that failed; only the store, the end of the
// lease, or another owner may be the reason.
func (p *part) troubled(what string, err error) {
	if p.n.dead {
		return
	}
	p.n.w.tell("", "partition %d: cannot %s: %v", p.id, what, err)
	for _, fine := range []error{blob.ErrUnavailable, blob.ErrAmbiguous, state.ErrNotOwner} {
		if errors.Is(err, fine) {
			return
		}
	}
	if p.fenced(err) || !p.n.leased() { // a next owner may have deleted what was just written
		return
	}
	p.n.w.violate("upkeep", "", "partition %d: cannot %s: %v", p.id, what, err)
}

// fenced reports whether err says that another node owns the partition, or may own
// it, and whether that can be true.
func (p *part) fenced(err error) bool {
	switch {
	case errors.Is(err, objectlog.ErrLeaseOver):
		return !p.n.valid()
	case errors.Is(err, journal.ErrStale), errors.Is(err, cluster.ErrReleased):
		return p.judge().manifest.Epoch > p.epoch
	}
	return false
}

func (p *part) judge() *judge { return p.n.w.bucket.judges[p.id] }

// read drives a Reader until its end; apply is called for each frame.
func (c *routine) read(r *objectlog.Reader, apply func(journal.Frame) error) error {
	n := c.n
	now := func() time.Time { return lifeClock{n}.Now() }
	var got []func()
	for !n.dead {
		for _, a := range r.Actions() {
			q := storeCall{kind: blob.KindGet, key: a.Key}
			if a.Put {
				q = storeCall{kind: blob.KindPut, key: a.Key, data: a.Data, put: blob.PutOptions{IfNoneMatch: true}}
			}
			n.ask(q, func(s storeAnswer) {
				got = append(got, func() { tell(r, a, s, now(), n.valid()) })
				c.resume()
			})
		}
		if d, ok := r.Next(); ok {
			if n.w.mutant.skipFrames && n.w.rng.percent(2) {
				continue
			}
			if err := apply(d.Frame); err != nil {
				return err
			}
			continue
		}
		if r.Err() != nil || r.Done() {
			return r.Err()
		}
		if len(got) > 0 {
			todo := got
			got = nil
			for _, f := range todo {
				f()
			}
			continue
		}
		if at := r.Wake(); !at.IsZero() {
			n.inLife(n.m.realUs(max(at.Sub(now()).Microseconds(), 0)+1), func() {
				got = append(got, func() { r.Tick(now(), n.valid()) })
				c.resume()
			})
		}
		c.wait()
	}
	return errDead
}

func tell(r *objectlog.Reader, a objectlog.Action, s storeAnswer, now time.Time, leased bool) {
	if a.Put {
		r.PutDone(now, a.Seq, s.err, leased)
		return
	}
	var obj objectlog.Object
	if s.err == nil {
		obj, s.err = objectlog.ParseObject(s.obj.Data)
	}
	r.GetDone(now, a.Seq, obj, s.err, leased)
}
