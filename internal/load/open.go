package load

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"
)

// pool hands arrivals to workers: to an idle one, else to a new one, else,
// at its cap, to the first that gets free. Latency counts from the intended
// start, so waiting here is never hidden.
type pool struct {
	r    *run
	ctx  context.Context
	most int // cap of workers
	wg   sync.WaitGroup

	mu      sync.Mutex
	all     []*openWorker // guarded by mu
	idle    []*openWorker // guarded by mu; last in, first out keeps connections warm
	backlog []int64       // intended starts, oldest first; guarded by mu, bounded by the number of arrivals
	closed  bool          // guarded by mu
}

type openWorker struct {
	*worker
	jobs chan int64 // of one: a worker is handed a job only when idle
	stop func() bool
}

// add makes a worker; the caller holds mu.
func (p *pool) add() *openWorker {
	w := &openWorker{worker: p.r.newWorker(), jobs: make(chan int64, 1)}
	w.stop = context.AfterFunc(p.ctx, w.c.abort)
	p.all = append(p.all, w)
	p.wg.Add(1)
	go p.serve(w)
	return w
}

// arrive takes one turn that should start at the instant intended.
func (p *pool) arrive(intended int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case len(p.idle) > 0:
		w := p.idle[len(p.idle)-1]
		p.idle = p.idle[:len(p.idle)-1]
		w.jobs <- intended
	case len(p.all) < p.most:
		p.add().jobs <- intended
	default:
		p.backlog = append(p.backlog, intended)
	}
}

func (p *pool) serve(w *openWorker) {
	defer p.wg.Done()
	for intended := range w.jobs {
		for ok := true; ok; intended, ok = p.nextJob(w) {
			a := w.try(p.ctx)
			a.start = intended
			if p.ctx.Err() == nil {
				p.r.col.add(a)
			}
		}
	}
}

// nextJob takes the oldest waiting arrival, or retires w to the idle ones.
func (p *pool) nextJob(w *openWorker) (int64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.backlog) > 0 {
		j := p.backlog[0]
		p.backlog = p.backlog[1:]
		return j, true
	}
	if p.closed {
		close(w.jobs)
	} else {
		p.idle = append(p.idle, w)
	}
	return 0, false
}

// prepare makes n idle workers and opens their sessions, so that the opening
// is not in the way of the first turns.
func (p *pool) prepare(n int) {
	const parallel = 8
	p.mu.Lock()
	for range min(n, p.most) {
		p.idle = append(p.idle, p.add())
	}
	fresh := append([]*openWorker(nil), p.idle...)
	p.mu.Unlock()
	var wg sync.WaitGroup
	for k := range parallel {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := k; i < len(fresh) && p.ctx.Err() == nil; i += parallel {
				if a, ok := fresh[i].ensureSession(p.ctx); !ok {
					p.r.col.add(a)
				}
			}
		}()
	}
	wg.Wait()
}

// close waits for every accepted turn and returns all workers.
func (p *pool) close() []*worker {
	p.mu.Lock()
	p.closed = true
	for _, w := range p.idle {
		close(w.jobs)
	}
	p.idle = nil
	p.mu.Unlock()
	p.wg.Wait()
	out := make([]*worker, len(p.all))
	for i, w := range p.all {
		out[i] = w.worker
		w.stop()
	}
	return out
}

// openLoop measures arrivals at the configured rate with at most n workers.
func (r *run) openLoop(ctx context.Context, n int) (Point, error) {
	return r.offer(ctx, n, r.cfg.Rate, nil)
}

// offer runs an open loop of rate turns a second: one turn time of warm-up,
// then the window. after, when set, is called the moment the last turn has
// been offered, while those under way still run.
func (r *run) offer(ctx context.Context, n int, rate float64, after func(end int64)) (Point, error) {
	r.col = newCollector(r.cfg.Err, fmt.Sprintf("rate=%g", rate))
	if r.mock != nil {
		r.mock.reset(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &pool{r: r, ctx: ctx, most: n}
	const spare = 8
	p.prepare(int(math.Ceil(rate*r.cfg.Ramp.Seconds())) + spare)
	begin := r.now()
	t0 := begin + int64(r.cfg.Ramp)
	t1 := t0 + int64(r.cfg.Duration)
	watched := make(chan figures, 1)
	go func() {
		var f figures
		if sleep(ctx, r.cfg.Env.Clock, r.cfg.Ramp) {
			f = r.watch(ctx, t1)
		}
		watched <- f
	}()
	offered := p.offerUntil(begin, t0, t1, rate)
	if after != nil && ctx.Err() == nil {
		after(t1)
	}
	workers := p.close()
	f := <-watched
	if err := ctx.Err(); err != nil {
		return Point{}, err
	}
	pt := r.point(ctx, n, "open", t0, t1, f)
	pt.OfferedPerS = roundTo(float64(offered)/r.cfg.Duration.Seconds(), 1000)
	pt.Workers = len(workers)
	own := quantiles(spans(within(r.col.refused, t0, t1), serviceTime))
	if own.Max != nil {
		pt.RejectedOwnMS = &own
	}
	r.shutAll(ctx, workers)
	pt.Errors, pt.ErrorKinds = r.col.total(""), r.col.kinds()
	return pt, nil
}

// offerUntil offers evenly spaced turns from begin to t1 and counts those of
// [t0, t1).
func (p *pool) offerUntil(begin, t0, t1 int64, rate float64) (offered int) {
	gap := float64(time.Second) / rate
	for i := 0; ; {
		for due := p.r.now(); ; i++ {
			at := begin + int64(float64(i)*gap)
			if at >= t1 {
				return offered
			}
			if at > due {
				if !sleep(p.ctx, p.r.cfg.Env.Clock, time.Duration(at-p.r.now())) {
					return offered
				}
				break
			}
			p.arrive(at)
			if at >= t0 {
				offered++
			}
		}
	}
}
