package sink

import (
	"sync"
	"time"
)

// Record is one request in the access log. Texts are cut at 512 bytes.
type Record struct {
	Time      time.Time // when it began
	Tenant    string    // "" when the caller is unknown: then no tenant sees it
	Method    string
	Route     string
	Status    int
	BytesIn   int64
	BytesOut  int64
	Duration  time.Duration
	TTFB      time.Duration // until the first byte of the answer; 0 = not known
	Session   string
	Turn      string
	Remote    string
	RequestID string
}

// accessQueue is the lines of requests that wait to be written.
type accessQueue struct {
	bound int

	mu    sync.Mutex
	lines []byte
	n     int // lines that wait, those in writing included
}

func (q *accessQueue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n
}

// Access adds a request to the access log. It never blocks: when the queue is
// full the record is dropped and counted.
func (s *Sinks) Access(r Record) {
	q := &s.queue
	q.mu.Lock()
	full := q.n >= q.bound || len(q.lines) >= maxQueueBytes || s.closed.Load()
	if !full {
		q.lines = append(appendRecord(q.lines, &r), '\n')
		q.n++
	}
	half := q.n == (q.bound+1)/2
	q.mu.Unlock()
	switch {
	case full:
		s.counts.accessDropped.Add(1)
	case half:
		s.hurry()
	default:
		s.arm(s.cfg.FlushInterval)
	}
}

// hurry writes at once, before the queue is full.
func (s *Sinks) hurry() {
	s.soon.Store(true)
	s.timerMu.Lock()
	defer s.timerMu.Unlock()
	if s.closed.Load() {
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.timer = s.cfg.Clock.AfterFunc(0, s.fire)
}

func (s *Sinks) flushAccess(now time.Time) {
	if s.access.ready(now) {
		s.report(&s.access, s.writeAccess(now))
	}
}

// writeAccess writes the lines that wait. They count as waiting until then, so
// that the bound holds while the disk does not take them.
func (s *Sinks) writeAccess(now time.Time) error {
	l := s.logs[Access]
	if len(l.pending) == 0 {
		l.pending, l.lines = s.queue.take(l.pending)
	}
	lines := l.lines
	if err := l.flush(now); err != nil {
		return err
	}
	s.queue.done(lines)
	s.counts.access.Add(uint64(lines))
	return nil
}

// take gives the waiting lines for an empty buffer.
func (q *accessQueue) take(empty []byte) (lines []byte, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	lines, q.lines = q.lines, empty[:0]
	return lines, q.n
}

func (q *accessQueue) done(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.n -= n
}

// release gives memory back.
func (q *accessQueue) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.lines) == 0 {
		q.lines = nil
	}
}
