package objectlog

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// WriterOptions say where and as whom to write.
type WriterOptions struct {
	Prefix         string
	Owner          Owner
	Seq, LSN       uint64        // of the first frame: where the take-over ended
	MaxInFlight    int           // at most Owner.Window; default Owner.Window
	GiveUp         time.Duration // as in ReaderOptions
	Rand           env.Rand      // jitter; nil: none
	InitialLatency time.Duration // of a PUT, until one was seen
	Linger         time.Duration // least time between the starts of two frames
}

// Finished is the fate of a frame. Err is nil when it is acknowledged.
type Finished struct {
	Seq, FirstLSN uint64
	Count         uint32
	Data          []byte // as it was given to Add
	Err           error
}

// Writer puts frames, several at once, and acknowledges them in order. It is a
// state machine: the caller does the Actions, tells their answers, takes what
// is Finished, and looks again (Tick) at Wake. Not safe for concurrent use.
//
// A frame is acknowledged when it and all before it are durable, and the
// lease is valid after the store has said so. After a failure nothing is
// acknowledged any more, and every Add is refused.
type Writer struct {
	o    WriterOptions
	pace pace

	seq, lsn uint64    // of the next frame
	flight   []inPut   // oldest first; at most MaxInFlight
	failed   error     // set once
	started  time.Time // the last frame's first PUT

	actions  []Action
	finished []Finished
	stats    WriterStats
}

// WriterStats count since the Writer was made.
type WriterStats struct {
	Puts, Retries uint64 // Puts includes the retries
	Gets          uint64 // after a refused PUT
	Frames, Bytes uint64 // acknowledged
	Fenced        bool
}

type inPut struct {
	state    putState
	data     []byte
	seq, lsn uint64
	count    uint32
	attempts int
	reads    int       // failed ones, since the last PUT
	first    time.Time // of the first attempt
	sent     time.Time // of the last one
	again    time.Time
	told     bool // acknowledged before it is durable: a planted mistake
}

type putState uint8

const (
	inPutting putState = iota // a PUT is on the way
	inReading                 // a GET is on the way
	untilPut                  // waits to put again
	untilRead                 // waits to read again
	durable                   // waits for those before it
)

// NewWriter makes a Writer.
func NewWriter(o WriterOptions) *Writer {
	o.Owner.Window = max(o.Owner.Window, 1)
	if o.MaxInFlight <= 0 || o.MaxInFlight > o.Owner.Window {
		o.MaxInFlight = o.Owner.Window
	}
	if o.GiveUp == 0 {
		o.GiveUp = DefaultGiveUp
	}
	return &Writer{o: o, seq: o.Seq, lsn: o.LSN, pace: pace{latency: o.InitialLatency}}
}

// NextSeq and NextLSN are what the next frame must have.
func (w *Writer) NextSeq() uint64 { return w.seq }

// NextLSN is the first LSN of the next frame.
func (w *Writer) NextLSN() uint64 { return w.lsn }

// Settled is the sequence behind the last acknowledged frame, and its LSN.
func (w *Writer) Settled() (seq, lsn uint64) {
	if len(w.flight) > 0 {
		return w.flight[0].seq, w.flight[0].lsn
	}
	return w.seq, w.lsn
}

// InFlight counts the frames that are neither acknowledged nor failed.
func (w *Writer) InFlight() int { return len(w.flight) }

// Err is why it does not write any more: ErrFenced, ErrLeaseOver, what Fail
// was told, or the store's error.
func (w *Writer) Err() error { return w.failed }

// Stats gives the counters.
func (w *Writer) Stats() WriterStats { return w.stats }

// Latency is the smoothed time of a PUT; Window how many may be in flight for it.
func (w *Writer) Latency() time.Duration { return w.pace.latency }

// Window is how many frames it pays to have in flight at this latency.
func (w *Writer) Window() int { return w.pace.window(w.o.MaxInFlight) }

// Room is how many frames may be in flight just now; 0 means that none may
// start before at (zero: before one in flight is finished).
func (w *Writer) Room(now time.Time) (n int, at time.Time) {
	n = w.Window()
	switch {
	case w.failed != nil:
		return 1, time.Time{} // Add tells the error
	case len(w.flight) >= n:
		return 0, time.Time{}
	}
	gap := w.o.Linger
	if len(w.flight) > 0 {
		gap = max(gap, w.pace.gap(n))
	}
	if at = w.started.Add(gap); now.Before(at) {
		return 0, at
	}
	return n, time.Time{}
}

// Add begins to write f, of which data is the encoding (kept until it is
// Finished). An error leaves the Writer as it was: ErrWindowFull,
// journal.ErrStale, journal.ErrOutOfOrder, or Err.
func (w *Writer) Add(now time.Time, f journal.Frame, data []byte) error {
	o := w.o.Owner
	switch {
	case w.failed != nil:
		return w.failed
	case len(w.flight) >= w.o.MaxInFlight:
		// Never beyond: a successor's seal leaves room for this many.
		return fmt.Errorf("%w: %d frames are in flight", ErrWindowFull, len(w.flight))
	case f.Epoch != o.Epoch || f.Nonce != o.Nonce:
		return fmt.Errorf("%w: frame of epoch %d in a log that epoch %d writes", journal.ErrStale, f.Epoch, o.Epoch)
	case f.Seq != w.seq || f.FirstLSN != w.lsn || f.FirstLSN+uint64(f.Count) < f.FirstLSN:
		return fmt.Errorf("%w: frame %d from LSN %d, want frame %d from LSN %d", journal.ErrOutOfOrder, f.Seq, f.FirstLSN, w.seq, w.lsn)
	}
	w.flight = append(w.flight, inPut{data: data, seq: f.Seq, lsn: f.FirstLSN, count: f.Count, first: now})
	w.seq, w.lsn, w.started = f.Seq+1, f.FirstLSN+uint64(f.Count), now
	p := &w.flight[len(w.flight)-1]
	w.put(now, p)
	if plantAckEarly {
		w.finish(p, nil)
		p.told = true
	}
	return nil
}

// Actions gives the requests to make now, each once. The slice is valid until
// the next call of another method.
func (w *Writer) Actions() []Action {
	a := w.actions
	w.actions = w.actions[:0]
	return a
}

// Finished gives the frames whose fate is known, in order, each once. The slice
// is valid until the next call of another method.
func (w *Writer) Finished() []Finished {
	f := w.finished
	w.finished = w.finished[:0]
	return f
}

// Wake is when to Tick; zero if there is nothing to wait for but answers.
func (w *Writer) Wake() (at time.Time) {
	for i := range w.flight {
		if p := &w.flight[i]; p.state == untilPut || p.state == untilRead {
			at = soonest(at, p.again)
		}
	}
	return at
}

// Tick repeats what is due.
func (w *Writer) Tick(now time.Time, leased bool) {
	for i := range w.flight {
		p := &w.flight[i]
		if (p.state != untilPut && p.state != untilRead) || now.Before(p.again) {
			continue
		}
		if !leased {
			w.Fail(fmt.Errorf("%w: frame %d was not put", ErrLeaseOver, p.seq))
			return
		}
		if p.state == untilPut {
			w.put(now, p)
		} else {
			w.get(p)
		}
	}
}

// Fail ends the writing: every frame in flight fails with err, in order.
func (w *Writer) Fail(err error) {
	if w.failed != nil {
		return
	}
	w.failed = err
	w.stats.Fenced = errors.Is(err, ErrFenced)
	for i := range w.flight {
		w.finish(&w.flight[i], err)
	}
	w.flight = nil
	w.actions = w.actions[:0]
}

// PutDone tells the answer to a Put. leased says whether the lease is valid,
// asked after the answer.
func (w *Writer) PutDone(now time.Time, seq uint64, err error, leased bool) {
	p := w.find(seq, inPutting)
	if p == nil {
		return
	}
	switch {
	case err == nil:
		w.pace.sample(now.Sub(p.sent))
		p.state = durable
		w.settle(leased)
	case errors.Is(err, blob.ErrPrecondition):
		w.get(p)
	case errors.Is(err, blob.ErrInvalid):
		w.Fail(fmt.Errorf("objectlog: put %s: %w", Key(w.o.Prefix, seq), err))
	default:
		w.later(now, p, untilPut, p.attempts+1, err, leased)
	}
}

// GetDone tells the answer to a Get.
func (w *Writer) GetDone(now time.Time, seq uint64, data []byte, err error, leased bool) {
	p := w.find(seq, inReading)
	if p == nil {
		return
	}
	switch {
	case errors.Is(err, blob.ErrNotFound):
		// Refused, and gone: only a successor's trim deletes here.
		w.Fail(fmt.Errorf("%w: %s was taken and is gone", ErrFenced, Key(w.o.Prefix, seq)))
	case err != nil:
		p.reads++
		w.later(now, p, untilRead, p.reads+1, err, leased)
	case bytes.Equal(data, p.data):
		p.state = durable
		w.settle(leased)
	default:
		w.Fail(fmt.Errorf("%w: %s is %s", ErrFenced, Key(w.o.Prefix, seq), describe(data)))
	}
}

// describe says whose an object is.
func describe(data []byte) string {
	o, err := ParseObject(data)
	switch {
	case err != nil:
		return fmt.Sprintf("neither frame nor seal (%v)", err)
	case o.Sealed:
		return fmt.Sprintf("the seal of epoch %d", o.Seal.Epoch)
	}
	return fmt.Sprintf("another writer's frame, of epoch %d", o.Frame.Epoch)
}

func (w *Writer) find(seq uint64, state putState) *inPut {
	if len(w.flight) == 0 || seq < w.flight[0].seq || seq-w.flight[0].seq >= uint64(len(w.flight)) {
		return nil
	}
	if p := &w.flight[seq-w.flight[0].seq]; p.state == state {
		return p
	}
	return nil
}

func (w *Writer) put(now time.Time, p *inPut) {
	p.state, p.sent, p.reads = inPutting, now, 0
	p.attempts++
	w.stats.Puts++
	if p.attempts > 1 {
		w.stats.Retries++
	}
	w.actions = append(w.actions, Action{Put: true, Seq: p.seq, Key: Key(w.o.Prefix, p.seq), Data: p.data, Attempt: p.attempts})
}

func (w *Writer) get(p *inPut) {
	p.state = inReading
	w.stats.Gets++
	w.actions = append(w.actions, Action{Seq: p.seq, Key: Key(w.o.Prefix, p.seq)})
}

// later plans attempt n of what failed, or gives up.
func (w *Writer) later(now time.Time, p *inPut, state putState, n int, err error, leased bool) {
	switch {
	case !leased:
		w.Fail(fmt.Errorf("%w; frame %d is in doubt, the store's last answer: %w", ErrLeaseOver, p.seq, err))
	case now.Sub(p.first) >= w.o.GiveUp:
		w.Fail(fmt.Errorf("objectlog: %s is in doubt after %d attempts: %w", Key(w.o.Prefix, p.seq), p.attempts, err))
	default:
		p.state, p.again = state, now.Add(backoff(n, w.o.Rand))
	}
}

// settle acknowledges what is durable without a gap.
func (w *Writer) settle(leased bool) {
	n := 0
	for n < len(w.flight) && w.flight[n].state == durable {
		if !leased {
			w.Fail(fmt.Errorf("%w: frame %d was put too late to be acknowledged", ErrLeaseOver, w.flight[0].seq))
			return
		}
		w.finish(&w.flight[n], nil)
		n++
	}
	left := copy(w.flight, w.flight[n:])
	clear(w.flight[left:])
	w.flight = w.flight[:left]
}

func (w *Writer) finish(p *inPut, err error) {
	if p.told {
		return
	}
	if err == nil {
		w.stats.Frames++
		w.stats.Bytes += uint64(len(p.data))
	}
	w.finished = append(w.finished, Finished{Seq: p.seq, FirstLSN: p.lsn, Count: p.count, Data: p.data, Err: err})
}
