package grpcapi

import (
	"context"
	"sync"

	"google.golang.org/grpc/peer"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

type workersService struct {
	wire.UnimplementedWorkersServer
	s *Server
}

// Work implements wire.WorkersServer.
func (v workersService) Work(stream wire.Workers_WorkServer) error {
	if !v.s.workers.take() {
		return &core.Error{Code: core.LimitReached, Message: "this server has as many workers as it takes: give each more concurrency instead"}
	}
	defer v.s.workers.give()
	c := &workerConn{s: v.s, stream: stream, ended: newEnding()}
	c.Sender = mux.NewSender(v.s.cfg.MaxUnsent, c.send)
	late := v.s.cfg.Clock.AfterFunc(helloTimeout, func() {
		if c.worker() == nil {
			c.Close(&core.Error{Code: core.Invalid, Message: "the worker sent no Hello within " + helloTimeout.String()})
		}
	})
	defer late.Stop()
	go c.receive()
	reason := c.ended.wait(stream.Context())
	c.leave(reason)
	end(v.s, c.Sender, reason)
	return reason
}

// workerConn is the stream of one worker; for the dispatcher its outlet.
type workerConn struct {
	*mux.Sender[wire.ServerFrame]
	s      *Server
	stream wire.Workers_WorkServer
	ended  *ending

	mu   sync.Mutex
	w    *dispatch.Worker // guarded by mu; nil before its Hello
	over bool             // guarded by mu
}

func (c *workerConn) send(f *wire.ServerFrame) error {
	err := c.stream.Send(f)
	if w := c.worker(); w != nil && err == nil {
		w.Sent()
	}
	return err
}

// Close implements dispatch.Outlet.
func (c *workerConn) Close(err error) { c.ended.with(err) }

func (c *workerConn) worker() *dispatch.Worker {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.w
}

// leave tells the dispatcher that the stream is over.
func (c *workerConn) leave(reason error) {
	c.mu.Lock()
	w := c.w
	c.over = true
	c.mu.Unlock()
	if w != nil {
		w.Leave(reason)
	}
}

// receive takes the worker's frames until the stream ends.
func (c *workerConn) receive() {
	var err error
	defer func() { c.ended.with(err) }()
	defer c.s.recovered(&err)
	f, err := c.stream.Recv()
	if err != nil {
		return
	}
	var w *dispatch.Worker
	if w, err = c.connect(f); err != nil {
		return
	}
	f.Hello = nil
	for err == nil {
		if err = w.Frame(f); err == nil {
			f, err = c.stream.Recv()
		}
	}
}

func (c *workerConn) connect(f *wire.WorkerFrame) (*dispatch.Worker, error) {
	address := ""
	if p, ok := peer.FromContext(c.stream.Context()); ok {
		address = p.Addr.String()
	}
	w, err := c.s.cfg.Dispatch.Connect(tenantIn(c.stream.Context()), address, f.Hello, c)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	over := c.over
	c.w = w
	c.mu.Unlock()
	if over {
		w.Leave(context.Canceled)
	}
	return w, nil
}
