package server

import (
	"bytes"
	"net"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/grpcapi"
	"github.com/perdure-dev/perdure/internal/mux"
)

// splitter serves two protocols on one address: connections that begin with the
// preface of HTTP/2, or ask for the frames of calls, are gRPC's, all others are
// HTTP/1's.
type splitter struct {
	l       net.Listener
	timeout time.Duration // for a client to say its first bytes
	now     func() time.Time
	http    *half
	grpc    *half
	done    chan struct{}
	once    sync.Once
}

// preface is what a connection of gRPC begins with, and no HTTP/1 request.
var preface = []byte(grpcapi.Preface)

// ofGRPC is what connections of its half begin with. No prefix of one of them is
// a whole request of the other half.
var ofGRPC = [][]byte{preface, []byte(mux.FramesLine)}

// belongs says whether a connection that begins with first is gRPC's, or that
// more must be read to know.
func belongs(first []byte) (grpc, open bool) {
	for _, whole := range ofGRPC {
		if bytes.HasPrefix(first, whole) {
			return true, false
		}
		open = open || bytes.HasPrefix(whole, first)
	}
	return false, open
}

// peekBytes is read at first: most requests fit.
const peekBytes = 4 << 10

var peekPool = sync.Pool{New: func() any { b := make([]byte, peekBytes); return &b }}

func split(l net.Listener, timeout time.Duration, now func() time.Time) *splitter {
	s := &splitter{l: l, timeout: timeout, now: now, done: make(chan struct{})}
	s.http, s.grpc = newHalf(s), newHalf(s)
	return s
}

// run accepts until the listener fails; its error ends both halves.
func (s *splitter) run() error {
	defer s.close()
	for {
		c, err := s.l.Accept()
		if err != nil {
			return err
		}
		go s.sort(c)
	}
}

func (s *splitter) close() {
	s.once.Do(func() {
		close(s.done)
		_ = s.l.Close()
	})
}

// sort reads a connection's first bytes and gives it to the half it belongs to.
func (s *splitter) sort(c net.Conn) {
	buf := peekPool.Get().(*[]byte)
	defer peekPool.Put(buf)
	if err := c.SetReadDeadline(s.now().Add(s.timeout)); err != nil {
		_ = c.Close()
		return
	}
	n, grpc := 0, false
	for open := true; open; grpc, open = belongs((*buf)[:n]) {
		m, err := c.Read((*buf)[n:])
		n += m
		if err != nil {
			_ = c.Close()
			return
		}
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		_ = c.Close()
		return
	}
	to := s.http
	if grpc {
		to = s.grpc
	}
	select {
	case to.conns <- &peeked{Conn: c, first: bytes.Clone((*buf)[:n])}:
	case <-to.done:
		_ = c.Close()
	case <-s.done:
		_ = c.Close()
	}
}

// half is the listener of one protocol.
type half struct {
	s     *splitter
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHalf(s *splitter) *half {
	return &half{s: s, conns: make(chan net.Conn), done: make(chan struct{})}
}

// Accept implements net.Listener.
func (h *half) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
	case <-h.s.done:
	}
	return nil, net.ErrClosed
}

// Close implements net.Listener. It leaves the other half alone.
func (h *half) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr implements net.Listener.
func (h *half) Addr() net.Addr { return h.s.l.Addr() }

// peeked is a connection whose first bytes were read already.
type peeked struct {
	net.Conn
	first []byte // owner: the one goroutine that reads
}

// Read implements net.Conn.
func (p *peeked) Read(b []byte) (int, error) {
	if len(p.first) == 0 {
		return p.Conn.Read(b)
	}
	n := copy(b, p.first)
	if p.first = p.first[n:]; len(p.first) == 0 {
		p.first = nil
	}
	return n, nil
}

// Under gives the connection itself, to those who only write.
func (p *peeked) Under() net.Conn { return p.Conn }

// Under gives the connection itself, to those who only write.
func (c *limitConn) Under() net.Conn { return c.Conn }
