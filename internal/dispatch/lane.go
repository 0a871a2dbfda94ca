package dispatch

import (
	"sync"
	"sync/atomic"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/wire"
)

// tenant is the workers and the work of one tenant. Credits belong to a worker
// and are good for all its flow types, so one lock guards them all; it is held
// for short.
type tenant struct {
	d    *Dispatcher
	name string

	startable atomic.Int64 // steps that could be started if there were credits; see lane.ready

	mu      sync.Mutex
	lanes   map[string]*lane          // by flow type
	hungry  []*lane                   // with steps that could be started
	turn    int                       // of hungry
	workers []*Worker                 // connected, oldest first
	runs    map[string]*attempt       // by flow ID as users see it; further ones by sibling
	queued  map[string]*entry         // as runs
	marked  int                       // entries whose start is proposed and whose slot is not claimed
	calls   map[uint64]*call          // RPCs that workers have
	known   map[string]*wire.FlowType // what workers declared, also those that left
	sticky  *[stickySlots]stickySlot  // nil before the first worker
	dues    dueHeap
	timer   env.Timer
	timerUs int64

	deficit int  // guarded by the scheduler's lock
	inRing  bool // guarded by the scheduler's lock
}

type stickySlot struct {
	flow uint64 // hash
	w    *Worker
}

// lane is one flow type of one tenant. Guarded by t.mu.
type lane struct {
	t    *tenant
	name string

	links    linkSet // connected
	canTask  linkSet // of workers with a task credit
	canRPC   linkSet // of workers with an RPC credit
	held     linkSet // with reserved slots
	orphaned int     // reserved slots whose worker left
	cursor   int

	queue
	running  int
	arriving int // results that are proposed, not answered, and may go on with a step
	inline   int // steps that went on in their flow since the last queued one
	owed     byName[attempt]
	calls    byName[call]
	stats    map[string]*series
}

// link is a worker as one of a lane's.
type link struct {
	w        *Worker
	l        *lane
	steps    map[string]bool
	rpcs     map[string]bool
	reserved int // slots that a partition holds, or a proposed start
	place    [4]int
}

// linkSet is a set of links, with a place for each in the link.
type linkSet struct {
	all  []*link
	kind int
}

const (
	inLinks = iota
	inCanTask
	inCanRPC
	inHeld
)

func (s *linkSet) add(k *link) {
	if k.place[s.kind] != 0 {
		return
	}
	s.all = append(s.all, k)
	k.place[s.kind] = len(s.all)
}

func (s *linkSet) remove(k *link) {
	i := k.place[s.kind] - 1
	if i < 0 {
		return
	}
	last := len(s.all) - 1
	s.all[i] = s.all[last]
	s.all[i].place[s.kind] = i + 1
	s.all[last] = nil
	s.all = s.all[:last]
	k.place[s.kind] = 0
}

func (s *linkSet) set(k *link, in bool) {
	if in {
		s.add(k)
	} else {
		s.remove(k)
	}
}

func (t *tenant) lane(flowType string) *lane {
	l := t.lanes[flowType]
	if l == nil {
		l = &lane{t: t, name: flowType, stats: map[string]*series{}}
		l.links.kind, l.canTask.kind, l.canRPC.kind, l.held.kind = inLinks, inCanTask, inCanRPC, inHeld
		t.lanes[flowType] = l
	}
	return l
}

// chooseScan bounds how many workers are compared for the most free credits.
const chooseScan = 8

// choose gives the worker for a flow's next task: the one that had its last one,
// else the one with the most credits of a few; nil when none has any.
func (l *lane) choose(id string) *link {
	n := len(l.canTask.all)
	if n <= 1 {
		if n == 0 {
			return nil
		}
		return l.canTask.all[0]
	}
	if k := l.stuck(id); k != nil && k.w.canTask {
		return k
	}
	var best *link
	for i := range min(n, chooseScan) {
		k := l.canTask.all[(l.cursor+i)%n]
		if best == nil || k.w.free > best.w.free {
			best = k
		}
	}
	l.cursor++
	return best
}

// stuck gives the link of the worker that had the flow's last task.
func (l *lane) stuck(id string) *link {
	h := xxhash.Sum64String(id)
	if s := &l.t.sticky[h&(stickySlots-1)]; s.flow == h && s.w != nil {
		return s.w.linkOf[l]
	}
	return nil
}

func (t *tenant) stick(id string, w *Worker) {
	if len(t.workers) > 1 {
		h := xxhash.Sum64String(id)
		t.sticky[h&(stickySlots-1)] = stickySlot{h, w}
	}
}

// reserve takes one credit of k for later.
func (l *lane) reserve(k *link) {
	k.w.addFree(-1)
	k.reserved++
	l.held.add(k)
}

// unreserve gives one reserved slot up, without giving its credit back.
func (l *lane) unreserve(k *link) {
	if k.reserved--; k.reserved == 0 {
		l.held.remove(k)
	}
}

// giveBack returns one reserved slot, whichever.
func (l *lane) giveBack() {
	if l.orphaned > 0 {
		l.orphaned--
		return
	}
	if n := len(l.held.all); n > 0 {
		k := l.held.all[n-1]
		l.unreserve(k)
		k.w.addFree(1)
	}
}

// claim turns a reserved slot into the worker that takes a task of the flow: one
// that declares the step. nil: none that has a slot does.
func (l *lane) claim(id, step string) *Worker {
	if len(l.held.all) > 1 {
		if k := l.stuck(id); k != nil && k.reserved > 0 && k.steps[step] {
			l.unreserve(k)
			return k.w
		}
	}
	for _, k := range l.held.all {
		if k.steps[step] {
			l.unreserve(k)
			return k.w
		}
	}
	// The worker left, or does not know this step: the slot is given back, and
	// the task goes to any other one.
	l.giveBack()
	for _, k := range l.canTask.all {
		if k.steps[step] {
			k.w.addFree(-1)
			return k.w
		}
	}
	return nil
}

// spare counts the credits of the lane's workers, up to bound.
func (l *lane) spare(bound int) int {
	n := 0
	for _, k := range l.canTask.all {
		if n += k.w.free; n >= bound {
			return bound
		}
	}
	return n
}

// declares reports whether a connected worker knows the step.
func (l *lane) declares(step string) bool {
	for _, k := range l.links.all {
		if k.steps[step] {
			return true
		}
	}
	return false
}
