package flows

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/wire"
)

const shards = 64 // a power of two

func shardOf(flowID string) uint64 { return xxhash.Sum64String(flowID) & (shards - 1) }

// waiters is the calls that wait for something to happen to a flow. One that
// nobody waits for costs Publish one atomic load.
type waiters struct {
	shards [shards]waiterShard
	total  atomic.Int64
	most   int64
}

type waiterShard struct {
	mu    sync.Mutex
	flows map[string][]*waiter // guarded by mu
}

// waiter is one call that waits. It ends once: by an event, by its time, or
// with its caller.
type waiter struct {
	c      *call
	flowID string
	from   core.Cursor // events up to here were seen already
	// heard looks at an event behind from, on the flow's partition goroutine. It
	// gives what ends the wait (called behind the registry's lock), or nil.
	heard func(*wire.Event) func()
	late  func() // answers when the time is over
	timer env.Timer
	stop  func() bool
}

func (w *waiters) init(most int) {
	w.most = int64(most)
	for i := range w.shards {
		w.shards[i].flows = map[string][]*waiter{}
	}
}

// add begins to wait. It is called where the flow is seen, on its partition's
// goroutine, so that the next event it does not know is heard.
func (w *waiters) add(x *waiter, f *wire.Flow) error {
	if n := w.total.Add(1); n > w.most {
		w.total.Add(-1)
		return refuse(Overloaded, "%d calls wait already, at most %d", n-1, w.most)
	}
	x.from = core.Cursor{LSN: f.LastEvent.GetLsn(), N: f.LastEvent.GetN()}
	s := &w.shards[shardOf(x.flowID)]
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.flows[x.flowID]) >= MaxFlowWaiters {
		w.total.Add(-1)
		return refuse(Overloaded, "%d calls wait for flow %q already", MaxFlowWaiters, UserID(x.flowID))
	}
	x.timer = x.c.s.cfg.Env.Clock.AfterFunc(x.c.remaining(), func() {
		if w.remove(x) {
			x.late()
		}
	})
	if x.c.ctx.Done() != nil {
		x.stop = context.AfterFunc(x.c.ctx, func() {
			if w.remove(x) {
				x.c.fail(x.c.gone())
			}
		})
	}
	s.flows[x.flowID] = append(s.flows[x.flowID], x)
	return nil
}

// remove takes x out; false when it has ended already.
func (w *waiters) remove(x *waiter) bool {
	s := &w.shards[shardOf(x.flowID)]
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.flows[x.flowID]
	for i, o := range list {
		if o != x {
			continue
		}
		last := len(list) - 1
		list[i], list[last] = list[last], nil
		s.keep(x.flowID, list[:last])
		w.ended(x)
		return true
	}
	return false
}

func (s *waiterShard) keep(flowID string, list []*waiter) {
	if len(list) == 0 {
		delete(s.flows, flowID)
		return
	}
	s.flows[flowID] = list
}

// ended is called under the shard's lock, which also guards the two hooks.
func (w *waiters) ended(x *waiter) {
	w.total.Add(-1)
	x.timer.Stop()
	if x.stop != nil {
		x.stop()
	}
}

// publish tells the waiters of a flow of its committed events.
func (w *waiters) publish(flowID string, events []*wire.Event) {
	if w.total.Load() == 0 {
		return
	}
	s := &w.shards[shardOf(flowID)]
	s.mu.Lock()
	list := s.flows[flowID]
	if len(list) == 0 {
		s.mu.Unlock()
		return
	}
	var ends []func()
	keep := list[:0]
	for _, x := range list {
		end := x.hear(events)
		if end == nil {
			keep = append(keep, x)
			continue
		}
		w.ended(x)
		ends = append(ends, end)
	}
	clear(list[len(keep):])
	s.keep(flowID, keep)
	s.mu.Unlock()
	for _, end := range ends {
		end()
	}
}

func (x *waiter) hear(events []*wire.Event) func() {
	for _, ev := range events {
		if !x.from.Before(ev) {
			continue // seen, or of a former life of this ID
		}
		if ev.Type == core.EventDeleted {
			return func() { x.c.fail(refuse(core.NotFound, "flow %q was deleted", UserID(x.flowID))) }
		}
		if end := x.heard(ev); end != nil {
			return end
		}
	}
	return nil
}

// lateWith answers with what the flow is now, and that the time is over.
func (c *call) lateWith(flowID string, make func(*wire.Flow) *wire.Answer) {
	late := c.wire(c.late())
	var a *wire.Answer
	c.s.view(flowID, func(f *wire.Flow) {
		if f != nil {
			a = make(f)
		}
	}, func(err error) {
		if a == nil || err != nil {
			a = &wire.Answer{}
		}
		a.Error = late
		c.answer(a)
	})
}
