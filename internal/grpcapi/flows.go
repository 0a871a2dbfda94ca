package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// busyRetryUs is when a call that was refused for load may come again.
const busyRetryUs = 50_000

type flowsService struct {
	wire.UnimplementedFlowsServer
	s *Server
}

// Do implements wire.FlowsServer.
func (v flowsService) Do(ctx context.Context, c *wire.Call) (*wire.Answer, error) {
	if c.GetWatch() != nil || c.GetHistory().GetLive() {
		return &wire.Answer{Id: c.Id, Error: &wire.Error{Code: string(core.Invalid), Position: -1,
			Message: "this call has many answers", Hint: "use Stream for watch and live history"}}, nil
	}
	if !v.s.finishing.enter(nil) {
		return elsewhere(c.Id), nil
	}
	defer v.s.finishing.leave(nil)
	var stop chan struct{}
	if endures(c) {
		stop = v.s.finishing.begun
	}
	id := c.Id
	ch := make(chan *wire.Answer, 1)
	v.s.cfg.Flows.Do(ctx, tenantIn(ctx), c, func(a *wire.Answer) {
		select {
		case ch <- a:
		default: // nobody waits for a second one
		}
	})
	select {
	case a := <-ch:
		return a, nil
	case <-stop:
		return elsewhere(id), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Stream implements wire.FlowsServer.
func (v flowsService) Stream(stream wire.Flows_StreamServer) error {
	return v.s.serveCalls(stream.Context(), tenantIn(stream.Context()), stream)
}

// callStream carries the calls of a client and their answers: a stream of gRPC,
// or frames.
type callStream interface {
	Send(*wire.Answers) error // has read the answers when it returns
	Recv() (*wire.Calls, error)
}

// serveCalls answers what a client asks, until the stream ends.
func (s *Server) serveCalls(ctx context.Context, tenant string, stream callStream) error {
	if !s.streams.take() {
		return &core.Error{Code: dispatch.Overloaded, Message: "this server has as many client streams as it takes: share one between callers"}
	}
	defer s.streams.give()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &clientConn{s: s, stream: stream, ctx: ctx, tenant: tenant, ended: newEnding(), open: map[uint64]*openCall{}, sent: make(chan struct{})}
	if !s.finishing.enter(c) {
		return errStopping
	}
	defer s.finishing.leave(c)
	c.out = mux.NewSender(s.cfg.MaxUnsent, c.send)
	go c.receive()
	reason := c.ended.wait(ctx)
	if reason != nil {
		cancel() // with an orderly end the calls there are may still be answered
	}
	if !end(s, c.out, reason) && reason == errStopping {
		// The client takes that one to say that what has no answer was not begun.
		return errSlow
	}
	return reason
}

var errSlow = &core.Error{Code: slowReader, Message: "the client does not read its answers: read faster, or ask less at once"}

// clientConn is one multiplexed stream of a client.
type clientConn struct {
	s      *Server
	stream callStream
	ctx    context.Context
	tenant string
	out    *mux.Sender[wire.Answers]
	ended  *ending

	mu        sync.Mutex
	open      map[uint64]*openCall // guarded by mu
	closed    bool                 // guarded by mu; the client asks for nothing more
	finishing bool                 // guarded by mu; what it asks is refused
	sent      chan struct{}        // guarded by mu; closed and replaced when a frame was sent
}

// openCall is a call that is not answered.
type openCall struct {
	c       *clientConn
	id      uint64
	endures bool
	cancel  context.CancelFunc
	many    bool // answers with more came; owner: who answers
}

// send puts a frame on the wire and wakes those that wait for room.
func (c *clientConn) send(f *wire.Answers) error {
	err := c.stream.Send(f)
	c.mu.Lock()
	close(c.sent)
	c.sent = make(chan struct{})
	c.mu.Unlock()
	return err
}

// receive takes the client's frames until it says no more, or the stream ends.
func (c *clientConn) receive() {
	var err error
	defer func() {
		if err != nil {
			c.ended.with(err)
		}
	}()
	defer c.s.recovered(&err)
	for {
		f, e := c.stream.Recv()
		if errors.Is(e, io.EOF) {
			c.askedAll()
			return
		}
		if e != nil {
			err = e
			return
		}
		for _, call := range f.Calls {
			if err = c.begin(call); err != nil {
				return
			}
		}
		for _, id := range f.Cancels {
			c.drop(id)
		}
	}
}

// askedAll ends the stream when all that was asked is answered.
func (c *clientConn) askedAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.lookDone()
}

// begin gives one call to the service.
func (c *clientConn) begin(call *wire.Call) error {
	ctx, cancel := context.WithCancel(c.ctx)
	o := &openCall{c: c, id: call.Id, cancel: cancel, endures: endures(call)}
	c.mu.Lock()
	finishing := c.finishing
	_, twice := c.open[call.Id]
	full := len(c.open) >= c.s.cfg.MaxOpenCalls
	if !twice && !full && !finishing {
		c.open[call.Id] = o
	}
	c.mu.Unlock()
	switch {
	case finishing:
		cancel()
		c.put(elsewhere(call.Id), false)
		return nil
	case twice:
		cancel()
		return &core.Error{Code: core.Invalid, Message: fmt.Sprintf("call %d is open already: IDs of open calls are unique on a stream", call.Id)}
	case full:
		cancel()
		c.put(&wire.Answer{Id: call.Id, Error: &wire.Error{Code: string(dispatch.Overloaded), Position: -1, RetryAfterUs: busyRetryUs,
			Message: fmt.Sprintf("the stream has %d open calls, the most", c.s.cfg.MaxOpenCalls), Hint: "wait for answers before asking more"}}, false)
		return nil
	}
	c.s.cfg.Flows.Do(ctx, c.tenant, call, o.answer)
	return nil
}

// drop forgets a call whose answer is no longer wanted.
func (c *clientConn) drop(id uint64) {
	c.mu.Lock()
	o := c.open[id]
	c.mu.Unlock()
	if o != nil && o.end() {
		o.cancel()
	}
}

// end takes the call from the open ones; false: it is over already.
func (o *openCall) end() bool {
	c := o.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[o.id] != o {
		return false
	}
	delete(c.open, o.id)
	c.lookDone()
	return true
}

func (o *openCall) isOpen() bool {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	return o.c.open[o.id] == o
}

// answer sends what the service says. What comes after the last answer, or
// after the caller's cancel, is dropped.
func (o *openCall) answer(a *wire.Answer) {
	if !o.isOpen() {
		return
	}
	a.Id = o.id
	o.many = o.many || a.More
	o.c.put(a, o.many)
	if !a.More && o.end() {
		o.cancel()
	}
}

// put sends an answer. When the reader is slow, one that may wait does, and any
// other ends the stream: answers must not be lost without a word.
func (c *clientConn) put(a *wire.Answer, wait bool) {
	add := func(f *wire.Answers) { f.Answers = append(f.Answers, a) }
	for {
		c.mu.Lock()
		sent := c.sent
		c.mu.Unlock()
		err := c.out.Put(a.SizeVT(), add)
		if !errors.Is(err, mux.ErrFull) {
			return // sent, or the stream has ended
		}
		if !wait {
			c.ended.with(errSlow)
			return
		}
		select {
		case <-sent:
		case <-c.ctx.Done():
			return
		}
	}
}
