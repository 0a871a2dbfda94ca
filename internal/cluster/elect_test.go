package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

func elect(t *testing.T, l *Lease) *Term {
	t.Helper()
	term, err := Elect(t.Context(), l, nil)
	if err != nil {
		t.Fatal(err)
	}
	return term
}

// standBy elects on a goroutine of its own.
func standBy(t *testing.T, l *Lease, tell func(Standing)) <-chan *Term {
	terms := make(chan *Term, 1)
	go func() {
		term, err := Elect(t.Context(), l, tell)
		if err != nil {
			t.Errorf("%s: %v", l.Node(), err)
		}
		terms <- term
	}()
	return terms
}

func TestAStandbyFollowsWithoutDelayWhenAskedTo(t *testing.T) {
	for name, leave := range map[string]func(context.Context, *Term, *Lease) error{
		"resigned":       func(ctx context.Context, term *Term, _ *Lease) error { return term.Resign(ctx) },
		"lease released": func(ctx context.Context, _ *Term, l *Lease) error { return l.Release(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := mem.New(mem.Options{})
				a, b := hold(t, leaseConfig(store, "a")), hold(t, leaseConfig(store, "b"))
				first := elect(t, a)
				if _, err := Elect(t.Context(), a, nil); !errors.Is(err, ErrInvalid) {
					t.Errorf("a second election of one lease: %v", err)
				}
				var told []Standing
				next := standBy(t, b, func(s Standing) { told = append(told, s) })
				time.Sleep(time.Minute)
				if !first.Valid() || first.Epoch() != 1 || len(next) > 0 {
					t.Errorf("valid %v, epoch %d", first.Valid(), first.Epoch())
				}
				if len(told) != 1 || told[0].Active.Node != "a" || told[0].State != Alive || told[0].Trouble != nil || told[0].Since.IsZero() {
					t.Errorf("told %+v", told)
				}
				if err := leave(t.Context(), first, a); err != nil || first.Valid() {
					t.Errorf("left: %v, valid %v", err, first.Valid())
				}
				time.Sleep(500 * time.Millisecond) // one poll
				synctest.Wait()
				if len(next) == 0 {
					t.Fatal("nobody followed")
				}
				second := <-next
				if second.Epoch() != 2 || !second.Valid() || first.Err() == nil || second.Err() != nil {
					t.Errorf("epoch %d", second.Epoch())
				}
				if active, err := ReadActive(t.Context(), store); err != nil || active.Node != "b" {
					t.Errorf("named: %+v, %v", active, err)
				}
				_ = a.Release(t.Context())
				if err := b.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestAStandbyFollowsADeadNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		inner := mem.New(mem.Options{})
		dead := blob.NewFaulty(inner, func(blob.Op) blob.Fault {
			if down.Load() {
				return blob.Fault{Outcome: blob.Lost}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		a, b := hold(t, leaseConfig(dead, "a")), hold(t, leaseConfig(inner, "b"))
		first, next := elect(t, a), standBy(t, b, nil)
		time.Sleep(7 * time.Second)
		down.Store(true)
		<-a.Lost()
		if first.Valid() || len(next) > 0 {
			t.Error("followed too early")
		}
		time.Sleep(1500 * time.Millisecond) // two margins and a poll
		synctest.Wait()
		if len(next) == 0 {
			t.Fatal("nobody followed")
		}
		if second := <-next; second.Epoch() != 2 {
			t.Errorf("epoch %d", second.Epoch())
		}
		if _, err := Elect(t.Context(), a, nil); !errors.Is(err, ErrLost) {
			t.Errorf("an election without a lease: %v", err)
		}
		if err := b.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestARestartedNodeIsActiveAgainAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		old := hold(t, leaseConfig(store, "a"))
		elect(t, old)
		l := hold(t, leaseConfig(store, "a")) // the process was killed and came back
		if term := elect(t, l); term.Epoch() != 2 || !term.Valid() {
			t.Errorf("epoch %d", term.Epoch())
		}
		<-old.Lost()
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestElectionsMayLoseTheirAnswers breaks each write of two terms of one life.
func TestElectionsMayLoseTheirAnswers(t *testing.T) {
	for n := 1; n <= 4; n++ {
		for _, outcome := range []blob.Outcome{blob.Refused, blob.Lost, blob.AnswerLost, blob.Late} {
			t.Run(fmt.Sprintf("write %d, outcome %d", n, outcome), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var puts atomic.Int64
					store := blob.NewFaulty(mem.New(mem.Options{}), func(op blob.Op) blob.Fault {
						if op.Kind == blob.KindPut && op.Key == ActiveKey && puts.Add(1) == int64(n) {
							return blob.Fault{Outcome: outcome}
						}
						return blob.Fault{}
					}, blob.FaultHooks{})
					l := hold(t, leaseConfig(store, "a"))
					var last uint64
					for range 2 {
						term := elect(t, l)
						if !term.Valid() || term.Epoch() <= last {
							t.Errorf("valid %v, epoch %d after %d", term.Valid(), term.Epoch(), last)
						}
						last = term.Epoch()
						if err := term.Resign(t.Context()); err != nil && outcome != blob.Refused {
							t.Error(err)
						}
						if term.Valid() || !errors.Is(term.Err(), ErrReleased) {
							t.Error("still valid")
						}
					}
					if err := l.Release(t.Context()); err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

func TestElectTellsOfTroubleAndStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		store := blob.NewFaulty(mem.New(mem.Options{}), func(op blob.Op) blob.Fault {
			if down.Load() && op.Key == ActiveKey {
				return blob.Fault{Outcome: blob.Refused}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		a, b := hold(t, leaseConfig(store, "a")), hold(t, leaseConfig(store, "b"))
		elect(t, a)
		down.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		b.cfg.Env.Clock.AfterFunc(5*time.Second, cancel)
		var told []Standing
		if _, err := Elect(ctx, b, func(s Standing) { told = append(told, s) }); !errors.Is(err, context.Canceled) {
			t.Errorf("stopped: %v", err)
		}
		if len(told) != 1 || !errors.Is(told[0].Trouble, blob.ErrUnavailable) {
			t.Errorf("told %+v", told)
		}
		down.Store(false)
		for data, want := range map[string]error{`{"format":2}`: ErrTooNew, `{`: ErrDamaged, `{"format":1,"epoch":1}`: ErrDamaged} {
			put(t, store, ActiveKey, data)
			if _, err := Elect(t.Context(), b, nil); !errors.Is(err, want) {
				t.Errorf("%s: %v", data, err)
			}
		}
		_ = a.Release(t.Context())
		if err := b.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestWatchSeesAllNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := mem.New(mem.Options{})
		w := NewWatch(leaseConfig(store, ""))
		poll := func() string {
			seen, err := w.Poll(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var out []string
			for _, s := range seen {
				out = append(out, s.Node.ID+" "+s.State.String())
			}
			return strings.Join(out, ", ")
		}
		expect := func(want string) {
			t.Helper()
			if got := poll(); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		expect("")
		a := hold(t, leaseConfig(store, "a"))
		put(t, store, NodeKey("b"), string(encodeRecord(Node{Format: 1, ID: "b", Nonce: "0123456789abcdef", Counter: 1, TTLms: 2000})))
		put(t, store, NodeKey("new"), `{"format":7}`)
		put(t, store, nodePrefix+"x.txt", "not a lease")
		expect("") // not listed again yet
		time.Sleep(DefaultTTL)
		expect("a alive, b alive, new alive")
		time.Sleep(2099 * time.Millisecond)
		expect("a alive, b alive, new alive")
		time.Sleep(time.Millisecond)
		expect("a alive, b expired, new alive")
		time.Sleep(MaxTTL + margin(MaxTTL))
		expect("a alive, b expired, new expired")
		if err := a.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		expect("a released, b expired, new expired")
		a = hold(t, leaseConfig(store, "a"))
		if err := store.Delete(t.Context(), NodeKey("b"), blob.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("a alive, b alive, new expired") // gone: judged anew
		time.Sleep(DefaultTTL)
		expect("a alive, new expired")
		down := NewWatch(leaseConfig(blob.NewFaulty(store, func(blob.Op) blob.Fault { return blob.Fault{Outcome: blob.Refused} }, blob.FaultHooks{}), ""))
		if _, err := down.Poll(t.Context()); !errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("without a store: %v", err)
		}
		if err := a.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestNodeIDIsMadeOnce(t *testing.T) {
	fs := vfs.NewCrashableMem()
	if err := fs.MkdirAll("data", 0o755); err != nil {
		t.Fatal(err)
	}
	if root, err := fs.OpenDir(""); err != nil || root.Sync() != nil {
		t.Fatal("sync the root", err)
	}
	id, err := NodeID(fs, "data", testRand)
	if err != nil || checkNode(id) != nil {
		t.Fatal(id, err)
	}
	if again, err := NodeID(fs.CrashClone(vfs.CrashCloneCfg{}), "data", testRand); err != nil || again != id {
		t.Errorf("after a power failure: got %q after %q, %v", again, id, err)
	}
	if again, err := NodeID(fs, "data", testRand); err != nil || again != id {
		t.Errorf("got %q after %q, %v", again, id, err)
	}
	if other, err := NodeID(vfs.NewMem(), "", testRand); err != nil || other == id {
		t.Errorf("another directory: %q, %v", other, err)
	}
	for _, bad := range []string{"", "A B", strings.Repeat("a", MaxNodeID+1)} {
		if err := writeNodeID(fs, fs.PathJoin("data", nodeIDFile), bad); err != nil {
			t.Fatal(err)
		}
		if _, err := NodeID(fs, "data", testRand); !errors.Is(err, ErrDamaged) {
			t.Errorf("of %q: %v", bad, err)
		}
	}
	if _, err := NodeID(fs, "nowhere", testRand); err == nil {
		t.Error("a missing directory was taken")
	}
}

func FuzzActive(f *testing.F) {
	f.Add([]byte(`{"format":1,"epoch":3,"node":"a","address":"a:1","nonce":"0123456789abcdef","ttl_ms":10000,"released":false}`))
	f.Add([]byte(`{"format":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := DecodeActive(data)
		if err != nil {
			if !errors.Is(err, ErrTooNew) && !errors.Is(err, ErrDamaged) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		again, err := DecodeActive(encodeRecord(a))
		if err != nil || again != a {
			t.Fatalf("%+v became %+v, %v", a, again, err)
		}
	})
}

// TestCandidateHurries: it looks at once, and often for a while, then as before.
func TestCandidateHurries(t *testing.T) {
	nonce := strings.Repeat("a", 2*nonceBytes)
	c, err := NewCandidate(Active{Node: "b", Nonce: nonce, TTLms: 10_000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	active := Active{Format: recordFormat, Epoch: 1, Node: "a", Nonce: strings.Repeat("b", 2*nonceBytes), TTLms: 10_000}
	lease := Node{Format: recordFormat, ID: "a", Nonce: active.Nonce, Counter: 1, TTLms: 10_000}
	look := func(now time.Duration) (next time.Duration) {
		t.Helper()
		for _, data := range [][]byte{encodeRecord(active), encodeRecord(lease)} {
			if _, ok := c.Next(now); !ok {
				t.Fatalf("it does not look at %v", now)
			}
			c.Answer(Answer{Asked: now, Now: now, Data: data, Token: "t"})
		}
		return c.Wake()
	}
	if next := look(0); next != 500*time.Millisecond {
		t.Fatalf("it looks again at %v", next)
	}
	c.Hurry(100 * time.Millisecond)
	next := c.Wake()
	if next != 100*time.Millisecond {
		t.Fatalf("in a hurry it looks at %v", next)
	}
	looks := 0
	for ; next < 5100*time.Millisecond; looks++ {
		next = look(next)
	}
	if looks != 250 {
		t.Errorf("it looked %d times in five seconds", looks)
	}
	if again := look(next); again-next != 500*time.Millisecond {
		t.Errorf("afterwards it looks each %v", again-next)
	}
}
