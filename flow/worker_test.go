package flow_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

const patience = 20 * time.Second

// server is a Perdure server that a test plays.
type server struct {
	wire.UnimplementedWorkersServer
	wire.UnimplementedFlowsServer
	wire.UnimplementedBlobsServer
	t       testing.TB
	lis     *bufconn.Listener
	links   chan *link
	refuse  error // given before it serves
	welcome *wire.Welcome

	mu    sync.Mutex
	blobs map[string][]byte // guarded by mu
	deaf  chan struct{}     // guarded by mu; nothing of the first stream is read until it is closed; nil = all is
}

// link is one worker's stream, as the server sees it.
type link struct {
	t      testing.TB
	stream grpc.BidiStreamingServer[wire.WorkerFrame, wire.ServerFrame]
	frames chan *wire.WorkerFrame // what came; closed at the end
	end    chan error             // ends the stream
	key    string
	hello  *wire.Hello

	tasks, rpcs int // credits
	results     []*wire.TaskResult
	rpcResults  []*wire.RpcResult
	beats       []*wire.Heartbeat
	shown       map[uint64]string
	drained     bool
	noted       int // frames
}

func newServer(t testing.TB) *server {
	s := &server{t: t, lis: bufconn.Listen(1 << 20), links: make(chan *link, 10), blobs: map[string][]byte{},
		welcome: &wire.Welcome{Protocol: 1, Server: "fake", MaxPayload: 1 << 10, HeartbeatUs: 300_000}}
	g := grpc.NewServer(grpc.ForceServerCodecV2(mux.Codec{}))
	wire.RegisterWorkersServer(g, s)
	wire.RegisterFlowsServer(g, s)
	wire.RegisterBlobsServer(g, s)
	go g.Serve(s.lis)
	t.Cleanup(g.Stop)
	return s
}

func keyOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(md.Get("authorization"), ",")
}

func (s *server) Work(stream grpc.BidiStreamingServer[wire.WorkerFrame, wire.ServerFrame]) error {
	if s.refuse != nil {
		return s.refuse
	}
	f, err := stream.Recv()
	if err != nil {
		return err
	}
	l := &link{t: s.t, stream: stream, frames: make(chan *wire.WorkerFrame, 1000), end: make(chan error, 1), key: keyOf(stream.Context()),
		hello: f.Hello, shown: map[uint64]string{}}
	if err := stream.Send(&wire.ServerFrame{Welcome: s.welcome}); err != nil {
		return err
	}
	s.mu.Lock()
	deaf := s.deaf
	s.deaf = nil
	s.mu.Unlock()
	go func() {
		defer close(l.frames)
		if deaf != nil {
			<-deaf
		}
		for {
			f, err := stream.Recv()
			if err != nil {
				return
			}
			l.frames <- f
		}
	}()
	s.links <- l
	select {
	case err := <-l.end:
		return err
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

func (s *server) Do(ctx context.Context, c *wire.Call) (*wire.Answer, error) {
	names := c.GetGetAttributes().GetNames()
	if keyOf(ctx) != "Bearer k" || len(names) != 1 {
		return nil, grpcstatus.Error(codes.Unauthenticated, "no key")
	}
	return &wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{
		Attributes: []*wire.Attribute{{Name: names[0], Value: []byte(`"of the server"`)}}}}}, nil
}

func (s *server) Put(stream grpc.ClientStreamingServer[wire.Chunk, wire.BlobRef]) error {
	var data []byte
	id := ""
	for {
		c, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if c.FlowId != "" {
			id = c.FlowId
		}
		data = append(data, c.Data...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := fmt.Sprintf("%s#%d", id, len(s.blobs))
	s.blobs[name] = data
	return stream.SendAndClose(&wire.BlobRef{FlowId: id, Blob: name, Size: uint64(len(data))})
}

func (s *server) Get(r *wire.BlobRef, stream grpc.ServerStreamingServer[wire.Chunk]) error {
	s.mu.Lock()
	data, ok := s.blobs[r.Blob]
	s.mu.Unlock()
	if !ok {
		return grpcstatus.Error(codes.NotFound, "no such blob")
	}
	for len(data) > 0 {
		n := min(len(data), 1000)
		if err := stream.Send(&wire.Chunk{Data: data[:n]}); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// accept waits for a worker.
func (s *server) accept() *link {
	s.t.Helper()
	select {
	case l := <-s.links:
		return l
	case <-time.After(patience):
		s.t.Fatal("no worker came")
		return nil
	}
}

func (l *link) send(f *wire.ServerFrame) {
	l.t.Helper()
	l.tasks -= len(f.Tasks)
	l.rpcs -= len(f.Rpcs)
	if err := l.stream.Send(f); err != nil {
		l.t.Error(err)
	}
}

// until reads frames until ok.
func (l *link) until(what string, ok func() bool) {
	l.t.Helper()
	deadline := time.After(patience)
	for !ok() {
		select {
		case f, open := <-l.frames:
			if !open {
				l.t.Fatalf("the stream ended before %s", what)
			}
			l.note(f)
		case <-deadline:
			l.t.Fatalf("never saw %s", what)
		}
	}
}

func (l *link) note(f *wire.WorkerFrame) {
	l.noted++
	l.tasks += int(f.TaskCredits)
	l.rpcs += int(f.RpcCredits)
	l.results = append(l.results, f.Results...)
	l.rpcResults = append(l.rpcResults, f.RpcResults...)
	l.beats = append(l.beats, f.Heartbeats...)
	for _, o := range f.Outputs {
		l.shown[o.Exec] += o.Text
	}
	l.drained = l.drained || f.Drain
}

func (l *link) credits(tasks, rpcs int) {
	l.t.Helper()
	l.until(fmt.Sprintf("%d and %d credits", tasks, rpcs), func() bool { return l.tasks == tasks && l.rpcs == rpcs })
}

// joined waits until the worker uses a further stream.
func (l *link) joined() {
	l.t.Helper()
	l.until("a frame", func() bool { return l.noted > 0 })
}

// running is a worker that runs.
type running struct {
	t    testing.TB
	stop context.CancelFunc
	done chan error
}

func start(t testing.TB, s *server, o flow.WorkerOptions, flows ...*flow.Flow) *running {
	return startAt(t, s, o, func(*flow.Worker) {}, flows...)
}

func startAt(t testing.TB, s *server, o flow.WorkerOptions, tune func(*flow.Worker), flows ...*flow.Flow) *running {
	o.Address, o.Dialer = "fake", func(ctx context.Context, _ string) (net.Conn, error) { return s.lis.DialContext(ctx) }
	return run(t, o, tune, flows...)
}

// startReal runs a worker of a real server.
func startReal(t testing.TB, address string, tune func(*flow.Worker), flows ...*flow.Flow) *running {
	return run(t, flow.WorkerOptions{Address: address}, tune, flows...)
}

func run(t testing.TB, o flow.WorkerOptions, tune func(*flow.Worker), flows ...*flow.Flow) *running {
	o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	w, err := flow.NewWorker(o, flows...)
	if err != nil {
		t.Fatal(err)
	}
	tune(w)
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: t, stop: cancel, done: make(chan error, 1)}
	go func() { r.done <- w.Run(ctx) }()
	t.Cleanup(cancel)
	return r
}

func (r *running) ended() error {
	r.t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(patience):
		r.t.Fatal("the worker does not end")
		return nil
	}
}

// blocks is a flow of a step that waits for the test, and says how it went.
type blocks struct {
	began chan *flow.Context
	goOn  chan string // what the step completes with; "err" = an error
	ended chan error  // the context's cause
}

func newBlocks() (*blocks, *flow.Flow) {
	b := &blocks{began: make(chan *flow.Context, 100), goOn: make(chan string, 100), ended: make(chan error, 100)}
	f := flow.Define("f", flow.Step(flow.StepFunc("block", func(ctx *flow.Context, in string) (flow.Decision, error) {
		b.began <- ctx
		select {
		case out := <-b.goOn:
			return flow.Complete(out), nil
		case <-ctx.Done():
			err := context.Cause(ctx)
			b.ended <- err
			status1.Set(ctx, "cleaned up")
			if in == "stubborn" {
				return flow.DeadEnd(), nil
			}
			return flow.Decision{}, err
		}
	})), flow.NewRPC("read", func(ctx *flow.ReadContext, in string) (string, error) {
		s, err := status1.Get(ctx)
		if err != nil {
			return "", err
		}
		if in == "block" {
			b.began <- nil
			<-ctx.Done()
			return "", context.Cause(ctx)
		}
		return in + s, nil
	}), status1)
	return b, f
}

var status1 = flow.NewAttribute[string]("status")

func blockTask(exec uint64, in string) *wire.Task {
	return &wire.Task{FlowId: "f1", FlowType: "f", RunId: "r1", Exec: exec, Attempt: &wire.AttemptID{Lsn: exec}, Number: 1, Step: "block",
		Input: []byte(`"` + in + `"`)}
}

func (b *blocks) wait(t testing.TB) *flow.Context {
	t.Helper()
	select {
	case c := <-b.began:
		return c
	case <-time.After(patience):
		t.Fatal("no handler began")
		return nil
	}
}

func (b *blocks) cause(t testing.TB) error {
	t.Helper()
	select {
	case err := <-b.ended:
		return err
	case <-time.After(patience):
		t.Fatal("no handler was told to stop")
		return nil
	}
}

func TestWorkerRunsTasksAndCalls(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	w := start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2, Key: "k", ID: "w1", Build: "b1"}, f)
	l := s.accept()
	if l.key != "Bearer k" || l.hello.WorkerId != "w1" || l.hello.Build != "b1" || l.hello.Protocol != 1 || l.hello.FlowTypes[0].Name != "f" {
		t.Errorf("hello is %v, key %q", l.hello, l.key)
	}
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, ""), blockTask(2, ""), blockTask(3, "")},
		Rpcs: []*wire.RpcTask{{Call: 9, FlowId: "f1", FlowType: "f", Name: "read", Input: []byte(`"x "`),
			Attributes: []*wire.Attribute{{Name: "status", Size: 5000}}}}})
	for range 3 {
		ctx := b.wait(t)
		if _, there := metadata.FromOutgoingContext(ctx); there {
			t.Error("a handler's context carries the worker's key")
		}
	}
	l.until("the RPC's result", func() bool { return len(l.rpcResults) == 1 })
	if r := l.rpcResults[0]; r.Call != 9 || string(r.Update.GetOutput()) != `"x of the server"` {
		t.Errorf("got %v", r)
	}
	l.credits(0, 2)
	for range 3 {
		b.goOn <- "done"
	}
	l.until("3 results", func() bool { return len(l.results) == 3 })
	if r := l.results[0]; r.FlowId != "f1" || string(r.Result.Close.GetOutput()) != `"done"` || r.Result.Attempt.Lsn != r.Result.Exec {
		t.Errorf("got %v", r)
	}
	l.credits(3, 2)
	w.stop()
	l.until("drain", func() bool { return l.drained })
	l.end <- nil
	if err := w.ended(); err != nil {
		t.Error(err)
	}
}

func TestWorkerCancels(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2}, f)
	l := s.accept()
	l.credits(3, 2)
	cancelled := blockTask(5, "")
	cancelled.Cancelled, cancelled.CancelReason = true, "before"
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{cancelled}})
	b.wait(t)
	var c *flow.CancelledError
	if err := b.cause(t); !errors.As(err, &c) || c.Reason != "before" || !errors.Is(err, context.Canceled) {
		t.Errorf("cause is %v", err)
	}
	l.until("its result", func() bool { return len(l.results) == 1 })
	if r := l.results[0].Result; r.Retry != nil || r.Close != nil || len(r.Attributes) != 0 {
		t.Errorf("got %v", r)
	}

	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, "stubborn"), blockTask(2, "")}})
	b.wait(t)
	b.wait(t)
	l.send(&wire.ServerFrame{Cancels: []*wire.CancelTask{
		{FlowId: "f1", Exec: 1, Attempt: &wire.AttemptID{Lsn: 77}, Reason: "not this attempt"},
		{FlowId: "f1", Exec: 8, Attempt: &wire.AttemptID{Lsn: 8}, Reason: "nobody"},
		{FlowId: "f1", Exec: 1, Attempt: &wire.AttemptID{Lsn: 1}, Reason: "enough"},
	}})
	if err := b.cause(t); !errors.As(err, &c) || c.Reason != "enough" {
		t.Errorf("cause is %v", err)
	}
	l.until("its result", func() bool { return len(l.results) == 2 })
	if r := l.results[1].Result; r.Exec != 1 || r.Retry != nil || len(r.Attributes) != 1 {
		t.Errorf("a handler that cleaned up gave %v", r)
	}
	l.send(&wire.ServerFrame{Cancels: []*wire.CancelTask{{FlowId: "f1", Exec: 2, Attempt: &wire.AttemptID{Lsn: 2}, Forget: true}}})
	if err := b.cause(t); !errors.Is(err, flow.ErrLost) {
		t.Errorf("cause is %v", err)
	}
	l.credits(3, 2)
	if len(l.results) != 2 {
		t.Errorf("a forgotten attempt was answered: %v", l.results)
	}

	l.send(&wire.ServerFrame{Rpcs: []*wire.RpcTask{{Call: 4, FlowType: "f", Name: "read", Input: []byte(`"block"`)}}})
	b.wait(t)
	l.send(&wire.ServerFrame{Cancels: []*wire.CancelTask{{Call: 4, Reason: "the caller left"}}})
	l.until("its result", func() bool { return len(l.rpcResults) == 1 })
	if r := l.rpcResults[0]; r.Call != 4 || !strings.Contains(r.Error, "the caller left") {
		t.Errorf("got %v", r)
	}
}

func TestWorkerGivesWayToANewAttempt(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2}, f)
	l := s.accept()
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, "")}})
	b.wait(t)
	second := blockTask(1, "")
	second.Attempt = &wire.AttemptID{Lsn: 100}
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{second}})
	b.wait(t)
	if err := b.cause(t); !errors.Is(err, flow.ErrLost) {
		t.Errorf("cause is %v", err)
	}
	b.goOn <- "second"
	l.credits(3, 2)
	if len(l.results) != 1 || l.results[0].Result.Attempt.Lsn != 100 {
		t.Errorf("got %v", l.results)
	}
}

func TestWorkerConnectsAgain(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	w := start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2}, f)
	l := s.accept()
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, "")}})
	b.wait(t)
	l.end <- grpcstatus.Error(codes.Unavailable, "restart")
	if err := b.cause(t); !errors.Is(err, flow.ErrLost) {
		t.Errorf("cause is %v", err)
	}
	l = s.accept()
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, "")}})
	b.wait(t)
	b.goOn <- "again"
	l.until("the result", func() bool { return len(l.results) == 1 })

	// A server that drains is left when all is answered.
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Drain: true, Tasks: []*wire.Task{blockTask(2, "")}})
	b.wait(t)
	l.until("drain", func() bool { return l.drained })
	b.goOn <- "last"
	l.until("the result", func() bool { return len(l.results) == 2 })
	l.end <- nil
	l = s.accept()
	l.credits(3, 2)
	w.stop()
	l.until("drain", func() bool { return l.drained })
	l.end <- nil
	if err := w.ended(); err != nil {
		t.Error(err)
	}
}

func TestWorkerDrainTakesNoLongerThanAllowed(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	w := start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2, DrainTimeout: 10 * time.Millisecond}, f)
	l := s.accept()
	l.credits(3, 2)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, "")}})
	b.wait(t)
	w.stop()
	if err := b.cause(t); !errors.Is(err, flow.ErrStopping) {
		t.Errorf("cause is %v", err)
	}
	if err := w.ended(); err != nil {
		t.Error(err)
	}
}

func TestWorkerTimeout(t *testing.T) {
	s := newServer(t)
	b, f := newBlocks()
	start(t, s, flow.WorkerOptions{Concurrency: 3, RPCConcurrency: 2}, f)
	l := s.accept()
	l.credits(3, 2)
	task := blockTask(1, "")
	task.TimeoutUs = 1000
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{task}})
	b.wait(t)
	var timeout *flow.TimeoutError
	if err := b.cause(t); !errors.As(err, &timeout) || timeout.After != time.Millisecond || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cause is %v", err)
	}
	l.until("the result", func() bool { return len(l.results) == 1 })
	if r := l.results[0].Result.Retry; r.GetKind() != "timeout" || !strings.Contains(r.Error, "longer than 1ms") {
		t.Errorf("got %v", r)
	}
}

func TestWorkerIsRefused(t *testing.T) {
	for _, code := range []codes.Code{codes.Unauthenticated, codes.PermissionDenied, codes.InvalidArgument} {
		s := newServer(t)
		s.refuse = grpcstatus.Error(code, "not you")
		_, f := newBlocks()
		if err := start(t, s, flow.WorkerOptions{}, f).ended(); err == nil || !strings.Contains(err.Error(), "not you") {
			t.Errorf("got %v", err)
		}
	}
	for _, w := range []*wire.Welcome{{Protocol: 2}, nil} {
		s := newServer(t)
		s.welcome = w
		_, f := newBlocks()
		if err := start(t, s, flow.WorkerOptions{}, f).ended(); err == nil || !strings.Contains(err.Error(), "breaks the protocol") {
			t.Errorf("got %v", err)
		}
	}
	s := newServer(t)
	_, f := newBlocks()
	w := start(t, s, flow.WorkerOptions{Concurrency: 1, RPCConcurrency: 1}, f)
	l := s.accept()
	l.credits(1, 1)
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{blockTask(1, ""), blockTask(2, "")}})
	if err := w.ended(); err == nil || !strings.Contains(err.Error(), "2 of 1 steps") {
		t.Errorf("got %v", err)
	}
}

func TestWorkerIsStoppedBeforeItConnects(t *testing.T) {
	s := newServer(t)
	s.refuse = grpcstatus.Error(codes.Unavailable, "not yet")
	_, f := newBlocks()
	w := start(t, s, flow.WorkerOptions{}, f)
	w.stop()
	if err := w.ended(); err != nil {
		t.Error(err)
	}
}

func TestWorkerMistakes(t *testing.T) {
	_, f := newBlocks()
	if _, err := flow.NewWorker(flow.WorkerOptions{}); err == nil {
		t.Error("a worker without flows")
	}
	if _, err := flow.NewWorker(flow.WorkerOptions{}, f, f); err == nil {
		t.Error("a flow twice")
	}
	if _, err := flow.NewWorker(flow.WorkerOptions{Concurrency: -1}, f); err == nil {
		t.Error("no concurrency")
	}
	s := newServer(t)
	w, err := flow.NewWorker(flow.WorkerOptions{Address: "fake", Dialer: func(ctx context.Context, _ string) (net.Conn, error) { return s.lis.DialContext(ctx) }}, f)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.Run(ctx); err != nil {
		t.Error(err)
	}
	if err := w.Run(ctx); err == nil {
		t.Error("a second Run")
	}
}

func TestWorkerHeartbeatsOutputsAndBlobs(t *testing.T) {
	s := newServer(t)
	goOn := make(chan bool)
	text := strings.Repeat("0123456789", 300_000) // more than waits for the network at once
	f := flow.Define("f", flow.Step(flow.StepFunc("busy", func(ctx *flow.Context, in string) (flow.Decision, error) {
		for i := range 1000 {
			if err := ctx.Heartbeat(i); err != nil {
				return flow.Decision{}, err
			}
		}
		<-goOn
		if _, err := io.WriteString(ctx.Output(), text); err != nil {
			return flow.Decision{}, err
		}
		doc, err := document.Get(ctx)
		if err != nil {
			return flow.Decision{}, err
		}
		document.Set(ctx, append(doc, in...))
		return flow.DeadEnd(), nil
	})), document)
	start(t, s, flow.WorkerOptions{Concurrency: 1, RPCConcurrency: 1}, f)
	l := s.accept()
	l.credits(1, 1)
	s.mu.Lock()
	s.blobs["doc"] = encode(t, make([]byte, 10_000))
	s.blobs["in"] = encode(t, strings.Repeat("i", 5_000))
	s.mu.Unlock()
	l.send(&wire.ServerFrame{Tasks: []*wire.Task{{FlowId: "f1", FlowType: "f", RunId: "r", Exec: 3, Attempt: &wire.AttemptID{Lsn: 1}, Step: "busy",
		InputBlob: "in", HeartbeatUs: 1e6, Attributes: []*wire.Attribute{{Name: "document", Blob: "doc", Size: 13338}}}}})
	l.until("the last checkpoint", func() bool { return len(l.beats) > 0 && string(l.beats[len(l.beats)-1].Checkpoint) == "999" })
	if len(l.beats) > 10 {
		t.Errorf("%d heartbeats were sent for 1000", len(l.beats))
	}
	goOn <- true
	l.until("the result", func() bool { return len(l.results) == 1 })
	if l.shown[3] != text {
		t.Errorf("%d bytes of output came, want %d", len(l.shown[3]), len(text))
	}
	a := l.results[0].Result.Attributes
	if len(a) != 1 || a[0].Blob == "" || a[0].Value != nil {
		t.Fatalf("got %v", l.results)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	got, err := flow.Decode[[]byte](s.blobs[a[0].Blob])
	if err != nil || len(got) != 15_000 || uint64(len(s.blobs[a[0].Blob])) != a[0].Size {
		t.Errorf("stored %d bytes, %v", len(got), err)
	}
}

// TestWorkerKeepsAlive: something is sent although nothing happens.
func TestWorkerKeepsAlive(t *testing.T) {
	s := newServer(t)
	_, f := newBlocks()
	start(t, s, flow.WorkerOptions{}, f)
	l := s.accept()
	l.credits(256, 64)
	n := 0
	l.until("three frames", func() bool { n++; return n > 3 })
}
