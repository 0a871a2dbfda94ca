package dispatch

import "sync"

// scheduler lets the tenants take turns in starting queued steps, by deficit
// round-robin: each turn brings quantum starts, and what is left of it, because
// no more may be proposed now, is kept for the next one. The bound on proposals
// that are not answered keeps the partitions' queues short, so that a turn
// counts.
type scheduler struct {
	mu       sync.Mutex
	ring     []*tenant // guarded by mu; those that want a turn, the next one first
	inFlight int       // guarded by mu; proposals, or room taken for them
	pausing  bool      // guarded by mu; the partitions had no room
}

// wake gives a tenant a turn when it has steps to start. Without a lock held.
func (d *Dispatcher) wake(t *tenant) {
	if t.startable.Load() == 0 || d.proposer.Load() == nil {
		return
	}
	d.sched.mu.Lock()
	d.sched.enter(t)
	d.sched.mu.Unlock()
	d.pump()
}

func (s *scheduler) enter(t *tenant) {
	if !t.inRing {
		t.inRing = true
		s.ring = append(s.ring, t)
	}
}

// take gives the tenant whose turn it is, and how much it may start.
func (s *scheduler) take() (t *tenant, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	room := MaxProposals - s.inFlight
	if len(s.ring) == 0 || room <= 0 || s.pausing || s.ring[0].d.stopped.Load() {
		return nil, 0
	}
	t = s.ring[0]
	s.ring[0] = nil
	s.ring = s.ring[1:]
	t.inRing = false
	if t.deficit <= 0 {
		t.deficit += quantum
	}
	n = min(t.deficit, room)
	s.inFlight += n
	return t, n
}

// took settles a turn: started of n were. One that has more to start gets
// another turn: at once when its quantum is not used up, else behind the rest.
func (s *scheduler) took(t *tenant, n, started int, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inFlight -= n - started
	t.deficit -= started
	switch {
	case !more:
		t.deficit = 0
	case t.inRing:
	case t.deficit > 0:
		t.inRing = true
		s.ring = append([]*tenant{t}, s.ring...)
	default:
		s.enter(t)
	}
}

// pump starts what may be started.
func (d *Dispatcher) pump() {
	var room [quantum]*entry
	for {
		t, n := d.sched.take()
		if t == nil {
			return
		}
		started, more := t.start(n, room[:0])
		d.sched.took(t, n, len(started), more)
		for _, e := range started {
			d.proposeStart(e)
		}
	}
}

// answered makes room for another proposal; with pause the partitions had no
// room, and all starts rest a moment.
func (s *scheduler) answered(d *Dispatcher, t *tenant, pause bool) {
	s.mu.Lock()
	s.inFlight--
	if pause && !s.pausing {
		s.pausing = true
		d.cfg.Clock.AfterFunc(overloadRetry, func() {
			s.mu.Lock()
			s.pausing = false
			s.mu.Unlock()
			d.pump()
		})
	}
	if t.startable.Load() > 0 {
		s.enter(t)
	}
	waiting := len(s.ring) > 0
	s.mu.Unlock()
	if waiting {
		d.pump()
	}
}
