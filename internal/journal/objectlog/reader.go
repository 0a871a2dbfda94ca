package objectlog

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

const (
	// maxAhead is how many objects are asked for, or wait to be delivered, at
	// once: 10,000 frames at 50 ms each take 4 s. aheadBytes bounds what they
	// weigh, going by the sizes seen so far.
	maxAhead   = 128
	aheadBytes = 32 << 20
	// maxSealRounds is how often a seal may be refused where nothing is found.
	maxSealRounds = 8
)

// ReaderOptions say what to read.
type ReaderOptions struct {
	Prefix           string
	HeadSeq, HeadLSN uint64 // where to begin
	// Owner takes the log over at its end: the seal is put. nil only reads.
	Owner *Owner
	// Known spares reading again what a follower has read, as far as FromLSN, the
	// first entry that is still needed, allows. nil: nothing is known.
	Known   *Known
	FromLSN uint64
	// Tail is where the log probably ends: nothing is asked for there, but the
	// seal is put at once. 0: not known.
	Tail uint64
	// Stop ends the reading before this sequence; 0 reads until one is missing.
	Stop uint64
	// GiveUp is how long a failing request is tried again. Default DefaultGiveUp;
	// negative: not at all.
	GiveUp time.Duration
	Rand   env.Rand // jitter; nil: none

	from *chain // begin here instead
}

// Delivered is a frame of the log, in order.
type Delivered struct {
	Frame journal.Frame
	Bytes int
}

// Reader reads a log forward, with several requests at once, and takes it over
// if it has an owner. It is a state machine: the caller does the Actions,
// tells their answers, takes the frames with Next, and looks again (Tick) at
// Wake. Not safe for concurrent use.
type Reader struct {
	o     ReaderOptions
	c     chain
	index *Index

	slots map[uint64]*slot // from c.seq on; at most maxAhead
	ahead int              // how many at once, grows while objects are found
	size  int              // of objects seen lately, the larger ones

	ready   []Delivered // at most maxAhead
	actions []Action
	end     bool // the object at c.seq is missing, or Stop is reached
	done    bool
	err     error

	seal sealing
}

type slot struct {
	state slotState
	obj   Object
	tries int
	first time.Time // of the first failure
	again time.Time
}

type slotState uint8

const (
	asked slotState = iota
	waiting
	found
	missing
)

// NewReader begins to read: Actions has the first requests.
func NewReader(o ReaderOptions) *Reader {
	if o.GiveUp == 0 {
		o.GiveUp = DefaultGiveUp
	}
	r := &Reader{o: o, c: chainAt(o.HeadSeq, o.HeadLSN), slots: map[uint64]*slot{}, ahead: 1}
	if o.from != nil {
		r.c = *o.from
	}
	r.index = NewIndex(r.c.lsn)
	if k := o.Known.from(o.HeadSeq, o.FromLSN); k != nil {
		r.c, r.index = k.c, k.index
	}
	r.advance()
	return r
}

// Actions gives the requests to make now, each once.
func (r *Reader) Actions() []Action {
	a := r.actions
	r.actions = nil
	return a
}

// Next gives the next frame.
func (r *Reader) Next() (Delivered, bool) {
	if len(r.ready) == 0 {
		return Delivered{}, false
	}
	d := r.ready[0]
	r.ready[0] = Delivered{}
	r.ready = r.ready[1:]
	if r.err == nil && !r.end {
		r.ask()
	}
	return d, true
}

// Err is why it can not go on; frames that were read before may wait still.
// It matches ErrFenced, ErrLeaseOver, ErrCorrupt or ErrTooNew (an
// *ObjectError), or is the store's.
func (r *Reader) Err() error { return r.err }

// Done says that the end is reached (and sealed, if there is an owner); frames
// may wait still.
func (r *Reader) Done() bool { return r.done && r.err == nil }

// Place is where the log goes on: the sequence of the next object and the LSN
// of the next entry. For an owner that is Done: where it writes.
func (r *Reader) Place() (seq, lsn uint64) { return r.c.seq, r.c.lsn }

// Index is of all frames from the head on; the reader goes on filling it until
// it is Done.
func (r *Reader) Index() *Index { return r.index }

// Wake is when to Tick; zero if there is nothing to wait for but answers.
func (r *Reader) Wake() time.Time {
	if r.err != nil {
		return time.Time{}
	}
	at := r.seal.again
	for seq := r.c.seq; seq < r.c.seq+maxAhead; seq++ {
		if s := r.slots[seq]; s != nil && s.state == waiting {
			at = soonest(at, s.again)
		}
	}
	return at
}

// Tick repeats what failed and is due. leased says whether the owner's lease
// is valid (true without one).
func (r *Reader) Tick(now time.Time, leased bool) {
	if r.err != nil || r.done {
		return
	}
	for seq := r.c.seq; seq < r.c.seq+maxAhead; seq++ {
		if s := r.slots[seq]; s != nil && s.state == waiting && !now.Before(s.again) {
			if !leased {
				r.fail(fmt.Errorf("%w while the log was being read", ErrLeaseOver))
				return
			}
			s.state = asked
			r.get(seq)
		}
	}
	r.tickSeal(now, leased)
}

// GetDone tells the answer to a Get: the object, or the error of the store or
// of ParseObject.
func (r *Reader) GetDone(now time.Time, seq uint64, obj Object, err error, leased bool) {
	s := r.slots[seq]
	if s == nil || s.state != asked || r.err != nil {
		return // jumped over meanwhile
	}
	switch {
	case err == nil:
		s.state, s.obj = found, obj
		r.size = max(obj.Bytes, r.size-r.size/8)
	case errors.Is(err, blob.ErrNotFound):
		s.state = missing
	case errors.Is(err, ErrCorrupt), errors.Is(err, ErrTooNew), errors.Is(err, blob.ErrCorrupt):
		if errors.Is(err, blob.ErrCorrupt) {
			err = fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		s.state, s.obj = found, Object{fault: err} // of interest only if the chain gets there
	default:
		if r.again(now, &s.tries, &s.first, &s.again, err, leased) {
			s.state = waiting
		}
	}
	r.advance()
}

// again plans a repetition; false after giving up.
func (r *Reader) again(now time.Time, tries *int, first, at *time.Time, err error, leased bool) bool {
	if *tries == 0 {
		*first = now
	}
	*tries++
	switch {
	case !leased:
		r.fail(fmt.Errorf("%w; the store's last answer: %w", ErrLeaseOver, err))
	case errors.Is(err, blob.ErrInvalid), now.Sub(*first) >= r.o.GiveUp:
		r.fail(fmt.Errorf("objectlog: partition at %s: the store failed %d times: %w", r.o.Prefix, *tries, err))
	default:
		*at = now.Add(backoff(*tries+1, r.o.Rand))
		return true
	}
	return false
}

// advance goes over the objects that are there, in order, and asks for more.
func (r *Reader) advance() {
	for r.err == nil && !r.done {
		if r.o.Stop != 0 && r.c.seq >= r.o.Stop {
			r.atEnd()
			return
		}
		if r.o.Owner != nil && r.c.seq == r.o.Tail {
			r.o.Tail = 0
			r.atEnd()
			return
		}
		s := r.slots[r.c.seq]
		if s == nil || s.state == asked || s.state == waiting {
			break
		}
		if s.state == missing {
			r.atEnd()
			return
		}
		r.over(&s.obj)
	}
	if r.err == nil && !r.done && !r.end {
		r.ask()
	}
}

// over moves the place over one object.
func (r *Reader) over(o *Object) {
	seq := r.c.seq
	err := o.fault
	if err == nil {
		err = r.c.next(o, r.o.Owner)
	}
	if err != nil {
		if !errors.Is(err, ErrFenced) {
			err = &ObjectError{Key: Key(r.o.Prefix, seq), Seq: seq, Cause: err}
		}
		r.fail(err)
		return
	}
	r.ahead = min(r.ahead+1, maxAhead) // doubles with each round of requests
	if o.Sealed {
		r.index.sealed(seq)
		r.drop(seq, r.c.seq)
		if r.c.owned {
			r.done = true
		}
		return
	}
	delete(r.slots, seq)
	r.index.Add(seq, o.Frame.FirstLSN, o.Frame.Count, o.Bytes)
	r.ready = append(r.ready, Delivered{Frame: o.Frame, Bytes: o.Bytes})
}

// drop forgets the slots in [from, to).
func (r *Reader) drop(from, to uint64) {
	for seq := from; seq < to && seq < from+maxAhead; seq++ {
		delete(r.slots, seq)
	}
}

// ask requests what lies ahead.
func (r *Reader) ask() {
	n := r.ahead
	if r.size > 0 {
		n = max(1, min(n, aheadBytes/r.size))
	}
	n -= len(r.ready)
	for seq := r.c.seq; seq < r.c.seq+uint64(max(n, 0)); seq++ {
		if r.o.Stop != 0 && seq >= r.o.Stop {
			return
		}
		if r.slots[seq] == nil {
			r.slots[seq] = &slot{}
			r.get(seq)
		}
	}
}

func (r *Reader) get(seq uint64) {
	r.actions = append(r.actions, Action{Seq: seq, Key: Key(r.o.Prefix, seq)})
}

// atEnd ends the reading, or begins the seal.
func (r *Reader) atEnd() {
	r.end = true
	r.drop(r.c.seq, r.c.seq+maxAhead)
	if r.o.Owner == nil {
		r.done = true
		return
	}
	r.beginSeal()
}

func (r *Reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}
