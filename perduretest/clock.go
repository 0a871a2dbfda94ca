package perduretest

import (
	"container/heap"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// clock stands still until it is moved. Safe for concurrent use.
type clock struct {
	mu     sync.Mutex
	now    time.Time // guarded by mu
	timers timerHeap // guarded by mu
	seq    uint64    // guarded by mu; timers of one instant fire in the order they were made
}

type timer struct {
	c     *clock
	at    time.Time
	seq   uint64
	f     func()
	place int // in the heap; -1 = not in it
}

// Now implements env.Clock.
func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc implements env.Clock. f is called by fire.
func (c *clock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	t := &timer{c: c, at: c.now.Add(max(d, 0)), seq: c.seq, f: f}
	heap.Push(&c.timers, t)
	return t
}

// Stop implements env.Timer.
func (t *timer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if t.place < 0 {
		return false
	}
	heap.Remove(&t.c.timers, t.place)
	return true
}

// fire calls one timer that is due; false when none is.
func (c *clock) fire() bool {
	c.mu.Lock()
	if len(c.timers) == 0 || c.timers[0].at.After(c.now) {
		c.mu.Unlock()
		return false
	}
	t := heap.Pop(&c.timers).(*timer)
	c.mu.Unlock()
	t.f()
	return true
}

// next is when the next timer is due.
func (c *clock) next() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.timers) == 0 {
		return time.Time{}, false
	}
	return c.timers[0].at, true
}

// set moves the clock on; it does not go back.
func (c *clock) set(to time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if to.After(c.now) {
		c.now = to
	}
}

type timerHeap []*timer

func (h timerHeap) Len() int { return len(h) }
func (h timerHeap) Less(i, j int) bool {
	if !h[i].at.Equal(h[j].at) {
		return h[i].at.Before(h[j].at)
	}
	return h[i].seq < h[j].seq
}
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}
func (h *timerHeap) Push(x any) {
	t := x.(*timer)
	t.place = len(*h)
	*h = append(*h, t)
}
func (h *timerHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	t.place = -1
	return t
}
