package client

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	// framesPatience is how long a connection may take to carry frames before gRPC
	// is tried instead.
	framesPatience = 3 * time.Second
	// framesAgain is how long a server that answers gRPC, and no frames, is asked
	// for gRPC alone: it may be of an older version, and be replaced.
	framesAgain = 10 * time.Minute
)

// framesDialer opens connections of frames to one address. Safe for concurrent
// use.
type framesDialer struct {
	address string
	key     string
	tls     *tls.Config // nil = without
	dial    func(ctx context.Context, address string) (net.Conn, error)

	without atomic.Int64 // no frames are tried until then, in µs since 1970
}

// newFramesDialer gives nil when there is only gRPC: it was asked for, or the
// address is one that only gRPC understands.
func newFramesDialer(o Options) *framesDialer {
	host, _, err := net.SplitHostPort(o.Address)
	if o.OnlyGRPC || o.Dialer == nil && (err != nil || strings.Contains(o.Address, "/")) {
		return nil
	}
	d := &framesDialer{address: o.Address, dial: o.Dialer}
	if o.Key != "" {
		d.key = "Bearer " + o.Key
	}
	if d.dial == nil {
		d.dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	if o.TLS != nil {
		d.tls = o.TLS.Clone()
		d.tls.NextProtos = []string{"http/1.1"}
		if d.tls.ServerName == "" {
			d.tls.ServerName = host
		}
	}
	return d
}

// worthTrying says that the server may speak frames.
func (d *framesDialer) worthTrying() bool {
	return d != nil && time.Now().UnixMicro() >= d.without.Load()
}

// noFrames notes that the server answers, but not with frames.
func (d *framesDialer) noFrames() { d.without.Store(time.Now().Add(framesAgain).UnixMicro()) }

// open gives a connection that carries frames until ctx ends.
func (d *framesDialer) open(ctx context.Context) (*framesStream, error) {
	soon, cancel := context.WithTimeout(ctx, framesPatience)
	defer cancel()
	raw, err := d.dial(soon, d.address)
	if err != nil {
		return nil, err
	}
	s := &framesStream{conn: raw, address: d.address}
	intime := context.AfterFunc(soon, func() { _ = raw.Close() })
	err = s.upgrade(soon, d)
	if !intime() && err == nil {
		err = soon.Err()
	}
	if err != nil {
		_ = raw.Close()
		if errors.Is(err, mux.ErrRefused) {
			d.noFrames()
		}
		return nil, err
	}
	context.AfterFunc(ctx, s.close)
	go s.beat(ctx)
	return s, nil
}

// framesStream is a connection of frames.
type framesStream struct {
	*mux.Frames
	conn    net.Conn
	address string
}

func (s *framesStream) upgrade(ctx context.Context, d *framesDialer) error {
	vector := func(parts [][]byte) error {
		b := net.Buffers(parts)
		_, err := b.WriteTo(s.conn)
		return err
	}
	if d.tls != nil {
		c := tls.Client(s.conn, d.tls)
		s.conn, vector = c, nil
		if err := c.HandshakeContext(ctx); err != nil {
			return err
		}
	}
	s.Frames = mux.NewFrames(mux.FramesConfig{Conn: s.conn, Vector: vector, Max: maxMessage, Alias: true})
	return s.Frames.Ask(d.address, d.key)
}

func (s *framesStream) close() { _ = s.conn.Close() }

// beat keeps the connection alive, and closes it when the server is not. It ends
// with ctx.
func (s *framesStream) beat(ctx context.Context) {
	t := time.NewTicker(mux.BeatEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if s.Frames.Beat() != nil {
			s.close()
			return
		}
	}
}

// Send implements callStream.
func (s *framesStream) Send(m *wire.Calls) error { return s.Frames.Send(m) }

// Recv implements callStream. Its errors are those that a stream of gRPC gives.
func (s *framesStream) Recv(m *wire.Answers) error {
	err := s.Frames.Recv(m)
	var end *mux.EndError
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return err
	case errors.As(err, &end):
		return status.Error(codes.Code(end.Code), end.Text)
	}
	return status.Error(codes.Unavailable, "the connection to "+s.address+" broke: "+err.Error())
}
