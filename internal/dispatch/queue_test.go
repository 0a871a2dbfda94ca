package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestQueuedByPriorityThenArrival(t *testing.T) {
	w := newWorld(t)
	for i, p := range []uint32{0, 5, 0, 9, 5} {
		w.startWith(fmt.Sprint("f", i), &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{step("s")}, Priority: p, Closes: true})
	}
	q := w.d.Queues("a")[0]
	if q.Queued != 5 || q.Workers != 0 || q.OldestUs == 0 || len(q.Priorities) != 3 || q.Priorities[0].Priority != 9 || q.Priorities[1].Queued != 2 {
		t.Errorf("queue %v", q)
	}
	f := w.connect("w", 0)
	var order []string
	for range 5 {
		f.frame(&wire.WorkerFrame{TaskCredits: 1})
		order = append(order, f.names())
	}
	wantText(t, "order", strings.Join(order, " "), "f3.s f1.s f4.s f0.s f2.s")
}

// While steps are queued, a flow that begins does not pass them; one that goes
// on does, but each fifth credit is the queue's.
func TestFlowsThatGoOnComeBeforeTheQueueButNotForEver(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 2)
	w.start("a", step("s"))
	w.start("b", step("s"))
	first := f.tasks
	f.tasks = nil
	for i := range 4 {
		w.start(fmt.Sprint("q", i), step("u"))
	}
	if f.names() != "" {
		t.Fatal("started without a credit")
	}
	var order []string
	tasks := first
	for range 20 {
		m := tasks[0]
		tasks = tasks[1:]
		if m.Step == "u" {
			f.answer(m)
		} else {
			f.answer(m, step("s"))
		}
		tasks = append(tasks, f.tasks...)
		order = append(order, strings.ReplaceAll(f.names(), ".s", ""))
	}
	got := strings.Join(order, " ")
	if !strings.Contains(got, "q0.u") || !strings.Contains(got, "q1.u") || strings.Index(got, "q0") > strings.Index(got, "q1") {
		t.Errorf("the queue starves: %s", got)
	}
	if n := w.entries["StartQueued"]; n > 8 {
		t.Errorf("%d starts of their own in 20 steps: %s", n, got)
	}
}

func TestConcurrencyKey(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 10)
	keyed := func() *wire.StepSpec { return &wire.StepSpec{Name: "s", ConcurrencyKey: "k", ConcurrencyLimit: 2} }
	for i := range 5 {
		w.start(fmt.Sprint("f", i), keyed())
	}
	w.start("free", step("u"))
	first := f.tasks
	wantText(t, "first", f.names(), "f0.s f1.s free.u")
	q := w.d.Queues("a")[0]
	if len(q.Keys) != 1 || q.Keys[0].Queued != 3 || q.Keys[0].Running != 2 || q.Keys[0].Limit != 2 || q.Queued != 3 {
		t.Errorf("queue %v", q)
	}
	f.answer(first[0])
	second := f.take()
	wantText(t, "second", second.FlowId, "f2")
	// In backoff a step holds no key, and waits its turn again after.
	f.result(first[1], &wire.StepResult{Retry: &wire.Retry{Error: "x"}, Close: &wire.Close{How: wire.Close_FAIL}})
	third := f.take()
	wantText(t, "third", third.FlowId, "f3")
	// A step whose worker was lost keeps its key.
	f.leave("gone")
	g := w.connect("g", 10)
	wantText(t, "again", sorted(g.tasks), "f2.s f3.s free.u")
	for _, m := range g.tasks {
		g.answer(m)
	}
	w.pass(time.Minute)
	for _, m := range g.tasks[3:] {
		g.answer(m)
	}
	w.idle()
}

func sorted(tasks []*wire.Task) string {
	var out []string
	for _, m := range tasks {
		out = append(out, m.FlowId+"."+m.Step)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// A step of higher priority passes the others of its key.
func TestPriorityWithinAKey(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 10)
	spec := func() *wire.StepSpec { return &wire.StepSpec{Name: "s", ConcurrencyKey: "k", ConcurrencyLimit: 1} }
	for i, p := range []uint32{0, 0, 3, 9} {
		w.startWith(fmt.Sprint("f", i), &wire.StartFlow{Type: "t", Steps: []*wire.StepSpec{spec()}, Priority: p, Closes: true})
	}
	var order []string
	for range 4 {
		m := f.take()
		order = append(order, m.FlowId)
		f.answer(m)
	}
	wantText(t, "order", strings.Join(order, " "), "f0 f3 f2 f1")
	w.idle()
}

func TestTenantsTakeTurns(t *testing.T) {
	w := newWorld(t)
	for i := range 100 {
		w.start(fmt.Sprint("a:f", i), step("s"))
	}
	for i := range 20 {
		w.start(fmt.Sprint("b:f", i), step("s"))
	}
	w.hold = true // what is proposed is not answered
	fa, fb := w.connect("a:w", 1000), w.connect("b:w", 1000)
	w.hold = false
	w.settle()
	if len(fa.tasks) != 100 || len(fb.tasks) != 20 {
		t.Fatalf("%d and %d started", len(fa.tasks), len(fb.tasks))
	}
	// With a bound on what is proposed, the small tenant is not behind the large one.
	w = newWorld(t)
	var order []string
	w.d.Bind(proposed(func(flow string) { order = append(order, flow[:1]) }))
	for i := range 1000 {
		w.d.Queue(core.Effect{FlowID: fullID(fmt.Sprint("a:f", i)), FlowType: "t", Step: "s", Exec: 1})
	}
	for i := range 64 {
		w.d.Queue(core.Effect{FlowID: fullID(fmt.Sprint("b:f", i)), FlowType: "t", Step: "s", Exec: 1})
	}
	w.d.sched.inFlight = MaxProposals // nothing may be proposed
	w.connect("a:w", 10_000)
	w.connect("b:w", 10_000)
	w.d.sched.inFlight = 0
	w.d.pump()
	if len(order) != MaxProposals {
		t.Fatalf("%d proposed, the bound is %d", len(order), MaxProposals)
	}
	if n := strings.Count(strings.Join(order, ""), "b"); n != 64 {
		t.Errorf("%d of the small tenant's 64 are proposed among the first %d", n, len(order))
	}
	if got := strings.Join(order[:4*quantum], ""); got != strings.Repeat("a", quantum)+strings.Repeat("b", quantum)+strings.Repeat("a", quantum)+strings.Repeat("b", quantum) {
		t.Errorf("turns %s", got)
	}
}

// A step that is over leaves the queue, wherever it waits.
func TestStepsLeaveTheQueue(t *testing.T) {
	w := newWorld(t)
	effect := func(id string, exec uint64, key string) core.Effect {
		return core.Effect{FlowID: fullID(id), FlowType: "t", Step: "s", Exec: exec, Key: key, KeyLimit: 1, AtUs: 7}
	}
	all := []core.Effect{effect("one", 1, ""), effect("one", 2, "k"), effect("one", 3, "k"), effect("two", 1, "k"), effect("two", 2, "other"), effect("two", 3, "")}
	for _, q := range all {
		w.d.Queue(q)
		w.d.Queue(q) // again, as a new owner may say
	}
	if q := w.d.Queues("a")[0]; q.Queued != 6 || len(q.Keys) != 2 || q.Keys[0].Queued != 3 || q.OldestUs != 7 {
		t.Errorf("queue %v", q)
	}
	for _, i := range []int{2, 0, 5, 1, 4, 3} {
		w.d.Done(all[i].FlowID, "t", all[i].Exec, all[i].Key)
		w.d.Done(all[i].FlowID, "t", all[i].Exec, all[i].Key)
	}
	w.idle()
	w.d.Queue(core.Effect{FlowID: "nobody's", FlowType: "t"})
	w.d.Done("nobody's", "t", 1, "")
	w.d.Cancel("nobody's", 1, core.Attempt{}, "", false)
	if n := w.d.Reserve("nobody's", "t", 1); n != 0 {
		t.Errorf("%d reserved for nobody", n)
	}
	w.d.Release("nobody's", "t", 1)
}

// Steps of a flow that were started while their start was proposed claim its
// slot; the rest wait on.
func TestSlotOfAProposedStartGoesToItsFlow(t *testing.T) {
	w := newWorld(t)
	w.start("one", step("s"), step("u"))
	w.hold = true
	f := w.connect("f", 1)
	if n := w.d.Reserve(fullID("two"), "t", 1); n != 0 {
		t.Fatal("a reserved slot was reserved again")
	}
	w.hold = false
	w.settle()
	if len(f.tasks) != 1 {
		t.Fatalf("%d tasks", len(f.tasks))
	}
	f.answer(f.take())
	f.answer(f.take())
	w.idle()
}
