package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestPrefetchedTextIsHeldUntilTheCommit(t *testing.T) {
	held, goOn := make(chan struct{}), make(chan struct{})
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		if call.Committed() {
			t.Error("handed out after its commit")
		}
		for _, text := range []string{"one ", "two "} {
			if err := call.Show(ctx, text); err != nil {
				t.Error(err)
			}
		}
		close(held)
		<-call.Durable()
		<-goOn
		if err := call.Show(ctx, "three"); err != nil {
			t.Error(err)
		}
		return say("done", "")
	})
	sub := w.hub.Subscribe("f", 0)
	defer sub.Close()
	release := w.holdCommits()
	w.start("f", true)
	<-held
	short, cancel := context.WithCancel(w.ctx)
	cancel()
	if got, _ := frames(short, sub, "done"); len(got) > 0 {
		t.Fatalf("shown before the commit: %q", got)
	}
	release()
	close(goOn)
	got, err := frames(w.ctx, sub, "done")
	if err != nil || strings.Join(got, "|") != "flow.started|step.started|0+one two |8+three|done" {
		t.Fatalf("%q %v", got, err)
	}
}

func TestHeldTextIsBounded(t *testing.T) {
	piece := strings.Repeat("x", earlyBound/4)
	var shown atomic.Int32
	full := make(chan struct{})
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		for range 6 {
			if shown.Load() == 4 {
				close(full)
			}
			if err := call.Show(ctx, piece); err != nil {
				t.Error(err)
			}
			shown.Add(1)
		}
		return say("done", "")
	})
	sub := w.hub.Subscribe("f", 0)
	defer sub.Close()
	release := w.holdCommits()
	w.start("f", true)
	<-full
	w.applied() // gives the handler time to go wrong
	if n := shown.Load(); n != 4 {
		t.Fatalf("%d pieces taken before the commit, want 4", n)
	}
	release()
	got, err := frames(w.ctx, sub, "done")
	if err != nil {
		t.Fatal(err)
	}
	text := 0
	for _, word := range got {
		at, piece, isDelta := strings.Cut(word, "+")
		if isDelta {
			if at != fmt.Sprint(text) {
				t.Fatalf("piece at %s after %d bytes", at, text)
			}
			text += len(piece)
		}
	}
	if text != 6*len(piece) {
		t.Fatalf("%d bytes shown, want %d", text, 6*len(piece))
	}
}

func TestWaitingForTheCommitEndsWithTheStep(t *testing.T) {
	blocked := make(chan struct{})
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		close(blocked)
		err := call.Show(ctx, strings.Repeat("x", earlyBound+1))
		if !errors.Is(err, errAborted) {
			t.Errorf("Show: %v", err)
		}
		return say("done", "")
	})
	release := w.holdCommits()
	w.start("f", true)
	<-blocked
	w.pool.Stop()
	release()
}

func TestCancelComesWithItsReason(t *testing.T) {
	began := make(chan struct{})
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		close(began)
		<-ctx.Done()
		var c *Cancelled
		if !errors.As(context.Cause(ctx), &c) {
			t.Errorf("cause is %v", context.Cause(ctx))
			return say("done", "")
		}
		return say("done", c.Reason)
	})
	w.start("f", false)
	<-began
	w.cancel("f", "enough")
	if ev := w.await("done"); string(ev.Data) != "enough" {
		t.Fatalf("reason %q", ev.Data)
	}
	w.cancel("f", "again") // after the end: no harm
	w.applied()
}

// A step that is cancelled before its goroutine ran is answered all the same,
// or it would stay open for ever.
func TestCancelledBeforeItRanIsAnswered(t *testing.T) {
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		<-ctx.Done()
		return say("done", "")
	})
	const flows = 100
	release := w.holdCommits()
	for i := range flows {
		id := fmt.Sprintf("f%d", i)
		w.start(id, false)
		w.cancel(id, "enough") // in the same commit: dispatched and cancelled in one breath
	}
	w.applied()
	release()
	for range flows {
		w.await("done")
	}
}

func TestPanicFailsTheStepOnly(t *testing.T) {
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		if call.FlowID == "bad" {
			_ = call.Show(ctx, "half")
			panic("secret details")
		}
		return say("done", "")
	})
	w.start("bad", false)
	if ev := w.await("failed"); strings.Contains(string(ev.Data), "secret") || !strings.Contains(string(ev.Data), "panicked") {
		t.Fatalf("failure %q", ev.Data)
	}
	w.start("good", false)
	w.await("done")
	if n := w.hub.Watched(); n != 0 {
		t.Fatalf("%d messages are still being written", n)
	}
}

func TestRefusedResultIsReplacedByAFailure(t *testing.T) {
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		res := say("done", "")
		res.Next = []*wire.StepSpec{{Name: ""}} // the core takes no step without a name
		return res
	})
	w.start("f", false)
	ev := w.await("failed")
	if !strings.Contains(string(ev.Data), "step name is missing") {
		t.Fatalf("failure %q", ev.Data)
	}
	f, err := w.r.Read(w.ctx, "f")
	if err != nil || len(f.Steps) != 0 {
		t.Fatalf("steps left: %v %v", f.GetSteps(), err)
	}
}

// Also the failure may be refused. Then the step stays open, but is not tried
// for ever, and nothing of its text is kept.
func TestRefusedFailureIsNotTriedAgain(t *testing.T) {
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		_ = call.Show(ctx, "half")
		return say("", "")
	})
	var fails atomic.Int32
	refused := make(chan struct{}, 10)
	w.fail = func(*partition.Work, error) *wire.StepResult {
		fails.Add(1)
		refused <- struct{}{}
		return say("", "")
	}
	sub := w.hub.Subscribe("f", 0)
	w.start("f", false)
	<-refused
	sub.Close()
	for w.hub.Watched() > 0 { // until the second refusal is told
		w.applied()
	}
	if n := fails.Load(); n != 1 {
		t.Fatalf("%d failures asked for", n)
	}
}

func TestStopGivesNoResultAndWaits(t *testing.T) {
	began := make(chan struct{})
	var ended atomic.Bool
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		close(began)
		<-ctx.Done()
		var c *Cancelled
		if errors.As(context.Cause(ctx), &c) {
			t.Error("a stop is not a cancel")
		}
		ended.Store(true)
		return say("done", "")
	})
	w.start("f", false)
	<-began
	if w.pool.Running() != 1 {
		t.Fatalf("%d attempts run", w.pool.Running())
	}
	w.pool.Stop()
	if !ended.Load() || w.pool.Running() != 0 {
		t.Fatal("Stop did not wait for the attempt")
	}
	f, err := w.r.Read(w.ctx, "f")
	if err != nil || len(f.Steps) != 1 || f.Steps[0].State != wire.Step_STARTED {
		t.Fatalf("the step was answered: %v %v", f, err)
	}
}

func TestAttemptsWaitForBind(t *testing.T) {
	ran := make(chan struct{}, 10)
	w := newWorld(t, false, func(ctx context.Context, call *Call) *wire.StepResult {
		ran <- struct{}{}
		if ctx.Err() != nil {
			return say("done", "cancelled")
		}
		return say("done", "")
	})
	w.start("f", false)
	w.start("g", false)
	w.applied()
	w.await(core.EventStepStarted)
	w.cancel("g", "early")
	w.await(core.EventCancelRequested)
	if len(ran) > 0 {
		t.Fatal("an attempt ran before results had a place to go")
	}
	w.pool.Bind(partition.Set{w.r})
	got := map[string]bool{string(w.await("done").Data): true, string(w.await("done").Data): true}
	if !got[""] || !got["cancelled"] {
		t.Fatalf("results %v", got)
	}
}

func TestStopBeforeBind(t *testing.T) {
	w := newWorld(t, false, func(context.Context, *Call) *wire.StepResult {
		t.Error("ran without a place for its result")
		return say("done", "")
	})
	w.start("f", false)
	w.await(core.EventStepStarted)
	w.pool.Stop()
	if n := w.pool.Running(); n != 0 {
		t.Fatalf("%d attempts run", n)
	}
}

// A result that comes after its flow was deleted leaves nothing behind.
func TestDeletedWhileItRan(t *testing.T) {
	shown := make(chan struct{})
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		_ = call.Show(ctx, "text")
		close(shown)
		<-ctx.Done()
		return say("done", "")
	})
	w.start("f", false)
	<-shown
	w.submit(&wire.Entry{FlowId: "f", Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}})
	w.await(core.EventDeleted)
	for w.hub.Watched() > 0 {
		w.applied()
	}
}

func TestRetryIsANewAttempt(t *testing.T) {
	w := newWorld(t, true, func(ctx context.Context, call *Call) *wire.StepResult {
		if call.Number == 1 {
			res := say("done", "first")
			res.Retry = &wire.Retry{Error: "503"}
			return res
		}
		return say("done", fmt.Sprintf("attempt %d after %d retries", call.Number, call.Retries))
	})
	w.start("f", false)
	if ev := w.await("done"); string(ev.Data) != "attempt 2 after 1 retries" {
		t.Fatalf("%q", ev.Data)
	}
}
