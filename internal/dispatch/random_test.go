package dispatch

import (
	"fmt"
	"math/rand"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// TestWhateverHappensEveryFlowEnds lets workers come, go, answer, fail, time
// out, drain and be slow at random, and then wants every flow ended, no slot or
// record left, and at each moment: no worker with more tasks than it asked for,
// and no more running steps of a key than its limit.
func TestWhateverHappensEveryFlowEnds(t *testing.T) {
	seeds := 60
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		c := &chaos{world: newWorld(t), r: rand.New(rand.NewSource(int64(seed)))}
		c.run()
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

type chaos struct {
	*world
	r       *rand.Rand
	workers []*mess
	flows   int
}

// mess is a worker that does anything.
type mess struct {
	*fake
	granted int
	given   int
	has     []*wire.Task
}

const chaosLimit = 3

func (c *chaos) run() {
	ops := []func(){c.begin, c.begin, c.join, c.leaveOne, c.grant, c.grant, c.answerOne, c.answerOne, c.answerOne, c.answerOne,
		c.failOne, c.tick, c.holdOrNot, c.drainOne, c.cancelOne, c.terminateOne, c.squeeze, c.stallOrNot}
	for range 400 {
		ops[c.r.Intn(len(ops))]()
		c.check()
	}
	c.finish()
}

func (c *chaos) spec() *wire.StepSpec {
	s := &wire.StepSpec{Name: []string{"s", "u", "v"}[c.r.Intn(3)], Retry: &wire.RetryPolicy{MaxAttempts: 3, InitialUs: 1000}, TimeoutUs: 20_000_000}
	switch c.r.Intn(6) {
	case 0, 1:
		s.ConcurrencyKey, s.ConcurrencyLimit = fmt.Sprint("k", c.r.Intn(2)), chaosLimit
	case 2:
		s.Async = true
	case 3:
		s.WaitFor = true
	}
	return s
}

func (c *chaos) begin() {
	var steps []*wire.StepSpec
	for range 1 + c.r.Intn(3) {
		steps = append(steps, c.spec())
	}
	c.startWith(fmt.Sprint("f", c.flows), &wire.StartFlow{Type: "t", Closes: true, Steps: steps, Priority: uint32(c.r.Intn(10))})
	c.flows++
}

func (c *chaos) join() {
	if len(c.workers) < 6 {
		n := c.r.Intn(4)
		c.workers = append(c.workers, &mess{fake: c.connect(fmt.Sprint("w", c.r.Int31()), uint32(n)), granted: n})
	}
}

func (c *chaos) any() *mess {
	if len(c.workers) == 0 {
		c.join()
	}
	return c.workers[c.r.Intn(len(c.workers))]
}

func (c *chaos) leaveOne() {
	if c.r.Intn(3) == 0 {
		c.quit(c.r.Intn(max(len(c.workers), 1)))
	}
}

func (c *chaos) quit(i int) {
	if i < len(c.workers) {
		m := c.workers[i]
		c.workers = append(c.workers[:i], c.workers[i+1:]...)
		m.leave("chaos")
	}
}

func (c *chaos) grant() {
	m := c.any()
	n := 1 + c.r.Intn(3)
	m.granted += n
	m.frame(&wire.WorkerFrame{TaskCredits: uint32(n)})
}

func (m *mess) collect() {
	m.given += len(m.tasks)
	m.has = append(m.has, m.tasks...)
	m.tasks = nil
}

func (c *chaos) pick() (*mess, *wire.Task) {
	m := c.any()
	m.collect()
	if len(m.has) == 0 {
		return m, nil
	}
	i := c.r.Intn(len(m.has))
	t := m.has[i]
	m.has = append(m.has[:i], m.has[i+1:]...)
	return m, t
}

func (c *chaos) answerOne() {
	m, t := c.pick()
	if t == nil {
		return
	}
	r := &wire.StepResult{}
	switch {
	case t.Phase == wire.Task_WAIT_FOR:
		if c.r.Intn(2) == 0 {
			r.Wait = &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_TimerUs{TimerUs: int64(c.r.Intn(2_000_000))}}}}
		}
	case c.r.Intn(3) > 0:
		r.Next = []*wire.StepSpec{c.spec()}
	case c.r.Intn(8) == 0:
		r.Next = []*wire.StepSpec{{Name: ""}} // refused
	default:
		r.Close = &wire.Close{How: wire.Close_GRACEFUL}
	}
	m.reply(c, t, r)
}

func (m *mess) reply(c *chaos, t *wire.Task, r *wire.StepResult) {
	f := &wire.WorkerFrame{Results: []*wire.TaskResult{resultOf(t, r)}}
	if c.r.Intn(4) > 0 {
		f.TaskCredits = 1
		m.granted++
	}
	if c.r.Intn(10) == 0 {
		f.Results = append(f.Results, f.Results[0])
	}
	m.frame(f)
}

func (c *chaos) failOne() {
	if m, t := c.pick(); t != nil {
		m.reply(c, t, &wire.StepResult{Retry: &wire.Retry{Error: "x"}, Close: &wire.Close{How: wire.Close_FAIL, Error: "x"}})
	}
}

func (c *chaos) tick() {
	d := time.Duration(c.r.Int63n(int64(3 * time.Second)))
	if c.r.Intn(10) == 0 {
		d *= 10
	}
	c.pass(d)
	for i := 0; i < len(c.workers); i++ {
		if c.workers[i].closed {
			c.quit(i)
			i--
		}
	}
}

func (c *chaos) holdOrNot() {
	c.hold = !c.hold && c.r.Intn(2) == 0
	c.settle()
}

func (c *chaos) drainOne() {
	if c.r.Intn(4) == 0 {
		c.any().frame(&wire.WorkerFrame{Drain: true})
	}
}

func (c *chaos) stop(how wire.StopFlow_How) {
	if c.flows == 0 || c.r.Intn(3) > 0 {
		return
	}
	_ = c.SubmitWait(canceled(), "", proposal(&wire.Entry{FlowId: fullID(fmt.Sprint("f", c.r.Intn(c.flows))),
		Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: how, GraceUs: 1_000_000}}}))
	c.settle()
}

func (c *chaos) cancelOne()    { c.stop(wire.StopFlow_CANCEL) }
func (c *chaos) terminateOne() { c.stop(wire.StopFlow_TERMINATE) }

// stallOrNot lets a worker's frames wait, or go.
func (c *chaos) stallOrNot() {
	m := c.any()
	if m.full == nil {
		m.full = mux.ErrFull
		return
	}
	m.full = nil
	m.worker.Sent()
	c.settle()
}

// squeeze leaves the partition no room now and then.
func (c *chaos) squeeze() { c.room = []int{0, 0, 1, 5}[c.r.Intn(4)] }

// check wants what holds at each moment.
func (c *chaos) check() {
	c.t.Helper()
	held := map[string]int{}
	for _, m := range c.workers {
		m.collect()
		if m.given > m.granted {
			c.t.Fatalf("a worker has %d tasks of %d granted", m.given, m.granted)
		}
		if free := m.worker.free; free < 0 {
			c.t.Fatalf("%d credits", free)
		}
	}
	ten := c.d.tenantOf("a")
	if ten == nil {
		return
	}
	for _, a := range ten.runs {
		for ; a != nil; a = a.sibling {
			if a.key != nil {
				held[a.key.name]++
			}
			if a.phase == running && a.w.gone {
				c.t.Fatal("runs on a worker that is gone")
			}
		}
	}
	for k, n := range held {
		if n > chaosLimit {
			c.t.Fatalf("%d steps of key %s run", n, k)
		}
	}
}

// finish lets everything end, and wants nothing left.
func (c *chaos) finish() {
	c.t.Helper()
	c.hold, c.room = false, 0
	c.settle()
	for len(c.workers) > 0 {
		c.quit(0)
	}
	m := &mess{fake: c.connect("last", 1000), granted: 1000}
	for range 200 {
		m.frame(&wire.WorkerFrame{TaskCredits: 10})
		m.granted += 10
		m.collect()
		for len(m.has) > 0 {
			t := m.has[0]
			m.has = m.has[1:]
			r := &wire.StepResult{}
			if t.Phase == wire.Task_EXECUTE {
				r.Close = &wire.Close{How: wire.Close_FORCE}
			}
			m.frame(&wire.WorkerFrame{Results: []*wire.TaskResult{resultOf(t, r)}})
			m.collect()
		}
		c.pass(10 * time.Second)
	}
	for i := range c.flows {
		f := c.flow(fmt.Sprint("f", i))
		if f.Status == wire.Status_RUNNING && len(f.Steps) > 0 {
			c.t.Errorf("flow f%d has live steps: %v", i, f.Steps)
		}
	}
	c.idle()
	if free := m.worker.free + m.given; free != m.granted {
		c.t.Errorf("%d credits are left and %d used of %d", m.worker.free, m.given, m.granted)
	}
}
