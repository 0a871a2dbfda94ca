package flow

import (
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestDemand(t *testing.T) {
	type looks struct {
		n      int
		shares []float64
		most   int
		want   int // at the last of them; 0 before
	}
	for name, story := range map[string][]looks{
		"one busy stream":               {{4, []float64{0.8}, 4, 1}},
		"a pause between":               {{3, []float64{0.8}, 4, 0}, {1, []float64{0.6}, 4, 0}, {4, []float64{0.9}, 4, 1}},
		"there are all":                 {{100, []float64{1, 1, 1, 1}, 4, 0}},
		"one of two is not busy":        {{100, []float64{1, 0.5}, 4, 0}},
		"no stream":                     {{100, nil, 4, 0}},
		"only one may be":               {{100, []float64{1}, 1, 0}},
		"two idle ones":                 {{6, []float64{0, 0.2}, 4, -1}, {6, []float64{0.1}, 4, 0}},
		"two that are needed":           {{100, []float64{0.2, 0.2}, 4, 0}},
		"three where two would do":      {{6, []float64{0.3, 0.1, 0.1}, 4, -1}},
		"one, then another":             {{4, []float64{0.8}, 4, 1}, {4, []float64{0.8, 0.9}, 4, 1}},
		"busy again before it is given": {{5, []float64{0, 0}, 4, 0}, {1, []float64{0.5, 0}, 4, 0}, {6, []float64{0, 0}, 4, -1}},
	} {
		d := demand{pace: pace{busy: 0.7, idle: 0.3, hot: 4, cold: 6, rest: 3}}
		for i, l := range story {
			for n := range l.n {
				want := 0
				if n == l.n-1 {
					want = l.want
				}
				if got := d.look(l.shares, l.most); got != want {
					t.Errorf("%s: look %d.%d gives %d, want %d", name, i, n, got, want)
				}
			}
		}
	}
	d := demand{pace: pace{busy: 0.7, idle: 0.3, hot: 1, cold: 1, rest: 3}, pause: 3}
	for i, want := range []int{0, 0, 1} {
		if got := d.look([]float64{1}, 4); got != want {
			t.Errorf("look %d after one that could not be opened gives %d", i, got)
		}
	}
}

func TestWriteClock(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(1_000_000 + int64(ms)) }
	var c writeClock
	look := func(ms int, want float64) {
		t.Helper()
		if got := c.share(at(ms)); got < want-0.001 || got > want+0.001 {
			t.Errorf("at %d: %v, want %v", ms, got, want)
		}
	}
	c.begin(at(0))
	c.end(at(90))
	look(100, 0) // the first one
	look(200, 0)
	c.begin(at(220))
	c.end(at(230))
	c.begin(at(240))
	look(300, 0.7) // under way
	look(400, 1)
	c.end(at(450))
	look(500, 0.5)
	look(500, 0)
	look(600, 0)
}

// TestCreditsAreSharedOut: whatever comes and goes, what the servers hold and
// what runs are together what the worker has room for.
func TestCreditsAreSharedOut(t *testing.T) {
	w := &Worker{opts: WorkerOptions{Concurrency: 100, RPCConcurrency: 7}}
	stream := func() *session {
		s := newSession(w, nil)
		s.send = mux.NewSender(maxUnsent, func(*wire.WorkerFrame) error { return nil })
		t.Cleanup(func() { s.end(nil) })
		return s
	}
	a := stream()
	check := func(want int) {
		t.Helper()
		sum := w.busy[stepRoom]
		for _, s := range w.open {
			sum += s.room[stepRoom].credits
		}
		if sum != want {
			t.Errorf("%d credits and handlers, want %d", sum, want)
		}
	}
	if w.join(a) != 1 || a.room[stepRoom].credits != 100 || a.room[rpcRoom].credits != 7 {
		t.Errorf("the first stream has %+v", a.room)
	}
	if err := w.took(a, 101, 0); err == nil {
		t.Error("one more than granted was taken")
	}
	if err := w.took(a, 60, 3); err != nil {
		t.Fatal(err)
	}
	b := stream()
	w.join(b)
	check(100)
	if b.room[stepRoom].all() != 0 {
		t.Errorf("a further stream begins with %+v", b.room)
	}
	// Until both have about as much, credits move.
	for range 60 {
		w.freed(a, stepRoom)
		check(100)
	}
	if d := a.room[stepRoom].all() - b.room[stepRoom].all(); d < 0 || d > unevenness+1 {
		t.Errorf("the streams have %+v and %+v", a.room, b.room)
	}
	// One that goes gets nothing more; what it did not use goes back.
	if err := w.took(b, 20, 0); err != nil {
		t.Fatal(err)
	}
	w.retire(b)
	for range 5 {
		if w.freed(b, stepRoom) {
			t.Error("a stream that goes got a credit")
		}
	}
	check(100)
	w.leave(b)
	check(100)
	for range 15 {
		w.freed(b, stepRoom) // handlers of a stream that is gone
	}
	if a.room[stepRoom].credits != 100 || w.busy[stepRoom] != 0 {
		t.Errorf("the first stream has %+v", a.room)
	}
	// All are lost, and one comes back while handlers still run.
	if err := w.took(a, 10, 0); err != nil {
		t.Fatal(err)
	}
	w.leave(a)
	w.freed(a, stepRoom)
	c := stream()
	w.join(c)
	if c.room[stepRoom].credits != 91 {
		t.Errorf("the next stream has %+v", c.room)
	}
	for range 9 {
		w.freed(a, stepRoom)
	}
	if c.room[stepRoom].credits != 100 {
		t.Errorf("the next stream has %+v", c.room)
	}
}
