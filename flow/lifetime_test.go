package flow

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"
)

type ctxKey struct{}

func TestLifetime(t *testing.T) {
	stop := errors.New("stop")
	base := func() context.Context { return context.WithValue(context.Background(), ctxKey{}, 7) }
	t.Run("nothing happens", func(t *testing.T) {
		var l lifetime
		l.start(base(), 0)
		if _, ok := l.Deadline(); ok || l.Err() != nil || l.why() != nil || l.Value(ctxKey{}) != 7 {
			t.Error("it is not alive")
		}
		l.finish()
		if !errors.Is(l.Err(), context.Canceled) {
			t.Errorf("after its end: %v", l.Err())
		}
	})
	for _, early := range []bool{true, false} {
		t.Run("cancel", func(t *testing.T) {
			var l lifetime
			l.start(base(), time.Hour)
			if !early {
				l.Done()
			}
			l.cancel(stop)
			l.cancel(errors.New("too late"))
			<-l.Done()
			if l.Err() != context.Canceled || context.Cause(&l) != stop || l.why() != stop {
				t.Errorf("got %v, %v, %v", l.Err(), context.Cause(&l), l.why())
			}
			l.finish()
		})
		t.Run("deadline", func(t *testing.T) {
			var l lifetime
			l.start(base(), time.Nanosecond)
			if !early {
				<-l.Done()
			}
			for l.why() == nil {
				runtime.Gosched()
			}
			var timeout *TimeoutError
			if !errors.Is(l.Err(), context.DeadlineExceeded) || !errors.As(context.Cause(&l), &timeout) || !errors.As(l.why(), &timeout) {
				t.Errorf("got %v, %v, %v", l.Err(), context.Cause(&l), l.why())
			}
			l.finish()
		})
		t.Run("parent", func(t *testing.T) {
			parent, cancel := context.WithCancelCause(base())
			var l lifetime
			l.start(parent, 0)
			if !early {
				l.Done()
			}
			cancel(stop)
			if l.why() != stop || l.Err() != context.Canceled || context.Cause(&l) != stop {
				t.Errorf("got %v, %v", l.why(), l.Err())
			}
			l.finish()
		})
	}
	t.Run("the nearer deadline counts", func(t *testing.T) {
		near := time.Now().Add(time.Minute)
		parent, cancel := context.WithDeadline(base(), near)
		defer cancel()
		var l lifetime
		l.start(parent, time.Hour)
		if d, ok := l.Deadline(); !ok || !d.Equal(near) {
			t.Errorf("got %v", d)
		}
		l.start(parent, time.Second)
		if d, ok := l.Deadline(); !ok || !d.Before(near) {
			t.Errorf("got %v", d)
		}
	})
	t.Run("contexts made from it need no goroutine", func(t *testing.T) {
		var l lifetime
		l.start(base(), 0)
		before := runtime.NumGoroutine()
		var all []context.Context
		for range 100 {
			ctx, cancel := context.WithCancel(&l)
			defer cancel()
			all = append(all, ctx)
		}
		if n := runtime.NumGoroutine(); n > before+10 {
			t.Errorf("%d goroutines more", n-before)
		}
		l.cancel(stop)
		for _, ctx := range all {
			<-ctx.Done()
			if context.Cause(ctx) != stop {
				t.Fatalf("cause is %v", context.Cause(ctx))
			}
		}
	})
}

func TestBudget(t *testing.T) {
	b := budget{most: 10}
	ctx, cancel := context.WithCancelCause(context.Background())
	if err := b.take(ctx, 100); err != nil { // more than the whole, when nothing is under way
		t.Fatal(err)
	}
	got := make(chan error)
	go func() { got <- b.take(ctx, 5) }()
	b.give(100)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	go func() { got <- b.take(ctx, 6) }()
	cancel(ErrLost)
	if err := <-got; !errors.Is(err, ErrLost) {
		t.Errorf("got %v", err)
	}
}

func TestCutText(t *testing.T) {
	for _, c := range []struct {
		s    string
		n    int
		want string
	}{{"abc", 5, "abc"}, {"abc", 2, "ab"}, {"a€b", 2, "a"}, {"a€b", 4, "a€"}, {"\x80\x80\x80", 2, "\x80"}} {
		if got := cutText(c.s, c.n); got != c.want {
			t.Errorf("%q cut at %d is %q", c.s, c.n, got)
		}
	}
}

func TestKeys(t *testing.T) {
	type name string
	if k, ok := parseKey[name](keyText(name("a"))); k != "a" || !ok {
		t.Error(k)
	}
	if k, ok := parseKey[int8](keyText(int8(-3))); k != -3 || !ok {
		t.Error(k)
	}
	if k, ok := parseKey[uint64](keyText(uint64(1 << 63))); k != 1<<63 || !ok {
		t.Error(k)
	}
	if _, ok := parseKey[int8]("300"); ok {
		t.Error("300 is no int8")
	}
	if _, ok := parseKey[uint]("-1"); ok {
		t.Error("-1 is no uint")
	}
}

func TestTypeNames(t *testing.T) {
	for want, got := range map[string]string{
		"string": typeName[string](), "int": typeName[uint16](), "float": typeName[float32](), "bool": typeName[bool](),
		"time": typeName[time.Time](), "bytes": typeName[[]byte](), "json": typeName[map[string]int](),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for _, ok := range []bool{indexed[string](), indexed[[]string](), indexed[time.Time](), indexed[int](), indexed[float64](), indexed[bool]()} {
		if !ok {
			t.Error("something is not indexed that can be")
		}
	}
	if indexed[[]byte]() || indexed[struct{}]() || indexed[[]int]() {
		t.Error("something is indexed that cannot be")
	}
}

func indexed[T any]() bool {
	_, ok := indexFor[T]()
	return ok
}
