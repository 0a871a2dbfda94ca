// Package grpcapi serves workers and clients of flows over gRPC: the services of
// proto/perdure/v1, and the calls of clients over frames, too. It checks who calls, bounds what a connection may ask for,
// and turns frames into calls of the packages below and their answers into
// frames; it decides nothing else.
package grpcapi

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds.
const (
	MaxFrame   = 128 << 20 // bytes of one message, either way
	MaxChunk   = 256 << 10 // bytes of a blob in one message
	maxHeaders = 64 << 10  // bytes of the metadata of a call

	maxConnStreams = 1024 // calls and streams of one connection
	connWindow     = 4 << 20
	streamWindow   = 1 << 20

	helloTimeout = 10 * time.Second // for a worker to say who it is
	flushTimeout = 5 * time.Second  // for a reader to take what is left at the end
)

// Flows serves the verbs; see internal/flows.
type Flows interface {
	// Do answers one call, exactly once without more. answer may be called on any
	// goroutine. What it may block for: answers with more and the one behind them.
	Do(ctx context.Context, tenant string, c *wire.Call, answer func(*wire.Answer))
}

// Blobs keeps values that are too large for a frame. Its errors read "code:
// message".
type Blobs interface {
	// Put keeps a blob for a flow; from is the flow that carries it there, or empty.
	Put(ctx context.Context, tenant, flowID, from string, r io.Reader) (*wire.BlobRef, error)
	Get(ctx context.Context, tenant string, ref *wire.BlobRef) (io.ReadCloser, error)
	// Drop deletes a blob that nothing names.
	Drop(ctx context.Context, tenant string, ref *wire.BlobRef) error
}

// Config makes a Server. Flows, Dispatch, Clock and Log are needed.
type Config struct {
	Flows    Flows
	Blobs    Blobs // nil: the service is refused
	Dispatch *dispatch.Dispatcher
	Clock    env.Clock
	Log      *slog.Logger
	Auth     config.Auth // without keys every caller is tenant "default"
	TLS      *tls.Config // nil: none

	MaxOpenCalls int   // of one Stream; default 16,384
	MaxStreams   int   // Streams of all clients, and as many workers; default 4,096
	MaxBlob      int64 // bytes; default 64 MiB
	MaxUnsent    int   // bytes that wait for one reader; default 64 MiB
}

func (c *Config) setDefaults() {
	if c.MaxOpenCalls == 0 {
		c.MaxOpenCalls = 16 << 10
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = 4096
	}
	if c.MaxUnsent == 0 {
		c.MaxUnsent = 64 << 20
	}
	if c.MaxBlob == 0 {
		c.MaxBlob = 64 << 20
	}
}

// Server serves the gRPC services. Safe for concurrent use.
type Server struct {
	cfg      Config
	grpc     *grpc.Server
	draining chan struct{} // closed by Drain
	once     sync.Once
	workers  slots
	streams  slots
	framed   framed

	finishing finishing
}

// NewServer makes a server; Serve it on one listener or more.
func NewServer(cfg Config) *Server {
	cfg.setDefaults()
	s := &Server{cfg: cfg, draining: make(chan struct{}),
		workers: slots{most: cfg.MaxStreams}, streams: slots{most: cfg.MaxStreams}, framed: framed{conns: map[net.Conn]bool{}}}
	s.finishing.init()
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(mux.Codec{}), experimental.BufferPool(mux.Buffers),
		grpc.MaxRecvMsgSize(MaxFrame), grpc.MaxSendMsgSize(MaxFrame), grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxConcurrentStreams(maxConnStreams),
		grpc.InitialConnWindowSize(connWindow), grpc.InitialWindowSize(streamWindow),
		grpc.ReadBufferSize(128 << 10), grpc.WriteBufferSize(128 << 10),
		grpc.ConnectionTimeout(helloTimeout), grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream),
	}
	s.grpc = grpc.NewServer(opts...)
	wire.RegisterWorkersServer(s.grpc, workersService{s: s})
	wire.RegisterFlowsServer(s.grpc, flowsService{s: s})
	wire.RegisterBlobsServer(s.grpc, blobsService{s: s})
	return s
}

// Serve accepts connections of l until Stop; it gives nil then.
func (s *Server) Serve(l net.Listener) error {
	var secure credentials.TransportCredentials
	if s.cfg.TLS != nil {
		own := s.cfg.TLS.Clone()
		own.NextProtos = []string{"h2", "http/1.1"} // gRPC, and the upgrade to frames
		secure = credentials.NewTLS(own)
	}
	return s.grpc.Serve(newDoor(s, l, secure))
}

// Drain lets no new stream begin. Those there are go on; what clients ask on
// them is answered.
func (s *Server) Drain() { s.once.Do(func() { close(s.draining) }) }

// Stop ends all streams and connections. Stop the dispatcher first, so that
// workers are told why, and Finish with the clients.
func (s *Server) Stop() {
	s.Drain()
	s.framed.close(true)
	s.grpc.Stop()
	s.framed.all.Wait()
}

func (s *Server) isDraining() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

// slots bounds how many of something there are.
type slots struct {
	most int

	mu    sync.Mutex
	taken int // guarded by mu
}

func (s *slots) take() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken >= s.most {
		return false
	}
	s.taken++
	return true
}

func (s *slots) give() {
	s.mu.Lock()
	s.taken--
	s.mu.Unlock()
}
