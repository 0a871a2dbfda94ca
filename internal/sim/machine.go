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

	skewUs int64 // wall clock minus the clock that goes on evenly
}

func (w *world) addMachines() {
	for i := range 1 {
		m := &machine{w: w, id: i, disk: newDisk(), flushed: make([]uint64, w.p.partitions)}
		m.disk.lies = w.mutant.diskLies
		w.machines = append(w.machines, m)
	}
}

// active gives the node that owns the partitions, or nil.
func (w *world) active() *node { return w.machines[0].node }

// serving gives a node that answers clients, or nil.
func (w *world) serving(_ *source) *node { return w.machines[0].node }

// elsewhere says which machine to ask after at did not answer.
func (w *world) elsewhere(_ *source, at int) int { return at }

// arriveAt runs do with the process that a request finds on a machine; nil when
// there is none that serves.
func (w *world) arriveAt(at int, us int64, do func(*node)) {
	w.after(us, func() { do(w.machines[at].node) })
}

// inLife plans do for this process: it dies with it.
func (n *node) inLife(us int64, do func()) {
	n.w.after(us, func() {
		if !n.dead {
			do()
		}
	})
}

// evenUs is the time of the clock that goes on evenly, in microseconds.
func (m *machine) evenUs() int64 { return m.w.nowUs }

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
	c.n.inLife(d.Microseconds(), t.firing(f))
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
