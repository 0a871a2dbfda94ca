package grpcapi

import (
	"context"
	"sync"

	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/wire"
)

// finishing is what the end of a server waits for: client streams and unary
// calls.
type finishing struct {
	begun chan struct{} // closed when it began

	mu    sync.Mutex
	on    bool                     // guarded by mu
	conns map[*clientConn]struct{} // guarded by mu
	calls int                      // guarded by mu; unary ones and blobs
	gone  chan struct{}            // guarded by mu; closed when nothing is left; nil until it began
}

func (f *finishing) init() {
	f.begun, f.conns = make(chan struct{}), map[*clientConn]struct{}{}
}

// enter counts what is to be waited for; c is nil but for a client's stream.
// false: the server ends.
func (f *finishing) enter(c *clientConn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.on {
		return false
	}
	if c != nil {
		f.conns[c] = struct{}{}
	} else {
		f.calls++
	}
	return true
}

func (f *finishing) leave(c *clientConn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c != nil {
		delete(f.conns, c)
	} else {
		f.calls--
	}
	f.look()
}

// look closes gone if nothing is left. Guarded by mu.
func (f *finishing) look() {
	if f.on && f.calls == 0 && len(f.conns) == 0 {
		select {
		case <-f.gone:
		default:
			close(f.gone)
		}
	}
}

// begin takes nothing in any more, and gives the streams that there are.
func (f *finishing) begin() (conns []*clientConn, gone <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.on {
		f.on, f.gone = true, make(chan struct{})
		close(f.begun)
		f.look()
	}
	for c := range f.conns {
		conns = append(conns, c)
	}
	return conns, f.gone
}

// Finish ends the streams of clients in good order: what they ask from now on is
// refused, what waits for something to happen (wait, watch, a live history) is
// told to ask elsewhere, and all else is answered. It returns when all that has
// left and the connections are closed, or with the cause when ctx ends; what is
// open then is cut by Stop, and its caller does not know what became of it. Those
// who answer must still be at work, and the dispatcher stopped.
func (s *Server) Finish(ctx context.Context) error {
	s.Drain()
	conns, gone := s.finishing.begin()
	for _, c := range conns {
		c.finish()
	}
	select {
	case <-gone:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	// What the handlers have sent is still in the connections' own buffers.
	s.framed.close(false)
	closed := make(chan struct{})
	go func() {
		s.grpc.GracefulStop() // Stop ends it, too
		s.framed.all.Wait()
		close(closed)
	}()
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// endures says that a call waits for something to happen, for as long as it takes.
func endures(c *wire.Call) bool {
	return c.GetWait() != nil || c.GetWaitAttribute() != nil || c.GetWatch() != nil || c.GetHistory().GetLive()
}

// elsewhere refuses a call of a server that ends. Nothing of it was done.
func elsewhere(id uint64) *wire.Answer {
	return &wire.Answer{Id: id, Error: &wire.Error{Code: string(dispatch.Unavailable), Position: -1, RetryAfterUs: busyRetryUs,
		Message: "the server stops", Hint: "connect again, to the next server, and ask there"}}
}

// finish is Server.Finish for one stream.
func (c *clientConn) finish() {
	c.mu.Lock()
	c.finishing = true
	var enduring []*openCall
	for _, o := range c.open {
		if o.endures {
			enduring = append(enduring, o)
		}
	}
	c.lookDone()
	c.mu.Unlock()
	for _, o := range enduring {
		// One without room for this learns it by the end of the stream.
		a := elsewhere(o.id)
		_ = c.out.Put(a.SizeVT(), func(f *wire.Answers) { f.Answers = append(f.Answers, a) })
		if o.end() {
			o.cancel()
		}
	}
}

// lookDone ends the stream when all that was asked is answered, and nothing more
// is to come. Guarded by mu. What is put before the sender closes is sent.
func (c *clientConn) lookDone() {
	switch {
	case len(c.open) > 0:
	case c.finishing:
		c.ended.with(errStopping)
	case c.closed:
		c.ended.with(nil)
	}
}
