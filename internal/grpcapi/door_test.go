package grpcapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// onNetwork serves on a real connection, so that what TCP can do is done.
func onNetwork(t *testing.T, change func(*Config)) (w *world, address string) {
	w = newWorld(t, nil)
	cfg := w.server.cfg
	cfg.Auth = keys()
	if change != nil {
		change(&cfg)
	}
	w.server = NewServer(cfg)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- w.server.Serve(l) }()
	t.Cleanup(func() {
		w.server.Stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return w, l.Addr().String()
}

// carrying counts the connections of frames.
func (w *world) carrying() (n int) {
	w.server.framed.mu.Lock()
	defer w.server.framed.mu.Unlock()
	for _, carries := range w.server.framed.conns {
		if carries {
			n++
		}
	}
	return n
}

// TestClientOnNetwork: with TLS and without the Go client gets the same answers
// over frames and over gRPC, large ones too.
func TestClientOnNetwork(t *testing.T) {
	server, trusting := certified(t)
	large := bytes.Repeat([]byte("7"), 40_000)
	for _, secure := range []bool{false, true} {
		w, address := onNetwork(t, func(c *Config) {
			if secure {
				c.TLS = server
			}
		})
		w.flows.set(func(_ context.Context, tenant string, c *wire.Call, answer func(*wire.Answer)) {
			re := &wire.AttributesReply{}
			for range 20 {
				re.Attributes = append(re.Attributes, &wire.Attribute{Name: tenant, Value: large})
			}
			answer(&wire.Answer{Id: c.Id, Result: &wire.Answer_Attributes{Attributes: re}})
		})
		for _, onlyGRPC := range []bool{false, true} {
			var config *tls.Config
			if secure {
				config = trusting
			}
			c, err := client.Dial(w.ctx, client.Options{Address: address, Key: "sesame", TLS: config, OnlyGRPC: onlyGRPC, Patience: -1})
			if err != nil {
				t.Fatalf("TLS %t, only gRPC %t: %v", secure, onlyGRPC, err)
			}
			for range 20 {
				got, err := c.Attributes(w.ctx, "f")
				if err != nil || len(got) != 20 || got[19].Name != "one" || !bytes.Equal(got[19].Value, large) {
					t.Fatalf("TLS %t, only gRPC %t: %d attributes, %v", secure, onlyGRPC, len(got), err)
				}
			}
			if n := w.carrying(); n != 1 && !onlyGRPC || n > 1 {
				t.Errorf("TLS %t, only gRPC %t: %d connections of frames", secure, onlyGRPC, n)
			}
			c.Close()
		}
		if c, err := client.Dial(w.ctx, client.Options{Address: address, Key: "bad", TLS: w.server.cfg.TLS, Patience: -1}); err == nil {
			if _, err = c.Describe(w.ctx, "f"); !errors.Is(err, client.ErrUnauthenticated) {
				t.Errorf("a bad key: %v", err)
			}
			c.Close()
		}
	}
}

// TestForeignConnections are answered or closed, and harm nobody.
func TestForeignConnections(t *testing.T) {
	_, address := onNetwork(t, nil)
	say := func(text string) string {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(c)
		if err != nil {
			t.Errorf("%.20q: %v", text, err)
		}
		return string(b)
	}
	if got := say("GET / HTTP/1.1\r\nHost: x\r\n\r\n"); !strings.HasPrefix(got, "HTTP/1.1 404 ") {
		t.Errorf("another path: %q", got)
	}
	if got := say("\x16\x03\x01" + strings.Repeat("\x00", 20<<10)); !strings.HasPrefix(got, "HTTP/1.1 400 ") {
		t.Errorf("no HTTP: %q", got)
	}
	upgrade := mux.FramesLine + "HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: perdure-frames/1\r\nAuthorization: Bearer sesame\r\n\r\n"
	if got := say(upgrade + "\x00\xff\xff\xff\xff"); !strings.Contains(got, "at most 134217728 are taken") {
		t.Errorf("a huge frame: %q", got)
	}
	if got := say(strings.Replace(upgrade, "sesame", "x", 1)); !strings.Contains(got, "\x10unauthenticated: ") {
		t.Errorf("a bad key: %q", got)
	}
}

// TestFramesOfAServerThatDrains: who connects is told so.
func TestFramesOfAServerThatDrains(t *testing.T) {
	w := newWorld(t, nil)
	w.server.Drain()
	c, err := w.lis.Dial()
	if err != nil {
		t.Fatal(err)
	}
	s, err := framesOver(w.ctx, c, "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Recv()
	wantStatus(t, "draining", err, codes.Unavailable, "unavailable: ")
}

// manual is a clock whose timers fire when a test says so.
type manual struct {
	mu      sync.Mutex
	pending []*manualTimer // guarded by mu
}

type manualTimer struct {
	m *manual
	f func() // guarded by m.mu; nil = stopped
}

func (m *manual) Now() time.Time { return time.Time{} }

func (m *manual) AfterFunc(_ time.Duration, f func()) env.Timer {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := &manualTimer{m, f}
	m.pending = append(m.pending, t)
	return t
}

func (t *manualTimer) Stop() bool {
	t.m.mu.Lock()
	defer t.m.mu.Unlock()
	was := t.f != nil
	t.f = nil
	return was
}

// fire runs what is pending, and says how much that was.
func (m *manual) fire() (n int) {
	m.mu.Lock()
	all := m.pending
	m.pending = nil
	m.mu.Unlock()
	for _, t := range all {
		m.mu.Lock()
		f := t.f
		m.mu.Unlock()
		if f != nil {
			n++
			f()
		}
	}
	return n
}

// TestSilentClients are given up; until then they are told that the server lives.
func TestSilentClients(t *testing.T) {
	clock := &manual{}
	s := &Server{cfg: Config{Clock: clock}}
	near, far := net.Pipe()
	got := make(chan int, 1)
	go func() {
		b, _ := io.ReadAll(far)
		got <- len(b)
	}()
	stop := s.beat(near, mux.NewFrames(mux.FramesConfig{Conn: near}))
	for range 3 {
		clock.fire()
	}
	if n := <-got; n == 0 || n%5 != 0 {
		t.Errorf("%d bytes came before the end", n)
	}
	stop()
	if n := clock.fire(); n != 0 {
		t.Errorf("%d timers are left", n)
	}
}
