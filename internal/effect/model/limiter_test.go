package model

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

func TestLimiterIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1, 3)
		if err := l.Acquire(context.Background()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		order := make(chan int, 3)
		for i := range 3 {
			go func() {
				c := context.Background()
				if i == 1 {
					c = ctx
				}
				if err := l.Acquire(c); err != nil {
					order <- -i
					return
				}
				order <- i
			}()
			synctest.Wait() // i is in the queue before i+1
		}
		if l.Waiting() != 3 || l.InFlight() != 1 || l.TryAcquire() {
			t.Fatalf("waiting %d, in flight %d", l.Waiting(), l.InFlight())
		}
		var e *Error
		if err := l.Acquire(context.Background()); !errors.As(err, &e) || e.Code != CodeQueueFull || e.Kind != KindRetryable {
			t.Fatalf("full queue: %v", err)
		}
		cancel()
		if got := <-order; got != -1 {
			t.Fatalf("cancelled: %d", got)
		}
		for _, want := range []int{0, 2} {
			l.Release()
			if got := <-order; got != want {
				t.Fatalf("got %d, want %d", got, want)
			}
		}
		if l.Waiting() != 0 || l.InFlight() != 1 {
			t.Fatalf("waiting %d, in flight %d", l.Waiting(), l.InFlight())
		}
		l.Release()
		if !l.TryAcquire() {
			t.Fatal("a free permit is refused")
		}
		l.Release()
		if err := l.Acquire(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled context: %v", err)
		}
		defer func() {
			if recover() == nil {
				t.Error("Release without a permit did not panic")
			}
		}()
		l.Release()
	})
}

func TestLimiterWithoutLimitOrQueue(t *testing.T) {
	free := NewLimiter(0, 0)
	for range 100 {
		if err := free.Acquire(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if free.InFlight() != 100 || free.Limit() != 0 {
		t.Errorf("in flight %d", free.InFlight())
	}
	tight := NewLimiter(1, 0)
	if !tight.TryAcquire() || tight.Acquire(context.Background()) == nil {
		t.Error("no queue, yet no refusal")
	}
}

// TestLimiterUnderFire mixes callers that give up with callers that do not.
func TestLimiterUnderFire(t *testing.T) {
	const limit = 3
	l := NewLimiter(limit, 1000)
	var now atomic.Int64
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for range 200 {
				ctx, cancel := context.WithCancel(context.Background())
				if i%2 == 0 {
					go cancel()
				}
				if l.Acquire(ctx) == nil {
					if now.Add(1) > limit {
						t.Error("limit passed")
					}
					now.Add(-1)
					l.Release()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if l.InFlight() != 0 || l.Waiting() != 0 {
		t.Errorf("left over: %d in flight, %d waiting", l.InFlight(), l.Waiting())
	}
}
