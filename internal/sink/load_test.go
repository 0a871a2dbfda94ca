package sink

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// TestConcurrentUse runs all methods at once on the system's clock.
func TestConcurrentUse(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 2, nil)
	must(t, w.sinks.Close(context.Background()))
	cfg := Config{FS: w.fs, Clock: env.SystemClock{}, Log: slog.New(slog.DiscardHandler), Dir: logs, ExportDir: "export", Describe: describe,
		FlushInterval: time.Millisecond, BatchRecords: 16, SegmentBytes: 8 << 10, Retention: time.Hour, QueueRecords: 64,
		Partitions: []Source{w.dbs[0], w.dbs[1]}}
	s, err := Open(cfg)
	must(t, err)
	const turns = 200
	var writers sync.WaitGroup
	for part := range 2 {
		writers.Add(1)
		go func() {
			defer writers.Done()
			for range turns {
				w.commit(part, fmt.Sprintf("a/s/%d", part), "stmd")
				s.Kick(part)
				s.Access(Record{Time: w.clock.Now(), Tenant: "a"})
			}
		}()
	}
	ctx, stop := context.WithCancel(context.Background())
	var readers sync.WaitGroup
	for _, kind := range []Kind{Events, Transcripts, Access} {
		readers.Add(1)
		go func() {
			defer readers.Done()
			at := ""
			for ctx.Err() == nil {
				_, next, err := s.Tail(ctx, kind, "a", at, 10)
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
				at = next
				s.Stats()
			}
		}()
	}
	writers.Wait()
	must(t, s.Close(context.Background()))
	stop()
	readers.Wait()
	w.sinks = s
	w.check(logs)
	w.check("export")
	if st := s.Stats(); st.AccessLines+st.AccessDropped != 2*turns || st.AccessQueue != 0 {
		t.Errorf("%+v", st)
	}
}

func TestIdleMemory(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 4, nil)
	for i := range 2000 {
		w.commit(i%4, "a/s/1", "stmd")
		w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a"})
	}
	w.kickAll()
	w.flush()
	if w.sinks.drain.line != nil || w.sinks.queue.lines != nil {
		t.Error("buffers are kept while nothing happens")
	}
	for _, l := range append(w.sinks.drain.logs(), w.sinks.logs[Access]) {
		if l.pending != nil {
			t.Errorf("%s keeps %d bytes", l.kind, cap(l.pending))
		}
	}
	w.close()
}

// BenchmarkTurns is the sinks' whole cost of one turn of four events, in
// batches as they form at 490 turns/s: outbox, encoding, writes, syncs, trim.
func BenchmarkTurns(b *testing.B) {
	b.Chdir(b.TempDir())
	w := newWorld(b, vfs.Default, 4, nil)
	perFlush := 98
	b.ReportAllocs()
	for i := 0; i < b.N; i += perFlush {
		b.StopTimer()
		for j := range perFlush {
			w.commit(j%4, "default/s/s_0123456789ab0123456789abcdef", "stmd")
		}
		w.kickAll()
		b.StartTimer()
		w.clock.advance(w.cfg.FlushInterval)
	}
	b.StopTimer()
	w.close()
}

func BenchmarkAccess(b *testing.B) {
	w := newWorld(b, vfs.NewMem(), 0, func(c *Config) { c.QueueRecords = 1 << 30 })
	r := Record{Time: w.clock.Now(), Tenant: "default", Method: "POST", Route: "/v1/sessions/{id}/turns", Status: 200, BytesIn: 50, BytesOut: 2000,
		Duration: 2041 * time.Millisecond, TTFB: time.Millisecond, Session: "s_0123456789ab0123456789abcdef", Remote: "127.0.0.1:50000", RequestID: "r_0123456789abcdef"}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		w.sinks.Access(r)
		if i%300 == 299 {
			w.sinks.queue.take(make([]byte, 0, 128<<10))
		}
	}
}
