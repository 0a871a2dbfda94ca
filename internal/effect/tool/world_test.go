package tool

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// handClock moves only when told to.
type handClock struct {
	mu     sync.Mutex
	now    time.Time
	timers []*handTimer
}

type handTimer struct {
	clock *handClock
	at    time.Time
	f     func()
	done  bool
}

func newHandClock() *handClock {
	return &handClock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
}

func (c *handClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &handTimer{clock: c, at: c.now.Add(d), f: f}
	c.timers = append(c.timers, t)
	return t
}

func (t *handTimer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	was := !t.done
	t.done = true
	return was
}

// advance moves the clock and runs what is due.
func (c *handClock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []func()
	for _, t := range c.timers {
		if !t.done && !t.at.After(c.now) {
			t.done = true
			due = append(due, t.f)
		}
	}
	c.mu.Unlock()
	for _, f := range due {
		f()
	}
}

// pending counts timers that have neither fired nor been stopped.
func (c *handClock) pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, t := range c.timers {
		if !t.done {
			n++
		}
	}
	return n
}

// world is a fake internet: names with scripted addresses, addresses with real
// test servers behind them.
type world struct {
	mu      sync.Mutex
	names   map[string][][]string // the answers of the look-ups in turn; the last stays
	servers map[string]string     // address:port → listener of a test server
	dialled []string
	remote  func(addr string) string // what a connection says its peer is
	hang    bool                     // dials never end by themselves
}

func newWorld() *world {
	return &world{names: map[string][][]string{}, servers: map[string]string{}}
}

func (w *world) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answers, ok := w.names[host]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if len(answers) > 1 {
		w.names[host] = answers[1:]
	}
	var out []netip.Addr
	for _, a := range answers[0] {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, nil
}

func (w *world) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	w.mu.Lock()
	w.dialled = append(w.dialled, addr)
	listener, ok := w.servers[addr]
	remote, hang := w.remote, w.hang
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if !ok {
		return nil, fmt.Errorf("dial %s: connection refused", addr)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, listener)
	if err != nil {
		return nil, err
	}
	if remote != nil {
		addr = remote(addr)
	}
	return peerConn{conn, addr}, nil
}

func (w *world) dials() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.dialled...)
}

// peerConn says that its peer is another address.
type peerConn struct {
	net.Conn
	peer string
}

func (c peerConn) RemoteAddr() net.Addr { return textAddr(c.peer) }

type textAddr string

func (a textAddr) Network() string { return "tcp" }
func (a textAddr) String() string  { return string(a) }

// serve puts a test server behind addr.
func (w *world) serve(t *testing.T, addr string, h http.HandlerFunc) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers[addr] = strings.TrimPrefix(srv.URL, "http://")
}

func (w *world) name(host string, answers ...[]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[host] = answers
}

// client is a Client of the fake internet.
func (w *world) client(t *testing.T, clock env.Clock) *Client {
	t.Helper()
	c, err := NewClient(Options{Clock: clock, Dialer: w, Resolver: w, Secrets: secrets})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func secrets(name string) (string, bool) {
	v, ok := map[string]string{
		"TOKEN": "s3cr3t-t0ken", "QUOTED": `pass"word&more`, "SHORT": "abc", "EMPTY": "", "LINES": "line\nline",
		"OVERLAP_A": "abcdef", "OVERLAP_B": "defghi",
	}[name]
	return v, ok
}

func mustCompile(t *testing.T, def Definition, c *Client) *Tool {
	t.Helper()
	tool, err := Compile(def, c, FromOperator)
	if err != nil {
		t.Fatal(err)
	}
	return tool
}

// definition is a tool of the fake internet that takes anything.
func definition(method, url string) Definition {
	return Definition{Name: "probe", Parameters: Schema(`{"type":"object"}`), HTTP: HTTP{Method: method, URL: url}}
}

const public = "93.184.216.34"

// publicWorld has one server, at example.com:80.
func publicWorld(t *testing.T, h http.HandlerFunc) *world {
	w := newWorld()
	w.name("example.com", []string{public})
	w.serve(t, public+":80", h)
	return w
}

func wantError(t *testing.T, err error, path string, parts ...string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want an *Error at %s", err, path)
	}
	if e.Path != path {
		t.Errorf("path %q, want %q (%s)", e.Path, path, e.Problem)
	}
	for _, p := range parts {
		if !strings.Contains(e.Problem, p) {
			t.Errorf("problem %q does not say %q", e.Problem, p)
		}
	}
}
