package grpcapi

import (
	"context"
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// overFrames says what carries the calls of world.stream: all tests run over
// gRPC, and again over frames.
var overFrames bool

func TestMain(m *testing.M) {
	code := m.Run()
	fuzzing := flag.Lookup("test.fuzz").Value.String() + flag.Lookup("test.bench").Value.String()
	if overFrames = true; code == 0 && fuzzing == "" {
		code = m.Run()
	}
	os.Exit(code)
}

// callClient is the client's side of a stream of calls.
type callClient interface {
	Send(*wire.Calls) error
	Recv() (*wire.Answers, error)
	CloseSend() error
}

// stream opens one; it ends with ctx.
func (w *world) stream(ctx context.Context) (callClient, error) {
	w.t.Helper()
	if !overFrames {
		return wire.NewFlowsClient(w.conn).Stream(ctx)
	}
	c, err := w.lis.Dial()
	if err != nil {
		return nil, err
	}
	key := ""
	if md, _ := metadata.FromOutgoingContext(ctx); len(md.Get("authorization")) > 0 {
		key = md.Get("authorization")[0]
	}
	return framesOver(ctx, c, key)
}

// framesOver upgrades a connection.
func framesOver(ctx context.Context, c net.Conn, authorization string) (*framesClient, error) {
	context.AfterFunc(ctx, func() { _ = c.Close() })
	f := mux.NewFrames(mux.FramesConfig{Conn: c, Max: MaxFrame})
	return &framesClient{f, c}, f.Ask("mem", authorization)
}

// framesClient gives the errors of a gRPC stream.
type framesClient struct {
	f *mux.Frames
	c net.Conn
}

func (c *framesClient) Send(m *wire.Calls) error {
	if c.f.Send(m) != nil {
		return io.EOF // Recv says why
	}
	return nil
}

func (c *framesClient) CloseSend() error { return c.f.CloseSend() }

func (c *framesClient) Recv() (*wire.Answers, error) {
	m := &wire.Answers{}
	err := c.f.Recv(m)
	var end *mux.EndError
	switch {
	case err == nil:
		return m, nil
	case errors.As(err, &end):
		err = status.Error(codes.Code(end.Code), end.Text)
	}
	_ = c.c.Close()
	return nil, err
}
