package flow

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	randv2 "math/rand/v2"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/mux"
)

// SDK is the name and version that a worker gives to the server.
const SDK = "perdure-go/1"

const (
	defaultAddress      = "127.0.0.1:8080"
	defaultConcurrency  = 256
	defaultRPCs         = 64
	defaultDrainTimeout = 30 * time.Second
	maxConcurrency      = 1 << 20
	firstBackoff        = 50 * time.Millisecond
	maxBackoff          = 5 * time.Second
	welcomeTimeout      = 10 * time.Second
	stopGrace           = 2 * time.Second // for handlers to return once their contexts have ended
	maxMessage          = 128 << 20       // bytes of one frame
	windowBytes         = 4 << 20         // HTTP/2 flow control
)

// WorkerOptions are the settings of a Worker. The zero value is a server on this
// machine, without a key.
type WorkerOptions struct {
	Address string      // host:port of the server's gRPC address; empty = 127.0.0.1:8080
	Key     string      // worker key; it says the tenant
	TLS     *tls.Config // nil = without TLS

	// Concurrency is how many steps run at once; 0 = 256. They are goroutines:
	// for work that waits for others, a thousand is as good.
	Concurrency int
	// RPCConcurrency is how many RPCs run at once, besides the steps; 0 = 64.
	RPCConcurrency int
	// MaxStreams is how many streams the worker may have open at once; 0 = 4. It
	// has one, and opens further ones while those it has are busy sending.
	MaxStreams int
	// DrainTimeout is how long running handlers have to finish when the worker
	// is stopped; 0 = 30 s, below zero = none.
	DrainTimeout time.Duration

	ID     string       // shown to people; empty = host name, process ID and a random part
	Build  string       // of the program, shown to people; empty = its VCS revision
	Logger *slog.Logger // nil = slog.Default()
	// Tracing makes spans of handlers, below the server's; nil = none. Either way
	// a handler's context carries the trace that its flow is part of.
	Tracing trace.TracerProvider
	// Dialer opens connections; nil = the network.
	Dialer func(ctx context.Context, address string) (net.Conn, error)
}

// Worker runs the handlers of some flows for a server: it opens a connection to
// it, takes as many tasks as it has room for, and sends back their results. Any
// number of workers may run the same flows.
type Worker struct {
	opts  WorkerOptions
	rt    *Runtime
	log   *slog.Logger
	tasks *pool
	rpcs  *pool
	pace  pace

	mu      sync.Mutex
	running bool       // guarded by mu; Run was called
	open    []*session // guarded by mu; welcomed and not ended, oldest first
	opening int        // guarded by mu; further streams that are not welcomed yet
	busy    [kinds]int // guarded by mu; handed out and not answered, of whatever session
	failed  bool       // guarded by mu; a further stream could not be opened
}

// NewWorker prepares a worker; it is an error to give it no flow, two of one
// name, or settings out of their bounds.
func NewWorker(o WorkerOptions, flows ...*Flow) (*Worker, error) {
	if len(flows) == 0 {
		return nil, errors.New("flow: a worker without flows has nothing to do: give it the definitions")
	}
	rt, err := NewRuntime(flows...)
	if err != nil {
		return nil, err
	}
	if o.Address == "" {
		o.Address = defaultAddress
	}
	if o.Concurrency == 0 {
		o.Concurrency = defaultConcurrency
	}
	if o.RPCConcurrency == 0 {
		o.RPCConcurrency = defaultRPCs
	}
	if o.MaxStreams == 0 {
		o.MaxStreams = defaultStreams
	}
	if o.MaxStreams < 1 || o.MaxStreams > mostStreams {
		return nil, fmt.Errorf("flow: a worker's streams are %d at most, must be 1 to %d", o.MaxStreams, mostStreams)
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = defaultDrainTimeout
	}
	for _, n := range []int{o.Concurrency, o.RPCConcurrency} {
		if n < 1 || n > maxConcurrency {
			return nil, fmt.Errorf("flow: a worker's concurrency is %d, must be 1 to %d", n, maxConcurrency)
		}
	}
	if o.ID == "" {
		o.ID = workerID()
	}
	if o.Build == "" {
		o.Build = build()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Tracing != nil {
		rt.tracer = o.Tracing.Tracer("github.com/perdure-dev/perdure/flow")
	}
	return &Worker{opts: o, rt: rt, log: o.Logger.With("worker", o.ID), pace: usualPace}, nil
}

func workerID() string {
	host, _ := os.Hostname()
	b := make([]byte, 4)
	_, _ = rand.Read(b) // never fails
	return host + "-" + strconv.Itoa(os.Getpid()) + "-" + hex.EncodeToString(b)
}

func build() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return info.Main.Version
}

// Run works until ctx ends: then it takes nothing new, lets the running handlers
// finish within DrainTimeout, and returns nil. It connects again, by itself and
// for ever, when the connection is lost; handlers that run then are told to stop
// (ErrLost), and their results are dropped, since the server hands their steps
// out again. It returns an error if the server refuses the worker: its key, its
// version, or its definitions. Call it once.
func (w *Worker) Run(ctx context.Context) error {
	w.mu.Lock()
	again := w.running
	w.running = true
	w.mu.Unlock()
	if again {
		return errors.New("flow: Worker.Run was called twice: make another worker")
	}
	conn, err := grpc.NewClient(w.target(), w.dialOptions()...)
	if err != nil {
		return fmt.Errorf("flow: the server address %q is not usable: %w", w.opts.Address, err)
	}
	defer conn.Close()
	w.tasks, w.rpcs = newPool(w.opts.Concurrency), newPool(w.opts.RPCConcurrency)
	err = w.work(ctx, conn)
	// Handlers that ignored their context are left behind.
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	for _, p := range []*pool{w.tasks, w.rpcs} {
		select {
		case <-p.stop():
		case <-grace.C:
		}
	}
	return err
}

// work keeps the first stream, with further ones as they are needed.
func (w *Worker) work(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(ctx)
	var further sync.WaitGroup
	further.Go(func() { w.steer(ctx, &further) })
	err := w.keepConnected(ctx, conn)
	cancel()
	further.Wait()
	return err
}

func (w *Worker) keepConnected(ctx context.Context, conn *grpc.ClientConn) error {
	pause := firstBackoff
	for {
		welcomed, err := w.connectOnce(ctx, conn, func() {})
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil: // drained by the server: it goes, another one comes
			pause = firstBackoff
		case refused(err):
			return fmt.Errorf("flow: the server at %s refuses this worker: %w", w.opts.Address, err)
		case welcomed:
			pause = firstBackoff
			w.log.Warn("the connection to the server is lost", "address", w.opts.Address, "error", err)
		default:
			w.log.Warn("the server cannot be reached", "address", w.opts.Address, "error", err, "again_in", pause)
		}
		t := time.NewTimer(pause/2 + randv2.N(pause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		pause = min(2*pause, maxBackoff)
		conn.ResetConnectBackoff()
	}
}

// refused says that trying again is of no use.
func refused(err error) bool {
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied, codes.InvalidArgument, codes.FailedPrecondition, codes.Unimplemented:
		return true
	}
	return errors.Is(err, errProtocol)
}

// errProtocol is a server that speaks otherwise.
var errProtocol = errors.New("flow: the server breaks the protocol")

func (w *Worker) target() string {
	if w.opts.Dialer != nil {
		return "passthrough:///" + w.opts.Address
	}
	return w.opts.Address
}

func (w *Worker) dialOptions() []grpc.DialOption {
	secure := insecure.NewCredentials()
	if w.opts.TLS != nil {
		secure = credentials.NewTLS(w.opts.TLS)
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		experimental.WithBufferPool(mux.Buffers),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(mux.Codec{}), grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithDisableServiceConfig(),
		grpc.WithInitialWindowSize(windowBytes),
		grpc.WithInitialConnWindowSize(windowBytes),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: firstBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	if w.opts.Dialer != nil {
		opts = append(opts, grpc.WithContextDialer(w.opts.Dialer))
	}
	return opts
}

// connectOnce opens a stream and works until it ends; nil = it was drained. opened
// is called when it is one of the streams.
func (w *Worker) connectOnce(ctx context.Context, conn *grpc.ClientConn, opened func()) (welcomed bool, err error) {
	s := newSession(w, conn)
	defer s.end(ErrLost)
	// Until it is welcomed, the session ends with ctx; afterwards it drains.
	stop := context.AfterFunc(ctx, func() { s.cancel(ErrStopping) })
	welcome, err := s.open()
	if !stop() || err != nil {
		return false, err
	}
	streams := w.join(s)
	opened()
	defer w.leave(s)
	w.log.Info("connected", "address", w.opts.Address, "server", welcome.Server, "streams", streams)
	return true, s.work(ctx)
}
