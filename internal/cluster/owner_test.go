package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/journal"
)

// counted is randomness that never repeats itself.
type counted struct{ n atomic.Uint64 }

func (c *counted) Uint64() uint64 { return c.n.Add(1) * 0x9e3779b97f4a7c15 }

var testRand = &counted{}

func claim(node string, window int) Claim {
	return Claim{Node: node, Address: node + ":7000", Window: window, Rand: testRand}
}

func mustTake(t *testing.T, store blob.Store, c Claim) *Owned {
	t.Helper()
	o, err := Take(t.Context(), store, 3, c)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func put(t *testing.T, store blob.Store, key, data string) {
	t.Helper()
	if _, err := store.Put(t.Context(), key, []byte(data), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestTakeCountsEpochsAndKeepsTheLargestWindow(t *testing.T) {
	store := mem.New(mem.Options{})
	if _, err := Read(t.Context(), store, 3); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("of a new partition: %v", err)
	}
	first := mustTake(t, store, claim("a", 8))
	if err := first.Advance(t.Context(), 40, 900); err != nil {
		t.Fatal(err)
	}
	second := mustTake(t, store, claim("b", 2))
	m, err := Read(t.Context(), store, 3)
	want := Manifest{Format: 1, Epoch: 2, Node: "b", Address: "b:7000", Nonce: m.Nonce, Window: 8, HeadSeq: 40, HeadLSN: 900}
	if err != nil || m != want || second.Manifest() != want || second.Former() != first.Manifest() {
		t.Errorf("got %+v, %v; owned %+v after %+v", m, err, second.Manifest(), second.Former())
	}
	if err := second.Release(t.Context(), 77); err != nil {
		t.Fatal(err)
	}
	if third := mustTake(t, store, claim("c", 16)); third.Former().TailSeq != 77 || third.Manifest().Window != 16 || third.Manifest().Released {
		t.Errorf("after a release: %+v, %+v", third.Former(), third.Manifest())
	}
}

func TestTakeReadsTheEpochOfEarlierVersions(t *testing.T) {
	store := mem.New(mem.Options{})
	put(t, store, "p003/owner.json", `{"epoch":7}`)
	m, err := Read(t.Context(), store, 3)
	if want := (Manifest{Epoch: 7, HeadSeq: 1, HeadLSN: 1}); err != nil || m != want {
		t.Errorf("got %+v, %v", m, err)
	}
	if m := mustTake(t, store, claim("a", 4)).Manifest(); m.Epoch != 8 || m.Format != 1 || m.HeadSeq != 1 || m.Window != 4 {
		t.Errorf("taken: %+v", m)
	}
}

func TestDecodeManifestRefuses(t *testing.T) {
	const good = `{"format":1,"epoch":2,"node":"a","address":"a:1","nonce":"0123456789abcdef","window":4,"head_seq":5,"head_lsn":9,"released":false,"tail_seq":0}`
	if _, err := DecodeManifest("k", []byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, data string
		want       error
		words      string
	}{
		{"nothing", "", ErrDamaged, "restore"},
		{"half", good[:40], ErrDamaged, "restore"},
		{"two", good + good, ErrDamaged, "after top-level"},
		{"newer", `{"format":2,"something":[]}`, ErrTooNew, "use a newer perdure"},
		{"negative format", strings.Replace(good, `:1,`, `:-1,`, 1), ErrDamaged, "format -1"},
		{"unknown field", strings.Replace(good, `"node"`, `"x":1,"node"`, 1), ErrDamaged, `"x"`},
		{"old with more", `{"epoch":1,"node":"a"}`, ErrDamaged, ""},
		{"old without", `{}`, ErrDamaged, ""},
		{"epoch 0", strings.Replace(good, `"epoch":2`, `"epoch":0`, 1), ErrDamaged, "epoch 0"},
		{"node", strings.Replace(good, `"node":"a"`, `"node":"A/b"`, 1), ErrDamaged, "node ID"},
		{"address", strings.Replace(good, `a:1`, `a 1`, 1), ErrDamaged, "address"},
		{"nonce", strings.Replace(good, `abcdef"`, `ABCDEF"`, 1), ErrDamaged, "nonce"},
		{"window", strings.Replace(good, `"window":4`, `"window":-4`, 1), ErrDamaged, "window"},
		{"head", strings.Replace(good, `"head_seq":5`, `"head_seq":0`, 1), ErrDamaged, "head"},
		{"tail of the living", strings.Replace(good, `"tail_seq":0`, `"tail_seq":9`, 1), ErrDamaged, "not released"},
		{"tail before head", strings.Replace(good, `false,"tail_seq":0`, `true,"tail_seq":4`, 1), ErrDamaged, "before head"},
		{"long", good + strings.Repeat(" ", MaxRecord), ErrDamaged, "at most"},
	} {
		if _, err := DecodeManifest("p000/owner.json", []byte(c.data)); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), "p000/owner.json") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// broken answers the nth Put after it is armed with a fault.
type broken struct {
	blob.Store
	mu    sync.Mutex
	fault map[int]blob.Outcome
	puts  int
}

func (b *broken) next(op blob.Op) blob.Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	if op.Kind != blob.KindPut {
		return blob.Fault{}
	}
	b.puts++
	return blob.Fault{Outcome: b.fault[b.puts]}
}

func newBroken(inner blob.Store, fault map[int]blob.Outcome) *broken {
	b := &broken{fault: fault}
	b.Store = blob.NewFaulty(inner, b.next, blob.FaultHooks{})
	return b
}

// TestEveryWriteMayLoseItsAnswer breaks each write of an owner's life, as not
// done and as done.
func TestEveryWriteMayLoseItsAnswer(t *testing.T) {
	for n := 1; n <= 4; n++ {
		for _, outcome := range []blob.Outcome{blob.Lost, blob.AnswerLost, blob.Late} {
			t.Run(fmt.Sprintf("write %d, outcome %d", n, outcome), func(t *testing.T) {
				store := newBroken(mem.New(mem.Options{}), map[int]blob.Outcome{n: outcome})
				o := mustTake(t, store, claim("a", 4))
				for _, err := range []error{o.Advance(t.Context(), 5, 50), o.Advance(t.Context(), 9, 90), o.Release(t.Context(), 12)} {
					if err != nil {
						t.Fatal(err)
					}
				}
				m, err := Read(t.Context(), store, 3)
				if err != nil || m != o.Manifest() || m.Epoch != 1 || m.HeadSeq != 9 || m.TailSeq != 12 {
					t.Errorf("got %+v, %v", m, err)
				}
			})
		}
	}
}

func TestAnUnavailableStoreIsTriedAgain(t *testing.T) {
	store := newBroken(mem.New(mem.Options{}), map[int]blob.Outcome{1: blob.Refused, 2: blob.Refused, 3: blob.Refused})
	o := mustTake(t, store, claim("a", 4))
	store.fault = map[int]blob.Outcome{5: blob.Refused}
	if err := o.Advance(t.Context(), 2, 2); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("advance: %v", err)
	}
	if err := o.Advance(t.Context(), 2, 2); err != nil || o.Manifest().HeadSeq != 2 {
		t.Errorf("advance again: %v", err)
	}
	down := blob.NewFaulty(store, func(blob.Op) blob.Fault { return blob.Fault{Outcome: blob.Refused} }, blob.FaultHooks{})
	if _, err := Take(t.Context(), down, 3, claim("b", 1)); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("take without a store: %v", err)
	}
}

func TestAFormerOwnerIsFenced(t *testing.T) {
	store := mem.New(mem.Options{})
	old := mustTake(t, store, claim("a", 4))
	if err := old.Confirm(t.Context()); err != nil {
		t.Error(err)
	}
	mustTake(t, store, claim("a", 4)) // the same node, another life
	if err := old.Confirm(t.Context()); !errors.Is(err, ErrFenced) {
		t.Errorf("confirmed: %v", err)
	}
	for range 2 {
		err := old.Advance(t.Context(), 5, 5)
		if !errors.Is(err, ErrFenced) || !errors.Is(err, journal.ErrStale) {
			t.Errorf("advance: %v", err)
		}
	}
	if err := old.Release(t.Context(), 5); !errors.Is(err, ErrFenced) {
		t.Errorf("release: %v", err)
	}
	if m, err := Read(t.Context(), store, 3); err != nil || m.Epoch != 2 || m.HeadSeq != 1 || m.Released {
		t.Errorf("the new owner's manifest: %+v, %v", m, err)
	}
}

func TestAdvanceAndReleaseKeepTheirRules(t *testing.T) {
	o := mustTake(t, mem.New(mem.Options{}), claim("a", 4))
	ctx := t.Context()
	if err := errors.Join(o.Advance(ctx, 10, 100), o.Advance(ctx, 7, 70), o.Advance(ctx, 10, 100)); err != nil || o.Manifest().HeadSeq != 10 {
		t.Errorf("the head fell: %+v, %v", o.Manifest(), err)
	}
	if err := o.Advance(ctx, 11, 99); !errors.Is(err, ErrInvalid) {
		t.Errorf("LSN before the head's: %v", err)
	}
	if err := o.Release(ctx, 9); !errors.Is(err, ErrInvalid) {
		t.Errorf("tail before the head: %v", err)
	}
	if err := errors.Join(o.Release(ctx, 10), o.Release(ctx, 10)); err != nil {
		t.Error(err)
	}
	if err := o.Advance(ctx, 12, 120); !errors.Is(err, ErrReleased) {
		t.Errorf("advance after the release: %v", err)
	}
	if _, err := Take(ctx, mem.New(mem.Options{}), 0, claim("-not-ok", 1)); !errors.Is(err, ErrInvalid) {
		t.Errorf("a bad node: %v", err)
	}
}

// TestManyTakersHaveAnEpochEach races takers and heads that move.
func TestManyTakersHaveAnEpochEach(t *testing.T) {
	store := newBroken(mem.New(mem.Options{}), map[int]blob.Outcome{3: blob.AnswerLost, 9: blob.Lost, 14: blob.AnswerLost})
	var epochs sync.Map
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 5 {
				o, err := Take(context.Background(), store, 3, claim(fmt.Sprintf("n%d", i), i+1))
				if errors.Is(err, ErrFenced) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if other, taken := epochs.LoadOrStore(o.Manifest().Epoch, i); taken {
					t.Errorf("epoch %d taken by %d and %d", o.Manifest().Epoch, i, other)
				}
				head := o.Manifest().HeadSeq
				if err := o.Advance(context.Background(), head+1, head+1); err != nil && !errors.Is(err, ErrFenced) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"epoch":7}`))
	f.Add([]byte(`{"format":1,"epoch":2,"node":"a","address":"a:1","nonce":"0123456789abcdef","window":4,"head_seq":5,"head_lsn":9,"released":true,"tail_seq":9}`))
	f.Add([]byte(`{"format":9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := DecodeManifest("k", data)
		if err != nil {
			if !errors.Is(err, ErrTooNew) && !errors.Is(err, ErrDamaged) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		if m.Format == 0 {
			return
		}
		again, err := DecodeManifest("k", encodeRecord(m))
		if err != nil || again != m {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}
