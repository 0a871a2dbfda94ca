package objectlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

var putNew = blob.PutOptions{IfNoneMatch: true}

// Replay calls fn for each frame that holds entries at or above fromLSN, in
// order; the first one may begin below it. 0 means from the start. The frame is
// valid only during the call. fn's error ends the replay and is returned.
//
// The first call that succeeds takes the log over: it reads to the end, puts
// the seal there, and only then returns. A later one reads again what is
// acknowledged.
//
// Errors: journal.ErrMissing when the log starts above fromLSN or ends before
// it, ErrFenced, ErrLeaseOver, ErrCorrupt and ErrTooNew (an *ObjectError), or
// the store's. After an error Replay may be called again.
func (l *Log) Replay(fromLSN uint64, fn func(journal.Frame) error) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return journal.ErrClosed
	}
	l.inFlight.Add(1)
	defer l.inFlight.Done()
	taken, head := l.w != nil, l.headLSN
	l.mu.Unlock()
	switch {
	case fromLSN == 0:
		fromLSN = head
	case fromLSN < head:
		return fmt.Errorf("%w: LSN %d was asked for, the log begins at %d: restore the newest snapshot first", journal.ErrMissing, fromLSN, head)
	}
	deliver := func(d Delivered) error {
		f := d.Frame
		if f.FirstLSN+uint64(f.Count) > fromLSN || (f.Count == 0 && f.FirstLSN >= fromLSN) {
			return fn(f)
		}
		return nil
	}
	if taken {
		return l.replayAgain(fromLSN, deliver)
	}
	return l.takeOver(fromLSN, deliver)
}

// takeOver reads the log to its end and seals it.
func (l *Log) takeOver(fromLSN uint64, deliver func(Delivered) error) error {
	o := l.readerOptions()
	o.Owner, o.Tail, o.Known, o.FromLSN = &l.owner, l.o.TailSeq, l.o.Known, fromLSN
	r := NewReader(o)
	ctx, cancel := context.WithCancelCause(l.opening)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(journal.ErrClosed) })()
	if err := l.drive(ctx, r, deliver); err != nil {
		return l.superseded(ctx, err)
	}
	if l.o.Confirm != nil {
		if err := l.o.Confirm(ctx); err != nil {
			return fmt.Errorf("objectlog: confirm the take-over of %s: %w", l.o.Prefix, err)
		}
	}
	if !l.o.Valid() {
		return fmt.Errorf("%w: the take-over of %s took too long", ErrLeaseOver, l.o.Prefix)
	}
	seq, lsn := r.Place()
	if fromLSN > lsn {
		return fmt.Errorf("%w: LSN %d was asked for, the log ends at %d", journal.ErrMissing, fromLSN, lsn-1)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.index = r.Index()
	l.w = NewWriter(WriterOptions{Prefix: l.o.Prefix, Owner: l.owner, Seq: seq, LSN: lsn, MaxInFlight: l.o.Window, GiveUp: l.o.GiveUp, Rand: l.o.Rand, Linger: l.o.Linger})
	l.o.Known = nil
	return nil
}

// superseded is err, or that the manifest is a newer owner's: below that one's
// head nothing holds any more, so what looks like damage may be none.
func (l *Log) superseded(ctx context.Context, err error) error {
	var bad *ObjectError
	if errors.As(err, &bad) && l.o.Confirm != nil {
		if cerr := l.o.Confirm(ctx); errors.Is(cerr, ErrFenced) {
			return cerr
		}
	}
	return err
}

// replayAgain reads what was acknowledged when it was called.
func (l *Log) replayAgain(fromLSN uint64, deliver func(Delivered) error) error {
	l.mu.Lock()
	o := l.readerOptions()
	stop, end := l.w.Settled()
	seq, lsn, ok := l.index.holding(fromLSN)
	l.mu.Unlock()
	if fromLSN > end {
		return fmt.Errorf("%w: LSN %d was asked for, the log ends at %d", journal.ErrMissing, fromLSN, end-1)
	}
	if !ok {
		return nil
	}
	o.HeadSeq, o.HeadLSN, o.Stop = seq, lsn, stop
	r := NewReader(o)
	if err := l.drive(l.ctx, r, deliver); err != nil {
		return err
	}
	if at, _ := r.Place(); at < stop {
		return &ObjectError{Key: Key(o.Prefix, at), Seq: at, Cause: fmt.Errorf("%w: it is missing, and the log goes on to %d", ErrCorrupt, stop-1)}
	}
	return nil
}

func (l *Log) readerOptions() ReaderOptions {
	return ReaderOptions{Prefix: l.o.Prefix, HeadSeq: l.headSeq, HeadLSN: l.headLSN, GiveUp: l.o.GiveUp, Rand: l.o.Rand}
}

func (l *Log) drive(ctx context.Context, r *Reader, deliver func(Delivered) error) error {
	d := driver{store: l.o.Store, clock: l.o.Clock, start: l.o.Go, leased: l.o.Valid, gets: &l.gets}
	return d.run(ctx, r, deliver)
}

// driver runs a Reader on a store.
type driver struct {
	store  blob.Store
	clock  env.Clock
	start  func(func())
	leased func() bool
	gets   *atomic.Uint64
}

type answer struct {
	a   Action
	obj Object
	err error
}

// run reads until r is done and every frame is delivered. deliver runs on the
// caller's goroutine. The requests that are under way when it ends are
// cancelled and waited for.
func (d driver) run(ctx context.Context, r *Reader, deliver func(Delivered) error) error {
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer, 2*maxAhead) // never blocks, as each round takes all: start may run its function at once
	wake := make(chan struct{}, 1)
	for {
		for _, a := range r.Actions() {
			asking.Add(1)
			d.start(func() {
				defer asking.Done()
				ans := d.ask(ctx, a)
				select {
				case answers <- ans:
				case <-ctx.Done():
				}
			})
		}
		if f, ok := r.Next(); ok {
			if err := deliver(f); err != nil {
				return err
			}
			d.absorb(r, answers)
			continue
		}
		if r.Err() != nil || r.Done() {
			return r.Err()
		}
		if err := d.wait(ctx, r, answers, wake); err != nil {
			return err
		}
		d.absorb(r, answers)
	}
}

// ask makes one request. A frame is decoded here, so that several are at once.
func (d driver) ask(ctx context.Context, a Action) answer {
	if a.Put {
		_, err := d.store.Put(ctx, a.Key, a.Data, putNew)
		return answer{a: a, err: err}
	}
	d.gets.Add(1)
	o, err := d.store.Get(ctx, a.Key)
	if err != nil {
		return answer{a: a, err: err}
	}
	obj, err := ParseObject(o.Data)
	return answer{a: a, obj: obj, err: err}
}

// absorb takes the answers that are there.
func (d driver) absorb(r *Reader, answers <-chan answer) {
	for {
		select {
		case a := <-answers:
			d.tell(r, a)
		default:
			return
		}
	}
}

func (d driver) tell(r *Reader, a answer) {
	leased := d.leased()
	if a.a.Put {
		r.PutDone(d.clock.Now(), a.a.Seq, a.err, leased)
		return
	}
	r.GetDone(d.clock.Now(), a.a.Seq, a.obj, a.err, leased)
}

// wait is for one answer or the Reader's time.
func (d driver) wait(ctx context.Context, r *Reader, answers <-chan answer, wake chan struct{}) error {
	if at := r.Wake(); !at.IsZero() {
		t := d.clock.AfterFunc(max(at.Sub(d.clock.Now()), 0), func() {
			select {
			case wake <- struct{}{}:
			default:
			}
		})
		defer t.Stop()
	}
	select {
	case a := <-answers:
		d.tell(r, a)
	case <-wake:
		r.Tick(d.clock.Now(), d.leased())
	case <-ctx.Done():
		return fmt.Errorf("objectlog: the reading was ended: %w", context.Cause(ctx))
	}
	return nil
}
