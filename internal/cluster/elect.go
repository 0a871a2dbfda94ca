package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Standing is how a standby stands.
type Standing struct {
	Active  Active    // who is active; Node is "" while that is not known
	State   State     // of the active node's life
	Since   time.Time // since when this node stands by for that life
	Trouble error     // why the store could not be asked; nil: it could
}

// Term is the time in which this node is the active one. It begins when Elect
// returns and ends with the lease. Its methods are safe for concurrent use.
type Term struct {
	lease    *Lease
	active   Active
	token    blob.Token
	resigned atomic.Bool
}

// Elect stands by until this node is the active one, and returns its term. It
// returns an error when ctx ends, when the lease is lost, or when the store holds
// what this program cannot read. onStanding, if not nil, is called when
// something changes, never twice at a time; it should not block.
//
// A lease serves one term or one Elect at a time.
func Elect(ctx context.Context, l *Lease, onStanding func(Standing)) (*Term, error) {
	if !l.Valid() {
		return nil, fmt.Errorf("elect the active node: %w", l.why())
	}
	if !l.stood.CompareAndSwap(false, true) {
		return nil, fmt.Errorf("%w: node %s is active or stands by already with this lease", ErrInvalid, l.cfg.Node)
	}
	t, err := stand(ctx, l, onStanding)
	if err != nil {
		l.stood.Store(false)
		return nil, fmt.Errorf("elect the active node: %w", err)
	}
	return t, nil
}

func stand(ctx context.Context, l *Lease, onStanding func(Standing)) (*Term, error) {
	boot := l.cfg.Env.Boot
	self := Active{Node: l.cfg.Node, Address: l.cfg.Address, Nonce: l.nonce, TTLms: l.cfg.TTL.Milliseconds()}
	c, err := NewCandidate(self, boot())
	if err != nil {
		return nil, err
	}
	var last Standing
	for {
		if active, elected := c.Elected(); elected && l.Valid() {
			return &Term{lease: l, active: active, token: c.token}, nil
		}
		switch {
		case c.Over() != nil:
			return nil, c.Over()
		case !l.Valid():
			return nil, l.why()
		}
		now := boot()
		if op, ok := c.Next(now); ok {
			c.Answer(do(ctx, l.cfg, op))
			last = report(l, c, last, onStanding)
			continue
		}
		hurry, err := l.wait(ctx, c.Wake()-now)
		if err != nil {
			return nil, err
		}
		if hurry {
			c.Hurry(boot())
		}
	}
}

// why is Err for a lease that is known to be over.
func (l *Lease) why() error {
	if err := l.Err(); err != nil {
		return err
	}
	return ErrLost
}

// wait waits d, or until ctx ends, which is the error, or until the lease does.
func (l *Lease) wait(ctx context.Context, d time.Duration) (hurry bool, err error) {
	due := make(chan struct{})
	timer := l.cfg.Env.Clock.AfterFunc(d, func() { close(due) })
	defer timer.Stop()
	select {
	case <-due:
	case <-l.cfg.Hurry:
		return true, nil
	case <-l.lost:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	return false, nil
}

// report tells of a change, once it is known how the active node is.
func report(l *Lease, c *Candidate, last Standing, tell func(Standing)) Standing {
	next := Standing{Active: c.cur, Since: last.Since, Trouble: c.trouble}
	if c.sight != nil {
		next.State = c.sight.State()
	}
	if c.elected || next.Trouble == nil && next.State == Unknown {
		return last
	}
	if last.Since.IsZero() || next.Active.Nonce != last.Active.Nonce {
		next.Since = l.cfg.Env.Clock.Now()
	}
	same := next.Active == last.Active && next.State == last.State && (next.Trouble == nil) == (last.Trouble == nil)
	if tell != nil && (!same || last.Since.IsZero()) {
		tell(next)
	}
	return next
}

// Epoch counts the terms of all nodes.
func (t *Term) Epoch() uint64 { return t.active.Epoch }

// Valid reports whether this node is the active one now; see Lease.Valid.
func (t *Term) Valid() bool { return !t.resigned.Load() && t.lease.Valid() }

// Lost is closed when the lease is over. Resign does not close it.
func (t *Term) Lost() <-chan struct{} { return t.lease.Lost() }

// Err says why the term is over, nil while it is not.
func (t *Term) Err() error {
	if t.resigned.Load() {
		return ErrReleased
	}
	return t.lease.Err()
}

// Resign ends the term, at once in this process, and lets another node be elected
// without waiting; this one may stand again. First the partitions must have been
// stopped and released. An error says that the others may not know: they then
// wait for the end of the lease, or its release.
func (t *Term) Resign(ctx context.Context) error {
	if t.resigned.Swap(true) {
		return nil
	}
	defer t.lease.stood.Store(false)
	next, token := t.active, t.token
	next.Released = true
	var last error
	for range changeRounds {
		a := do(ctx, t.lease.cfg, Op{Key: ActiveKey, Data: encodeRecord(next), If: blob.PutOptions{IfMatch: token}})
		if a.Err == nil {
			return nil
		}
		last = a.Err
		if !errors.Is(a.Err, blob.ErrPrecondition) && !errors.Is(a.Err, blob.ErrAmbiguous) {
			break
		}
		a = do(ctx, t.lease.cfg, Op{Key: ActiveKey})
		if a.Err != nil {
			last = a.Err
			break
		}
		if cur, err := DecodeActive(a.Data); err != nil || cur != t.active {
			return err // done by a write whose answer was lost, or another node is active by now
		}
		token = a.Token
	}
	return fmt.Errorf("resign as the active node: %w: the others wait for the end of this node's lease", last)
}
