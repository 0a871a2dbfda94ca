package grpcapi

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/perdure-dev/perdure/internal/wire"
)

func TestKeysSayTheTenant(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Auth = keys() })
	flows := wire.NewFlowsClient(w.conn)
	for key, tenant := range map[string]string{"sesame": "one", "open": "two"} {
		a, err := flows.Do(withKey(w.ctx, key), describe(7, "f"))
		if err != nil || a.GetFlow().GetFlowId() != tenant+":f" {
			t.Errorf("%s: %v %v", key, a, err)
		}
	}
	_, err := flows.Do(w.ctx, describe(7, "f"))
	wantStatus(t, "no key", err, codes.Unauthenticated, "an API key is needed")
	_, err = flows.Do(withKey(w.ctx, "wrong"), describe(7, "f"))
	wantStatus(t, "wrong key", err, codes.Unauthenticated, "not known here")
	_, err = flows.Do(withKey(w.ctx, ""), describe(7, "f"))
	wantStatus(t, "empty key", err, codes.Unauthenticated, "an API key is needed")
	_, err = flows.Do(withKey(withKey(w.ctx, "sesame"), "open"), describe(7, "f"))
	wantStatus(t, "two keys", err, codes.Unauthenticated, "an API key is needed")
	s, err := wire.NewWorkersClient(w.conn).Work(withKey(w.ctx, "wrong"))
	if err == nil {
		_, err = s.Recv()
	}
	wantStatus(t, "worker", err, codes.Unauthenticated, "not known here")
}

func TestDo(t *testing.T) {
	w := newWorld(t, nil)
	flows := wire.NewFlowsClient(w.conn)
	for _, c := range []*wire.Call{
		{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "f"}}},
		{Verb: &wire.Call_History{History: &wire.HistoryRequest{FlowId: "f", Live: true}}},
	} {
		a, err := flows.Do(w.ctx, c)
		if err != nil || a.GetError().GetCode() != "invalid" || !strings.Contains(a.Error.Hint, "Stream") {
			t.Errorf("%v %v", a, err)
		}
	}
	asked, ended := make(chan struct{}), make(chan struct{})
	w.flows.set(func(ctx context.Context, _ string, _ *wire.Call, answer func(*wire.Answer)) {
		context.AfterFunc(ctx, func() { close(ended) })
		close(asked)
	})
	ctx, cancel := context.WithCancel(w.ctx)
	go func() { <-asked; cancel() }()
	_, err := flows.Do(ctx, describe(1, "f"))
	wantStatus(t, "cancelled", err, codes.Canceled, "")
	<-ended
	w.flows.set(func(_ context.Context, _ string, _ *wire.Call, answer func(*wire.Answer)) {
		answer(&wire.Answer{Id: 1})
		answer(&wire.Answer{Id: 2}) // dropped
	})
	if a, err := flows.Do(w.ctx, describe(1, "f")); err != nil || a.Id != 1 {
		t.Errorf("%v %v", a, err)
	}
}

// A panic is the end of one call, not of the server.
func TestPanicIsAnError(t *testing.T) {
	w := newWorld(t, nil)
	flows := wire.NewFlowsClient(w.conn)
	w.flows.set(func(context.Context, string, *wire.Call, func(*wire.Answer)) { panic("secret") })
	_, err := flows.Do(w.ctx, describe(1, "f"))
	wantStatus(t, "Do", err, codes.Internal, "internal error")
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{describe(1, "f")}}); err != nil {
		t.Fatal(err)
	}
	_, err = s.Recv()
	wantStatus(t, "Stream", err, codes.Internal, "internal error")
	if strings.Contains(err.Error(), "secret") || !strings.Contains(w.log.String(), "secret") {
		t.Error("the panic is for the log")
	}
	w.flows.set(nil)
	if _, err := flows.Do(w.ctx, describe(1, "f")); err != nil {
		t.Error(err)
	}
}

// answers reads until n came; it gives them by ID.
func answers(t *testing.T, s callClient, n int) map[uint64]*wire.Answer {
	t.Helper()
	out := map[uint64]*wire.Answer{}
	for len(out) < n {
		f, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range f.Answers {
			if out[a.Id] != nil {
				t.Fatalf("call %d is answered twice", a.Id)
			}
			out[a.Id] = a
		}
	}
	return out
}

func TestStreamMultiplexes(t *testing.T) {
	w := newWorld(t, nil)
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	var held []func(*wire.Answer)
	hold := make(chan struct{})
	w.flows.set(func(_ context.Context, tenant string, c *wire.Call, answer func(*wire.Answer)) {
		if id := c.GetDescribe().FlowId; id == "later" {
			held = append(held, answer)
			close(hold)
		} else {
			go answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{FlowId: id}}})
		}
	})
	calls := []*wire.Call{describe(1_000_000, "later")}
	for i := range 1000 {
		calls = append(calls, describe(uint64(i), fmt.Sprint(i)))
	}
	if err := s.Send(&wire.Calls{Calls: calls}); err != nil {
		t.Fatal(err)
	}
	got := answers(t, s, 1000)
	for i := range 1000 {
		if got[uint64(i)].GetFlow().GetFlowId() != fmt.Sprint(i) {
			t.Fatalf("call %d: %v", i, got[uint64(i)])
		}
	}
	// What is asked is answered also when the client says that it asks no more.
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	<-hold
	held[0](&wire.Answer{})
	held[0](&wire.Answer{}) // nobody waits for it
	if a := answers(t, s, 1); a[1_000_000] == nil {
		t.Errorf("%v", a)
	}
	if _, err := s.Recv(); err != io.EOF {
		t.Errorf("the end: %v", err)
	}
}

func TestStreamBoundsOpenCalls(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxOpenCalls = 2; c.MaxStreams = 1 })
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	ends := make(chan uint64, 10)
	w.flows.set(func(ctx context.Context, _ string, c *wire.Call, answer func(*wire.Answer)) {
		context.AfterFunc(ctx, func() {
			answer(&wire.Answer{Error: &wire.Error{Code: "cancelled"}}) // nobody waits for it
			ends <- c.Id
		})
	})
	send := func(f *wire.Calls) {
		t.Helper()
		if err := s.Send(f); err != nil {
			t.Fatal(err)
		}
	}
	send(&wire.Calls{Calls: []*wire.Call{describe(1, "f"), describe(2, "f"), describe(3, "f")}})
	if a := answers(t, s, 1)[3]; a.GetError().GetCode() != "overloaded" || a.Error.RetryAfterUs == 0 {
		t.Errorf("third: %v", a)
	}
	send(&wire.Calls{Cancels: []uint64{2, 9}})
	if id := <-ends; id != 2 {
		t.Errorf("call %d was cancelled", id)
	}
	w.flows.set(nil)
	send(&wire.Calls{Calls: []*wire.Call{describe(2, "again")}})
	if a := answers(t, s, 1)[2]; a.GetFlow().GetFlowId() != "default:again" {
		t.Errorf("after the cancel: %v", a)
	}
	other, err := w.stream(w.ctx)
	if err == nil {
		_, err = other.Recv()
	}
	wantStatus(t, "second stream", err, codes.ResourceExhausted, "overloaded")
	send(&wire.Calls{Calls: []*wire.Call{describe(1, "twice")}})
	for err = nil; err == nil; { // what was open may be answered before
		_, err = s.Recv()
	}
	wantStatus(t, "twice", err, codes.InvalidArgument, "call 1 is open already")
	if id := <-ends; id != 1 {
		t.Errorf("call %d was ended with the stream", id)
	}
}

// Answers of a watch wait for a slow reader; any other answer that finds no room
// ends the stream.
func TestSlowReaders(t *testing.T) {
	w := newWorld(t, nil)
	s, err := w.stream(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	const pieces = 40
	piece := func(more bool) *wire.Answer {
		return &wire.Answer{More: more, Result: &wire.Answer_History{History: &wire.HistoryReply{Outputs: []*wire.OutputPart{{Text: strings.Repeat("x", testUnsent/16)}}}}}
	}
	w.flows.set(func(_ context.Context, _ string, _ *wire.Call, answer func(*wire.Answer)) {
		go func() {
			for range pieces {
				answer(piece(true))
			}
			answer(piece(false))
		}()
	})
	if err := s.Send(&wire.Calls{Calls: []*wire.Call{describe(1, "f")}}); err != nil {
		t.Fatal(err)
	}
	n, last := 0, false
	for !last {
		f, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range f.Answers {
			n++
			last = !a.More
		}
	}
	if n != pieces+1 {
		t.Errorf("%d pieces", n)
	}
	full := make(chan struct{})
	w.flows.set(func(ctx context.Context, _ string, c *wire.Call, answer func(*wire.Answer)) {
		context.AfterFunc(ctx, func() {
			if c.Id == 1000 {
				close(full)
			}
		})
		if c.Id < 1000 {
			answer(piece(false))
		}
	})
	var calls []*wire.Call
	for i := range 40 {
		calls = append(calls, describe(uint64(1000-i), "f"))
	}
	if err := s.Send(&wire.Calls{Calls: calls}); err != nil {
		t.Fatal(err)
	}
	<-full // though the client reads nothing
	for err == nil {
		_, err = s.Recv()
	}
	wantStatus(t, "slow", err, codes.ResourceExhausted, "slow_reader")
}

func TestBlobs(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxBlob = 1 << 20 })
	blobs := wire.NewBlobsClient(w.conn)
	put := func(chunks ...*wire.Chunk) (*wire.BlobRef, error) {
		s, err := blobs.Put(w.ctx)
		if err != nil {
			return nil, err
		}
		for _, c := range chunks {
			if s.Send(c) != nil {
				break // the reply says why
			}
		}
		return s.CloseAndRecv()
	}
	text := bytes.Repeat([]byte("0123456789"), 60_000)
	ref, err := put(&wire.Chunk{FlowId: "f", Data: text[:1000]}, &wire.Chunk{}, &wire.Chunk{Data: text[1000:200_000]}, &wire.Chunk{Data: text[200_000:400_000]}, &wire.Chunk{Data: text[400_000:]})
	if err != nil || ref.Size != uint64(len(text)) {
		t.Fatalf("%v %v", ref, err)
	}
	s, err := blobs.Get(w.ctx, ref)
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	for {
		c, err := s.Recv()
		if err == io.EOF {
			break
		}
		if err != nil || len(c.Data) > MaxChunk {
			t.Fatal(len(c.GetData()), err)
		}
		got = append(got, c.Data...)
	}
	if !bytes.Equal(got, text) {
		t.Errorf("%d bytes came back", len(got))
	}
	if _, err := put(&wire.Chunk{FlowId: "g", FromFlowId: "f", Data: text[:10]}); err != nil || w.blobs.from != "f" {
		t.Errorf("carried by %q, %v", w.blobs.from, err)
	}
	if _, err := blobs.Drop(w.ctx, &wire.BlobRef{FlowId: "g", Blob: "b"}); err != nil {
		t.Error(err)
	}
	_, err = blobs.Drop(w.ctx, &wire.BlobRef{FlowId: "g", Blob: "b"})
	wantStatus(t, "named", err, codes.Aborted, "conflict")
	_, err = put()
	wantStatus(t, "nothing", err, codes.InvalidArgument, "must name its flow")
	_, err = put(&wire.Chunk{Data: text[:10]})
	wantStatus(t, "no flow", err, codes.InvalidArgument, "must name its flow")
	_, err = put(&wire.Chunk{FlowId: "f", Data: text[:MaxChunk+1]})
	wantStatus(t, "large chunk", err, codes.InvalidArgument, "too_large: a chunk has")
	_, err = put(&wire.Chunk{FlowId: "f", Data: text[:10]}, &wire.Chunk{Data: text[:MaxChunk]}, &wire.Chunk{Data: text[:MaxChunk]}, &wire.Chunk{Data: text[:MaxChunk]}, &wire.Chunk{Data: text[:MaxChunk]})
	wantStatus(t, "large blob", err, codes.InvalidArgument, "too_large: the blob has more than")
	s, err = blobs.Get(w.ctx, &wire.BlobRef{FlowId: "none"})
	if err == nil {
		_, err = s.Recv()
	}
	wantStatus(t, "missing", err, codes.NotFound, "blob_missing")
	w = newWorld(t, func(c *Config) { c.Blobs = nil })
	s, err = wire.NewBlobsClient(w.conn).Get(w.ctx, ref)
	if err == nil {
		_, err = s.Recv()
	}
	wantStatus(t, "none", err, codes.Unimplemented, "not_served")
	_, err = wire.NewBlobsClient(w.conn).Drop(w.ctx, ref)
	wantStatus(t, "none", err, codes.Unimplemented, "not_served")
}
