package grpcapi

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// world is a server and a connection to it, in memory.
type world struct {
	t        *testing.T
	ctx      context.Context
	server   *Server
	dispatch *dispatch.Dispatcher
	lis      *bufconn.Listener
	conn     *grpc.ClientConn
	proposed chan partition.Proposal
	flows    *fakeFlows
	blobs    *fakeBlobs
	log      syncBuffer
}

// Submit implements dispatch.Proposer.
func (w *world) Submit(_ string, p partition.Proposal) error { w.proposed <- p; return nil }

// SubmitWait implements dispatch.Proposer.
func (w *world) SubmitWait(_ context.Context, _ string, p partition.Proposal) error {
	return w.Submit("", p)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// testUnsent is small, so that a test fills it quickly.
const testUnsent = 4 << 20

func newWorld(t *testing.T, change func(*Config)) *world {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, proposed: make(chan partition.Proposal, 10_000), flows: &fakeFlows{}, blobs: &fakeBlobs{m: map[string][]byte{}}}
	log := slog.New(slog.NewTextHandler(&w.log, nil))
	cfg := Config{Flows: w.flows, Blobs: w.blobs, Clock: env.SystemClock{}, Log: log, MaxUnsent: testUnsent}
	if change != nil {
		change(&cfg)
	}
	w.dispatch = dispatch.New(dispatch.Config{Clock: cfg.Clock, Hub: stream.NewHub(), Log: log})
	w.dispatch.Bind(w)
	cfg.Dispatch = w.dispatch
	server := NewServer(cfg) // which a test may replace in w
	w.server = server
	l := bufconn.Listen(1 << 20)
	w.lis = l
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	w.conn = w.dial(l, grpc.WithTransportCredentials(insecure.NewCredentials()))
	t.Cleanup(func() {
		_ = w.conn.Close()
		w.dispatch.Stop()
		server.Stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return w
}

func (w *world) dial(l *bufconn.Listener, opts ...grpc.DialOption) *grpc.ClientConn {
	w.t.Helper()
	opts = append(opts, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(mux.Codec{}), grpc.MaxCallRecvMsgSize(MaxFrame), grpc.MaxCallSendMsgSize(MaxFrame)))
	c, err := grpc.NewClient("passthrough:///mem", opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// proposal waits for the next command.
func (w *world) proposal() partition.Proposal {
	w.t.Helper()
	select {
	case p := <-w.proposed:
		return p
	case <-w.ctx.Done():
		w.t.Fatal("nothing was proposed")
		return partition.Proposal{}
	}
}

func withKey(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
}

func keys() config.Auth {
	k := func(text, tenant string) *config.APIKey {
		return &config.APIKey{Name: tenant, Tenant: tenant, Digest: sha256.Sum256([]byte(text))}
	}
	return config.Auth{Keys: []*config.APIKey{k("sesame", "one"), k("open", "two")}}
}

func wantStatus(t *testing.T, what string, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: got %v, want %v with %q", what, err, code, text)
	}
}

// fakeFlows answers as its fn says, else with the flow ID that was asked for.
type fakeFlows struct {
	mu sync.Mutex
	fn func(ctx context.Context, tenant string, c *wire.Call, answer func(*wire.Answer)) // guarded by mu
}

func (f *fakeFlows) set(fn func(ctx context.Context, tenant string, c *wire.Call, answer func(*wire.Answer))) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fn = fn
}

// Do implements Flows.
func (f *fakeFlows) Do(ctx context.Context, tenant string, c *wire.Call, answer func(*wire.Answer)) {
	f.mu.Lock()
	fn := f.fn
	f.mu.Unlock()
	if fn != nil {
		fn(ctx, tenant, c, answer)
		return
	}
	answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{FlowId: tenant + ":" + c.GetDescribe().GetFlowId()}}})
}

func describe(id uint64, flow string) *wire.Call {
	return &wire.Call{Id: id, Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: flow}}}
}

// fakeBlobs keeps blobs in memory.
type fakeBlobs struct {
	mu sync.Mutex
	m  map[string][]byte // guarded by mu

	from string // guarded by mu; who carries the last one that was put
}

// Drop implements Blobs.
func (f *fakeBlobs) Drop(_ context.Context, tenant string, ref *wire.BlobRef) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.m[tenant+ref.FlowId]; !ok {
		return &core.Error{Code: core.Conflict, Message: "somebody names it"}
	}
	delete(f.m, tenant+ref.FlowId)
	return nil
}

// Put implements Blobs.
func (f *fakeBlobs) Put(_ context.Context, tenant, flowID, from string, r io.Reader) (*wire.BlobRef, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, errors.New("it broke in the middle")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.m[tenant+flowID] = b
	f.from = from
	return &wire.BlobRef{FlowId: flowID, Blob: "b", Size: uint64(len(b))}, nil
}

// Get implements Blobs.
func (f *fakeBlobs) Get(_ context.Context, tenant string, ref *wire.BlobRef) (io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.m[tenant+ref.FlowId]
	if !ok {
		return nil, &core.Error{Code: "blob_missing", Message: "there is no such blob"}
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}
