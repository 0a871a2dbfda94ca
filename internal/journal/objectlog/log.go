// Package objectlog is the journal of one partition on an object store: each
// frame is an object, put under a key that nobody may have used before.
// docs/JOURNAL_FORMAT.md describes the objects and how they are read.
//
// What it promises, whatever the clocks say, if the epoch rises at every
// take-over and Options.Confirm is set: each acknowledged frame is read by every later owner and follower,
// in order and unchanged; and once a newer epoch has taken the log over, no
// older one is acknowledged anything that the newer one has not read.
//
// Reader, Writer and Index decide, as state machines without goroutines, clock
// or I/O; Log and Follower drive them in production.
package objectlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// DefaultWindow is how many frames a log may have in flight.
const DefaultWindow = 4

// MaxWindow bounds windows: a seal skips that many sequences.
const MaxWindow = 64

// Options of a log. Store, Prefix, Epoch, HeadSeq, HeadLSN, Clock must be set;
// before Open the owner manifest holds Epoch, and a window of at least
// max(Window, FormerWindow).
type Options struct {
	Store  blob.Store
	Prefix string // of the partition, "p000"
	Epoch  uint64 // of this owner, above all former ones
	Nonce  uint64 // drawn anew for each take-over; frames carry it

	// Window is how many frames this log may have in flight, 1 to MaxWindow.
	// Default DefaultWindow. FormerWindow is the manifest's before the take-over.
	Window, FormerWindow int
	// Linger is the least time between the starts of two frames. Default 0.
	Linger time.Duration
	// HeadSeq and HeadLSN are the manifest's: where the log begins; at least 1.
	HeadSeq, HeadLSN uint64

	// Valid says whether the lease is valid. It is asked after the store's
	// answers, from any goroutine; it must neither block nor call the log. nil:
	// always.
	Valid func() bool
	// Confirm says, after the seal was put, whether the manifest is still of this
	// epoch; an error (the store's, or one that matches ErrFenced) ends the
	// take-over. It makes a take-over that was held up for so long that a
	// successor has trimmed meanwhile safe without trust in clocks. nil: the
	// lease alone.
	Confirm func(ctx context.Context) error
	// Advance makes seq and lsn the head in the manifest. A trim deletes only
	// after it has returned nil. nil: nothing is ever deleted.
	Advance func(ctx context.Context, seq, lsn uint64) error
	// Budget is shared by the logs of a node; nil: no bound.
	Budget *Budget
	// TailSeq is the manifest's tail_seq if the former owner has released the
	// partition: the take-over tries its seal there before it asks whether
	// anything is there. 0: not known.
	TailSeq uint64
	// Known is what a follower has read already; see Follower.Known. nil: nothing.
	Known *Known

	// CompressAbove is as in journal.Options.
	CompressAbove int
	// GiveUp is how long a request is tried again if no lease ends it first.
	// Default DefaultGiveUp.
	GiveUp time.Duration

	Clock env.Clock
	Rand  env.Rand     // jitter of repetitions; nil: none
	Go    func(func()) // starts a goroutine; nil: go
	Log   *slog.Logger // nil: silent
	// OnPut is told of each PUT of a frame that the store answered: its time,
	// which attempt it was, and its error. It must not block. nil: nobody.
	OnPut func(d time.Duration, attempt int, err error)
}

func (o *Options) check() error {
	if o.Window == 0 {
		o.Window = DefaultWindow
	}
	if o.CompressAbove == 0 {
		o.CompressAbove = journal.DefaultCompressAbove
	}
	if o.Valid == nil {
		o.Valid = func() bool { return true }
	}
	if o.Go == nil {
		o.Go = func(f func()) { go f() }
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	switch {
	case o.Store == nil || o.Clock == nil:
		return errors.New("objectlog: Store and Clock must be set")
	case o.Window < 1 || o.Window > MaxWindow || o.FormerWindow < 0 || o.FormerWindow > MaxWindow:
		return fmt.Errorf("objectlog: windows %d and %d: want 1 to %d", o.Window, o.FormerWindow, MaxWindow)
	case o.Epoch < 1 || o.HeadSeq < 1 || o.HeadLSN < 1:
		return fmt.Errorf("objectlog: epoch %d, head %d at LSN %d: each is at least 1", o.Epoch, o.HeadSeq, o.HeadLSN)
	}
	return blob.CheckKey(Key(o.Prefix, 0))
}

// Stats count since Open.
type Stats struct {
	WriterStats
	Reads                  uint64 // GETs of Replay
	Deletes, DeleteErrors  uint64
	PutLatency             time.Duration // smoothed
	WindowNow              int           // frames that it pays to have in flight at this latency
	Undeleted              int           // objects that a trim could not delete yet
	FramesHeld, BytesHeld  int64         // at or above the head
	HeadSeq, HeadLSN, Next uint64        // Next: sequence of the next frame
}

// Log is the log of one owner. Replay, Begin, Trim and Close are each for one
// caller at a time; all methods are safe from any goroutine.
type Log struct {
	o     Options
	owner Owner
	claim claim

	opening  context.Context // of Open: ends a first Replay
	ctx      context.Context // of all else; ended by Close
	cancel   context.CancelCauseFunc
	inFlight sync.WaitGroup // goroutines, and a Replay
	gets     atomic.Uint64  // of Replay

	trimming sync.Mutex // one Trim at a time; taken before mu

	mu               sync.Mutex // guards all below
	w                *Writer    // nil until the log is taken over
	index            *Index
	headSeq, headLSN uint64
	begun            []begun // frames in w, and refused ones behind those, oldest first
	calls            []call  // to be made, in order
	calling          bool    // somebody makes them
	onRoom           func()
	starved          bool // MaxInFlight has said 0 since
	timer            env.Timer
	timerAt          time.Time
	closed           bool
	buffers          [][]byte // for reuse; at most Window
	doomed           []uint64 // below the head, not deleted yet
	swept            bool     // leftovers of former owners were looked for
	deleting         bool     // somebody deletes
	stats            Stats
}

type begun struct {
	done    func(error)
	refused error // not in w
}

type call struct {
	done func(error)
	err  error
}

// Open makes the log of a new owner; it asks the store nothing. The first
// Replay reads it and takes it over, and Begin is refused before that. ctx
// bounds that Replay; afterwards only Close ends the log's work.
func Open(ctx context.Context, o Options) (*Log, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	l := &Log{
		o: o, owner: Owner{Epoch: o.Epoch, Nonce: o.Nonce, Window: max(o.Window, o.FormerWindow)},
		opening: ctx, headSeq: o.HeadSeq, headLSN: o.HeadLSN, index: NewIndex(o.HeadLSN), onRoom: func() {},
	}
	l.claim.granted = l.roomGrew
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return l, nil
}

// NextSeq is the sequence number the next frame must have. Before Replay: the
// head's.
func (l *Log) NextSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.w == nil {
		return l.headSeq
	}
	return l.w.NextSeq()
}

// NextLSN is the first LSN the next frame must have. Before Replay: the head's.
func (l *Log) NextLSN() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.w == nil {
		return l.headLSN
	}
	return l.w.NextLSN()
}

// FirstLSN is the lowest LSN still held: the head's.
func (l *Log) FirstLSN() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.headLSN
}

// Epoch is this owner's.
func (l *Log) Epoch() uint64 { return l.o.Epoch }

// Size is the bytes of all frames at or above the head.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.index.Bytes()
}

// Stats gives the counters.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stats
	st.Reads = l.gets.Load()
	st.FramesHeld, st.BytesHeld, st.Undeleted = int64(l.index.Frames()), l.index.Bytes(), len(l.doomed)
	st.HeadSeq, st.HeadLSN, st.Next = l.headSeq, l.headLSN, l.headSeq
	if l.w != nil {
		st.WriterStats = l.w.Stats()
		st.PutLatency, st.WindowNow, st.Next = l.w.Latency(), l.w.Window(), l.w.NextSeq()
	}
	return st
}

// Close ends the log: frames in flight fail with journal.ErrClosed, though they
// may reach the store still; whoever wants them acknowledged waits for that
// first. It waits for all that the log has started, so neither a function given
// to Begin nor OnRoom's may call it.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	if l.w != nil {
		l.w.Fail(journal.ErrClosed)
		l.collect()
	}
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	l.mu.Unlock()
	l.cancel(journal.ErrClosed)
	l.makeCalls()
	l.roomGrew()
	if l.o.Budget != nil {
		l.o.Budget.leave(&l.claim)
	}
	l.inFlight.Wait()
	return nil
}

// start runs f on a goroutine that Close waits for. l.mu is held and l.closed
// is false.
func (l *Log) start(f func()) {
	l.inFlight.Add(1)
	l.o.Go(func() {
		defer l.inFlight.Done()
		f()
	})
}
