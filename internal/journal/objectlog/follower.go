package objectlog

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// headEvery is how many calls of Next that find nothing bring one look at the
// manifest.
const headEvery = 4

// FollowerOptions say what to follow.
type FollowerOptions struct {
	Store            blob.Store
	Prefix           string
	HeadSeq, HeadLSN uint64 // where to begin: the manifest's head
	// Head reads the manifest's head.
	Head func(ctx context.Context) (seq, lsn uint64, err error)

	Clock env.Clock
	Go    func(func()) // starts a goroutine; nil: go
}

// Follower reads a log while another node writes it. For one caller at a time.
type Follower struct {
	o     FollowerOptions
	c     chain
	index *Index
	empty int // calls in a row that found nothing
	gets  atomic.Uint64
}

// NewFollower begins at the head given. The tables must hold all entries below
// HeadLSN; frames that they hold already are delivered again.
func NewFollower(o FollowerOptions) *Follower {
	if o.Go == nil {
		o.Go = func(f func()) { go f() }
	}
	return &Follower{o: o, c: chainAt(o.HeadSeq, o.HeadLSN), index: NewIndex(o.HeadLSN)}
}

// Next delivers the frames that have come, in order, and returns how many; 0
// when there are none, after one GET. fn's error ends it and is returned; that
// frame is delivered again by the next call. It does not wait for more: the
// caller decides how often to look.
//
// Errors: ErrTrimmed (the follower is of no use any more), ErrCorrupt and
// ErrTooNew (an *ObjectError), or the store's, after which it may be called
// again.
func (f *Follower) Next(ctx context.Context, fn func(journal.Frame) error) (int, error) {
	n, err := f.read(ctx, fn)
	var bad *ObjectError
	switch {
	case n > 0 && err == nil:
		f.empty = 0
		return n, nil
	case errors.As(err, &bad):
		// Below the head nothing holds any more: look there before the alarm.
		moved, herr := f.look(ctx)
		if herr != nil {
			return n, herr
		}
		if moved {
			return n, nil
		}
		return n, err
	case err != nil:
		return n, err
	}
	if f.empty++; f.empty%headEvery == 0 {
		_, err = f.look(ctx)
	}
	return 0, err
}

// read goes on from f.c to the first missing object. f.c moves with each
// delivery, so that nothing is lost by an error.
func (f *Follower) read(ctx context.Context, fn func(journal.Frame) error) (n int, err error) {
	r := NewReader(ReaderOptions{Prefix: f.o.Prefix, GiveUp: -1, from: &f.c})
	d := driver{store: f.o.Store, clock: f.o.Clock, start: f.o.Go, leased: func() bool { return true }, gets: &f.gets}
	err = d.run(ctx, r, func(d Delivered) error {
		if err := fn(d.Frame); err != nil {
			return err
		}
		n++
		f.delivered(d)
		return nil
	})
	if err == nil {
		f.c = r.c // over the seals at the end, too
	}
	return n, err
}

func (f *Follower) delivered(d Delivered) {
	fr := d.Frame
	f.c = chain{seq: fr.Seq + 1, lsn: fr.FirstLSN + uint64(fr.Count), after: fr.Seq + 1, started: true, epoch: fr.Epoch, nonce: fr.Nonce}
	f.index.Add(fr.Seq, fr.FirstLSN, fr.Count, d.Bytes)
}

// look reads the manifest's head and judges the follower's place by it: at or
// above the head everything that it has read is the log; below it may be gone,
// and leftovers may lie there.
func (f *Follower) look(ctx context.Context) (moved bool, err error) {
	seq, lsn, err := f.o.Head(ctx)
	if err != nil {
		return false, fmt.Errorf("objectlog: read the head of %s: %w", f.o.Prefix, err)
	}
	return f.HeadMoved(seq, lsn)
}

// HeadMoved tells the follower the manifest's head, which it also reads itself
// now and then. ErrTrimmed: it is beyond the follower's place. moved says that
// the place was corrected.
func (f *Follower) HeadMoved(seq, lsn uint64) (moved bool, err error) {
	f.index.Cut(seq)
	switch {
	case seq <= f.c.after:
		return false, nil
	case lsn != f.c.lsn:
		return false, fmt.Errorf("%w: the log of %s begins at LSN %d now, the follower is at %d", ErrTrimmed, f.o.Prefix, lsn, f.c.lsn)
	}
	moved = f.c.seq != seq
	f.c = chainAt(seq, lsn)
	f.index = NewIndex(lsn)
	return moved, nil
}

// Place is the sequence and the first LSN of what is to come.
func (f *Follower) Place() (seq, lsn uint64) { return f.c.seq, f.c.lsn }

// Gets counts the requests made.
func (f *Follower) Gets() uint64 { return f.gets.Load() }

// Known is what a follower has read of a log, so that the take-over that
// follows need not read it again.
type Known struct {
	c     chain
	index *Index
}

// Known gives a copy of what the follower knows, for Options.Known.
func (f *Follower) Known() *Known { return &Known{c: f.c, index: f.index.clone()} }

// from is the part of k below the first frame with an entry at or above lsn:
// where a reading may begin that need not deliver what is before. nil when k
// is of no use for a log that begins at head.
func (k *Known) from(head, lsn uint64) *Known {
	if k == nil || k.c.after < head {
		return nil
	}
	x := k.index.clone()
	x.Cut(head)
	seq, first, ok := x.holding(lsn)
	if !ok {
		return &Known{c: k.c, index: x}
	}
	x.cutFrom(seq, first)
	return &Known{c: chainAt(seq, first), index: x}
}
