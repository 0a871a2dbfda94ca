package objectlog

import (
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/journal"
)

// maxKeptBuffer bounds an encoding buffer that is kept for the next frame.
const maxKeptBuffer = 1 << 20

// MaxInFlight is how many frames may be in flight just now; 0 when none may
// start (the window, the pace or the budget): then OnRoom's function is called
// when that may have changed. After a failure it is not 0: Begin tells it.
func (l *Log) MaxInFlight() int {
	now := l.o.Clock.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.room(now)
	if n == 0 {
		l.starved = true
		l.arm(now)
	}
	return n
}

// room is what Writer and budget allow. l.mu is held.
func (l *Log) room(now time.Time) int {
	if l.w == nil {
		return 1
	}
	n, _ := l.w.Room(now)
	if n > 0 && l.o.Budget != nil && l.w.Err() == nil && !l.o.Budget.ask(&l.claim) {
		return 0
	}
	return n
}

// OnRoom sets what is called (by any goroutine; it must not block) when
// MaxInFlight has said 0 and may say more now.
func (l *Log) OnRoom(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.onRoom = f
}

// roomGrew tells who waits for room.
func (l *Log) roomGrew() {
	l.mu.Lock()
	f, tell := l.onRoom, l.starved
	l.starved = false
	l.mu.Unlock()
	if tell {
		f()
	}
}

// Begin writes f behind the last frame. It never blocks; done is called once,
// for all frames in order, never by Begin itself, and must not block: nil means
// that f is durable and acknowledged. f.Body may be reused when Begin returns.
//
// journal.ErrTooLarge, journal.ErrOutOfOrder, ErrWindowFull and ErrNotReplayed
// leave the log as it was. ErrFenced and ErrLeaseOver (both match
// journal.ErrStale), journal.ErrClosed and the store's errors end it: whether a
// frame that was in flight survives is unknown until a new owner has read the
// log, and every later frame fails with the same error.
func (l *Log) Begin(f journal.Frame, done func(error)) {
	if len(f.Body) > journal.MaxBodySize {
		l.refuse(done, fmt.Errorf("%w: body of %d bytes, at most %d", journal.ErrTooLarge, len(f.Body), journal.MaxBodySize))
		return
	}
	data := journal.AppendFrameAbove(l.buffer(), f, l.o.CompressAbove)
	now := l.o.Clock.Now()
	l.mu.Lock()
	err := ErrNotReplayed
	switch {
	case l.closed:
		err = journal.ErrClosed
	case l.w != nil:
		err = l.w.Add(now, f, data)
	}
	if err != nil {
		l.keep(data)
		l.mu.Unlock()
		l.refuse(done, err)
		return
	}
	l.begun = append(l.begun, begun{done: done})
	todo := l.collect()
	l.mu.Unlock()
	if l.o.Budget != nil {
		l.o.Budget.spend(&l.claim)
	}
	l.do(todo)
	if plantAckEarly {
		l.o.Go(l.makeCalls)
	}
}

// refuse answers a frame that was not taken, behind those before it.
func (l *Log) refuse(done func(error), err error) {
	l.mu.Lock()
	l.begun = append(l.begun, begun{done, err})
	l.flush()
	closed := l.closed
	if !closed {
		l.start(l.makeCalls)
	}
	l.mu.Unlock()
	if closed {
		l.o.Go(l.makeCalls)
	}
}

// collect takes what the Writer decided: frames that are finished go to calls,
// and the requests to make are returned. l.mu is held.
func (l *Log) collect() []Action {
	for _, f := range l.w.Finished() {
		l.calls = append(l.calls, call{l.begun[0].done, f.Err})
		l.begun[0] = begun{}
		l.begun = l.begun[1:]
		l.flush()
		if f.Err == nil {
			l.index.Add(f.Seq, f.FirstLSN, f.Count, len(f.Data))
			if !plantAckEarly {
				l.keep(f.Data)
			}
		}
	}
	var todo []Action
	if a := l.w.Actions(); len(a) > 0 {
		todo = append(todo, a...)
	}
	l.arm(l.o.Clock.Now())
	return todo
}

// flush answers refused frames that have no others before them. l.mu is held.
func (l *Log) flush() {
	for len(l.begun) > 0 && l.begun[0].refused != nil {
		l.calls = append(l.calls, call{l.begun[0].done, l.begun[0].refused})
		l.begun[0] = begun{}
		l.begun = l.begun[1:]
	}
}

// do starts the requests: each on a goroutine, at most one for each frame in
// flight.
func (l *Log) do(todo []Action) {
	for _, a := range todo {
		l.mu.Lock()
		if !l.closed {
			l.start(func() { l.request(a) })
		}
		l.mu.Unlock()
	}
}

func (l *Log) request(a Action) {
	began := l.o.Clock.Now()
	var data []byte
	var err error
	if a.Put {
		if a.Attempt > 1 && l.o.Budget != nil {
			l.o.Budget.repeated()
		}
		_, err = l.o.Store.Put(l.ctx, a.Key, a.Data, putNew)
	} else {
		obj, gerr := l.o.Store.Get(l.ctx, a.Key)
		data, err = obj.Data, gerr
	}
	leased := l.o.Valid() // after the answer
	now := l.o.Clock.Now()
	if a.Put && l.o.OnPut != nil {
		l.o.OnPut(now.Sub(began), a.Attempt, err)
	}
	l.mu.Lock()
	if a.Put {
		l.w.PutDone(now, a.Seq, err, leased)
	} else {
		l.w.GetDone(now, a.Seq, data, err, leased)
	}
	l.settle(now)
}

// settle ends a change of the Writer: it unlocks l.mu, calls who must be told,
// and starts what follows.
func (l *Log) settle(now time.Time) {
	todo := l.collect()
	failed := l.w.Err()
	grew := l.starved && l.room(now) > 0
	l.mu.Unlock()
	l.do(todo)
	l.makeCalls()
	if grew || failed != nil {
		l.roomGrew()
	}
}

// makeCalls calls the frames' functions in order, one caller at a time.
func (l *Log) makeCalls() {
	l.mu.Lock()
	for !l.calling && len(l.calls) > 0 {
		calls := l.calls
		l.calls, l.calling = nil, true
		l.mu.Unlock()
		for _, c := range calls {
			c.done(c.err)
		}
		l.mu.Lock()
		l.calling = false
	}
	l.mu.Unlock()
}

// arm sets the timer to what comes next: a repetition, or the pace if somebody
// waits for it. l.mu is held.
func (l *Log) arm(now time.Time) {
	if l.w == nil || l.closed {
		return
	}
	at := l.w.Wake()
	if l.starved {
		_, room := l.w.Room(now)
		at = soonest(at, room)
	}
	if at.IsZero() || l.timer != nil && !at.Before(l.timerAt) {
		return
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timerAt = at
	l.timer = l.o.Clock.AfterFunc(max(at.Sub(now), 0), l.tick)
}

// tick is the timer's.
func (l *Log) tick() {
	leased := l.o.Valid()
	now := l.o.Clock.Now()
	l.mu.Lock()
	l.timer = nil
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.inFlight.Add(1)
	defer l.inFlight.Done()
	l.w.Tick(now, leased)
	l.settle(now)
}

// buffer gives a buffer to encode into.
func (l *Log) buffer() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.buffers); n > 0 {
		b := l.buffers[n-1]
		l.buffers = l.buffers[:n-1]
		return b
	}
	return nil
}

// keep takes a buffer back that no request uses. l.mu is held.
func (l *Log) keep(b []byte) {
	if cap(b) <= maxKeptBuffer && len(l.buffers) < l.o.Window {
		l.buffers = append(l.buffers, b[:0])
	}
}
