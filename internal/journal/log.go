// Package journal is the write-ahead log of one partition, on local disk:
// frames of entries in preallocated segment files, each appended frame durable
// before Append returns. docs/JOURNAL_FORMAT.md describes the bytes.
//
// What it promises, on a disk that keeps what it synced: after a crash at any
// moment the log holds every acknowledged frame, in order, and at most one
// more (the one in flight). A torn tail is cut; damage before the tail is
// refused.
package journal

import (
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// Options of a log. The zero value is usable.
type Options struct {
	// SegmentSize is the size in bytes of a full-grown segment, rounded up to
	// pages. Default 16 MiB; at least 8 KiB. Simulations use 16 to 64 KiB: the
	// in-memory file system copies a whole file per sync.
	SegmentSize int64
	// FirstSegmentSize is the size of a new log's first segment; each further
	// one is four times as large up to SegmentSize, so that an empty log costs
	// little to create. Default 256 KiB, never above SegmentSize.
	FirstSegmentSize int64
	// CompressAbove is the body size in bytes above which a frame is
	// compressed. Default DefaultCompressAbove; negative: never.
	CompressAbove int
	// Go runs f concurrently (a goroutine; it must run, Close waits for it):
	// preparing and removing segments.
	// nil runs it within Append and Trim, for single-threaded simulations.
	Go func(f func())
	// Rand salts the segments, so that no payload can pose as a frame. nil
	// salts them by number only, which still tells a recycled file's former
	// content apart, but not one made by a foe.
	Rand env.Rand
	// AddedLatency runs after each sync of a frame, before its acknowledgement:
	// a benchmark waits here to imitate a slower store. nil = nothing.
	AddedLatency func()
}

const (
	pageSize                = 4096
	minSegmentSize          = 2 * pageSize
	defaultSegmentSize      = 16 << 20
	defaultFirstSegmentSize = 256 << 10
	segmentGrowth           = 4
	// maxKeptBuffer bounds the encoding buffer kept between appends.
	maxKeptBuffer = 1 << 20
)

func (o Options) withDefaults() (Options, error) {
	pages := func(n int64) int64 { return (n + pageSize - 1) / pageSize * pageSize }
	if o.SegmentSize == 0 {
		o.SegmentSize = defaultSegmentSize
	}
	if o.FirstSegmentSize == 0 {
		o.FirstSegmentSize = defaultFirstSegmentSize
	}
	if o.SegmentSize < minSegmentSize || o.SegmentSize > 1<<30 {
		return o, fmt.Errorf("journal: SegmentSize %d: want %d to %d bytes", o.SegmentSize, minSegmentSize, 1<<30)
	}
	if o.FirstSegmentSize < minSegmentSize {
		return o, fmt.Errorf("journal: FirstSegmentSize %d: want at least %d bytes", o.FirstSegmentSize, minSegmentSize)
	}
	o.SegmentSize = pages(o.SegmentSize)
	o.FirstSegmentSize = min(pages(o.FirstSegmentSize), o.SegmentSize)
	if o.CompressAbove == 0 {
		o.CompressAbove = DefaultCompressAbove
	}
	return o, nil
}

// Stats counts since Open.
type Stats struct {
	Appends  uint64 // acknowledged frames
	Syncs    uint64 // fdatasync calls made by Append: one each
	Bytes    uint64 // written by Append, with headers and padding
	Segments int    // files in use now, prepared ones included
	Recycled uint64 // segments prepared from a trimmed file
	// PrepareErrors and TrimErrors count failures of the work ahead and
	// behind. They lose nothing: a failed preparation is tried again when the
	// segment is needed (and fails that Append), a failed trim by the next Trim.
	PrepareErrors, TrimErrors uint64
}

// Log is an open log. Append, Replay, Trim and Close are for one caller at a
// time; the other methods are safe from any goroutine.
type Log struct {
	fs   env.FS
	dir  string
	opts Options

	active vfs.File // last of segs, open for writing; of the Append caller
	buf    []byte   // encoding buffer; of the Append caller

	mu       sync.Mutex // guards all below
	idle     *sync.Cond // on mu: keeping became false
	segs     []segment  // in use, by id; the last is the active one
	off      int64      // where the next record goes in the active segment
	cur      cursor
	firstLSN uint64 // lowest held; 1 in an empty log
	failed   error  // set once: the log is poisoned
	closed   bool

	keeping     bool      // housekeeping runs
	spare       *segment  // prepared, to become active next
	doomed      []segment // trimmed, files still there; bounded by the segments there were
	free        string    // file to recycle, "" for none
	nextID      uint64
	prepareFail bool // leave it to roll
	stats       Stats
}

// MaxInFlight is how many frames may be on their way at once: 1.
func (l *Log) MaxInFlight() int { return 1 }

// NextSeq is the sequence number the next frame must have; 1 in an empty log
// (which takes any).
func (l *Log) NextSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur.seq
}

// NextLSN is the FirstLSN the next frame must have; 1 in an empty log (which
// takes any, so that it can follow a restored snapshot).
func (l *Log) NextLSN() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur.lsn
}

// FirstLSN is the lowest LSN still held; NextLSN when there is none.
func (l *Log) FirstLSN() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.firstLSN
}

// Epoch is the highest epoch in the log; 0 in an empty one. A new owner writes
// under a higher one.
func (l *Log) Epoch() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur.epoch
}

// Size is the disk space of the log in bytes, prepared segments included.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var n int64
	for _, s := range l.segs {
		n += s.size
	}
	for _, s := range l.doomed {
		n += s.size
	}
	if l.spare != nil {
		n += l.spare.size
	}
	if l.free != "" {
		n += l.opts.SegmentSize
	}
	return n
}

// Stats returns the counters.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stats
	st.Segments = len(l.segs) + len(l.doomed)
	if l.spare != nil {
		st.Segments++
	}
	return st
}

// Append writes f behind the last frame and syncs it: nil means that f is
// durable. f.Seq and f.FirstLSN must continue the log, f.Epoch must not fall.
//
// ErrTooLarge, ErrStale, ErrOutOfOrder and ErrClosed leave the log as it was.
// Any other error is a failed write or sync: whether f survives is unknown
// until the log is opened again, and every later Append fails with
// ErrPoisoned, because a sync that failed once may report success the next
// time without having written.
func (l *Log) Append(f Frame) error {
	if err := l.mayAppend(f); err != nil {
		return err
	}
	if cap(l.buf) > maxKeptBuffer {
		l.buf = nil
	}
	l.buf = appendRecord(l.buf[:0], f, l.opts.CompressAbove)
	n := int64(len(l.buf))
	seg, off := l.tail()
	if off+n > seg.size && seg.firstSeq != 0 {
		if err := l.roll(); err != nil {
			return l.poison(err)
		}
		seg, off = l.tail()
	}
	seg.sealRecord(l.buf, off)
	// A record larger than an empty segment grows it; fdatasync then also
	// writes the new length.
	if _, err := l.active.WriteAt(l.buf, off); err != nil {
		return l.poison(fmt.Errorf("write %s: %w", seg.name(), err))
	}
	if err := l.active.SyncData(); err != nil {
		return l.poison(fmt.Errorf("sync %s: %w", seg.name(), err))
	}
	if l.opts.AddedLatency != nil {
		l.opts.AddedLatency()
	}
	l.acknowledge(f, off+n)
	l.keepHouse()
	return nil
}

func (l *Log) mayAppend(f Frame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.failed != nil:
		return fmt.Errorf("%w: %w", ErrPoisoned, l.failed)
	case len(f.Body) > MaxBodySize:
		return fmt.Errorf("%w: body of %d bytes, at most %d", ErrTooLarge, len(f.Body), MaxBodySize)
	}
	return l.cur.check(f)
}

// tail is the active segment and the offset of the next record in it.
func (l *Log) tail() (segment, int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.segs[len(l.segs)-1], l.off
}

func (l *Log) poison(cause error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = cause
	return fmt.Errorf("journal: append: %w", cause)
}

// acknowledge records that f is durable and ends at off.
func (l *Log) acknowledge(f Frame, off int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	seg := &l.segs[len(l.segs)-1]
	if seg.firstSeq == 0 {
		seg.firstSeq, seg.firstLSN = f.Seq, f.FirstLSN
	}
	if !l.cur.started {
		l.firstLSN = f.FirstLSN
	}
	seg.size = max(seg.size, off)
	l.stats.Appends++
	l.stats.Syncs++
	l.stats.Bytes += uint64(off - l.off)
	l.off = off
	l.cur.advance(f)
}

// Close waits for housekeeping and releases the files. It syncs nothing:
// whatever was acknowledged is durable.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	for l.keeping {
		l.idle.Wait()
	}
	l.mu.Unlock()
	if err := l.active.Close(); err != nil {
		return fmt.Errorf("journal: close: %w", err)
	}
	return nil
}
