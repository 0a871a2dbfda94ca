package grpcapi

import (
	"context"

	"github.com/perdure-dev/perdure/internal/mux"
)

// ending is why a stream ends: the first reason counts. A stream's handler waits
// for it while another goroutine receives, since only the handler's return ends
// a stream that the other side keeps open.
type ending struct{ ch chan error }

func newEnding() *ending { return &ending{make(chan error, 1)} }

// with ends the stream; nil is good order.
func (e *ending) with(err error) {
	select {
	case e.ch <- err:
	default:
	}
}

func (e *ending) wait(ctx context.Context) error {
	select {
	case err := <-e.ch:
		return err
	case <-ctx.Done():
		select {
		case err := <-e.ch: // it came first
			return err
		default:
			return context.Cause(ctx)
		}
	}
}

// end sends what is left, for as long as a good reader needs, and ends the
// sender; false: some is left. One that is stuck ends when the handler has
// returned.
func end[F any](s *Server, out *mux.Sender[F], reason error) bool {
	go out.Close(reason, true)
	late := make(chan struct{})
	t := s.cfg.Clock.AfterFunc(flushTimeout, func() { close(late) })
	defer t.Stop()
	select {
	case <-out.Done():
		return true
	case <-late:
		return false
	}
}
