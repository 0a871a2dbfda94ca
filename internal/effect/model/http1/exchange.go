package http1

import (
	"bufio"
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Exchange is one request and its response. The zero value is ready for Do;
// after Close it may be used again, which keeps its buffer. It belongs to one
// goroutine.
type Exchange struct {
	// The first fields are used at every read. With a thousand exchanges in
	// turn each cache line of them is a miss, so they lie together.
	cancelled uint32 // atomic: the context ended; set by conn.interrupt
	state     bodyState
	inBody    bool  // the first body byte arrived: idle time-outs apply
	dead      bool  // reading failed for good
	any       bool  // a byte of the response arrived
	cn        *conn // nil when no connection is held
	buf       []byte
	r, w      int   // unread bytes are buf[r:w]
	left      int64 // bytes left in the body or chunk
	armed     time.Time
	c         *Client
	pendErr   error // error that came together with bytes

	written   bool        // the request is out: the server may be streaming
	eof       bool        // the server ended its side
	keep      bool        // the server keeps the connection open
	stop      func() bool // undoes the context's hook
	headBytes int         // bytes of head lines read
	trailer   int         // bytes of trailer lines read

	// Head of the final response, valid after Do.
	Status     int
	RetryAfter string // Retry-After as sent; only for status >= 400
	RetryMS    string // Retry-After-Ms as sent; only for status >= 400
}

var writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, writeBufSize) }}

// Do sends the request and reads the response head. On success the caller
// reads the body with Next and Fill; in every case it must call Close.
// A pooled connection that turns out closed before any byte of the response
// is replaced once by a fresh one. All errors are *Error.
func (x *Exchange) Do(ctx context.Context, c *Client, req RequestWriter) error {
	x.c = c
	if ctx.Err() != nil {
		return fail(FailCancelled, "cancelled before the request", context.Cause(ctx))
	}
	for fresh := false; ; fresh = true {
		cn, err := c.get(ctx, fresh)
		if err != nil {
			return err
		}
		pooled := cn.pooled
		err = x.roundTrip(ctx, cn, req)
		if err == nil {
			return nil
		}
		var e *Error
		if fresh || !pooled || x.any || !errors.As(err, &e) || e.Failure != FailClosed {
			return err
		}
		x.Close()
		x.c = c
		c.stale.Add(1)
		c.DropIdle()
	}
}

func (x *Exchange) roundTrip(ctx context.Context, cn *conn, req RequestWriter) error {
	x.cn, cn.owner = cn, x
	if x.buf == nil {
		x.buf = make([]byte, bufSize)
	}
	_ = cn.raw.SetDeadline(x.c.o.Clock.Now().Add(x.c.o.FirstByteTimeout))
	if ctx.Done() != nil {
		x.stop = context.AfterFunc(ctx, cn.onCancel)
	}
	werr := x.write(req)
	if x.Cancelled() {
		return x.cancelledError()
	}
	if werr != nil && isTimeout(werr) {
		return fail(FailTimeout, "the server did not take the request in time", nil)
	}
	x.written = werr == nil
	// A server may refuse a request before it has read it all: its answer says
	// more than the broken pipe does.
	if err := x.readHead(); err != nil {
		if werr != nil && !x.any {
			return fail(FailClosed, "the connection broke while the request was sent", werr)
		}
		return err
	}
	if werr != nil {
		x.keep = false
	}
	return nil
}

func (x *Exchange) write(req RequestWriter) error {
	w := writers.Get().(*bufio.Writer)
	w.Reset(x.cn.rw)
	err := req.WriteRequest(w)
	if err == nil {
		err = w.Flush()
	}
	w.Reset(nil)
	writers.Put(w)
	return err
}

func (x *Exchange) cancelledError() error {
	return fail(FailCancelled, "cancelled by the caller", nil)
}

// Cancelled reports whether the context of Do ended during the exchange.
func (x *Exchange) Cancelled() bool { return atomic.LoadUint32(&x.cancelled) != 0 }

// Fill blocks until the connection brings more bytes, within the time-outs.
// It must only be called after Next returned ErrWait.
func (x *Exchange) Fill() error {
	if x.cn == nil || x.dead {
		return fail(FailClosed, "the exchange is closed", nil)
	}
	if err := x.makeRoom(); err != nil {
		return err
	}
	if x.pendErr != nil {
		return x.readFailed(x.pendErr)
	}
	if x.inBody {
		x.rearm()
	}
	for range maxEmptyReads {
		if x.Cancelled() {
			return x.cancelledError()
		}
		n, err := x.cn.rw.Read(x.buf[x.w:])
		if x.Cancelled() {
			x.dead = err != nil
			return x.cancelledError()
		}
		if n > 0 {
			x.w += n
			x.any = true
			x.pendErr = err
			return nil
		}
		if err != nil {
			return x.readFailed(err)
		}
	}
	return x.readFailed(io.ErrNoProgress)
}

// makeRoom leaves free space at the end of buf. Only a line that is not yet
// whole can fill it, so it grows to MaxLine at most.
func (x *Exchange) makeRoom() error {
	switch {
	case x.r == x.w:
		x.r, x.w = 0, 0
	case x.w < len(x.buf):
	case x.r > 0:
		x.w = copy(x.buf, x.buf[x.r:x.w])
		x.r = 0
	case len(x.buf) >= MaxLine:
		return fail(FailTooLarge, "a line of the response is too long", nil)
	default:
		x.buf = append(x.buf, make([]byte, len(x.buf))...)
	}
	return nil
}

// rearm moves the idle deadline, but only when an eighth of it has passed:
// setting a deadline costs more than reading the clock.
func (x *Exchange) rearm() {
	idle := x.c.o.IdleTimeout
	now := x.c.o.Clock.Now()
	if left := x.armed.Sub(now); left >= idle && left <= idle+idle/8 {
		return
	}
	x.armed = now.Add(idle + idle/8)
	_ = x.cn.raw.SetReadDeadline(x.armed)
}

func (x *Exchange) readFailed(err error) error {
	if errors.Is(err, io.EOF) {
		x.eof = true
		if x.state == bodyUntilClose {
			return nil // Next reports the end
		}
		x.dead = true
		return fail(FailClosed, "the connection was closed before the answer was complete", nil)
	}
	x.dead = true
	if isTimeout(err) {
		if x.inBody {
			return fail(FailTimeout, "the server fell silent for longer than the idle time-out", nil)
		}
		return fail(FailTimeout, "no answer within the first-byte time-out", nil)
	}
	return fail(FailClosed, "the connection broke", err)
}

// Drain reads the rest of the body, at most max bytes and for at most d, so
// that Close can keep the connection. Failing to do so is no error.
func (x *Exchange) Drain(max int, d time.Duration) {
	set := false
	for {
		data, err := x.Next()
		if max -= len(data); max < 0 {
			return
		}
		if err == nil {
			continue
		}
		if err != ErrWait {
			return
		}
		if !set {
			set = true
			// Within bounds of rearm, so that Fill leaves this deadline alone.
			now := x.c.o.Clock.Now()
			x.armed = now.Add(x.c.o.IdleTimeout + x.c.o.IdleTimeout/8)
			_ = x.cn.raw.SetReadDeadline(now.Add(d))
		}
		if x.Fill() != nil {
			return
		}
	}
}

// Close ends the exchange. A connection whose response was read to its end
// goes back to the pool. One that is left in the middle of a response is
// half-closed and given up to Linger for the server to end its side, so that
// when Close returns the server has, as a rule, stopped streaming; then it is
// closed. Close is idempotent.
func (x *Exchange) Close() {
	cn := x.cn
	if cn == nil {
		return
	}
	if x.stop != nil && !x.stop() {
		<-cn.fired
	}
	if x.state == bodyDone && x.keep && x.r == x.w && x.pendErr == nil && !x.eof && !x.dead && !x.Cancelled() {
		x.c.put(cn)
	} else {
		x.abandon(cn)
	}
	buf := x.buf
	if len(buf) > bufSize {
		buf = nil
	}
	*x = Exchange{buf: buf}
}

func (x *Exchange) abandon(cn *conn) {
	streaming := x.written && x.state != bodyDone && !x.dead && !x.eof
	if streaming && (x.Cancelled() || cn.halfClose()) {
		for { // ends by the deadline that halfClose has set
			if _, err := cn.raw.Read(x.buf); err != nil {
				break
			}
		}
	}
	_ = cn.raw.Close()
}
