package http1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// script is a connection whose peer says in, in reads of at most step bytes,
// and takes what is written.
type script struct {
	net.Conn // nil: a method not overridden panics
	in       []byte
	step     int
	end      error // after in; nil is io.EOF

	mu     sync.Mutex
	out    bytes.Buffer // guarded by mu
	closed bool         // guarded by mu
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.in) == 0 {
		if s.end != nil {
			return 0, s.end
		}
		return 0, io.EOF
	}
	n := len(p)
	if s.step > 0 {
		n = min(n, s.step)
	}
	n = copy(p[:n], s.in)
	s.in = s.in[n:]
	return n, nil
}

func (s *script) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.Write(p)
}

func (s *script) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

func (s *script) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// dials hands out connections in order.
type dials []net.Conn

func (d *dials) DialContext(context.Context, string, string) (net.Conn, error) {
	if len(*d) == 0 {
		return nil, errors.New("no more connections")
	}
	c := (*d)[0]
	*d = (*d)[1:]
	return c, nil
}

type get struct{}

func (get) WriteRequest(w *bufio.Writer) error {
	_, err := w.WriteString("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	return err
}

// fetch makes one exchange and reads its body.
func fetch(c *Client, x *Exchange) (status int, body []byte, err error) {
	defer x.Close()
	if err := x.Do(context.Background(), c, get{}); err != nil {
		return 0, nil, err
	}
	status = x.Status
	for {
		data, err := x.Next()
		if err == ErrWait {
			err = x.Fill()
		}
		if err == io.EOF {
			return status, body, nil
		}
		if err != nil {
			return status, body, err
		}
		body = append(body, data...)
	}
}

func one(in string, step int) (*Client, *script) {
	s := &script{in: []byte(in), step: step}
	return New(Options{Addr: "x:80", Dialer: &dials{s}, Clock: env.SystemClock{}}), s
}

func TestResponses(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, c := range []struct {
		name, in string
		body     string
		fail     Failure // 0: success
		keep     bool
	}{
		{"length", ok + "Content-Length: 3\r\n\r\nabc", "abc", 0, true},
		{"no length, empty", ok + "Content-Length: 0\r\n\r\n", "", 0, true},
		{"chunked", ok + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0A;ext=1\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n", "abc0123456789", 0, true},
		{"bare line feeds", "HTTP/1.1 200\nTransfer-Encoding: CHUNKED\n\n3\nabc\n0\n\n", "abc", 0, true},
		{"until close", ok + "\r\nabc", "abc", 0, false},
		{"connection close", ok + "Connection: foo, Close\r\nContent-Length: 1\r\n\r\na", "a", 0, false},
		{"HTTP/1.0", "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", "a", 0, false},
		{"HTTP/1.0 keep-alive", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na", "a", 0, true},
		{"interim", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + ok + "Content-Length: 1\r\n\r\na", "a", 0, true},
		{"no content", "HTTP/1.1 204 No Content\r\n\r\n", "", 0, true},
		{"bytes after the end", ok + "Content-Length: 1\r\n\r\nab", "a", 0, false},
		{"both framings", ok + "Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "a", 0, false},
		{"same length twice", ok + "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", "a", 0, true},

		{"nothing", "", "", FailClosed, false},
		{"cut in the head", ok + "Conte", "", FailClosed, false},
		{"cut in the body", ok + "Content-Length: 3\r\n\r\nab", "ab", FailClosed, false},
		{"cut in a chunk", ok + "Transfer-Encoding: chunked\r\n\r\n3\r\nab", "ab", FailClosed, false},
		{"cut before the last chunk", ok + "Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", "ab", FailClosed, false},
		{"not HTTP", "SSH-2.0-OpenSSH_9\r\n\r\n", "", FailMalformed, false},
		{"HTTP/2", "HTTP/2.0 200 OK\r\n\r\n", "", FailMalformed, false},
		{"two lengths", ok + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", "", FailMalformed, false},
		{"bad length", ok + "Content-Length: -1\r\n\r\n", "", FailMalformed, false},
		{"bad chunk", ok + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "", FailMalformed, false},
		{"chunk too long", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", "a", FailMalformed, false},
		{"huge chunk", ok + "Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n", "", FailMalformed, false},
		{"other coding", ok + "Transfer-Encoding: gzip, chunked\r\n\r\n", "", FailMalformed, false},
		{"content encoding", ok + "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", "", FailMalformed, false},
		{"folded header", ok + "A: b\r\n c\r\n\r\n", "", FailMalformed, false},
		{"space before the colon", ok + "Content-Length : 1\r\n\r\na", "", FailMalformed, false},
		{"upgrade", "HTTP/1.1 101 Switching\r\n\r\n", "", FailMalformed, false},
		{"endless interim", strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), "", FailMalformed, false},
		{"long line", ok + "A: " + strings.Repeat("x", MaxLine) + "\r\n\r\n", "", FailTooLarge, false},
		{"long head", ok + strings.Repeat("A: "+strings.Repeat("x", 1000)+"\r\n", 100) + "\r\n", "", FailTooLarge, false},
	} {
		for _, step := range []int{0, 1, 5} {
			t.Run(fmt.Sprintf("%s/%d", c.name, step), func(t *testing.T) {
				cl, s := one(c.in, step)
				s.end = io.EOF
				var x Exchange
				_, body, err := fetch(cl, &x)
				var e *Error
				if errors.As(err, &e) != (c.fail != 0) || e != nil && e.Failure != c.fail {
					t.Fatalf("error %v, want failure %d", err, c.fail)
				}
				if string(body) != c.body {
					t.Errorf("body %q, want %q", body, c.body)
				}
				if c.name == "bytes after the end" && step > 0 {
					return // not read yet: see TestUnaskedBytes
				}
				if (cl.Stats().Idle == 1) != c.keep || s.isClosed() == c.keep {
					t.Errorf("kept %v, closed %v, want kept %v", cl.Stats().Idle == 1, s.isClosed(), c.keep)
				}
			})
		}
	}
}

func TestRetryAfterOnlyOfErrors(t *testing.T) {
	cl, _ := one("HTTP/1.1 429 Slow\r\nrEtRy-AfTeR: 5\r\nretry-after-ms: 4\r\nContent-Length: 0\r\n\r\n", 0)
	var x Exchange
	if err := x.Do(context.Background(), cl, get{}); err != nil || x.RetryAfter != "5" || x.RetryMS != "4" {
		t.Errorf("%v %q %q", err, x.RetryAfter, x.RetryMS)
	}
	x.Close()
	if x.RetryAfter != "" || x.Status != 0 {
		t.Error("Close left the head in place")
	}
}

func TestPoolBoundsAndIdleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const answer = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"
		var conns []*script
		var d dials
		for range 4 {
			s := &script{in: []byte(answer + answer)}
			conns, d = append(conns, s), append(d, s)
			s.step = len(answer)
		}
		cl := New(Options{Addr: "x:80", Dialer: &d, Clock: env.SystemClock{}, MaxIdle: 2, KeepAlive: time.Minute})
		open := make([]Exchange, 3)
		for i := range open {
			if err := open[i].Do(context.Background(), cl, get{}); err != nil {
				t.Fatal(err)
			}
		}
		for i := range open {
			_, _ = open[i].Next()
			_, _ = open[i].Next()
			open[i].Close()
			time.Sleep(10 * time.Second) // fake time
		}
		if cl.Stats().Idle != 2 || !conns[2].isClosed() || conns[0].isClosed() || conns[1].isClosed() {
			t.Fatalf("%+v", cl.Stats())
		}
		time.Sleep(35 * time.Second) // the first has been idle for 65 s, the second for 55 s
		synctest.Wait()
		if cl.Stats().Idle != 1 || !conns[0].isClosed() {
			t.Fatalf("%+v", cl.Stats())
		}
		var x Exchange
		if _, _, err := fetch(cl, &x); err != nil || cl.Stats().Reused != 1 {
			t.Fatalf("%v %+v", err, cl.Stats())
		}
		cl.Close()
		if cl.Stats().Idle != 0 || !conns[1].isClosed() {
			t.Fatal("Close left a connection")
		}
		if _, _, err := fetch(cl, &x); err != nil || cl.Stats().Idle != 0 {
			t.Fatalf("after Close: %v %+v", err, cl.Stats())
		}
	})
}

// TestStaleIsRetriedOnce: a pooled connection that is closed gives way to a
// fresh one; a fresh one that is closed is an error.
func TestStaleIsRetriedOnce(t *testing.T) {
	const answer = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"
	partial := &script{in: []byte(answer + "HTTP/1.1 2"), step: len(answer)}
	d := dials{&script{in: []byte(answer)}, &script{in: []byte(answer), step: len(answer)}, &script{}, partial}
	cl := New(Options{Addr: "x:80", Dialer: &d, Clock: env.SystemClock{}})
	var x Exchange
	for i := range 2 {
		if _, body, err := fetch(cl, &x); err != nil || string(body) != "a" {
			t.Fatalf("%d: %q, %v", i, body, err)
		}
	}
	_, _, err := fetch(cl, &x) // stale again, and the fresh one is dead too
	var e *Error
	if !errors.As(err, &e) || e.Failure != FailClosed || len(d) != 1 {
		t.Fatalf("%v, %d connections left", err, len(d))
	}
	if _, _, err := fetch(cl, &x); err != nil {
		t.Fatal(err)
	}
	if _, _, err := fetch(cl, &x); !errors.As(err, &e) || e.Failure != FailClosed || cl.Stats().Stale != 2 {
		t.Fatalf("a response that had begun was asked for again: %v, %+v", err, cl.Stats())
	}
}

// TestUnaskedBytes: what a server sends after its answer is never taken for
// the next one.
func TestUnaskedBytes(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	sent := make(chan struct{}, 2)
	more := make(chan struct{})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = bufio.NewReader(c).ReadString('\n')
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
			<-more
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
			_ = c.(*net.TCPConn).CloseWrite() // the client reads up to here
			sent <- struct{}{}
		}
	}()
	cl := New(Options{Addr: l.Addr().String(), Dialer: &net.Dialer{}, Clock: env.SystemClock{}})
	var x Exchange
	for range 3 {
		_, body, err := fetch(cl, &x)
		if err != nil || string(body) != "good" {
			t.Fatalf("%q, %v", body, err)
		}
		more <- struct{}{}
		<-sent
	}
	if st := cl.Stats(); st.Stale != 2 || st.Dialed != 3 || st.Reused != 0 {
		t.Errorf("%+v", st)
	}
}

// slowDialer waits for its context.
type slowDialer struct{}

func (slowDialer) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestDialTimeoutAndCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := New(Options{Addr: "x:80", Dialer: slowDialer{}, Clock: env.SystemClock{}, DialTimeout: time.Second})
		var x Exchange
		start := time.Now()
		err := x.Do(context.Background(), cl, get{})
		var e *Error
		if !errors.As(err, &e) || e.Failure != FailTimeout || time.Since(start) != time.Second {
			t.Fatalf("%v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if err := x.Do(ctx, cl, get{}); !errors.As(err, &e) || e.Failure != FailCancelled {
			t.Fatal(err)
		}
		x.Close()
	})
}

// TestEarlyRefusal: a server that answers and closes before it has read the
// request is heard.
func TestEarlyRefusal(t *testing.T) {
	s := &refuser{script{in: []byte("HTTP/1.1 413 Too Large\r\nContent-Length: 1\r\n\r\na")}}
	cl := New(Options{Addr: "x:80", Dialer: &dials{s}, Clock: env.SystemClock{}})
	var x Exchange
	status, _, err := fetch(cl, &x)
	if err != nil || status != 413 || cl.Stats().Idle != 0 {
		t.Fatalf("%d, %v, %+v", status, err, cl.Stats())
	}
}

type refuser struct{ script }

func (*refuser) Write([]byte) (int, error) { return 0, os.ErrClosed }

// FuzzResponse feeds any bytes as a response. The outcome must not depend on
// how they are cut into reads, and where net/http also understands them, both
// must read the same.
func FuzzResponse(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\nT: v\r\n\r\nrest",
		"HTTP/1.0 404 Not Found\r\nConnection: keep-alive\r\n\r\nbody",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Slow\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 200\n\nx",
	} {
		f.Add([]byte(s), 1)
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, in []byte, step int) {
		type outcome struct {
			status  int
			body    string
			failure Failure
		}
		run := func(step int) (o outcome) {
			cl, _ := one(string(in), step)
			var x Exchange
			status, body, err := fetch(cl, &x)
			if cap(x.buf) > bufSize {
				t.Fatalf("the exchange keeps a buffer of %d", cap(x.buf))
			}
			var e *Error
			if err != nil && !errors.As(err, &e) {
				t.Fatalf("error of another type: %v", err)
			}
			if e != nil {
				o.failure = e.Failure
			}
			o.status, o.body = status, string(body)
			return o
		}
		whole := run(0)
		for _, s := range []int{1, step & 31} {
			if got := run(s); got != whole {
				t.Fatalf("reads of %d give %+v, whole gives %+v", s, got, whole)
			}
		}
		if whole.failure != 0 {
			return
		}
		r, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(in)), nil)
		if err != nil || r.StatusCode < 200 {
			return
		}
		body, err := io.ReadAll(r.Body)
		if err == nil && (r.StatusCode != whole.status || string(body) != whole.body) {
			t.Fatalf("net/http reads %d %q, we read %d %q", r.StatusCode, body, whole.status, whole.body)
		}
	})
}
