package httpapi

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// errTaken is no error: the connection was taken over, and the answer goes on
// without the request's goroutine.
var errTaken = errors.New("the connection was taken over")

// line is an HTTP/1.1 connection that was taken over from net/http for the
// rest of one answer, and the ResponseWriter of that rest. When the answer is
// out and the client sends its next request, the connection goes back.
//
// One goroutine waits in a read, on the smallest stack: it sees the client
// leave, and it sees the next request come.
type line struct {
	of    *lines
	conn  net.Conn
	relay *relay
	back  *returned // conn, if it was taken before

	// Of whoever runs the relay.
	header  http.Header // until it is out
	head    []byte      // status and header, until the first write
	begun   bool        // the header is out or in head
	chunked bool
	last    bool // the client wants no other answer
	broken  bool // a write failed

	mu    sync.Mutex
	state lineState // guarded by mu
	heard []byte    // guarded by mu; what came of the next request
	left  bool      // guarded by mu; the client, or the time it had, has ended
}

type lineState uint8

const (
	answering lineState = iota
	waiting             // for the next request
	gone                // closed, or given back
)

// listen waits for the client's next byte, or for its end.
func (n *line) listen() {
	n.mu.Lock()
	heard := len(n.heard) > 0
	n.mu.Unlock()
	if heard {
		return // it does not read on before it got its answer
	}
	var b [1]byte
	k, _ := n.conn.Read(b[:])
	n.mu.Lock()
	if k > 0 {
		n.heard = append(n.heard, b[0])
	} else {
		n.left = true
	}
	state, relay := n.state, n.relay
	if state == waiting {
		n.state = gone
	}
	n.mu.Unlock()
	switch {
	case state == waiting:
		n.leave(k > 0)
	case state == answering && k == 0:
		relay.stop(context.Canceled)
	}
}

// finish writes what ends the answer and reports whether another may follow on
// this connection.
func (n *line) finish() (again bool) {
	if !n.begun || n.broken { // a client that left gets nothing
		return false
	}
	if n.chunked {
		n.send([]byte("0\r\n\r\n"))
	} else {
		n.send(nil)
	}
	return !n.broken && !n.last
}

// release ends the answer's hold of the connection.
func (n *line) release(again bool) {
	again = n.of.free() && again
	n.mu.Lock()
	idle, next := again && !n.left, len(n.heard) > 0
	n.state = gone
	if idle && !next {
		n.state = waiting
		if bound := n.relay.c.api.cfg.Limits.IdleTimeout; bound > 0 {
			_ = n.conn.SetReadDeadline(n.relay.c.api.cfg.Clock.Now().Add(bound))
		}
	}
	over := n.state == gone
	n.relay = nil
	n.mu.Unlock()
	if over {
		n.leave(idle)
	}
}

// leave closes the connection or gives it back, once.
func (n *line) leave(back bool) {
	n.of.mu.Lock()
	delete(n.of.all, n)
	n.of.mu.Unlock()
	if !back {
		_ = n.conn.Close()
		return
	}
	_ = n.conn.SetDeadline(time.Time{})
	if n.back == nil {
		n.back = &returned{Conn: n.conn}
	}
	n.back.head = append(n.heard, n.back.head...)
	select {
	case n.of.back <- n.back:
	case <-n.of.done:
		_ = n.conn.Close()
	}
}

// Header implements http.ResponseWriter.
func (n *line) Header() http.Header {
	if n.header == nil {
		n.header = http.Header{} // too late, as always
	}
	return n.header
}

// WriteHeader implements http.ResponseWriter. The header goes out with the
// first write.
func (n *line) WriteHeader(status int) {
	if n.begun {
		return
	}
	n.begun = true
	h := n.header
	_, sized := h["Content-Length"]
	n.chunked = !sized
	b := append(append(strconv.AppendInt([]byte("HTTP/1.1 "), int64(status), 10), ' '), http.StatusText(status)...)
	b = n.relay.c.api.cfg.Clock.Now().UTC().AppendFormat(append(b, "\r\nDate: "...), http.TimeFormat)
	b = append(b, "\r\n"...)
	if n.chunked {
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	if n.last || h.Get("Connection") == "close" {
		n.last = true
		h["Connection"] = []string{"close"}
	}
	w := (*appender)(&b)
	_ = h.Write(w) // to memory
	n.head, n.header = append(b, "\r\n"...), nil
}

type appender []byte

func (a *appender) Write(b []byte) (int, error) {
	*a = append(*a, b...)
	return len(b), nil
}

// Write implements http.ResponseWriter: one chunk, in one write.
func (n *line) Write(b []byte) (int, error) {
	n.WriteHeader(http.StatusOK)
	if len(b) == 0 {
		return 0, nil
	}
	if !n.chunked {
		return len(b), n.send(b)
	}
	p := getBuffer()
	out := strconv.AppendInt(*p, int64(len(b)), 16)
	out = append(append(append(out, "\r\n"...), b...), "\r\n"...)
	err := n.send(out)
	putBuffer(p, out)
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

func (n *line) send(b []byte) error {
	if n.head != nil {
		b = append(n.head, b...)
		n.head = nil
	}
	if len(b) == 0 {
		return nil
	}
	_, err := n.conn.Write(b)
	if err != nil {
		n.broken = true
	}
	return err
}

// FlushError implements what a ResponseController asks for: nothing is held.
func (n *line) FlushError() error { return nil }

// SetWriteDeadline implements what a ResponseController asks for.
func (n *line) SetWriteDeadline(t time.Time) error { return n.conn.SetWriteDeadline(t) }
