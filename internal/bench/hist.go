package bench

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// A histogram's buckets are log-linear: each power of two of nanoseconds is cut
// into 2^subBits parts, so a bucket is at most 1/64 of its value wide, and its
// middle at most 0.8 % off.
const (
	subBits = 6
	topBits = 43 // values up to 2^43 ns, 2.4 hours; longer ones count as that
	buckets = (topBits - subBits + 1) << subBits
)

// Hist counts durations. Its methods may be called by any goroutine; one that
// reads while others record sees some of what they record. The zero value is
// empty.
type Hist struct {
	count [buckets]atomic.Uint64
	max   atomic.Int64
}

// Record counts d; a negative one counts as 0.
func (h *Hist) Record(d time.Duration) {
	d = max(d, 0)
	h.count[bucket(uint64(d))].Add(1)
	for {
		m := h.max.Load()
		if int64(d) <= m || h.max.CompareAndSwap(m, int64(d)) {
			return
		}
	}
}

// Count is how many were recorded.
func (h *Hist) Count() uint64 {
	var n uint64
	for i := range h.count {
		n += h.count[i].Load()
	}
	return n
}

// Max is the longest recorded, exactly.
func (h *Hist) Max() time.Duration { return time.Duration(h.max.Load()) }

// Quantile is the duration that a share q (0 to 1) of the recorded do not
// exceed, to 0.8 %; 0 when nothing was recorded.
func (h *Hist) Quantile(q float64) time.Duration {
	n := h.Count()
	if n == 0 {
		return 0
	}
	rank := max(uint64(q*float64(n)+0.9999999), 1)
	var seen uint64
	for i := range h.count {
		if seen += h.count[i].Load(); seen >= rank {
			return min(middle(i), h.Max())
		}
	}
	return h.Max()
}

// bucket is the index of v's bucket.
func bucket(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	i := shift<<subBits + int(v>>shift)
	return min(i, buckets-1)
}

// middle is the value in the middle of bucket i.
func middle(i int) time.Duration {
	if i < 1<<(subBits+1) {
		return time.Duration(i)
	}
	shift := i>>subBits - 1
	low := uint64(i&(1<<subBits-1)|1<<subBits) << shift
	return time.Duration(low + 1<<(shift-1))
}

// Latency is the percentiles of an output, in milliseconds.
type Latency struct {
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// Latency reads the percentiles of h.
func (h *Hist) Latency() Latency {
	ms := func(q float64) float64 { return milliseconds(h.Quantile(q)) }
	return Latency{P50: ms(0.5), P90: ms(0.9), P99: ms(0.99), P999: ms(0.999), Max: milliseconds(h.Max())}
}

// milliseconds rounds to a microsecond.
func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
