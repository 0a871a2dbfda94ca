package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// The classes of errors. Every failed attempt falls in exactly one.
const (
	errConnect  = "connect"       // no connection, or it broke before any answer
	errTimeout  = "timeout"       // TurnTimeout passed
	errSession  = "session"       // a session could not be opened
	err4xx      = "http_4xx"      // refused, but not by admission
	err5xx      = "http_5xx"      // the server failed
	errFailed   = "turn_failed"   // the stream says that the turn failed or was cancelled
	errBroken   = "broken_stream" // the stream ended without a terminal event
	errUnclean  = "unclean_end"   // the stream broke or went on after its terminal event
	errNoRetry  = "429_without_retry_after"
	errProtocol = "protocol" // the reply makes no sense
)

// attempt is one try at a turn. Times are nanoseconds since the run's epoch.
type attempt struct {
	start    int64 // the intended start in an open loop, otherwise sent
	sent     int64
	accepted int64 // head of a 200 reply, 0 when there was none
	first    int64 // first visible output, 0 when there was none
	end      int64
	rejected bool
	retry    time.Duration // how long a rejected worker has to wait
	class    string        // "" = completed or rejected
	detail   string        // an example for the class
}

// worker is one client with its own connection and session.
type worker struct {
	run     *run
	c       *conn
	ev      events
	session string
	open    bool // session is open
	used    int  // turns of this session
}

func (r *run) newWorker() *worker {
	return &worker{run: r, c: newConn(r.cfg.Env, r.base, r.cfg.APIKey)}
}

// try opens a session when one is due and asks for one turn.
func (w *worker) try(ctx context.Context) attempt {
	r := w.run
	if a, ok := w.ensureSession(ctx); !ok {
		return a
	}
	w.used++
	a := attempt{start: r.now()}
	a.sent = a.start
	w.turn(ctx, &a)
	if a.end == 0 {
		a.end = r.now()
	}
	if a.class == err4xx {
		w.open = false // perhaps the session is gone
	}
	return a
}

// ensureSession reports an attempt that ended with the opening of a session.
func (w *worker) ensureSession(ctx context.Context) (attempt, bool) {
	r := w.run
	if w.open && r.cfg.TurnsPerSession > 0 && w.used >= r.cfg.TurnsPerSession {
		w.shut(ctx)
	}
	q := r.cfg.Protocol.Open()
	if w.open || q.Method == "" {
		return attempt{}, true
	}
	a := attempt{start: r.now()}
	a.sent = a.start
	body, st, err := w.simple(ctx, q)
	a.end = r.now()
	switch {
	case err != nil:
		a.class, a.detail = errSession, err.Error()
	case st.code == 429:
		a.reject(st, body)
	case st.code >= 300:
		a.class, a.detail = errSession, fmt.Sprintf("%d: %s", st.code, clip(body))
	default:
		if w.session, err = r.cfg.Protocol.Session(body); err != nil {
			a.class, a.detail = errSession, err.Error()
			break
		}
		w.open, w.used = true, 0
	}
	return a, w.open
}

// shut deletes the session; a failure counts as an error of the run.
func (w *worker) shut(ctx context.Context) {
	q := w.run.cfg.Protocol.Shut(w.session)
	if !w.open || q.Method == "" {
		return
	}
	w.open = false
	body, st, err := w.simple(ctx, q)
	if err == nil && st.code >= 300 {
		err = fmt.Errorf("%d: %s", st.code, clip(body))
	}
	if err != nil {
		w.run.col.fail(errSession, "deleting: "+err.Error())
	}
}

// simple exchanges a request for a whole reply.
func (w *worker) simple(ctx context.Context, q Request) ([]byte, status, error) {
	st, err := w.c.do(ctx, q, w.deadline())
	if err != nil {
		return nil, st, err
	}
	body, err := w.c.rest()
	return body, st, err
}

func (w *worker) deadline() time.Time {
	return w.run.cfg.Env.Clock.Now().Add(w.run.cfg.TurnTimeout)
}

// turn carries out one turn and fills a in.
func (w *worker) turn(ctx context.Context, a *attempt) {
	st, err := w.c.do(ctx, w.run.cfg.Protocol.Turn(w.session), w.deadline())
	if err != nil {
		a.fail(classOf(err, errConnect), err.Error())
		return
	}
	if st.code == 200 {
		a.accepted = w.run.now()
	}
	if st.code != 200 || !st.stream {
		w.whole(st, a)
		return
	}
	w.ev.reset() // a broken stream may have left half an event
	var end Progress
	for {
		p, err := w.c.next()
		if err == io.EOF {
			if end == Other {
				a.fail(errBroken, "the stream ended without a terminal event")
			}
			return
		}
		if err != nil {
			class := errBroken
			if end != Other {
				class = errUnclean
			}
			a.fail(classOf(err, class), err.Error())
			return
		}
		if end != Other {
			a.fail(errUnclean, fmt.Sprintf("after the terminal event: %q", clip(p)))
			w.c.close()
			return
		}
		end = w.piece(p, a)
	}
}

// piece goes through the events in p and returns how the turn ended, if it
// has.
func (w *worker) piece(p []byte, a *attempt) Progress {
	now := w.run.now()
	for ok := true; ; {
		if p, ok = w.ev.next(p); !ok {
			return Other
		}
		switch w.run.cfg.Protocol.Event(w.ev.name, w.ev.data) {
		case Token:
			if a.first == 0 {
				a.first = now
			}
		case Done:
			a.end = now
			return Done
		case Failed:
			a.end = now
			a.fail(errFailed, string(w.ev.name)+": "+clip(w.ev.data))
			return Failed
		}
	}
}

// whole handles every reply that is no event stream.
func (w *worker) whole(st status, a *attempt) {
	body, err := w.c.rest()
	a.end = w.run.now()
	switch {
	case err != nil:
		a.fail(classOf(err, errConnect), err.Error())
	case st.code == 429:
		a.reject(st, body)
	case st.code >= 500:
		a.fail(err5xx, fmt.Sprintf("%d: %s", st.code, clip(body)))
	case st.code >= 300:
		a.fail(err4xx, fmt.Sprintf("%d: %s", st.code, clip(body)))
	case w.run.cfg.Protocol.Whole(body) != Done:
		a.fail(errFailed, clip(body))
	}
}

func (a *attempt) fail(class, detail string) {
	if a.class == "" {
		a.class, a.detail = class, detail
	}
}

// reject notes how long to wait; maxRetryWait bounds what a server may ask.
func (a *attempt) reject(st status, body []byte) {
	a.rejected, a.retry = true, min(st.retryAfter, maxRetryWait)
	if !st.hasRetry {
		a.retry = time.Second
		a.fail(errNoRetry, clip(body))
	}
}

const maxRetryWait = 30 * time.Second

func classOf(err error, otherwise string) string {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errTimeout
	case errors.Is(err, errDial):
		return errConnect
	}
	return otherwise
}

// sleep waits for d and reports whether ctx is still alive.
func sleep(ctx context.Context, clock env.Clock, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	done := make(chan struct{})
	t := clock.AfterFunc(d, func() { close(done) })
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}
