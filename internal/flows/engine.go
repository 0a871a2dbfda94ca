package flows

import (
	"context"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// given is v, or an empty message where there is none.
func given[T any](v *T) *T {
	if v == nil {
		v = new(T)
	}
	return v
}

// bound is a number of things that may be at work at once.
type bound chan struct{}

func newBound(n int) bound { return make(bound, n) }

func (b bound) enter() bool {
	select {
	case b <- struct{}{}:
		return true
	default:
		return false
	}
}

func (b bound) leave() { <-b }

// view calls extract with the live flow (nil when there is none) on its
// partition's goroutine, and done when what was seen is durable, or with an
// error. extract may keep what is never changed: payloads, values, messages,
// attributes and the list of these.
func (s *Service) view(flowID string, extract func(*wire.Flow), done func(error)) {
	if err := s.cfg.Set.For(flowID).View(flowID, extract, done); err != nil {
		done(err)
	}
}

// look answers with what fn makes of a flow. When fn gives neither an answer
// nor an error, it has arranged for one itself.
func (c *call) look(flowID string, fn func(*wire.Flow) (*wire.Answer, error)) {
	var a *wire.Answer
	var err error
	handed := false
	c.s.view(flowID, func(f *wire.Flow) {
		if f == nil {
			err = noFlow(flowID)
			return
		}
		a, err = fn(f)
		handed = a == nil && err == nil
	}, func(lost error) {
		switch {
		case handed:
		case lost != nil:
			c.fail(lost)
		case err != nil:
			c.fail(err)
		default:
			c.answer(a)
		}
	})
}

// submit proposes a command; reply makes the answer of its outcome. An error
// means that the command was not taken, and that nobody was answered.
func (c *call) submit(e *wire.Entry, reply func(core.Reply) *wire.Answer) error {
	return c.s.cfg.Set.For(e.FlowId).Submit(partition.Proposal{Entry: e, Reply: func(rep core.Reply, err error) {
		if err != nil {
			c.fail(err)
			return
		}
		c.answer(reply(rep))
	}})
}

// propose is submit for those who have nothing else to do.
func (c *call) propose(e *wire.Entry, reply func(core.Reply) *wire.Answer) {
	if err := c.submit(e, reply); err != nil {
		c.fail(err)
	}
}

func doneAnswer(core.Reply) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}}
}

// read runs fn on a goroutine of its own, one of a bounded number, and answers
// with what it gives, or gives nothing when it has answered itself. The context
// ends with the call's time.
func (c *call) read(fn func(context.Context) (*wire.Answer, error)) {
	c.spawn(c.s.reads, c.timeout(), func(ctx context.Context) {
		a, err := fn(ctx)
		switch {
		case err != nil:
			c.fail(c.ended(ctx, err))
		case a != nil:
			c.answer(a)
		}
	})
}

// spawn runs fn on a goroutine; a time of 0 never ends.
func (c *call) spawn(of bound, d time.Duration, fn func(context.Context)) {
	if !of.enter() {
		c.fail(refuse(Overloaded, "%d calls of this kind are at work already", cap(of)))
		return
	}
	c.s.running.Add(1)
	go func() {
		defer c.s.running.Done()
		defer of.leave()
		ctx, cancel := context.WithCancelCause(c.ctx)
		defer cancel(nil)
		if d > 0 {
			t := c.s.cfg.Env.Clock.AfterFunc(d, func() { cancel(errDeadline) })
			defer t.Stop()
		}
		fn(ctx)
	}()
}

// ended says why ctx ended where err only says that it did.
func (c *call) ended(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	if context.Cause(ctx) == errDeadline {
		return c.late()
	}
	return c.gone()
}

// viewed is look for goroutines: it waits for a flow to be seen durably.
func (s *Service) viewed(ctx context.Context, flowID string, extract func(*wire.Flow)) error {
	ch := make(chan error, 1)
	found := false
	s.view(flowID, func(f *wire.Flow) {
		if f != nil {
			found = true
			extract(f)
		}
	}, func(err error) { ch <- err })
	select {
	case err := <-ch:
		if err == nil && !found {
			err = noFlow(flowID)
		}
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// settled waits until everything that was acknowledged is in the tables.
func settled(ctx context.Context, r *partition.Runner) error {
	return r.Do(ctx, func(*partition.Machine) {})
}
