package flow

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// A worker has one stream. When that is busy sending, so that results wait for
// it, the worker opens a further one, on a connection of its own, and later
// another; it gives them back when fewer would do. For the server each is a
// worker with the same ID.
//
// The worker's room (Concurrency, RPCConcurrency) is shared out to the streams as
// credits. What is not running is with one of them: a further stream begins
// without any, and gets those of handlers that end elsewhere until all streams
// have about as much.
const (
	defaultStreams = 4
	mostStreams    = 64

	// How much more room a stream may have than the one that has least, before its
	// credits go there: a credit that goes with its result costs no frame.
	unevenness = 8
)

// The kinds of room.
const (
	stepRoom = iota
	rpcRoom
	kinds
)

// room is what a stream has of one kind. Guarded by Worker.mu.
type room struct {
	credits int // that the server has, and has not used
	running int // that came over the stream, and are not answered
}

func (r room) all() int { return r.credits + r.running }

// most is all the room there is.
func (w *Worker) most(kind int) int {
	if kind == rpcRoom {
		return w.opts.RPCConcurrency
	}
	return w.opts.Concurrency
}

// join makes s one of the streams, with the room that nobody has, and says how
// many there are.
func (w *Worker) join(s *session) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	var free [kinds]int
	for kind := range kinds {
		free[kind] = w.most(kind) - w.busy[kind]
		for _, o := range w.open {
			free[kind] -= o.room[kind].credits
		}
		s.room[kind].credits = free[kind]
	}
	s.granted(free[stepRoom], free[rpcRoom])
	w.open = append(w.open, s)
	return len(w.open)
}

// leave ends a stream; the credits that its server has not used go to others.
func (w *Worker) leave(s *session) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = slices.DeleteFunc(w.open, func(o *session) bool { return o == s })
	s.retired = true
	for kind := range kinds {
		n := s.room[kind].credits
		s.room[kind].credits = 0
		if to := w.creditor(s, kind); to != nil && n > 0 {
			to.grant(kind, n)
		}
	}
}

// retire lets no further credits go to a stream.
func (w *Worker) retire(s *session) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s.retired = true
}

// creditor is the stream that a credit of s goes to: s itself, unless it has much
// more than another one, or is going; nil = there is none.
func (w *Worker) creditor(s *session, kind int) *session {
	if len(w.open) == 1 && w.open[0] == s && !s.retired {
		return s // the usual
	}
	var least *session
	for _, o := range w.open {
		if !o.retired && (least == nil || o.room[kind].all() < least.room[kind].all()) {
			least = o
		}
	}
	if least != nil && !s.retired && s.room[kind].all() <= least.room[kind].all()+unevenness {
		return s
	}
	return least
}

// took counts what came over a stream; it refuses what was not granted.
func (w *Worker) took(s *session, tasks, rpcs int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for kind, n := range [kinds]int{tasks, rpcs} {
		r := &s.room[kind]
		if n > r.credits {
			granted := [kinds]int{s.room[stepRoom].credits, s.room[rpcRoom].credits}
			return fmt.Errorf("%w: it sends more tasks than it was granted: %d of %d steps, %d of %d RPCs",
				errProtocol, tasks, granted[stepRoom], rpcs, granted[rpcRoom])
		}
		r.credits -= n
		r.running += n
		w.busy[kind] += n
	}
	return nil
}

// freed says that a handler of stream s is done. own tells that the credit is to
// go with its result; otherwise it went to another stream.
func (w *Worker) freed(s *session, kind int) (own bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy[kind]--
	s.room[kind].running--
	to := w.creditor(s, kind)
	switch to {
	case nil:
	case s:
		s.room[kind].credits++
		return true
	default:
		to.grant(kind, 1)
	}
	return false
}

// grant gives a stream credits. It is called under the worker's lock.
func (s *session) grant(kind, n int) {
	s.room[kind].credits += n
	if kind == rpcRoom {
		s.granted(0, n)
	} else {
		s.granted(n, 0)
	}
}

// pace says when streams are opened and given back.
type pace struct {
	look time.Duration // between two looks at the streams
	// A stream is busy when it is writing for this share of the time: a result that
	// is put then waits for a write that is under way, more often than not.
	busy float64
	// One stream fewer would do when they were all writing, together, for less than
	// this share of what would be left.
	idle float64
	hot  int // looks in a row at which all were busy, before one is opened
	cold int // looks in a row at which fewer would have done, before one is given back
	rest int // looks after one that was lost, or could not be opened
}

var usualPace = pace{look: 250 * time.Millisecond, busy: 0.7, idle: 0.3, hot: 4, cold: 40, rest: 120}

// demand decides how many streams there are to be. Not safe for concurrent use.
type demand struct {
	pace
	seen  int // looks in a row with the same wish
	wish  int
	pause int // looks
}

// look takes the share of the time in which each stream was writing, and says
// whether to open one (1), to give one back (-1), or neither. most is how many
// there may be.
func (d *demand) look(shares []float64, most int) int {
	if d.pause > 0 {
		d.pause--
	}
	n, sum, all := len(shares), 0.0, true
	for _, s := range shares {
		sum += s
		all = all && s >= d.busy
	}
	wish, want := 0, 0
	switch {
	case n > 0 && all && n < most && d.pause == 0:
		wish, want = 1, d.hot
	case n > 1 && sum < d.idle*float64(n-1):
		wish, want = -1, d.cold
	}
	if wish != d.wish {
		d.wish, d.seen = wish, 0
	}
	if d.seen++; wish == 0 || d.seen < want {
		return 0
	}
	d.seen = 0
	return wish
}

// steer opens and gives back further streams until ctx ends.
func (w *Worker) steer(ctx context.Context, further *sync.WaitGroup) {
	if w.opts.MaxStreams == 1 {
		return
	}
	d := demand{pace: w.pace}
	tick := time.NewTicker(d.pace.look)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			shares, most := w.shares(now)
			if w.hasFailed() {
				d.pause = d.rest
			}
			switch d.look(shares, most) {
			case 1:
				w.mu.Lock()
				w.opening++
				w.mu.Unlock()
				further.Go(func() { w.openFurther(ctx) })
			case -1:
				w.giveBack()
			}
		}
	}
}

// shares looks at the streams that are not going, and says how many of them
// there may be.
func (w *Worker) shares(now time.Time) (shares []float64, most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	most = w.opts.MaxStreams - w.opening
	for _, s := range w.open {
		if s.retired {
			most--
			continue
		}
		shares = append(shares, s.writing.share(now))
	}
	return shares, most
}

func (w *Worker) hasFailed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.failed
	w.failed = false
	return was
}

// openFurther works over a further stream until that ends. When it is lost, the
// others go on, and one more is opened if it is needed.
func (w *Worker) openFurther(ctx context.Context) {
	opened := sync.OnceFunc(func() {
		w.mu.Lock()
		w.opening--
		w.mu.Unlock()
	})
	defer opened()
	conn, err := grpc.NewClient(w.target(), w.dialOptions()...)
	if err == nil {
		defer conn.Close()
		_, err = w.connectOnce(ctx, conn, opened)
	}
	if err != nil && ctx.Err() == nil {
		w.log.Warn("a further stream to the server ended", "address", w.opts.Address, "error", err)
		w.mu.Lock()
		w.failed = true
		w.mu.Unlock()
	}
}

// giveBack lets the newest stream end when what came over it is answered.
func (w *Worker) giveBack() {
	w.mu.Lock()
	var last *session
	for _, s := range w.open[min(1, len(w.open)):] {
		if !s.retired {
			last = s
		}
	}
	w.mu.Unlock()
	if last != nil {
		last.giveBack()
	}
}

// writeClock measures how much of the time somebody is writing. Safe for
// concurrent use.
type writeClock struct {
	mu    sync.Mutex
	since time.Time     // guarded by mu; when the write began that is under way; zero = none
	spent time.Duration // guarded by mu; since the last look
	seen  time.Time     // guarded by mu; the last look
}

func (c *writeClock) begin(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.since = now
}

func (c *writeClock) end(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spent += now.Sub(c.since)
	c.since = time.Time{}
}

// share gives the part of the time since the last look, 0 at the first one.
func (c *writeClock) share(now time.Time) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.since.IsZero() && now.After(c.since) {
		c.spent += now.Sub(c.since)
		c.since = now
	}
	spent, passed := c.spent, now.Sub(c.seen)
	first := c.seen.IsZero()
	c.spent, c.seen = 0, now
	if first || passed <= 0 {
		return 0
	}
	return min(1, float64(spent)/float64(passed))
}
