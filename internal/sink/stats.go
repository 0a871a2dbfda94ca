package sink

import (
	"sync"
	"sync/atomic"
)

// Stats is a look at the sinks. Counters run since Open.
type Stats struct {
	Wait            Wait   // event_db_write_wait_ms
	OutboxRows      int64  // message_store_queue: events that wait in the outboxes
	AccessQueue     int    // access_log_queue: lines that wait in memory
	Events          uint64 // lines written
	Messages        uint64
	AccessLines     uint64
	EventsDropped   uint64 // event_db_dropped_total: by the bound of the backlog
	EventsDeleted   uint64 // their session was deleted before they were written
	AccessDropped   uint64 // access_log_dropped_total: by the bound of the queue
	WriteErrors     uint64
	EventsBytes     int64 // on disk
	TranscriptBytes int64
	AccessBytes     int64
}

// WaitBounds is the upper bounds of Wait's buckets in milliseconds.
var WaitBounds = [...]float64{10, 25, 50, 100, 200, 300, 500, 1000, 2500, 5000, 10_000, 60_000}

// Wait is a histogram of the time from an event to its write, in milliseconds.
type Wait struct {
	Count   uint64
	Sum     float64
	Last    float64
	Max     float64
	Buckets [len(WaitBounds)]uint64 // cumulative, by WaitBounds
}

type counts struct {
	events, messages, access                    atomic.Uint64
	eventsDropped, eventsDeleted, accessDropped atomic.Uint64
	errors                                      atomic.Uint64

	mu   sync.Mutex
	wait Wait
}

// observe takes the times of events that are written now, in microseconds.
func (c *counts) observe(nowUs int64, at []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := &c.wait
	for _, us := range at {
		ms := max(float64(nowUs-us)/1000, 0)
		w.Count++
		w.Sum += ms
		w.Last = ms
		w.Max = max(w.Max, ms)
		for i := len(WaitBounds) - 1; i >= 0 && ms <= WaitBounds[i]; i-- {
			w.Buckets[i]++
		}
	}
}

// Stats gives the present figures.
func (s *Sinks) Stats() Stats {
	st := Stats{
		AccessQueue: s.queue.len(),
		Events:      s.counts.events.Load(), Messages: s.counts.messages.Load(), AccessLines: s.counts.access.Load(),
		EventsDropped: s.counts.eventsDropped.Load(), EventsDeleted: s.counts.eventsDeleted.Load(),
		AccessDropped: s.counts.accessDropped.Load(), WriteErrors: s.counts.errors.Load(),
		EventsBytes: s.logs[Events].bytes(), TranscriptBytes: s.logs[Transcripts].bytes(), AccessBytes: s.logs[Access].bytes(),
	}
	for _, f := range s.feeds {
		st.OutboxRows += f.src.OutboxLen()
	}
	s.counts.mu.Lock()
	defer s.counts.mu.Unlock()
	st.Wait = s.counts.wait
	return st
}

func (l *segmentLog) bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var n int64
	for _, s := range l.segs {
		n += s.size
	}
	return n
}
