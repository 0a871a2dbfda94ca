package perduretest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// What package flow promises, on the real engine.

type execute = func(*flow.Context, string) (flow.Decision, error)

// one is a flow of one step "s" that a test gives, and of a step "t" that
// completes with its input.
func one(fn execute, opts ...flow.StepOption) *flow.Flow {
	finish := func(ctx *flow.Context, in string) (flow.Decision, error) { return flow.Complete(in), nil }
	forever := func(*flow.Context, string) (flow.Wait, error) { return flow.AllOf(paid.ForOne()), nil }
	return flow.Define("one", flow.Step(flow.StepFunc("s", fn), opts...), flow.Step(flow.StepFunc("t", finish)),
		flow.Step(flow.StepFunc("forever", finish).WithWait(forever)), status, paid, sum)
}

func start(t *testing.T, f *flow.Flow, opts ...flow.StartOption) *perduretest.Env {
	t.Helper()
	env := perduretest.New(t, f)
	env.Start(f, "a", flow.To(flow.Ref[string]("s"), "in"), opts...)
	return env
}

func TestCancelledHandlerThatFailsHasJustEnded(t *testing.T) {
	began := make(chan bool, 1)
	env := start(t, one(func(ctx *flow.Context, _ string) (flow.Decision, error) {
		status.Set(ctx, "never")
		began <- true
		<-ctx.Done()
		return flow.Decision{}, ctx.Err()
	}))
	<-began
	env.Stop("a", flow.Cancel, "enough")
	if o := env.Wait("a"); o.Status != flow.Cancelled {
		t.Errorf("got %+v", o)
	}
	if s := perduretest.Get(env, "a", status); s != "" {
		t.Errorf("status is %q", s)
	}
}

func TestSiblingsAreCancelled(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		switch in {
		case "in":
			return flow.GoToAll(flow.To(flow.Ref[string]("forever"), "x"), flow.To(flow.Ref[string]("s"), "stop")), nil
		default:
			return flow.GoTo(flow.Ref[string]("t"), "done").Cancelling("forever"), nil
		}
	}))
	if got := perduretest.Result[string](env, "a"); got != "done" {
		t.Errorf("got %q", got)
	}
}

func TestGracefulCompletionWaitsForSiblings(t *testing.T) {
	f := one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		return flow.GoToAll(flow.To(flow.Ref[string]("forever"), "last"), flow.To(flow.Ref[string]("t"), "first")), nil
	})
	env := start(t, f)
	if s := env.Status("a"); s != flow.Running {
		t.Errorf("status is %v", s)
	}
	perduretest.Publish(env, "a", paid, payment{})
	if got := perduretest.Result[string](env, "a"); got != "last" {
		t.Errorf("got %q", got)
	}
}

func TestForceCompleteStopsSiblings(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if in == "force" {
			return flow.ForceComplete("forced"), nil
		}
		return flow.GoToAll(flow.To(flow.Ref[string]("forever"), ""), flow.To(flow.Ref[string]("s"), "force")), nil
	}))
	if got := perduretest.Result[string](env, "a"); got != "forced" {
		t.Errorf("got %q", got)
	}
}

func TestNothingOfAFailedAttemptIsKept(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		n, err := sum.Get(ctx)
		if err != nil {
			return flow.Decision{}, err
		}
		sum.Set(ctx, n+1)
		paid.Publish(ctx, payment{n})
		if ctx.Attempt() < 4 {
			panic("not yet")
		}
		return flow.GoTo(flow.Ref[string]("forever"), "once"), nil
	}))
	if got := perduretest.Result[string](env, "a"); got != "once" {
		t.Errorf("got %q", got)
	}
	if n := perduretest.Get(env, "a", sum); n != 1 {
		t.Errorf("sum is %d", n)
	}
}

func TestAttemptTimeout(t *testing.T) {
	causes := make(chan error, 1)
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if ctx.Attempt() == 1 {
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return flow.Decision{}, ctx.Err()
		}
		return flow.Complete(fmt.Sprintf("attempt %d, %d failed", ctx.Attempt(), ctx.Retries())), nil
	}, flow.Timeout(time.Hour)))
	env.Advance(2 * time.Hour)
	if err := <-causes; !errors.Is(err, flow.ErrLost) {
		t.Errorf("cause is %v", err)
	}
	if got := perduretest.Result[string](env, "a"); got != "attempt 2, 1 failed" {
		t.Errorf("got %q", got)
	}
}

func TestSilentAttemptIsLost(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if ctx.Attempt() == 1 {
			if err := ctx.Heartbeat(nil); err != nil {
				return flow.Decision{}, err
			}
			<-ctx.Done()
			return flow.Decision{}, ctx.Err()
		}
		return flow.Complete(fmt.Sprintf("attempt %d", ctx.Attempt())), nil
	}, flow.Heartbeat(time.Minute)))
	env.Advance(5 * time.Minute)
	if got := perduretest.Result[string](env, "a"); got != "attempt 2" {
		t.Errorf("got %q", got)
	}
}

func TestRetryAfterAndPermanent(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if ctx.Retries() == 0 {
			return flow.Decision{}, flow.RetryAfter(errors.New("busy"), 6*time.Hour)
		}
		return flow.Decision{}, flow.Permanent(fmt.Errorf("too late at %v", ctx.Now().Sub(perduretest.Epoch)))
	}))
	if o := env.Wait("a"); o.Status != flow.Failed || o.Error != "too late at 6h0m0s" {
		t.Errorf("got %+v", o)
	}
}

func TestWaitForThatFailsIsTriedAgain(t *testing.T) {
	calls := 0
	f := flow.Define("one", flow.Step(flow.StepFunc("s", func(*flow.Context, string) (flow.Decision, error) {
		return flow.GoTo(flow.Ref[string]("w"), "x"), nil
	})), flow.Step(flow.StepFunc("w", func(ctx *flow.Context, in string) (flow.Decision, error) {
		var kept string
		err := ctx.Locals(&kept)
		return flow.Complete(kept), err
	}).WithWait(func(ctx *flow.Context, in string) (flow.Wait, error) {
		if calls++; calls < 4 {
			panic("not yet")
		}
		ctx.SetLocals(fmt.Sprintf("call %d, attempt %d", calls, ctx.Attempt()))
		return flow.Wait{}, nil
	})))
	env := start(t, f)
	if got := perduretest.Result[string](env, "a"); got != "call 4, attempt 3" {
		t.Errorf("got %q", got)
	}
}

func TestRefusedResultFailsTheStep(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		for range flow.MaxMessages + 1 {
			paid.Publish(ctx, payment{})
		}
		return flow.DeadEnd(), nil
	}, flow.Retry(flow.NoRetry)))
	if o := env.Wait("a"); o.Status != flow.Failed || !strings.Contains(o.Error, "1000") {
		t.Errorf("got %+v", o)
	}
}

func TestSendsToOtherFlows(t *testing.T) {
	var f *flow.Flow
	f = one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		flow.StartFlow(ctx, f, "b", flow.To(flow.Ref[string]("forever"), "of b"), flow.With(status, "new"))
		flow.StartFlow(ctx, f, "c", flow.To(flow.Ref[string]("forever"), "of c"))
		paid.PublishTo(ctx, "b", payment{3})
		flow.Stop(ctx, "c", flow.Cancel, "not wanted")
		return flow.Complete("sent"), nil
	})
	env := start(t, f)
	if got := perduretest.Result[string](env, "a"); got != "sent" {
		t.Errorf("got %q", got)
	}
	if got := perduretest.Result[string](env, "b"); got != "of b" {
		t.Errorf("got %q", got)
	}
	if got := perduretest.Get(env, "b", status); got != "new" {
		t.Errorf("got %q", got)
	}
	if o := env.Wait("c"); o.Status != flow.Cancelled {
		t.Errorf("got %+v", o)
	}
}

func TestReusePolicies(t *testing.T) {
	f := one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if in == "fail" {
			return flow.Fail(errors.New("so")), nil
		}
		return flow.Complete(in), nil
	})
	env := perduretest.New(t, f)
	try := func(id, in string, p flow.ReusePolicy) string {
		_, err := env.TryStart(f, id, flow.To(flow.Ref[string]("s"), in), flow.Reuse(p))
		var refused *perduretest.RefusedError
		if errors.As(err, &refused) {
			return refused.Code
		}
		env.Settle()
		return env.Status(id).String()
	}
	for _, c := range []struct {
		in     string
		policy flow.ReusePolicy
		want   string
	}{
		{"fail", flow.RefuseDuplicate, "failed"},
		{"ok", flow.RefuseDuplicate, "already_exists"},
		{"ok", flow.ReuseFailed, "completed"},
		{"ok", flow.ReuseFailed, "already_exists"},
		{"fail", flow.ReuseClosed, "failed"},
		{"ok", flow.AttachExisting, "completed"},
		{"fail", flow.TerminateExisting, "failed"},
	} {
		if got := try("a", c.in, c.policy); got != c.want {
			t.Errorf("%v: got %s", c, got)
		}
	}
}

func TestKeyIsTheSameForEachAttempt(t *testing.T) {
	var keys []string
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		keys = append(keys, ctx.Key())
		if ctx.Attempt() < 3 {
			return flow.Decision{}, errors.New("again")
		}
		if in == "in" {
			return flow.GoTo(flow.Ref[string]("s"), "second"), nil
		}
		return flow.Complete(in), nil
	}))
	perduretest.Result[string](env, "a")
	slices.Sort(keys)
	if keys = slices.Compact(keys); len(keys) != 2 {
		t.Errorf("keys are %q", keys)
	}
}

func TestDelayedStep(t *testing.T) {
	env := start(t, one(func(ctx *flow.Context, in string) (flow.Decision, error) {
		if in == "in" {
			return flow.GoToAll(flow.To(flow.Ref[string]("s"), "later").Delayed(48 * time.Hour)), nil
		}
		return flow.Complete(in + " by " + ctx.Now().Sub(perduretest.Epoch).String()), nil
	}))
	if got := perduretest.Result[string](env, "a"); got != "later by 48h0m0s" {
		t.Errorf("got %q", got)
	}
}

func TestRecoveryOfALargeInput(t *testing.T) {
	f := flow.Define("one", flow.Step(flow.StepFunc("s", func(ctx *flow.Context, in string) (flow.Decision, error) {
		return flow.GoTo(flow.Ref[string]("bad"), strings.Repeat("x", 200_000)), nil
	})), flow.Step(flow.StepFunc("bad", func(ctx *flow.Context, in string) (flow.Decision, error) {
		return flow.Decision{}, flow.Permanent(fmt.Errorf("%d bytes", len(in)))
	}), flow.OnFailure(flow.Ref[string]("rescue"))), flow.Step(flow.StepFunc("rescue", func(ctx *flow.Context, in string) (flow.Decision, error) {
		return flow.Complete(fmt.Sprintf("%d bytes after: %v", len(in), ctx.Failure())), nil
	})))
	env := start(t, f)
	if got := perduretest.Result[string](env, "a"); got != "200000 bytes after: 200000 bytes" {
		t.Errorf("got %q", got)
	}
}

func TestReset(t *testing.T) {
	fixed := false
	f := flow.Define("one", flow.Step(flow.StepFunc("s", func(ctx *flow.Context, in string) (flow.Decision, error) {
		sum.Set(ctx, 1)
		return flow.GoTo(flow.Ref[string]("buggy"), in), nil
	})), flow.Step(flow.StepFunc("buggy", func(ctx *flow.Context, in string) (flow.Decision, error) {
		n, err := sum.Get(ctx)
		sum.Set(ctx, n+10)
		if !fixed {
			return flow.Fail(errors.New("a bug")), nil
		}
		return flow.Complete(n), err
	})), sum)
	env := start(t, f)
	if o := env.Wait("a"); o.Status != flow.Failed {
		t.Errorf("got %+v", o)
	}
	fixed = true
	run := env.Reset("a", "buggy")
	if got := perduretest.Result[int](env, "a"); got != 1 || run == "" {
		t.Errorf("got %d", got)
	}
	if n := perduretest.Get(env, "a", sum); n != 11 {
		t.Errorf("sum is %d", n)
	}
}
