package sim

import (
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// machine is what a process lives on: a disk and clocks. One process runs on it at
// a time, life after life.
type machine struct {
	w       *world
	id      int
	disk    *disk
	node    *node // the life that runs; nil while there is none
	lives   int
	flushed []uint64 // by partition: newest entry known to be in table files

	skewUs   int64 // wall clock minus the clock that goes on evenly
	ratePpm  int64 // of its clocks, against the simulated time
	originUs int64 // of its boot clock

	stoppedUs int64 // its process does nothing before
	cutUs     int64 // it does not reach the object store before
}

// maxRatePpm bounds how wrong a clock runs: two of them are within 1 %.
const maxRatePpm = 5_000

func (w *world) addMachines() {
	for i := range w.p.machines {
		m := &machine{w: w, id: i, disk: newDisk(), flushed: make([]uint64, w.p.partitions)}
		m.disk.lies = w.mutant.diskLies
		if w.bucket != nil {
			m.ratePpm, m.originUs = w.rng.between(-maxRatePpm, maxRatePpm), w.rng.between(0, 1e12)
		}
		w.machines = append(w.machines, m)
	}
}

// boot starts a life.
func (m *machine) boot() {
	m.lives++
	m.crashStart()
	if m.w.bucket != nil {
		m.join()
		return
	}
	m.start()
}

func (m *machine) stopped() bool { return m.stoppedUs > m.w.nowUs }

// active gives the node that owns the partitions, by all that the store has been
// told, or nil.
func (w *world) active() *node {
	for _, m := range w.machines {
		if n := m.node; n != nil && n.serving && !m.stopped() && (w.bucket == nil || w.bucket.owned(n)) {
			return n
		}
	}
	return nil
}

// serving gives a node that takes itself for the owner, or nil: mostly the one that
// is, with rng now and then another.
func (w *world) serving(rng *source) *node {
	if n := w.active(); n != nil && (w.bucket == nil || rng == nil || !rng.percent(20)) {
		return n
	}
	for _, m := range w.machines {
		if n := m.node; n != nil && n.serving && !m.stopped() {
			return n
		}
	}
	return nil
}

// elsewhere says which machine to ask after the one at did not answer.
func (w *world) elsewhere(rng *source, at int) int {
	if len(w.machines) == 1 {
		return at
	}
	return rng.intn(len(w.machines))
}

// astray says which machine to begin with: now and then one that was the owner's and
// does not know yet that it is not.
func (w *world) astray(rng *source, at int) int {
	if len(w.machines) == 1 || !rng.percent(15) {
		return at
	}
	for _, m := range w.machines {
		if n := m.node; n != nil && n.serving && n != w.active() {
			return m.id
		}
	}
	return rng.intn(len(w.machines))
}

// arriveAt runs do with the process that a request finds on a machine; nil when
// there is none that serves. A process that was stopped finds it when it goes on.
func (w *world) arriveAt(at int, us int64, do func(*node)) {
	w.after(us, func() {
		m := w.machines[at]
		switch {
		case m.stopped():
			w.arriveAt(at, m.stoppedUs-w.nowUs, do)
		case m.node != nil && m.node.serving:
			do(m.node)
		default:
			do(nil)
		}
	})
}

// inLife plans do for this process: it dies with it, and waits while the process is
// stopped.
func (n *node) inLife(us int64, do func()) {
	n.w.after(us, func() {
		switch {
		case n.dead:
		case n.m.stopped():
			n.inLife(n.m.stoppedUs-n.w.nowUs, do)
		default:
			do()
		}
	})
}

// evenUs is the time of the clock that goes on evenly, in microseconds.
func (m *machine) evenUs() int64 {
	return m.w.nowUs + m.w.nowUs/1_000_000*m.ratePpm + m.w.nowUs%1_000_000*m.ratePpm/1_000_000
}

// realUs is how long us by this machine's clock take, not too short.
func (m *machine) realUs(us int64) int64 {
	if m.ratePpm == 0 {
		return us
	}
	return us - us/1_000_000*m.ratePpm - us%1_000_000*m.ratePpm/1_000_000 + us/20_000 + 1
}

// uptime is the clock that runs through suspension.
func (m *machine) uptime() time.Duration {
	return time.Duration(m.originUs+m.evenUs()) * time.Microsecond
}

// at plans do for the instant when the uptime is up.
func (n *node) at(up time.Duration, do func()) {
	n.inLife(n.m.realUs(max(int64((up-n.m.uptime())/time.Microsecond), 0)), do)
}

// clock is the wall clock of a machine.
type clock struct{ m *machine }

// Now implements env.Clock.
func (c clock) Now() time.Time { return time.UnixMicro(wallEpoch + c.m.evenUs() + c.m.skewUs) }

// AfterFunc implements env.Clock.
func (c clock) AfterFunc(d time.Duration, f func()) env.Timer {
	t := &timer{}
	c.m.w.after(d.Microseconds(), t.firing(f))
	return t
}

// lifeClock is a clock for timeouts: it goes on evenly, and its timers die with
// the process.
type lifeClock struct{ n *node }

// Now implements env.Clock.
func (c lifeClock) Now() time.Time { return time.UnixMicro(wallEpoch + c.n.m.evenUs()) }

// AfterFunc implements env.Clock.
func (c lifeClock) AfterFunc(d time.Duration, f func()) env.Timer {
	t := &timer{}
	c.n.inLife(c.n.m.realUs(d.Microseconds()), t.firing(f))
	return t
}

type timer struct{ over bool }

func (t *timer) firing(f func()) func() {
	return func() {
		if !t.over {
			t.over = true
			f()
		}
	}
}

// Stop implements env.Timer.
func (t *timer) Stop() bool {
	was := t.over
	t.over = true
	return !was
}
