package partition

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// TestManyBatchesOnTheirWay: with several batches in flight the tables are those
// of a replay that knows one after the other, wherever a crash cuts them off.
func TestManyBatchesOnTheirWay(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		var flying []journal.Frame
		land := func() {
			f := flying[0]
			flying = flying[1:]
			if err := w.log.Append(f); err != nil {
				t.Fatal(err)
			}
			w.m.Committed()
		}
		for range 300 {
			id := fmt.Sprintf("f%d", rng.IntN(6))
			switch n := rng.IntN(10); {
			case n == 0:
				w.propose(start(id, rng.IntN(2) == 0))
			case n < 6:
				w.propose(publish(id, fmt.Sprint(n)))
			case n < 7:
				w.propose(&wire.Entry{FlowId: id, Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{
					Attributes: []*wire.Attribute{{Name: fmt.Sprint("a", rng.IntN(3)), Value: make([]byte, rng.IntN(6000))}}}}})
			case n < 8 && len(w.ready) > 0:
				work := w.ready[rng.IntN(len(w.ready))]
				w.propose(&wire.Entry{FlowId: work.FlowID, Command: &wire.Entry_StepResult{StepResult: &wire.StepResult{
					Exec: work.Exec, Attempt: work.Attempt.Wire(), Next: []*wire.StepSpec{rest(false)}}}})
			}
			if len(flying) < 4 && rng.IntN(3) == 0 {
				if f, ok := w.m.Seal(); ok {
					flying = append(flying, f)
				}
			}
			if len(flying) > 0 && rng.IntN(4) == 0 {
				land()
			}
		}
		live := hashOf(t, w.db) // the rest of flying is lost
		// The same journal, read by somebody who has no tables yet.
		db, err := state.Open("other", state.Options{FS: w.fs, Manual: true})
		if err != nil {
			t.Fatal(err)
		}
		m, _, err := Open(Config{Epoch: 2, Tables: db, Log: w.log, Executor: &echo{}, Observer: &echo{}, Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}})
		if err != nil {
			t.Fatal(err)
		}
		if got := hashOf(t, db); got != live {
			t.Errorf("seed %d: %d entries in %d batches: the tables have hash %x, those of a replay %x", seed, m.CommittedLSN(), w.m.Stats().Batches, live, got)
		}
		_ = db.Close()
	}
}

func hashOf(t *testing.T, db *state.DB) uint64 {
	t.Helper()
	h, err := db.Hash()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// farLog is a far journal over a near one: its frames land when the test says so.
type farLog struct {
	*journal.Log
	mu     sync.Mutex
	window int
	flying []flight
	room   func()
	broken error
}

type flight struct {
	f    journal.Frame
	done func(error)
}

// Append is not what a far journal has.
func (l *farLog) Append() {}

func (l *farLog) MaxInFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.window
}

func (l *farLog) Begin(f journal.Frame, done func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flying = append(l.flying, flight{f, done})
}

func (l *farLog) OnRoom(fn func()) { l.room = fn }

// land lets the oldest frame land, if there is one.
func (l *farLog) land() bool {
	l.mu.Lock()
	if len(l.flying) == 0 {
		l.mu.Unlock()
		return false
	}
	x := l.flying[0]
	l.flying = l.flying[1:]
	err := l.broken
	l.mu.Unlock()
	if err == nil {
		err = l.Log.Append(x.f)
	}
	x.done(err)
	return true
}

func (l *farLog) grow(window int) {
	l.mu.Lock()
	l.window = window
	l.mu.Unlock()
	l.room()
}

func TestRunnerOnAFarJournal(t *testing.T) {
	fs := vfs.NewMem()
	db, err := state.Open("tables", state.Options{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	near, err := journal.Open(fs, "journal", journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	log := &farLog{Log: near, window: 3}
	e := &echo{}
	lapsed := false
	m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: e, Observer: e, Env: env.Real(), Valid: func() bool { return !lapsed }})
	if err != nil {
		t.Fatal(err)
	}
	lost := make(chan error, 1)
	r := Start(m, func(err error) { lost <- err })
	e.r = r
	answers := make(chan error, 16)
	propose := func(id string) {
		if err := r.Submit(Proposal{Entry: start(id, false), Reply: func(_ core.Reply, err error) { answers <- err }}); err != nil {
			t.Fatal(err)
		}
	}
	flying := func() int { log.mu.Lock(); defer log.mu.Unlock(); return len(log.flying) }
	ctx := context.Background()
	for i := range 5 {
		propose(fmt.Sprint("f", i))
		turn(r)
		turn(r) // what was applied before is sealed
	}
	if n := flying(); n != 3 {
		t.Fatalf("%d batches are on their way, want the window of 3", n)
	}
	// Full: the rest is gathered, until there is room.
	log.grow(4)
	for flying() != 4 {
		turn(r)
	}
	for range 4 {
		log.land()
	}
	for range 5 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	// A reader is not answered while the lease has lapsed.
	if err := r.Do(ctx, func(*Machine) { lapsed = true }); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(ctx, "f1"); !errors.Is(err, ErrLapsed) {
		t.Errorf("a read with a lapsed lease: %v", err)
	}
	// One that changes nothing waits, and one that stops is told.
	propose("f1")
	turn(r)
	if len(answers) > 0 {
		t.Errorf("a refusal while the lease has lapsed: %v", <-answers)
	}
	if err := r.Do(ctx, func(*Machine) { lapsed = false }); err != nil {
		t.Fatal(err)
	}
	var refused *core.Error
	if err := <-answers; !errors.As(err, &refused) || refused.Code != core.Exists {
		t.Errorf("the refusal came as %v", err)
	}
	// Stop commits what was proposed, also when there is no room at first.
	log.grow(0)
	propose("last")
	stopped := make(chan struct{})
	go func() { r.Stop(); close(stopped) }()
	log.grow(2)
	for landed := 0; landed == 0; {
		if log.land() {
			landed++
		}
	}
	for {
		select {
		case <-stopped:
			if err := <-answers; err != nil {
				t.Error(err)
			}
			if len(lost) > 0 {
				t.Error(<-lost)
			}
			return
		default:
			log.land()
		}
	}
}

// turn waits until the runner has done what it was asked before. It fails only
// when the runner is stopped.
func turn(r *Runner) { _ = r.Do(context.Background(), func(*Machine) {}) }

// TestALostFrameEndsAll: after the first error nobody is told of success.
func TestALostFrameEndsAll(t *testing.T) {
	fs := vfs.NewMem()
	db, err := state.Open("tables", state.Options{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	near, err := journal.Open(fs, "journal", journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	log := &farLog{Log: near, window: 3}
	e := &echo{}
	m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: e, Observer: e, Env: env.Real()})
	if err != nil {
		t.Fatal(err)
	}
	lost := make(chan error, 1)
	r := Start(m, func(err error) { lost <- err })
	e.r = r
	answers := make(chan error, 16)
	for i := range 3 {
		if err := r.Submit(Proposal{Entry: start(fmt.Sprint("f", i), false), Reply: func(_ core.Reply, err error) { answers <- err }}); err != nil {
			t.Fatal(err)
		}
		turn(r)
		turn(r)
	}
	log.broken = fmt.Errorf("gone: %w", journal.ErrStale)
	for log.land() {
	}
	for range 3 {
		if err := <-answers; !errors.Is(err, ErrLost) {
			t.Errorf("an answer after the loss: %v", err)
		}
	}
	if err := <-lost; !errors.Is(err, journal.ErrStale) {
		t.Errorf("lost: %v", err)
	}
	r.Stop()
}

// TestAFollowerTakesOver: who followed the journal while another owned the
// partition has its tables, and goes on from there.
func TestAFollowerTakesOver(t *testing.T) {
	w := newWorld(t)
	db, err := state.Open("standby", state.Options{FS: w.fs, Manual: true})
	if err != nil {
		t.Fatal(err)
	}
	follower := Follow(Config{Tables: db, Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}})
	follow := func() {
		if err := w.log.Replay(follower.NextLSN(), follower.Apply); err != nil && !errors.Is(err, journal.ErrMissing) {
			t.Fatal(err)
		}
	}
	w.clock.us.Store(9_000_000)
	for i := range 40 {
		w.propose(start(fmt.Sprint("f", i%4), false))
		w.propose(publish(fmt.Sprint("f", i%4), "x"))
		w.commit()
		if i%3 == 0 && i < 30 {
			follow()
		}
	}
	behind := follower.NextLSN()
	w.clock.us.Store(5_000_000) // of the other machine, which is behind
	m, rec, err := follower.TakeOver(Config{Epoch: w.epoch + 1, Tables: db, Log: w.log, Executor: w, Observer: w,
		Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}})
	if err != nil {
		t.Fatal(err)
	}
	if behind >= w.m.CommittedLSN() || m.CommittedLSN() != w.m.CommittedLSN() {
		t.Errorf("the follower was at %d, took over at %d; the owner ended at %d", behind, m.CommittedLSN(), w.m.CommittedLSN())
	}
	if got, want := hashOf(t, db), hashOf(t, w.db); got != want {
		t.Errorf("the follower's tables have hash %x, the owner's %x", got, want)
	}
	if rec.OpenFlows != 4 || rec.Redispatched != 4 {
		t.Errorf("taken up: %+v", rec)
	}
	if us := m.now(); us < 9_000_000 {
		t.Errorf("time went back to %d", us)
	}
	if _, _, err := Follow(Config{Tables: db, Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}}).TakeOver(Config{Tables: db, Log: w.log,
		Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}, Executor: w, Observer: w}); err == nil {
		t.Error("an owner of epoch 0 took over frames of epoch 1")
	}
}
