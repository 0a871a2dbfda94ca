package server

import (
	"context"
	"net"
	"sync"
	"time"
)

// Lend gives a listener for one user of l: closing it ends that user's Accept and
// leaves l open for the next one, unless ctx has ended, when there will be none. l
// must be one of the system's.
func Lend(ctx context.Context, l net.Listener) net.Listener {
	b := &lent{Listener: l, ctx: ctx, over: make(chan struct{})}
	b.setDeadline(time.Time{})
	return b
}

type lent struct {
	net.Listener
	ctx  context.Context
	over chan struct{}
	once sync.Once
}

func (b *lent) setDeadline(t time.Time) {
	if d, ok := b.Listener.(interface{ SetDeadline(t time.Time) error }); ok {
		_ = d.SetDeadline(t) // it fails when the listener is closed, which Accept says
	}
}

// SetDeadline passes on to what was lent, so that lending it on works.
func (b *lent) SetDeadline(t time.Time) error { b.setDeadline(t); return nil }

// Accept implements net.Listener.
func (b *lent) Accept() (net.Conn, error) {
	c, err := b.Listener.Accept()
	select {
	case <-b.over:
		if err == nil {
			_ = c.Close() // it came in between; it dials again
		}
		return nil, net.ErrClosed
	default:
		return c, err
	}
}

// Close implements net.Listener.
func (b *lent) Close() error {
	b.once.Do(func() {
		close(b.over)
		if b.ctx.Err() != nil {
			_ = b.Listener.Close() // at once, so that nobody waits for an answer that does not come
			return
		}
		b.setDeadline(time.Unix(1, 0)) // an instant in the past wakes Accept
	})
	return nil
}
