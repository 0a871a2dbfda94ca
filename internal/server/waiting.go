package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/grpcapi"
)

// Standing is what a process that stands by shows of itself.
type Standing struct {
	Active  string    `json:"active"`            // the node that is active; empty = not known
	Address string    `json:"address,omitempty"` // where it is reached
	Since   time.Time `json:"since"`             // this process has waited
	// Followed is the newest entry of each partition in this process's tables.
	Followed []uint64 `json:"followed"`
}

// waiting answers on the server's address while the process stands by: questions
// about its health itself, and all else by passing the connection on to the active
// process. What comes while nobody is known to be active is held for a while.
type waiting struct {
	l     net.Listener
	own   string // this process's address, for when it stands by no more
	parts []*part
	dial  env.Dialer
	clock env.Clock
	first time.Duration // for a client to say its first bytes
	http  *http.Server
	local *half
	done  chan struct{} // no connection is taken any more

	mu      sync.Mutex
	state   Standing           // guarded by mu
	to      string             // guarded by mu; where connections go; empty = not known
	changed chan struct{}      // guarded by mu; closed when to changes
	passed  map[io.Closer]bool // guarded by mu; connections that were passed on
}

const (
	// holdFor bounds how long a connection is held until somebody is active: a
	// take-over with the default lease, and some.
	holdFor = 15 * time.Second
	// dialEvery is the rest between two tries to reach the active process.
	dialEvery = 200 * time.Millisecond
	// retryAfter is when a client that was held in vain is to try again, in seconds.
	retryAfter = "1"
)

func (s *Server) answerWaiting(l net.Listener) *waiting {
	w := &waiting{
		l: Lend(context.Background(), l), own: l.Addr().String(), parts: s.parts, dial: s.env.Dialer, clock: s.env.Clock, first: s.cfg.Limits.ReadHeaderTimeout,
		done: make(chan struct{}), state: Standing{Since: s.env.Clock.Now()}, changed: make(chan struct{}), passed: map[io.Closer]bool{},
	}
	w.http = &http.Server{Handler: w, ReadHeaderTimeout: s.cfg.Limits.ReadHeaderTimeout, IdleTimeout: time.Second,
		MaxHeaderBytes: int(s.cfg.Limits.MaxHeaderBytes)}
	w.http.SetKeepAlivesEnabled(false) // the next request of a connection is to be sorted anew
	w.local = newHalf(&splitter{l: l, done: w.done})
	go func() { _ = w.http.Serve(w.local) }() // ends with done
	go w.accept(newLimitListener(w.l, s.cfg.Limits.MaxConnections))
	return w
}

func (w *waiting) accept(l net.Listener) {
	defer close(w.done)
	for {
		c, err := l.Accept()
		if err != nil {
			return // the listener is wanted by the server
		}
		go w.sort(c)
	}
}

// stands says who is active, "" when that is not known. Connections that were
// passed on to another one are ended: what it says is not to be relied on.
func (w *waiting) stands(active, address string) {
	w.mu.Lock()
	w.state.Active, w.state.Address = active, address
	w.mu.Unlock()
	w.turn(address)
}

func (w *waiting) turn(to string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.to == to {
		return
	}
	w.to = to
	close(w.changed)
	w.changed = make(chan struct{})
	for c := range w.passed {
		_ = c.Close()
	}
	clear(w.passed)
}

// give ends the taking of connections, so that the listener can be served by
// others. Those that are held go to whom it is served by next: this process as the
// active one, or as one that stands by again.
func (w *waiting) give() {
	_ = w.l.Close() // of what was lent: it never fails
	<-w.done
	_ = w.http.Close()
	w.turn(w.own)
}

// probes are the requests that a process answers for itself, however it stands.
var probes = [][]byte{[]byte("GET /healthz "), []byte("GET /readyz ")}

// sort reads the first bytes of a connection, and passes it on.
func (w *waiting) sort(c net.Conn) {
	buf := make([]byte, 0, len(probes[0]))
	_ = c.SetReadDeadline(w.clock.Now().Add(w.first)) // a closed one fails below
	for couldBeProbe(buf) {
		n, err := c.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err != nil {
			_ = c.Close()
			return
		}
		if isProbe(buf) {
			_ = c.SetReadDeadline(time.Time{})
			select {
			case w.local.conns <- &peeked{Conn: c, first: buf}:
			case <-w.done:
				_ = c.Close()
			}
			return
		}
	}
	_ = c.SetReadDeadline(time.Time{})
	w.pass(c, buf)
}

func isProbe(b []byte) bool {
	for _, p := range probes {
		if bytes.HasPrefix(b, p) {
			return true
		}
	}
	return false
}

func couldBeProbe(b []byte) bool {
	for _, p := range probes {
		if bytes.HasPrefix(p, b) && len(b) < len(p) {
			return true
		}
	}
	return false
}

// pass carries a connection to the active process and back until either side
// ends it.
func (w *waiting) pass(c net.Conn, first []byte) {
	defer c.Close() //nolint:errcheck // whatever was said was said
	to, err := w.reach()
	if err != nil {
		w.refuse(c, first)
		return
	}
	defer to.Close() //nolint:errcheck // as above
	if _, err := to.Write(first); err != nil {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { carry(to, c) })
	both.Go(func() { carry(c, to) })
	both.Wait()
	w.mu.Lock()
	delete(w.passed, to)
	w.mu.Unlock()
}

// carry copies until from has nothing more to say, and tells to.
func carry(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		_ = to.Close()
		_ = from.Close()
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		return
	}
	_ = to.Close()
}

// reach dials the active process, as soon as there is one that can be reached.
func (w *waiting) reach() (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), holdFor)
	defer cancel()
	for {
		w.mu.Lock()
		address, changed := w.to, w.changed
		w.mu.Unlock()
		if address != "" {
			if c, err := w.dial.DialContext(ctx, "tcp", address); err == nil && w.keep(c, address) {
				return c, nil
			}
		}
		again := make(chan struct{})
		t := w.clock.AfterFunc(dialEvery, func() { close(again) })
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			t.Stop()
			return nil, errors.New("no process was active in time")
		}
		t.Stop()
	}
}

// keep notes a connection to address; false when that is not the active one's any
// more.
func (w *waiting) keep(c net.Conn, address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.to != address {
		_ = c.Close()
		return false
	}
	w.passed[c] = true
	return true
}

// refuse answers one that was held in vain, in HTTP/1 when it speaks that.
func (w *waiting) refuse(c net.Conn, first []byte) {
	if bytes.HasPrefix([]byte(grpcapi.Preface), first[:min(len(first), len(grpcapi.Preface))]) {
		return // the end of the connection says it
	}
	body, _ := json.Marshal(map[string]any{"error": map[string]string{ // plain text always encodes
		"code": "standby", "message": "this process stands by, and no other one is active",
		"hint": "try again; one takes over when the lease of the former has ended"}})
	_, _ = io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: "+
		retryAfter+"\r\n\r\n"+string(body)+"\n") // a client that is gone does not mind
}

// ServeHTTP implements http.Handler, for the questions about this process.
func (w *waiting) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	state, to := w.state, w.to
	w.mu.Unlock()
	for _, p := range w.parts {
		state.Followed = append(state.Followed, p.followed.Load())
	}
	rw.Header().Set("Content-Type", "application/json")
	if to == "" && r.URL.Path != "/healthz" {
		rw.Header().Set("Retry-After", retryAfter)
		rw.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(rw).Encode(map[string]any{"status": "standby", "standby": state}) // as above
}
