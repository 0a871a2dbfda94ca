package sink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/wire"
)

// feed is the way of one partition's events into the logs.
type feed struct {
	part  int
	src   Source
	looks atomic.Int32 // how often to look into the outbox

	// The rest is guarded by the turn.
	lsn     uint64 // read up to here
	n       uint32
	round   uint64 // of the drain that reached the end
	untrim  bool   // what was read is not trimmed
	dropped uint64 // since the last trim
	deleted uint64
}

// drain is the state of moving events from the outboxes to the logs, guarded
// by the turn.
type drain struct {
	events, transcripts []*segmentLog // the log itself, then the export
	retry               backoff
	round               uint64
	first               int     // the feed that begins the next batch
	line                []byte  // scratch
	at                  []int64 // when the events of this batch were, microseconds
	budget              int     // events that this batch may still take
	over                int64   // events over the backlog's bound
}

func (d *drain) logs() []*segmentLog {
	return append(append([]*segmentLog(nil), d.events...), d.transcripts...)
}

var errFull = errors.New("batch is full")

// drainAll writes batches until the outboxes that asked for a look are empty.
// A batch is read, written and synced, and only then trimmed; after an error
// the same bytes are written first. ctx ends it between two batches.
func (s *Sinks) drainAll(ctx context.Context, now time.Time) error {
	s.drain.round++
	for {
		if err := s.write(now); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		more, err := s.gather()
		if err != nil || !more {
			return errors.Join(err, s.write(now))
		}
		now = s.cfg.Clock.Now()
		if s.queue.len() > 0 {
			s.flushAccess(now)
		}
	}
}

func (d *drain) pending() int {
	n := 0
	for _, l := range d.events {
		n += len(l.pending)
	}
	for _, l := range d.transcripts {
		n += len(l.pending)
	}
	return n
}

// write writes what was read, then trims it.
func (s *Sinks) write(now time.Time) error {
	if err := s.flushEvents(now); err != nil {
		return err
	}
	return s.trim()
}

// flushEvents writes what is pending of all logs; one that fails does not
// keep the others from it.
func (s *Sinks) flushEvents(now time.Time) error {
	var errs error
	for i, l := range s.drain.events {
		lines := l.lines
		err := l.flush(now)
		if errs = errors.Join(errs, err); err == nil && i == 0 {
			s.counts.events.Add(uint64(lines))
		}
	}
	for i, l := range s.drain.transcripts {
		lines := l.lines
		err := l.flush(now)
		if errs = errors.Join(errs, err); err == nil && i == 0 {
			s.counts.messages.Add(uint64(lines))
		}
	}
	return errs
}

// trim tells the outboxes what is written. All that was read is.
func (s *Sinks) trim() error {
	for _, f := range s.feeds {
		if !f.untrim {
			continue
		}
		if err := f.src.TrimOutbox(f.lsn, f.n); err != nil {
			return fmt.Errorf("trim outbox of partition %d: %w", f.part, err)
		}
		s.counts.eventsDropped.Add(f.dropped)
		s.counts.eventsDeleted.Add(f.deleted)
		f.untrim, f.dropped, f.deleted = false, 0, 0
	}
	if len(s.drain.at) > 0 {
		s.counts.observe(s.cfg.Clock.Now().UnixMicro(), s.drain.at)
		s.drain.at = s.drain.at[:0]
	}
	return nil
}

// gather reads one batch from the outboxes into the pending lines, and says
// whether there may be more.
func (s *Sinks) gather() (more bool, err error) {
	d := &s.drain
	d.budget, d.over = s.cfg.BatchRecords, -s.cfg.MaxBacklog
	for _, f := range s.feeds {
		d.over += f.src.OutboxLen()
	}
	first := d.first
	for i := range s.feeds {
		f := s.feeds[(first+i)%len(s.feeds)]
		looks := f.looks.Load()
		if looks == 0 || f.round == d.round {
			continue
		}
		if d.budget <= 0 || d.pending() >= maxBatchBytes {
			return true, err
		}
		d.first = f.part // goes on here when the batch is full
		switch ferr := s.read(f); {
		case errors.Is(ferr, errFull):
			return true, err
		case ferr != nil: // the others go on
			err = errors.Join(err, fmt.Errorf("read outbox of partition %d: %w", f.part, ferr))
		default:
			f.looks.CompareAndSwap(looks, looks-1)
			f.round, d.first = d.round, (f.part+1)%len(s.feeds)
		}
	}
	return false, err
}

// read takes events of one outbox until it is at its end (nil) or the batch is
// full (errFull).
func (s *Sinks) read(f *feed) error {
	d := &s.drain
	if f.src.OutboxLen() == 0 {
		return nil
	}
	return f.src.Outbox(f.lsn, f.n, 0, func(lsn uint64, n uint32, flowID string, ev *wire.Event) error {
		if d.budget <= 0 || d.pending() >= maxBatchBytes {
			return errFull
		}
		s.take(f, flowID, ev)
		f.lsn, f.n, f.untrim = lsn, n, true
		d.budget--
		d.over--
		return nil
	})
}

// take turns one event into lines.
func (s *Sinks) take(f *feed, flowID string, ev *wire.Event) {
	id, ok := session.IDOf(flowID)
	if !ok {
		return // of a flow that is no session
	}
	if ev == nil {
		f.deleted++
		return
	}
	d := &s.drain
	name, data := s.cfg.Describe(ev)
	if d.over > 0 && len(ev.Items) == 0 && !agent.Terminal(name) {
		if name != "" {
			f.dropped++
		}
		return
	}
	sub := subject{f.part, session.TenantOf(flowID), id}
	if name != "" {
		d.add(d.events, f.part, place{ev.Lsn, ev.N, 0}, func(b []byte) []byte {
			return appendEvent(b, sub, ev, name, data)
		})
		d.at = append(d.at, ev.AtUs)
	}
	partial := ev.Type == agent.EventMessage && bytes.Contains(ev.Data, []byte(`"partial":true`))
	for i := range ev.Items {
		d.add(d.transcripts, f.part, place{ev.Lsn, ev.N, uint32(i)}, func(b []byte) []byte {
			return appendMessage(b, sub, ev, i, partial)
		})
	}
}

// add gives a line to the logs that do not have it; it is made once.
func (d *drain) add(logs []*segmentLog, part int, p place, encode func([]byte) []byte) {
	d.line = d.line[:0]
	for _, l := range logs {
		if l.seen(part, p) {
			continue
		}
		if len(d.line) == 0 {
			d.line = encode(d.line)
		}
		l.add(d.line)
	}
}
