// Package sink writes what happened to JSONL files, in the background: the
// public events of sessions, their transcripts and the access log.
//
// Events and transcripts come from the outboxes of the partitions, which hold
// an event until it is written and synced here. So neither a crash nor a full
// disk loses one, and the end of the files tells what an outbox gives twice:
// each line is there once as long as the newest segment is intact. The access
// log is best effort: it waits in memory, is not synced, and never blocks.
//
// Nothing runs while nothing happens: the writing is done by a timer that the
// first event or request sets.
package sink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Kind names a log.
type Kind string

// The logs.
const (
	Events      Kind = "events"
	Transcripts Kind = "transcripts"
	Access      Kind = "access"
)

// Bounds that are not configured.
const (
	maxLine       = 16 << 20 // a line; an event has at most core.MaxPayload
	maxBatchBytes = 1 << 20  // pending bytes of a log after which a batch is written
	maxRecordText = 512      // a client's text in the access log
	maxQueueBytes = 8 << 20  // access log lines that wait
	readChunk     = 64 << 10 // one read

	exportBytes = 32 << 20 // size at which an exported file is followed by a new one
	minBackoff  = 250 * time.Millisecond
	maxBackoff  = 15 * time.Second
	expireEvery = time.Hour
)

// Source is the outbox of one partition; *state.DB is one. Its methods are
// called from one goroutine at a time.
type Source interface {
	// Outbox calls fn with the events behind a place, in order, at most limit.
	// e is nil when its flow was deleted since.
	Outbox(afterLSN uint64, afterN uint32, limit int, fn func(lsn uint64, n uint32, flowID string, e *wire.Event) error) error
	// TrimOutbox forgets the events up to a place.
	TrimOutbox(lsn uint64, n uint32) error
	// OutboxLen is the number of events that wait.
	OutboxLen() int64
	// AppliedLSN is the newest entry in the tables.
	AppliedLSN() uint64
}

// Config makes Sinks. Zero bounds take the default.
type Config struct {
	FS    env.FS
	Clock env.Clock
	Log   *slog.Logger

	// Dir holds the segments. ExportDir gets transcripts and events as well,
	// in files that are never removed here; "" = off.
	Dir, ExportDir string

	// Partitions by number. They must be recovered: a partition that is behind
	// what was written is taken for a new one, and nothing of it for written.
	Partitions []Source

	// Describe gives the public name of an event, "" for one that is not
	// shown, and its JSON as clients see it.
	Describe func(*wire.Event) (name string, data []byte)

	QueueRecords  int           // access log lines that wait; more are dropped and counted; default 8192
	BatchRecords  int           // events of one write; default 512
	FlushInterval time.Duration // from an event or request to its write; default 200 ms
	MaxBacklog    int64         // events waiting in all outboxes, over which those that may be dropped are; default 1,000,000
	SegmentBytes  int64         // size at which a segment is followed by a new one; default 16 MiB

	// Events and access log each lose their oldest segments over these; 0 = no
	// bound. Transcripts are kept.
	Retention time.Duration
	MaxBytes  int64
}

func (c *Config) setDefaults() error {
	if c.FS == nil || c.Clock == nil || c.Log == nil || c.Describe == nil || c.Dir == "" {
		return errors.New("sink: FS, Clock, Log, Describe and Dir are required")
	}
	if len(c.Partitions) > maxPartitions {
		return fmt.Errorf("sink: %d partitions, at most %d", len(c.Partitions), maxPartitions)
	}
	setDefault(&c.QueueRecords, 8192)
	setDefault(&c.BatchRecords, 512)
	setDefault(&c.FlushInterval, 200*time.Millisecond)
	setDefault(&c.MaxBacklog, 1_000_000)
	setDefault(&c.SegmentBytes, 16<<20)
	if c.MaxBytes > 0 { // retention goes by whole segments
		c.SegmentBytes = min(c.SegmentBytes, max(c.MaxBytes/4, 1))
	}
	return nil
}

func setDefault[T int | int64 | time.Duration](v *T, def T) {
	if *v <= 0 {
		*v = def
	}
}

// Sinks is the three logs. Methods are safe for concurrent use.
type Sinks struct {
	cfg    Config
	logs   map[Kind]*segmentLog
	feeds  []*feed
	drain  drain
	queue  accessQueue
	access backoff

	turn   chan struct{} // held by whoever writes
	closed atomic.Bool
	tails  chan struct{} // one slot for each reader

	soon    atomic.Bool // a timer of FlushInterval is set
	timerMu sync.Mutex
	timer   env.Timer

	counts counts
}

// Open reads the ends of the logs and goes on behind them. What the outboxes
// hold already is written soon. Close ends it.
func Open(cfg Config) (*Sinks, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	s := &Sinks{cfg: cfg, logs: map[Kind]*segmentLog{}, turn: make(chan struct{}, 1), tails: make(chan struct{}, maxTails)}
	s.queue.bound = cfg.QueueRecords
	s.access.what, s.drain.retry.what = "the access log", "the log of events and transcripts"
	if err := makeDir(cfg.FS, cfg.Dir); err != nil {
		return nil, fmt.Errorf("sink: directory of logs: %w", err)
	}
	store, err := storeID(cfg)
	if err != nil {
		return nil, fmt.Errorf("sink: identity of %s: %w", cfg.Dir, err)
	}
	if err := s.openLogs(store); err != nil {
		return nil, fmt.Errorf("sink: %w", err)
	}
	waiting := false
	for i, src := range cfg.Partitions {
		f := &feed{part: i, src: src}
		if src.OutboxLen() > 0 {
			f.looks.Store(1)
			waiting = true
		}
		s.feeds = append(s.feeds, f)
	}
	if waiting {
		s.arm(cfg.FlushInterval)
	}
	return s, nil
}

func (s *Sinks) openLogs(store string) (err error) {
	base := logOptions{fs: s.cfg.FS, dir: s.cfg.Dir, segmentBytes: s.cfg.SegmentBytes}
	open := func(kind Kind, o logOptions) *segmentLog {
		o.kind = kind
		l, oerr := openLog(o)
		err = errors.Join(err, oerr)
		return l
	}
	kept := base
	kept.store, kept.partitions = store, len(s.cfg.Partitions)
	bounded := kept
	bounded.retention, bounded.maxBytes = s.cfg.Retention, s.cfg.MaxBytes
	access := base
	access.retention, access.maxBytes = s.cfg.Retention, s.cfg.MaxBytes

	s.logs[Events], s.logs[Transcripts], s.logs[Access] = open(Events, bounded), open(Transcripts, kept), open(Access, access)
	s.drain.events, s.drain.transcripts = []*segmentLog{s.logs[Events]}, []*segmentLog{s.logs[Transcripts]}
	if s.cfg.ExportDir != "" {
		export := kept
		export.dir, export.segmentBytes = s.cfg.ExportDir, exportBytes
		s.drain.events = append(s.drain.events, open(Events, export))
		s.drain.transcripts = append(s.drain.transcripts, open(Transcripts, export))
	}
	if err != nil {
		return err
	}
	for _, l := range s.drain.logs() {
		s.forgetNewLives(l)
	}
	for _, l := range append(s.drain.logs(), s.logs[Access]) {
		if err := l.cut(); err != nil { // before the next write then
			s.cfg.Log.Warn("the torn end of a log could not be cut; it is tried again", "log", l.kind, "error", err)
		}
	}
	for _, l := range s.logs {
		if err := l.expire(s.cfg.Clock.Now()); err != nil {
			s.cfg.Log.Warn("retention of logs failed; it is tried again", "error", err)
		}
	}
	return nil
}

// forgetNewLives forgets the places of partitions that are behind them: their
// journal was lost or replaced, so their events are others. A new segment
// says so to the next start.
func (s *Sinks) forgetNewLives(l *segmentLog) {
	for i, src := range s.cfg.Partitions {
		if applied := src.AppliedLSN(); l.places[i].lsn > applied {
			s.cfg.Log.Warn("a partition is behind what was written of it and is taken for a new one",
				"log", l.kind, "partition", i, "applied_lsn", applied, "written", l.places[i].String())
			l.places[i], l.written[i] = place{}, place{}
			l.foreign = true
		}
	}
}

// storeID gives the name of the data directory in files that outlive it.
func storeID(cfg Config) (string, error) {
	path := cfg.FS.PathJoin(cfg.Dir, ".store")
	if raw, err := readAll(cfg.FS, path, 64); err == nil && len(raw) > 0 && len(raw) <= 64 {
		return string(raw), nil
	}
	id := "s" + strconv.FormatInt(cfg.Clock.Now().UnixNano(), 16)
	return id, writeFile(cfg.FS, cfg.Dir, path, []byte(id))
}

// Kick says that a partition has new events in its outbox. It never blocks.
// When it comes a little before the events are visible they are found too: a
// partition is looked at again one FlushInterval after its last events.
func (s *Sinks) Kick(partition int) {
	s.feeds[partition].looks.Store(2)
	s.arm(s.cfg.FlushInterval)
}

// arm sets the timer of the next writing. A pending one of FlushInterval stays.
func (s *Sinks) arm(d time.Duration) {
	if d <= s.cfg.FlushInterval {
		if s.soon.Load() || !s.soon.CompareAndSwap(false, true) {
			return
		}
	}
	s.timerMu.Lock()
	defer s.timerMu.Unlock()
	if s.closed.Load() || d > s.cfg.FlushInterval && s.soon.Load() {
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.timer = s.cfg.Clock.AfterFunc(d, s.fire)
}

// fire is the timer's: it writes and sets the timer again if there is reason.
func (s *Sinks) fire() {
	s.soon.Store(false)
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	if s.closed.Load() {
		return
	}
	now := s.cfg.Clock.Now()
	s.flushAccess(now)
	if s.drain.retry.ready(now) {
		s.report(&s.drain.retry, s.drainAll(context.Background(), now))
	}
	s.expire(now)
	if d, ok := s.next(); ok {
		s.arm(d)
		return
	}
	s.release()
}

// next says when to write again, if at all.
func (s *Sinks) next() (d time.Duration, ok bool) {
	now := s.cfg.Clock.Now()
	if s.queue.len() > 0 {
		d, ok = max(s.access.until.Sub(now), s.cfg.FlushInterval), true
	}
	for _, f := range s.feeds {
		if f.looks.Load() == 0 {
			continue
		}
		if e := max(s.drain.retry.until.Sub(now), s.cfg.FlushInterval); !ok || e < d {
			d = e
		}
		return d, true
	}
	return d, ok
}

// expire looks at the bounds of kept segments when one is new, and each hour
// in which something is written.
func (s *Sinks) expire(now time.Time) {
	for _, kind := range [...]Kind{Events, Access} {
		l := s.logs[kind]
		if !l.rotated && now.Sub(l.expired) < expireEvery {
			continue
		}
		if err := l.expire(now); err != nil {
			s.counts.errors.Add(1)
			s.cfg.Log.Warn("retention of logs failed; it is tried again", "error", err)
		}
	}
}

func (s *Sinks) release() {
	for _, l := range s.logs {
		l.idle()
	}
	for _, l := range s.drain.logs() {
		l.idle()
	}
	s.drain.line, s.drain.at = nil, nil
	s.queue.release()
}

// Close writes what waits, within ctx, and ends. What it could not write of
// events and transcripts stays in the outboxes for the next Open; close those
// afterwards. Kick and Access do nothing from now on, Tail goes on.
func (s *Sinks) Close(ctx context.Context) error {
	if s.closed.Swap(true) {
		return nil
	}
	s.timerMu.Lock()
	if s.timer != nil {
		s.timer.Stop()
	}
	s.timerMu.Unlock()
	select {
	case s.turn <- struct{}{}: // kept: nobody writes any more
	case <-ctx.Done():
		return fmt.Errorf("sink: a write did not end in time: %w", context.Cause(ctx))
	}
	now := s.cfg.Clock.Now()
	for _, f := range s.feeds {
		f.looks.Store(1)
	}
	err := errors.Join(s.writeAccess(now), s.drainAll(ctx, now))
	for _, l := range append(s.drain.logs(), s.logs[Access]) {
		l.closeFile()
	}
	if err != nil {
		return fmt.Errorf("sink: %w", err)
	}
	return nil
}

// backoff spaces the tries of what fails, and says so once. Guarded by the turn.
type backoff struct {
	what  string
	delay time.Duration
	until time.Time
}

func (b *backoff) ready(now time.Time) bool { return !now.Before(b.until) }

// report takes the outcome of a writing.
func (s *Sinks) report(b *backoff, err error) {
	if err == nil {
		if b.delay > 0 {
			s.cfg.Log.Info(b.what + " is written again")
		}
		b.delay, b.until = 0, time.Time{}
		return
	}
	s.counts.errors.Add(1)
	if b.delay == 0 {
		s.cfg.Log.Error(b.what+" cannot be written; it is tried again", "error", err)
	}
	b.delay = min(max(2*b.delay, minBackoff), maxBackoff)
	b.until = s.cfg.Clock.Now().Add(b.delay)
}
