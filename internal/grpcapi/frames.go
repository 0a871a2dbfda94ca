package grpcapi

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// lingerTimeout is what a client has to read why its connection ends, and to
// close it.
const lingerTimeout = time.Second

// framesStream carries the calls of a client in frames.
type framesStream struct{ *mux.Frames }

// Send implements callStream.
func (f framesStream) Send(m *wire.Answers) error { return f.Frames.Send(m) }

// Recv implements callStream.
func (f framesStream) Recv() (*wire.Calls, error) {
	m := &wire.Calls{}
	if err := f.Frames.Recv(m); err != nil {
		return nil, err
	}
	return m, nil
}

// serveFrames serves a client over a connection to its end. raw is below the TLS
// of c, if there is any.
func (s *Server) serveFrames(raw, c net.Conn) {
	defer c.Close()
	f := mux.NewFrames(mux.FramesConfig{Conn: c, Vector: vector(c), Max: MaxFrame})
	authorization, err := f.Accept()
	if err != nil {
		s.cfg.Log.Debug("a connection is neither gRPC nor frames", "remote", c.RemoteAddr().String(), "error", err)
		if errors.Is(err, mux.ErrForeign) {
			s.linger(c)
		}
		return
	}
	if c.SetDeadline(time.Time{}) != nil {
		return
	}
	s.framed.carries(raw)
	stop := s.beat(raw, f)
	st := status.Convert(s.serveFramed(f, authorization))
	stop()
	// From here on nothing may take long. What is stuck in a write ends by it.
	if c.SetDeadline(s.cfg.Clock.Now().Add(lingerTimeout)) != nil {
		return
	}
	if f.End(byte(st.Code()), st.Message()) == nil {
		s.linger(c)
	}
}

// serveFramed serves who may call.
func (s *Server) serveFramed(f *mux.Frames, authorization string) (err error) {
	defer func() { err = statusOf(err) }()
	defer s.recovered(&err)
	tenant, err := s.tenantOf(authorization)
	if err != nil {
		return err
	}
	if s.isDraining() {
		return errStopping
	}
	return s.serveCalls(context.Background(), tenant, framesStream{f})
}

// linger waits until a client has closed its side: who closes with bytes unread
// takes back what it wrote last.
func (s *Server) linger(c net.Conn) {
	if c.SetDeadline(s.cfg.Clock.Now().Add(lingerTimeout)) != nil {
		return
	}
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, c, connWindow)
}

// beat keeps a connection alive, and closes it when the client is not, until it
// is stopped.
func (s *Server) beat(c net.Conn, f *mux.Frames) (stop func()) {
	b := &beating{clock: s.cfg.Clock, c: c, f: f}
	b.next()
	return b.stop
}

type beating struct {
	clock env.Clock
	c     net.Conn
	f     *mux.Frames

	mu    sync.Mutex
	timer env.Timer // guarded by mu
	over  bool      // guarded by mu
}

func (b *beating) next() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.over {
		b.timer = b.clock.AfterFunc(mux.BeatEvery, b.beat)
	}
}

func (b *beating) beat() {
	b.next() // first, since a beat that cannot be sent is stuck
	if b.f.Beat() != nil {
		_ = b.c.Close()
	}
}

func (b *beating) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	b.timer.Stop()
}

// wrapper is a connection around another one that changes nothing of what is
// written.
type wrapper interface{ Under() net.Conn }

// vector finds what writes several parts with one system call; nil = nothing does.
func vector(c net.Conn) func([][]byte) error {
	for {
		switch under := c.(type) {
		case *net.TCPConn:
			return func(parts [][]byte) error {
				b := net.Buffers(parts)
				_, err := b.WriteTo(under)
				return err
			}
		case wrapper:
			c = under.Under()
		default:
			return nil
		}
	}
}
