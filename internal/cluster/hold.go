package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// LeaseConfig is what a node needs for its lease.
type LeaseConfig struct {
	Store blob.Store
	Env   env.Env // Clock, Boot and Rand
	// Node is the ID, of which no other running process may make use: the data
	// directory that keeps it is locked (NodeID).
	Node    string
	Address string        // where others reach this node; may be empty
	Version string        // of the program; may be empty
	TTL     time.Duration // MinTTL to MaxTTL; 0: DefaultTTL
	// Hurry, if not nil, gives a value when the active node is about to resign, or
	// may be gone: an Elect then looks at once, and often for a while.
	Hurry <-chan struct{}
}

// Lease is a node's lease while its process holds it. Its methods are safe for
// concurrent use.
type Lease struct {
	cfg   LeaseConfig
	nonce string

	// until is the Boot instant before which the lease holds; 0: over, for good.
	until atomic.Int64
	stood atomic.Bool // a Term or an Elect makes use of the lease

	release func()        // asks the goroutine to give the lease up
	asked   chan struct{} // closed by release
	ended   context.CancelFunc
	lost    chan struct{} // closed when the lease is over
	over    func()        // closes lost, once
	done    chan struct{} // closed when the goroutine has returned
	holder  *Holder       // of the goroutine; of anyone after done
}

// Hold takes the lease of this node, whatever a former process of it left, and
// renews it on a goroutine of its own until Release or until it is lost. It
// tries until ctx ends. The lease begins anew: nobody is active by it.
func Hold(ctx context.Context, cfg LeaseConfig) (*Lease, error) {
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	nonce := newNonce(cfg.Env.Rand)
	self := Node{ID: cfg.Node, Address: cfg.Address, Version: cfg.Version, Nonce: nonce, TTLms: cfg.TTL.Milliseconds()}
	if err := CheckTTL(cfg.TTL); err != nil {
		return nil, err
	}
	holder, err := NewHolder(self, cfg.Env.Boot())
	if err != nil {
		return nil, err
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l := &Lease{cfg: cfg, nonce: nonce, holder: holder, ended: cancel, asked: make(chan struct{}), lost: make(chan struct{}), done: make(chan struct{})}
	l.release = sync.OnceFunc(func() { close(l.asked) })
	l.over = sync.OnceFunc(func() { close(l.lost) })
	for holder.Until() == 0 {
		if err := errors.Join(holder.Over(), l.step(ctx, nil)); err != nil {
			cancel()
			return nil, fmt.Errorf("take the lease of node %s: %w%s", cfg.Node, err, lastTrouble(holder))
		}
	}
	l.until.Store(int64(holder.Until()))
	go l.run(running)
	return l, nil
}

func lastTrouble(h *Holder) string {
	if t := h.Trouble(); t != nil {
		return fmt.Sprintf(" (last answer: %v)", t)
	}
	return ""
}

// run renews the lease until it is over.
func (l *Lease) run(ctx context.Context) {
	defer close(l.done)
	defer l.end()
	asked := l.asked
	known := l.holder.Until()
	watch := l.watch(known)
	for l.holder.Over() == nil {
		if l.step(ctx, asked) != nil {
			break
		}
		if asked != nil && isClosed(asked) {
			l.holder.Release(l.cfg.Env.Boot())
			asked = nil
		}
		if until := l.holder.Until(); until > known {
			if l.until.CompareAndSwap(int64(known), int64(until)) {
				watch.Stop()
				known, watch = until, l.watch(until)
			} else if !isClosed(l.asked) {
				break // Valid has seen it over
			}
		}
	}
	watch.Stop()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch tells of the end of the lease even while a request is on its way.
func (l *Lease) watch(until time.Duration) env.Timer {
	return l.cfg.Env.Clock.AfterFunc(until-l.cfg.Env.Boot(), func() { l.Valid() })
}

// step makes one request, or waits until it is time for one, until interrupt is
// closed, or until ctx ends, which is the error.
func (l *Lease) step(ctx context.Context, interrupt <-chan struct{}) error {
	now := l.cfg.Env.Boot()
	if op, ok := l.holder.Next(now); ok {
		l.holder.Answer(do(ctx, l.cfg, op))
		return ctx.Err()
	}
	if l.holder.Over() != nil {
		return nil
	}
	due := make(chan struct{})
	timer := l.cfg.Env.Clock.AfterFunc(l.holder.Wake()-now, func() { close(due) })
	defer timer.Stop()
	select {
	case <-due:
	case <-interrupt:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// do makes one request, which may take a quarter of the TTL.
func do(ctx context.Context, cfg LeaseConfig, op Op) Answer {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := cfg.TTL / timeoutShare
	timer := cfg.Env.Clock.AfterFunc(limit, func() {
		cancel(fmt.Errorf("the store did not answer within %v", limit))
	})
	defer timer.Stop()
	a := Answer{Asked: cfg.Env.Boot()}
	if op.Data == nil {
		var obj blob.Object
		obj, a.Err = cfg.Store.Get(ctx, op.Key)
		a.Data, a.Token = obj.Data, obj.Token
	} else {
		a.Token, a.Err = cfg.Store.Put(ctx, op.Key, op.Data, op.If)
	}
	if a.Err != nil && ctx.Err() != nil {
		a.Err = fmt.Errorf("%w (%w)", a.Err, context.Cause(ctx))
	}
	a.Now = cfg.Env.Boot()
	return a
}

// Valid reports whether the lease holds now. Once false it stays false. What was
// read before Valid was called and true came back is not outdated: no other
// node could have been active then. It is cheap: one reading of the clock.
func (l *Lease) Valid() bool {
	for {
		until := l.until.Load()
		if until == 0 {
			return false
		}
		if int64(l.cfg.Env.Boot()) < until {
			return true
		}
		if l.until.CompareAndSwap(until, 0) {
			l.end()
			return false
		}
	}
}

func (l *Lease) end() {
	l.until.Store(0)
	l.ended()
	l.over()
}

// Lost is closed when the lease is over, also by Release.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Err says why the lease is over; it is nil before Lost is closed.
func (l *Lease) Err() error {
	if !isClosed(l.lost) {
		return nil
	}
	if !isClosed(l.done) {
		return ErrLost
	}
	if err := l.holder.Over(); err != nil {
		return err
	}
	return fmt.Errorf("%w: it was not renewed in time%s", ErrLost, lastTrouble(l.holder))
}

// Node is the ID of the node.
func (l *Lease) Node() string { return l.cfg.Node }

// Release gives the lease up, at once in this process, and tells the others, so
// that they need not wait for its end. An error says that they may have to: ctx
// ended or a TTL passed before the store took the news, or the lease was lost.
func (l *Lease) Release(ctx context.Context) error {
	l.release()
	l.until.Store(0)
	l.over()
	select {
	case <-l.done:
	case <-ctx.Done():
		l.ended()
		<-l.done
	}
	if err := l.Err(); !errors.Is(err, ErrReleased) {
		return fmt.Errorf("release the lease of node %s: %w: the others wait until its time is over", l.cfg.Node, err)
	}
	return nil
}
