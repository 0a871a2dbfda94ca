package sim

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// routine runs production code that waits for the store within a call: it runs
// until it waits, and goes on at the event that it waits for. One routine or event
// runs at a time. When its process dies, whatever it waits for fails at once, and it
// must return.
type routine struct {
	n    *node
	step func() (struct{}, bool)
	halt func()
	stop func(struct{}) bool
}

// errDead is what a routine of a dead process is told; it tells nobody.
var errDead = errors.New("the process is dead")

// spawn plans a routine.
func (n *node) spawn(f func(c *routine)) {
	c := &routine{n: n}
	c.step, c.halt = iter.Pull(func(yield func(struct{}) bool) {
		c.stop = yield
		f(c)
	})
	n.routines = append(n.routines, c)
	n.inLife(0, c.resume)
}

// resume runs the routine until it waits again.
func (c *routine) resume() {
	c.n.running = c
	_, more := c.step()
	if c.n.running = nil; more {
		return
	}
	for i, o := range c.n.routines {
		if o == c {
			c.n.routines = append(c.n.routines[:i], c.n.routines[i+1:]...)
		}
	}
}

// endRoutines lets the routines of a process that is dead return.
func (n *node) endRoutines() {
	all := n.routines
	n.routines = nil
	for _, c := range all {
		c.halt()
	}
}

// wait gives the control back until resume is called, or the process is dead.
func (c *routine) wait() {
	if !c.n.dead {
		c.stop(struct{}{})
	}
}

// sleep reports whether the process lives on.
func (c *routine) sleep(us int64) bool {
	over := false
	c.n.inLife(us, func() {
		over = true
		c.resume()
	})
	for !over && !c.n.dead {
		c.wait()
	}
	return !c.n.dead
}

// await makes one request in the routine that runs, and waits for its answer.
func (n *node) await(q storeCall) storeAnswer {
	if n.dead {
		return storeAnswer{err: errDead}
	}
	c := n.running
	var out storeAnswer
	over := false
	n.ask(q, func(a storeAnswer) {
		out, over = a, true
		c.resume()
	})
	for !over && !c.n.dead {
		c.wait()
	}
	if !over {
		return storeAnswer{err: errDead}
	}
	return out
}

// store is the object store as production code in a routine of the process sees it.
type store struct{ n *node }

var _ blob.Store = store{}

// Get implements blob.Store.
func (s store) Get(_ context.Context, key string) (blob.Object, error) {
	a := s.n.await(storeCall{kind: blob.KindGet, key: key})
	return a.obj, a.err
}

// Put implements blob.Store.
func (s store) Put(_ context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	a := s.n.await(storeCall{kind: blob.KindPut, key: key, data: data, put: o})
	return a.obj.Token, a.err
}

// List implements blob.Store.
func (s store) List(_ context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	a := s.n.await(storeCall{kind: blob.KindList, key: prefix, after: after, limit: limit})
	return a.list, a.err
}

// Delete implements blob.Store.
func (s store) Delete(_ context.Context, key string, o blob.DeleteOptions) error {
	return s.n.await(storeCall{kind: blob.KindDelete, key: key, del: o}).err
}

// sleeper is the clock of code that waits in a routine for the one timer it sets.
type sleeper struct{ c *routine }

// Now implements env.Clock.
func (s sleeper) Now() time.Time { return lifeClock{s.c.n}.Now() }

// AfterFunc implements env.Clock: it sleeps, and calls f.
func (s sleeper) AfterFunc(d time.Duration, f func()) env.Timer {
	s.c.sleep(s.c.n.m.realUs(d.Microseconds()))
	f()
	return &timer{over: true}
}
