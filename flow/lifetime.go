package flow

import (
	"context"
	"sync"
	"time"
)

// errDone is the cause of a context whose handler has returned.
var errDone = context.Canceled

// lifetime is the context of one handler call. Most handlers never ask for
// Done, so the real context with its timer and its links is made on demand; it
// is one of the standard library then, so that contexts made from it need no
// goroutine. Safe for concurrent use.
type lifetime struct {
	parent context.Context
	limit  time.Duration // of the call; 0 = none
	begin  time.Time

	mu    sync.Mutex
	cause error // guarded by mu; nil = not ended
	inner context.Context
	end   context.CancelCauseFunc
	stop  context.CancelFunc
}

func (l *lifetime) start(parent context.Context, limit time.Duration) {
	l.parent, l.limit, l.begin = parent, limit, time.Now()
}

func (l *lifetime) context() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inner != nil {
		return l.inner
	}
	ctx, end := context.WithCancelCause(l.parent)
	l.end = end
	if l.limit > 0 {
		ctx, l.stop = context.WithDeadlineCause(ctx, l.begin.Add(l.limit), &TimeoutError{After: l.limit})
	}
	l.inner = ctx
	if l.cause != nil {
		l.end(l.cause)
	}
	return l.inner
}

// cancel ends the context; the first cause counts.
func (l *lifetime) cancel(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return
	}
	l.cause = cause
	if l.end != nil {
		l.end(cause)
	}
}

// finish frees what the context holds, once the handler has returned.
func (l *lifetime) finish() {
	l.cancel(errDone)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != nil {
		l.stop()
	}
}

// why gives the cause if the context has ended.
func (l *lifetime) why() error {
	l.mu.Lock()
	inner, cause := l.inner, l.cause
	l.mu.Unlock()
	switch {
	case inner != nil:
		return context.Cause(inner)
	case cause != nil:
		return cause
	case l.parent.Err() != nil:
		return context.Cause(l.parent)
	case l.limit > 0 && time.Since(l.begin) >= l.limit:
		return &TimeoutError{After: l.limit}
	}
	return nil
}

// Deadline implements context.Context: when the attempt's time is over.
func (l *lifetime) Deadline() (time.Time, bool) {
	d, ok := l.parent.Deadline()
	if own := l.begin.Add(l.limit); l.limit > 0 && (!ok || own.Before(d)) {
		return own, true
	}
	return d, ok
}

// Done implements context.Context. It is closed at once when the work is
// cancelled; context.Cause says why: *CancelledError, *TimeoutError, ErrLost or
// ErrStopping.
func (l *lifetime) Done() <-chan struct{} { return l.context().Done() }

// Err implements context.Context.
func (l *lifetime) Err() error {
	if l.why() == nil {
		return nil
	}
	return l.context().Err()
}

// Value implements context.Context.
func (l *lifetime) Value(key any) any { return l.context().Value(key) }
