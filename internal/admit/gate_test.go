package admit

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var t0 = time.Unix(1_000_000, 0)

func at(d time.Duration) time.Time { return t0.Add(d) }

// fill takes n slots for a tenant.
func fill(t *testing.T, g *Gate, name string, n int, now time.Time) (tickets []Ticket) {
	t.Helper()
	for range n {
		d := g.Acquire(name, now)
		if d.Reason != Admitted {
			t.Fatalf("%s refused (%s) at %+v", name, d.Reason, g.Stats())
		}
		tickets = append(tickets, d.Ticket)
	}
	return tickets
}

func TestLimitHoldsAndOneTenantMayUseAll(t *testing.T) {
	g := NewGate(3)
	k := fill(t, g, "a", 3, at(0))
	d := g.Acquire("a", at(0))
	if d.Reason != OverLimit || d.RetryAfter < time.Second || d.RetryAfter > 30*time.Second {
		t.Fatalf("got %+v", d)
	}
	if !g.Release(k[0], at(1)) {
		t.Fatal("release refused")
	}
	fill(t, g, "a", 1, at(time.Second))
	if s := g.Stats(); s.InFlight != 3 || s.OverLimit != 1 || s.Tenants != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestOffNeverRefuses(t *testing.T) {
	g := NewGate(0)
	fill(t, g, "a", 10_000, at(0))
	if s := g.Stats(); s.InFlight != 10_000 || s.Limit != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestReleaseCountsOnce(t *testing.T) {
	g := NewGate(2)
	k := fill(t, g, "a", 2, at(0))
	if !g.Release(k[0], at(1)) || g.Release(k[0], at(1)) {
		t.Error("a second release counted")
	}
	fill(t, g, "b", 1, at(2)) // takes the same slot
	if g.Release(k[0], at(3)) {
		t.Error("an old ticket released another's turn")
	}
	if g.Release(Ticket{}, at(3)) || g.Release(Ticket{slot: 99}, at(3)) {
		t.Error("a ticket that was never given was released")
	}
	if s := g.Stats(); s.InFlight != 2 {
		t.Errorf("stats %+v", s)
	}
}

func TestGreedyTenantGivesWay(t *testing.T) {
	g := NewGate(4)
	greedy := fill(t, g, "greedy", 4, at(0))
	for range 3 { // three tries, but its share is two
		if d := g.Acquire("small", at(0)); d.Reason != OverLimit || d.RetryAfter > maxClaimRetry {
			t.Fatalf("got %+v", d)
		}
	}
	// The first two slots that come free are kept for small.
	g.Release(greedy[0], at(time.Second))
	if d := g.Acquire("greedy", at(time.Second)); d.Reason != OverShare {
		t.Fatalf("greedy took the slot that small waits for: %+v", d)
	}
	fill(t, g, "small", 1, at(2*time.Second))
	g.Release(greedy[1], at(2*time.Second))
	if d := g.Acquire("greedy", at(2*time.Second)); d.Reason != OverShare {
		t.Fatalf("greedy took the second slot of small's share: %+v", d)
	}
	fill(t, g, "small", 1, at(3*time.Second))
	// Small has its share now; both are at two of four.
	g.Release(greedy[2], at(3*time.Second))
	fill(t, g, "greedy", 1, at(3*time.Second))
	if s := g.Stats(); s.OverShare != 2 || s.InFlight != 4 {
		t.Errorf("stats %+v", s)
	}
}

func TestClaimExpiresSoNoSlotIdles(t *testing.T) {
	g := NewGate(2)
	k := fill(t, g, "a", 2, at(0))
	g.Acquire("gone", at(0))
	g.Release(k[0], at(time.Second))
	if d := g.Acquire("a", at(time.Second)); d.Reason != OverShare {
		t.Fatalf("got %+v", d)
	}
	fill(t, g, "a", 1, at(claimWindow))
	if s := g.Stats(); s.Tenants != 1 {
		t.Errorf("the tenant that went away is still there: %+v", s)
	}
}

func TestRetryAfterSpreadsTheCrowd(t *testing.T) {
	g := NewGate(10)
	for i, k := range fill(t, g, "a", 10, at(0)) {
		g.Release(k, at(2*time.Second+time.Duration(i)))
	}
	for range 16 * 8 { // the average learns that a turn takes two seconds
		g.Release(fill(t, g, "a", 1, at(0))[0], at(2*time.Second))
	}
	fill(t, g, "a", 10, at(0))
	var last time.Duration
	for i := range 100 {
		d := g.Acquire("a", at(0)).RetryAfter
		if d < last {
			t.Fatalf("client %d is told %v, the one before %v", i, d, last)
		}
		last = d
	}
	// 100 clients at five slots a second are served after about 20 s.
	if last < 15*time.Second || last > 21*time.Second {
		t.Errorf("the hundredth client is told %v", last)
	}
	for range 10_000 {
		last = g.Acquire("a", at(0)).RetryAfter
	}
	if last != maxRetry {
		t.Errorf("not bounded: %v", last)
	}
}

// TestProperties drives random tenants against a plain recount and checks the
// promises of the package comment at each step.
func TestProperties(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		limit := 1 + r.IntN(12)
		names := 1 + r.IntN(6)
		g := NewGate(limit)
		now := t0
		type turn struct {
			name string
			k    Ticket
		}
		var turns []turn
		held := map[string]int{}
		lastRefused := map[string]time.Time{}
		for step := range 2000 {
			now = now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
			if len(turns) > 0 && r.IntN(3) == 0 {
				i := r.IntN(len(turns))
				if !g.Release(turns[i].k, now) {
					t.Fatalf("seed %d step %d: a held ticket was not released", seed, step)
				}
				held[turns[i].name]--
				turns = append(turns[:i], turns[i+1:]...)
				continue
			}
			name := fmt.Sprint("t", r.IntN(names))
			d := g.Acquire(name, now)
			othersClaim := false
			for n, when := range lastRefused {
				othersClaim = othersClaim || n != name && now.Sub(when) < claimWindow
			}
			switch {
			case d.Reason == Admitted:
				turns = append(turns, turn{name, d.Ticket})
				held[name]++
			case len(turns) < limit && !othersClaim:
				t.Fatalf("seed %d step %d: not work-conserving: %s refused (%s), %d of %d in flight", seed, step, name, d.Reason, len(turns), limit)
			case len(turns) < limit && held[name] == 0:
				t.Fatalf("seed %d step %d: %s has nothing in flight and a slot is free, yet it is refused", seed, step, name)
			}
			if d.Reason != Admitted {
				lastRefused[name] = now
				if d.RetryAfter < minRetry || d.RetryAfter > maxRetry {
					t.Fatalf("retry after %v", d.RetryAfter)
				}
			}
			s := g.Stats()
			if s.InFlight != len(turns) || s.InFlight > limit || s.Tenants > names {
				t.Fatalf("seed %d step %d: %+v with %d turns", seed, step, s, len(turns))
			}
		}
		for _, tn := range turns {
			g.Release(tn.k, now)
		}
		g.Acquire("x", now.Add(claimWindow))
		if s := g.Stats(); s.InFlight != 1 || s.Tenants != 1 || g.claims != 0 || g.oldest != nil || g.newest != nil {
			t.Fatalf("seed %d: left behind: %+v, claims %d", seed, s, g.claims)
		}
	}
}

// TestShareIsReached: against a tenant that asks all the time, one that retries
// as told gets its share within a few turns.
func TestShareIsReached(t *testing.T) {
	const limit = 8
	g := NewGate(limit)
	type turn struct {
		name string
		k    Ticket
		ends time.Time
	}
	var turns []turn
	held := map[string]int{}
	var smallNext [limit]time.Time // eight clients of small
	for ms := range 60_000 {
		now := at(time.Duration(ms) * time.Millisecond)
		keep := turns[:0]
		for _, tn := range turns {
			if now.Before(tn.ends) {
				keep = append(keep, tn)
				continue
			}
			g.Release(tn.k, now)
			held[tn.name]--
		}
		turns = keep
		try := func(name string) Decision {
			d := g.Acquire(name, now)
			if d.Reason == Admitted {
				held[name]++
				turns = append(turns, turn{name, d.Ticket, now.Add(2*time.Second + time.Duration(len(turns)*37)*time.Millisecond)})
			}
			return d
		}
		try("greedy")
		for i := range smallNext {
			if ms >= 10_000 && !now.Before(smallNext[i]) {
				if d := try("small"); d.Reason != Admitted {
					smallNext[i] = now.Add(d.RetryAfter)
				} else {
					smallNext[i] = now.Add(2 * time.Second)
				}
			}
		}
		if ms == 9_999 && held["greedy"] != limit {
			t.Fatalf("alone, greedy holds %d of %d", held["greedy"], limit)
		}
		if ms > 25_000 && held["small"] == 0 {
			t.Fatalf("at %d ms small is starved: %v", ms, held)
		}
	}
	if held["small"] < limit/2-1 {
		t.Errorf("small holds %d of %d at the end", held["small"], limit)
	}
}

func TestConcurrentUseKeepsTheLimit(t *testing.T) {
	const limit = 7
	g := NewGate(limit)
	l := NewLimiter(limit)
	var inFlight, open atomic.Int64
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			name := fmt.Sprint("t", w%5)
			for i := range 3000 {
				now := at(time.Duration(i) * time.Millisecond)
				if d := g.Acquire(name, now); d.Reason == Admitted {
					if n := inFlight.Add(1); n > limit {
						t.Errorf("%d in flight", n)
					}
					inFlight.Add(-1)
					if !g.Release(d.Ticket, now) {
						t.Error("release refused")
					}
				}
				if l.TryAcquire() {
					if n := open.Add(1); n > limit {
						t.Errorf("%d open", n)
					}
					open.Add(-1)
					l.Release()
				}
			}
		})
	}
	wg.Wait()
	if g.Stats().InFlight != 0 || l.Open() != 0 {
		t.Errorf("left: %+v, %d", g.Stats(), l.Open())
	}
}

func TestLimiter(t *testing.T) {
	l := NewLimiter(1)
	if !l.TryAcquire() || l.TryAcquire() || l.Refused() != 1 {
		t.Error("limit 1 does not hold")
	}
	l.Release()
	if !l.TryAcquire() {
		t.Error("a free place is refused")
	}
	l.Release()
	defer func() {
		if recover() == nil {
			t.Error("a release too many goes unseen")
		}
	}()
	l.Release()
}

func TestNoAllocations(t *testing.T) {
	g := NewGate(4)
	fill(t, g, "warm", 4, at(0))
	full := NewGate(1)
	fill(t, full, "a", 1, at(0))
	full.Acquire("b", at(0))
	free := NewGate(4)
	free.Release(fill(t, free, "a", 1, at(0))[0], at(0))
	for name, f := range map[string]func(){
		"admit and release": func() { free.Release(free.Acquire("a", at(0)).Ticket, at(0)) },
		"refuse":            func() { full.Acquire("a", at(0)) },
		"refuse a claimant": func() { full.Acquire("b", at(0)) },
	} {
		if n := testing.AllocsPerRun(1000, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	b.ReportAllocs()
	g := NewGate(64)
	for b.Loop() {
		g.Release(g.Acquire("tenant", t0).Ticket, t0)
	}
}

func BenchmarkRefuse(b *testing.B) {
	b.ReportAllocs()
	g := NewGate(1)
	g.Acquire("tenant", t0)
	for b.Loop() {
		g.Acquire("other", t0)
	}
}
