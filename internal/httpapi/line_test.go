package httpapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/session"
)

// rawClient sees the bytes of one connection.
type rawClient struct {
	t    *testing.T
	conn net.Conn
	r    *bufio.Reader
}

// lineWorld is a world whose answers leave net/http as soon as they wait.
func lineWorld(t *testing.T, change ...func(*Config)) (*world, *rawClient) {
	w := newWorld(t, change...)
	w.api.patience = 0
	return w, w.dial(t)
}

func (w *world) dial(t *testing.T) *rawClient {
	t.Helper()
	conn, err := net.Dial("tcp", w.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	return &rawClient{t, conn, bufio.NewReader(conn)}
}

func (c *rawClient) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, text); err != nil {
		c.t.Fatal(err)
	}
}

// post is a request's bytes; each of headers ends with a line break.
func post(path, body string, headers ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s",
		path, len(body), strings.Join(headers, ""), body)
}

// answer reads the next answer up to its body.
func (c *rawClient) answer() *http.Response {
	c.t.Helper()
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		c.t.Fatalf("read an answer: %v", err)
	}
	return resp
}

// whole reads the next answer and gives its status and body.
func (c *rawClient) whole() (int, string) {
	c.t.Helper()
	resp := c.answer()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("read a body: %v", err)
	}
	return resp.StatusCode, string(b)
}

// ends checks that the server closes the connection, with nothing more.
func (c *rawClient) ends() {
	c.t.Helper()
	if b, err := io.ReadAll(c.r); err != nil || len(b) > 0 {
		c.t.Errorf("at the end: %q, %v", b, err)
	}
}

// TestLineServesOn: after an answer that left net/http the same connection
// serves the next request, again and again, and each is in the access log once.
func TestLineServesOn(t *testing.T) {
	w, c := lineWorld(t)
	for i := range 3 {
		for _, body := range []string{chat("silent one", `,"stream":true`), chat("silent two", "")} {
			c.send(post(chatPath, body))
			<-w.script.held
			<-w.moved
			w.script.release <- struct{}{}
			if status, got := c.whole(); status != 200 || !strings.Contains(got, "late") {
				t.Fatalf("round %d: %d %s", i, status, got)
			}
			if r := w.awaitRecord(chatPath); r.Method != "POST" || r.Status != 200 || r.Bytes == 0 || r.TTFB == 0 || r.Closed != "" || r.Remote != c.conn.LocalAddr().String() {
				t.Errorf("access record %+v", r)
			}
			c.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
			if status, got := c.whole(); status != 200 {
				t.Fatalf("after it: %d %s", status, got)
			}
		}
	}
	w.api.lines.mu.Lock()
	defer w.api.lines.mu.Unlock()
	if n := len(w.api.lines.all); n != 0 {
		t.Errorf("%d lines are left", n)
	}
}

// TestLinePipelining: what a client sends before its answer is out is its next
// requests, whether it was read before the answer left net/http or after.
func TestLinePipelining(t *testing.T) {
	w, c := lineWorld(t)
	next := "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
	for _, early := range []string{next + next, ""} {
		c.send(post(chatPath, chat("silent", "")) + early)
		<-w.script.held
		<-w.moved
		if early == "" {
			c.send(next + next)
		}
		w.script.release <- struct{}{}
		for i := range 3 {
			if status, got := c.whole(); status != 200 || strings.Contains(got, "late") != (i == 0) {
				t.Errorf("answer %d: %d %s", i, status, got)
			}
		}
	}
}

// TestLineRefusal: a turn that fails before its first text is an HTTP error, as
// on net/http.
func TestLineRefusal(t *testing.T) {
	w, c := lineWorld(t)
	c.send(post(chatPath, chat("silent", `,"stream":true`), "X-Perdure-Session: s1\r\n"))
	<-w.script.held
	<-w.moved
	if a := w.do("POST", "/v1/sessions/s1/cancel", ""); a.status != 200 {
		t.Fatalf("cancel: %d %s", a.status, a.body)
	}
	resp := c.answer()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 409 || resp.ContentLength != int64(len(b)) || !strings.Contains(string(b), "turn_cancelled") ||
		resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("X-Request-Id") == "" || resp.Header.Get("Date") == "" {
		t.Errorf("%v %s", resp, b)
	}
	c.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if status, _ := c.whole(); status != 200 {
		t.Errorf("after it: %d", status)
	}
}

// TestLineCloses: a client that wants one answer only gets the end of the
// connection behind it.
func TestLineCloses(t *testing.T) {
	w, c := lineWorld(t)
	c.send(post(chatPath, chat("silent", ""), "Connection: close\r\n"))
	<-w.script.held
	<-w.moved
	w.script.release <- struct{}{}
	resp := c.answer()
	if _, err := io.ReadAll(resp.Body); err != nil || !resp.Close {
		t.Errorf("%v, %v", resp.Header, err)
	}
	c.ends()
}

// TestLineEndsWithItsClient: a client that closes its side has left; nothing
// of its connection stays.
func TestLineEndsWithItsClient(t *testing.T) {
	w, c := lineWorld(t)
	path := "/v1/sessions/" + w.session()
	c.send(post(path+"/turns", turn("silent")))
	<-w.script.held
	<-w.moved
	if err := c.conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Closed != "client_gone" || r.Status != 200 {
		t.Errorf("access record %+v", r)
	}
	if status, got := c.whole(); status != 200 || !strings.Contains(got, "turn.started") {
		t.Errorf("%d %s", status, got)
	}
	c.ends()
	w.script.release <- struct{}{}
}

// TestOldClientStays: HTTP/1.0 has no chunks; its answers stay on net/http.
func TestOldClientStays(t *testing.T) {
	w, c := lineWorld(t)
	c.send(strings.Replace(post(chatPath, chat("silent", `,"stream":true`)), "HTTP/1.1", "HTTP/1.0", 1))
	<-w.script.held
	w.script.release <- struct{}{}
	if status, got := c.whole(); status != 200 || !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Errorf("%d %s", status, got)
	}
	c.ends()
	if len(w.moved) != 0 {
		t.Error("it was taken over")
	}
}

// TestIdleLineEnds: a connection that sends no other request is closed.
func TestIdleLineEnds(t *testing.T) {
	w, c := lineWorld(t, func(c *Config) { c.Limits.IdleTimeout = 20 * time.Millisecond })
	c.send(post(chatPath, chat("silent", "")))
	<-w.moved
	w.script.release <- struct{}{}
	if status, _ := c.whole(); status != 200 {
		t.Errorf("%d", status)
	}
	c.ends()
}

// TestCloseWaitsForLines: what runs is answered, what idles is closed.
func TestCloseWaitsForLines(t *testing.T) {
	w, busy := lineWorld(t)
	idle := w.dial(t)
	idle.send(post(chatPath, chat("silent", "")))
	<-w.script.held
	<-w.moved
	w.script.release <- struct{}{}
	if status, _ := idle.whole(); status != 200 {
		t.Errorf("%d", status)
	}
	busy.send(post(chatPath, chat("silent", "")))
	<-w.script.held
	<-w.moved
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		w.api.Close(context.Background())
	}()
	idle.ends()
	select {
	case <-closed:
		t.Error("it did not wait")
	default:
	}
	w.script.release <- struct{}{}
	if status, got := busy.whole(); status != 200 || !strings.Contains(got, "late") {
		t.Errorf("%d %s", status, got)
	}
	busy.ends()
	<-closed
	if w.api.lines.reserve() {
		t.Error("there are new lines")
	}
}

// TestCloseCutsLines: after its time Close closes what is still open, and the
// relays end.
func TestCloseCutsLines(t *testing.T) {
	w, c := lineWorld(t)
	path := "/v1/sessions/" + w.session()
	c.send(post(path+"/turns", turn("silent")))
	<-w.script.held
	<-w.moved
	w.api.Close(past)
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Closed != "client_gone" {
		t.Errorf("access record %+v", r)
	}
	<-w.api.lines.quiet
	w.script.release <- struct{}{}
}

// mad is a consumer that panics when it is called again.
type mad struct {
	c     *call
	begin bool
}

func (m *mad) take([]session.Event) (bool, error) { return false, nil }
func (m *mad) fail(error) (*session.Watcher, error) {
	if m.begin {
		_, _ = m.c.Write([]byte("half"))
	}
	panic("late")
}
func (m *mad) beat() (time.Duration, error) { return 0, nil }

// TestPanicOnALine: it ends that answer and nothing else.
func TestPanicOnALine(t *testing.T) {
	w, _ := lineWorld(t)
	id := w.session()
	for _, begin := range []bool{false, true} {
		relays := make(chan *relay, 1)
		w.api.router = newRouter([]route{{"GET", "/mad", nil, func(a *API, c *call) error {
			watcher, err := a.svc.Watch(context.Background(), "default", id, "")
			if err != nil {
				return err
			}
			r := c.relay(watcher, &mad{c, begin})
			relays <- r
			return r.serve()
		}, open | loose, nil}})
		c := w.dial(t)
		c.send("GET /mad HTTP/1.1\r\nHost: localhost\r\n\r\n")
		r := <-relays
		<-w.moved
		r.stop(errors.New("now"))
		resp := c.answer()
		b, err := io.ReadAll(resp.Body)
		if begin && (resp.StatusCode != 200 || string(b) != "half" || !errors.Is(err, io.ErrUnexpectedEOF)) {
			t.Errorf("in the middle: %d %q, %v", resp.StatusCode, b, err)
		}
		if !begin && (resp.StatusCode != 500 || err != nil || !strings.Contains(string(b), "internal")) {
			t.Errorf("before it: %d %q, %v", resp.StatusCode, b, err)
		}
		w.awaitRecord("/mad")
	}
	if n := w.api.requests.Open(); n != 0 {
		t.Errorf("%d requests are counted still", n)
	}
}
