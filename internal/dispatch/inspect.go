package dispatch

import (
	"cmp"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// maxListedKeys bounds the concurrency keys of one queue that are listed.
const maxListedKeys = 1000

// series is the counts of one step.
type series struct {
	dispatched uint64
	ended      [outcomes]uint64
}

func (s *series) count(o outcome) { s.ended[o]++ }

// otherSteps is the series of the steps beyond MaxSeries.
const otherSteps = "(other)"

func (l *lane) seriesOf(step string) *series {
	s := l.stats[step]
	if s == nil {
		if len(l.stats) >= MaxSeries {
			step = otherSteps
			if s = l.stats[step]; s != nil {
				return s
			}
		}
		s = &series{}
		l.stats[step] = s
	}
	return s
}

// StepStats counts the attempts of one step since the start of the server.
type StepStats struct {
	Tenant, FlowType, Step                                           string
	Dispatched                                                       uint64
	Completed, Retried, Failed, TimedOut, Lost, TooLate, NotAccepted uint64
}

// Stats is counts since the start of the server.
type Stats struct {
	Steps []StepStats // by tenant, type and step
	// Late counts answers that matched nothing their worker had: they came after
	// a timeout, twice, or from another one's attempt.
	Late uint64
}

// Stats gives the counters.
func (d *Dispatcher) Stats() Stats {
	out := Stats{Late: d.late.Load()}
	for _, t := range d.tenants.Load().all {
		t.mu.Lock()
		for _, l := range t.lanes {
			for step, s := range l.stats {
				out.Steps = append(out.Steps, StepStats{Tenant: t.name, FlowType: l.name, Step: step, Dispatched: s.dispatched,
					Completed: s.ended[completed], Retried: s.ended[retried], Failed: s.ended[failed], TimedOut: s.ended[timedOut],
					Lost: s.ended[workerLost], TooLate: s.ended[tooLate], NotAccepted: s.ended[notTaken]})
			}
		}
		t.mu.Unlock()
	}
	slices.SortFunc(out.Steps, func(a, b StepStats) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.FlowType, b.FlowType), cmp.Compare(a.Step, b.Step))
	})
	return out
}

// RunningOn names the worker that has a step; empty when none has.
func (d *Dispatcher) RunningOn(flowID string, exec uint64) string {
	name, id, _ := split(flowID)
	t := d.tenantOf(name)
	if t == nil {
		return ""
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.find(id, exec); a != nil && a.phase == running {
		return a.w.id
	}
	return ""
}

// Workers gives the tenant's connected workers, oldest first. Streams of one
// worker ID are one worker, with the address of the oldest.
func (d *Dispatcher) Workers(tenant string) []*wire.WorkerInfo {
	t := d.tenantOf(tenant)
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*wire.WorkerInfo, 0, len(t.workers))
	byID := make(map[string]*wire.WorkerInfo, len(t.workers))
	for _, w := range t.workers {
		info := byID[w.id]
		if info == nil {
			info = &wire.WorkerInfo{WorkerId: w.id, Build: w.build, Sdk: w.sdk, Address: w.address, ConnectedUs: w.sinceUs, Draining: true}
			byID[w.id] = info
			out = append(out, info)
		}
		info.Streams++
		info.Running += uint64(w.tasks.n)
		info.TaskCredits += uint64(max(w.free, 0))
		info.Draining = info.Draining && w.draining
		info.FlowTypes = withAll(info.FlowTypes, w.types)
	}
	return out
}

// withAll gives a with those of b that it has not; a is not changed.
func withAll(a, b []string) []string {
	if a == nil {
		return b
	}
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a[:len(a):len(a)], s)
		}
	}
	return a
}

// workerCount counts workers, each with all its streams.
func (l *lane) workerCount() uint64 {
	ids := make(map[string]bool, len(l.links.all))
	for _, k := range l.links.all {
		ids[k.w.id] = true
	}
	return uint64(len(ids))
}

// Queues gives what waits for workers of each of the tenant's flow types, by
// name.
func (d *Dispatcher) Queues(tenant string) []*wire.Queue {
	t := d.tenantOf(tenant)
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*wire.Queue, 0, len(t.lanes))
	for _, l := range t.lanes {
		out = append(out, l.describe())
	}
	slices.SortFunc(out, func(a, b *wire.Queue) int { return cmp.Compare(a.FlowType, b.FlowType) })
	return out
}

func (l *lane) describe() *wire.Queue {
	q := &wire.Queue{FlowType: l.name, Queued: uint64(l.arrivals.n + l.owed.n), Running: uint64(l.running), Workers: l.workerCount()}
	for _, k := range l.links.all {
		q.TaskCredits += uint64(max(k.w.free, 0))
		q.RpcCredits += uint64(max(k.w.rpcFree, 0))
	}
	if e := l.arrivals.first(); e != nil {
		q.OldestUs = e.atUs
	}
	for _, o := range l.owed.lists {
		if at := o.list.first().task.StartedUs; q.OldestUs == 0 || at < q.OldestUs {
			q.OldestUs = at
		}
	}
	for p := priorities - 1; p >= 0; p-- {
		if n := l.counts[p]; n > 0 {
			q.Priorities = append(q.Priorities, &wire.PriorityCount{Priority: uint32(p), Queued: uint64(n)})
		}
	}
	for _, k := range l.keys {
		q.Keys = append(q.Keys, &wire.KeyCount{Key: k.name, Queued: uint64(k.n), Running: uint64(k.held), Limit: uint64(k.limit)})
	}
	// Those that most wait for come first.
	slices.SortFunc(q.Keys, func(a, b *wire.KeyCount) int {
		return cmp.Or(cmp.Compare(b.Queued, a.Queued), cmp.Compare(a.Key, b.Key))
	})
	if len(q.Keys) > maxListedKeys {
		q.Keys = q.Keys[:maxListedKeys:maxListedKeys]
	}
	return q
}
