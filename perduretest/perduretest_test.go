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

type payment struct{ Amount int }

var (
	status   = flow.NewAttribute[string]("status", flow.Indexed())
	document = flow.NewAttribute[[]byte]("document")
	paid     = flow.NewChannel[payment]("paid")
	add      = flow.NewLockedRPC("add", func(ctx *flow.UpdateContext, n int) (int, error) {
		if n < 0 {
			return 0, flow.WithKind(errors.New("negative"), "bad_amount")
		}
		total, err := sum.Get(ctx)
		if err != nil {
			return 0, err
		}
		sum.Set(ctx, total+n)
		if total+n >= 100 {
			ctx.Start(flow.To(ship{}, fmt.Sprint(total+n)))
		}
		return total + n, nil
	})
	total = flow.NewRPC("total", func(ctx *flow.ReadContext, _ flow.None) (int, error) { return sum.Get(ctx) })
	sum   = flow.NewAttribute[int]("sum")
)

type await struct{}

func (await) WaitFor(ctx *flow.Context, days int) (flow.Wait, error) {
	ctx.SetLocals(ctx.Now())
	return flow.AnyOf(paid.ForOne(), flow.After("deadline", time.Duration(days)*24*time.Hour)), nil
}

func (await) Execute(ctx *flow.Context, _ int) (flow.Decision, error) {
	var since time.Time
	if err := ctx.Locals(&since); err != nil {
		return flow.Decision{}, err
	}
	p, ok, err := paid.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if !ok {
		return flow.Complete(fmt.Sprintf("expired after %v", ctx.Now().Sub(since))), nil
	}
	status.Set(ctx, "paid")
	return flow.GoTo(ship{}, fmt.Sprint(p.Amount)), nil
}

type ship struct{}

func (ship) Execute(ctx *flow.Context, what string) (flow.Decision, error) {
	fmt.Fprint(ctx.Output(), "shipping ", what)
	return flow.Complete("shipped " + what), nil
}

// flaky fails as often as its input says.
type flaky struct{}

func (flaky) Execute(ctx *flow.Context, fails int) (flow.Decision, error) {
	if ctx.Retries() < fails {
		return flow.Decision{}, fmt.Errorf("no luck %d", ctx.Retries())
	}
	return flow.Complete(fmt.Sprintf("attempt %d at %v", ctx.Attempt(), ctx.Now().Sub(perduretest.Epoch))), nil
}

type rescue struct{}

func (rescue) Execute(ctx *flow.Context, _ int) (flow.Decision, error) {
	return flow.Complete("rescued from: " + ctx.Failure().Error()), nil
}

type parent struct{}

func (parent) WaitFor(ctx *flow.Context, days int) (flow.Wait, error) {
	return flow.AllOf(flow.Child(order, "child-a", flow.To(await{}, days)), flow.Child(order, "child-b", flow.To(flaky{}, 1))), nil
}

func (parent) Execute(ctx *flow.Context, _ int) (flow.Decision, error) {
	a, _, err := flow.ChildResult[string](ctx, "child-a")
	if err != nil {
		return flow.Decision{}, err
	}
	b, _, err := flow.ChildResult[string](ctx, "child-b")
	return flow.Complete(a + "; " + b), err
}

var running = make(chan bool, 10)

type clean struct{}

func (clean) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	running <- true
	<-ctx.Done()
	var cancelled *flow.CancelledError
	if !errors.As(context.Cause(ctx), &cancelled) {
		return flow.Decision{}, context.Cause(ctx)
	}
	status.Set(ctx, "cleaned up: "+cancelled.Reason)
	return flow.DeadEnd(), nil
}

type importer struct{}

func (importer) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	at := 0
	if _, err := ctx.Checkpoint(&at); err != nil {
		return flow.Decision{}, err
	}
	from := at
	for ; at < 10; at++ {
		if at == 5 && ctx.Attempt() == 1 {
			running <- true
			<-ctx.Done()
			return flow.Decision{}, context.Cause(ctx)
		}
		if err := ctx.Heartbeat(at + 1); err != nil {
			return flow.Decision{}, err
		}
	}
	return flow.Complete(fmt.Sprintf("attempt %d from %d", ctx.Attempt(), from)), nil
}

type large struct{}

func (large) Execute(ctx *flow.Context, in string) (flow.Decision, error) {
	doc, err := document.Get(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if len(doc) == 0 {
		document.Set(ctx, []byte(in))
		return flow.GoTo(large{}, in), nil
	}
	return flow.Complete(len(doc) + len(in)), nil
}

var order = flow.Define("order", flow.Step(await{}), flow.Step(ship{}), flow.Step(flaky{}, flow.OnFailure(rescue{}),
	flow.Retry(flow.RetryPolicy{MaxAttempts: 4, Initial: time.Minute})), flow.Step(rescue{}), flow.Step(parent{}), flow.Step(clean{}),
	flow.Step(importer{}, flow.Heartbeat(time.Minute)), flow.Step(large{}),
	status, paid, document, add, total, sum)

func TestMessageAndTimer(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(await{}, 30))
	env.Start(order, "b", flow.To(await{}, 30))
	if s := env.Steps("a"); len(s) != 1 || !strings.Contains(s[0], "await waiting") {
		t.Errorf("steps are %q", s)
	}
	perduretest.Publish(env, "a", paid, payment{5})
	if got := perduretest.Result[string](env, "a"); got != "shipped 5" {
		t.Errorf("got %q", got)
	}
	if !env.Now().Equal(perduretest.Epoch) {
		t.Errorf("the clock was moved to %v", env.Now())
	}
	if got := perduretest.Result[string](env, "b"); got != "expired after 720h0m0s" {
		t.Errorf("got %q", got)
	}
	if got := perduretest.Get(env, "a", status); got != "paid" {
		t.Errorf("status is %q", got)
	}
	if got := env.Shown("a"); got != "shipping 5" {
		t.Errorf("shown is %q", got)
	}
	want := []string{"flow.started", "step.preparing await", "step.waiting await", "step.started await", "step.completed await",
		"step.started ship", "step.completed ship", "flow.completed"}
	got := env.History("a")
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("history lacks %q: %q", line, got)
		}
	}
	if ids := env.Search("`status` = \"paid\" and status = completed"); !slices.Equal(ids, []string{"a"}) {
		t.Errorf("search found %q", ids)
	}
}

func TestAdvance(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(await{}, 1))
	env.Advance(24*time.Hour - time.Microsecond)
	if s := env.Status("a"); s != flow.Running {
		t.Errorf("status is %v", s)
	}
	env.Advance(time.Microsecond)
	if s := env.Status("a"); s != flow.Completed {
		t.Errorf("status is %v", s)
	}
	env.Start(order, "b", flow.To(await{}, 1))
	env.SkipTimer("b", "deadline")
	if got := perduretest.Result[string](env, "b"); got != "expired after 0s" {
		t.Errorf("got %q", got)
	}
}

func TestRetriesAndRecovery(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(flaky{}, 2))
	if got := perduretest.Result[string](env, "a"); got != "attempt 3 at 2m0s" && got != "attempt 3 at 3m0s" {
		t.Errorf("got %q", got)
	}
	env.Start(order, "b", flow.To(flaky{}, 100))
	if got := perduretest.Result[string](env, "b"); got != "rescued from: no luck 3" {
		t.Errorf("got %q", got)
	}
}

func TestChildren(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "p", flow.To(parent{}, 2))
	if got := perduretest.Result[string](env, "p"); got != "expired after 48h0m0s; attempt 2 at 1m0s" {
		t.Errorf("got %q", got)
	}
}

func TestRPCs(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.NoStep)
	for i, want := range []int{40, 80} {
		if got, err := perduretest.Call(env, "a", add, 40); got != want || err != nil {
			t.Errorf("call %d: %d, %v", i, got, err)
		}
	}
	_, err := perduretest.Call(env, "a", add, -1)
	var refused *perduretest.RefusedError
	if !errors.As(err, &refused) || refused.Kind != "bad_amount" {
		t.Errorf("got %v", err)
	}
	if got, err := perduretest.Call(env, "a", total, flow.None{}); got != 80 || err != nil {
		t.Errorf("%d, %v", got, err)
	}
	perduretest.Set(env, "a", sum, 99)
	if got, err := perduretest.Call(env, "a", add, 1); got != 100 || err != nil {
		t.Errorf("%d, %v", got, err)
	}
	if got := perduretest.Result[string](env, "a"); got != "shipped 100" {
		t.Errorf("got %q", got)
	}
}

func TestStartRefusals(t *testing.T) {
	env := perduretest.New(t, order)
	run := env.Start(order, "a", flow.To(await{}, 1))
	var refused *perduretest.RefusedError
	if _, err := env.TryStart(order, "a", flow.To(await{}, 1)); !errors.As(err, &refused) || refused.Code != "already_exists" {
		t.Errorf("got %v", err)
	}
	if again, err := env.TryStart(order, "a", flow.To(await{}, 1), flow.Reuse(flow.AttachExisting)); again != run || err != nil {
		t.Errorf("got %q, %v, want %q", again, err, run)
	}
	other := flow.Define("other")
	if _, err := env.TryStart(other, "b", flow.NoStep); !errors.As(err, &refused) {
		t.Errorf("got %v", err)
	}
}

func TestCancelAndCleanUp(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(clean{}, flow.None{}))
	<-running
	env.Stop("a", flow.Cancel, "enough")
	if o := env.Wait("a"); o.Status != flow.Cancelled {
		t.Errorf("got %v", o)
	}
	if got := perduretest.Get(env, "a", status); got != "cleaned up: enough" {
		t.Errorf("status is %q", got)
	}
	env.Start(order, "b", flow.To(await{}, 1))
	env.Stop("b", flow.Terminate, "")
	if o := env.Wait("b"); o.Status != flow.Terminated {
		t.Errorf("got %v", o)
	}
}

func TestLostWorkerGoesOnFromItsCheckpoint(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(importer{}, flow.None{}))
	<-running
	env.LoseWorker()
	if got := perduretest.Result[string](env, "a"); got != "attempt 2 from 5" {
		t.Errorf("got %q", got)
	}
}

func TestLargeValues(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(large{}, strings.Repeat("x", 300_000)))
	if got := perduretest.Result[int](env, "a"); got != 600_000 {
		t.Errorf("got %d", got)
	}
	if got := perduretest.Get(env, "a", document); len(got) != 300_000 {
		t.Errorf("%d bytes", len(got))
	}
	env.Start(order, "b", flow.NoStep, flow.With(document, make([]byte, 100_000)))
	perduretest.Set(env, "b", document, make([]byte, 200_000))
	if got := perduretest.Get(env, "b", document); len(got) != 200_000 {
		t.Errorf("%d bytes", len(got))
	}
}

func TestRunTimeout(t *testing.T) {
	env := perduretest.New(t, order)
	env.Start(order, "a", flow.To(await{}, 1000), flow.RunTimeout(time.Hour), flow.Delay(time.Minute))
	if o := env.Wait("a"); o.Status != flow.TimedOut || env.Now().Sub(perduretest.Epoch) > 62*time.Minute {
		t.Errorf("got %v at %v", o, env.Now())
	}
}

// recorder is a test that may fail.
type recorder struct {
	testing.TB
	said string
}

func (r *recorder) Helper() {}
func (r *recorder) Fatalf(format string, args ...any) {
	r.said = fmt.Sprintf(format, args...)
	panic(r)
}

func TestWaitForNothing(t *testing.T) {
	r := &recorder{TB: t}
	env := perduretest.New(r, order)
	env.Start(order, "a", flow.NoStep)
	defer func() {
		if p := recover(); p != r || !strings.Contains(r.said, `flow "a" does not end: it has no step left`) {
			t.Errorf("got %v, %q", p, r.said)
		}
	}()
	env.Wait("a")
}

func Example() {
	env := perduretest.Open(order)
	defer env.Close()
	env.Start(order, "order-1", flow.To(await{}, 7))
	fmt.Println(perduretest.Result[string](env, "order-1"))
	// Output: expired after 168h0m0s
}
