package partition

import (
	"container/heap"

	"github.com/perdure-dev/perdure/internal/wire"
)

// timerHeap orders the timers that are set. One that is no longer meant fires
// into a refusal of the core, so none is ever removed early; their number is
// bounded by that of steps in backoff and flows with a retention.
type timerHeap struct{ h timers }

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
	heap.Push(&t.h, timer{atUs, flowID, exec})
}

// NextTimer says when Tick has something to do, in microseconds since 1970.
func (m *Machine) NextTimer() (atUs int64, ok bool) {
	if len(m.timers.h) == 0 {
		return 0, false
	}
	return m.timers.h[0].atUs, true
}

// tickBound is how many timers one Tick fires, so that proposals get a turn.
const tickBound = 256

// Tick proposes the timers that are due.
func (m *Machine) Tick() {
	now := m.now()
	for range tickBound {
		if len(m.timers.h) == 0 || m.timers.h[0].atUs > now || m.err != nil {
			return
		}
		t := heap.Pop(&m.timers.h).(timer)
		m.Propose(Proposal{Entry: &wire.Entry{FlowId: t.flowID,
			Command: &wire.Entry_FireTimer{FireTimer: &wire.FireTimer{Exec: t.exec}}}})
	}
}
