package grpcapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// worker is a client's side of a Work stream.
type worker struct {
	w *world
	s wire.Workers_WorkClient
}

func hello() *wire.Hello {
	return &wire.Hello{Protocol: 3, WorkerId: "w", Build: "1", FlowTypes: []*wire.FlowType{{Name: "t", Steps: []*wire.StepType{{Name: "s"}}, Rpcs: []*wire.RpcType{{Name: "read"}}}}}
}

func (w *world) work(first *wire.WorkerFrame) *worker {
	w.t.Helper()
	s, err := wire.NewWorkersClient(w.conn).Work(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	k := &worker{w, s}
	k.send(first)
	return k
}

func (k *worker) send(f *wire.WorkerFrame) {
	k.w.t.Helper()
	if err := k.s.Send(f); err != nil && !errors.Is(err, io.EOF) {
		k.w.t.Fatal(err)
	}
}

// recv gives the next frame.
func (k *worker) recv() *wire.ServerFrame {
	k.w.t.Helper()
	f, err := k.s.Recv()
	if err != nil {
		k.w.t.Fatal(err)
	}
	return f
}

// connect brings a worker with room for one task and one RPC.
func (w *world) connect() *worker {
	w.t.Helper()
	k := w.work(&wire.WorkerFrame{Hello: hello(), TaskCredits: 1, RpcCredits: 1})
	if f := k.recv(); f.Welcome.GetProtocol() != 1 || f.Welcome.HeartbeatUs == 0 {
		w.t.Fatalf("first frame %v", f)
	}
	return k
}

// hand dispatches a step as a partition does, when there is a slot, and gives
// the task as the worker got it.
func (k *worker) hand(flow string, lsn uint64) *wire.Task {
	k.w.t.Helper()
	d := k.w.dispatch
	if d.Reserve("default/f/"+flow, "t", 1) != 1 {
		k.w.t.Fatal("the worker has no slot")
	}
	d.Dispatch(&partition.Work{Task: &core.Task{FlowID: "default/f/" + flow, FlowType: "t", RunID: "r", Exec: 1, Name: "s", Number: 1,
		Attempt: core.Attempt{Epoch: 1, LSN: lsn}, Spec: &wire.StepSpec{Name: "s"}}})
	f := k.recv()
	if len(f.Tasks) != 1 || f.Tasks[0].FlowId != flow || f.Tasks[0].Attempt.Lsn != lsn {
		k.w.t.Fatalf("frame %v", f)
	}
	return f.Tasks[0]
}

func result(t *wire.Task) *wire.TaskResult {
	return &wire.TaskResult{FlowId: t.FlowId, Result: &wire.StepResult{Exec: t.Exec, Attempt: t.Attempt}}
}

func TestWork(t *testing.T) {
	w := newWorld(t, nil)
	k := w.connect()
	task := k.hand("f", 7)
	wrong := result(task)
	wrong.Result.Attempt = &wire.AttemptID{Epoch: 1, Lsn: 6}
	k.send(&wire.WorkerFrame{TaskCredits: 1, Results: []*wire.TaskResult{wrong, result(task), result(task)}})
	p := w.proposal()
	if r := p.Entry.GetStepResult(); p.Entry.FlowId != "default/f/f" || r.GetExec() != 1 || r.Attempt.Lsn != 7 {
		t.Fatalf("proposed %v", p.Entry)
	}
	p.Reply(core.Reply{}, &core.Error{Code: core.LimitReached, Message: "too much"})
	p = w.proposal()
	if r := p.Entry.GetStepResult(); !r.GetRetry().GetPermanent() || r.Close.GetHow() != wire.Close_FAIL {
		t.Fatalf("proposed %v", p.Entry)
	}
	p.Reply(core.Reply{}, nil)
	if f := k.recv(); len(f.Refusals) != 1 || f.Refusals[0].Code != "limit_reached" || f.Refusals[0].Message != "too much" {
		t.Errorf("frame %v", f)
	}
	k.hand("g", 8)
	if n := len(w.proposed); n != 0 || w.dispatch.Stats().Late != 2 {
		t.Errorf("%d proposed, stats %+v", n, w.dispatch.Stats())
	}
	if i := w.dispatch.Workers("default"); len(i) != 1 || i[0].Address == "" || i[0].Build != "1" || i[0].Running != 1 {
		t.Errorf("workers %v", i)
	}
	answered := make(chan *wire.RpcResult, 1)
	w.dispatch.Call("default/f/f", "t", &wire.RpcTask{Name: "read"}, time.Minute, func(r *wire.RpcResult, err error) { answered <- r })
	f := k.recv()
	k.send(&wire.WorkerFrame{RpcResults: []*wire.RpcResult{{Call: f.Rpcs[0].Call, Update: &wire.Update{Output: []byte("1")}}}})
	if r := <-answered; string(r.GetUpdate().GetOutput()) != "1" {
		t.Errorf("answer %v", r)
	}
}

func TestWorkersThatAreRefused(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxStreams = 1 })
	ended := func(what string, k *worker, code codes.Code, text string) {
		t.Helper()
		var err error
		for err == nil {
			_, err = k.s.Recv()
		}
		wantStatus(t, what, err, code, text)
	}
	ended("no hello", w.work(&wire.WorkerFrame{TaskCredits: 1}), codes.InvalidArgument, "must be a Hello")
	old := hello()
	old.Protocol = 0
	ended("old", w.work(&wire.WorkerFrame{Hello: old}), codes.FailedPrecondition, "unsupported_protocol")
	k := w.connect()
	k.send(&wire.WorkerFrame{Hello: hello()})
	ended("hello twice", k, codes.InvalidArgument, "Hello once")
	k = w.connect()
	ended("second worker", w.work(&wire.WorkerFrame{Hello: hello()}), codes.ResourceExhausted, "as many workers")
	k.send(&wire.WorkerFrame{TaskCredits: 1 << 30})
	ended("credits", k, codes.ResourceExhausted, "flood")
	k = w.connect()
	var results []*wire.TaskResult
	for range 1000 {
		results = append(results, &wire.TaskResult{FlowId: "f", Result: &wire.StepResult{Exec: 1}})
	}
	k.send(&wire.WorkerFrame{Results: results})
	ended("results", k, codes.ResourceExhausted, "flood: the worker gave 1000 answers to 0 tasks")
	w.dispatch.Drain()
	ended("draining", w.work(&wire.WorkerFrame{Hello: hello()}), codes.Unavailable, "the server stops")
	w.server.Drain()
	ended("no new streams", w.work(&wire.WorkerFrame{Hello: hello()}), codes.Unavailable, "the server stops")
}

func TestGarbageEndsOnlyItsStream(t *testing.T) {
	w := newWorld(t, nil)
	s, err := w.conn.NewStream(w.ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, wire.Workers_Work_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	// An Answers with a flow ID where a WorkerFrame has its Hello.
	if err := s.SendMsg(&wire.Calls{Calls: []*wire.Call{describe(1, strings.Repeat("\xff", 100))}}); err != nil {
		t.Fatal(err)
	}
	err = s.RecvMsg(&wire.ServerFrame{})
	if err == nil {
		t.Fatal("garbage was taken")
	}
	w.connect()
}

func TestLostWorkerIsRedispatched(t *testing.T) {
	w := newWorld(t, nil)
	ctx, cancel := context.WithCancel(w.ctx)
	s, err := wire.NewWorkersClient(w.conn).Work(ctx)
	if err != nil {
		t.Fatal(err)
	}
	k := &worker{w, s}
	k.send(&wire.WorkerFrame{Hello: hello(), TaskCredits: 1})
	k.recv()
	task := k.hand("f", 7)
	cancel()
	p := w.proposal()
	if r := p.Entry.GetRedispatch(); r.GetExec() != task.Exec || !r.Attempt.EqualVT(task.Attempt) || !strings.HasPrefix(r.Reason, "worker lost: w: ") {
		t.Fatalf("proposed %v", p.Entry)
	}
}

// More than may wait for one worker is held back until it reads.
func TestBurstOfLargeTasks(t *testing.T) {
	w := newWorld(t, nil)
	k := w.work(&wire.WorkerFrame{Hello: hello(), TaskCredits: 100})
	k.recv()
	input := make([]byte, testUnsent/16)
	const n = 40
	for i := range n {
		id := fmt.Sprint("default/f/", i)
		if w.dispatch.Reserve(id, "t", 1) != 1 {
			w.dispatch.Queue(core.Effect{FlowID: id, FlowType: "t", Step: "s", Exec: 1})
			continue
		}
		w.dispatch.Dispatch(&partition.Work{Task: &core.Task{FlowID: id, FlowType: "t", Exec: 1, Name: "s", Input: input, Spec: &wire.StepSpec{}}})
	}
	frames := make(chan *wire.ServerFrame)
	go func() {
		for {
			f, err := k.s.Recv()
			if err != nil {
				close(frames)
				return
			}
			frames <- f
		}
	}()
	for started := 0; started < n; {
		select {
		case p := <-w.proposed: // the start of one that was queued
			id := p.Entry.FlowId
			w.dispatch.Reserve(id, "t", 1)
			w.dispatch.Dispatch(&partition.Work{Task: &core.Task{FlowID: id, FlowType: "t", Exec: 1, Name: "s", Input: input, Spec: &wire.StepSpec{}}})
			p.Reply(core.Reply{}, nil)
		case f, ok := <-frames:
			if !ok {
				t.Fatal("the stream ended")
			}
			started += len(f.Tasks)
			if len(f.Tasks)*len(input) > testUnsent+len(input) {
				t.Errorf("%d tasks in a frame", len(f.Tasks))
			}
		}
	}
	go func() {
		for range frames { // so that the receiver ends
		}
	}()
}

// A worker that ends its side is lost too, with what it has.
func TestHalfClosedWorkerIsLost(t *testing.T) {
	w := newWorld(t, nil)
	k := w.connect()
	k.hand("f", 7)
	if err := k.s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if p := w.proposal(); p.Entry.GetRedispatch() == nil {
		t.Fatalf("proposed %v", p.Entry)
	}
	if _, err := k.s.Recv(); err != io.EOF {
		t.Errorf("the end: %v", err)
	}
}

func TestWorkerDrains(t *testing.T) {
	w := newWorld(t, nil)
	k := w.connect()
	task := k.hand("f", 7)
	k.send(&wire.WorkerFrame{Drain: true, TaskCredits: 5})
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{result(task)}})
	if _, err := k.s.Recv(); err != io.EOF {
		t.Errorf("the end: %v", err)
	}
	if r := w.proposal().Entry.GetStepResult(); r.GetExec() != task.Exec {
		t.Errorf("proposed %v", r)
	}
}

func TestServerDrains(t *testing.T) {
	w := newWorld(t, nil)
	k := w.connect()
	task := k.hand("f", 7)
	w.dispatch.Drain()
	w.server.Drain()
	if f := k.recv(); !f.Drain {
		t.Errorf("frame %v", f)
	}
	k.send(&wire.WorkerFrame{Results: []*wire.TaskResult{result(task)}})
	w.proposal().Reply(core.Reply{}, nil)
	w.dispatch.Stop()
	_, err := k.s.Recv()
	wantStatus(t, "the end", err, codes.Unavailable, "the server stops: connect again")
}

// handClock fires timers when it is told to.
type handClock struct {
	env.SystemClock
	mu     sync.Mutex
	timers map[time.Duration][]func() // guarded by mu; the last ones set
	set    chan time.Duration
}

// AfterFunc implements env.Clock.
func (c *handClock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	c.timers[d] = append(c.timers[d], f)
	c.mu.Unlock()
	c.set <- d
	return never{}
}

func (c *handClock) fire(d time.Duration) {
	c.mu.Lock()
	fs := c.timers[d]
	delete(c.timers, d)
	c.mu.Unlock()
	for _, f := range fs {
		f()
	}
}

type never struct{}

// Stop implements env.Timer.
func (never) Stop() bool { return true }

func TestWorkerThatSaysNothing(t *testing.T) {
	clock := &handClock{timers: map[time.Duration][]func(){}, set: make(chan time.Duration, 100)}
	w := newWorld(t, func(c *Config) { c.Clock = clock })
	s, err := wire.NewWorkersClient(w.conn).Work(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for d := range clock.set {
		if d == helloTimeout {
			break
		}
	}
	clock.fire(helloTimeout)
	_, err = s.Recv()
	wantStatus(t, "silent", err, codes.InvalidArgument, "sent no Hello within 10s")
}

// Many workers and a server that ends in the midst of it: for the race detector.
func TestManyWorkersAtOnce(t *testing.T) {
	w := newWorld(t, nil)
	stop := make(chan struct{})
	var proposals sync.WaitGroup
	proposals.Go(func() {
		for {
			select {
			case p := <-w.proposed:
				if p.Reply != nil {
					p.Reply(core.Reply{}, nil)
				}
			case <-stop:
				return
			}
		}
	})
	var workers sync.WaitGroup
	for i := range 8 {
		workers.Go(func() {
			s, err := wire.NewWorkersClient(w.conn).Work(w.ctx)
			if err != nil {
				return
			}
			_ = s.Send(&wire.WorkerFrame{Hello: hello(), TaskCredits: 4, RpcCredits: 4})
			for n := 0; n < 200 || i < 4; n++ {
				f, err := s.Recv()
				if err != nil {
					return
				}
				out := &wire.WorkerFrame{}
				for _, task := range f.Tasks {
					out.Results = append(out.Results, result(task))
					out.TaskCredits++
				}
				for _, c := range f.Rpcs {
					out.RpcResults = append(out.RpcResults, &wire.RpcResult{Call: c.Call})
					out.RpcCredits++
				}
				_ = s.Send(out)
			}
			_ = s.CloseSend()
		})
	}
	var work sync.WaitGroup
	for g := range 2 {
		work.Go(func() {
			for i := range 2000 {
				id := fmt.Sprint("default/f/", g, "-", i)
				if n := w.dispatch.Reserve(id, "t", 2); n == 1 {
					w.dispatch.Dispatch(&partition.Work{Task: &core.Task{FlowID: id, FlowType: "t", Exec: 1, Name: "s", Attempt: core.Attempt{LSN: uint64(i)}, Spec: &wire.StepSpec{}}})
				} else {
					w.dispatch.Release(id, "t", n)
					w.dispatch.Queue(core.Effect{FlowID: id, FlowType: "t", Step: "s", Exec: 1, Key: fmt.Sprint(i % 3), KeyLimit: 2})
				}
				w.dispatch.Call(id, "t", &wire.RpcTask{Name: "read"}, time.Second, func(*wire.RpcResult, error) {})
				if i%100 == 0 {
					w.dispatch.Queues("default")
					w.dispatch.Stats()
				}
			}
		})
	}
	work.Wait()
	w.dispatch.Drain()
	w.dispatch.Stop()
	workers.Wait()
	close(stop)
	proposals.Wait()
}

// certified gives both sides of TLS with a name of its own.
func certified(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"perdure.test"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}}, &tls.Config{RootCAs: pool, ServerName: "perdure.test"}
}

func TestTLS(t *testing.T) {
	w := newWorld(t, nil)
	cfg := w.server.cfg
	var trusting *tls.Config
	cfg.TLS, trusting = certified(t)
	s := NewServer(cfg)
	l := bufconn.Listen(1 << 20)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn := w.dial(l, grpc.WithTransportCredentials(credentials.NewTLS(trusting)))
	if a, err := wire.NewFlowsClient(conn).Do(w.ctx, describe(1, "f")); err != nil || a.GetFlow() == nil {
		t.Errorf("%v %v", a, err)
	}
	_ = conn.Close()
	s.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
