package mockllm

import (
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"

// chat answers one chat completion. It returns when the reply is through; an
// error means that the connection is of no more use.
func (h *handler) chat(body []byte, arrived time.Time) error {
	st, cfg := &h.s.stats, &h.s.cfg
	n := st.requests.Add(1)
	st.bodyBytes.Add(uint64(len(body)))
	a, err := scanAsk(body)
	if err != nil {
		return statusError{400, err.Error()}
	}
	fault := cfg.fault(n)
	switch fault {
	case Fault500:
		st.errors.Add(1)
		return h.answer(500, "", errorBody("injected by the mock", "server_error"))
	case Fault429:
		st.errors.Add(1)
		return h.answer(429, retryAfter(cfg.RetryAfter), errorBody("injected by the mock", "rate_limit_exceeded"))
	}
	r := &run{h: h, arrived: arrived, fault: fault, stream: a.stream, done: make(chan struct{})}
	r.reply = reply{cfg: cfg, n: n, created: arrived.Unix(), model: "mock", usage: a.includeUsage, bodyBytes: len(body)}
	if len(a.model) > 0 && len(a.model) <= 128 {
		r.reply.model = string(a.model)
	}
	if cfg.Tool != "" && a.tool != nil && a.userLast {
		r.reply.tool = cfg.Tool
		if cfg.Tool == "*" {
			r.reply.tool = string(a.tool)
		}
	}
	return r.serve()
}

// retryAfter is the header in whole seconds, rounded up, and its finer form.
func retryAfter(d time.Duration) string {
	if d <= 0 {
		return ""
	}
	return "Retry-After: " + strconv.Itoa(int(math.Ceil(d.Seconds()))) + "\r\nretry-after-ms: " + strconv.FormatInt(d.Milliseconds(), 10) + "\r\n"
}

// run is one reply on its way out. Between frames only a timer holds it; the
// connection's goroutine meanwhile waits for the peer's next byte, which is
// how an abort is seen at once.
type run struct {
	h       *handler
	reply   reply
	arrived time.Time
	fault   Fault
	stream  bool
	done    chan struct{} // closed when over

	mu    sync.Mutex
	next  int       // next frame, guarded by mu
	over  bool      // guarded by mu
	left  bool      // no longer counted in flight, guarded by mu
	stall bool      // silent by injection, guarded by mu
	piped bool      // the peer has sent more: its going can't be seen, guarded by mu
	err   error     // why the connection is of no more use, guarded by mu
	timer env.Timer // guarded by mu
}

func (r *run) serve() error {
	r.h.s.stats.enter()
	r.step()
	select {
	case <-r.done:
		return r.err
	default:
	}
	if _, err := r.h.br.Peek(1); err != nil {
		_ = r.h.c.Close() // first, as it frees a step that is stuck in a write
		r.abort(err)
	} else {
		r.mu.Lock()
		r.piped = true
		r.endStall()
		r.mu.Unlock()
	}
	<-r.done
	return r.err
}

// abort gives the reply up because the peer has gone.
func (r *run) abort(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		return
	}
	if r.timer != nil {
		r.timer.Stop()
	}
	r.h.s.stats.aborted.Add(1)
	r.finish(err)
}

// finish ends the run; the caller holds mu and has counted how it ended.
func (r *run) finish(err error) {
	r.over, r.err = true, err
	r.leave()
	close(r.done)
}

// leave counts the run out once; the caller holds mu.
func (r *run) leave() {
	if !r.left {
		r.left = true
		r.h.s.stats.leave()
	}
}

// endStall ends a silent reply whose peer can't be seen going; the caller
// holds mu.
func (r *run) endStall() {
	if r.stall && r.piped && !r.over {
		_ = r.h.c.Close()
		r.finish(errInjected)
	}
}

// step sends every frame that is due and sets the timer for the next.
func (r *run) step() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		return
	}
	last := r.reply.frames()
	stop := last
	if r.fault != "" {
		stop = last / 2 // a fault strikes in the middle of the reply
	}
	first := r.next
	if !r.stream {
		if r.h.s.clock.Now().Sub(r.arrived) < r.reply.due(max(stop-1, 0)) {
			r.arm(r.reply.due(max(stop-1, 0)))
			return
		}
		r.next = stop
	} else {
		now := r.h.s.clock.Now().Sub(r.arrived)
		for r.next < stop && r.reply.due(r.next) <= now {
			r.next++
		}
	}
	if r.next > first {
		if err := r.send(first, r.next); err != nil {
			if !r.left {
				r.h.s.stats.aborted.Add(1)
			}
			r.finish(err)
			return
		}
	}
	switch {
	case r.next < stop:
		r.arm(r.reply.due(r.next))
	case r.fault != "":
		r.fail()
	default:
		r.finish(nil)
	}
}

func (r *run) arm(due time.Duration) {
	r.timer = r.h.s.clock.AfterFunc(r.arrived.Add(due).Sub(r.h.s.clock.Now()), r.step)
}

// send writes frames [from, to) in one write.
func (r *run) send(from, to int) error {
	s := r.h.s
	buf := s.buffer()
	defer s.release(buf)
	b, end := *buf, to == r.reply.frames()
	switch {
	case r.stream:
		if from == 0 {
			b = append(b, streamHead...)
		}
		b = append(b, "00000000\r\n"...) // the chunk's size, set below
		at := len(b)
		for i := from; i < to; i++ {
			b = r.reply.appendFrame(b, i)
		}
		putHex(b[at-10:at-2], len(b)-at)
		b = append(b, "\r\n"...)
		if end {
			b = append(b, "0\r\n\r\n"...)
		}
	case end:
		body := s.buffer()
		*body = r.reply.appendWhole(*body)
		b = appendResponse(b, 200, "", *body)
		s.release(body)
	}
	*buf = b
	s.stats.tokens.Add(uint64(min(to, r.reply.tokens()) - min(from, r.reply.tokens())))
	if end {
		// Counted before the last byte leaves: a client that sees the end and
		// asks again at once is one stream, not two.
		s.stats.completed.Add(1)
		r.leave()
	}
	return r.h.write(b)
}

// fail carries out a fault in the middle of the reply.
func (r *run) fail() {
	r.h.s.stats.errors.Add(1)
	switch r.fault {
	case FaultStall:
		r.stall = true // nothing more is due; the peer's going ends it
		r.endStall()
		return
	case FaultEOF:
		if r.stream && r.next > 0 {
			_ = r.h.write([]byte("0\r\n\r\n"))
		}
	case FaultReset:
		if c, ok := r.h.c.(interface{ SetLinger(sec int) error }); ok {
			_ = c.SetLinger(0) // close sends RST
		}
	}
	_ = r.h.c.Close()
	r.finish(errInjected)
}

var errInjected = statusless("injected fault")

// statusless is an error that ends a connection without an answer.
type statusless string

func (e statusless) Error() string { return string(e) }

// putHex writes n right-aligned into dst.
func putHex(dst []byte, n int) {
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = "0123456789abcdef"[n&15]
		n >>= 4
	}
}
