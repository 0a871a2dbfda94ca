package grpcapi

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/perdure-dev/perdure/internal/wire"
)

// held is a service that answers when it is told to; begun tells of each call.
type held struct {
	begun   chan uint64
	answers chan func()
	ended   chan uint64 // calls whose context ended
}

func (w *world) hold() *held {
	h := &held{begun: make(chan uint64, 100), answers: make(chan func(), 100), ended: make(chan uint64, 100)}
	w.flows.set(func(ctx context.Context, _ string, c *wire.Call, answer func(*wire.Answer)) {
		if !endures(c) {
			h.answers <- func() { answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{FlowId: "f"}}}) }
		}
		id := c.Id
		context.AfterFunc(ctx, func() { h.ended <- id })
		h.begun <- id
	})
	return h
}

// finish runs Finish to its end.
func (w *world) finish(ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() { done <- w.server.Finish(ctx) }()
	return done
}

func wantElsewhere(t *testing.T, what string, a *wire.Answer) {
	t.Helper()
	if e := a.GetError(); e.GetCode() != "unavailable" || e.Hint == "" || e.RetryAfterUs == 0 || a.More {
		t.Errorf("%s: %v", what, a)
	}
}

func TestFinish(t *testing.T) {
	w := newWorld(t, nil)
	h := w.hold()
	flows := wire.NewFlowsClient(w.conn)
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	idle, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := idle.Send(&wire.Calls{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{
		describe(1, "f"),
		{Id: 2, Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: "f"}}},
		{Id: 3, Verb: &wire.Call_WaitAttribute{WaitAttribute: &wire.WaitAttributeRequest{FlowId: "f"}}},
		{Id: 4, Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "f"}}},
		{Id: 5, Verb: &wire.Call_History{History: &wire.HistoryRequest{FlowId: "f", Live: true}}},
	}}); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		<-h.begun
	}
	unary := make(chan *wire.Answer, 2)
	for _, c := range []*wire.Call{describe(6, "f"), {Id: 7, Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: "f"}}}} {
		go func() {
			a, err := flows.Do(w.ctx, c)
			if err != nil {
				t.Error(err)
			}
			unary <- a
		}()
		<-h.begun
	}
	done := w.finish(w.ctx)
	got := answers(t, s, 4)
	for id := uint64(2); id <= 5; id++ {
		wantElsewhere(t, "a call that endures", got[id])
	}
	a := <-unary
	wantElsewhere(t, "a wait of its own", a)
	if a.Id != 7 {
		t.Errorf("%v was answered first", a)
	}
	// Further ones are refused, those that are open are not.
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{describe(8, "f")}}); err != nil {
		t.Fatal(err)
	}
	wantElsewhere(t, "a new call", answers(t, s, 1)[8])
	_, err = idle.Recv()
	wantStatus(t, "a stream without calls", err, codes.Unavailable, "unavailable: the server stops")
	for range 5 {
		<-h.ended
	}
	select {
	case err := <-done:
		t.Fatalf("Finish left calls open: %v", err)
	default:
	}
	for range 2 {
		(<-h.answers)()
	}
	if a := answers(t, s, 1)[1]; a.GetFlow() == nil {
		t.Errorf("got %v", a)
	}
	_, err = s.Recv()
	wantStatus(t, "the stream", err, codes.Unavailable, "unavailable: the server stops")
	if a := <-unary; a.GetFlow() == nil {
		t.Errorf("got %v", a)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := w.server.Finish(w.ctx); err != nil {
		t.Errorf("again: %v", err)
	}
}

// TestFinishIsBounded: what is not answered in time is left to Stop, and new
// streams and blobs are refused meanwhile.
func TestFinishIsBounded(t *testing.T) {
	w := newWorld(t, nil)
	h := w.hold()
	flows := wire.NewFlowsClient(w.conn)
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{describe(1, "f")}}); err != nil {
		t.Fatal(err)
	}
	<-h.begun
	ctx, cancel := context.WithCancelCause(w.ctx)
	done := w.finish(ctx)
	<-w.server.finishing.begun
	a, err := flows.Do(w.ctx, describe(2, "f"))
	if err != nil {
		t.Fatal(err)
	}
	wantElsewhere(t, "a call of its own", a)
	more, err := w.stream(w.ctx)
	if err == nil {
		_, err = more.Recv()
	}
	wantStatus(t, "a new stream", err, codes.Unavailable, "unavailable: ")
	late := errors.New("too late")
	cancel(late)
	if err := <-done; !errors.Is(err, late) {
		t.Errorf("got %v", err)
	}
	w.server.Stop()
	if _, err := s.Recv(); err == nil {
		t.Error("a call that nobody answered has an answer")
	}
}

// TestFinishWaitsForBlobs: one that is on its way arrives, another one is refused.
func TestFinishWaitsForBlobs(t *testing.T) {
	begun := begunBlobs{&fakeBlobs{m: map[string][]byte{}}, make(chan bool, 1)}
	w := newWorld(t, func(c *Config) { c.Blobs = begun })
	blobs := wire.NewBlobsClient(w.conn)
	put, err := blobs.Put(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := put.Send(&wire.Chunk{FlowId: "f", Data: []byte("ab")}); err != nil {
		t.Fatal(err)
	}
	<-begun.ch
	done := w.finish(w.ctx)
	<-w.server.finishing.begun
	if err := put.Send(&wire.Chunk{Data: []byte("c")}); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if ref, err := put.CloseAndRecv(); err != nil || ref.Size != 3 {
		t.Errorf("%v %v", ref, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// begunBlobs tells when a blob begins to come.
type begunBlobs struct {
	*fakeBlobs
	ch chan bool
}

// Put implements Blobs.
func (b begunBlobs) Put(ctx context.Context, tenant, flowID, from string, r io.Reader) (*wire.BlobRef, error) {
	b.ch <- true
	return b.fakeBlobs.Put(ctx, tenant, flowID, from, r)
}

// TestFinishOfASlowReader: a stream whose answers are not read does not end as
// one of which all was answered.
func TestFinishOfASlowReader(t *testing.T) {
	clock := &handClock{timers: map[time.Duration][]func(){}, set: make(chan time.Duration, 100)}
	w := newWorld(t, func(c *Config) { c.Clock = clock })
	begun := make(chan bool)
	w.flows.set(func(_ context.Context, _ string, _ *wire.Call, answer func(*wire.Answer)) {
		answer(&wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: make([]byte, 20<<20)}}})
		begun <- true
	})
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	// gRPC takes the first one over its bound.
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{describe(1, "f"), describe(2, "f"), describe(3, "f")}}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		<-begun
	}
	done := w.finish(w.ctx)
	<-w.server.finishing.begun
	for <-clock.set != flushTimeout {
	}
	clock.fire(flushTimeout)
	for err == nil {
		_, err = s.Recv()
	}
	wantStatus(t, "the stream", err, codes.ResourceExhausted, "slow_reader: ")
	if err := <-done; err != nil {
		t.Error(err)
	}
}
