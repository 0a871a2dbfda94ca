package dispatch

import "time"

// due is an instant at which something is to be looked at. It is embedded in
// what it belongs to: one of a and c is set.
type due struct {
	atUs  int64 // of Dispatcher.now
	place int   // in the heap, from 1; 0 = not in it
	a     *attempt
	c     *call
}

// dueHeap orders them, the earliest first. One whose instant only gets later is
// left where it is: it fires early and is put back, which is cheaper than moving
// it at each heartbeat.
type dueHeap []*due

// set puts d into the heap, or to its new place there.
func (h *dueHeap) set(d *due, atUs int64) {
	d.atUs = atUs
	if d.place == 0 {
		*h = append(*h, d)
		d.place = len(*h)
	}
	if !h.up(d.place - 1) {
		h.down(d.place - 1)
	}
}

// unset takes d out of the heap, if it is there.
func (h *dueHeap) unset(d *due) {
	if d.place == 0 {
		return
	}
	i, last := d.place-1, len(*h)-1
	h.swap(i, last)
	(*h)[last] = nil
	*h = (*h)[:last]
	d.place = 0
	if i < last && !h.up(i) {
		h.down(i)
	}
}

func (h dueHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i+1, j+1
}

func (h dueHeap) up(i int) (moved bool) {
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].atUs <= h[i].atUs {
			break
		}
		h.swap(i, parent)
		i, moved = parent, true
	}
	return moved
}

func (h dueHeap) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if r := child + 1; r < len(h) && h[r].atUs < h[child].atUs {
			child = r
		}
		if h[i].atUs <= h[child].atUs {
			return
		}
		h.swap(i, child)
		i = child
	}
}

// firedBound is how many dues one firing looks at, so that others get the lock.
const firedBound = 256

// arm sets the tenant's timer for the earliest due. One that is set for an
// earlier instant is left: it arms again when it fires. Guarded by t.mu.
func (t *tenant) arm() {
	if len(t.dues) == 0 || t.d.stopped.Load() {
		return
	}
	at := t.dues[0].atUs
	if t.timer != nil {
		if t.timerUs <= at {
			return
		}
		t.timer.Stop()
	}
	wait := max(at-t.d.now(), 0)
	t.timerUs = at
	t.timer = t.d.cfg.Clock.AfterFunc(time.Duration(wait)*time.Microsecond, t.fire)
}

// fire does what is due. It runs on the clock's goroutine.
func (t *tenant) fire() {
	var out after
	t.mu.Lock()
	t.timer = nil
	now := t.d.now()
	for range firedBound {
		if len(t.dues) == 0 || t.dues[0].atUs > now {
			break
		}
		d := t.dues[0]
		t.dues.unset(d)
		if d.a != nil {
			d.a.isDue(now, &out)
		} else {
			d.c.isDue(now, &out)
		}
	}
	t.arm()
	t.mu.Unlock()
	out.run(t)
}
