package mockllm

import (
	"bufio"
	"errors"
	"net"
	"sync"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/env"
)

// Server is one mock. Its methods are safe for concurrent use.
type Server struct {
	cfg   Config
	clock env.Clock
	stats counters
	bufs  sync.Pool // *[]byte, reply and body buffers up to maxPooled

	mu        sync.Mutex
	closed    bool                      // guarded by mu
	conns     map[net.Conn]struct{}     // guarded by mu
	listeners map[net.Listener]struct{} // guarded by mu
	wg        sync.WaitGroup            // connections
}

// maxPooled keeps one huge prompt from pinning its buffer for ever.
const maxPooled = 256 << 10

// New makes a mock, or says what is wrong with cfg.
func New(cfg Config, e env.Env) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Server{
		cfg:       cfg,
		clock:     e.Clock,
		bufs:      sync.Pool{New: func() any { b := make([]byte, 0, 4096); return &b }},
		conns:     map[net.Conn]struct{}{},
		listeners: map[net.Listener]struct{}{},
	}, nil
}

// Serve answers connections of l until l fails or Close is called, and then
// returns the listener's error, or nil after Close. It closes l.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		_ = l.Close()
		return nil
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer func() { _ = l.Close() }()
	for {
		c, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.listeners, l)
			if s.closed || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		if !s.adopt(c) {
			_ = c.Close()
		}
	}
}

func (s *Server) adopt(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxConns {
		return false
	}
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	s.stats.connections.Add(1)
	go func() {
		defer s.wg.Done()
		h := handler{s: s, c: c, br: bufio.NewReaderSize(c, 8192)}
		h.loop()
		_ = c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	return true
}

// Close ends every listener and connection, running replies too, and waits
// for them. Later calls to Serve return at once.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for l := range s.listeners {
		_ = l.Close()
	}
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

func (s *Server) buffer() *[]byte { return s.bufs.Get().(*[]byte) }

func (s *Server) release(b *[]byte) {
	if cap(*b) <= maxPooled {
		*b = (*b)[:0]
		s.bufs.Put(b)
	}
}

// Stats is a snapshot of what a mock has done. The first three are what the
// checks of a provider's concurrency limit rely on.
type Stats struct {
	Requests      uint64 `json:"requests"`       // chat completions that arrived
	InFlight      int64  `json:"in_flight"`      // now being answered
	MaxConcurrent int64  `json:"max_concurrent"` // highest InFlight since start or reset
	Completed     uint64 `json:"completed"`      // answered to the end, the last byte on its way
	Errors        uint64 `json:"errors"`         // failed by injection
	Aborted       uint64 `json:"aborted"`        // given up by the client
	BadRequests   uint64 `json:"bad_requests"`   // refused with a 4xx
	Tokens        uint64 `json:"tokens"`         // sent
	BodyBytes     uint64 `json:"body_bytes"`     // received
	Connections   uint64 `json:"connections"`    // accepted
}

type counters struct {
	requests, completed, errors, aborted, bad, tokens, bodyBytes, connections atomic.Uint64
	inFlight, maxConcurrent                                                   atomic.Int64
}

// Stats reads the counters; they need not be of one instant.
func (s *Server) Stats() Stats {
	c := &s.stats
	return Stats{
		Requests: c.requests.Load(), InFlight: c.inFlight.Load(), MaxConcurrent: c.maxConcurrent.Load(),
		Completed: c.completed.Load(), Errors: c.errors.Load(), Aborted: c.aborted.Load(),
		BadRequests: c.bad.Load(), Tokens: c.tokens.Load(), BodyBytes: c.bodyBytes.Load(),
		Connections: c.connections.Load(),
	}
}

// ResetMax starts a new measurement of MaxConcurrent.
func (s *Server) ResetMax() { s.stats.maxConcurrent.Store(s.stats.inFlight.Load()) }

func (c *counters) enter() {
	n := c.inFlight.Add(1)
	for {
		m := c.maxConcurrent.Load()
		if n <= m || c.maxConcurrent.CompareAndSwap(m, n) {
			return
		}
	}
}

func (c *counters) leave() { c.inFlight.Add(-1) }
