package partition

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// slotWorld is a world whose workers have slots; it counts them, and keeps what
// is queued and sent.
type slotWorld struct {
	world
	free   int // worker slots
	queued []core.Effect
	sent   []*wire.Outgoing
	keys   []string // given back
}

func newSlotWorld(t *testing.T, slots int) *slotWorld {
	w := &slotWorld{world: world{t: t, fs: vfs.NewMem(), clock: &testClock{}}, free: slots}
	w.clock.us.Store(1_000_000)
	w.exec, w.out = w, w
	w.open()
	return w
}

func (w *slotWorld) Reserve(_, _ string, want int) int {
	n := min(want, w.free)
	w.free -= n
	return n
}
func (w *slotWorld) Release(_, _ string, n int) { w.free += n }
func (w *slotWorld) Queue(q core.Effect)        { w.queued = append(w.queued, q) }
func (w *slotWorld) Done(_, _ string, exec uint64, k string) {
	w.keys = append(w.keys, fmt.Sprint(k, exec))
}
func (w *slotWorld) Send(_ string, out *wire.Outgoing) { w.sent = append(w.sent, out) }

// take gives the newest attempt handed out; its slot is free again when the
// answer is proposed.
func (w *slotWorld) take() *Work {
	w.t.Helper()
	list := &w.ready
	if len(w.ready) == 0 {
		list = &w.early
	}
	if len(*list) == 0 {
		w.t.Fatal("nothing is handed out")
	}
	work := (*list)[len(*list)-1]
	*list = (*list)[:len(*list)-1]
	return work
}

// answer gives a slot back with an attempt's result.
func (w *slotWorld) answer(work *Work, r *wire.StepResult) *outcome {
	w.free++
	r.Exec, r.Attempt = work.Exec, work.Attempt.Wire()
	return w.propose(&wire.Entry{FlowId: work.FlowID, Command: &wire.Entry_StepResult{StepResult: r}})
}

func (w *slotWorld) must(e *wire.Entry) {
	w.t.Helper()
	o := w.propose(e)
	w.commit()
	if o.err != nil {
		w.t.Fatal(o.err)
	}
}

func startFlow(id string, c *wire.StartFlow) *wire.Entry {
	c.Type, c.Closes = "t", true
	return &wire.Entry{FlowId: id, Command: &wire.Entry_StartFlow{StartFlow: c}}
}

func steps(names ...string) []*wire.StepSpec {
	var out []*wire.StepSpec
	for _, n := range names {
		out = append(out, &wire.StepSpec{Name: n})
	}
	return out
}

func onChannel(step, channel string) *wire.StepSpec {
	return &wire.StepSpec{Name: step, Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: channel}}}}}}
}

func onChild(step, child string) *wire.StepSpec {
	return &wire.StepSpec{Name: step, Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{
		FlowId: child, Start: &wire.StartFlow{Type: "t", Steps: steps("work")}}}}}}}
}

// TestBatchesOfAFlow: what one flow alone costs in commits, with a free slot.
func TestBatchesOfAFlow(t *testing.T) {
	const k = 20
	w := newSlotWorld(t, 1)
	w.propose(startFlow("f", &wire.StartFlow{Steps: steps("s")}))
	batches := w.commit()
	for i := range k {
		r := &wire.StepResult{Next: steps("s")}
		if i == k-1 {
			r.Next = []*wire.StepSpec{onChannel("wake", "in")}
		}
		w.answer(w.take(), r)
		batches += w.commit()
	}
	if batches != k+1 {
		t.Errorf("%d sequential steps took %d batches, want %d", k, batches, k+1)
	}
	// A wake: the message, its match and the start are one batch.
	woken := w.propose(publish("f", "x"))
	if n := w.commit(); n != 1 || !woken.rep.Started || len(w.ready) != 1 {
		t.Errorf("a wake took %d batches, started %v, %d handed out", n, woken.rep.Started, len(w.ready))
	}
	w.answer(w.take(), &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL}})
	if n := w.commit(); n != 1 || w.free != 1 {
		t.Errorf("the end took %d batches; %d slots are free, want 1", n, w.free)
	}
}

func TestWithoutASlotAStepIsQueued(t *testing.T) {
	w := newSlotWorld(t, 2)
	w.must(startFlow("f", &wire.StartFlow{Steps: steps("a", "b", "c")}))
	if len(w.ready) != 2 || len(w.queued) != 1 || w.free != 0 || w.queued[0].Step != "c" {
		t.Fatalf("%d handed out, %d queued, %d free", len(w.ready), len(w.queued), w.free)
	}
	startQueued := &wire.Entry{FlowId: "f", Command: &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: w.queued[0].Exec}}}
	var ce *core.Error
	if o := w.propose(startQueued); !errors.As(o.err, &ce) || ce.Code != core.Busy {
		t.Fatalf("started without a slot: %v", o.err)
	}
	// The queue is taken up by the next owner; what was started is queued too, as
	// long as no worker has come.
	w.free = 0
	w.queued = nil
	rec := w.restart()
	w.commit()
	if rec.Queued != 1 || rec.Redispatched != 2 || len(w.queued) != 3 || len(w.ready) != 0 {
		t.Fatalf("recovery %+v, %d queued, %d handed out", rec, len(w.queued), len(w.ready))
	}
	w.free = 1
	w.must(startQueued)
	if len(w.ready) != 1 || w.free != 0 {
		t.Fatalf("%d handed out, %d free", len(w.ready), w.free)
	}
	// A refused command uses no slot.
	w.free = 1
	w.propose(startQueued)
	if w.free != 1 {
		t.Fatalf("%d slots free after a refusal, want 1", w.free)
	}
}

func TestAKeyIsGivenBack(t *testing.T) {
	w := newSlotWorld(t, 5)
	spec := &wire.StepSpec{Name: "s", ConcurrencyKey: "k", ConcurrencyLimit: 1}
	w.must(startFlow("f", &wire.StartFlow{Steps: []*wire.StepSpec{spec}}))
	if len(w.queued) != 1 || w.queued[0].Key != "k" || w.queued[0].KeyLimit != 1 || w.free != 5 {
		t.Fatalf("queued %+v, %d free", w.queued, w.free)
	}
	w.must(&wire.Entry{FlowId: "f", Command: &wire.Entry_StartQueued{StartQueued: &wire.StartQueued{Exec: 1}}})
	w.answer(w.take(), &wire.StepResult{})
	if len(w.keys) != 0 {
		t.Fatal("the key is given back before the commit")
	}
	w.commit()
	if fmt.Sprint(w.keys) != "[k1]" {
		t.Fatalf("keys given back: %v", w.keys)
	}
}

// TestAsync: a step that may run early is handed out before its commit; after a
// crash the uncommitted rest runs again, and no step that must not run early has
// been handed out.
func TestAsync(t *testing.T) {
	w := newSlotWorld(t, 9)
	async := func(name string) *wire.StepSpec { return &wire.StepSpec{Name: name, Async: true} }
	w.must(startFlow("f", &wire.StartFlow{Steps: []*wire.StepSpec{async("a")}}))
	w.early, w.ready = nil, w.ready[:1]
	a := w.take()
	w.answer(a, &wire.StepResult{Next: []*wire.StepSpec{async("b")}})
	if len(w.early) != 1 || w.early[0].Committed() {
		t.Fatal("b is not handed out early")
	}
	b := w.early[0]
	told := w.answer(b, &wire.StepResult{Next: steps("c"), Sends: []*wire.Send{{FlowId: "f/x", Command: &wire.Send_Publish{Publish: &wire.Publish{Channel: "in"}}}}})
	var read *wire.Flow
	w.m.Read("f", func(f *wire.Flow, _ error) { read = f })
	if len(w.early) != 1 || len(w.ready) != 0 || len(w.sent) != 0 || told.done || read != nil {
		t.Fatalf("something left before the commit: %d early, %d ready, %d sent", len(w.early), len(w.ready), len(w.sent))
	}
	// The crash: what was not committed is gone.
	rec := w.restart()
	w.commit()
	if rec.Redispatched != 1 || len(w.ready)+len(w.early) == 0 {
		t.Fatalf("recovery %+v", rec)
	}
	again := w.take()
	if again.Name != "a" || again.Key() != a.Key() || again.Attempt == a.Attempt {
		t.Fatalf("after the crash runs %s, key %s, was %s", again.Name, again.Key(), a.Key())
	}
	// A late answer of the lost rest is nobody's.
	w.answer(b, &wire.StepResult{})
	w.early, w.ready = nil, nil
	w.answer(again, &wire.StepResult{Next: []*wire.StepSpec{async("other")}})
	other := w.early[0]
	// The key names the place in the run, not the work: what runs at that place
	// after the crash may be another step. See docs/adr/0010-async-steps.md.
	if other.Key() != b.Key() || other.Name == b.Name {
		t.Fatalf("the other way is step %d %s, key %s", other.Exec, other.Name, other.Key())
	}
	w.commit()
}

// TestSendsAreDeliveredOnce: whatever is lost or repeated on the way between a
// parent and its child.
func TestSendsAreDeliveredOnce(t *testing.T) {
	for _, lose := range []string{"nothing", "the delivery's answer", "the report", "all at the first time"} {
		w := newSlotWorld(t, 9)
		w.must(startFlow("t/f/p", &wire.StartFlow{Steps: []*wire.StepSpec{onChild("gather", "t/f/c")}}))
		started := w.carry(lose)
		if started != 1 || len(w.ready) != 1 {
			t.Fatalf("%s lost: the child was started %d times", lose, started)
		}
		w.answer(w.take(), &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte("42")}})
		w.commit()
		w.carry(lose)
		if len(w.ready) != 1 || string(w.ready[0].Conditions[0].Output) != "42" {
			t.Fatalf("%s lost: the parent got %d tasks", lose, len(w.ready))
		}
		w.answer(w.take(), &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL}})
		w.commit()
		for _, id := range []string{"t/f/p", "t/f/c"} {
			f, err := w.db.Flow(id)
			if err != nil || f.Status != wire.Status_COMPLETED || len(f.Outbox) > 0 {
				t.Fatalf("%s lost: %v %v", lose, f, err)
			}
		}
	}
}

// carry delivers what is sent, with a loss at the first time, and counts the
// starts that made a run.
func (w *slotWorld) carry(lose string) (started int) {
	w.t.Helper()
	from := map[string]string{"t/f/c": "t/f/p", "t/f/p": "t/f/c"}
	for range 3 {
		sent := w.sent
		w.sent = nil
		for _, out := range sent {
			if lose == "all at the first time" {
				continue
			}
			o := w.propose(Delivery(out))
			w.commit()
			if o.rep.Created {
				started++
			}
			if lose == "the delivery's answer" {
				continue
			}
			report := w.propose(&wire.Entry{FlowId: from[out.Send.FlowId], Command: &wire.Entry_OutboxDone{OutboxDone: &wire.OutboxDone{Id: out.Id, RunId: o.rep.RunID}}})
			if lose != "the report" {
				w.commit()
			}
			if lose == "nothing" && report.err != nil {
				w.t.Fatal(report.err)
			}
		}
		if lose == "nothing" {
			return started
		}
		lose = "nothing"
		ready := w.ready
		w.restart() // the owner sends again what has no answer
		w.commit()
		if len(ready) > 0 && len(w.ready) == 0 {
			w.t.Fatal("what was handed out is forgotten")
		}
	}
	return started
}

func TestViewShowsAtOnceAndIsDoneWhenDurable(t *testing.T) {
	w := newSlotWorld(t, 9)
	w.propose(startFlow("f", &wire.StartFlow{Steps: steps("a")}))
	var status wire.Status
	seen, done := 0, 0
	view := func(id string) {
		w.m.View(id, func(f *wire.Flow) { seen++; status = f.GetStatus() }, func(err error) {
			done++
			if err != nil {
				t.Error(err)
			}
		})
	}
	view("f")
	if seen != 1 || done != 0 || status != wire.Status_RUNNING {
		t.Fatalf("seen %d, done %d", seen, done)
	}
	w.commit()
	view("f")
	view("none")
	if seen != 3 || done != 3 || w.m.HotFlows() != 1 {
		t.Fatalf("seen %d, done %d, %d flows in memory", seen, done, w.m.HotFlows())
	}
	w.propose(publish("f", "x"))
	var lost error
	w.m.View("f", func(*wire.Flow) {}, func(err error) { lost = err })
	w.m.Fail(errors.New("disk"))
	if !errors.Is(lost, ErrLost) {
		t.Fatalf("a view of what was never durable: %v", lost)
	}
}

// TestLargeAttributes: their rows come and go with them, over runs, page-outs
// and restarts.
func TestLargeAttributes(t *testing.T) {
	w := newSlotWorld(t, 9)
	large := func(b byte) []*wire.Attribute {
		return []*wire.Attribute{{Name: "big", Value: bytes.Repeat([]byte{b}, 5000)}, {Name: "small", Value: []byte("1")}}
	}
	check := func(what string, want byte) {
		t.Helper()
		f, err := w.db.Flow("f")
		if err != nil {
			t.Fatal(err)
		}
		v := core.AttributeOf(f, "big")
		if want == 0 && v != nil || want != 0 && (len(v) != 5000 || v[0] != want) {
			t.Fatalf("%s: %d bytes %.3q", what, len(v), v)
		}
	}
	w.must(startFlow("f", &wire.StartFlow{Steps: steps("a"), Attributes: large('a')}))
	check("started", 'a')
	// In one batch: a new run without it, and it set again.
	w.propose(startFlow("f", &wire.StartFlow{Steps: steps("a"), Reuse: wire.StartFlow_TERMINATE}))
	w.commit()
	check("a new run", 0)
	w.propose(startFlow("f", &wire.StartFlow{Steps: steps("a"), Reuse: wire.StartFlow_TERMINATE, Attributes: large('b')}))
	w.propose(&wire.Entry{FlowId: "f", Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: []*wire.Attribute{{Name: "big"}}}}})
	w.propose(&wire.Entry{FlowId: "f", Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: large('c')}}})
	w.commit()
	check("removed and set in one batch", 'c')
	want, err := w.db.Hash()
	if err != nil {
		t.Fatal(err)
	}
	// A replay of the whole journal gives the same tables.
	clone := vfs.NewMem()
	if _, err := vfs.Clone(w.fs, clone, "journal", "journal"); err != nil {
		t.Fatal(err)
	}
	w.fs = clone
	w.open()
	check("replayed", 'c')
	if got, err := w.db.Hash(); err != nil || got != want {
		t.Fatalf("hash after replay %x, want %x (%v)", got, want, err)
	}
}

// TestMemoryOfFlowsThatComeAgain: what a deleted flow's events took is given back
// when it is created anew.
func TestMemoryOfFlowsThatComeAgain(t *testing.T) {
	w := newSlotWorld(t, 9)
	for range 50 {
		w.must(startFlow("f", &wire.StartFlow{Steps: steps("a")}))
		w.must(&wire.Entry{FlowId: "f", Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}})
	}
	w.must(startFlow("f", &wire.StartFlow{Steps: steps("a")}))
	sum := 0
	for _, h := range w.m.hot.byID {
		sum += h.tailBytes
	}
	if sum != w.m.hot.bytes {
		t.Fatalf("counted %d bytes, there are %d", w.m.hot.bytes, sum)
	}
}
