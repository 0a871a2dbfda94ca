package state

import "sync"

// gate counts the calls that run, so that Close waits for them and those that
// come later get an error instead of a panic from below.
type gate struct {
	mu     sync.Mutex
	idle   *sync.Cond
	n      int
	closed bool
	paused bool
}

func (g *gate) init() { g.idle = sync.NewCond(&g.mu) }

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.paused {
		g.idle.Wait()
	}
	if g.closed {
		return false
	}
	g.n++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n == 0 && g.closed {
		g.idle.Broadcast()
	}
}

// close reports whether it was this call that closed.
func (g *gate) close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.paused {
		g.idle.Wait()
	}
	if g.closed {
		return false
	}
	g.closed = true
	for g.n > 0 {
		g.idle.Wait()
	}
	return true
}

// pause makes later calls wait for resume, if none runs. It does not wait for
// those that run: such a one may call again, from a callback.
func (g *gate) pause() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.paused || g.n > 0 {
		return false
	}
	g.paused = true
	return true
}

// resume ends a pause; with dead, calls get ErrClosed from now on.
func (g *gate) resume(dead bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.paused, g.closed = false, dead
	g.idle.Broadcast()
}
