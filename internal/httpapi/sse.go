package httpapi

import (
	"context"
	"errors"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"net"
	"net/http"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
)

// errHeartbeat ends a wait for events that lasted a heartbeat.
var errHeartbeat = errors.New("heartbeat is due")

// sse is one event stream. While it waits it holds a timer and a context; the
// memory for frames is borrowed for each write.
type sse struct {
	c        *call
	base     context.Context
	wait     context.Context // ends with base or when a heartbeat is due
	stop     context.CancelCauseFunc
	timer    env.Timer
	wrote    time.Time // last write
	deadline time.Time
	begun    bool
	cursor   string // ID of the last durable event written
}

func (c *call) stream(base context.Context) *sse {
	return &sse{c: c, base: base, wrote: c.start}
}

// begin sends the headers.
func (s *sse) begin() {
	if s.begun {
		return
	}
	s.begun = true
	h := s.c.w.Header()
	h["Content-Type"] = typeSSE
	h["Cache-Control"] = noCache
	h["X-Accel-Buffering"] = no
	s.c.WriteHeader(http.StatusOK)
}

func (s *sse) arm(d time.Duration) {
	wait, cancel := context.WithCancelCause(s.base)
	s.wait, s.stop = wait, cancel
	s.timer = s.c.api.cfg.Clock.AfterFunc(d, func() { cancel(errHeartbeat) })
}

func (s *sse) disarm() {
	if s.wait != nil {
		s.timer.Stop()
		s.stop(nil)
		s.wait = nil
	}
}

// next waits for events. No events and no error: a heartbeat is due. Between
// two heartbeats the timer is left alone, whatever is written.
func (s *sse) next(w *session.Watcher) ([]session.Event, error) {
	beat := s.c.api.cfg.Limits.StreamHeartbeat
	for {
		if s.wait == nil {
			s.arm(max(beat-s.c.api.cfg.Clock.Now().Sub(s.wrote), 0))
		}
		events, err := w.Next(s.wait)
		if !errors.Is(err, errHeartbeat) {
			return events, err
		}
		s.disarm()
		if s.c.api.cfg.Clock.Now().Sub(s.wrote) >= beat {
			return nil, nil
		}
	}
}

var ping = []byte(": ping\n\n")

// write sends frames in one piece. It fails when the client takes no byte for
// Limits.StreamStall, or half as long again: so the deadline need not be moved
// at each write.
func (s *sse) write(b []byte) error {
	s.begin()
	now := s.c.api.cfg.Clock.Now()
	s.wrote = now
	stall := s.c.api.cfg.Limits.StreamStall
	if s.deadline.Sub(now) < stall {
		s.deadline = now.Add(stall + stall/2)
		_ = s.c.rc.SetWriteDeadline(s.deadline)
	}
	_, err := s.c.Write(b)
	if err == nil {
		err = s.c.rc.Flush()
	}
	if err == nil {
		return nil
	}
	s.c.closed = "client_gone"
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		s.c.closed = "stalled"
	}
	return errClientGone
}

// frames writes native events as they are.
func (s *sse) frames(events []session.Event) error {
	for i := len(events) - 1; i >= 0; i-- {
		if events[i].ID != "" {
			s.cursor = events[i].ID
			break
		}
	}
	if len(events) == 1 {
		return s.write(events[0].SSE)
	}
	p := getBuffer()
	b := *p
	for i := range events {
		b = append(b, events[i].SSE...)
	}
	err := s.write(b)
	putBuffer(p, b)
	return err
}

// follow writes what a watcher gives until its end.
func (s *sse) follow(w *session.Watcher) error {
	defer s.disarm()
	for {
		events, err := s.next(w)
		switch {
		case errors.Is(err, session.ErrEnded):
			return nil
		case err != nil:
			return s.broken(err)
		case len(events) == 0:
			err = s.write(ping)
		default:
			err = s.frames(events)
		}
		if err != nil {
			return err
		}
	}
}

// broken ends a stream before its end: the last frame says why, and from where
// to resume.
func (s *sse) broken(err error) error {
	reason := s.reason(err)
	if s.c.closed = reason; reason == "client_gone" {
		if !s.begun {
			s.c.status = statusClientGone
		}
		return nil
	}
	b := jsontext.AppendString([]byte("event: stream.closed\ndata: {\"reason\":"), reason)
	b = append(jsontext.AppendString(append(b, `,"last_event_id":`...), s.cursor), "}\n\n"...)
	return s.write(b)
}

func (s *sse) reason(err error) string {
	switch {
	case errors.Is(err, stream.ErrSlowReader):
		return "slow_reader"
	case errors.Is(err, errDraining), errors.Is(err, partition.ErrStopped):
		return "draining"
	case errors.Is(err, context.Canceled):
		return "client_gone"
	}
	s.c.api.cfg.Logger.Error("stream broke", "request_id", s.c.id, "route", s.c.pattern(), "error", err)
	return "error"
}

// watch makes the stream one that Drain ends.
func (a *API) watch(c *call) (s *sse, done func(), err error) {
	base, cancel := context.WithCancelCause(c.r.Context())
	s = c.stream(base)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.draining {
		cancel(nil)
		return nil, nil, errDraining
	}
	a.watching[s] = cancel
	return s, func() {
		a.mu.Lock()
		delete(a.watching, s)
		a.mu.Unlock()
		cancel(nil)
	}, nil
}
