package partition

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// world is one partition on a memory file system, driven by hand.
type world struct {
	Slotless
	t     *testing.T
	fs    *vfs.MemFS
	clock *testClock
	rand  counter
	epoch uint64
	m     *Machine
	log   *journal.Log
	db    *state.DB

	exec Executor // the world itself, unless a test has another
	out  Outbox

	early     []*Work // dispatched before their commit
	ready     []*Work // dispatched or committed
	cancelled []string
	aborted   bool
	events    []string // type of each published event
}

type counter struct{ n atomic.Uint64 }

func (c *counter) Uint64() uint64 { return c.n.Add(1) }

type testClock struct {
	env.SystemClock
	us atomic.Int64
}

func (c *testClock) Now() time.Time { return time.UnixMicro(c.us.Load()) }

func newWorld(t *testing.T) *world {
	w := &world{t: t, fs: vfs.NewMem(), clock: &testClock{}}
	w.clock.us.Store(1_000_000)
	w.exec = w
	w.open()
	return w
}

func (w *world) open() Recovery {
	w.t.Helper()
	w.epoch++
	var err error
	if w.db, err = state.Open("tables", state.Options{FS: w.fs, Manual: true}); err != nil {
		w.t.Fatal(err)
	}
	if w.log, err = journal.Open(w.fs, "journal", journal.Options{SegmentSize: 64 << 10}); err != nil {
		w.t.Fatal(err)
	}
	m, rec, err := Open(Config{Epoch: w.epoch, Nonce: w.rand.Uint64(), Tables: w.db, Log: w.log, Executor: w.exec, Observer: w, Outbox: w.out,
		Env: env.Env{Clock: w.clock, Rand: &w.rand, FS: w.fs}, MaxTailBytes: 2000})
	if err != nil {
		w.t.Fatal(err)
	}
	w.m = m
	return rec
}

// restart forgets everything but the files.
func (w *world) restart() Recovery {
	w.t.Helper()
	w.early, w.ready, w.events = nil, nil, nil
	if err := errors.Join(w.db.Close(), w.log.Close()); err != nil {
		w.t.Fatal(err)
	}
	return w.open()
}

func (w *world) Dispatch(work *Work) {
	if work.Committed() {
		w.ready = append(w.ready, work)
		return
	}
	w.early = append(w.early, work)
}
func (w *world) Commit(work *Work) { w.ready = append(w.ready, work) }
func (w *world) Cancel(flow string, exec uint64, _ core.Attempt, reason string, _ bool) {
	w.cancelled = append(w.cancelled, fmt.Sprintf("%s/%d %s", flow, exec, reason))
}
func (w *world) Abort() { w.aborted = true }
func (w *world) Publish(_ string, evs []*wire.Event) {
	for _, ev := range evs {
		w.events = append(w.events, ev.Type)
	}
}

type outcome struct {
	rep  core.Reply
	err  error
	done bool
}

func (w *world) propose(e *wire.Entry) *outcome {
	o := &outcome{}
	w.m.Propose(Proposal{Entry: e, Reply: func(r core.Reply, err error) { o.rep, o.err, o.done = r, err, true }})
	return o
}

// commit seals and commits what there is; it counts the batches.
func (w *world) commit() int {
	w.t.Helper()
	n := 0
	for {
		f, ok := w.m.Seal()
		if !ok {
			return n
		}
		n++
		if err := w.log.Append(f); err != nil {
			w.t.Fatal(err)
		}
		w.m.Committed()
	}
}

func start(id string, prefetch bool) *wire.Entry {
	return &wire.Entry{FlowId: id, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{rest(prefetch)}}}}
}

func rest(prefetch bool) *wire.StepSpec {
	return &wire.StepSpec{Name: "turn", Prefetch: prefetch, Wait: &wire.Wait{Channel: "in", Count: 1, Idle: true}}
}

func publish(id, text string) *wire.Entry {
	return &wire.Entry{FlowId: id, Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: "in", Payload: []byte(text)}}}
}

func result(w *Work, next ...*wire.StepSpec) *wire.Entry {
	return &wire.Entry{FlowId: w.FlowID, Command: &wire.Entry_StepResult{StepResult: &wire.StepResult{
		Exec: w.Exec, Attempt: w.Attempt.Wire(), Events: []*wire.NewEvent{{Type: "did", Items: [][]byte{[]byte("result of " + w.Name)}}}, Next: next}}}
}

func TestNothingLeavesBeforeItsCommit(t *testing.T) {
	w := newWorld(t)
	created := w.propose(start("f", false))
	published := w.propose(publish("f", "hi"))
	var read *wire.Flow
	w.m.Read("f", func(f *wire.Flow, _ error) { read = f })
	refused := w.propose(start("f", false))
	if created.done || published.done || refused.done || read != nil || len(w.events)+len(w.ready)+len(w.early) > 0 {
		t.Fatalf("something left before the commit: %+v", w)
	}
	if n := w.commit(); n != 1 {
		t.Fatalf("%d batches, want 1", n)
	}
	if !created.done || created.err != nil || !published.rep.Started || read == nil || len(w.ready) != 1 {
		t.Fatalf("after the commit: created %+v published %+v read %v ready %d", created, published, read, len(w.ready))
	}
	var ce *core.Error
	if !errors.As(refused.err, &ce) || ce.Code != core.Exists {
		t.Fatalf("second start: %v", refused.err)
	}
}

func TestPrefetchIsHandedOutEarlyAndToldOfTheCommit(t *testing.T) {
	w := newWorld(t)
	w.propose(start("f", true))
	w.commit()
	w.propose(publish("f", "hi"))
	if len(w.early) != 1 || w.early[0].Committed() || len(w.ready) != 0 {
		t.Fatalf("early %d ready %d", len(w.early), len(w.ready))
	}
	w.commit()
	if len(w.ready) != 1 || !w.early[0].Committed() {
		t.Fatal("the commit was not told")
	}
}

func TestOneCommitAStep(t *testing.T) {
	w := newWorld(t)
	w.propose(&wire.Entry{FlowId: "f", Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{{Name: "s"}}}}})
	batches := w.commit()
	const k = 20
	for i := range k {
		work := w.ready[len(w.ready)-1]
		if i < k-1 {
			w.propose(result(work, &wire.StepSpec{Name: "s"}))
		} else {
			w.propose(result(work))
		}
		batches += w.commit()
	}
	if batches != k+1 {
		t.Fatalf("%d sequential steps took %d commits, want %d", k, batches, k+1)
	}
}

func TestLostCommitTellsEveryoneAndWritesNothing(t *testing.T) {
	w := newWorld(t)
	w.propose(start("f", true))
	w.commit()
	o := w.propose(publish("f", "hi"))
	if _, ok := w.m.Seal(); !ok {
		t.Fatal("nothing to seal")
	}
	behind := w.propose(publish("f", "behind"))
	w.m.Fail(errors.New("disk"))
	for _, x := range []*outcome{o, behind, w.propose(publish("f", "after"))} {
		if !errors.Is(x.err, ErrLost) {
			t.Fatalf("want ErrLost, got %v", x.err)
		}
	}
	if !w.aborted || len(w.ready) != 0 {
		t.Fatal("work went on without its commit")
	}
	f, err := w.db.Flow("f")
	if err != nil || len(f.Steps) != 1 || f.Steps[0].State != wire.Step_WAITING {
		t.Fatalf("tables hold what was not committed: %v %v", f, err)
	}
}

func TestRecoveryHandsOutAgainWithANewAttempt(t *testing.T) {
	w := newWorld(t)
	w.propose(start("f", false))
	w.propose(publish("f", "hi"))
	w.commit()
	old := w.ready[0]
	rec := w.restart()
	if rec.Redispatched != 1 || len(w.ready) != 0 {
		t.Fatalf("recovery %+v, ready %d before the commit", rec, len(w.ready))
	}
	w.commit()
	again := w.ready[0]
	if again.Attempt == old.Attempt || again.Key() != old.Key() || again.Number != 2 {
		t.Fatalf("attempt %+v key %s after %+v key %s", again.Attempt, again.Key(), old.Attempt, old.Key())
	}
	late := w.propose(result(old, rest(false)))
	w.commit()
	var ce *core.Error
	if !errors.As(late.err, &ce) || ce.Code != core.StaleAttempt {
		t.Fatalf("a result from the former life: %v", late.err)
	}
	if o := w.propose(result(again, rest(false))); w.commit() != 1 || o.err != nil {
		t.Fatalf("result: %v", o.err)
	}
}

func TestRecoveryReplaysWhatTheTablesLack(t *testing.T) {
	w := newWorld(t)
	for i := range 50 {
		w.propose(start(fmt.Sprintf("f%d", i), false))
		w.commit()
		if i == 20 {
			if err := w.db.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	want, err := w.db.Hash()
	if err != nil {
		t.Fatal(err)
	}
	// The tables lose what was not flushed; closing would flush them.
	lost := w.fs
	clone := vfs.NewMem()
	if _, err := vfs.Clone(lost, clone, "journal", "journal"); err != nil {
		t.Fatal(err)
	}
	w.fs = clone
	rec := w.open()
	if rec.Entries != 50 {
		t.Fatalf("replayed %d entries, want 50", rec.Entries)
	}
	if got, err := w.db.Hash(); err != nil || got != want {
		t.Fatalf("state hash after replay %x, want %x (%v)", got, want, err)
	}
}

func TestHistoryHoldsTheWholeLogInOrder(t *testing.T) {
	w := newWorld(t)
	w.propose(start("f", false))
	w.commit()
	want := []string{}
	check := func(work *Work) {
		t.Helper()
		var got []string
		if err := work.History(func(ev *wire.Event) error {
			for _, it := range ev.Items {
				got = append(got, string(it))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("history\n%v, want\n%v", got, want)
		}
	}
	for i := range 40 { // beyond MaxTailBytes: the tail is cut several times
		text := fmt.Sprintf("message %d %s", i, make([]byte, 100))
		w.propose(publish("f", text))
		w.commit()
		work := w.ready[len(w.ready)-1]
		want = append(want, text)
		check(work)
		w.propose(result(work, rest(false)))
		w.commit()
		want = append(want, "result of turn")
		if i%7 == 3 {
			w.clock.us.Add(w.m.cfg.IdleUs + 1)
			if w.m.PageOut() != 1 {
				t.Fatal("an idle flow did not leave memory")
			}
		}
	}
}

func TestUnknownFlowsCostNoMemory(t *testing.T) {
	w := newWorld(t)
	for i := range 1000 {
		w.propose(publish(fmt.Sprintf("none%d", i), "x"))
		w.m.Read(fmt.Sprintf("nothing%d", i), func(*wire.Flow, error) {})
	}
	if n := w.m.HotFlows(); n != 0 {
		t.Fatalf("%d flows in memory", n)
	}
}

func TestDeletedAndCreatedAgainInOneBatch(t *testing.T) {
	w := newWorld(t)
	w.propose(start("f", false))
	w.propose(publish("f", "old"))
	w.propose(&wire.Entry{FlowId: "f", Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}})
	w.propose(start("f", false))
	w.commit()
	n := 0
	if err := w.db.Events("f", 0, 0, 100, func(*wire.Event) error { n++; return nil }); err != nil || n != 1 {
		t.Fatalf("%d events (%v), want only the new life's first", n, err)
	}
}

func TestRetryTimerFires(t *testing.T) {
	w := newWorld(t)
	spec := &wire.StepSpec{Name: "s", Retry: &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 1000}}
	w.propose(&wire.Entry{FlowId: "f", Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{spec}}}})
	w.commit()
	e := result(w.ready[0])
	e.Command.(*wire.Entry_StepResult).StepResult.Retry = &wire.Retry{Error: "503"}
	w.propose(e)
	w.commit()
	if rec := w.restart(); rec.Timers != 1 { // the timer survives
		t.Fatalf("recovery %+v", rec)
	}
	w.m.Tick()
	if w.commit(); len(w.ready) != 0 {
		t.Fatal("the timer fired early")
	}
	at, ok := w.m.NextTimer()
	if !ok {
		t.Fatal("no timer")
	}
	w.clock.us.Store(at)
	w.m.Tick()
	if w.commit(); len(w.ready) != 1 || w.ready[0].Retries != 1 {
		t.Fatalf("ready %d", len(w.ready))
	}
}

// echo answers every attempt at once, from goroutines, through the runner.
type echo struct {
	Slotless
	world
	r  *Runner
	wg sync.WaitGroup
}

func (e *echo) Dispatch(w *Work) {
	if w.Committed() {
		e.Commit(w)
	}
}

func (e *echo) Commit(w *Work) {
	e.wg.Add(1)
	go func() {
		defer e.wg.Done()
		_ = e.r.SubmitWait(context.Background(), Proposal{Entry: result(w, rest(true))})
	}()
}
func (e *echo) Publish(string, []*wire.Event) {}

func TestRunnerManyClients(t *testing.T) {
	fs := vfs.NewMem()
	db, err := state.Open("tables", state.Options{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	log, err := journal.Open(fs, "journal", journal.Options{Go: func(f func()) { go f() }})
	if err != nil {
		t.Fatal(err)
	}
	e := &echo{}
	m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: e, Observer: e, Env: env.Real()})
	if err != nil {
		t.Fatal(err)
	}
	e.r = Start(m, func(err error) { t.Error(err) })
	ctx := context.Background()
	var clients sync.WaitGroup
	const flows, turns = 32, 20
	for i := range flows {
		clients.Add(1)
		go func() {
			defer clients.Done()
			id := fmt.Sprintf("f%d", i)
			if _, err := e.r.Call(ctx, start(id, true)); err != nil {
				t.Error(err)
				return
			}
			for range turns {
				if _, err := e.r.Call(ctx, publish(id, "x")); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	clients.Wait()
	for i := range flows { // all turns end
		for {
			f, err := e.r.Read(ctx, fmt.Sprintf("f%d", i))
			if err != nil {
				t.Fatal(err)
			}
			if !core.IsBusy(f) {
				break
			}
		}
	}
	e.wg.Wait()
	e.r.Stop()
	if err := e.r.Submit(Proposal{Entry: start("late", false)}); !errors.Is(err, ErrStopped) {
		t.Fatalf("after Stop: %v", err)
	}
	st := m.Stats()
	if st.Entries != flows*(1+2*turns) {
		t.Fatalf("%d entries, want %d", st.Entries, flows*(1+2*turns))
	}
	ofSteps := uint64(0)
	for k, n := range st.EntriesByStep {
		if ofSteps += n; k.Step == "" || st.EntriesByType[k.FlowType] == 0 {
			t.Errorf("%d entries are of %+v", n, k)
		}
	}
	if ofSteps != flows*turns { // the results
		t.Errorf("%d entries are of steps, want %d", ofSteps, flows*turns)
	}
	if st.Batches >= st.Entries {
		t.Errorf("no group commit: %d batches for %d entries", st.Batches, st.Entries)
	}
}

func TestAMalformedFlowIDIsRefusedAndHarmsNothing(t *testing.T) {
	w := newWorld(t)
	for _, id := range []string{"", "a\x00b", string(make([]byte, core.MaxIDBytes+1))} {
		o := w.propose(start(id, false))
		var ce *core.Error
		if !errors.As(o.err, &ce) || ce.Code != core.Invalid {
			t.Errorf("start of %.20q: %v", id, o.err)
		}
		var read error
		w.m.Read(id, func(_ *wire.Flow, err error) { read = err })
		if !errors.As(read, &ce) || ce.Code != core.Invalid {
			t.Errorf("read of %.20q: %v", id, read)
		}
	}
	if w.m.Err() != nil {
		t.Fatalf("the ownership ended: %v", w.m.Err())
	}
}

func TestMemoryOfFlowsAtRestIsBoundedInBytes(t *testing.T) {
	w := newWorld(t)
	w.m.cfg.MaxHotBytes = 20_000
	for i := range 100 {
		id := fmt.Sprintf("f%d", i)
		w.propose(start(id, false))
		w.propose(publish(id, string(make([]byte, 1000))))
		w.commit()
		w.propose(result(w.ready[len(w.ready)-1], rest(false)))
		w.commit()
	}
	if w.m.hot.bytes > 20_000 || w.m.HotFlows() < 5 {
		t.Fatalf("%d bytes of %d flows in memory", w.m.hot.bytes, w.m.HotFlows())
	}
	sum := 0
	for _, h := range w.m.hot.byID {
		sum += h.tailBytes
	}
	if sum != w.m.hot.bytes {
		t.Fatalf("counted %d bytes, there are %d", w.m.hot.bytes, sum)
	}
	f, err := w.db.Flow("f0")
	if err != nil || f.EventCount != 3 {
		t.Fatalf("a flow that left memory: %v %v", f, err)
	}
}

// TestStopBesideAFullQueue: a caller that waits for room, and the partition's own
// goroutine proposing, keep neither each other nor Stop.
func TestStopBesideAFullQueue(t *testing.T) {
	w := newWorld(t)
	r := Start(w.m, func(error) {})
	held, release := make(chan struct{}), make(chan struct{})
	ctx := context.Background()
	go func() {
		_ = r.put(ctx, request{do: func(*Machine) {
			close(held)
			<-release
			if err := r.Submit(Proposal{Entry: &wire.Entry{FlowId: "x"}}); !errors.Is(err, ErrStopped) && !errors.Is(err, ErrOverloaded) {
				t.Errorf("submit beside Stop gives %v", err)
			}
		}})
	}()
	<-held
	for range QueueBound {
		if err := r.try(request{do: func(*Machine) {}}); err != nil {
			t.Fatal(err)
		}
	}
	waited := make(chan error, 1)
	go func() { waited <- r.put(ctx, request{do: func(*Machine) {}}) }()
	for r.senders.Load() == 0 {
		runtime.Gosched()
	}
	stopped := make(chan struct{})
	go func() { r.Stop(); close(stopped) }()
	<-r.stop
	close(release)
	<-stopped
	if err := <-waited; err != nil && !errors.Is(err, ErrStopped) {
		t.Errorf("the caller that waited got %v", err)
	}
}
