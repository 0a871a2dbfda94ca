// Package http1 is a small HTTP/1.1 client for one origin, made for many
// long, slow answers at a time: an exchange runs wholly on the caller's
// goroutine, owns one small buffer, and hands the body out as slices of it.
//
// What it does not do, on purpose: HTTP/2, redirects (they could carry a
// secret to another host), proxies (HTTP_PROXY and its kin are ignored),
// content encodings, cookies.
package http1

import (
	"bufio"
	"errors"
	"time"
)

// Bounds of the parser. They are constants because no sane server meets them.
const (
	// MaxLine bounds one line of a head, a chunk header or a trailer, in bytes.
	MaxLine = 16 << 10
	// MaxHead bounds a whole response head or trailer, in bytes.
	MaxHead = 64 << 10
	// maxInterim bounds the 1xx responses before the final one.
	maxInterim = 8
	// maxEmptyReads bounds reads that bring neither bytes nor an error.
	maxEmptyReads = 16
	// bufSize is the read buffer of an exchange: several usual stream events.
	bufSize = 2 << 10
	// writeBufSize is the write buffer, held only while a request is written.
	writeBufSize = 8 << 10
)

// Failure says what kind of thing went wrong.
type Failure uint8

// The failures. Malformed and TooLarge are the server's doing and will come
// again; the network ones may pass.
const (
	FailDial      Failure = iota + 1 // no connection could be made
	FailTLS                          // the TLS handshake failed
	FailTimeout                      // dial, first byte or idle time-out
	FailClosed                       // the connection broke before the end
	FailMalformed                    // the answer is not HTTP/1.1 as we read it
	FailTooLarge                     // a bound of this package was passed
	FailCancelled                    // the caller's context ended
)

// Error is what every method of this package returns for a failed exchange.
type Error struct {
	Failure Failure
	Msg     string
	Err     error // cause, may be nil
}

// Error implements error. It never holds bytes of the request.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Msg
	}
	return e.Msg + ": " + e.Err.Error()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrWait tells that no body bytes are buffered: call Fill, then Next again.
var ErrWait = errors.New("http1: no buffered bytes")

var errDialTimeout = errors.New("dial timed out")

// longAgo is a deadline in the past: it makes pending I/O fail at once.
var longAgo = time.Unix(1, 0)

func fail(f Failure, msg string, cause error) *Error { return &Error{Failure: f, Msg: msg, Err: cause} }

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// RequestWriter writes one whole request, head and body. It may be called a
// second time, when the first went to a pooled connection that the server had
// already closed; it must then write the same bytes.
type RequestWriter interface {
	WriteRequest(w *bufio.Writer) error
}
