package client

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	defaultAddress  = "127.0.0.1:8080"
	readBuffer      = 256 << 10 // bytes read at once: answers may be large
	defaultPatience = 10 * time.Second
	defaultMaxOpen  = 16384
	maxStreams      = 4         // connections of one client
	crowded         = 4096      // open calls on a connection before another one is opened
	callUnit        = 4096      // bytes of a request that count as one more open call
	maxTries        = 10        // of one call, the first one included
	maxMessage      = 128 << 20 // bytes of a frame, either way; the server's bound too
	maxCall         = 100 << 20 // bytes of a call; a larger one would end the stream for all
	windowBytes     = 4 << 20   // HTTP/2 flow control; a round trip's worth of answers and more
)

// Options of a Client. The zero value is a server on this machine, without a key.
type Options struct {
	Address string      // host:port of the server's gRPC address; empty = 127.0.0.1:8080
	Key     string      // API key; it says the tenant
	TLS     *tls.Config // nil = without TLS
	// Patience is how long a call waits for a connection, and how long it is sent
	// again when that is safe; its context may end it earlier. 0 = 10 s; below
	// zero = one attempt.
	Patience time.Duration
	// MaxOpen bounds the calls that are open at once, each counting once and
	// once more per 4 KiB of its request; what waits for a flow (Wait, Watch, …)
	// is counted apart. Further calls wait their turn. 0 = 16,384.
	MaxOpen int
	// Tracing makes a span of each call; nil = none, and the span that the call's
	// context has is the parent of the flow's own.
	Tracing trace.TracerProvider
	// Dialer opens connections; nil = the network.
	Dialer func(ctx context.Context, address string) (net.Conn, error)
	// OnlyGRPC leaves out the frames of this package's own, which carry calls for
	// less than gRPC does and are used where the server has them.
	OnlyGRPC bool
}

// Client is a connection to a server. Make one with Dial and share it.
type Client struct {
	patience time.Duration
	links    []*link
	cancel   context.CancelFunc
	short    *semaphore.Weighted // open calls that are answered at once
	long     *semaphore.Weighted // open calls that wait for something to happen
	maxOpen  int64
	tracer   trace.Tracer // nil = none

	keys    string // what request IDs of this client begin with
	nextKey atomic.Uint64
}

// Dial connects to a server. It fails with ErrUnavailable when the server
// cannot be reached within the patience of o, or ctx; a key that is refused
// shows with the first call.
func Dial(ctx context.Context, o Options) (*Client, error) {
	if o.Address == "" {
		o.Address = defaultAddress
	}
	if o.Patience == 0 {
		o.Patience = defaultPatience
	}
	if o.MaxOpen <= 0 {
		o.MaxOpen = defaultMaxOpen
	}
	life, cancel := context.WithCancel(context.Background())
	if o.Key != "" {
		life = metadata.AppendToOutgoingContext(life, "authorization", "Bearer "+o.Key)
	}
	c := &Client{patience: o.Patience, cancel: cancel, maxOpen: int64(o.MaxOpen), keys: newKey()}
	c.short, c.long = semaphore.NewWeighted(c.maxOpen), semaphore.NewWeighted(c.maxOpen)
	if o.Tracing != nil {
		c.tracer = o.Tracing.Tracer("github.com/perdure-dev/perdure/client")
	}
	frames := newFramesDialer(o)
	for range maxStreams {
		conn, err := grpc.NewClient(target(o), dialOptions(o)...)
		if err != nil {
			c.Close()
			return nil, &Error{Code: ErrInvalid.Code, Message: "the address " + strconv.Quote(o.Address) + " is not usable: " + err.Error(), Hint: "Give host:port.", Position: -1, cause: err}
		}
		c.links = append(c.links, &link{conn: conn, frames: frames, ctx: life})
	}
	if _, err := c.links[0].get(ctx, c.patience); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func target(o Options) string {
	if o.Dialer != nil {
		return "passthrough:///" + o.Address
	}
	return o.Address
}

func dialOptions(o Options) []grpc.DialOption {
	secure := insecure.NewCredentials()
	if o.TLS != nil {
		secure = credentials.NewTLS(o.TLS)
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(mux.Codec{Alias: true}), grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithDisableRetry(), // calls are sent again here, where it is known which ones may be
		grpc.WithDisableServiceConfig(),
		grpc.WithReadBufferSize(readBuffer),
		experimental.WithBufferPool(mux.Buffers),
		grpc.WithInitialWindowSize(windowBytes),
		grpc.WithInitialConnWindowSize(windowBytes),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: firstBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	if o.Dialer != nil {
		opts = append(opts, grpc.WithContextDialer(o.Dialer))
	}
	return opts
}

// Close ends the client. Calls that are open fail with ErrClientClosed; what
// the server has already taken goes on.
func (c *Client) Close() {
	c.cancel()
	for _, l := range c.links {
		l.conn.Close()
	}
}

// pick gives the first connection that is not crowded, so that few calls share
// few frames; beyond that the emptiest one.
func (c *Client) pick() *link {
	best := c.links[0]
	least := best.open.Load()
	for _, l := range c.links[1:] {
		if least < crowded {
			break
		}
		if n := l.open.Load(); n < least {
			best, least = l, n
		}
	}
	return best
}

// manner is how a call may be treated.
type manner struct {
	again bool // may be sent again when its fate is unknown
	write bool // changes something: its fate matters
	long  bool // waits for something to happen; ErrDeadline of the server is not the caller's
}

var (
	read    = manner{again: true}
	keyed   = manner{again: true, write: true} // carries an idempotency key
	once    = manner{write: true}
	waiting = manner{again: true, long: true}
)

// do asks for one thing and gives the answer. w is not used afterwards.
func (c *Client) do(ctx context.Context, w *wire.Call, m manner) (*wire.Answer, error) {
	if c.tracer == nil {
		return c.persist(ctx, w, m)
	}
	ctx, end := c.span(ctx, w)
	a, err := c.persist(ctx, w, m)
	end(err)
	return a, err
}

// persist tries a call until it is answered, or trying again is unsafe or in vain.
func (c *Client) persist(ctx context.Context, w *wire.Call, m manner) (*wire.Answer, error) {
	a, err := c.try(ctx, w, m)
	if err == nil {
		return a, nil
	}
	r := retries{patience: c.patience, since: time.Now()}
	doubt := false // a former try may have taken effect, whatever the last one is told
	for {
		pause, ok := r.next(ctx, err, m)
		if !ok || !sleep(ctx, pause) {
			return nil, final(ctx, err, m, doubt)
		}
		doubt = doubt || m.write && mayHaveHappened(err)
		began := time.Now()
		// The former Call may still lie in a frame of the connection that broke.
		w = &wire.Call{Trace: w.Trace, Verb: w.Verb}
		if a, err = c.try(ctx, w, m); err == nil {
			return a, nil
		}
		if m.long && time.Since(began) > maxBackoff {
			r.reset() // it waited, it was not refused
		}
	}
}

// mayHaveHappened says that a try may have taken effect though it has no answer.
func mayHaveHappened(err error) bool {
	var lost *errLost
	var e *Error
	return errors.As(err, &lost) || errors.As(err, &e) && e.Unknown
}

// retries says how long and how often a call is tried again.
type retries struct {
	patience time.Duration
	since    time.Time // the first failure
	tries    int
}

func (r *retries) reset() { r.tries, r.since = 0, time.Now() }

// next says whether and after what pause to send again.
func (r *retries) next(ctx context.Context, err error, m manner) (time.Duration, bool) {
	if r.tries++; ctx.Err() != nil || r.tries >= maxTries || time.Since(r.since) > max(r.patience, 0) {
		return 0, false
	}
	tries := r.tries
	var lost *errLost
	if errors.As(err, &lost) {
		return backoff(tries), m.again
	}
	var unsent *errUnsent
	if errors.As(err, &unsent) {
		return backoff(tries), true
	}
	var e *Error
	if !errors.As(err, &e) {
		return 0, false
	}
	pause := e.RetryAfter + backoff(tries)/2
	switch e.Code {
	case ErrDeadline.Code:
		if m.long {
			return 0, true // the server's bound on waiting, not ours
		}
		return 0, false
	case ErrUnknown.Code, codeWorkerLost: // the server has lost it on its way to the journal, or to the handler's answer
		if !m.again {
			return 0, false
		}
	case ErrOverloaded.Code, ErrUnavailable.Code: // nothing was done
		if e.RetryAfter <= 0 {
			return 0, false
		}
	default:
		return 0, false
	}
	if end, ok := ctx.Deadline(); ok && time.Until(end) < pause {
		return 0, false // the server's answer says more than a deadline would
	}
	return pause, true
}

// final makes an error for the caller of what the last try gave. With doubt the
// fate of a former one is not known, and so that of the call is not: what
// refuses the last try, an unknown flow type say, may not have been so before.
func final(ctx context.Context, err error, m manner, doubt bool) error {
	err = ofLast(ctx, err, m)
	var e *Error
	if !doubt || !errors.As(err, &e) || e.Unknown {
		return err
	}
	own := *e
	own.Unknown = true
	own.Message += "; an earlier try may have taken effect"
	return &own
}

// ofLast is final without former tries.
func ofLast(ctx context.Context, err error, m manner) error {
	var lost *errLost
	var unsent *errUnsent
	switch {
	case errors.As(err, &lost):
		if ctx.Err() != nil {
			return contextError(ctx, m.write)
		}
		e := &Error{Code: ErrUnknown.Code, Unknown: m.write, Position: -1, cause: lost.cause,
			Message: "the connection broke before the answer came: " + fromStatus(lost.cause).Message}
		if m.again {
			e.Code = ErrUnavailable.Code
		}
		if m.write {
			e.Hint = "The call may have taken effect: look before asking again."
		}
		return e
	case errors.As(err, &unsent):
		return &Error{Code: ErrUnavailable.Code, Message: "the call was not taken: " + fromStatus(unsent.cause).Message, Position: -1, cause: unsent.cause}
	}
	return err
}

// errUnsent is of a call that has not left this process.
type errUnsent struct{ cause error }

func (e *errUnsent) Error() string { return e.cause.Error() }
func (e *errUnsent) Unwrap() error { return e.cause }

// try sends a call once and waits for its answer.
func (c *Client) try(ctx context.Context, w *wire.Call, m manner) (*wire.Answer, error) {
	size := w.SizeVT()
	if size > maxCall {
		return nil, &Error{Code: ErrTooLarge.Code, Position: -1, Message: fmt.Sprintf("a call has %d bytes, the most is %d", size, maxCall), Hint: "Do it in several calls."}
	}
	room, units := c.short, c.units(size)
	if m.long {
		room = c.long
	}
	if room.Acquire(ctx, units) != nil {
		return nil, contextError(ctx, false)
	}
	defer room.Release(units)
	l := c.pick()
	s, err := l.get(ctx, c.patience)
	if err != nil {
		return nil, err
	}
	if err := stamp(ctx, w); err != nil {
		return nil, err
	}
	l.open.Add(1)
	defer l.open.Add(-1)
	k := calls.Get().(*call)
	if err := s.start(k, w, size); err != nil {
		calls.Put(k)
		return nil, unsent(err)
	}
	var r result
	select {
	case r = <-k.ch:
	case <-ctx.Done():
		if s.forget(k) {
			calls.Put(k)
			return nil, contextError(ctx, m.write)
		}
		r = <-k.ch
	}
	calls.Put(k)
	switch {
	case r.err != nil:
		return nil, r.err
	case r.answer.Error != nil:
		return nil, fromWire(r.answer.Error)
	}
	return r.answer, nil
}

// unsent marks an error of a call that was not sent, unless it is refused for good.
// The error of a session that had ended is that of calls which were sent on it.
func unsent(err error) error {
	var e *Error
	var lost *errLost
	var before *errUnsent
	switch {
	case errors.As(err, &e):
		sure := *e // the error is shared by all calls of the session
		sure.Unknown = false
		return &sure
	case errors.As(err, &before):
		return before
	case errors.As(err, &lost):
		err = lost.cause
	}
	return &errUnsent{err}
}

// units is what a request counts of MaxOpen; a large one takes all there is.
func (c *Client) units(size int) int64 {
	return min(1+int64(size/callUnit), c.maxOpen)
}

// stamp gives a call the time its context leaves, and its trace.
func stamp(ctx context.Context, w *wire.Call) error {
	if end, ok := ctx.Deadline(); ok {
		left := time.Until(end)
		if left <= 0 {
			return contextError(expired{ctx}, false)
		}
		w.TimeoutUs = max(1, left.Microseconds())
	}
	if w.Trace == nil {
		w.Trace = traceParent(ctx)
	}
	return nil
}

// expired is a context whose deadline is over, though its timer has not run yet.
type expired struct{ context.Context }

func (expired) Err() error { return context.DeadlineExceeded }

// newKey is 96 random bits.
func newKey() string {
	var b [12]byte
	rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// newFlowID makes an ID as the server does: its order is that of time.
func newFlowID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return fmt.Sprintf("f_%012x%x", time.Now().UnixMilli(), b)
}

// requestID makes an idempotency key that no other call has.
func (c *Client) requestID() string {
	b := make([]byte, 0, 32)
	b = append(b, c.keys...)
	b = append(b, '.')
	return string(strconv.AppendUint(b, c.nextKey.Add(1), 36))
}
