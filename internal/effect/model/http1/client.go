package http1

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Options configure a Client. Zero durations and counts take the defaults.
type Options struct {
	Addr   string      // host:port to dial
	TLS    *tls.Config // nil for plain HTTP; not modified
	Dialer env.Dialer
	Clock  env.Clock

	DialTimeout      time.Duration // connection and TLS handshake; default 10 s
	FirstByteTimeout time.Duration // start of the request to first body byte; default 120 s
	IdleTimeout      time.Duration // silence inside a body; default 60 s, kept to within an eighth above
	KeepAlive        time.Duration // how long an idle connection is kept; default 30 s
	Linger           time.Duration // see Exchange.Close; default 50 ms
	MaxIdle          int           // idle connections kept; default 1024
}

func (o Options) withDefaults() Options {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&o.DialTimeout, 10 * time.Second},
		{&o.FirstByteTimeout, 120 * time.Second},
		{&o.IdleTimeout, 60 * time.Second},
		{&o.KeepAlive, 30 * time.Second},
		{&o.Linger, 50 * time.Millisecond},
	} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	if o.MaxIdle <= 0 {
		o.MaxIdle = 1024
	}
	return o
}

// Client holds the idle connections to one origin. Safe for concurrent use.
type Client struct {
	o Options

	dialed, reused, stale atomic.Uint64

	mu      sync.Mutex
	idle    []*conn   // guarded by mu; oldest first, at most o.MaxIdle
	reaper  env.Timer // guarded by mu; pending while idle is not empty
	stopped bool      // guarded by mu
}

// Stats counts since the start, except Idle, which is now.
type Stats struct {
	Idle   int    // connections waiting for a request
	Dialed uint64 // connections made
	Reused uint64 // exchanges on a pooled connection
	Stale  uint64 // pooled connections found dead, before or after the request was sent on them
}

// New makes a client. It opens no connection.
func New(o Options) *Client {
	o = o.withDefaults()
	if o.TLS != nil {
		o.TLS = o.TLS.Clone()
		o.TLS.NextProtos = []string{"http/1.1"}
		if o.TLS.ClientSessionCache == nil {
			o.TLS.ClientSessionCache = tls.NewLRUClientSessionCache(32)
		}
		if o.TLS.Time == nil {
			o.TLS.Time = o.Clock.Now
		}
	}
	return &Client{o: o}
}

// Stats reads the counters.
func (c *Client) Stats() Stats {
	c.mu.Lock()
	n := len(c.idle)
	c.mu.Unlock()
	return Stats{Idle: n, Dialed: c.dialed.Load(), Reused: c.reused.Load(), Stale: c.stale.Load()}
}

// Close closes the idle connections and keeps no new ones. Exchanges in
// flight go on to their end.
func (c *Client) Close() {
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()
	c.DropIdle()
}

// stream is the part of a network connection used here.
type stream interface {
	io.ReadWriteCloser
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// conn is one connection. It belongs to one exchange or to the idle list;
// only interrupt may run beside its owner.
type conn struct {
	rw        stream        // raw, or TLS over it
	raw       stream        // the transport
	owner     *Exchange     // whom interrupt tells; nil while idle
	fired     chan struct{} // cap 1: interrupt has finished
	onCancel  func()        // interrupt as a value, made once for all exchanges
	linger    time.Duration
	clock     env.Clock
	probe     probe
	idleSince time.Time
	pooled    bool // came from the idle list
}

// interrupt runs when the caller's context ends. It makes the owner's pending
// I/O return soon and tells the server, by the half-close, that nobody reads
// any more. The owner sees cancelled after every read and before the next, so
// a deadline it sets at the same moment cannot hide this one.
func (cn *conn) interrupt() {
	atomic.StoreUint32(&cn.owner.cancelled, 1)
	if !cn.halfClose() {
		_ = cn.raw.Close()
	}
	cn.fired <- struct{}{}
}

// halfClose sends end-of-stream to the server and leaves it linger to end its
// own side. It reports false when the transport cannot do that.
func (cn *conn) halfClose() bool {
	h, ok := cn.raw.(interface{ CloseWrite() error })
	if !ok {
		return false
	}
	_ = cn.raw.SetWriteDeadline(longAgo)
	_ = h.CloseWrite()
	_ = cn.raw.SetReadDeadline(cn.clock.Now().Add(cn.linger))
	return true
}

// dial makes a connection on a goroutine of its own: dialing and TLS need a
// deep stack, which the caller's goroutine would keep through its long wait.
func (c *Client) dial(ctx context.Context) (*conn, error) {
	var cn *conn
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		cn, err = c.dialNow(ctx)
	}()
	<-done // ends with ctx or DialTimeout
	return cn, err
}

// dialNow makes a connection, TLS included, within DialTimeout.
func (c *Client) dialNow(ctx context.Context) (*conn, error) {
	dctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t := c.o.Clock.AfterFunc(c.o.DialTimeout, func() { cancel(errDialTimeout) })
	defer t.Stop()

	raw, err := c.o.Dialer.DialContext(dctx, "tcp", c.o.Addr)
	if err != nil {
		return nil, dialError(ctx, dctx, FailDial, "cannot connect to "+c.o.Addr, err)
	}
	cn := &conn{raw: raw, rw: raw, linger: c.o.Linger, clock: c.o.Clock, fired: make(chan struct{}, 1)}
	cn.onCancel = cn.interrupt
	cn.probe.attach(raw)
	if c.o.TLS != nil {
		tc := tls.Client(raw, c.o.TLS)
		if err := tc.HandshakeContext(dctx); err != nil {
			_ = raw.Close()
			return nil, dialError(ctx, dctx, handshakeFailure(err), "TLS handshake with "+c.o.Addr+" failed", err)
		}
		cn.rw = tc
	}
	c.dialed.Add(1)
	return cn, nil
}

func dialError(ctx, dctx context.Context, f Failure, msg string, err error) error {
	switch {
	case ctx.Err() != nil:
		return fail(FailCancelled, "cancelled while connecting", context.Cause(ctx))
	case errors.Is(context.Cause(dctx), errDialTimeout), isTimeout(err):
		return fail(FailTimeout, msg, errDialTimeout)
	}
	return fail(f, msg, err)
}

// handshakeFailure tells a broken connection, which may pass, from a peer
// that is not acceptable, which will not.
func handshakeFailure(err error) Failure {
	var cert *tls.CertificateVerificationError
	var rec tls.RecordHeaderError
	var alert tls.AlertError
	if errors.As(err, &cert) || errors.As(err, &rec) || errors.As(err, &alert) {
		return FailTLS
	}
	return FailDial
}

// get gives an idle connection, the youngest first, or dials. The loop is
// bounded by the number of idle connections.
func (c *Client) get(ctx context.Context, fresh bool) (*conn, error) {
	for !fresh {
		cn := c.pop()
		if cn == nil {
			break
		}
		_ = cn.raw.SetDeadline(time.Time{}) // the last one may have passed, and would fail the probe
		if cn.probe.usable() {
			c.reused.Add(1)
			return cn, nil
		}
		c.stale.Add(1)
		_ = cn.raw.Close()
	}
	return c.dial(ctx)
}

func (c *Client) pop() *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(c.idle)
	if n == 0 {
		return nil
	}
	cn := c.idle[n-1]
	if c.o.Clock.Now().Sub(cn.idleSince) >= c.o.KeepAlive {
		return nil // the reaper is about to close them all
	}
	c.idle[n-1] = nil
	c.idle = c.idle[:n-1]
	cn.pooled = true
	return cn
}

// put keeps cn for the next exchange, or closes it when there is no room.
func (c *Client) put(cn *conn) {
	cn.owner = nil
	cn.idleSince = c.o.Clock.Now()
	c.mu.Lock()
	if c.stopped || len(c.idle) >= c.o.MaxIdle {
		c.mu.Unlock()
		_ = cn.raw.Close()
		return
	}
	c.idle = append(c.idle, cn)
	if c.reaper == nil {
		c.reaper = c.o.Clock.AfterFunc(c.o.KeepAlive, c.reap)
	}
	c.mu.Unlock()
}

// reap closes the connections that were idle for KeepAlive.
func (c *Client) reap() {
	now := c.o.Clock.Now()
	c.mu.Lock()
	n := 0
	for n < len(c.idle) && now.Sub(c.idle[n].idleSince) >= c.o.KeepAlive {
		n++
	}
	old := append([]*conn(nil), c.idle[:n]...)
	rest := copy(c.idle, c.idle[n:])
	clear(c.idle[rest:])
	c.idle = c.idle[:rest]
	c.reaper = nil
	if rest > 0 {
		c.reaper = c.o.Clock.AfterFunc(c.o.KeepAlive-now.Sub(c.idle[0].idleSince), c.reap)
	} else {
		c.idle = nil // give the array of a busy time back
	}
	c.mu.Unlock()
	for _, cn := range old {
		_ = cn.raw.Close()
	}
}

// DropIdle closes every idle connection: on Close, to save memory, and when one was
// found dead, because the others are older and surely dead too.
func (c *Client) DropIdle() {
	c.mu.Lock()
	old := c.idle
	c.idle = nil
	if c.reaper != nil {
		c.reaper.Stop()
		c.reaper = nil
	}
	c.mu.Unlock()
	for _, cn := range old {
		_ = cn.raw.Close()
	}
}
