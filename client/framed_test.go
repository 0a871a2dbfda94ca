package client

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// overFrames says how the clients of a fake connect: all tests run over frames,
// and again over gRPC.
var overFrames = true

func TestMain(m *testing.M) {
	code := m.Run()
	once := flag.Lookup("test.fuzz").Value.String() + flag.Lookup("test.bench").Value.String()
	if overFrames = false; code == 0 && once == "" {
		code = m.Run()
	}
	os.Exit(code)
}

// sorted is a listener that serves the connections of frames itself.
type sorted struct {
	net.Listener
	f *fake
}

// Accept implements net.Listener.
func (l *sorted) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		first := make([]byte, 4)
		if _, err := io.ReadFull(c, first); err != nil {
			continue // the client has closed it
		}
		p := &peeked{c, bytes.NewReader(first)}
		if string(first) == "PRI " {
			return p, nil
		}
		go l.f.serveFrames(p)
	}
}

type peeked struct {
	net.Conn
	first *bytes.Reader
}

func (p *peeked) Read(b []byte) (int, error) {
	if p.first.Len() > 0 {
		return p.first.Read(b)
	}
	return p.Conn.Read(b)
}

func (f *fake) serveFrames(c net.Conn) {
	defer c.Close()
	fr := mux.NewFrames(mux.FramesConfig{Conn: c, Max: maxMessage})
	key, err := fr.Accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if key != "" {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", key))
	}
	err = f.answer(ctx, func(m *wire.Answers) error { return fr.Send(m) }, func() (*wire.Calls, error) {
		m := &wire.Calls{}
		return m, fr.Recv(m)
	})
	st, _ := status.FromError(err)
	_ = fr.End(byte(st.Code()), st.Message())
	_, _ = io.Copy(io.Discard, c)
}

// grpcOnly is a server without frames, which answers a request for them as given.
// asked counts these.
func grpcOnly(t *testing.T, answer string) (f *fake, asked *atomic.Int32) {
	f = &fake{t: t, lis: bufconn.Listen(1 << 20), onCall: echo}
	f.server = grpc.NewServer(grpc.ForceServerCodecV2(mux.Codec{}))
	wire.RegisterFlowsServer(f.server, f)
	asked = &atomic.Int32{}
	go f.server.Serve(&refusing{f.lis, answer, asked})
	t.Cleanup(f.server.Stop)
	return f, asked
}

type refusing struct {
	net.Listener
	answer string
	asked  *atomic.Int32
}

// Accept implements net.Listener.
func (l *refusing) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		first := make([]byte, 4)
		if _, err := io.ReadFull(c, first); err != nil {
			continue
		}
		if string(first) == "PRI " {
			return &peeked{c, bytes.NewReader(first)}, nil
		}
		l.asked.Add(1)
		go func() {
			_, _ = c.Read(make([]byte, 4096))
			_, _ = io.WriteString(c, l.answer)
			_ = c.Close()
		}()
	}
}

// TestServersWithoutFrames: whatever they answer, gRPC is used, and they are not
// asked again.
func TestServersWithoutFrames(t *testing.T) {
	for name, answer := range map[string]string{
		"an older one":                  "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
		"what is no server of HTTP/1":   "",
		"one of another upgrade":        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
		"a proxy that drops the header": "HTTP/1.1 426 Upgrade Required\r\n\r\n",
		"garbage":                       "\x00\x00\x12\x04\n\n",
	} {
		f, asked := grpcOnly(t, answer)
		c, err := Dial(context.Background(), Options{Address: "fake", Dialer: f.dial})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			if got, err := c.RPC(background(t), "f", "r", 7, RPCOptions{}); err != nil || string(got) != "7" {
				t.Errorf("%s: %s, %v", name, got, err)
			}
			if i == 1 {
				f.cut()
			}
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("%s was asked for frames %d times", name, n)
		}
		c.Close()
	}
}

// TestOnlyGRPC: a server that has frames is not asked for them.
func TestOnlyGRPC(t *testing.T) {
	f, asked := grpcOnly(t, "")
	c, err := Dial(context.Background(), Options{Address: "fake", Dialer: f.dial, OnlyGRPC: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.RPC(background(t), "f", "r", 7, RPCOptions{}); err != nil || asked.Load() != 0 {
		t.Errorf("%v, asked %d times", err, asked.Load())
	}
}

// TestAddressesThatOnlyGRPCKnows: names of its resolvers are left to it.
func TestAddressesThatOnlyGRPCKnows(t *testing.T) {
	for address, want := range map[string]bool{
		"host:1": true, "[::1]:1": true, "dns:///host:1": false, "unix:/run/x": false, "passthrough:///x": false, "host": false,
	} {
		if got := newFramesDialer(Options{Address: address}) != nil; got != want {
			t.Errorf("%s: frames %t", address, got)
		}
	}
}

// TestFramesThatBreak: half a frame, and a frame that is none, end the connection
// as any other break does.
func TestFramesThatBreak(t *testing.T) {
	for _, bytes := range []string{"\x00\x00\x00\x00", "\x00\xff\xff\xff\xff", "\x07\x00\x00\x00\x00", "\x00\x00\x00\x00\x01\xff"} {
		client, server := net.Pipe()
		go func() {
			if _, err := mux.NewFrames(mux.FramesConfig{Conn: server}).Accept(); err != nil {
				t.Error(err)
			}
			_, _ = io.WriteString(server, bytes)
			_ = server.Close()
		}()
		first := true
		c, err := Dial(background(t), Options{Address: "fake", Patience: -1, Dialer: func(context.Context, string) (net.Conn, error) {
			if !first {
				return nil, errors.New("no second one")
			}
			first = false
			return client, nil
		}})
		if err == nil {
			_, err = c.Describe(background(t), "f")
			c.Close()
		}
		if !errors.Is(err, ErrUnavailable) {
			t.Errorf("%q: %v", bytes, err)
		}
	}
}
