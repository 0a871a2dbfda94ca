package objectlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// fastClock runs fifty times as fast as the system's: backoffs are short.
type fastClock struct{ began time.Time }

const haste = 50

func (c fastClock) Now() time.Time {
	return c.began.Add(haste * env.SystemClock{}.Now().Sub(c.began))
}

func (c fastClock) AfterFunc(d time.Duration, f func()) env.Timer {
	return env.SystemClock{}.AfterFunc(d/haste, f)
}

// gate holds requests back until it is opened.
type gate struct {
	blob.Store
	mu     sync.Mutex
	closed chan struct{} // nil: open
}

func (g *gate) shut() { g.mu.Lock(); defer g.mu.Unlock(); g.closed = make(chan struct{}) }
func (g *gate) open() { g.mu.Lock(); defer g.mu.Unlock(); close(g.closed); g.closed = nil }

func (g *gate) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	g.mu.Lock()
	closed := g.closed
	g.mu.Unlock()
	if closed != nil {
		select {
		case <-closed:
		case <-ctx.Done():
			return "", fmt.Errorf("%w: %w", blob.ErrAmbiguous, ctx.Err())
		}
	}
	return g.Store.Put(ctx, key, data, o)
}

// TestProductionUnderFaults lets real goroutines write while the store loses
// requests and answers, and the former owner goes on meanwhile.
func TestProductionUnderFaults(t *testing.T) {
	for seed := range uint64(8) {
		rand := splitmix(seed)
		store, m := newStore(), newManifest()
		var late []func()
		var mu sync.Mutex
		faulty := blob.NewFaulty(store, blob.Seeded(&rand, blob.Rates{Refused: 5, Lost: 5, AnswerLost: 5, Late: 3}), blob.FaultHooks{
			Later: func(f func()) { mu.Lock(); defer mu.Unlock(); late = append(late, f) }})
		truth := map[uint64]string{} // acknowledged, by LSN
		var writers sync.WaitGroup
		for range 4 {
			o := m.take(faulty, 4)
			o.Clock = fastClock{env.SystemClock{}.Now()}
			l, got := openLog(t, o)
			mu.Lock()
			read := map[uint64]string{}
			for _, f := range got {
				read[f.FirstLSN] = string(f.Body)
			}
			for lsn, body := range truth {
				if lsn >= l.FirstLSN() && read[lsn] != body {
					t.Fatalf("seed %d: LSN %d was acknowledged and is read as %q", seed, lsn, read[lsn])
				}
			}
			mu.Unlock()
			writers.Go(func() {
				writeUntilFenced(l, 300, func(f journal.Frame) {
					mu.Lock()
					defer mu.Unlock()
					truth[f.FirstLSN] = string(f.Body)
				})
			})
			waitFor(t, func() bool { return l.Stats().Frames > 60 })
			if err := l.Trim(l.FirstLSN() + 20); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			for _, f := range late {
				f()
			}
			late = nil
			mu.Unlock()
		}
		writers.Wait()
	}
}

// writeUntilFenced writes up to n frames; acked is told of what is acknowledged.
func writeUntilFenced(l *Log, n int, acked func(journal.Frame)) {
	room := make(chan struct{}, 1)
	l.OnRoom(func() {
		select {
		case room <- struct{}{}:
		default:
		}
	})
	acks := make(chan error, MaxWindow)
	var flight []journal.Frame
	for {
		for n > 0 && len(flight) < l.MaxInFlight() {
			f := frame(l, 1)
			flight = append(flight, f)
			n--
			l.Begin(f, func(err error) { acks <- err })
		}
		if len(flight) == 0 {
			return
		}
		select {
		case err := <-acks:
			if err != nil {
				return
			}
			acked(flight[0])
			flight = flight[1:]
		case <-room:
		}
	}
}

func TestNothingIsAcknowledgedAfterTheLease(t *testing.T) {
	g := &gate{Store: newStore()}
	var mu sync.Mutex
	valid := true
	o := newManifest().take(g, 4)
	o.Valid = func() bool { mu.Lock(); defer mu.Unlock(); return valid }
	l, _ := openLog(t, o)
	mustWrite(t, l, 2, 1)
	g.shut()
	errs := make(chan error, 1)
	l.Begin(frame(l, 1), func(err error) { errs <- err })
	mu.Lock()
	valid = false
	mu.Unlock()
	g.open()
	if err := <-errs; !errors.Is(err, ErrLeaseOver) || !errors.Is(err, journal.ErrStale) {
		t.Fatal(err)
	}
	if l, err := Open(t.Context(), o); err != nil {
		t.Fatal(err)
	} else if err := l.Replay(0, func(journal.Frame) error { return nil }); !errors.Is(err, ErrFenced) && !errors.Is(err, ErrLeaseOver) {
		t.Fatal(err)
	}
}

func TestCloseEndsWhatIsInFlight(t *testing.T) {
	g := &gate{Store: newStore()}
	l, _ := openLog(t, newManifest().take(g, 4))
	g.shut()
	errs := make(chan error, 1)
	l.Begin(frame(l, 1), func(err error) { errs <- err })
	if n := l.MaxInFlight(); n != 0 {
		t.Fatalf("room for %d, at an unknown latency with one in flight", n)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-errs; !errors.Is(err, journal.ErrClosed) {
		t.Fatal(err)
	}
	if err := l.Replay(0, nil); !errors.Is(err, journal.ErrClosed) {
		t.Fatal(err)
	}
	if err := l.Trim(1); err == nil {
		t.Fatal("a closed log was trimmed")
	}
}

func TestBeginIsRefused(t *testing.T) {
	l, err := Open(t.Context(), newManifest().take(newStore(), 4))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := write(l, frame(l, 1)); !errors.Is(err, ErrNotReplayed) {
		t.Fatal(err)
	}
	replay(t, l, 0)
	f := frame(l, 1)
	f.Seq++
	if err := write(l, f); !errors.Is(err, journal.ErrOutOfOrder) {
		t.Fatal(err)
	}
	f = frame(l, 1)
	f.Body = make([]byte, journal.MaxBodySize+1)
	if err := write(l, f); !errors.Is(err, journal.ErrTooLarge) {
		t.Fatal(err)
	}
	mustWrite(t, l, 1, 1)
}

// TestRefusedFramesWaitTheirTurn: also an error is told in order.
func TestRefusedFramesWaitTheirTurn(t *testing.T) {
	g := &gate{Store: newStore()}
	l, _ := openLog(t, newManifest().take(g, 4))
	g.shut()
	order := make(chan int, 3)
	l.Begin(frame(l, 1), func(error) { order <- 1 })
	f := frame(l, 1)
	f.Seq += 7
	l.Begin(f, func(error) { order <- 2 })
	l.Begin(frame(l, 1), func(error) { order <- 3 })
	g.open()
	for want := 1; want <= 3; want++ {
		if got := <-order; got != want {
			t.Fatalf("%d is told as number %d", got, want)
		}
	}
}

func TestOpenChecksItsOptions(t *testing.T) {
	good := newManifest().take(newStore(), 4)
	for name, change := range map[string]func(*Options){
		"store": func(o *Options) { o.Store = nil }, "clock": func(o *Options) { o.Clock = nil }, "epoch": func(o *Options) { o.Epoch = 0 },
		"head": func(o *Options) { o.HeadSeq = 0 }, "window": func(o *Options) { o.Window = MaxWindow + 1 }, "prefix": func(o *Options) { o.Prefix = "a b" },
	} {
		o := good
		change(&o)
		if _, err := Open(t.Context(), o); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

// TestDamageIsRefused: what does not belong where it lies ends the take-over,
// with the key.
func TestDamageIsRefused(t *testing.T) {
	older := func(seq, lsn uint64) []byte {
		return journal.AppendFrame(nil, journal.Frame{Epoch: 1, Nonce: 1001, Seq: seq, FirstLSN: lsn, Count: 1, Body: entries("x")})
	}
	newer := AppendSeal(nil, Seal{Epoch: 9, Nonce: 9, Seq: 7, Resume: 11})
	for name, c := range map[string]struct {
		seq  uint64
		data []byte
		want error
	}{
		"flipped bit":       {6, append(older(6, 2)[:60], 'y'), ErrCorrupt},
		"another sequence":  {6, older(5, 1), ErrCorrupt},
		"a gap of LSNs":     {6, older(6, 3), ErrCorrupt},
		"another nonce":     {6, journal.AppendFrame(nil, journal.Frame{Epoch: 1, Nonce: 5, Seq: 6, FirstLSN: 2}), ErrCorrupt},
		"no seal between":   {6, journal.AppendFrame(nil, journal.Frame{Epoch: 2, Nonce: 5, Seq: 6, FirstLSN: 2}), ErrFenced},
		"a newer owner":     {7, newer, ErrFenced},
		"seal out of place": {6, AppendSeal(nil, Seal{Epoch: 1, Seq: 5, Resume: 9}), ErrCorrupt},
		"seal that is old":  {7, AppendSeal(nil, Seal{Epoch: 1, Nonce: 2, Seq: 7, Resume: 11}), ErrCorrupt},
	} {
		store := blobOf(t, map[uint64][]byte{
			1: AppendSeal(nil, Seal{Epoch: 1, Nonce: 1001, Seq: 1, Resume: 5}), 5: older(5, 1), 6: older(6, 2)})
		if _, err := store.Put(t.Context(), Key(testPrefix, c.seq), c.data, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		m := &manifest{epoch: 1, window: 4, seq: 1, lsn: 1}
		l, err := Open(t.Context(), m.take(store, 4))
		if err != nil {
			t.Fatal(err)
		}
		err = l.Replay(0, func(journal.Frame) error { return nil })
		var at *ObjectError
		if !errors.Is(err, c.want) || c.want == ErrCorrupt && (!errors.As(err, &at) || at.Key != Key(testPrefix, c.seq)) {
			t.Errorf("%s: %v", name, err)
		}
		_ = l.Close()
	}
}

func blobOf(t *testing.T, objects map[uint64][]byte) blob.Store {
	t.Helper()
	store := &gate{Store: newMutableStore()}
	for seq, data := range objects {
		if _, err := store.Put(t.Context(), Key(testPrefix, seq), data, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return store
}

// TestBudgetHoldsFramesBack: with a budget, MaxInFlight says no until a token
// comes, and OnRoom tells it.
func TestBudgetHoldsFramesBack(t *testing.T) {
	clock := newHandClock()
	o := newManifest().take(newStore(), 4)
	o.Clock, o.Budget = clock, NewBudget(clock, 10)
	l, _ := openLog(t, o)
	told := make(chan struct{}, 10)
	l.OnRoom(func() { told <- struct{}{} })
	for range 3 {
		if l.MaxInFlight() == 0 {
			if len(told) != 0 {
				t.Fatal("told too early")
			}
			clock.pass(100 * time.Millisecond)
			<-told
		}
		if l.MaxInFlight() == 0 {
			t.Fatal("no room after it was told")
		}
		mustWrite(t, l, 1, 1)
	}
	if clock.now.Sub(newHandClock().now) < 200*time.Millisecond {
		t.Fatal("three frames in less than two tokens' time")
	}
}
