//go:build e2e

package flows

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// TestRogueWorkers: what a worker does wrong ends its own stream or its own
// step, with a word that says why; nothing is lost, and others go on.
func TestRogueWorkers(t *testing.T) {
	w := newTown(t)
	for name, fn := range map[string]func(*testing.T, *town){
		"answers twice":              answersTwice,
		"answers for another worker": answersForAnother,
		"answers from a former life": answersLate,
		"floods with answers":        floodsAnswers,
		"lies about credits":         liesAboutCredits,
		"never answers":              neverAnswers,
		"falls silent":               fallsSilent,
		"speaks out of turn":         speaksOutOfTurn,
		"gives impossible results":   givesImpossibleResults,
		"answers RPCs badly":         answersRPCsBadly,
		"sends garbage":              sendsGarbage,
		"sends a frame too large":    sendsTooLarge,
		"has a wrong key":            hasWrongKey,
		"panics and hangs":           panicsAndHangs,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); fn(t, w) })
	}
}

func answersTwice(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(1, "twice")
	r.start("twice", "twice-1", nil)
	task := k.task()
	first, second := completing(task, `"first"`), completing(task, `"second"`)
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{first, second, first}})
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{second}, TaskCredits: 1})
	if f := r.ends("twice-1"); f.Status != wire.Status_COMPLETED || string(f.Output) != `"first"` {
		t.Errorf("the flow is %v", f)
	}
	if f := r.do(describeOf("twice-1")).GetFlow(); f.StepsDone != 1 || f.Events != 4 {
		t.Errorf("the flow is %v", f)
	}
	// The stream is still good.
	r.start("twice", "twice-2", nil)
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(k.task(), `"third"`)}})
	if f := r.ends("twice-2"); string(f.Output) != `"third"` {
		t.Errorf("the next flow is %v", f)
	}
}

func answersForAnother(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	owner := r.join(1, "another")
	r.start("another", "another-1", nil)
	task := owner.task()
	thief := r.join(0, "another")
	thief.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(task, `"stolen"`)},
		Heartbeats: []*wire.Heartbeat{{FlowId: task.FlowId, Exec: task.Exec, Attempt: task.Attempt, Checkpoint: []byte(`"mine"`)}}})
	// What is over for the thief is said to it, which also shows that its frame was read.
	if f, err := thief.stream.Recv(); err != nil || len(f.Cancels) != 1 || !f.Cancels[0].Forget {
		t.Errorf("the thief got %v, %v", f, err)
	}
	owner.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(task, `"earned"`)}})
	if f := r.ends("another-1"); string(f.Output) != `"earned"` {
		t.Errorf("the flow is %v", f)
	}
}

// answersLate: the first worker is gone when it answers, over a new stream; the
// step was handed out again meanwhile, and that attempt counts.
func answersLate(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	old := r.join(1, "late")
	r.start("late", "late-1", nil)
	first := old.task()
	_ = old.stream.CloseSend()
	next := r.join(1, "late")
	second := next.task()
	if second.Number != 2 || second.Exec != first.Exec || second.Attempt.String() == first.Attempt.String() {
		t.Errorf("attempt %v followed %v", second, first)
	}
	next.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(first, `"first"`), completing(second, `"second"`)}})
	if f := r.ends("late-1"); string(f.Output) != `"second"` {
		t.Errorf("the flow is %v", f)
	}
}

func floodsAnswers(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(1, "flood")
	f := &wire.WorkerFrame{}
	for i := range 300 {
		f.Results = append(f.Results, &wire.TaskResult{FlowId: "nobody's", Result: &wire.StepResult{Exec: uint64(i)}})
	}
	k.send(f)
	refusedWith(t, "300 answers to nothing", k.end(), codes.ResourceExhausted, "flood: ")

	k = r.join(1, "flood")
	f = &wire.WorkerFrame{}
	for i := range 300 {
		f.RpcResults = append(f.RpcResults, &wire.RpcResult{Call: uint64(i)})
	}
	k.send(f)
	refusedWith(t, "300 answers to no call", k.end(), codes.ResourceExhausted, "flood: ")

	// Signs of life and output of what is not there cost nothing and are no error.
	k = r.join(1, "flood")
	f = &wire.WorkerFrame{}
	for i := range 10_000 {
		f.Outputs = append(f.Outputs, &wire.Output{FlowId: "nobody's", Exec: uint64(i), Text: "noise"})
	}
	for range 20 {
		k.send(f)
	}
	r.start("flood", "flood-1", nil)
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(k.task(), `1`)}})
	r.ends("flood-1")
}

func liesAboutCredits(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(1, "credits")
	k.send(&wire.WorkerFrame{TaskCredits: 1 << 31})
	refusedWith(t, "two thousand million credits", k.end(), codes.ResourceExhausted, "flood: ")
	k = r.join(1, "credits")
	for range 40 {
		k.send(&wire.WorkerFrame{RpcCredits: 1 << 12})
	}
	refusedWith(t, "credits by and by", k.end(), codes.ResourceExhausted, "flood: ")

	// Who asks for more than it reads gets it, and its steps go to others when it is gone.
	greedy := r.join(60_000, "credits")
	for i := range 50 {
		r.start("credits", fmt.Sprintf("credits-%d", i), nil)
	}
	eventually(t, "50 steps at the greedy worker", func() bool {
		for _, q := range r.do(&wire.Call{Verb: &wire.Call_Queues{Queues: &wire.QueuesRequest{}}}).GetQueues().GetQueues() {
			if q.FlowType == "credits" && q.Running == 50 {
				return true
			}
		}
		return false
	})
	greedy.hush()
	honest := r.join(1, "credits")
	refusedWith(t, "the greedy worker that fell silent", greedy.end(), codes.DeadlineExceeded, "worker_lost: ")
	for range 50 {
		honest.send(&wire.WorkerFrame{TaskCredits: 1, Results: []*wire.TaskResult{completing(honest.task(), `"done"`)}})
	}
	for i := range 50 {
		if f := r.ends(fmt.Sprintf("credits-%d", i)); f.Status != wire.Status_COMPLETED {
			t.Errorf("the flow is %v", f)
		}
	}
}

func neverAnswers(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(8, "never")
	policy := &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 1000}
	r.start("never", "never-1", &wire.StepSpec{TimeoutUs: 200_000, Retry: policy})
	first, second := k.task(), k.task()
	if first.Number != 1 || second.Number != 2 || second.Retries != 1 {
		t.Errorf("attempts %v and %v", first, second)
	}
	if f := r.ends("never-1"); f.Status != wire.Status_FAILED || !strings.Contains(f.Error, "timed out after 200ms") {
		t.Errorf("the flow is %v", f)
	}
	// The same with a heartbeat that does not come, though the stream lives.
	r.start("never", "never-2", &wire.StepSpec{HeartbeatUs: 150_000, Retry: policy})
	if f := r.ends("never-2"); f.Status != wire.Status_FAILED || !strings.Contains(f.Error, "no heartbeat for 150ms") {
		t.Errorf("the flow is %v", f)
	}
}

func fallsSilent(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	silent := r.join(1, "silent")
	r.start("silent", "silent-1", nil)
	silent.task()
	silent.hush()
	refusedWith(t, "a worker without a sign of life", silent.end(), codes.DeadlineExceeded, "worker_lost: ")
	k := r.join(1, "silent")
	task := k.task()
	if task.Number != 2 || task.Retries != 0 {
		t.Errorf("the next attempt is %v", task)
	}
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{completing(task, `"heard"`)}})
	if f := r.ends("silent-1"); string(f.Output) != `"heard"` {
		t.Errorf("the flow is %v", f)
	}
}

func speaksOutOfTurn(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	long := helloOf("x")
	long.FlowTypes[0].Steps[0].Name = strings.Repeat("n", 300)
	many := helloOf()
	for i := range 300 {
		many.FlowTypes = append(many.FlowTypes, typeOf(fmt.Sprint("type", i)))
	}
	twice := helloOf("x", "x")
	old := helloOf("x")
	old.Protocol = 0
	for _, c := range []struct {
		name  string
		first *wire.WorkerFrame
		code  codes.Code
		says  string
	}{
		{"no Hello", &wire.WorkerFrame{TaskCredits: 1}, codes.InvalidArgument, "must be a Hello"},
		{"protocol 0", &wire.WorkerFrame{Hello: old}, codes.FailedPrecondition, "newer SDK"},
		{"no types", &wire.WorkerFrame{Hello: helloOf()}, codes.InvalidArgument, "declare 1 to 256 flow types"},
		{"300 types", &wire.WorkerFrame{Hello: many}, codes.InvalidArgument, "declares 300"},
		{"a type twice", &wire.WorkerFrame{Hello: twice}, codes.InvalidArgument, `"x" is declared twice`},
		{"a type of the engine's own", &wire.WorkerFrame{Hello: helloOf("perdure.schedule")}, codes.InvalidArgument, "the server's own"},
		{"a name of 300 bytes", &wire.WorkerFrame{Hello: long}, codes.InvalidArgument, "1 to 256 bytes"},
	} {
		refusedWith(t, c.name, r.open(c.first).end(), c.code, c.says)
	}
	k := r.join(1, "x")
	k.send(&wire.WorkerFrame{Hello: helloOf("x")})
	refusedWith(t, "a second Hello", k.end(), codes.InvalidArgument, "says Hello once")
}

// givesImpossibleResults: the step fails with the reason, and the worker hears it.
func givesImpossibleResults(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(1, "impossible")
	many := &wire.StepResult{}
	for range 5000 {
		many.Next = append(many.Next, &wire.StepSpec{Name: "Then"})
	}
	for i, c := range []struct {
		name, code string
		r          *wire.StepResult
	}{
		{"a step that is not declared", "unknown_step", &wire.StepResult{Next: []*wire.StepSpec{{Name: "Elsewhere"}}}},
		{"an attribute that is not declared", "unknown_attribute", &wire.StepResult{Attributes: []*wire.Attribute{{Name: "total", Value: []byte("1")}}}},
		{"a channel that is not declared", "unknown_channel", &wire.StepResult{Publish: []*wire.Publish{{Channel: "post", Payload: []byte("1")}}}},
		{"a value of the wrong type", "wrong_type", &wire.StepResult{Attributes: []*wire.Attribute{{Name: "sum", Value: []byte(`"one"`)}}}},
		{"a value that is not JSON", "wrong_type", &wire.StepResult{Attributes: []*wire.Attribute{{Name: "sum", Value: []byte(`{`)}}}},
		{"a message of 100 KiB in line", "too_large", &wire.StepResult{Publish: []*wire.Publish{{Channel: "mail", Payload: []byte(`"` + strings.Repeat("x", 100<<10) + `"`)}}}},
		{"an output of 10 MiB in line", "too_large", &wire.StepResult{Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte(`"` + strings.Repeat("x", 10<<20) + `"`)}}},
		{"5000 steps", "limit_reached", many},
		{"a start of the engine's own type", "invalid", &wire.StepResult{Sends: []*wire.Send{{FlowId: "x", Command: &wire.Send_Start{Start: &wire.StartFlow{Type: "perdure.schedule"}}}}}},
		{"a blob that is no name", "invalid", &wire.StepResult{Attributes: []*wire.Attribute{{Name: "text", Blob: "../../etc/passwd"}}}},
	} {
		id := fmt.Sprintf("impossible-%d", i)
		r.start("impossible", id, nil)
		task := k.task()
		c.r.Exec, c.r.Attempt = task.Exec, task.Attempt
		k.send(&wire.WorkerFrame{TaskCredits: 1, Results: []*wire.TaskResult{{FlowId: id, Result: c.r}}})
		f := r.ends(id)
		if f.Status != wire.Status_FAILED || !strings.Contains(f.Error, "the result was refused") {
			t.Errorf("%s: the flow is %s: %.300s", c.name, f.Status, f.Error)
		}
		said, err := k.stream.Recv()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if len(said.Refusals) != 1 || said.Refusals[0].Code != c.code || said.Refusals[0].Message == "" || said.Refusals[0].FlowId != id {
			t.Errorf("%s: the worker hears %.300v, want %s", c.name, said, c.code)
		}
	}
}

func answersRPCsBadly(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	k := r.join(1, "badrpc")
	r.start("badrpc", "badrpc-1", nil)
	k.task()
	ask := func(u *wire.Update) *wire.Answer {
		go func() {
			for {
				f, err := k.stream.Recv()
				if err != nil {
					return
				}
				for _, c := range f.Rpcs {
					k.send(&wire.WorkerFrame{RpcCredits: 1, RpcResults: []*wire.RpcResult{{Call: c.Call, Update: u}, {Call: c.Call, Update: u}, {Call: c.Call + 1000}}})
					return
				}
			}
		}()
		return r.do(&wire.Call{Verb: &wire.Call_Rpc{Rpc: &wire.RpcRequest{FlowId: "badrpc-1", Name: "ask"}}})
	}
	if a := ask(&wire.Update{Output: []byte(`"fine"`)}); string(a.GetRpc().GetOutput()) != `"fine"` {
		t.Errorf("a good answer, twice: %v", a)
	}
	if a := ask(&wire.Update{Attributes: []*wire.Attribute{{Name: "sum", Value: []byte("1")}}}); a.Error.GetCode() != "rpc_failed" {
		t.Errorf("a read that writes: %v", a)
	}
	if a := ask(&wire.Update{Output: []byte(`{`)}); a.Error == nil {
		t.Errorf("an output that is not JSON: %v", a)
	}
	if a := ask(&wire.Update{Output: []byte(`"` + strings.Repeat("x", 1<<20) + `"`)}); a.Error == nil {
		t.Errorf("an output of 1 MiB: %.200v", a)
	}
}

// garble is a codec that sends bytes as they are.
type garble struct{ bytes []byte }

func (garble) Name() string { return "proto" }

func (g garble) Marshal(any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(g.bytes)}, nil
}
func (garble) Unmarshal(mem.BufferSlice, any) error { return nil }

func sendsGarbage(t *testing.T, w *town) {
	noise := make([]byte, 64<<10)
	_, _ = rand.Read(noise) // never fails
	noise[0] = 0x07         // a wire type that there is not
	r := w.raw(t, keyAlpha)
	for _, method := range []string{"/perdure.v1.Workers/Work", "/perdure.v1.Flows/Stream", "/perdure.v1.Flows/Do", "/perdure.v1.Blobs/Put", "/perdure.v1.Blobs/Get"} {
		s, err := r.conn.NewStream(r.ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(garble{noise}))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.SendMsg(&wire.Call{}); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		_ = s.CloseSend()
		refusedWith(t, "garbage to "+method, s.RecvMsg(&wire.Answer{}), codes.Internal, "unmarshal")
	}
	err := r.conn.Invoke(r.ctx, "/perdure.v1.Flows/Nothing", &wire.Call{}, &wire.Answer{})
	refusedWith(t, "a method that there is not", err, codes.Unimplemented, "unknown method")

	for _, begin := range []string{"", "PRI ", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02\x00\x01"} {
		c, err := net.Dial("tcp", w.addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = c.Write(append([]byte(begin), noise...)) // the server may hang up in the middle
		if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("noise behind %q: the server does not hang up: %v", begin, err)
		}
		_ = c.Close()
	}
}

func sendsTooLarge(t *testing.T, w *town) {
	r := w.raw(t, keyAlpha)
	big := garble{make([]byte, 129<<20)}
	for _, method := range []string{"/perdure.v1.Workers/Work", "/perdure.v1.Flows/Stream"} {
		s, err := r.conn.NewStream(r.ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(big))
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SendMsg(&wire.Call{}) // the server may end the stream before all is sent
		refusedWith(t, "129 MiB to "+method, s.RecvMsg(&wire.Answer{}), codes.ResourceExhausted, "larger than max")
	}
}

func hasWrongKey(t *testing.T, w *town) {
	for what, key := range map[string]string{"no key": "", "a wrong key": "wrong-0123456789abcdef"} {
		r := w.raw(t, key)
		says := map[bool]string{true: "an API key is needed", false: "is not known here"}[key == ""]
		refusedWith(t, what+" of a worker", r.open(&wire.WorkerFrame{Hello: helloOf("x")}).end(), codes.Unauthenticated, says)
		_, err := wire.NewFlowsClient(r.conn).Do(r.ctx, &wire.Call{Verb: &wire.Call_Queues{Queues: &wire.QueuesRequest{}}})
		refusedWith(t, what+" of a call", err, codes.Unauthenticated, says)
		put, err := wire.NewBlobsClient(r.conn).Put(r.ctx)
		if err != nil {
			t.Fatal(err)
		}
		_, err = put.CloseAndRecv()
		refusedWith(t, what+" of a blob", err, codes.Unauthenticated, says)

		c := w.client(client.Options{Key: key, Patience: time.Second})
		if _, err := c.Describe(r.ctx, "x"); !isCode(err, "unauthenticated") {
			t.Errorf("%s of a client: %v", what, err)
		}
		worker, err := flow.NewWorker(flow.WorkerOptions{Address: w.addr, Key: key, Logger: slog.New(slog.DiscardHandler)}, pipeline)
		if err != nil {
			t.Fatal(err)
		}
		if err := worker.Run(r.ctx); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s of the SDK's worker: %v", what, err)
		}
	}
}

// panicsAndHangs are faults of a program that uses the SDK.
func panicsAndHangs(t *testing.T, w *town) {
	ctx := within(t, patience)
	for step, says := range map[string]string{
		"Panics": "panic: out of order", "Hangs": "timed out after 300ms", "Astray": `no step "Nowhere"`, "Hoarder": "at most 67108864",
	} {
		id := "odd-" + step
		if _, err := client.Start(ctx, w.alpha, odd, id, flow.To(flow.Ref[flow.None](step), flow.None{})); err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		i, err := w.alpha.Wait(ctx, id, "")
		if err != nil || i.Status != client.Failed || !strings.Contains(i.Error, says) {
			t.Errorf("%s: %v, %v; want an error with %q", step, i, err, says)
		}
	}
	if _, err := client.Start(ctx, w.alpha, odd, "odd-rpc", flow.NoStep, flow.With(amount, 7)); err != nil {
		t.Fatal(err)
	}
	_, err := client.Call(ctx, w.alpha, "odd-rpc", boom, flow.None{})
	if !isCode(err, "rpc_failed") || client.HandlerKind(err) != "panic" {
		t.Errorf("an RPC that panics: %v", err)
	}
	_, err = client.Call(ctx, w.alpha, "odd-rpc", decline, flow.None{})
	if !isCode(err, "rpc_failed") || client.HandlerKind(err) != "no_credit" || !strings.Contains(err.Error(), "you have no credit") {
		t.Errorf("an RPC that declines: %v", err)
	}
	if n, err := client.Get(ctx, w.alpha, "odd-rpc", amount); n != 7 || err != nil {
		t.Errorf("a declined RPC has written %d, %v", n, err)
	}
	short, cancel := context.WithTimeout(ctx, 150*time.Millisecond)
	defer cancel()
	if _, err = client.Call(short, w.alpha, "odd-rpc", dawdle, flow.None{}); !isCode(err, "deadline") {
		t.Errorf("an RPC that dawdles: %v", err)
	}
}

func isCode(err error, code string) bool {
	e, ok := err.(*client.Error)
	return ok && e.Code == code
}
