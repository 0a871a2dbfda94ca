package grpcapi

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// Preface is what a connection of gRPC begins with, and no HTTP/1 request does.
const Preface = "PRI "

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
	p.first = p.first[n:]
	return n, nil
}

// Under implements wrapper.
func (p *peeked) Under() net.Conn { return p.Conn }

// door is the listener of grpc-go. Connections that do not begin as gRPC's are
// asked whether they want frames.
type door struct {
	s      *Server
	l      net.Listener
	secure credentials.TransportCredentials // nil = without TLS
	conns  chan net.Conn
	failed chan error
	done   chan struct{}
	once   sync.Once
}

func newDoor(s *Server, l net.Listener, secure credentials.TransportCredentials) *door {
	d := &door{s: s, l: l, secure: secure, conns: make(chan net.Conn), failed: make(chan error), done: make(chan struct{})}
	go d.run()
	return d
}

// run takes connections until the listener is closed. Its errors go to grpc-go,
// which accepts again after a pause when that helps.
func (d *door) run() {
	for {
		c, err := d.l.Accept()
		if err == nil {
			if d.s.framed.enter(c) {
				go d.sort(c)
			} else {
				_ = c.Close()
			}
			continue
		}
		select {
		case d.failed <- err:
		case <-d.done:
			return
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// Accept implements net.Listener.
func (d *door) Accept() (net.Conn, error) {
	select {
	case c := <-d.conns:
		return c, nil
	case err := <-d.failed:
		return nil, err
	case <-d.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (d *door) Close() error {
	d.once.Do(func() { close(d.done) })
	return d.l.Close()
}

// Addr implements net.Listener.
func (d *door) Addr() net.Addr { return d.l.Addr() }

// sort gives a connection to who speaks what it begins with.
func (d *door) sort(raw net.Conn) {
	defer d.s.framed.leave(raw)
	c, grpc, err := d.look(raw)
	switch {
	case err != nil:
		_ = raw.Close()
	case grpc:
		select {
		case d.conns <- c:
		case <-d.done:
			_ = raw.Close()
		}
	default:
		d.s.serveFrames(raw, c)
	}
}

// look reads the first bytes, behind the handshake of TLS if there is one.
func (d *door) look(raw net.Conn) (c net.Conn, grpc bool, err error) {
	if err := raw.SetDeadline(d.s.cfg.Clock.Now().Add(helloTimeout)); err != nil {
		return nil, false, err
	}
	c = raw
	if d.secure != nil {
		if c, _, err = d.secure.ServerHandshake(raw); err != nil {
			return nil, false, err
		}
	}
	first := make([]byte, len(Preface))
	n := 0
	for n < len(first) && bytes.HasPrefix([]byte(Preface), first[:n]) {
		m, err := c.Read(first[n:])
		if n += m; err != nil {
			return nil, false, err
		}
	}
	grpc = string(first[:n]) == Preface
	if grpc { // frames have their own
		err = raw.SetDeadline(time.Time{})
	}
	return &peeked{c, first[:n]}, grpc, err
}

// framed is the connections that are not grpc-go's: those whose first bytes are
// awaited, and those of frames. Safe for concurrent use.
type framed struct {
	mu     sync.Mutex
	closed bool              // guarded by mu
	conns  map[net.Conn]bool // guarded by mu; whether it carries calls
	all    sync.WaitGroup    // no Add when closed
}

// enter takes a connection in; false: there is to be none any more.
func (f *framed) enter(c net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.conns[c] = false
	f.all.Add(1)
	return true
}

// carries says that a connection carries calls.
func (f *framed) carries(c net.Conn) {
	f.mu.Lock()
	f.conns[c] = true
	f.mu.Unlock()
}

func (f *framed) leave(c net.Conn) {
	f.mu.Lock()
	delete(f.conns, c)
	f.mu.Unlock()
	f.all.Done()
}

// close takes nothing in any more, and cuts what is there, or only what carries
// no calls yet.
func (f *framed) close(everything bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for c, carries := range f.conns {
		if everything || !carries {
			_ = c.Close()
		}
	}
}
