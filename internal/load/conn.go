package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Bounds of a reply's head and of the part of a body that is kept.
const (
	readBuffer  = 8 << 10
	maxFields   = 200
	keptBody    = 64 << 10
	idleRedial  = 15 * time.Second // a server may close an idle connection: don't race with it
	dialTimeout = 10 * time.Second
)

// conn is one keep-alive HTTP/1.1 connection of one worker; it is not safe
// for concurrent use. After an error it redials by itself.
type conn struct {
	env  env.Env
	base base
	auth string // header lines, each with CRLF

	mu   sync.Mutex // guards nc and dead against abort
	nc   net.Conn   // nil when closed
	dead bool       // by abort

	last     time.Time
	buf      []byte // unread bytes are buf[r:w]
	r, w     int
	out      []byte // request head under construction
	body     bodyMode
	left     int64 // bytes left of the body or chunk
	keep     bool  // the connection outlives this reply
	answered bool  // some byte of the reply has come
}

type bodyMode int

const (
	bodyNone bodyMode = iota
	bodyLength
	bodyChunked    // between chunks when left is 0
	bodyChunkedEnd // the chunk's CRLF is due
	bodyToEOF
)

// status is the head of a reply.
type status struct {
	code       int
	stream     bool          // text/event-stream
	retryAfter time.Duration // 0 when absent or unreadable
	hasRetry   bool
}

func newConn(e env.Env, b base, apiKey string) *conn {
	c := &conn{env: e, base: b}
	if apiKey != "" {
		c.auth = "Authorization: Bearer " + apiKey + "\r\n"
	}
	return c
}

func (c *conn) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nc != nil {
		_ = c.nc.Close()
		c.nc = nil
	}
	c.r, c.w = 0, 0
}

// abort fails the exchange under way and every later one. It is the one
// method that another goroutine may call.
func (c *conn) abort() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
	if c.nc != nil {
		_ = c.nc.Close()
	}
}

// adopt takes a fresh connection into use.
func (c *conn) adopt(nc net.Conn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		_ = nc.Close()
		return net.ErrClosed
	}
	c.nc = nc
	return nil
}

// errDial marks an error from before the request was sent.
var errDial = errors.New("connect")

// do sends a request and reads the head of the reply. The deadline covers the
// reading of the body too. On an error the connection is closed.
func (c *conn) do(ctx context.Context, q Request, deadline time.Time) (status, error) {
	st, err := c.exchange(ctx, q, deadline)
	if err != nil {
		c.close()
	}
	return st, err
}

func (c *conn) exchange(ctx context.Context, q Request, deadline time.Time) (status, error) {
	c.answered = false
	if c.nc != nil && c.env.Clock.Now().Sub(c.last) > idleRedial {
		c.close()
	}
	if c.nc == nil {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		nc, err := c.env.Dialer.DialContext(ctx, "tcp", c.base.addr)
		cancel()
		if err != nil {
			return status{}, fmt.Errorf("%w: %w", errDial, err)
		}
		if err := c.adopt(nc); err != nil {
			return status{}, err
		}
		if c.buf == nil {
			c.buf = make([]byte, readBuffer)
		}
	}
	if err := c.nc.SetDeadline(deadline); err != nil {
		return status{}, err
	}
	if err := c.send(q); err != nil {
		return status{}, err
	}
	return c.head()
}

func (c *conn) send(q Request) error {
	b := append(c.out[:0], q.Method...)
	b = append(b, ' ')
	b = append(b, c.base.path...)
	b = append(b, q.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, c.base.host...)
	b = append(b, "\r\nUser-Agent: perdure-load\r\n"...)
	b = append(b, c.auth...)
	if q.Body != nil {
		b = append(b, "Content-Type: application/json\r\nContent-Length: "...)
		b = strconv.AppendInt(b, int64(len(q.Body)), 10)
		b = append(b, "\r\n"...)
	}
	b = append(b, "\r\n"...)
	const small = 4096 // copied into one write; a larger body goes by writev
	if len(q.Body) <= small {
		b = append(b, q.Body...)
		c.out = b
		_, err := c.nc.Write(b)
		return err
	}
	c.out = b
	_, err := (&net.Buffers{b, q.Body}).WriteTo(c.nc)
	return err
}

// fill reads more bytes, after those that are unread.
func (c *conn) fill() error {
	if c.r == c.w {
		c.r, c.w = 0, 0
	} else if c.w == len(c.buf) {
		if c.r == 0 {
			return errors.New("a line of the reply's head is too long")
		}
		c.w = copy(c.buf, c.buf[c.r:c.w])
		c.r = 0
	}
	n, err := c.nc.Read(c.buf[c.w:])
	c.w += n
	if n > 0 {
		c.answered = true
		return nil
	}
	return err
}

// line returns the next line without its end, valid until the next read.
func (c *conn) line() ([]byte, error) {
	for from := c.r; ; {
		if i := bytes.IndexByte(c.buf[from:c.w], '\n'); i >= 0 {
			l := c.buf[c.r : from+i]
			c.r = from + i + 1
			return bytes.TrimSuffix(l, []byte("\r")), nil
		}
		seen := c.w - c.r
		if err := c.fill(); err != nil {
			return nil, err
		}
		from = c.r + seen
	}
}

func (c *conn) head() (status, error) {
	for {
		st, err := c.oneHead()
		if err != nil || st.code >= 200 {
			return st, err
		}
	}
}

func (c *conn) oneHead() (status, error) {
	var st status
	l, err := c.line()
	if err != nil {
		return st, err
	}
	if len(l) < 12 || !bytes.HasPrefix(l, []byte("HTTP/1.")) {
		return st, fmt.Errorf("not an HTTP/1.1 reply: %q", clip(l))
	}
	if st.code, err = strconv.Atoi(string(l[9:12])); err != nil || st.code < 100 {
		return st, fmt.Errorf("not an HTTP/1.1 reply: %q", clip(l))
	}
	c.keep = l[7] == '1'
	c.body, c.left = bodyToEOF, 0
	if st.code == 204 || st.code == 304 || st.code < 200 {
		c.body = bodyNone
	}
	for range maxFields {
		if l, err = c.line(); err != nil {
			return st, err
		}
		if len(l) == 0 {
			if c.body == bodyLength && c.left == 0 {
				c.body = bodyNone
			}
			if c.body == bodyToEOF {
				c.keep = false
			}
			return st, nil
		}
		if err := c.headField(&st, l); err != nil {
			return st, err
		}
	}
	return st, fmt.Errorf("more than %d header fields in the reply", maxFields)
}

func (c *conn) headField(st *status, l []byte) error {
	name, value, _ := bytes.Cut(l, []byte(":"))
	value = bytes.TrimSpace(value)
	switch {
	case bytes.EqualFold(name, []byte("content-length")):
		n, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("malformed Content-Length %q", clip(value))
		}
		if c.body == bodyToEOF {
			c.body, c.left = bodyLength, n
		}
	case bytes.EqualFold(name, []byte("transfer-encoding")):
		if c.body != bodyNone && bytes.EqualFold(value, []byte("chunked")) {
			c.body, c.left = bodyChunked, 0
		}
	case bytes.EqualFold(name, []byte("connection")):
		if bytes.EqualFold(value, []byte("close")) {
			c.keep = false
		}
	case bytes.EqualFold(name, []byte("content-type")):
		st.stream = bytes.HasPrefix(value, []byte("text/event-stream"))
	case bytes.EqualFold(name, []byte("retry-after")):
		if s, err := strconv.ParseFloat(string(value), 64); err == nil && s >= 0 && s < 1e6 {
			st.retryAfter, st.hasRetry = time.Duration(s*float64(time.Second)), true
		}
	}
	return nil
}

// next returns the next piece of the body, valid until the next read; io.EOF
// after the last, when the connection is ready for another request. Any other
// error closes the connection.
func (c *conn) next() ([]byte, error) {
	p, err := c.piece()
	switch {
	case err == nil:
	case err == io.EOF && c.body == bodyNone:
		c.last = c.env.Clock.Now()
		if !c.keep {
			c.close()
		}
	default:
		c.close()
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
	}
	return p, err
}

func (c *conn) piece() ([]byte, error) {
	for {
		switch c.body {
		case bodyNone:
			return nil, io.EOF
		case bodyChunked, bodyChunkedEnd:
			if c.left > 0 {
				break
			}
			if err := c.nextChunk(); err != nil {
				return nil, err
			}
			continue
		}
		if c.r == c.w {
			if err := c.fill(); err != nil {
				if err == io.EOF && c.body == bodyToEOF {
					c.body = bodyNone
				}
				return nil, err
			}
		}
		p := c.buf[c.r:c.w]
		if c.body != bodyToEOF {
			p = p[:min(int64(len(p)), c.left)]
			if c.left -= int64(len(p)); c.left == 0 && c.body == bodyLength {
				c.body = bodyNone
			}
		}
		c.r += len(p)
		return p, nil
	}
}

// nextChunk reads a chunk's size, and the trailer after the last.
func (c *conn) nextChunk() error {
	if c.body == bodyChunkedEnd {
		if l, err := c.line(); err != nil {
			return err
		} else if len(l) != 0 {
			return errors.New("malformed chunk")
		}
	}
	c.body = bodyChunkedEnd
	l, err := c.line()
	if err != nil {
		return err
	}
	size, _, _ := bytes.Cut(l, []byte(";"))
	n, err := strconv.ParseInt(string(bytes.TrimSpace(size)), 16, 63)
	if err != nil || n < 0 {
		return fmt.Errorf("malformed chunk size %q", clip(l))
	}
	if c.left = n; n > 0 {
		return nil
	}
	for range maxFields {
		if l, err = c.line(); err != nil {
			return err
		}
		if len(l) == 0 {
			c.body = bodyNone
			return nil
		}
	}
	return fmt.Errorf("more than %d trailer fields", maxFields)
}

// rest reads the body to its end and returns its beginning.
func (c *conn) rest() ([]byte, error) {
	var kept []byte
	for {
		p, err := c.next()
		if err == io.EOF {
			return kept, nil
		}
		if err != nil {
			return kept, err
		}
		kept = append(kept, p[:min(len(p), keptBody-len(kept))]...)
	}
}
