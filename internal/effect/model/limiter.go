package model

import (
	"context"
	"fmt"
	"sync"
)

// Limiter gives out at most a fixed number of permits at a time, first come
// first served. Whoever holds a permit may have one call of the provider in
// flight and releases it after Generate has returned, which is after the
// upstream's stream has ended; so the number of streams stays within the limit.
// Safe for concurrent use.
type Limiter struct {
	limit      int
	maxWaiting int

	mu       sync.Mutex
	inFlight int    // guarded by mu
	waiting  int    // guarded by mu; length of the ring, at most maxWaiting
	head     waiter // guarded by mu; sentinel of the ring of waiters, oldest next
}

// waiter is one Acquire in the queue.
type waiter struct {
	prev, next *waiter
	granted    bool          // guarded by Limiter.mu
	ready      chan struct{} // closed with granted
}

// NewLimiter makes a limiter of limit permits (0 or less: no limit, calls are
// only counted) with a queue of at most maxWaiting (0 or less: no queue, a
// call without a free permit is refused).
func NewLimiter(limit, maxWaiting int) *Limiter {
	l := &Limiter{limit: limit, maxWaiting: max(maxWaiting, 0)}
	l.head.prev, l.head.next = &l.head, &l.head
	return l
}

// Acquire takes a permit, waiting in turn. It returns an *Error: code
// CodeQueueFull (retryable) at once when the queue is full, or KindCancelled
// when ctx ends first. Only a nil result must be followed by Release.
func (l *Limiter) Acquire(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return cancelled(ctx)
	}
	l.mu.Lock()
	if l.free() {
		l.inFlight++
		l.mu.Unlock()
		return nil
	}
	if l.waiting >= l.maxWaiting {
		l.mu.Unlock()
		return &Error{
			Kind: KindRetryable, Code: CodeQueueFull,
			Message: fmt.Sprintf("all %d permits of the provider are in use and %d calls wait", l.limit, l.maxWaiting),
			Hint:    "raise the provider's concurrency_limit, or send fewer turns at a time",
		}
	}
	w := l.enqueue()
	l.mu.Unlock()

	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	granted := w.granted
	if !granted {
		l.unlink(w)
	}
	l.mu.Unlock()
	if granted {
		l.Release() // the permit came too late: hand it on
	}
	return cancelled(ctx)
}

// TryAcquire takes a permit if one is free and nobody waits for it.
func (l *Limiter) TryAcquire() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.free() {
		return false
	}
	l.inFlight++
	return true
}

// Release gives one permit back: to the oldest waiter, if there is one. It
// panics when no permit is out, which is a bug of the caller.
func (l *Limiter) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inFlight == 0 {
		panic("model: Limiter.Release without a permit")
	}
	w := l.head.next
	if w == &l.head {
		l.inFlight--
		return
	}
	l.unlink(w)
	w.granted = true
	close(w.ready)
}

// InFlight is the number of permits that are out.
func (l *Limiter) InFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inFlight
}

// Waiting is the length of the queue.
func (l *Limiter) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting
}

// Limit is the number of permits; 0 means no limit.
func (l *Limiter) Limit() int { return max(l.limit, 0) }

// free reports whether a newcomer may have a permit. l.mu is held.
func (l *Limiter) free() bool {
	return l.limit <= 0 || l.inFlight < l.limit && l.waiting == 0
}

func (l *Limiter) enqueue() *waiter {
	w := &waiter{ready: make(chan struct{})}
	last := l.head.prev
	w.prev, w.next = last, &l.head
	last.next, l.head.prev = w, w
	l.waiting++
	return w
}

func (l *Limiter) unlink(w *waiter) {
	w.prev.next, w.next.prev = w.next, w.prev
	w.prev, w.next = nil, nil
	l.waiting--
}
