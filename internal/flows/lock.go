package flows

import (
	"slices"
	"sync"
	"sync/atomic"
)

// locks is the locks of flows that a locked RPC holds or waits for: one at a
// time on a flow, the others in the order in which they came. The lock keeps
// handlers from running in vain; what makes an update right is its condition on
// the attributes.
type locks struct {
	shards  [shards]lockShard
	waiting atomic.Int64
	most    int64
}

type lockShard struct {
	mu   sync.Mutex
	held map[string][]*rpcRun // guarded by mu; by flow: those that wait for the holder
}

func (l *locks) init(most int) {
	l.most = int64(most)
	for i := range l.shards {
		l.shards[i].held = map[string][]*rpcRun{}
	}
}

// acquire takes the lock of r's flow, or its place behind others; what it waits
// with is set up by then, under the lock, for it may be granted at any time after.
func (l *locks) acquire(r *rpcRun) (got bool, err error) {
	s := &l.shards[shardOf(r.flowID)]
	s.mu.Lock()
	defer s.mu.Unlock()
	queue, held := s.held[r.flowID]
	switch {
	case !held:
		s.held[r.flowID] = nil
		return true, nil
	case r.req.FailFast:
		return false, refuse(Locked, "a locked RPC runs on flow %q", UserID(r.flowID))
	case len(queue) >= MaxLockWaiters:
		return false, refuse(Overloaded, "%d locked RPCs wait for flow %q already", len(queue), UserID(r.flowID))
	}
	if n := l.waiting.Add(1); n > l.most {
		l.waiting.Add(-1)
		return false, refuse(Overloaded, "%d locked RPCs wait already, at most %d", n-1, l.most)
	}
	r.patience()
	s.held[r.flowID] = append(queue, r)
	return false, nil
}

// again takes the lock for a run that had it before and must try again: at
// once, or as the first of those that wait.
func (l *locks) again(r *rpcRun) (got bool) {
	s := &l.shards[shardOf(r.flowID)]
	s.mu.Lock()
	defer s.mu.Unlock()
	queue, held := s.held[r.flowID]
	if !held {
		s.held[r.flowID] = nil
		return true
	}
	l.waiting.Add(1)
	r.patience()
	s.held[r.flowID] = slices.Insert(queue, 0, r)
	return false
}

// release gives the lock to the next one, if there is one.
func (l *locks) release(flowID string) {
	s := &l.shards[shardOf(flowID)]
	s.mu.Lock()
	queue := s.held[flowID]
	if len(queue) == 0 {
		delete(s.held, flowID)
		s.mu.Unlock()
		return
	}
	next := queue[0]
	queue[0] = nil
	s.held[flowID] = queue[1:]
	l.waiting.Add(-1)
	next.impatient()
	s.mu.Unlock()
	next.granted()
}

// abandon takes r out of the queue; false when it has the lock, or is gone.
func (l *locks) abandon(r *rpcRun) bool {
	s := &l.shards[shardOf(r.flowID)]
	s.mu.Lock()
	defer s.mu.Unlock()
	queue := s.held[r.flowID]
	i := slices.Index(queue, r)
	if i < 0 {
		return false
	}
	s.held[r.flowID] = slices.Delete(queue, i, i+1)
	l.waiting.Add(-1)
	r.impatient()
	return true
}
