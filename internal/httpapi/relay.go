package httpapi

import (
	"context"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/session"
)

// patience is how long an answer may take on net/http before its connection is
// taken over. net/http holds two goroutines and some 20 KB for each request;
// to take over costs about 0.1 ms of CPU, which a quick answer is not worth.
const patience = 50 * time.Millisecond

// consumer is what a handler makes of a watcher's events.
type consumer interface {
	// take is given events in order and says whether the answer is complete.
	take(events []session.Event) (over bool, err error)
	// fail is given the watcher's error. The answer is over then, unless there
	// is another watcher to go on with.
	fail(err error) (next *session.Watcher, _ error)
	// beat is called when nothing was to be said for a while, and says when to
	// call again; 0 = never.
	beat() (again time.Duration, err error)
}

// relay carries what a watcher gives to an answer. It begins on the request's
// goroutine. An answer that takes longer moves to a line of its own: from then
// on there is a goroutine only while there is something to write.
type relay struct {
	c    *call
	w    *session.Watcher
	to   consumer
	line *line  // nil as long as the connection is net/http's; set once
	runs func() // run, made once: go with a method would make it each time

	mu      sync.Mutex
	signal  chan struct{} // guarded by mu; wakes the request's goroutine; nil on a line
	running bool          // guarded by mu; on a line: a goroutine runs
	woken   bool          // guarded by mu; on a line: there was a call meanwhile
	stopped error         // guarded by mu; why to end early
	armed   bool          // guarded by mu; timer is pending
	timer   env.Timer     // guarded by mu
}

func (c *call) relay(w *session.Watcher, to consumer) *relay {
	return &relay{c: c, w: w, to: to, signal: make(chan struct{}, 1)}
}

// serve answers with what the watcher gives, and closes it. With errTaken the
// answer goes on elsewhere: the call and all it holds belong to it.
func (r *relay) serve() error {
	c, ctx := r.c, r.c.r.Context()
	r.w.Notify(r.wake)
	movable := c.movable()
	signal := r.signal
	for {
		if over, err := r.pump(ctx); over {
			r.close()
			return err
		}
		if movable && c.api.cfg.Clock.Now().Sub(c.start) >= c.api.patience {
			if r.move() {
				return errTaken
			}
			movable = false
		}
		if movable {
			r.arm(max(c.api.patience-c.api.cfg.Clock.Now().Sub(c.start), 0))
		} else if over, err := r.beat(); over {
			r.close()
			return err
		}
		select {
		case <-signal:
		case <-ctx.Done():
			r.stop(context.Cause(ctx))
		}
	}
}

// run is the relay's part on a line.
func (r *relay) run() {
	for {
		if over, err := r.step(); over {
			r.end(err)
			return
		}
		r.mu.Lock()
		if !r.woken {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.woken = false
		r.mu.Unlock()
	}
}

// step does all there is to do now. A panic ends the answer only: as an error
// when nothing is out, else by breaking the connection.
func (r *relay) step() (over bool, err error) {
	defer func() {
		if v := recover(); v != nil {
			r.c.panicked(v)
			r.line.broken = r.c.status != 0
			over, err = true, internalError(r.c.id)
		}
	}()
	if over, err = r.pump(context.Background()); over {
		return true, err
	}
	return r.beat()
}

// pump hands on all there is. ctx bounds reading the log.
func (r *relay) pump(ctx context.Context) (over bool, err error) {
	for {
		r.mu.Lock()
		err := r.stopped
		r.mu.Unlock()
		var events []session.Event
		if err == nil {
			events, err = r.w.Poll(ctx)
		}
		switch {
		case err != nil:
			next, err := r.to.fail(err)
			if next == nil {
				return true, err
			}
			r.w.Close()
			r.w = next
			r.w.Notify(r.wake)
		case len(events) == 0:
			return false, nil
		default:
			if over, err := r.to.take(events); over || err != nil {
				return true, err
			}
		}
	}
}

// beat lets the answer say that it is there still, when that is due.
func (r *relay) beat() (over bool, err error) {
	r.mu.Lock()
	armed := r.armed
	r.mu.Unlock()
	if armed {
		return false, nil
	}
	again, err := r.to.beat()
	if err != nil {
		return true, err
	}
	if again > 0 {
		r.arm(again)
	}
	return false, nil
}

func (r *relay) arm(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.armed {
		return
	}
	r.armed = true
	r.timer = r.c.api.cfg.Clock.AfterFunc(d, func() {
		r.mu.Lock()
		r.armed = false
		r.mu.Unlock()
		r.wake()
	})
}

// wake makes the relay look for what there is. It never blocks.
func (r *relay) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.signal != nil:
		select {
		case r.signal <- struct{}{}:
		default:
		}
	case r.running:
		r.woken = true
	default:
		r.running = true
		go r.runs()
	}
}

// stop ends the answer early; the first reason counts. Safe on any goroutine.
func (r *relay) stop(why error) {
	r.mu.Lock()
	if r.stopped == nil {
		r.stopped = why
	}
	r.mu.Unlock()
	r.wake()
}

// move gives the answer a line of its own and reports whether it could.
func (r *relay) move() bool {
	line := r.c.api.lines.take(r)
	if line == nil {
		return false
	}
	r.line, r.runs = line, r.run
	r.mu.Lock()
	r.signal, r.running = nil, true
	if r.armed && r.timer.Stop() {
		r.armed = false
	}
	r.mu.Unlock()
	go line.listen()
	go r.runs() // there may have been a signal
	return true
}

// close lets go of the watcher.
func (r *relay) close() {
	r.mu.Lock()
	if r.armed {
		r.timer.Stop()
	}
	r.mu.Unlock()
	r.w.Close()
	r.c.api.unwatch(r)
}

// end ends an answer on a line. The goroutine that calls it is the last: it
// leaves running set.
func (r *relay) end(err error) {
	c := r.c
	if err != nil {
		c.refuse(err)
	}
	again := r.line.finish()
	r.close()
	c.api.requests.Release()
	c.api.tell(c)
	r.line.release(again)
}

// watch makes the relay one that Drain ends.
func (a *API) watch(r *relay) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.draining {
		return errDraining
	}
	a.watching[r] = struct{}{}
	return nil
}

func (a *API) unwatch(r *relay) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.watching, r)
}

// movable reports whether the answer can leave net/http: it must be on a
// connection of its own, with chunks.
func (c *call) movable() bool {
	return c.api.lines.open.Load() && c.r.ProtoMajor == 1 && c.r.ProtoMinor == 1
}
