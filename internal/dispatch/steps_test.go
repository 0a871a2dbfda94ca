package dispatch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// With a free slot a flow of k steps is k+1 entries: each result carries the
// next start.
func TestOneEntryAStep(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 1)
	w.start("one", step("s"))
	for range 9 {
		f.answer(f.take(), step("s"))
	}
	f.answer(f.take())
	if n := w.m.Stats().Entries; n != 11 {
		t.Errorf("%d entries for 10 steps: %v", n, w.entries)
	}
	w.idle()
	if s := w.d.Stats(); len(s.Steps) != 1 || s.Steps[0].Dispatched != 10 || s.Steps[0].Completed != 10 {
		t.Errorf("stats %+v", s)
	}
}

func TestTaskCarriesWhatTheHandlerNeeds(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 1)
	w.startWith("one", &wire.StartFlow{Type: "t", Closes: true, Trace: []byte("trace"),
		Attributes: []*wire.Attribute{{Name: "color", Value: []byte(`"red"`)}},
		Steps: []*wire.StepSpec{{Name: "s", Input: []byte("1"), TimeoutUs: 5_000_000, HeartbeatUs: 1_000_000,
			Retry: &wire.RetryPolicy{MaxAttempts: 3, TotalUs: 60_000_000},
			Wait: &wire.Wait{Conditions: []*wire.Condition{
				{Name: "mail", On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "c"}}},
				{Name: "soon", On: &wire.Condition_TimerUs{TimerUs: 1000}}}}}}})
	w.do(&wire.Entry{FlowId: fullID("one"), Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: "c", Payload: []byte("hi")}}})
	w.pass(time.Second)
	m := f.take()
	if m.FlowId != "one" || m.FlowType != "t" || m.RunId == "" || m.Step != "s" || m.Number != 1 || string(m.Input) != "1" ||
		m.TimeoutUs != 5_000_000 || m.HeartbeatUs != 1_000_000 || m.RetryTotalUs != 60_000_000 || string(m.Trace) != "trace" ||
		len(m.Messages) != 1 || string(m.Messages[0].Payload) != "hi" || len(m.Conditions) != 2 || !m.Conditions[1].Done ||
		strings.Join(m.ConditionNames, " ") != "mail soon" || len(m.Attributes) != 1 || m.Phase != wire.Task_EXECUTE {
		t.Errorf("task %v", m)
	}
	if f.welcome.GetProtocol() != 1 || f.welcome.HeartbeatUs != 5_000_000 || f.welcome.MaxPayload != 64<<10 {
		t.Errorf("welcome %v", f.welcome)
	}
}

func TestWaitForIsAPhaseOfItsOwn(t *testing.T) {
	w := newWorld(t)
	f := w.connect("w", 1)
	w.start("one", &wire.StepSpec{Name: "s", WaitFor: true})
	m := f.take()
	if m.Phase != wire.Task_WAIT_FOR {
		t.Fatalf("phase %v", m.Phase)
	}
	f.result(m, &wire.StepResult{Locals: []byte("kept"), Wait: &wire.Wait{Channel: "c", Count: 1}})
	if len(f.tasks) > 0 {
		t.Fatal("executed before its wait was over")
	}
	w.do(&wire.Entry{FlowId: fullID("one"), Command: &wire.Entry_Publish{Publish: &wire.Publish{Channel: "c", Payload: []byte("hi")}}})
	m = f.take()
	if m.Phase != wire.Task_EXECUTE || string(m.Locals) != "kept" || len(m.Messages) != 1 {
		t.Errorf("task %v", m)
	}
	f.answer(m)
	w.idle()
}

func TestStickyAndLeastLoaded(t *testing.T) {
	w := newWorld(t)
	f, g := w.connect("f", 5), w.connect("g", 6)
	w.start("one", step("s"))
	m := g.take() // it has more credits
	g.answer(m, step("s"))
	for range 3 {
		f.frame(&wire.WorkerFrame{TaskCredits: 5})
		m = g.take() // though f has more by now
		g.answer(m, step("s"))
	}
	// Without a credit the former worker is passed by.
	m = g.take()
	for i := 0; f.worker.free+g.worker.free > 0; i++ {
		w.start(fmt.Sprint("fill", i), step("u"))
	}
	f.tasks = nil
	f.frame(&wire.WorkerFrame{TaskCredits: 1})
	g.frame(&wire.WorkerFrame{Results: []*wire.TaskResult{resultOf(m, &wire.StepResult{Next: []*wire.StepSpec{step("s")}})}})
	wantText(t, "tasks of the other worker", f.names(), "one.s")
}

func TestWorkerLost(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 3)
	w.start("one", step("s"))
	w.start("two", step("s"))
	one := f.tasks[0]
	f.frame(&wire.WorkerFrame{Heartbeats: []*wire.Heartbeat{{FlowId: "one", Exec: one.Exec, Attempt: one.Attempt, Checkpoint: []byte("half")}}})
	f.leave("EOF")
	if w.d.RunningOn(fullID("one"), one.Exec) != "" || len(w.d.Workers("a")) != 0 {
		t.Error("still there")
	}
	q := w.d.Queues("a")[0]
	if q.Queued != 2 || q.Running != 0 {
		t.Errorf("queue %v", q)
	}
	g := w.connect("g", 3)
	again := g.tasks[0]
	if again.FlowId != "one" || again.Number != 2 || again.Retries != 0 || string(again.Checkpoint) != "half" || again.Attempt.EqualVT(one.Attempt) || again.Exec != one.Exec {
		t.Errorf("again %v", again)
	}
	if w.d.RunningOn(fullID("one"), one.Exec) != "g" {
		t.Error("it does not run on g")
	}
	// The lost worker's answer, by whatever stream, is not taken for the new attempt.
	g.result(one, &wire.StepResult{Close: &wire.Close{How: wire.Close_FAIL, Error: "late"}})
	if s := w.flow("one").Status; s != wire.Status_RUNNING || w.d.Stats().Late != 1 {
		t.Errorf("status %v, %d late", s, w.d.Stats().Late)
	}
	for _, m := range g.tasks {
		g.answer(m)
	}
	if s := w.flow("one").Status; s != wire.Status_COMPLETED {
		t.Errorf("status %v", s)
	}
	w.idle()
	if got := strings.Join(w.outcomes, "|"); !strings.Contains(got, "t.s lost") {
		t.Errorf("outcomes %s", got)
	}
}

// A worker that is reserved for and leaves before the commit: the task goes to
// whoever comes.
func TestReservedWorkerLeaves(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.hold = true
	w.start("one", step("s"))
	f.leave("gone")
	w.hold = false
	w.settle()
	if q := w.d.Queues("a")[0]; q.Queued != 1 || q.OldestUs == 0 {
		t.Errorf("queue %v", q)
	}
	g := w.connect("g", 1)
	g.answer(g.take())
	w.idle()
}

func TestSilentWorkerIsLost(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.start("one", step("s"))
	for range 10 {
		w.pass(14 * time.Second)
		f.frame(&wire.WorkerFrame{})
	}
	if f.closed {
		t.Fatal("lost though it spoke")
	}
	w.pass(14900 * time.Millisecond)
	if f.closed {
		t.Fatal("lost too early")
	}
	w.pass(200 * time.Millisecond)
	if !f.closed || !strings.Contains(fmt.Sprint(f.err), "sent nothing for 15s") {
		t.Fatalf("closed %v: %v", f.closed, f.err)
	}
}

func TestAttemptTimesOut(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.start("one", &wire.StepSpec{Name: "s", TimeoutUs: 1_000_000, Retry: &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 1000}})
	m := f.take()
	w.pass(999 * time.Millisecond)
	if len(f.cancels) > 0 {
		t.Fatal("too early")
	}
	f.frame(&wire.WorkerFrame{TaskCredits: 1})
	w.pass(3 * time.Millisecond)
	if len(f.cancels) != 1 || !f.cancels[0].Forget || f.cancels[0].FlowId != "one" {
		t.Fatalf("cancels %v", f.cancels)
	}
	again := f.take()
	if again.Retries != 1 || again.Number != 2 {
		t.Errorf("again %v", again)
	}
	f.result(m, &wire.StepResult{}) // too late
	if w.d.Stats().Late != 1 {
		t.Error("a late result was taken")
	}
	w.pass(2 * time.Second)
	got := w.flow("one")
	if got.Status != wire.Status_FAILED || !strings.Contains(got.Error, "timed out after 1s") {
		t.Errorf("flow %v %q", got.Status, got.Error)
	}
	w.idle()
	if s := w.d.Stats().Steps[0]; s.TimedOut != 2 {
		t.Errorf("stats %+v", s)
	}
}

func TestHeartbeatTimeoutAndCheckpoints(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.start("one", &wire.StepSpec{Name: "s", HeartbeatUs: 2_000_000, TimeoutUs: 3_600_000_000, Retry: &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 1000}})
	m := f.take()
	beat := func(text string) {
		t.Helper()
		f.frame(&wire.WorkerFrame{Heartbeats: []*wire.Heartbeat{{FlowId: "one", Exec: m.Exec, Attempt: m.Attempt, Checkpoint: []byte(text)}}})
	}
	for i := range 100 {
		beat(fmt.Sprint(i / 10))
		w.pass(time.Second)
	}
	if n := w.entries["Checkpoint"]; n < 10 || n > 21 {
		t.Errorf("%d checkpoints proposed in 100 s", n)
	}
	before := w.entries["Checkpoint"]
	for range 20 {
		beat("9")
		w.pass(time.Second)
	}
	if n := w.entries["Checkpoint"]; n != before {
		t.Errorf("%d checkpoints that did not change", n-before)
	}
	beat("newest")
	f.frame(&wire.WorkerFrame{TaskCredits: 1})
	w.pass(1900 * time.Millisecond)
	if len(f.cancels) > 0 {
		t.Fatal("too early")
	}
	w.pass(200 * time.Millisecond)
	again := f.take()
	if string(again.Checkpoint) != "newest" || again.Retries != 1 {
		t.Errorf("again %v", again)
	}
	beat("stale") // of the attempt that is over
	if n := len(f.cancels); n != 2 || !f.cancels[1].Forget {
		t.Errorf("cancels %v", f.cancels)
	}
}

func TestDuplicateForeignAndBadResults(t *testing.T) {
	w := newWorld(t)
	f, g := w.connect("f", 1), w.connect("g", 0)
	w.start("one", step("s"))
	m := f.take()
	wrong := m.CloneVT()
	wrong.Attempt.Lsn++
	other := m.CloneVT()
	other.FlowId = "none"
	g.result(m, &wire.StepResult{Close: &wire.Close{How: wire.Close_FAIL}}) // another worker's
	f.frame(&wire.WorkerFrame{Results: []*wire.TaskResult{resultOf(wrong, &wire.StepResult{}), resultOf(other, &wire.StepResult{}), {}, {FlowId: "one"}, {FlowId: "one", Result: &wire.StepResult{Exec: m.Exec}}}})
	if s := w.flow("one").Status; s != wire.Status_RUNNING {
		t.Fatalf("status %v", s)
	}
	f.frame(&wire.WorkerFrame{Results: []*wire.TaskResult{resultOf(m, &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL}}), resultOf(m, &wire.StepResult{Next: []*wire.StepSpec{step("u")}})}})
	if n := w.d.Stats().Late; n != 7 {
		t.Errorf("%d late", n)
	}
	if s := w.flow("one"); s.Status != wire.Status_COMPLETED || s.StepsDone != 1 {
		t.Errorf("flow %v", s)
	}
	w.idle()
}

func TestFlood(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	results := make([]*wire.TaskResult, floodSlack+1)
	for i := range results {
		results[i] = &wire.TaskResult{FlowId: "none", Result: &wire.StepResult{Exec: 1}}
	}
	err := f.worker.Frame(&wire.WorkerFrame{Results: results})
	if judge(err) != refused || !strings.Contains(err.Error(), "flood: the worker gave 257 answers to 0 tasks") {
		t.Errorf("results: %v", err)
	}
	f = w.connect("f", 1)
	for _, m := range []*wire.WorkerFrame{{TaskCredits: MaxCredits}, {RpcCredits: 1 << 31}} {
		if err := f.worker.Frame(m); err == nil || !strings.Contains(err.Error(), "flood") {
			t.Errorf("credits: %v", err)
		}
	}
}

// A worker whose frames wait gets nothing new until they are sent, also not what
// was reserved for it.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 5)
	f.frame(&wire.WorkerFrame{RpcCredits: 5})
	f.full = mux.ErrFull
	w.start("one", step("s"))
	call := w.call("one", "read", time.Minute)
	w.start("two", step("s"))
	if q := w.d.Queues("a")[0]; q.Queued != 2 || q.TaskCredits != 5 || q.RpcCredits != 5 || q.Running != 0 {
		t.Errorf("queue %v", q)
	}
	f.frame(&wire.WorkerFrame{TaskCredits: 1, RpcCredits: 1})
	f.full = nil
	f.worker.Sent()
	w.settle()
	wantText(t, "tasks", sorted(f.tasks), "one.s two.s")
	f.reply(f.takeCall(), 1)
	call.want(t, "")
	for _, m := range f.tasks {
		f.answer(m)
	}
	w.idle()
	if f.worker.free != 6 || f.worker.rpcFree != 6 {
		t.Errorf("%d and %d credits", f.worker.free, f.worker.rpcFree)
	}
	f.worker.Sent()
	// One whose stream is broken is lost.
	f.full = mux.ErrClosed
	w.start("three", step("s"))
	if !f.closed || !strings.Contains(fmt.Sprint(f.err), "does not read") {
		t.Errorf("closed: %v", f.err)
	}
	f.leave("closed")
	f.worker.Sent()
	g := w.connect("g", 1)
	g.answer(g.take())
	w.idle()
}

// Heartbeats of attempts that a worker should not have are answered, within a
// bound.
func TestNagging(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 5)
	beats := make([]*wire.Heartbeat, 3*floodSlack)
	for i := range beats {
		beats[i] = &wire.Heartbeat{FlowId: "one", Exec: 1}
	}
	f.frame(&wire.WorkerFrame{Heartbeats: beats})
	if len(f.cancels) != floodSlack {
		t.Errorf("%d cancels", len(f.cancels))
	}
	f.worker.Sent()
	f.frame(&wire.WorkerFrame{Heartbeats: beats[:1]})
	if len(f.cancels) != floodSlack+1 {
		t.Errorf("%d cancels", len(f.cancels))
	}
}

// What fits no frame fails its step or its call, and harms no worker.
func TestTooLargeForAFrame(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	f.frame(&wire.WorkerFrame{RpcCredits: 1})
	value := make([]byte, core.MaxPayload)
	var big []*wire.Attribute
	for i := range MaxTask/core.MaxPayload + 1 {
		big = append(big, &wire.Attribute{Name: fmt.Sprint("a", i), Value: value})
	}
	w.d.Reserve(fullID("big"), "t", 1)
	w.d.Dispatch(&partition.Work{Task: &core.Task{FlowID: fullID("big"), FlowType: "t", Name: "s", Exec: 1, Attributes: big, Spec: step("s")}})
	if len(w.queue) != 1 {
		t.Fatalf("%d proposed", len(w.queue))
	}
	p := w.queue[0]
	w.queue = nil
	if r := p.Entry.GetStepResult(); !r.GetRetry().GetPermanent() || r.Close.GetHow() != wire.Close_FAIL || !strings.Contains(r.Retry.Error, "at most 100663296 fit") {
		t.Errorf("proposed %v", p.Entry)
	}
	p.Reply(core.Reply{}, nil)
	w.idle()
	a := &asked{task: &wire.RpcTask{Name: "read", Attributes: big}}
	w.d.Call(fullID("big"), "t", a.task, 0, func(r *wire.RpcResult, err error) { a.res, a.err, a.n = r, err, a.n+1 })
	a.want(t, "too_large: ")
	w.idle()
	w.start("small", step("s"))
	f.answer(f.take())
	w.idle()
}

func TestRefusedResultFailsTheStepOnce(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 1)
	w.start("one", step("s"))
	m := f.take()
	f.result(m, &wire.StepResult{Next: []*wire.StepSpec{{Name: ""}}})
	got := w.flow("one")
	if got.Status != wire.Status_FAILED || !strings.Contains(got.Error, "the result was refused: invalid: ") {
		t.Errorf("flow %v %q", got.Status, got.Error)
	}
	if len(f.refused) != 1 || f.refused[0].Code != "invalid" || f.refused[0].Exec != m.Exec || strings.Contains(f.refused[0].Message, "invalid:") {
		t.Errorf("refusals %v", f.refused)
	}
	w.idle()
	if s := w.d.Stats().Steps[0]; s.NotAccepted != 1 || s.Completed != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestCheckedResults(t *testing.T) {
	w := newWorld(t)
	w.d.cfg.Check = func(tenant, flowType string, r *wire.StepResult) error {
		if tenant != "a" || flowType != "t" {
			t.Errorf("check of %s %s", tenant, flowType)
		}
		if len(r.Next) > 0 && r.Next[0].Name == "nope" {
			return fmt.Errorf("unknown_step: there is no step %q", r.Next[0].Name)
		}
		return nil
	}
	f := w.connect("f", 1)
	w.start("one", step("s"))
	f.answer(f.take(), step("u"))
	f.answer(f.take(), step("nope"))
	got := w.flow("one")
	if got.Status != wire.Status_FAILED || !strings.Contains(got.Error, `unknown_step: there is no step "nope"`) || len(f.refused) != 1 || f.refused[0].Code != "unknown_step" {
		t.Errorf("flow %v %q, refusals %v", got.Status, got.Error, f.refused)
	}
	w.idle()
}

// A step that no connected worker declares waits, visibly, and passes nobody.
func TestUnknownStepWaits(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 10)
	w.start("new", step("later")) // started inline: it is owed
	w.start("old", step("s"))
	wantText(t, "tasks", f.names(), "old.s")
	if q := w.d.Queues("a")[0]; q.Queued != 1 || q.OldestUs == 0 || q.TaskCredits != 9 {
		t.Errorf("queue %v", q)
	}
	f.leave("gone")
	w.start("newer", step("later")) // queued
	g := w.connect("g", 10)
	wantText(t, "tasks", g.names(), "old.s")
	if q := w.d.Queues("a")[0]; q.Queued != 2 {
		t.Errorf("queue %v", q)
	}
	h := w.connect("h", 10, &wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "later"}}})
	wantText(t, "tasks", sorted(h.tasks), "new.later newer.later")
	k, ok := w.d.KnownType("a", "t")
	if !ok || len(k.Steps) != 4 || len(k.Rpcs) != 2 {
		t.Errorf("known %v", k)
	}
}

func TestCancelReachesTheWorker(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 2)
	w.start("one", step("s"))
	m := f.take()
	w.do(&wire.Entry{FlowId: fullID("one"), Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_CANCEL, Reason: "enough"}}})
	if len(f.cancels) != 1 || f.cancels[0].Forget || f.cancels[0].Reason != "enough" || f.cancels[0].Exec != m.Exec {
		t.Fatalf("cancels %v", f.cancels)
	}
	f.result(m, &wire.StepResult{Attributes: []*wire.Attribute{{Name: "x", Value: []byte("1")}}})
	if got := w.flow("one"); got.Status != wire.Status_CANCELLED || len(got.Attributes) != 1 {
		t.Errorf("flow %v", got)
	}
	w.idle()
}

func TestTerminatedWhileItRuns(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 2)
	w.start("one", step("s"))
	m := f.take()
	w.do(&wire.Entry{FlowId: fullID("one"), Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: wire.StopFlow_TERMINATE, Reason: "now"}}})
	if len(f.cancels) != 1 {
		t.Fatalf("cancels %v", f.cancels)
	}
	f.answer(m)
	w.idle()
}

func TestAsyncStepsGoOutBeforeTheirCommit(t *testing.T) {
	w := newWorld(t)
	sub := w.hub.Subscribe(fullID("one"), 0)
	f := w.connect("f", 1)
	async := func() *wire.StepSpec { return &wire.StepSpec{Name: "s", Async: true} }
	w.start("one", async())
	first := f.take() // the first step of a run waits for its commit all the same
	ctx := canceled()
	for {
		if _, err := sub.Next(ctx); err != nil {
			break
		}
	}
	w.hold = true
	f.answer(first, async())
	for range 5 {
		m := f.take()
		f.frame(&wire.WorkerFrame{Outputs: []*wire.Output{{FlowId: "one", Exec: m.Exec, Attempt: m.Attempt, Text: "hello"}}})
		f.answer(m, async())
	}
	m := f.take()
	f.frame(&wire.WorkerFrame{Outputs: []*wire.Output{{FlowId: "one", Exec: m.Exec, Attempt: m.Attempt, Text: "last"}}})
	if got, err := sub.Next(ctx); err == nil {
		t.Fatalf("shown before its commit: %v", got)
	}
	w.hold = false
	w.settle()
	frames, err := sub.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	last := frames[len(frames)-1]
	if last.Delta == nil || last.Delta.Text != "last" || last.Delta.Exec != m.Exec {
		t.Errorf("last frame %+v", last)
	}
	f.answer(m)
	w.idle()
}

func TestOutputsAreShownAndBounded(t *testing.T) {
	w := newWorld(t)
	sub := w.hub.Subscribe(fullID("one"), 16<<20)
	f := w.connect("f", 1)
	w.start("one", step("s"))
	m := f.take()
	piece := strings.Repeat("x", MaxOutput/4)
	for range 6 {
		f.frame(&wire.WorkerFrame{Outputs: []*wire.Output{{FlowId: "one", Exec: m.Exec, Attempt: m.Attempt, Text: piece}, {FlowId: "none", Exec: 1, Text: "x"}}})
	}
	frames, err := sub.Next(canceled())
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, fr := range frames {
		if fr.Delta != nil {
			n += len(fr.Delta.Text)
		}
	}
	if n != MaxOutput {
		t.Errorf("%d bytes shown", n)
	}
	f.answer(m)
	sub.Close()
	if w.hub.Watched() != 0 {
		t.Error("the output is kept")
	}
}

// Proposals that find no room are tried again, and nothing is lost.
func TestPartitionWithoutRoom(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 100)
	for i := range 50 {
		w.start(fmt.Sprint("f", i), &wire.StepSpec{Name: "s", TimeoutUs: 1_000_000})
	}
	w.room = 3
	for i := range 50 {
		w.startQueued(fmt.Sprint("g", i), "u")
	}
	w.pass(10 * time.Second)
	if w.overloaded == 0 {
		t.Fatal("there was room")
	}
	for i := range 50 {
		if s := w.flow(fmt.Sprint("f", i)).Status; s != wire.Status_FAILED {
			t.Errorf("flow %d is %v", i, s)
		}
	}
	f.tasks = f.tasks[50:]
	if len(f.tasks) != 50 {
		t.Fatalf("%d of the queued are started", len(f.tasks))
	}
	for _, m := range f.tasks {
		f.answer(m)
	}
	w.idle()
}

// startQueued begins a flow whose first step is queued by its key.
func (w *world) startQueued(id, name string) {
	w.start(id, &wire.StepSpec{Name: name, ConcurrencyKey: id, ConcurrencyLimit: 1})
}

func TestServerDrains(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 2)
	w.start("one", step("s"))
	m := f.take()
	w.d.Drain()
	w.d.Drain()
	if !f.drain {
		t.Error("the worker was not told")
	}
	w.start("two", step("s"))
	f.answer(m, step("s"))
	if len(f.tasks) > 0 {
		t.Error("handed out while draining")
	}
	if q := w.d.Queues("a")[0]; q.Queued != 2 {
		t.Errorf("queue %v", q)
	}
	if _, err := w.d.Connect("a", "", &wire.Hello{Protocol: 1, WorkerId: "g", FlowTypes: []*wire.FlowType{typeT()}}, &fake{w: w}); err != error(ErrDraining) {
		t.Errorf("connect: %v", err)
	}
	w.d.Stop()
	if !f.closed || f.err != error(ErrDraining) {
		t.Errorf("closed %v: %v", f.closed, f.err)
	}
	f.leave("stopped")
}

// TestWorkerWithSeveralStreams: they are shown as one worker, each has its own
// credits, and what is lost with one of them is what was handed out over it.
func TestWorkerWithSeveralStreams(t *testing.T) {
	w := newWorld(t)
	f, g := w.connect("f", 3), w.connect("f", 1)
	other := w.connect("h", 0)
	for _, id := range []string{"one", "two", "three", "four"} {
		w.start(id, step("s"))
	}
	if len(f.tasks) != 3 || len(g.tasks) != 1 {
		t.Fatalf("the streams have %d and %d tasks", len(f.tasks), len(g.tasks))
	}
	ws := w.d.Workers("a")
	if len(ws) != 2 || ws[0].WorkerId != "f" || ws[0].Streams != 2 || ws[0].Running != 4 || ws[1].Streams != 1 || len(ws[0].FlowTypes) != 1 {
		t.Errorf("workers are %v", ws)
	}
	if q := w.d.Queues("a")[0]; q.Workers != 2 {
		t.Errorf("queue %v", q)
	}
	kept := f.tasks[0]
	lost := g.tasks[0]
	g.frame(&wire.WorkerFrame{Drain: true})
	if i := w.d.Workers("a")[0]; i.Draining {
		t.Errorf("worker %v", i)
	}
	g.leave("a cable was cut")
	if w.d.RunningOn(fullID(kept.FlowId), kept.Exec) != "f" || w.d.RunningOn(fullID(lost.FlowId), lost.Exec) != "" {
		t.Error("another stream's task is gone, or the lost one's is not")
	}
	f.answer(kept)
	f.tasks = f.tasks[1:]
	f.frame(&wire.WorkerFrame{TaskCredits: 1})
	if i := w.d.Workers("a")[0]; i.Streams != 1 || i.Running != 3 {
		t.Errorf("worker %v", i)
	}
	again := f.tasks[len(f.tasks)-1]
	if again.FlowId != lost.FlowId || again.Number != 2 {
		t.Errorf("again %v", again)
	}
	// A late answer of the other stream, over this one, is not taken.
	f.result(lost, &wire.StepResult{})
	if w.d.RunningOn(fullID(lost.FlowId), lost.Exec) != "f" {
		t.Error("the lost attempt's answer was taken")
	}
	for _, m := range f.tasks {
		f.answer(m)
	}
	other.leave("done")
	w.idle()
}

func TestWorkerDrains(t *testing.T) {
	w := newWorld(t)
	f := w.connect("f", 5)
	w.start("one", step("s"))
	m := f.take()
	w.hold = true
	w.start("two", step("s")) // reserved on f
	f.frame(&wire.WorkerFrame{Drain: true})
	w.hold = false
	w.settle()
	if len(f.tasks) > 0 || f.closed {
		t.Fatalf("%d tasks, closed %v", len(f.tasks), f.closed)
	}
	if i := w.d.Workers("a")[0]; !i.Draining || i.TaskCredits != 0 || i.Running != 1 || i.WorkerId != "f" {
		t.Errorf("worker %v", i)
	}
	f.answer(m, step("s"))
	if !f.closed || f.err != nil {
		t.Fatalf("closed %v: %v", f.closed, f.err)
	}
	f.leave("done")
	g := w.connect("g", 5)
	wantText(t, "tasks", sorted(g.tasks), "one.s two.s")
	for _, m := range g.tasks {
		g.answer(m)
	}
	w.idle()
}
