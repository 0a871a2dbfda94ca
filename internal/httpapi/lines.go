package httpapi

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
)

// lines is the connections that were taken over.
type lines struct {
	open atomic.Bool   // there is a listener that takes them back
	back chan net.Conn // to that listener
	done chan struct{} // closed by shut

	mu     sync.Mutex
	all    map[*line]struct{} // guarded by mu
	busy   int                // guarded by mu; lines with an answer
	closed bool               // guarded by mu
	over   bool               // guarded by mu; every connection is to be closed, one that comes late, too
	quiet  chan struct{}      // closed when closed and nothing is busy
}

func newLines() *lines {
	return &lines{back: make(chan net.Conn), done: make(chan struct{}), all: map[*line]struct{}{}, quiet: make(chan struct{})}
}

// take takes the connection of a relay's call over. nil: it stays with
// net/http.
func (l *lines) take(r *relay) *line {
	if !l.reserve() {
		return nil
	}
	c := r.c
	conn, buffered, err := c.rc.Hijack()
	if err != nil {
		l.free()
		return nil
	}
	n := &line{
		of: l, conn: conn, relay: r, header: c.w.Header(), last: c.r.Close,
		begun: c.status != 0, chunked: c.status != 0, // net/http has begun it in chunks then: no answer that waits has a length
	}
	n.back, _ = conn.(*returned)
	if k := buffered.Reader.Buffered(); k > 0 {
		n.heard = make([]byte, k)
		_, _ = buffered.Reader.Read(n.heard) // it is in the buffer: cannot fail
	}
	if n.begun {
		n.header = nil
	}
	c.moveTo(n)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[n] = struct{}{}
	if l.over {
		_ = conn.Close() // who reads or writes there sees it
	}
	return n
}

func (l *lines) reserve() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.busy++
	return true
}

// free is the end of an answer and reports whether more may follow.
func (l *lines) free() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy--; l.busy == 0 && l.closed {
		close(l.quiet)
	}
	return !l.closed
}

// shut closes the lines that wait for a request; answers go on.
func (l *lines) shut() {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	if first {
		close(l.done)
		if l.busy == 0 {
			close(l.quiet)
		}
	}
	l.mu.Unlock()
	l.cut(func(n *line) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.state == waiting
	})
}

// cut closes the connections of some lines; who reads or writes there sees it.
func (l *lines) cut(which func(*line) bool) {
	l.mu.Lock()
	all := slices.Collect(maps.Keys(l.all))
	l.mu.Unlock()
	for _, n := range all {
		if which(n) {
			_ = n.conn.Close()
		}
	}
}

// Returned is the listener by which connections come back whose answers have
// left net/http. The http.Server that serves the API must serve it, too:
// without it no connection is taken over. Closing it ends idle ones. addr is
// what it gives as its address.
func (a *API) Returned(addr net.Addr) net.Listener {
	a.lines.open.Store(true)
	return &returns{a.lines, addr}
}

// Close waits until the answers that have left net/http are out, or until ctx
// ends, and closes their connections. net/http's Shutdown does not know them.
func (a *API) Close(ctx context.Context) {
	a.lines.shut()
	select {
	case <-a.lines.quiet:
	case <-ctx.Done():
	}
	a.lines.mu.Lock()
	a.lines.over = true
	a.lines.mu.Unlock()
	a.lines.cut(func(*line) bool { return true })
}

// returns is the listener of Returned.
type returns struct {
	of   *lines
	addr net.Addr
}

// Accept implements net.Listener.
func (r *returns) Accept() (net.Conn, error) {
	select {
	case c := <-r.of.back:
		return c, nil
	case <-r.of.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (r *returns) Close() error {
	r.of.shut()
	return nil
}

// Addr implements net.Listener.
func (r *returns) Addr() net.Addr { return r.addr }

// returned is a connection of which a part of the next request was read.
type returned struct {
	net.Conn
	head []byte
}

// Read implements net.Conn.
func (r *returned) Read(b []byte) (int, error) {
	if len(r.head) == 0 {
		return r.Conn.Read(b)
	}
	n := copy(b, r.head)
	if r.head = r.head[n:]; len(r.head) == 0 {
		r.head = nil
	}
	return n, nil
}
