package blob

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Result is how a request ended, by its error.
type Result uint8

// The results. ResultOther is what never reached the store (arguments, a context
// that had ended) and what was found damaged.
const (
	ResultOK Result = iota
	ResultNotFound
	ResultPrecondition
	ResultAmbiguous
	ResultUnavailable
	ResultDenied
	ResultOther

	NumResults = int(ResultOther) + 1
)

// String is the result's name, fit for a metric's label.
func (r Result) String() string {
	return [NumResults]string{"ok", "not_found", "precondition", "ambiguous", "unavailable", "denied", "other"}[r]
}

// ResultOf is the result that an error of a Store stands for.
func ResultOf(err error) Result {
	switch {
	case err == nil:
		return ResultOK
	case errors.Is(err, ErrAmbiguous):
		return ResultAmbiguous
	case errors.Is(err, ErrNotFound):
		return ResultNotFound
	case errors.Is(err, ErrPrecondition):
		return ResultPrecondition
	case errors.Is(err, ErrUnavailable):
		return ResultUnavailable
	case errors.Is(err, ErrDenied):
		return ResultDenied
	default:
		return ResultOther
	}
}

// LatencyBounds are the upper bounds of the buckets of VerbStats, ascending.
var LatencyBounds = [...]time.Duration{
	1 * time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond, 7 * time.Millisecond,
	10 * time.Millisecond, 15 * time.Millisecond, 20 * time.Millisecond, 30 * time.Millisecond, 40 * time.Millisecond,
	50 * time.Millisecond, 60 * time.Millisecond, 80 * time.Millisecond, 100 * time.Millisecond, 125 * time.Millisecond,
	150 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond, 750 * time.Millisecond,
	1 * time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
}

// NumBuckets is one bucket for each bound, and one for what is slower.
const NumBuckets = len(LatencyBounds) + 1

// VerbStats counts the requests of one Kind.
type VerbStats struct {
	Results  [NumResults]uint64 // requests by Result
	BytesIn  uint64             // of objects read
	BytesOut uint64             // of objects sent, whatever became of them
	Latency  time.Duration      // the sum over all requests
	Buckets  [NumBuckets]uint64 // requests that took up to LatencyBounds[i]; the last: longer
}

// Requests is the number of requests, whatever became of them.
func (v VerbStats) Requests() uint64 {
	var n uint64
	for _, r := range v.Results {
		n += r
	}
	return n
}

// Quantile is an upper bound of the latency that the share q (0 to 1) of the
// requests did not exceed: the bound of its bucket; 0 without requests. Of the
// last bucket it is the last bound, too little.
func (v VerbStats) Quantile(q float64) time.Duration {
	rank := q * float64(v.Requests())
	var seen uint64
	for i, n := range v.Buckets {
		if seen += n; n > 0 && float64(seen) >= rank {
			return LatencyBounds[min(i, len(LatencyBounds)-1)]
		}
	}
	return 0
}

// Stats counts requests since the start, by Kind.
type Stats [NumKinds]VerbStats

// Since is what was added after before was taken.
func (s Stats) Since(before Stats) Stats {
	for k := range s {
		v, b := &s[k], &before[k]
		for i := range v.Results {
			v.Results[i] -= b.Results[i]
		}
		for i := range v.Buckets {
			v.Buckets[i] -= b.Buckets[i]
		}
		v.BytesIn -= b.BytesIn
		v.BytesOut -= b.BytesOut
		v.Latency -= b.Latency
	}
	return s
}

// Measured is a store that counts its requests.
type Measured interface {
	Store
	Stats() Stats
}

// Meter counts requests. The zero value is ready; safe for concurrent use; it
// allocates nothing.
type Meter struct{ verbs [NumKinds]verbMeter }

type verbMeter struct {
	results          [NumResults]atomic.Uint64
	in, out, latency atomic.Uint64 // bytes, bytes, nanoseconds
	buckets          [NumBuckets]atomic.Uint64
}

// Record counts one request: its result, the bytes of the object read and sent,
// and how long it took.
func (m *Meter) Record(k Kind, r Result, in, out int, took time.Duration) {
	v := &m.verbs[k]
	v.results[r].Add(1)
	v.in.Add(uint64(in))
	v.out.Add(uint64(out))
	v.latency.Add(uint64(max(took, 0)))
	i := 0
	for i < len(LatencyBounds) && took > LatencyBounds[i] {
		i++
	}
	v.buckets[i].Add(1)
}

// Stats is a snapshot. Requests that end meanwhile may be in it in part.
func (m *Meter) Stats() Stats {
	var s Stats
	for k := range m.verbs {
		from, to := &m.verbs[k], &s[k]
		for i := range to.Results {
			to.Results[i] = from.results[i].Load()
		}
		for i := range to.Buckets {
			to.Buckets[i] = from.buckets[i].Load()
		}
		to.BytesIn, to.BytesOut = from.in.Load(), from.out.Load()
		to.Latency = time.Duration(from.latency.Load())
	}
	return s
}

// metered counts the calls of a store that does not count its own.
type metered struct {
	inner Store
	clock env.Clock
	Meter
}

// NewMetered counts the calls of inner.
func NewMetered(inner Store, clock env.Clock) Measured { return &metered{inner: inner, clock: clock} }

func (s *metered) record(k Kind, err error, in, out int, began time.Time) {
	s.Record(k, ResultOf(err), in, out, s.clock.Now().Sub(began))
}

func (s *metered) Get(ctx context.Context, key string) (Object, error) {
	began := s.clock.Now()
	o, err := s.inner.Get(ctx, key)
	s.record(KindGet, err, len(o.Data), 0, began)
	return o, err
}

func (s *metered) Put(ctx context.Context, key string, data []byte, opts PutOptions) (Token, error) {
	began := s.clock.Now()
	token, err := s.inner.Put(ctx, key, data, opts)
	s.record(KindPut, err, 0, len(data), began)
	return token, err
}

func (s *metered) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	began := s.clock.Now()
	infos, err := s.inner.List(ctx, prefix, after, limit)
	s.record(KindList, err, 0, 0, began)
	return infos, err
}

func (s *metered) Delete(ctx context.Context, key string, opts DeleteOptions) error {
	began := s.clock.Now()
	err := s.inner.Delete(ctx, key, opts)
	s.record(KindDelete, err, 0, 0, began)
	return err
}
