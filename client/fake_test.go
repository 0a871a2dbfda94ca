package client

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// fake is a server whose answers a test gives. It asserts the protocol: IDs of
// open calls differ, and a cancel names a call.
type fake struct {
	wire.UnimplementedFlowsServer
	wire.UnimplementedBlobsServer
	t        testing.TB
	lis      *bufconn.Listener
	server   *grpc.Server
	onCall   func(*wire.Call, func(*wire.Answer)) // on the stream's goroutine
	onCancel func(id uint64)
	onStream func(context.Context) error

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
	blobs map[string][]byte
}

func newFake(t testing.TB, onCall func(*wire.Call, func(*wire.Answer))) *fake {
	t.Helper()
	f := &fake{t: t, lis: bufconn.Listen(1 << 20), onCall: onCall, blobs: map[string][]byte{}}
	f.serve()
	t.Cleanup(func() { f.server.Stop() })
	return f
}

func (f *fake) serve() {
	f.server = grpc.NewServer(grpc.ForceServerCodecV2(mux.Codec{}), grpc.MaxRecvMsgSize(maxMessage))
	wire.RegisterFlowsServer(f.server, f)
	wire.RegisterBlobsServer(f.server, f)
	go f.server.Serve(&sorted{Listener: f.lis, f: f})
}

// stop ends the server and breaks all connections.
func (f *fake) stop() {
	f.server.Stop() // closes the listener too
	f.cut()
}

// restart breaks all connections and serves again.
func (f *fake) restart() {
	f.stop()
	f.mu.Lock()
	f.lis = bufconn.Listen(1 << 20)
	f.mu.Unlock()
	f.serve()
}

func (f *fake) dial(ctx context.Context, _ string) (net.Conn, error) {
	f.mu.Lock()
	lis := f.lis
	f.mu.Unlock()
	c, err := lis.DialContext(ctx)
	if err == nil {
		f.mu.Lock()
		f.conns = append(f.conns, c)
		f.mu.Unlock()
	}
	return c, err
}

// cut breaks all connections.
func (f *fake) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

func (f *fake) connections() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns)
}

func (f *fake) client(o Options) *Client {
	f.t.Helper()
	o.Address, o.Dialer, o.OnlyGRPC = "fake", f.dial, !overFrames
	c, err := Dial(context.Background(), o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(c.Close)
	return c
}

func (f *fake) Stream(stream grpc.BidiStreamingServer[wire.Calls, wire.Answers]) error {
	return f.answer(stream.Context(), stream.Send, stream.Recv)
}

func (f *fake) answer(ctx context.Context, send func(*wire.Answers) error, recv func() (*wire.Calls, error)) error {
	if f.onStream != nil {
		if err := f.onStream(ctx); err != nil {
			return err
		}
	}
	out := mux.NewSender(1<<30, send)
	defer out.Close(nil, false)
	answer := func(a *wire.Answer) {
		_ = out.Put(0, func(f *wire.Answers) { f.Answers = append(f.Answers, a) })
	}
	known := map[uint64]bool{} // IDs of this stream
	for {
		in, err := recv()
		if err != nil {
			return err
		}
		for _, c := range in.Calls {
			id := c.Id
			if known[id] {
				f.t.Errorf("two calls have the ID %d", id)
			}
			known[id] = true
			f.onCall(c, func(a *wire.Answer) {
				a.Id = id
				answer(a)
			})
		}
		for _, id := range in.Cancels {
			if !known[id] {
				f.t.Errorf("a cancel of %d, which was never called", id)
			}
			if f.onCancel != nil {
				f.onCancel(id)
			}
		}
	}
}

func (f *fake) Put(put grpc.ClientStreamingServer[wire.Chunk, wire.BlobRef]) error {
	first, err := put.Recv()
	if err != nil {
		return err
	}
	v := first.Data
	for {
		c, err := put.Recv()
		if err != nil {
			break
		}
		if c.FlowId != "" || len(c.Data) > chunk {
			f.t.Errorf("a later chunk of %d bytes names the flow %q", len(c.Data), c.FlowId)
		}
		v = append(v, c.Data...)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blobs[first.FlowId+"/b1"] = v
	return put.SendAndClose(&wire.BlobRef{FlowId: first.FlowId, Blob: "b1", Size: uint64(len(v))})
}

func (f *fake) Drop(_ context.Context, ref *wire.BlobRef) (*wire.Done, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.blobs, ref.FlowId+"/"+ref.Blob)
	return &wire.Done{}, nil
}

func (f *fake) Get(ref *wire.BlobRef, get grpc.ServerStreamingServer[wire.Chunk]) error {
	f.mu.Lock()
	v, ok := f.blobs[ref.FlowId+"/"+ref.Blob]
	f.mu.Unlock()
	if !ok {
		return status.Errorf(codes.NotFound, "blob_missing: flow %s has no blob %s", ref.FlowId, ref.Blob)
	}
	for len(v) > 0 {
		n := min(len(v), chunk)
		if err := get.Send(&wire.Chunk{Data: v[:n]}); err != nil {
			return err
		}
		v = v[n:]
	}
	return nil
}

// keyOf is the authorization that came with a stream.
func keyOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get("authorization"); len(v) == 1 {
		return v[0]
	}
	return ""
}

func rpcAnswer(out string) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: []byte(out)}}}
}

func refuseWith(code string, after time.Duration) *wire.Answer {
	return &wire.Answer{Error: &wire.Error{Code: code, Message: "no", RetryAfterUs: after.Microseconds(), Position: -1}}
}

// background is a context that a broken test does not outlive.
func background(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 20*time.Second, errors.New("the test hangs"))
	t.Cleanup(cancel)
	return ctx
}
