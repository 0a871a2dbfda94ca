package load

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// window is the measured part of a closed-loop point. Its begin is set by the
// last worker to be warm.
type window struct {
	workers int64
	length  int64
	warm    atomic.Int64
	t0      atomic.Int64  // 0 = has not begun
	open    chan struct{} // closed when t0 is set
	running atomic.Int64  // turns that started in the window and have not ended
}

// warmed counts a worker's first attempt.
func (w *window) warmed(now int64) {
	if w.warm.Add(1) == w.workers {
		w.t0.Store(now)
		close(w.open)
	}
}

// over reports whether a worker may stop: the window has passed and no turn
// that counts is still running, so that the load held up to its last one.
func (w *window) over(now int64) bool {
	t0 := w.t0.Load()
	return t0 != 0 && now >= t0+w.length && w.running.Load() == 0
}

func (w *window) counts(now int64) bool {
	t0 := w.t0.Load()
	return t0 != 0 && now < t0+w.length
}

// errorPause keeps a worker whose turns fail at once from spinning.
const errorPause = 50 * time.Millisecond

// minSpacing is the least time between two workers' starts.
const minSpacing = 200 * time.Microsecond

// closed measures n workers that ask for one turn after the other.
func (r *run) closed(ctx context.Context, n int) (Point, error) {
	r.col = newCollector(r.cfg.Err, fmt.Sprintf("c=%d", n))
	if r.mock != nil {
		r.mock.reset(ctx)
	}
	win := &window{workers: int64(n), length: int64(r.cfg.Duration), open: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A quick turn would make the ramp a burst of connections.
	ramp := max(r.cfg.Ramp, time.Duration(n)*minSpacing)
	workers := make([]*worker, n)
	var wg sync.WaitGroup
	for i := range workers {
		w := r.newWorker()
		workers[i] = w
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer context.AfterFunc(ctx, w.c.abort)()
			if sleep(ctx, r.cfg.Env.Clock, ramp*time.Duration(i)/time.Duration(n)) {
				w.loop(ctx, win)
			}
		}()
	}
	var f figures
	select {
	case <-win.open:
		f = r.watch(ctx, win.t0.Load()+win.length)
	case <-ctx.Done():
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return Point{}, err
	}
	t0 := win.t0.Load()
	p := r.point(ctx, n, "closed", t0, t0+win.length, f)
	r.shutAll(ctx, workers)
	p.Errors, p.ErrorKinds = r.col.total(""), r.col.kinds() // deleting counts too
	return p, nil
}

func (w *worker) loop(ctx context.Context, win *window) {
	r := w.run
	for first := true; ctx.Err() == nil; first = false {
		now := r.now()
		if win.over(now) {
			return
		}
		counts := win.counts(now)
		if counts {
			win.running.Add(1)
		}
		a := w.try(ctx)
		if ctx.Err() == nil {
			r.col.add(a)
		}
		if counts {
			win.running.Add(-1)
		}
		if first {
			win.warmed(r.now())
		}
		switch {
		case a.rejected:
			w.wait(ctx, win, a.retry)
		case a.class != "":
			sleep(ctx, r.cfg.Env.Clock, errorPause)
		}
	}
}

// wait sits out a Retry-After, but no longer than the window lasts.
func (w *worker) wait(ctx context.Context, win *window, d time.Duration) {
	const step = 250 * time.Millisecond
	for until := w.run.now() + int64(d); ; {
		now := w.run.now()
		if now >= until || win.over(now) || !sleep(ctx, w.run.cfg.Env.Clock, min(time.Duration(until-now), step)) {
			return
		}
	}
}

// shutAll deletes the sessions, a few at a time, and closes the connections.
func (r *run) shutAll(ctx context.Context, workers []*worker) {
	const parallel = 8
	var wg sync.WaitGroup
	for k := range parallel {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := k; i < len(workers); i += parallel {
				workers[i].shut(ctx)
				workers[i].c.close()
			}
		}()
	}
	wg.Wait()
}
