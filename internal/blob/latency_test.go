package blob_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
)

func TestLatencyHasItsQuantiles(t *testing.T) {
	r := splitmix(1)
	for _, l := range []blob.Latency{blob.S3Like, blob.Around(50 * time.Millisecond)} {
		draws := make([]time.Duration, 20_000)
		for i := range draws {
			draws[i] = l.Draw(&r)
		}
		slices.Sort(draws)
		for q, want := range map[float64]time.Duration{0.5: l.P50, 0.99: l.P99} {
			got := draws[int(q*float64(len(draws)))]
			if off := float64(got)/float64(want) - 1; off < -0.08 || off > 0.08 {
				t.Errorf("%v: quantile %v is %v", l, q, got)
			}
		}
		if draws[0] <= 0 || draws[len(draws)-1] > 4*l.P99 {
			t.Errorf("%v: from %v to %v", l, draws[0], draws[len(draws)-1])
		}
	}
}

func TestLatencyDrawsTheSameNumberOfValues(t *testing.T) {
	for _, l := range []blob.Latency{{}, {P50: -1}, {P50: time.Second}, {P50: time.Second, P99: time.Millisecond}, blob.S3Like} {
		r, two := splitmix(7), splitmix(7)
		d := l.Draw(&r)
		two.Uint64()
		two.Uint64()
		if r != two {
			t.Errorf("%v draws another number of values", l)
		}
		if l != blob.S3Like && d != max(l.P50, 0) {
			t.Errorf("%v gave %v", l, d)
		}
	}
}

func TestDelayedConformance(t *testing.T) {
	r := splitmix(1)
	all := blob.Latency{P50: 20 * time.Microsecond, P99: 100 * time.Microsecond}
	blobtest.Run(t, func(*testing.T) blob.Store {
		return blob.Delayed(mem.New(mem.Options{}), blob.Latencies{all, all, all, all}, env.SystemClock{}, &r)
	})
}

// TestDelayedCallsRunBesideEachOther: a hundred puts take one latency, and what
// has none does not wait.
func TestDelayedCallsRunBesideEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock, r := env.SystemClock{}, splitmix(1)
		const d = 50 * time.Millisecond
		var l blob.Latencies
		l[blob.KindPut] = blob.Latency{P50: d}
		s := blob.Delayed(mem.New(mem.Options{}), l, clock, &r)
		began := clock.Now()
		var puts sync.WaitGroup
		for range 100 {
			puts.Go(func() {
				if _, err := s.Put(t.Context(), "k", nil, blob.PutOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
		puts.Wait()
		if took := clock.Now().Sub(began); took != d {
			t.Errorf("took %v", took)
		}
		if _, err := s.Get(t.Context(), "k"); err != nil || clock.Now().Sub(began) != d {
			t.Errorf("get: %v after %v", err, clock.Now().Sub(began))
		}
	})
}

func TestSleepBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := env.SystemClock{}
		sleep := blob.SleepBy(clock)
		ctx, cancel := context.WithCancel(t.Context())
		began := clock.Now()
		clock.AfterFunc(time.Second, cancel)
		if err := sleep(ctx, time.Millisecond); err != nil {
			t.Error(err)
		}
		if err := sleep(ctx, time.Hour); !errors.Is(err, context.Canceled) || clock.Now().Sub(began) != time.Second {
			t.Errorf("%v after %v", err, clock.Now().Sub(began))
		}
		if err := sleep(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
