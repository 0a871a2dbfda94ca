//go:build e2e

package flows

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// startOf is a start of the type odd at a step.
func startOf(id, step string, change func(*wire.StartRequest)) *wire.Call {
	r := &wire.StartRequest{FlowId: id, FlowType: odd.Name(), Step: step}
	if change != nil {
		change(r)
	}
	return &wire.Call{Verb: &wire.Call_Start{Start: r}}
}

func setOf(name, value string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_SetAttributes{SetAttributes: &wire.SetAttributesRequest{FlowId: "victim",
		Attributes: []*wire.Attribute{{Name: name, Value: []byte(value)}}}}}
}

func publishOf(id, channel string, payloads ...string) *wire.Call {
	r := &wire.PublishRequest{FlowId: id, Channel: channel}
	for _, p := range payloads {
		r.Payloads = append(r.Payloads, []byte(p))
	}
	return &wire.Call{Verb: &wire.Call_Publish{Publish: r}}
}

func rpcOf(name, input string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Rpc{Rpc: &wire.RpcRequest{FlowId: "victim", Name: name, Input: []byte(input)}}}
}

func describeOf(id string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: id}}}
}

// TestBadInput: each mistake has a code of its own, a message that says what is
// wrong and a hint that says what to do, and changes nothing.
func TestBadInput(t *testing.T) {
	w := newTown(t)
	ctx := within(t, patience)
	if _, err := client.Start(ctx, w.alpha, odd, "victim", flow.NoStep, flow.With(amount, 7)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Start(ctx, w.alpha, odd, "over", flow.To(Panics{}, flow.None{})); err != nil {
		t.Fatal(err)
	}
	if _, err := w.alpha.Wait(ctx, "over", ""); err != nil {
		t.Fatal(err)
	}
	r := w.raw(t, keyAlpha)
	before := r.do(describeOf("victim")).GetFlow()
	large := `"` + strings.Repeat("x", 100<<10) + `"`
	for _, c := range []struct {
		name, code, says string
		call             *wire.Call
	}{
		{"unknown type", "unknown_type", `"nobody's"`, startOf("n", "Do", func(r *wire.StartRequest) { r.FlowType = "nobody's" })},
		{"the engine's own type", "invalid", "the server's own", startOf("n", "Do", func(r *wire.StartRequest) { r.FlowType = "perdure.schedule" })},
		{"unknown step", "unknown_step", "Panics", startOf("n", "Panic", nil)},
		{"unknown attribute of a start", "unknown_attribute", `"color"`, startOf("n", "", func(r *wire.StartRequest) {
			r.Attributes = []*wire.Attribute{{Name: "color", Value: []byte("1")}}
		})},
		{"unknown channel of a start", "unknown_channel", `"windows"`, startOf("n", "", func(r *wire.StartRequest) {
			r.Publish = []*wire.PublishRequest{{Channel: "windows", Payloads: [][]byte{[]byte("1")}}}
		})},
		{"unknown attribute", "unknown_attribute", "amount", setOf("colour", "1")},
		{"unknown channel", "unknown_channel", "doors", publishOf("victim", "windows", "1")},
		{"unknown RPC", "unknown_rpc", "decline", rpcOf("nothing", "")},
		{"unknown flow", "not_found", `"nowhere"`, describeOf("nowhere")},
		{"unknown run", "unknown_run", "run_0", &wire.Call{Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: "victim", RunId: "run_0"}}}},

		{"text for a number", "wrong_type", "int", setOf("amount", `"seven"`)},
		{"a fraction for a number", "wrong_type", "int", setOf("amount", "7.5")},
		{"a value that is not JSON", "wrong_type", "not JSON", setOf("amount", "{")},
		{"a number for text", "wrong_type", "string", setOf("text", "7")},
		{"an input that is not JSON", "invalid", "not JSON", startOf("n", "Panics", func(r *wire.StartRequest) { r.Input = []byte("tea") })},
		{"an RPC's input that is not JSON", "invalid", "not JSON", rpcOf("decline", "tea")},
		{"a message that is not JSON", "invalid", "not JSON", publishOf("victim", "doors", `"ok"`, "tea")},

		{"a large input in line", "too_large", "65536", startOf("n", "Panics", func(r *wire.StartRequest) { r.Input = []byte(large) })},
		{"a large value in line", "too_large", "65536", setOf("text", large)},
		{"a large message", "too_large", "65536", publishOf("victim", "doors", large)},
		{"a large input of an RPC", "too_large", "65536", rpcOf("decline", large)},
		{"a blob that is not there", "blob_missing", "", startOf("n", "Panics", func(r *wire.StartRequest) {
			r.InputBlob = "0123456789ab-0123456789abcdef0123456789abcdef-ff"
		})},
		{"a blob of the world outside", "invalid", "not the name of a blob", startOf("n", "Panics", func(r *wire.StartRequest) { r.InputBlob = "../../etc/passwd" })},
		{"too many messages", "invalid", "1 to 1000 payloads", publishOf("victim", "doors", strings.Split(strings.Repeat("1 ", 1001), " ")[:1001]...)},

		{"no flow ID", "invalid", "1 to 256 bytes", describeOf("")},
		{"a long flow ID", "invalid", "1 to 256 bytes", describeOf(strings.Repeat("x", 257))},
		{"a flow ID of two lines", "invalid", "control character", describeOf("a\nb")},
		{"a priority of 10", "invalid", "0 to 9", startOf("n", "", func(r *wire.StartRequest) { r.Priority = 10 })},
		{"a negative delay", "invalid", "negative", startOf("n", "", func(r *wire.StartRequest) { r.DelayUs = -1 })},
		{"an eternal delay", "invalid", "at most", startOf("n", "", func(r *wire.StartRequest) { r.DelayUs = 1 << 62 })},
		{"a long request ID", "invalid", "256", startOf("n", "", func(r *wire.StartRequest) { r.RequestId = strings.Repeat("x", 257) })},
		{"a reuse policy that there is not", "invalid", "reuse policy 77", startOf("n", "", func(r *wire.StartRequest) { r.Reuse = 77 })},
		{"an input without a step", "invalid", "no step", startOf("n", "", func(r *wire.StartRequest) { r.Input = []byte("1") })},
		{"no verb", "invalid", "no verb", &wire.Call{}},
		{"a negative time", "invalid", "negative", &wire.Call{TimeoutUs: -1, Verb: describeOf("victim").Verb}},

		{"a cursor beyond the end", "bad_cursor", "beyond", &wire.Call{Verb: &wire.Call_History{History: &wire.HistoryRequest{FlowId: "victim", After: &wire.Cursor{Lsn: 1 << 60}}}}},
		{"a live history of one answer", "invalid", "many answers", &wire.Call{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "victim"}}}},
		{"a query with a slip", "invalid", "runing is not a status", &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Query: `type = "odd" and status = runing`}}}},
		{"a page that there is not", "invalid", "", &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Page: "tomorrow"}}}},
		{"a reset to no step", "not_found", "", &wire.Call{Verb: &wire.Call_Reset_{Reset_: &wire.ResetRequest{FlowId: "victim", Exec: 99}}}},
		{"a timer that there is not", "not_found", "", &wire.Call{Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: "victim"}}}},
		{"a schedule of the 13th month", "invalid", "", &wire.Call{Verb: &wire.Call_PutSchedule{PutSchedule: &wire.PutScheduleRequest{Schedule: &wire.Schedule{
			Id: "s", Cron: "0 0 1 13 *", Start: &wire.StartRequest{FlowType: odd.Name()}}}}}},
		{"a schedule on the moon", "invalid", "Moon", &wire.Call{Verb: &wire.Call_PutSchedule{PutSchedule: &wire.PutScheduleRequest{Schedule: &wire.Schedule{
			Id: "s", Cron: "@daily", TimeZone: "Moon/Tycho", Start: &wire.StartRequest{FlowType: odd.Name()}}}}}},
		{"a schedule that there is not", "not_found", "", &wire.Call{Verb: &wire.Call_TriggerSchedule{TriggerSchedule: &wire.ScheduleRequest{Id: "never"}}}},

		{"a message for a flow that has ended", "flow_closed", "failed", publishOf("over", "doors", "1")},
		{"a stop of a flow that has ended", "flow_closed", "", &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{FlowId: "over"}}}},
		{"a wait that is over too soon", "deadline", "50ms", &wire.Call{TimeoutUs: 50_000, Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: "victim"}}}},
		{"an attribute that does not come", "deadline", "50ms", &wire.Call{TimeoutUs: 50_000, Verb: &wire.Call_WaitAttribute{WaitAttribute: &wire.WaitAttributeRequest{FlowId: "victim", Name: "amount", Equals: []byte("8")}}}},
		{"an RPC that is over too soon", "deadline", "50ms", &wire.Call{TimeoutUs: 50_000, Verb: rpcOf("dawdle", "").Verb}},
	} {
		e := r.do(c.call).Error
		if e == nil {
			t.Errorf("%s: no error", c.name)
		} else if e.Code != c.code || !strings.Contains(e.Message, c.says) || e.Hint == "" {
			t.Errorf("%s: code %q, message %q, hint %q; want %s with %q and a hint", c.name, e.Code, e.Message, e.Hint, c.code, c.says)
		} else if slip := c.name == "a query with a slip"; slip != (e.Position >= 0) || slip && e.Position != 26 {
			t.Errorf("%s: position %d", c.name, e.Position)
		}
	}
	after := r.do(describeOf("victim")).GetFlow()
	if before.Events != after.Events || before.UpdatedUs != after.UpdatedUs {
		t.Errorf("the mistakes have changed the flow: %v became %v", before, after)
	}
	if a := r.do(describeOf("n")); a.Error.GetCode() != "not_found" {
		t.Errorf("a refused start has left %v", a)
	}
	t.Run("duplicates", func(t *testing.T) { duplicates(t, w) })
	t.Run("streams", func(t *testing.T) { badStreams(t, w) })
	t.Run("blobs", func(t *testing.T) { badBlobs(t, w) })
	t.Run("a full channel", func(t *testing.T) { fullChannel(t, w) })
}

// duplicates: what a start does when there is a flow of its ID, by policy.
func duplicates(t *testing.T, w *town) {
	ctx := within(t, patience)
	for _, name := range []string{"running", "completed", "failed"} {
		for reuse, want := range map[client.Reuse]map[string]string{
			client.Refuse:    {"running": "already_exists", "completed": "already_exists", "failed": "already_exists"},
			client.IfClosed:  {"running": "already_exists", "completed": "new", "failed": "new"},
			client.IfFailed:  {"running": "already_exists", "completed": "already_exists", "failed": "new"},
			client.Terminate: {"running": "new", "completed": "new", "failed": "new"},
			client.Attach:    {"running": "same", "completed": "new", "failed": "new"},
		} {
			id := fmt.Sprintf("dup-%s-%s", name, reuse)
			first, err := w.alpha.Start(ctx, client.StartRequest{ID: id, Type: "counter"})
			if name == "completed" {
				_, err = client.Call(ctx, w.alpha, id, finish, flow.None{})
			}
			if name == "failed" {
				_, err = w.alpha.Stop(ctx, id, client.StopRequest{How: client.FailFlow, Reason: "for the test"})
			}
			if err != nil {
				t.Fatalf("%s: %v", id, err)
			}
			second, err := w.alpha.Start(ctx, client.StartRequest{ID: id, Type: "counter", Reuse: reuse})
			got := "new"
			var e *client.Error
			switch {
			case errors.As(err, &e):
				got = e.Code
			case err != nil:
				t.Fatal(err)
			case second.RunID == first.RunID:
				got = "same"
			}
			if got != want[name] || got == "new" != (err == nil && second.Created) || e != nil && e.Hint == "" {
				t.Errorf("%s with a flow that is %s: %s (%+v, %v), want %s", reuse, name, got, second, err, want[name])
			}
		}
	}
	// The same request ID is the same start; with other content it is an error.
	req := client.StartRequest{ID: "dup-key", Type: "counter", RequestID: "k1"}
	first, err := w.alpha.Start(ctx, req)
	if err != nil || !first.Created {
		t.Fatal(first, err)
	}
	if again, err := w.alpha.Start(ctx, req); err != nil || again.Created || again.RunID != first.RunID {
		t.Errorf("the same start again: %+v, %v", again, err)
	}
	if _, err := w.alpha.Publish(ctx, "victim", "doors", client.PublishOptions{RequestID: "m2"}, "one"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.alpha.Publish(ctx, "victim", "doors", client.PublishOptions{RequestID: "m2"}, "one"); err != nil {
		t.Errorf("the same message again: %v", err)
	}
	if _, err := w.alpha.Publish(ctx, "victim", "doors", client.PublishOptions{RequestID: "m2"}, "two"); !errors.Is(err, client.ErrKeyReused) {
		t.Errorf("another message with its key: %v", err)
	}
}

// badStreams: a stream that is used wrongly ends with the reason.
func badStreams(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	stream, err := wire.NewFlowsClient(r.conn).Stream(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	wait := &wire.Call{Id: 7, Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: "victim"}}}
	_ = stream.Send(&wire.Calls{Calls: []*wire.Call{wait, wait}})
	for err == nil { // the first of them may be answered: its caller has gone
		_, err = stream.Recv()
	}
	refusedWith(t, "two open calls with one ID", err, codes.InvalidArgument, "call 7 is open already")

	stream, err = wire.NewFlowsClient(r.conn).Stream(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	many := &wire.Calls{}
	for i := range 20_000 {
		many.Calls = append(many.Calls, &wire.Call{Id: uint64(i), Verb: wait.Verb})
	}
	_ = stream.Send(many)
	overloaded := 0
	for overloaded < 20_000-16<<10 {
		f, err := stream.Recv()
		if err != nil {
			t.Fatalf("after %d refusals: %v", overloaded, err)
		}
		for _, a := range f.Answers {
			if a.Error.GetCode() != "overloaded" || a.Error.RetryAfterUs == 0 {
				t.Fatalf("answer %v", a)
			}
			overloaded++
		}
	}
	// There is room again when waits are cancelled, and the stream is still good.
	cancels := make([]uint64, 16<<10)
	for i := range cancels {
		cancels[i] = uint64(i)
	}
	_ = stream.Send(&wire.Calls{Cancels: cancels})
	_ = stream.Send(&wire.Calls{Calls: []*wire.Call{{Id: 99_999, Verb: &wire.Call_Queues{Queues: &wire.QueuesRequest{}}}}})
	for {
		f, err := stream.Recv()
		if err != nil {
			t.Fatalf("after cancels: %v", err)
		}
		if i := slices.IndexFunc(f.Answers, func(a *wire.Answer) bool { return a.Id == 99_999 }); i >= 0 {
			if f.Answers[i].GetQueues() == nil {
				t.Errorf("after cancels: %v", f.Answers[i])
			}
			return
		}
	}
}

// badBlobs: too large a blob is refused while it comes; a foreign one is not
// found.
func badBlobs(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	put := func(flowID string, chunks, size int) (*wire.BlobRef, error) {
		s, err := wire.NewBlobsClient(r.conn).Put(r.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for i := range chunks {
			c := &wire.Chunk{Data: make([]byte, size)}
			if i == 0 {
				c.FlowId = flowID
			}
			if err := s.Send(c); err == io.EOF {
				break // the answer says why
			} else if err != nil {
				t.Fatal(err)
			}
		}
		return s.CloseAndRecv()
	}
	_, err := put("victim", 257, 256<<10)
	refusedWith(t, "a blob of 64 MiB and a quarter", err, codes.InvalidArgument, "more than 67108864 bytes")
	_, err = put("victim", 1, 300<<10)
	refusedWith(t, "a chunk of 300 KiB", err, codes.InvalidArgument, "at most 262144")
	_, err = put("", 1, 10)
	refusedWith(t, "a blob of no flow", err, codes.InvalidArgument, "name its flow")
	_, err = put("a\nb", 1, 10)
	refusedWith(t, "a blob of a flow that cannot be", err, codes.InvalidArgument, "control character")
	ref, err := put("victim", 2, 100<<10)
	if err != nil || ref.Size != 200<<10 {
		t.Fatalf("a good blob: %v, %v", ref, err)
	}
	for what, of := range map[string]*raw{"another flow": r, "another tenant": w.raw(t, keyBeta)} {
		id := map[string]string{"another flow": "over", "another tenant": "victim"}[what]
		s, err := wire.NewBlobsClient(of.conn).Get(of.ctx, &wire.BlobRef{FlowId: id, Blob: ref.Blob, Size: ref.Size})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Recv()
		refusedWith(t, "the blob of "+what, err, codes.NotFound, "blob_missing")
	}
	a := r.do(&wire.Call{Verb: &wire.Call_SetAttributes{SetAttributes: &wire.SetAttributesRequest{FlowId: "victim", Attributes: []*wire.Attribute{{Name: "amount", Blob: ref.Blob}}}}})
	if a.Error.GetCode() != "wrong_type" || !strings.Contains(a.Error.GetMessage(), "indexed") {
		t.Errorf("an indexed value in a blob: %v", a)
	}
	_, err = w.alpha.Start(r.ctx, client.StartRequest{Type: "bulky", Step: "Load", Input: strings.Repeat("x", 64<<20)})
	if !errors.Is(err, client.ErrTooLarge) {
		t.Errorf("an input above 64 MiB: %v", err)
	}
}

// fullChannel: what a channel does not take is refused, and what it took stays.
func fullChannel(t *testing.T, w *town) {
	ctx := within(t, patience)
	if _, err := client.Start(ctx, w.alpha, odd, "full", flow.NoStep); err != nil {
		t.Fatal(err)
	}
	payloads := make([]any, 1000)
	for i := range payloads {
		payloads[i] = "knock"
	}
	if _, err := w.alpha.Publish(ctx, "full", "doors", client.PublishOptions{}, payloads...); err != nil {
		t.Fatal(err)
	}
	_, err := w.alpha.Publish(ctx, "full", "doors", client.PublishOptions{}, "one more")
	var e *client.Error
	if !errors.As(err, &e) || !errors.Is(err, client.ErrQueueFull) || e.Hint == "" || e.RetryAfter <= 0 {
		t.Errorf("message 1001: %+v", err)
	}
	if _, err := w.alpha.Publish(ctx, "victim", "doors", client.PublishOptions{MaxPending: 1}, "a", "b"); !errors.Is(err, client.ErrQueueFull) {
		t.Errorf("beyond a bound of the client's own: %v", err)
	}
	if m, err := w.alpha.Messages(ctx, "full", "doors"); err != nil || len(m) != 1000 {
		t.Errorf("%d messages wait, %v", len(m), err)
	}
}

// TestTenants: a tenant sees and does nothing of another's.
func TestTenants(t *testing.T) {
	w := newTown(t)
	ctx := within(t, patience)
	pool := newWorkers(t, w.target)
	pool.key = keyBeta
	pool.start()
	eventually(t, "a worker of beta", func() bool {
		all, err := w.beta.Workers(t.Context())
		return err == nil && len(all) == 1
	})
	if all, err := w.alpha.Workers(ctx); err != nil || len(all) != 1 {
		t.Errorf("alpha sees the workers %v, %v", all, err)
	}
	for c, n := range map[*client.Client]int{w.alpha: 2, w.beta: 3} { // the same ID
		if _, err := client.Start(ctx, c, pipeline, "same", flow.To(Seq{}, Job{Left: n})); err != nil {
			t.Fatal(err)
		}
		if got, err := client.Result[int](ctx, c, "same"); err != nil || got != n {
			t.Errorf("the flow gives %d, %v; want %d", got, err, n)
		}
	}
	if _, err := client.Start(ctx, w.alpha, odd, "secret", flow.NoStep, flow.With(amount, 41)); err != nil {
		t.Fatal(err)
	}
	refused := map[string]error{}
	_, refused["describe"] = w.beta.Describe(ctx, "secret")
	_, refused["attributes"] = w.beta.Attributes(ctx, "secret")
	refused["set"] = client.Set(ctx, w.beta, "secret", amount, 1)
	refused["publish"] = client.Publish(ctx, w.beta, "secret", doors, "knock")
	_, refused["rpc"] = client.Call(ctx, w.beta, "secret", decline, flow.None{})
	_, refused["stop"] = w.beta.Stop(ctx, "secret", client.StopRequest{How: client.TerminateFlow})
	refused["delete"] = w.beta.Delete(ctx, "secret", "")
	_, refused["the tenant's own form"] = w.beta.Describe(ctx, "alpha/f/secret")
	for what, err := range refused {
		if !errors.Is(err, client.ErrNotFound) || strings.Contains(err.Error(), "alpha/f/secret") && what != "the tenant's own form" {
			t.Errorf("%s of another tenant's flow: %v", what, err)
		}
	}
	if n, err := w.beta.Count(ctx, ""); err != nil || n != 1 {
		t.Errorf("beta finds %d flows, %v", n, err)
	}
	if n, err := client.Get(ctx, w.alpha, "secret", amount); err != nil || n != 41 {
		t.Errorf("the secret is %d, %v", n, err)
	}
	deeds := pool.deeds()
	for _, d := range deeds {
		if d.Flow != "same" {
			t.Errorf("beta's worker got %v", d)
		}
	}
	if len(deeds) != 3 {
		t.Errorf("beta's worker got %d tasks, want 3", len(deeds))
	}
}
