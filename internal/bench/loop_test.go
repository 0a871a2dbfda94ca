package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// takes is an operation of constant time.
func takes(d time.Duration) Op {
	return func(context.Context, int, time.Time) (time.Time, error) {
		time.Sleep(d)
		return time.Time{}, nil
	}
}

// ms holds a duration to a quantile of a histogram, which is 0.8 % off at most.
func near(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if diff := (got - want).Abs(); diff > want/100+time.Microsecond {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

func TestClosedLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begun, ended int
		l := &Loop{Clients: 4, Warmup: time.Second, Duration: 10 * time.Second, Op: takes(10 * time.Millisecond),
			WindowBegin: func() { begun++ }, WindowEnd: func() { ended++ }}
		res, err := l.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if res.Units < 3996 || res.Units > 4004 || res.Elapsed != 10*time.Second || begun != 1 || ended != 1 || res.Errors != 0 {
			t.Errorf("%d units in %v, window begun %d and ended %d times, %d errors", res.Units, res.Elapsed, begun, ended, res.Errors)
		}
		near(t, "p50", res.Latency.Quantile(0.5), 10*time.Millisecond)
		near(t, "p99", res.Latency.Quantile(0.99), 10*time.Millisecond)
	})
}

// A unit's latency is its share of the operation's, and an operation may end
// before it returns.
func TestLoopUnitsAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Loop{Clients: 1, Units: 10, Duration: 10 * time.Second, Op: func(_ context.Context, _ int, from time.Time) (time.Time, error) {
			time.Sleep(100 * time.Millisecond)
			return from.Add(50 * time.Millisecond), nil
		}}
		res, err := l.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if res.Units < 990 || res.Units > 1000 || res.Units%10 != 0 {
			t.Errorf("%d units, want about 1,000", res.Units)
		}
		near(t, "p50 of a unit", res.Latency.Quantile(0.5), 5*time.Millisecond)
	})
}

// An open loop counts latency from the intended start, also when nobody is free.
func TestOpenLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Loop{Clients: 8, Rate: 100, Warmup: time.Second, Duration: 10 * time.Second, Op: takes(20 * time.Millisecond)}
		res, err := l.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if res.Units < 998 || res.Units > 1001 || res.Late != 0 {
			t.Errorf("%d units and %d not started, want 1,000 and 0", res.Units, res.Late)
		}
		near(t, "p50", res.Latency.Quantile(0.5), 20*time.Millisecond)
	})
	synctest.Test(t, func(t *testing.T) {
		// One client is busy for twice the gap: it falls behind for ever.
		l := &Loop{Clients: 1, Rate: 100, Duration: 10 * time.Second, Op: takes(20 * time.Millisecond)}
		res, err := l.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if res.Units < 495 || res.Units > 505 || res.Late < 490 || res.Late > 505 {
			t.Errorf("%d units and %d not started, want 500 of each", res.Units, res.Late)
		}
		if p99 := res.Latency.Quantile(0.99); p99 < 4500*time.Millisecond || p99 > 5100*time.Millisecond {
			t.Errorf("p99 is %v, want about 5 s: the wait counts", p99)
		}
		if lag := res.Lag.Max(); lag < 4500*time.Millisecond {
			t.Errorf("the largest lag is %v, want about 5 s", lag)
		}
	})
}

func TestLoopFailures(t *testing.T) {
	refused := errors.New("refused")
	synctest.Test(t, func(t *testing.T) {
		l := &Loop{Clients: 3, Duration: time.Hour, Op: func(context.Context, int, time.Time) (time.Time, error) { return time.Time{}, refused }}
		res, err := l.Run(t.Context())
		if !errors.Is(err, refused) || res.Errors < hopeless {
			t.Errorf("after %d failures: %v, want the first of them after %d", res.Errors, err, hopeless)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		l := &Loop{Clients: 3, Duration: 10 * time.Second, Op: func(context.Context, int, time.Time) (time.Time, error) {
			time.Sleep(time.Millisecond)
			if n.Add(1)%10 == 0 {
				return time.Time{}, refused
			}
			return time.Time{}, nil
		}}
		res, err := l.Run(t.Context())
		if err != nil || !errors.Is(res.First, refused) {
			t.Fatal(err, res.First)
		}
		if share := float64(res.Errors) / float64(res.Units+res.Errors); share < 0.09 || share > 0.11 {
			t.Errorf("%d errors beside %d units, want a tenth", res.Errors, res.Units)
		}
	})
}

func TestLoopEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		for _, rate := range []float64{0, 50} {
			l := &Loop{Clients: 2, Rate: rate, Duration: time.Hour, Op: func(ctx context.Context, _ int, _ time.Time) (time.Time, error) {
				<-ctx.Done()
				return time.Time{}, ctx.Err()
			}}
			if _, err := l.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("rate %v: %v, want the context's end", rate, err)
			}
		}
	})
	synctest.Test(t, func(t *testing.T) {
		// An operation that hangs is given up after the drain.
		l := &Loop{Clients: 2, Duration: time.Second, Op: func(ctx context.Context, c int, _ time.Time) (time.Time, error) {
			if c == 1 {
				<-ctx.Done()
				return time.Time{}, ctx.Err()
			}
			time.Sleep(time.Millisecond)
			return time.Time{}, nil
		}}
		begin := time.Now()
		if res, err := l.Run(t.Context()); err != nil || res.Units < 900 {
			t.Errorf("%v, %+v", err, res)
		}
		if took := time.Since(begin); took != time.Second+drainTime {
			t.Errorf("it took %v, want the window and %v", took, drainTime)
		}
	})
	for _, l := range []*Loop{{}, {Clients: 1}, {Clients: 1, Duration: 1}, {Clients: maxClients + 1, Duration: 1, Op: takes(1)}, {Clients: 1, Duration: 1, Rate: -1, Op: takes(1)}} {
		if _, err := l.Run(t.Context()); err == nil {
			t.Errorf("%+v was accepted", l)
		}
	}
}

func TestLoopProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var warm, cold int
		l := &Loop{Clients: 1, Warmup: 3 * time.Second, Duration: 4 * time.Second, Op: takes(10 * time.Millisecond), Progress: func(p Progress) {
			if p.Units < 98 || p.Units > 101 {
				t.Errorf("%d units in a second", p.Units)
			}
			if p.Warm {
				warm++
			} else {
				cold++
			}
		}}
		if _, err := l.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if cold < 2 || warm < 3 {
			t.Errorf("told %d times in 3 s of warm-up and %d times in 4 s", cold, warm)
		}
	})
}

func TestHist(t *testing.T) {
	var h Hist
	if h.Quantile(0.5) != 0 || h.Count() != 0 || h.Latency() != (Latency{}) {
		t.Error("an empty histogram has values")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	var all []time.Duration
	for range 20_000 {
		d := time.Duration(1 << rng.IntN(36))
		d += time.Duration(rng.Int64N(int64(d)))
		all = append(all, d)
		h.Record(d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.999, 1} {
		want := all[max(int(q*float64(len(all))+0.9999999), 1)-1]
		got := h.Quantile(q)
		if diff := float64((got - want).Abs()) / float64(want); diff > 0.008 {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if h.Max() != all[len(all)-1] || h.Count() != uint64(len(all)) {
		t.Errorf("max %v count %d, want %v %d", h.Max(), h.Count(), all[len(all)-1], len(all))
	}
	var edge Hist
	edge.Record(-time.Second)
	edge.Record(1 << 62)
	if edge.Quantile(0.5) != 0 || edge.Quantile(1) <= 1<<topBits-1<<(topBits-subBits) || edge.Max() != 1<<62 {
		t.Errorf("edges: %v %v %v", edge.Quantile(0.5), edge.Quantile(1), edge.Max())
	}
}

func TestBuckets(t *testing.T) {
	last := -1
	for v := uint64(0); v < 1<<topBits; v += 1 + v/500 {
		i := bucket(v)
		if i < last || i > last+1 && last >= 0 {
			t.Fatalf("bucket of %d is %d after %d", v, i, last)
		}
		last = i
		if m := uint64(middle(i)); bucket(m) != i {
			t.Fatalf("the middle %d of bucket %d of %d is in bucket %d", m, i, v, bucket(m))
		}
	}
	if last != buckets-1 {
		t.Errorf("the last bucket is %d, want %d", last, buckets-1)
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (a b) c) S 1 12 12 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1 0 100"))
	f.Add([]byte("1 ("))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseStat(b) })
}

func TestParseStat(t *testing.T) {
	s, err := parseStat([]byte("12 (a b) c) S 1 12 12 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1 0 100"))
	want := stat{pid: 12, parent: 1, own: 1100 * time.Millisecond, reaped: 150 * time.Millisecond}
	if err != nil || s != want {
		t.Errorf("%+v, %v; want %+v", s, err, want)
	}
	for _, bad := range []string{"", "12", "12 (x) S 1", "x (x) S 1 12 12 0 -1 4194560 1 2 3 4 50 60 7 8 20"} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	all := map[int]stat{1: {1, 0, 5, 0}, 2: {2, 1, 1, 10}, 3: {3, 2, 2, 0}, 4: {4, 3, 4, 20}, 9: {9, 1, 100, 0}}
	if got := sumCPU(all, 2); got != 37 {
		t.Errorf("the CPU of a tree is %d, want 37", got)
	}
}

func TestThisMachine(t *testing.T) {
	m := Machine()
	if m["kernel"] == "" || m["cpu"] == "" {
		t.Errorf("%v", m)
	}
	p, err := thisPlace(t.TempDir())
	if err != nil || p.SyncMS <= 0 || p.Cores < 1 || !strings.HasPrefix(p.GoVersion, "go") {
		t.Errorf("%+v, %v", p, err)
	}
}
