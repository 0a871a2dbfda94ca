package journal

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// BenchmarkAppend measures the disk of the temporary directory (TMPDIR).
func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{200, 4 << 10} {
		b.Run(fmt.Sprintf("body=%d", size), func(b *testing.B) {
			var wg sync.WaitGroup
			l, err := Open(vfs.Default, b.TempDir(), Options{Go: func(f func()) { wg.Go(f) }})
			if err != nil {
				b.Fatal(err)
			}
			f := frameOf(1, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := l.Append(f); err != nil {
					b.Fatal(err)
				}
				f.Seq++
				f.FirstLSN += uint64(f.Count)
			}
			st := l.Stats()
			b.ReportMetric(float64(st.Syncs)/float64(st.Appends), "syncs/op")
			if err := l.Close(); err != nil {
				b.Fatal(err)
			}
			wg.Wait()
		})
	}
}

// BenchmarkOpen measures the start of a server: a new log, and one whose
// active and prepared segments are full-grown.
func BenchmarkOpen(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		dir := b.TempDir()
		for i := range b.N {
			l, err := Open(vfs.Default, fmt.Sprintf("%s/%d", dir, i), Options{})
			if err != nil {
				b.Fatal(err)
			}
			_ = l.Close()
		}
	})
	b.Run("grown", func(b *testing.B) {
		dir := b.TempDir()
		o := Options{FirstSegmentSize: defaultSegmentSize, CompressAbove: -1}
		l, err := Open(vfs.Default, dir, o)
		if err != nil {
			b.Fatal(err)
		}
		for i := range 9 { // beyond the half, so that the next one is prepared
			if err := l.Append(frameOf(uint64(i+1), 1<<20)); err != nil {
				b.Fatal(err)
			}
		}
		_ = l.Close()
		var worst time.Duration
		for b.Loop() {
			start := time.Now()
			l, err := Open(vfs.Default, dir, o)
			if err != nil {
				b.Fatal(err)
			}
			_ = l.Close()
			worst = max(worst, time.Since(start))
		}
		b.ReportMetric(float64(worst.Milliseconds()), "worst-ms")
	})
}
