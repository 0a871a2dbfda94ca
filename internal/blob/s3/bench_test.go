package s3_test

import (
	"fmt"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
)

// BenchmarkPut puts new objects of 4 KB, 16 at once, as a journal does.
// Client and server share the machine, and their allocations with gofakes3.
func BenchmarkPut(b *testing.B) {
	for name, start := range map[string]func(testing.TB) string{"gofakes3": fake, "versitygw": gateway} {
		b.Run(name, func(b *testing.B) {
			s := open(b, config(start(b), "bench"))
			data := make([]byte, 4096)
			jobs := make(chan int, 16)
			done := make(chan error, 16)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			b.ResetTimer()
			for range cap(done) {
				go func() {
					var failed error
					for i := range jobs {
						if _, err := s.Put(b.Context(), fmt.Sprintf("p000/log/%016x", i), data, blob.PutOptions{IfNoneMatch: true}); err != nil {
							failed = err
						}
					}
					done <- failed
				}()
			}
			for i := range b.N {
				jobs <- i
			}
			close(jobs)
			for range cap(done) {
				if err := <-done; err != nil {
					b.Error(err)
				}
			}
			b.StopTimer()
			put := s.Stats()[blob.KindPut]
			b.ReportMetric(float64(put.Quantile(0.5).Microseconds()), "p50-us-at-most")
		})
	}
}
