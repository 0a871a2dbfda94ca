package flow

import "sync"

// job is one handler call.
type job interface{ run() }

// pool runs jobs on goroutines that it keeps. At most one goroutine is being
// woken at a time: it takes a job and wakes the next one if there are more, so
// that short jobs are run by few goroutines one after the other, and long ones
// still all at once.
type pool struct {
	mu     sync.Mutex
	wake   sync.Cond
	queue  []job // guarded by mu; from head on
	head   int
	idle   int  // guarded by mu; goroutines that wait
	size   int  // guarded by mu; goroutines
	waking bool // guarded by mu; one was woken and has not come yet
	closed bool // guarded by mu
	most   int
	gone   chan struct{} // closed when the last goroutine has ended after stop
}

func newPool(most int) *pool {
	p := &pool{most: most, gone: make(chan struct{})}
	p.wake.L = &p.mu
	return p
}

// put never blocks; the caller bounds how many jobs there are.
func (p *pool) put(jobs ...job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, jobs...)
	p.wakeOne()
}

func (p *pool) wakeOne() {
	if p.waking || p.head == len(p.queue) {
		return
	}
	switch {
	case p.idle > 0:
		p.waking = true
		p.idle--
		p.wake.Signal()
	case p.size < p.most:
		p.waking = true
		p.size++
		go p.loop()
	}
}

func (p *pool) loop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for woken := true; ; woken = false {
		if woken {
			p.waking = false
		}
		for p.head == len(p.queue) {
			if p.closed {
				if p.size--; p.size == 0 {
					close(p.gone)
				}
				return
			}
			p.idle++
			p.wake.Wait()
			p.waking = false
		}
		j := p.queue[p.head]
		p.queue[p.head] = nil
		if p.head++; p.head == len(p.queue) {
			p.queue, p.head = p.queue[:0], 0
		}
		p.wakeOne()
		p.mu.Unlock()
		j.run()
		p.mu.Lock()
	}
}

// stop lets the goroutines end when the jobs that are there have been run; the
// channel is closed then. Call it once.
func (p *pool) stop() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.idle = 0
	if p.size == 0 {
		close(p.gone)
	}
	p.wake.Broadcast()
	return p.gone
}
