package partition

import (
	"container/heap"

	"github.com/perdure-dev/perdure/internal/wire"
)

// timerHeap orders the timers that are set. One that is taken back stays until
// half of all are of that kind, so their number is bounded by twice that of the
// timers that are meant: steps in backoff, delayed or with a timer to wait for,
// and flows with a timeout or a retention. One that is due fires in any case; the
// core refuses what it does not mean.
type timerHeap struct {
	h     timers
	dead  map[timer]int // taken back, and in h still; a timer may be set twice
	nDead int
}

// minDead is how many timers are taken back before it is worth to look for them.
const minDead = 1024

type timer struct {
	atUs   int64
	flowID string
	exec   uint64
}

type timers []timer

func (t timers) Len() int { return len(t) }
func (t timers) Less(i, j int) bool {
	a, b := t[i], t[j]
	if a.atUs != b.atUs {
		return a.atUs < b.atUs
	}
	if a.flowID != b.flowID {
		return a.flowID < b.flowID
	}
	return a.exec < b.exec
}
func (t timers) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)   { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	old := *t
	x := old[len(old)-1]
	*t = old[:len(old)-1]
	return x
}

func (t *timerHeap) add(atUs int64, flowID string, exec uint64) {
	tm := timer{atUs, flowID, exec}
	if t.dead[tm] > 0 {
		t.bury(tm) // the one that is there is meant again
		return
	}
	heap.Push(&t.h, tm)
}

// clear takes a timer back that is not due at now.
func (t *timerHeap) clear(atUs int64, flowID string, exec uint64, now int64) {
	if atUs <= now {
		return // it fires, or has fired
	}
	if t.dead == nil {
		t.dead = map[timer]int{}
	}
	t.dead[timer{atUs, flowID, exec}]++
	if t.nDead++; t.nDead >= minDead && t.nDead > len(t.h)/2 {
		t.sweep()
	}
}

// bury forgets one that was taken back.
func (t *timerHeap) bury(tm timer) {
	if t.nDead--; t.dead[tm] > 1 {
		t.dead[tm]--
		return
	}
	delete(t.dead, tm)
}

// sweep removes those that were taken back.
func (t *timerHeap) sweep() {
	keep := make(timers, 0, len(t.h)-t.nDead)
	for _, tm := range t.h {
		if t.dead[tm] > 0 {
			t.bury(tm)
			continue
		}
		keep = append(keep, tm)
	}
	t.h, t.dead, t.nDead = keep, nil, 0 // a Go map keeps its buckets
	heap.Init(&t.h)
}

// first gives the next timer that is meant.
func (t *timerHeap) first() (timer, bool) {
	for len(t.h) > 0 {
		if t.dead[t.h[0]] == 0 {
			return t.h[0], true
		}
		t.bury(heap.Pop(&t.h).(timer))
	}
	return timer{}, false
}

// pop removes the first.
func (t *timerHeap) pop() timer { return heap.Pop(&t.h).(timer) }

// NextTimer says when Tick has something to do, in microseconds since 1970.
func (m *Machine) NextTimer() (atUs int64, ok bool) {
	t, ok := m.timers.first()
	return t.atUs, ok
}

// tickBound is how many timers one Tick fires, so that proposals get a turn.
const tickBound = 256

// Tick proposes the timers that are due.
func (m *Machine) Tick() {
	now := m.now()
	for range tickBound {
		if t, ok := m.timers.first(); !ok || t.atUs > now || m.err != nil {
			return
		}
		t := m.timers.pop()
		m.Propose(Proposal{Entry: &wire.Entry{FlowId: t.flowID,
			Command: &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: t.exec}}}})
	}
}
