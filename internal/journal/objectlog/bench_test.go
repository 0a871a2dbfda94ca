package objectlog

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// delayed is a store whose calls take d longer.
func delayed(s blob.Store, d time.Duration) blob.Store {
	return blob.NewFaulty(s, func(blob.Op) blob.Fault { return blob.Fault{Before: d} }, blob.FaultHooks{
		Sleep: func(ctx context.Context, d time.Duration) error {
			over := make(chan struct{})
			t := env.SystemClock{}.AfterFunc(d, func() { close(over) })
			defer t.Stop()
			select {
			case <-over:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}})
}

// feed writes n frames as a partition does: one more whenever the log has room.
func feed(tb testing.TB, l *Log, n int, next func(i int) journal.Frame) {
	room := make(chan struct{}, 1)
	wake := func() {
		select {
		case room <- struct{}{}:
		default:
		}
	}
	l.OnRoom(wake)
	acks := make(chan error, MaxWindow)
	begun, acked := 0, 0
	for acked < n {
		for begun < n && begun-acked < l.MaxInFlight() {
			l.Begin(next(begun), func(err error) { acks <- err })
			begun++
		}
		select {
		case err := <-acks:
			if err != nil {
				tb.Fatal(err)
			}
			acked++
		case <-room:
		}
	}
}

// BenchmarkBegin is the rate of frames of 4 KiB, from Begin to done.
func BenchmarkBegin(b *testing.B) {
	for _, d := range []time.Duration{0, 5 * time.Millisecond, 50 * time.Millisecond} {
		b.Run(fmt.Sprint(d), func(b *testing.B) {
			l, _ := openLog(b, newManifest().take(delayed(newStore(), d), 4))
			body := journal.AppendEntry(nil, make([]byte, 4<<10))
			b.ReportAllocs()
			b.ResetTimer()
			feed(b, l, b.N, func(int) journal.Frame {
				return journal.Frame{Epoch: l.o.Epoch, Nonce: l.o.Nonce, Seq: l.NextSeq(), FirstLSN: l.NextLSN(), Count: 1, Body: body}
			})
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
			b.ReportMetric(float64(l.Stats().PutLatency.Microseconds())/1000, "ms/put")
		})
	}
}

// BenchmarkReplay is the reading of 10,000 frames of 100 entries of 200 bytes:
// a cold start with 1,000,000 records, without applying them.
func BenchmarkReplay(b *testing.B) {
	const frames, entries = 10_000, 100
	store, m := newStore(), newManifest()
	l, _ := openLog(b, m.take(store, 4))
	var body []byte
	for range entries {
		body = journal.AppendEntry(body, make([]byte, 200))
	}
	feed(b, l, frames, func(int) journal.Frame {
		return journal.Frame{Epoch: l.o.Epoch, Nonce: l.o.Nonce, Seq: l.NextSeq(), FirstLSN: l.NextLSN(), Count: entries, Body: body}
	})
	for _, d := range []time.Duration{0, 15 * time.Millisecond, 50 * time.Millisecond} {
		b.Run(fmt.Sprint(d), func(b *testing.B) {
			for range b.N {
				l, err := Open(b.Context(), m.take(delayed(store, d), 4))
				if err != nil {
					b.Fatal(err)
				}
				n := 0
				if err := l.Replay(0, func(journal.Frame) error { n++; return nil }); err != nil || n != frames {
					b.Fatal(n, err)
				}
				_ = l.Close()
			}
		})
	}
}
