package server

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/perdure-dev/perdure/internal/httpapi"
	"github.com/perdure-dev/perdure/internal/sink"
)

func (s *Server) newAPI() *httpapi.API {
	return httpapi.New(httpapi.Config{
		Service: s.sessions, Auth: s.cfg.Auth, Limits: s.cfg.Limits, Clock: s.env.Clock, Rand: s.env.Rand,
		Logger: s.log, Version: s.version, Metrics: s.metrics.handler(), Ready: s.Ready,
		AccessLog: s.access, AccessReader: tail{s.sinks, sink.Access}, EventReader: tail{s.sinks, sink.Events},
		LocalOnly: len(s.cfg.Auth.Keys) == 0 && isLoopback(s.cfg.Listen),
	})
}

func (s *Server) httpServer() *http.Server {
	var handler http.Handler = s.api
	if s.objects != nil {
		handler = s.objects.ending.over(s.api)
	}
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: s.cfg.Limits.ReadHeaderTimeout,
		IdleTimeout:       s.cfg.Limits.IdleTimeout,
		MaxHeaderBytes:    int(s.cfg.Limits.MaxHeaderBytes),
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // clients' broken connections
	}
}

func isLoopback(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// access hands a request to the access log.
func (s *Server) access(r httpapi.AccessRecord) {
	s.sinks.Access(sink.Record{
		Time: r.At, Tenant: r.Tenant, Method: r.Method, Route: r.Route, Status: r.Status, BytesOut: r.Bytes,
		Duration: r.Duration, TTFB: r.TTFB, Session: r.Session, Turn: r.Turn, Remote: r.Remote, RequestID: r.RequestID,
	})
}

// tail reads one of the sinks' logs for the API.
type tail struct {
	sinks *sink.Sinks
	kind  sink.Kind
}

// Tail implements httpapi.LogReader.
func (t tail) Tail(ctx context.Context, tenant, after string, limit int) ([]json.RawMessage, string, error) {
	return t.sinks.Tail(ctx, t.kind, tenant, after, limit)
}

// limitListener bounds the open connections: more wait in the listen queue.
type limitListener struct {
	net.Listener
	slots chan struct{}
}

func newLimitListener(l net.Listener, limit int) net.Listener {
	return &limitListener{l, make(chan struct{}, limit)}
}

// Accept implements net.Listener.
func (l *limitListener) Accept() (net.Conn, error) {
	l.slots <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitConn{Conn: c, slots: l.slots}, nil
}

// limitConn gives its slot back once.
type limitConn struct {
	net.Conn
	slots chan struct{}
	once  sync.Once
}

// Close implements net.Conn.
func (c *limitConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { <-c.slots })
	return err
}
