package cluster

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
)

// bubbleEnv is the world of a synctest bubble.
func bubbleEnv() env.Env {
	clock := env.SystemClock{}
	began := clock.Now()
	return env.Env{Clock: clock, Rand: testRand, Boot: func() time.Duration { return clock.Now().Sub(began) }}
}

func leaseConfig(store blob.Store, node string) LeaseConfig {
	return LeaseConfig{Store: store, Env: bubbleEnv(), Node: node, Address: node + ":1", Version: "test"}
}

func readNode(t *testing.T, store blob.Store, id string) Node {
	t.Helper()
	obj, err := store.Get(t.Context(), NodeKey(id))
	if err != nil {
		t.Fatal(err)
	}
	n, err := DecodeNode(NodeKey(id), obj.Data)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func hold(t *testing.T, cfg LeaseConfig) *Lease {
	t.Helper()
	l, err := Hold(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestALeaseIsRenewedAtTheAgreedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		l := hold(t, leaseConfig(store, "a"))
		time.Sleep(350 * time.Second)
		if n := readNode(t, store, "a"); n.Counter < 95 || n.Counter > 101 || n.Released || n.TTL() != DefaultTTL {
			t.Errorf("after 350 s: %+v", n)
		}
		if !l.Valid() || l.Err() != nil {
			t.Errorf("valid %v, %v", l.Valid(), l.Err())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := readNode(t, store, "a"); !n.Released || l.Valid() || !isClosed(l.Lost()) || !errors.Is(l.Err(), ErrReleased) {
			t.Errorf("after the release: %+v, %v, %v", n, l.Valid(), l.Err())
		}
	})
}

// TestALeaseEndsOnTimeWithoutTheStore checks both kinds of outage: a store that
// refuses, and one that does not answer at all.
func TestALeaseEndsOnTimeWithoutTheStore(t *testing.T) {
	for name, outcome := range map[string]blob.Fault{"refuses": {Outcome: blob.Refused}, "is silent": {Before: time.Hour}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var down atomic.Bool
				inner := mem.New(mem.Options{})
				store := blob.NewFaulty(inner, func(blob.Op) blob.Fault {
					if down.Load() {
						return outcome
					}
					return blob.Fault{}
				}, blob.FaultHooks{Sleep: func(ctx context.Context, d time.Duration) error { return pause(ctx, env.SystemClock{}, d) }})
				l := hold(t, leaseConfig(store, "a"))
				down.Store(true)
				time.Sleep(9499 * time.Millisecond)
				if !l.Valid() {
					t.Error("over too early")
				}
				time.Sleep(time.Millisecond)
				synctest.Wait()
				if l.Valid() || !isClosed(l.Lost()) || !errors.Is(l.Err(), ErrLost) {
					t.Errorf("not over in time: %v, %v", l.Valid(), l.Err())
				}
				down.Store(false)
				time.Sleep(time.Minute)
				if l.Valid() || readNode(t, inner, "a").Counter > 5 {
					t.Error("it came back")
				}
				if err := l.Release(t.Context()); !errors.Is(err, ErrLost) {
					t.Errorf("release: %v", err)
				}
			})
		})
	}
}

func TestALeaseSurvivesAShortOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, clock := env.SystemClock{}.Now(), env.SystemClock{}
		store := blob.NewFaulty(mem.New(mem.Options{}), func(op blob.Op) blob.Fault {
			if s := clock.Now().Sub(began) % (20 * time.Second); s > 9*time.Second && s < 14*time.Second {
				return blob.Fault{Outcome: []blob.Outcome{blob.Refused, blob.Lost, blob.AnswerLost, blob.Late}[op.N%4]}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		l := hold(t, leaseConfig(store, "a"))
		time.Sleep(10 * time.Minute)
		if !l.Valid() {
			t.Error(l.Err())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestANewLifeTakesTheLeaseAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		old := hold(t, leaseConfig(store, "a"))
		began := env.SystemClock{}.Now()
		l := hold(t, leaseConfig(store, "a"))
		if d := (env.SystemClock{}).Now().Sub(began); d > 0 || !l.Valid() {
			t.Errorf("took %v", d)
		}
		time.Sleep(5 * time.Second)
		if old.Valid() || !errors.Is(old.Err(), ErrLost) || !strings.Contains(old.Err().Error(), "data directory") {
			t.Errorf("the former life: %v, %v", old.Valid(), old.Err())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if n := readNode(t, store, "a"); n.Counter < 3 {
			t.Errorf("the counter began anew: %+v", n)
		}
	})
}

// denied is a store that one may read, but not write.
type denied struct{ blob.Store }

func (denied) Put(context.Context, string, []byte, blob.PutOptions) (blob.Token, error) {
	return "", blob.ErrDenied
}

func TestHoldRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		for _, ttl := range []time.Duration{time.Millisecond, 2 * time.Minute, time.Second + 1, -1} {
			cfg := leaseConfig(store, "a")
			cfg.TTL = ttl
			if _, err := Hold(t.Context(), cfg); !errors.Is(err, ErrInvalid) {
				t.Errorf("TTL %v: %v", ttl, err)
			}
		}
		put(t, store, NodeKey("new"), `{"format":3}`)
		if _, err := Hold(t.Context(), leaseConfig(store, "new")); !errors.Is(err, ErrTooNew) {
			t.Errorf("a newer lease: %v", err)
		}
		put(t, store, NodeKey("bad"), `{"format":1}`)
		if _, err := Hold(t.Context(), leaseConfig(store, "bad")); !errors.Is(err, ErrDamaged) {
			t.Errorf("a damaged lease: %v", err)
		}
		if _, err := Hold(t.Context(), leaseConfig(denied{store}, "a")); !errors.Is(err, blob.ErrDenied) {
			t.Errorf("without rights: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		down := blob.NewFaulty(store, func(blob.Op) blob.Fault { return blob.Fault{Outcome: blob.Refused} }, blob.FaultHooks{})
		env.SystemClock{}.AfterFunc(time.Minute, cancel)
		if _, err := Hold(ctx, leaseConfig(down, "a")); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "unavailable") {
			t.Errorf("without a store: %v", err)
		}
	})
}

func TestADeletedLeaseIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		l := hold(t, leaseConfig(store, "a"))
		if err := store.Delete(t.Context(), NodeKey("a"), blob.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		if l.Valid() || !errors.Is(l.Err(), ErrLost) {
			t.Errorf("valid %v, %v", l.Valid(), l.Err())
		}
	})
}

// TestALateAnswerProvesNothing: a renewal that lands in time is of no use when its
// answer comes after the end.
func TestALateAnswerProvesNothing(t *testing.T) {
	h, err := NewHolder(Node{ID: "a", Nonce: "0123456789abcdef", TTLms: 10_000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	answer := func(asked, now time.Duration, e error) {
		if _, ok := h.Next(asked); !ok {
			t.Fatalf("nothing to do at %v, wake %v", asked, h.Wake())
		}
		h.Answer(Answer{Token: "t", Err: e, Asked: asked, Now: now})
	}
	const s = time.Second
	answer(0, s, blob.ErrNotFound)
	answer(s, 2*s, nil)
	if h.Until() != s+9500*time.Millisecond {
		t.Errorf("until %v: not counted from before the request", h.Until())
	}
	if _, ok := h.Next(2 * s); ok || h.Wake() != 4500*time.Millisecond {
		t.Errorf("renewed too early, wake %v", h.Wake())
	}
	answer(5*s, 11*s, nil)
	if !errors.Is(h.Over(), ErrLost) || h.Until() != 0 {
		t.Errorf("%v, until %v", h.Over(), h.Until())
	}
	if _, ok := h.Next(12 * s); ok {
		t.Error("a lost lease was renewed")
	}
}

func TestReleaseGivesUpWithoutTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		store := blob.NewFaulty(mem.New(mem.Options{}), func(blob.Op) blob.Fault {
			if down.Load() {
				return blob.Fault{Outcome: blob.Refused}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		clock := env.SystemClock{}
		l := hold(t, leaseConfig(store, "a"))
		down.Store(true)
		began := clock.Now()
		if err := l.Release(t.Context()); !errors.Is(err, ErrLost) || clock.Now().Sub(began) > 11*time.Second {
			t.Errorf("after %v: %v", clock.Now().Sub(began), err)
		}
		l = func() *Lease { down.Store(false); return hold(t, leaseConfig(store, "a")) }()
		down.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		clock.AfterFunc(time.Second, cancel)
		began = clock.Now()
		if err := l.Release(ctx); err == nil || clock.Now().Sub(began) != time.Second {
			t.Errorf("after %v: %v", clock.Now().Sub(began), err)
		}
	})
}

func FuzzNode(f *testing.F) {
	f.Add([]byte(`{"format":1,"id":"a","address":"","version":"v1","nonce":"0123456789abcdef","counter":3,"ttl_ms":10000,"released":false}`))
	f.Add([]byte(`{"format":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := DecodeNode("k", data)
		if err != nil {
			if !errors.Is(err, ErrTooNew) && !errors.Is(err, ErrDamaged) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		again, err := DecodeNode("k", encodeRecord(n))
		if err != nil || again != n || CheckTTL(n.TTL()) != nil {
			t.Fatalf("%+v became %+v, %v", n, again, err)
		}
	})
}
