package flow_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// The flow under test: an order that waits for its payment.

type order struct {
	ID     string
	Amount int
}

type payment struct{ Amount int }

var (
	status   = flow.NewAttribute[string]("status", flow.Indexed())
	paid     = flow.NewChannel[payment]("paid")
	balance  = flow.NewAttributeMap[string, int]("balance")
	inbox    = flow.NewChannelMap[int, string]("inbox")
	document = flow.NewAttribute[[]byte]("document")

	getStatus = flow.NewRPC("get-status", func(ctx *flow.ReadContext, _ flow.None) (string, error) {
		return status.Get(ctx)
	})
	deposit = flow.NewLockedRPC("deposit", func(ctx *flow.UpdateContext, in payment) (int, error) {
		if in.Amount < 0 {
			return 0, flow.WithKind(errors.New("no negative deposit"), "bad_amount")
		}
		b := balance.At("all")
		n, err := b.Get(ctx)
		if err != nil {
			return 0, err
		}
		b.Set(ctx, n+in.Amount)
		paid.Publish(ctx, in)
		ctx.Start(flow.To(ship{}, order{ID: "x"}))
		if n+in.Amount > 100 {
			ctx.Close(flow.ForceComplete("full"))
		}
		return n + in.Amount, nil
	})
)

type awaitPayment struct{}

func (awaitPayment) WaitFor(ctx *flow.Context, o order) (flow.Wait, error) {
	ctx.SetLocals(o.Amount * 2)
	return flow.AnyOf(paid.ForOne(), flow.After("deadline", time.Hour)), nil
}

func (awaitPayment) Execute(ctx *flow.Context, o order) (flow.Decision, error) {
	p, ok, err := paid.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	if !ok {
		status.Set(ctx, "expired")
		return flow.Complete("expired"), nil
	}
	status.Set(ctx, "paid")
	return flow.GoTo(ship{}, order{ID: o.ID, Amount: p.Amount}), nil
}

type ship struct{}

func (ship) Execute(ctx *flow.Context, o order) (flow.Decision, error) {
	return flow.GoTo(awaitPayment{}, o), nil
}

// script is a step that runs whatever a test gives it.
type script struct {
	run  *func(*flow.Context, string) (flow.Decision, error)
	wait *func(*flow.Context, string) (flow.Wait, error)
}

func (script) StepName() string { return "script" }
func (s script) Execute(ctx *flow.Context, in string) (flow.Decision, error) {
	return (*s.run)(ctx, in)
}

type refund struct{}

func (refund) Execute(ctx *flow.Context, in string) (flow.Decision, error) {
	var failed *flow.StepFailedError
	if !errors.As(ctx.Failure(), &failed) {
		return flow.Decision{}, errors.New("no failure")
	}
	return flow.Complete(in + ": " + failed.Message), nil
}

// picky is a step whose WaitFor a test gives.
type picky struct{ script }

func (picky) StepName() string { return "picky" }
func (s picky) WaitFor(ctx *flow.Context, in string) (flow.Wait, error) {
	return (*s.wait)(ctx, in)
}

// host is a flow.Host in memory.
type host struct {
	blobs    map[string][]byte
	attrs    map[string]*wire.Attribute
	beats    []string
	shown    strings.Builder
	most     uint64
	blobErr  error
	readings int
}

func newHost() *host {
	return &host{blobs: map[string][]byte{}, attrs: map[string]*wire.Attribute{}, most: 1 << 10}
}

func (h *host) MaxPayload() uint64                  { return h.most }
func (h *host) Heartbeat(_ *wire.Task, mark []byte) { h.beats = append(h.beats, string(mark)) }
func (h *host) Output(_ context.Context, _ *wire.Task, text string) error {
	h.shown.WriteString(text)
	return nil
}
func (h *host) PutBlob(_ context.Context, flowID, from string, data []byte) (string, error) {
	name := fmt.Sprintf("%s#%d", flowID, len(h.blobs))
	if from != "" {
		name += " from " + from
	}
	h.blobs[name] = data
	return name, h.blobErr
}
func (h *host) GetBlob(_ context.Context, _, name string) ([]byte, error) {
	h.readings++
	b, ok := h.blobs[name]
	if !ok {
		return nil, errors.New("no such blob")
	}
	return b, nil
}
func (h *host) Attribute(_ context.Context, _, name string) (*wire.Attribute, error) {
	h.readings++
	return h.attrs[name], nil
}
func (h *host) Now() time.Time       { return time.Unix(100, 0) }
func (h *host) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// bed runs tasks of one flow.
type bed struct {
	t    *testing.T
	rt   *flow.Runtime
	h    *host
	run  func(*flow.Context, string) (flow.Decision, error)
	wait func(*flow.Context, string) (flow.Wait, error)
}

func newBed(t *testing.T) *bed {
	b := &bed{t: t, h: newHost()}
	f := flow.Define("order",
		flow.Step(awaitPayment{}, flow.Timeout(time.Minute)),
		flow.Step(ship{}, flow.Retry(flow.NoRetry), flow.Async(), flow.Concurrency(3, func(o order) string { return "ship-" + o.ID })),
		flow.Step(script{run: &b.run}, flow.OnFailure(refund{}), flow.Heartbeat(time.Second)),
		flow.Step(picky{script{run: &b.run, wait: &b.wait}}),
		flow.Step(refund{}),
		status, paid, balance, inbox, document, getStatus, deposit,
	)
	var err error
	if b.rt, err = flow.NewRuntime(f); err != nil {
		t.Fatal(err)
	}
	return b
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bed) task(step string, in any) *wire.Task {
	return &wire.Task{FlowId: "f1", FlowType: "order", RunId: "r1", Exec: 7, Attempt: &wire.AttemptID{Epoch: 1, Lsn: 2, N: 3}, Number: 1,
		Step: step, Input: encode(b.t, in)}
}

func (b *bed) do(task *wire.Task) *wire.StepResult {
	return b.rt.Step(context.Background(), task, b.h).Run()
}

// script runs fn as the step "script".
func (b *bed) script(fn func(*flow.Context) (flow.Decision, error)) *wire.StepResult {
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) { return fn(ctx) }
	return b.do(b.task("script", "in"))
}

func (b *bed) ok(r *wire.StepResult) *wire.StepResult {
	b.t.Helper()
	if r == nil || r.Retry != nil {
		b.t.Fatalf("the step failed: %v", r)
	}
	return r
}

func (b *bed) failed(r *wire.StepResult, want string) *wire.StepResult {
	b.t.Helper()
	if r == nil || r.Retry == nil || !strings.Contains(r.Retry.Error, want) {
		b.t.Fatalf("got %v, want an error with %q", r, want)
	}
	if r.Close.GetHow() != wire.Close_FAIL || r.Close.Error != r.Retry.Error {
		b.t.Errorf("the fallback is %v", r.Close)
	}
	if len(r.Attributes)+len(r.Publish)+len(r.Next)+len(r.Sends) > 0 {
		b.t.Errorf("a failed step wrote %v", r)
	}
	return r
}

func TestDeclaration(t *testing.T) {
	typ := newBed(t).rt.Types()[0]
	want := &wire.FlowType{
		Name: "order",
		Steps: []*wire.StepType{{Name: "awaitPayment", WaitFor: true}, {Name: "ship"}, {Name: "script"},
			{Name: "picky", WaitFor: true}, {Name: "refund"}},
		Rpcs: []*wire.RpcType{{Name: "get-status"}, {Name: "deposit", Locked: true}},
		Attributes: []*wire.AttributeType{{Name: "status", Index: wire.Attribute_KEYWORD, Type: "string"},
			{Name: "balance/*", Type: "int"}, {Name: "document", Type: "bytes"}},
		Channels: []string{"paid", "inbox/*"},
	}
	if !typ.EqualVT(want) {
		t.Errorf("got  %v\nwant %v", typ, want)
	}
}

func TestWaitForPhase(t *testing.T) {
	b := newBed(t)
	task := b.task("awaitPayment", order{ID: "o", Amount: 5})
	task.Phase = wire.Task_WAIT_FOR
	r := b.ok(b.do(task))
	want := &wire.StepResult{Exec: 7, Attempt: task.Attempt, Locals: []byte("10"), Wait: &wire.Wait{
		Conditions: []*wire.Condition{
			{Name: "paid", On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "paid", AtLeast: 1, AtMost: 1}}},
			{Name: "deadline", On: &wire.Condition_TimerUs{TimerUs: 3600e6}},
		},
		Combinations: []*wire.Combination{{Of: []uint32{0}}, {Of: []uint32{1}}},
	}}
	if !r.EqualVT(want) {
		t.Errorf("got  %v\nwant %v", r, want)
	}
	// A step without WaitFor has nothing to wait for.
	task = b.task("refund", "x")
	task.Phase = wire.Task_WAIT_FOR
	if r := b.ok(b.do(task)); r.Wait != nil || r.Close != nil {
		t.Errorf("got %v", r)
	}
}

func TestExecuteSeesWhatHeld(t *testing.T) {
	b := newBed(t)
	task := b.task("awaitPayment", order{ID: "o", Amount: 5})
	task.ConditionNames = []string{"paid", "deadline"}
	task.Conditions = []*wire.ConditionState{{Done: true, Messages: 1}, {}}
	task.Messages = []*wire.Message{{Payload: []byte(`{"Amount":9}`)}}
	r := b.ok(b.do(task))
	if len(r.Next) != 1 || r.Next[0].Name != "ship" || string(r.Next[0].Input) != `{"ID":"o","Amount":9}` {
		t.Errorf("next is %v", r.Next)
	}
	if s := r.Next[0]; !s.Async || s.ConcurrencyKey != "ship-o" || s.ConcurrencyLimit != 3 || s.Retry.MaxAttempts != 1 || s.WaitFor {
		t.Errorf("spec is %v", s)
	}
	if len(r.Attributes) != 1 || string(r.Attributes[0].Value) != `"paid"` || r.Attributes[0].Index != wire.Attribute_KEYWORD {
		t.Errorf("attributes are %v", r.Attributes)
	}
	task.Conditions, task.Messages = []*wire.ConditionState{{}, {Done: true}}, nil
	r = b.ok(b.do(task))
	if r.Close.GetHow() != wire.Close_GRACEFUL || string(r.Close.Output) != `"expired"` || len(r.Next) != 0 {
		t.Errorf("got %v", r)
	}
}

func TestMessagesOfSeveralConditions(t *testing.T) {
	b := newBed(t)
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		one, err := inbox.At(1).Messages(ctx)
		if err != nil {
			return flow.Decision{}, err
		}
		two, err := inbox.At(2).Messages(ctx)
		if err != nil {
			return flow.Decision{}, err
		}
		none, ok, err := inbox.At(3).Message(ctx)
		if ok || none != "" || err != nil {
			return flow.Decision{}, fmt.Errorf("inbox 3 has %q, %v", none, err)
		}
		if !ctx.Fired("t") || ctx.Fired("u") || ctx.Fired("nothing") {
			return flow.Decision{}, errors.New("timers")
		}
		return flow.Complete(strings.Join(one, ",") + ";" + strings.Join(two, ",")), nil
	}
	task := b.task("script", "")
	task.ConditionNames = []string{"inbox/2", "t", "inbox/1", "u", "inbox/2"}
	task.Conditions = []*wire.ConditionState{{Done: true, Messages: 2}, {Done: true}, {Done: true, Messages: 1}, {}, {Done: true, Messages: 1}}
	for _, s := range []string{`"a"`, `"b"`, `"c"`, `"d"`} {
		task.Messages = append(task.Messages, &wire.Message{Payload: []byte(s)})
	}
	if r := b.ok(b.do(task)); string(r.Close.Output) != `"c;a,b,d"` {
		t.Errorf("got %s", r.Close.Output)
	}
}

func TestInlineWaitFor(t *testing.T) {
	b := newBed(t)
	seen := ""
	b.wait = func(ctx *flow.Context, in string) (flow.Wait, error) {
		s, err := status.Get(ctx)
		if err != nil {
			return flow.Wait{}, err
		}
		seen = s + " " + in + " " + ctx.Key() + " " + ctx.Step()
		status.Set(ctx, "waiting")
		ctx.SetLocals("kept")
		return flow.AllOf(flow.After("t", time.Second)), nil
	}
	r := b.ok(b.script(func(ctx *flow.Context) (flow.Decision, error) {
		status.Set(ctx, "mine")
		return flow.GoTo(picky{}, "x"), nil
	}))
	if seen != "mine x r1-7-picky-0 picky" {
		t.Errorf("WaitFor saw %q", seen)
	}
	s := r.Next[0]
	if s.WaitFor || len(s.Wait.GetConditions()) != 1 || len(s.Wait.Combinations) != 0 || string(s.Locals) != `"kept"` {
		t.Errorf("spec is %v", s)
	}
	if n := len(r.Attributes); string(r.Attributes[n-1].Value) != `"waiting"` {
		t.Errorf("attributes are %v", r.Attributes)
	}

	for name, wait := range map[string]func(*flow.Context, string) (flow.Wait, error){
		"error": func(ctx *flow.Context, _ string) (flow.Wait, error) {
			status.Set(ctx, "waiting")
			paid.Publish(ctx, payment{})
			return flow.Wait{}, errors.New("not now")
		},
		"panic": func(ctx *flow.Context, _ string) (flow.Wait, error) {
			status.Set(ctx, "waiting")
			panic("not now")
		},
		"bad write": func(ctx *flow.Context, _ string) (flow.Wait, error) {
			status.Set(ctx, "waiting")
			flow.NewAttribute[string]("undeclared").Set(ctx, "x")
			return flow.Wait{}, nil
		},
		"bad wait": func(ctx *flow.Context, _ string) (flow.Wait, error) {
			status.Set(ctx, "waiting")
			return flow.AnyOf(flow.NewChannel[int]("undeclared").ForOne()), nil
		},
	} {
		b.wait = wait
		r := b.ok(b.script(func(ctx *flow.Context) (flow.Decision, error) {
			status.Set(ctx, "mine")
			return flow.GoToAll(flow.To(picky{}, "x"), flow.To(ship{}, order{})), nil
		}))
		if len(r.Next) != 2 || !r.Next[0].WaitFor || r.Next[0].Wait != nil || len(r.Publish) != 0 {
			t.Errorf("%s: next is %v", name, r.Next)
		}
		if len(r.Attributes) != 1 || string(r.Attributes[0].Value) != `"mine"` {
			t.Errorf("%s: attributes are %v", name, r.Attributes)
		}
	}
	b.wait = func(*flow.Context, string) (flow.Wait, error) { return flow.Wait{}, nil }
	r = b.ok(b.script(func(ctx *flow.Context) (flow.Decision, error) { return flow.GoTo(picky{}, "x"), nil }))
	if s := r.Next[0]; s.WaitFor || s.Wait != nil {
		t.Errorf("a wait for nothing is %v", s)
	}
}

func TestFailures(t *testing.T) {
	b := newBed(t)
	fail := func(err error) *wire.StepResult {
		return b.script(func(ctx *flow.Context) (flow.Decision, error) {
			status.Set(ctx, "never")
			return flow.DeadEnd(), err
		})
	}
	r := b.failed(fail(errors.New("no luck")), "no luck")
	if r.Retry.Permanent || r.Retry.AfterUs != 0 || r.Exec != 7 || r.Attempt.GetN() != 3 {
		t.Errorf("got %v", r)
	}
	r = b.failed(fail(fmt.Errorf("so: %w", flow.RetryAfter(flow.WithKind(errors.New("busy"), "busy"), time.Minute))), "so: busy")
	if r.Retry.AfterUs != 60e6 || r.Retry.Kind != "busy" || r.Retry.Permanent {
		t.Errorf("got %v", r.Retry)
	}
	r = b.failed(fail(flow.Permanent(io.EOF)), "EOF")
	if !r.Retry.Permanent || !errors.Is(flow.Permanent(io.EOF), io.EOF) {
		t.Errorf("got %v", r.Retry)
	}
	r = b.failed(b.script(func(*flow.Context) (flow.Decision, error) { panic("boom") }), "panic: boom")
	if r.Retry.Kind != "panic" {
		t.Errorf("got %v", r.Retry)
	}
	r = b.failed(fail(errors.New(strings.Repeat("x", 1<<20))), "xxx")
	if len(r.Retry.Error) > 9<<10 {
		t.Errorf("an error of %d bytes", len(r.Retry.Error))
	}
	task := b.task("script", 5) // takes a string
	r = b.failed(b.do(task), "not a string")
	if !r.Retry.Permanent || r.Retry.Kind != "bad_input" {
		t.Errorf("got %v", r.Retry)
	}
	b.failed(b.do(b.task("gone", 1)), `no step "gone"`)
	task = b.task("script", "")
	task.FlowType = "gone"
	b.failed(b.do(task), `no flow type "gone"`)
}

func TestRecoveryStep(t *testing.T) {
	b := newBed(t)
	task := b.task("refund", "o1")
	task.Failure = "card declined"
	if r := b.ok(b.do(task)); string(r.Close.Output) != `"o1: card declined"` {
		t.Errorf("got %s", r.Close.Output)
	}
}

func TestAttributes(t *testing.T) {
	b := newBed(t)
	b.h.blobs["big"] = encode(t, []byte("big document"))
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		for range 2 { // the second time it was fetched already
			if d, err := document.Get(ctx); string(d) != "big document" {
				return flow.Decision{}, fmt.Errorf("document is %q, %v", d, err)
			}
		}
		if _, ok, err := status.Lookup(ctx); ok || err != nil {
			return flow.Decision{}, fmt.Errorf("status is there: %v", err)
		}
		if keys := balance.Keys(ctx); !slices.Equal(keys, []string{"a", "b"}) {
			return flow.Decision{}, fmt.Errorf("keys are %q", keys)
		}
		balance.At("a").Delete(ctx)
		balance.At("c").Set(ctx, 1)
		balance.At("c").Set(ctx, 3)
		if keys := balance.Keys(ctx); !slices.Equal(keys, []string{"b", "c"}) {
			return flow.Decision{}, fmt.Errorf("keys are %q", keys)
		}
		n, err := balance.At("b").Get(ctx)
		if m, _ := balance.At("c").Get(ctx); n != 2 || m != 3 || err != nil {
			return flow.Decision{}, fmt.Errorf("balances are %d and %d, %v", n, m, err)
		}
		if _, err := flow.NewAttribute[int]("other").Get(ctx); err == nil {
			return flow.Decision{}, errors.New("an unknown attribute was read")
		}
		document.Set(ctx, make([]byte, 3000))
		return flow.GoTo(script{}, strings.Repeat("y", 5000)), nil
	}
	task := b.task("script", "")
	task.Attributes = []*wire.Attribute{{Name: "balance/a", Value: []byte("1")}, {Name: "balance/b", Value: []byte("2")},
		{Name: "document", Blob: "big", Size: 18}}
	r := b.ok(b.do(task))
	want := []*wire.Attribute{{Name: "balance/a"}, {Name: "balance/c", Value: []byte("3")}, {Name: "document", Blob: "f1#1", Size: 4002}}
	if len(r.Attributes) != len(want) {
		t.Fatalf("attributes are %v", r.Attributes)
	}
	for i, a := range r.Attributes {
		if !a.EqualVT(want[i]) {
			t.Errorf("attribute %d is %v, want %v", i, a, want[i])
		}
	}
	s := r.Next[0]
	if s.InputBlob != "f1#2" || s.Input != nil || s.Recover.InputBlob != "" || len(b.h.blobs["f1#2"]) != 5002 {
		t.Errorf("spec is %v", s)
	}
	if b.h.readings != 1 {
		t.Errorf("%d readings", b.h.readings)
	}
	b.h.blobErr = errors.New("no room")
	b.failed(b.do(task), "no room")
}

func TestLargeAttributeInARow(t *testing.T) {
	b := newBed(t)
	b.h.attrs["status"] = &wire.Attribute{Name: "status", Value: []byte(`"far"`)}
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		s, err := status.Get(ctx)
		return flow.Complete(s), err
	}
	task := b.task("script", "")
	task.Attributes = []*wire.Attribute{{Name: "status", Size: 5}}
	if r := b.ok(b.do(task)); string(r.Close.Output) != `"far"` {
		t.Errorf("got %s", r.Close.Output)
	}
}

func TestLargeInput(t *testing.T) {
	b := newBed(t)
	b.h.blobs["in"] = []byte(`"from afar"`)
	b.run = func(_ *flow.Context, in string) (flow.Decision, error) { return flow.Complete(in), nil }
	task := b.task("script", "")
	task.Input, task.InputBlob = nil, "in"
	if r := b.ok(b.do(task)); string(r.Close.Output) != `"from afar"` {
		t.Errorf("got %s", r.Close.Output)
	}
	task.InputBlob = "gone"
	b.failed(b.do(task), "no such blob")
}

func TestCheckpointAndOutput(t *testing.T) {
	b := newBed(t)
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		at := 0
		if ok, err := ctx.Checkpoint(&at); !ok || err != nil || at != 40 {
			return flow.Decision{}, fmt.Errorf("checkpoint is %d, %v, %v", at, ok, err)
		}
		if err := ctx.Heartbeat(41); err != nil {
			return flow.Decision{}, err
		}
		fmt.Fprint(ctx.Output(), "half a \xe2\x82")
		fmt.Fprint(ctx.Output(), "\xac, whole")
		if !ctx.Now().Equal(time.Unix(100, 0)) || ctx.Attempt() != 3 || ctx.Retries() != 1 || ctx.Key() != "r1-7" || !ctx.Started().Equal(time.UnixMicro(5)) {
			return flow.Decision{}, errors.New("numbers")
		}
		return flow.Decision{}, errors.New("lost at 41")
	}
	task := b.task("script", "")
	task.Checkpoint, task.Number, task.Retries, task.StartedUs = []byte("40"), 3, 1, 5
	r := b.failed(b.do(task), "lost at 41")
	if string(r.Checkpoint) != "41" || !slices.Equal(b.h.beats, []string{"41"}) || b.h.shown.String() != "half a €, whole" {
		t.Errorf("checkpoint %s, beats %q, shown %q", r.Checkpoint, b.h.beats, b.h.shown.String())
	}
}

func TestRPC(t *testing.T) {
	b := newBed(t)
	call := func(name string, in string, locked bool, attrs ...*wire.Attribute) *wire.RpcResult {
		return b.rt.RPC(context.Background(), &wire.RpcTask{Call: 4, FlowId: "f1", FlowType: "order", RunId: "r1", Name: name,
			Input: []byte(in), Locked: locked, Attributes: attrs}, b.h).Run()
	}
	r := call("get-status", "", false, &wire.Attribute{Name: "status", Value: []byte(`"new"`)})
	if r.Call != 4 || r.Error != "" || string(r.Update.Output) != `"new"` || r.Update.Attributes != nil {
		t.Errorf("got %v", r)
	}
	r = call("deposit", `{"Amount":5}`, true, &wire.Attribute{Name: "balance/all", Value: []byte("70")})
	u := r.Update
	if r.Error != "" || string(u.Output) != "75" || string(u.Attributes[0].Value) != "75" || len(u.Publish) != 1 || u.Next[0].Name != "ship" || u.Close != nil {
		t.Errorf("got %v", r)
	}
	if r = call("deposit", `{"Amount":50}`, true, &wire.Attribute{Name: "balance/all", Value: []byte("70")}); r.Update.GetClose().GetHow() != wire.Close_FORCE {
		t.Errorf("got %v", r)
	}
	r = call("deposit", `{"Amount":-5}`, true)
	if r.Update != nil || r.Error != "no negative deposit" || r.ErrorKind != "bad_amount" {
		t.Errorf("got %v", r)
	}
	for _, c := range []struct {
		name, in, want string
		locked         bool
	}{
		{"deposit", `"x"`, "the input of RPC", true},
		{"deposit", `{}`, "as if locked were false", false},
		{"other", `{}`, `no RPC "other"`, false},
	} {
		if r := call(c.name, c.in, c.locked); r.Update != nil || !strings.Contains(r.Error, c.want) {
			t.Errorf("%v: got %v", c, r)
		}
	}
}

func TestRPCMayCloseItsFlow(t *testing.T) {
	finish := func(d flow.Decision) *wire.RpcResult {
		rt, err := flow.NewRuntime(flow.Define("f", flow.Step(refund{}), status, paid,
			flow.NewLockedRPC("end", func(ctx *flow.UpdateContext, _ flow.None) (flow.None, error) {
				status.Set(ctx, "ended")
				ctx.Close(d)
				return flow.None{}, nil
			})))
		if err != nil {
			t.Fatal(err)
		}
		return rt.RPC(context.Background(), &wire.RpcTask{FlowType: "f", Name: "end", Locked: true}, newHost()).Run()
	}
	r := finish(flow.CompleteIfEmpty("x", flow.To(refund{}, "y"), paid))
	if c := r.Update.GetClose(); c.GetHow() != wire.Close_IF_EMPTY || c.Otherwise.GetName() != "refund" || r.Update.Output != nil {
		t.Errorf("got %v", r)
	}
	if r := finish(flow.Fail(nil)); r.Update.GetClose().GetError() != "failed" {
		t.Errorf("got %v", r)
	}
	for want, d := range map[string]flow.Decision{
		"can close its flow by": flow.GoTo(refund{}, ""),
		"cannot cancel steps":   flow.Complete(1).Cancelling(refund{}),
		`no step "gone"`:        flow.CompleteIfEmpty(1, flow.To(flow.Ref[int]("gone"), 1)),
		"the output of the run": flow.Complete(func() {}),
	} {
		if r := finish(d); r.Update != nil || !strings.Contains(r.Error, want) {
			t.Errorf("got %v, want %q", r, want)
		}
	}
}
