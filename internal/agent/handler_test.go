package agent

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestToolLoop(t *testing.T) {
	var first, second model.Request
	w := newWorld(t, nil, func(_ context.Context, n int, req model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			first = req
			return ask("look", `{"at":"a"}`, "look", `{"at":"b"}`, "look", `{"at":1}`, "fly", `{}`)
		}
		second = req
		return speak(sink, "both ", "seen")
	})
	var both sync.WaitGroup // each call waits for the other: they must run in parallel
	both.Add(2)
	var keys sync.Map
	w.tools = func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		keys.Store(r.Header.Get("Idempotency-Key"), true)
		both.Done()
		both.Wait()
		fmt.Fprintf(rw, "saw %s", body)
	}
	flow := w.session("x")
	w.say(flow, "look twice", wire.Publish_ENQUEUE)
	done := w.await(EventCompleted)
	if got := string(done.Data); got != `{"model_calls":2,"usage":{"prompt_tokens":15,"completion_tokens":3,"total_tokens":18}}` {
		t.Errorf("turn.completed: %s", got)
	}
	if n := len(first.Messages); n != 2 || !strings.Contains(string(first.Messages[0]), `"system"`) || !strings.Contains(string(first.Tools), `"look"`) {
		t.Errorf("first request: %s %s", first.Messages, first.Tools)
	}
	if first.Model != "m" || first.IdempotencyKey == "" || first.IdempotencyKey == second.IdempotencyKey {
		t.Errorf("keys %q %q", first.IdempotencyKey, second.IdempotencyKey)
	}
	results := map[string]string{"call_0": `saw {\"at\":\"a\"}`, "call_1": `saw {\"at\":\"b\"}`, "call_2": "the arguments are not valid", "call_3": `there is no tool \"fly\"`}
	if len(second.Messages) != 3+len(results) {
		t.Fatalf("second request has %d messages", len(second.Messages))
	}
	for _, m := range second.Messages[3:] { // in the order in which they came
		found := false
		for id, text := range results {
			if strings.Contains(string(m), `"tool_call_id":"`+id+`"`) && strings.Contains(string(m), text) {
				delete(results, id)
				found = true
			}
		}
		if !found {
			t.Errorf("unexpected result %s", m)
		}
	}
	n := 0
	keys.Range(func(any, any) bool { n++; return true })
	if n != 2 {
		t.Errorf("%d idempotency keys for 2 calls", n)
	}
	w.atRest(flow)
}

func TestToolIsTriedAgainWhenThatMayHelp(t *testing.T) {
	w := newWorld(t, nil, func(_ context.Context, n int, req model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			return ask("look", `{"at":"a"}`)
		}
		return speak(sink, "thanks")
	})
	var keys []string
	w.tools = func(rw http.ResponseWriter, r *http.Request) {
		if keys = append(keys, r.Header.Get("Idempotency-Key")); len(keys) < 3 {
			rw.Header().Set("Retry-After", "2")
			http.Error(rw, "busy", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(rw, "there it is")
	}
	flow := w.session("x")
	w.say(flow, "look", wire.Publish_ENQUEUE)
	for range 2 {
		if ev := w.await(core.EventStepRetrying); ev.Step != StepTool || !strings.Contains(string(ev.Data), "503") {
			t.Fatalf("retrying %s: %s", ev.Step, ev.Data)
		}
		w.pass(2 * time.Second)
	}
	w.await(EventCompleted)
	if len(keys) != 3 || keys[0] != keys[1] || keys[1] != keys[2] || keys[0] == "" {
		t.Fatalf("keys %q", keys)
	}
	wantLines(t, w.conversation(flow), "look", "tool_calls", "there it is", "thanks")
}

func TestToolFailureGoesToTheModel(t *testing.T) {
	w := newWorld(t, nil, func(_ context.Context, n int, req model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			return ask("look", `{"at":"a"}`)
		}
		return speak(sink, "pity")
	})
	var tries atomic.Int32
	w.tools = func(rw http.ResponseWriter, r *http.Request) {
		tries.Add(1)
		http.Error(rw, "busy", http.StatusServiceUnavailable)
	}
	flow := w.session("x")
	w.say(flow, "look", wire.Publish_ENQUEUE)
	for range toolRetry.MaxAttempts - 1 {
		w.await(core.EventStepRetrying)
		w.pass(10 * time.Second)
	}
	w.await(EventCompleted)
	if n := tries.Load(); n != int32(toolRetry.MaxAttempts) {
		t.Fatalf("%d tries", n)
	}
	wantLines(t, w.conversation(flow), "look", "tool_calls", "503", "pity")
}

func TestModelIsTriedAgainAfterTheTimeItAskedFor(t *testing.T) {
	w := newWorld(t, nil, func(_ context.Context, n int, _ model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			return model.Result{}, &model.Error{Kind: model.KindRetryable, Status: 429, Code: model.CodeRateLimited, Message: "slow down", RetryAfter: 7 * time.Second}
		}
		return speak(sink, "now")
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	w.await(core.EventStepRetrying)
	f, err := w.r.Read(w.ctx, flow)
	if err != nil {
		t.Fatal(err)
	}
	if wait := time.UnixMicro(f.Steps[0].RetryAtUs).Sub(w.clock.Now()); wait != 7*time.Second {
		t.Fatalf("tried again after %v, want 7s", wait)
	}
	w.pass(7*time.Second - time.Microsecond)
	if err := w.r.Do(w.ctx, func(*partition.Machine) {}); err != nil {
		t.Fatal(err)
	}
	if n := w.calls.Load(); n != 1 {
		t.Fatal("tried again early")
	}
	w.pass(time.Microsecond)
	w.await(EventCompleted)
	wantLines(t, w.conversation(flow), "hi", "now")
}

func TestModelRetriesEnd(t *testing.T) {
	w := newWorld(t, nil, func(context.Context, int, model.Request, model.Sink) (model.Result, error) {
		return model.Result{}, &model.Error{Kind: model.KindRetryable, Status: 503, Code: model.CodeUpstream, Message: "down"}
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	for range w.provider.Retry.MaxAttempts - 1 {
		w.await(core.EventStepRetrying)
		w.pass(10 * time.Second)
	}
	if f := failure(t, w.await(EventFailed).Data); f.Code != "model_upstream_error" || f.Message != "down" {
		t.Fatalf("%+v", f)
	}
	if n := w.calls.Load(); n != 3 {
		t.Fatalf("%d calls", n)
	}
	w.atRest(flow)
}

func TestNeverTriedAgainOnceTextWasShown(t *testing.T) {
	w := newWorld(t, nil, func(_ context.Context, _ int, _ model.Request, sink model.Sink) (model.Result, error) {
		res, _ := speak(sink, "half a sen")
		return res, &model.Error{Kind: model.KindRetryable, Code: model.CodeConnection, Message: "broken"}
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	if f := failure(t, w.await(EventFailed).Data); f.Code != "model_connection_lost" {
		t.Fatalf("%+v", f)
	}
	if said := w.await(EventMessage); !strings.Contains(string(said.Data), `"partial":true`) {
		t.Fatalf("message: %s", said.Data)
	}
	if n := w.calls.Load(); n != 1 {
		t.Fatalf("%d calls", n)
	}
	wantLines(t, w.conversation(flow), "hi", `"half a sen"`)
	w.atRest(flow)
}

func TestTurnTimeout(t *testing.T) {
	shown := make(chan struct{})
	w := newWorld(t, nil, func(ctx context.Context, _ int, _ model.Request, sink model.Sink) (model.Result, error) {
		res, _ := speak(sink, "so far")
		close(shown)
		return until(ctx, res)
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	<-shown
	w.clock.advance(turnTimeout)
	if f := failure(t, w.await(EventFailed).Data); f.Code != "turn_timeout" || !strings.Contains(f.Message, "1m0s") {
		t.Fatalf("%+v", f)
	}
	wantLines(t, w.conversation(flow), "hi", "so far")
	w.atRest(flow)
}

// The bound holds over the whole turn, not for each of its calls.
func TestTurnTimeoutSpansTheRounds(t *testing.T) {
	w := newWorld(t, nil, func(ctx context.Context, n int, _ model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			return ask("look", `{"at":"a"}`)
		}
		if ctx.Err() == nil {
			t.Error("a model call after the turn's time")
		}
		return until(ctx, model.Result{})
	})
	w.tools = func(rw http.ResponseWriter, r *http.Request) {
		w.clock.advance(turnTimeout)
		fmt.Fprint(rw, "late")
	}
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	if f := failure(t, w.await(EventFailed).Data); f.Code != "turn_timeout" {
		t.Fatalf("%+v", f)
	}
	wantLines(t, w.conversation(flow), "hi", "tool_calls", "late")
	w.atRest(flow)
}

func TestCancelKeepsWhatWasShown(t *testing.T) {
	shown := make(chan struct{})
	w := newWorld(t, nil, func(ctx context.Context, _ int, _ model.Request, sink model.Sink) (model.Result, error) {
		res, _ := speak(sink, "so far")
		close(shown)
		return until(ctx, res)
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	<-shown
	w.cancel(flow, "enough")
	if ev := w.await(EventCancelled); !strings.Contains(string(ev.Data), `"reason":"enough"`) {
		t.Fatalf("%s", ev.Data)
	}
	wantLines(t, w.conversation(flow), "hi", "so far")
	w.atRest(flow)
}

// A turn that is cancelled while its tools run leaves a result for each call:
// providers refuse a conversation with a call that has none.
func TestCancelLeavesNoCallWithoutAResult(t *testing.T) {
	w := newWorld(t, nil, func(ctx context.Context, n int, req model.Request, sink model.Sink) (model.Result, error) {
		switch n {
		case 1:
			return ask("look", `{"at":"a"}`, "look", `{"at":"b"}`)
		case 2:
			return speak(sink, "second turn")
		}
		t.Error("the cancelled turn called the model")
		return model.Result{}, nil
	})
	began := make(chan struct{}, 2)
	w.tools = func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body) // else the server does not see the client leave
		began <- struct{}{}
		<-r.Context().Done()
	}
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	<-began
	<-began
	w.cancel(flow, "enough")
	w.await(EventCancelled)
	w.say(flow, "go on", wire.Publish_ENQUEUE)
	w.await(EventCompleted)
	wantLines(t, w.conversation(flow), "hi", "tool_calls", "whether it took effect is unknown", "whether it took effect is unknown", "go on", "second turn")
}

func TestInterrupt(t *testing.T) {
	shown := make(chan struct{})
	w := newWorld(t, nil, func(ctx context.Context, n int, req model.Request, sink model.Sink) (model.Result, error) {
		if n > 1 {
			return speak(sink, "the second")
		}
		res, _ := speak(sink, "the first, half")
		close(shown)
		return until(ctx, res)
	})
	flow := w.session("x")
	w.say(flow, "one", wire.Publish_ENQUEUE)
	<-shown
	w.say(flow, "waits", wire.Publish_ENQUEUE)
	w.say(flow, "two", wire.Publish_INTERRUPT)
	if ev := w.await(EventCancelled); !strings.Contains(string(ev.Data), core.ReasonSuperseded) {
		t.Fatalf("%s", ev.Data)
	}
	w.await(core.EventDropped)
	w.await(EventCompleted)
	wantLines(t, w.conversation(flow), "one", "the first, half", "two", "the second")
	w.atRest(flow)
}

func TestAgentRemoved(t *testing.T) {
	w := newWorld(t, nil, func(context.Context, int, model.Request, model.Sink) (model.Result, error) {
		return ask("look", `{"at":"a"}`)
	})
	w.tools = func(rw http.ResponseWriter, r *http.Request) { w.registry.Remove("tenant", "a") }
	flow := w.session("x")
	for range 2 { // in a turn, and before the next one
		w.say(flow, "hi", wire.Publish_ENQUEUE)
		if f := failure(t, w.await(EventFailed).Data); f.Code != "agent_not_found" || !strings.Contains(f.Message, `"a"`) {
			t.Fatalf("%+v", f)
		}
		w.atRest(flow)
	}
}

func TestLimiterIsNeverPassed(t *testing.T) {
	const limit, turns = 2, 12
	var now, most atomic.Int32
	w := newWorld(t, model.NewLimiter(limit, turns), func(_ context.Context, _ int, _ model.Request, sink model.Sink) (model.Result, error) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		res, err := speak(sink, "a ", "b")
		now.Add(-1)
		return res, err
	})
	var flows []string
	for i := range turns {
		flows = append(flows, w.session(fmt.Sprint(i)))
	}
	for _, f := range flows {
		w.say(f, "hi", wire.Publish_ENQUEUE)
	}
	for range turns {
		w.await(EventCompleted)
	}
	if m := most.Load(); m > limit {
		t.Fatalf("%d calls at once, limit %d", m, limit)
	}
	if n := w.provider.Limiter.InFlight(); n != 0 {
		t.Fatalf("%d permits are out", n)
	}
}

func TestFullLimiterQueueIsTriedAgain(t *testing.T) {
	began, goOn := make(chan struct{}), make(chan struct{})
	w := newWorld(t, model.NewLimiter(1, 0), func(_ context.Context, n int, _ model.Request, sink model.Sink) (model.Result, error) {
		if n == 1 {
			close(began)
			<-goOn
		}
		return speak(sink, "done")
	})
	a, b := w.session("a"), w.session("b")
	w.say(a, "hi", wire.Publish_ENQUEUE)
	<-began
	w.say(b, "hi", wire.Publish_ENQUEUE)
	if ev := w.await(core.EventStepRetrying); !strings.Contains(string(ev.Data), "permits") {
		t.Fatalf("%s", ev.Data)
	}
	close(goOn)
	w.await(EventCompleted)
	w.pass(10 * time.Second)
	w.await(EventCompleted)
	wantLines(t, w.conversation(b), "hi", "done")
}

// A turn that waits for a permit can be cancelled, and gives no permit back
// that it never had.
func TestCancelWhileItWaitsForAPermit(t *testing.T) {
	w := newWorld(t, model.NewLimiter(1, 10), func(ctx context.Context, _ int, _ model.Request, _ model.Sink) (model.Result, error) {
		return until(ctx, model.Result{})
	})
	a, b := w.session("a"), w.session("b")
	w.say(a, "hi", wire.Publish_ENQUEUE)
	w.say(b, "hi", wire.Publish_ENQUEUE)
	w.cancel(b, "enough")
	w.await(EventCancelled)
	w.cancel(a, "enough")
	w.await(EventCancelled)
	w.atRest(a)
	w.atRest(b)
	if n := w.provider.Limiter.InFlight(); n != 0 {
		t.Fatalf("%d permits are out", n)
	}
}

// A step during which the process ends each time must not keep it from living.
func TestPoisonedModelStepIsAbandoned(t *testing.T) {
	w := newWorld(t, nil, func(ctx context.Context, _ int, _ model.Request, _ model.Sink) (model.Result, error) {
		return until(ctx, model.Result{})
	})
	flow := w.session("x")
	w.say(flow, "hi", wire.Publish_ENQUEUE)
	for range maxHandOuts {
		f, err := w.r.Read(w.ctx, flow)
		if err != nil || len(f.Steps) != 1 || f.Steps[0].State != wire.Step_STARTED {
			t.Fatalf("%v %v", f, err)
		}
		w.call(&wire.Entry{FlowId: flow, Command: &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{
			Exec: f.Steps[0].Exec, Attempt: f.Steps[0].Attempt, Reason: "the server restarted"}}})
	}
	if f := failure(t, w.await(EventFailed).Data); f.Code != "abandoned" || !strings.Contains(f.Message, fmt.Sprintf("%d times", maxHandOuts)) {
		t.Fatalf("%+v", f)
	}
	w.atRest(flow)
}

func TestHandOutsAreCountedWithoutRetries(t *testing.T) {
	h := &Handler{Registry: NewRegistry(nil, nil, nil), Limits: Limits{TurnTimeout: time.Minute}, Clock: &handClock{}}
	run := func(name string, number, retries uint32, cancel bool) string {
		task := &core.Task{FlowID: "tenant/s/x", Name: name, Number: number, Retries: retries, Cancel: cancel, Reason: "enough",
			Input: encode(toolInput{ID: "c1", Name: "look", Arguments: "{}"})}
		res := h.Run(context.Background(), &worker.Call{Work: &partition.Work{Task: task}})
		return string(res.Events[0].Data)
	}
	for _, c := range []struct {
		step            string
		number, retries uint32
		cancel          bool
		abandoned       bool
	}{
		{StepTurn, 20, 0, false, false},
		{StepTurn, 21, 0, false, true},
		{StepContinue, 23, 2, false, true},
		{StepContinue, 22, 2, false, false},
		{StepTurn, 30, 0, true, false}, // a cancelled step runs nothing
		{StepTool, 20, 0, false, false},
		{StepTool, 21, 0, false, true},
		{StepTool, 21, 0, true, false},
	} {
		got := run(c.step, c.number, c.retries, c.cancel)
		if strings.Contains(got, "the process ended each time") != c.abandoned {
			t.Errorf("%+v: %s", c, got)
		}
	}
	if got := run(StepTool, 21, 0, false); !strings.Contains(got, `"is_error":true`) || !strings.Contains(got, `"call_id":"c1"`) {
		t.Errorf("abandoned tool: %s", got)
	}
}

func TestUnknownStepFailsVisibly(t *testing.T) {
	h := &Handler{Registry: NewRegistry(nil, nil, nil), Clock: &handClock{}}
	res := h.Run(context.Background(), &worker.Call{Work: &partition.Work{Task: &core.Task{FlowID: "t/s/x", Name: "dance", Number: 1}}})
	if f := failure(t, res.Events[0].Data); f.Code != "internal" || !strings.Contains(f.Message, "dance") {
		t.Fatalf("%+v", f)
	}
}
