package httpapi

import (
	"context"
	"errors"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"net"
	"net/http"
	"time"

	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
)

// sse is one event stream, and the consumer that writes native events as they
// are. The memory for frames is borrowed for each write.
type sse struct {
	c      *call
	wrote  time.Time // last write
	begun  bool
	cursor string // ID of the last durable event written
}

func (c *call) stream() *sse { return &sse{c: c, wrote: c.start} }

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

// beat implements consumer: it sends a comment when nothing was sent for a
// heartbeat.
func (s *sse) beat() (time.Duration, error) {
	return s.beatWith(func() error { return s.write(ping) })
}

func (s *sse) beatWith(send func() error) (time.Duration, error) {
	every := s.c.api.cfg.Limits.StreamHeartbeat
	if left := every - s.c.api.cfg.Clock.Now().Sub(s.wrote); left > 0 {
		return left, nil
	}
	return every, send()
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
	if s.c.deadline.Sub(now) < stall {
		s.c.deadline = now.Add(stall + stall/2)
		_ = s.c.rc.SetWriteDeadline(s.c.deadline)
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

// take implements consumer. Where the stream ends, the watcher says.
func (s *sse) take(events []session.Event) (over bool, err error) {
	for i := len(events) - 1; i >= 0; i-- {
		if events[i].ID != "" {
			s.cursor = events[i].ID
			break
		}
	}
	if len(events) == 1 {
		return false, s.write(events[0].SSE)
	}
	p := getBuffer()
	b := *p
	for i := range events {
		b = append(b, events[i].SSE...)
	}
	err = s.write(b)
	putBuffer(p, b)
	return false, err
}

// fail implements consumer.
func (s *sse) fail(err error) (*session.Watcher, error) {
	if errors.Is(err, session.ErrEnded) {
		return nil, nil
	}
	return nil, s.broken(err)
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
