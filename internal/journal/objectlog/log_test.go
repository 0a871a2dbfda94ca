package objectlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

const testPrefix = "p000"

// manifest imitates the owner manifest of one partition.
type manifest struct {
	mu       sync.Mutex
	epoch    uint64
	window   int
	owner    uint64 // nonce; of the random test
	seq, lsn uint64
}

func newManifest() *manifest { return &manifest{seq: 1, lsn: 1} }

func newStore() *mem.Store {
	return mem.New(mem.Options{Immutable: func(string) bool { return true }})
}

// newMutableStore lets tests damage objects.
func newMutableStore() *mem.Store { return mem.New(mem.Options{}) }

// take is the compare-and-swap of a take-over.
func (m *manifest) take(store blob.Store, window int) Options {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.epoch++
	epoch, former := m.epoch, m.window
	m.window = max(m.window, window)
	return Options{
		Store: store, Prefix: testPrefix, Epoch: epoch, Nonce: 1000 + epoch, Window: window, FormerWindow: former,
		HeadSeq: m.seq, HeadLSN: m.lsn, Clock: env.SystemClock{},
		Confirm: func(context.Context) error { return m.owned(epoch) },
		Advance: func(_ context.Context, seq, lsn uint64) error {
			if err := m.owned(epoch); err != nil {
				return err
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			m.seq, m.lsn = seq, lsn
			return nil
		},
	}
}

func (m *manifest) owned(epoch uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.epoch != epoch {
		return fmt.Errorf("%w: the manifest is of epoch %d", ErrFenced, m.epoch)
	}
	return nil
}

func (m *manifest) head(context.Context) (seq, lsn uint64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seq, m.lsn, nil
}

// openLog opens and replays a log; got is what it replayed.
func openLog(t testing.TB, o Options) (l *Log, got []journal.Frame) {
	t.Helper()
	l, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, replay(t, l, 0)
}

func replay(t testing.TB, l *Log, from uint64) (got []journal.Frame) {
	t.Helper()
	if err := l.Replay(from, func(f journal.Frame) error {
		f.Body = bytes.Clone(f.Body)
		got = append(got, f)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return got
}

// frame is the log's next one, with n entries.
func frame(l *Log, n int) journal.Frame {
	f := journal.Frame{Epoch: l.o.Epoch, Nonce: l.o.Nonce, Seq: l.NextSeq(), FirstLSN: l.NextLSN(), Count: uint32(n)}
	for i := range n {
		f.Body = journal.AppendEntry(f.Body, fmt.Appendf(nil, "entry %d of epoch %d", f.FirstLSN+uint64(i), f.Epoch))
	}
	return f
}

// write writes one frame and waits for it.
func write(l *Log, f journal.Frame) error {
	ch := make(chan error, 1)
	l.Begin(f, func(err error) { ch <- err })
	return <-ch
}

func mustWrite(t testing.TB, l *Log, frames, entries int) (written []journal.Frame) {
	t.Helper()
	for range frames {
		f := frame(l, entries)
		if err := write(l, f); err != nil {
			t.Fatal(err)
		}
		written = append(written, f)
	}
	return written
}

func sameFrames(t testing.TB, got, want []journal.Frame) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d frames, want %d", len(got), len(want))
	}
	for i := range want {
		a, b := got[i], want[i]
		if a.Epoch != b.Epoch || a.Nonce != b.Nonce || a.Seq != b.Seq || a.FirstLSN != b.FirstLSN || a.Count != b.Count || !bytes.Equal(a.Body, b.Body) {
			t.Fatalf("frame %d is %+v, want %+v", i, a, b)
		}
	}
}

func TestSuccessorsReadOn(t *testing.T) {
	store, m := newStore(), newManifest()
	var want []journal.Frame
	for epoch := range 4 {
		l, got := openLog(t, m.take(store, epoch%3+1))
		sameFrames(t, got, want)
		want = append(want, mustWrite(t, l, 100, 2)...)
		sameFrames(t, replay(t, l, 0), want)
		if from := want[len(want)/2].FirstLSN + 1; len(replay(t, l, from)) != len(want)-len(want)/2 {
			t.Fatalf("replay from LSN %d gave %d frames", from, len(replay(t, l, from)))
		}
		if st := l.Stats(); st.Frames != 100 || st.Puts != 100 || st.Retries != 0 || st.FramesHeld != int64(len(want)) || st.BytesHeld != l.Size() {
			t.Fatalf("%+v", st)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := write(l, frame(l, 1)); !errors.Is(err, journal.ErrClosed) {
			t.Fatal(err)
		}
	}
}

func TestZombieIsFenced(t *testing.T) {
	store, m := newStore(), newManifest()
	old, _ := openLog(t, m.take(store, 4))
	want := mustWrite(t, old, 3, 1)
	now, got := openLog(t, m.take(store, 4))
	sameFrames(t, got, want)
	lost := frame(old, 1)
	if err := write(old, lost); !errors.Is(err, ErrFenced) || !errors.Is(err, journal.ErrStale) {
		t.Fatal(err)
	}
	if err := write(old, frame(old, 1)); !errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
	if !old.Stats().Fenced || old.MaxInFlight() == 0 {
		t.Fatal("a fenced log must say so, and take frames to refuse them")
	}
	if err := old.Trim(3); !errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
	want = append(want, mustWrite(t, now, 3, 1)...)
	_, got = openLog(t, m.take(store, 4))
	sameFrames(t, got, want)
}

func TestTrim(t *testing.T) {
	store, m := newStore(), newManifest()
	l, _ := openLog(t, m.take(store, 4))
	want := mustWrite(t, l, 20, 3)
	if err := l.Trim(31); err != nil { // the 11th frame begins at 31
		t.Fatal(err)
	}
	if l.FirstLSN() != 31 || m.lsn != 31 || m.seq != want[10].Seq {
		t.Fatalf("first LSN %d, manifest %+v", l.FirstLSN(), m)
	}
	sameFrames(t, replay(t, l, 0), want[10:])
	if err := l.Replay(30, nil); !errors.Is(err, journal.ErrMissing) {
		t.Fatal(err)
	}
	deleted(t, l)
	if n := countObjects(t, store); n != 10+1 {
		t.Fatalf("%d objects after the trim", n) // one seal
	}
	l, got := openLog(t, m.take(store, 4))
	sameFrames(t, got, want[10:])
	last := mustWrite(t, l, 5, 1)[4:] // stays: it says what time it was
	if err := l.Trim(1 << 40); err != nil {
		t.Fatal(err)
	}
	if l.Stats().FramesHeld != 1 || l.FirstLSN() != last[0].FirstLSN {
		t.Fatalf("%d bytes, first LSN %d, next %d", l.Size(), l.FirstLSN(), l.NextLSN())
	}
	want = append(last, mustWrite(t, l, 2, 1)...)
	deleted(t, l)
	if n := countObjects(t, store); n != 3+2 {
		t.Fatalf("%d objects", n)
	}
	_, got = openLog(t, m.take(store, 4))
	sameFrames(t, got, want)
}

func countObjects(t *testing.T, s blob.Store) int {
	t.Helper()
	infos, err := s.List(t.Context(), KeyPrefix(testPrefix), "", blob.MaxList)
	if err != nil {
		t.Fatal(err)
	}
	return len(infos)
}

func TestFailedDeletesAreMadeAgain(t *testing.T) {
	store, m := newStore(), newManifest()
	broken := true
	var mu sync.Mutex
	faulty := blob.NewFaulty(store, func(op blob.Op) blob.Fault {
		mu.Lock()
		defer mu.Unlock()
		if broken && op.Kind == blob.KindDelete {
			return blob.Fault{Outcome: blob.Refused}
		}
		return blob.Fault{}
	}, blob.FaultHooks{})
	l, _ := openLog(t, m.take(faulty, 4))
	mustWrite(t, l, 4, 1)
	trim := func() {
		t.Helper()
		if err := l.Trim(4); err != nil {
			t.Fatal(err)
		}
		deleted(t, l)
	}
	trim()
	if st := l.Stats(); st.DeleteErrors != 3 || st.Undeleted != 3 { // the newest frame stays
		t.Fatalf("%+v", st)
	}
	mu.Lock()
	broken = false
	mu.Unlock()
	trim()
	if st := l.Stats(); st.Deletes != 3 || st.Undeleted != 0 || countObjects(t, store) != 2 {
		t.Fatalf("%+v", st)
	}
}

// deleted waits for the deletes of the last trim.
func deleted(t *testing.T, l *Log) {
	t.Helper()
	waitFor(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return !l.deleting
	})
}

// waitFor waits for what another goroutine does without being asked again.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within 10 s")
		}
		runtime.Gosched()
	}
}

func TestFollower(t *testing.T) {
	store, m := newStore(), newManifest()
	f := NewFollower(FollowerOptions{Store: store, Prefix: testPrefix, HeadSeq: 1, HeadLSN: 1, Head: m.head, Clock: env.SystemClock{}})
	var got, want []journal.Frame
	next := func() (int, error) {
		return f.Next(t.Context(), func(fr journal.Frame) error {
			fr.Body = bytes.Clone(fr.Body)
			got = append(got, fr)
			return nil
		})
	}
	for range 3 {
		l, _ := openLog(t, m.take(store, 4))
		for range 3 {
			if n, err := next(); n != 0 || err != nil {
				t.Fatal(n, err)
			}
			want = append(want, mustWrite(t, l, 10, 2)...)
			if n, err := next(); n != 10 || err != nil {
				t.Fatal(n, err)
			}
			sameFrames(t, got, want)
		}
		// It has all: a trim does not hurt it.
		if err := l.Trim(1 << 40); err != nil {
			t.Fatal(err)
		}
	}
	// A successor that knows what the follower knows reads one frame again.
	o := m.take(store, 4)
	o.Known = f.Known()
	l, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, lsn := f.Place()
	if again := replay(t, l, lsn); len(again) != 0 {
		t.Fatalf("%d frames again", len(again))
	}
	want = append(want, mustWrite(t, l, 40, 2)...)
	if err := l.Trim(want[len(want)-2].FirstLSN - 1); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return l.Stats().Deletes >= 38 })
	for range headEvery {
		if n, err := next(); n > 0 {
			t.Fatal("it went on over a gap")
		} else if errors.Is(err, ErrTrimmed) {
			return
		}
	}
	t.Fatal("it did not see the trim")
}

func TestKnownIsUsed(t *testing.T) {
	store, m := newStore(), newManifest()
	l, _ := openLog(t, m.take(store, 4))
	want := mustWrite(t, l, 50, 2)
	f := NewFollower(FollowerOptions{Store: store, Prefix: testPrefix, HeadSeq: 1, HeadLSN: 1, Head: m.head, Clock: env.SystemClock{}})
	if n, err := f.Next(t.Context(), func(journal.Frame) error { return nil }); n != 50 || err != nil {
		t.Fatal(n, err)
	}
	want = append(want, mustWrite(t, l, 5, 2)...)
	if err := l.Trim(want[9].FirstLSN - 1); err != nil {
		t.Fatal(err)
	}
	o := m.take(store, 4)
	o.Known = f.Known()
	l, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sameFrames(t, replay(t, l, want[49].FirstLSN), want[49:])
	if st := l.Stats(); st.FramesHeld != 46 || st.Reads > 20 {
		t.Fatalf("%+v", st)
	}
	sameFrames(t, replay(t, l, 0), want[9:])
	mustWrite(t, l, 1, 1)
}
