// Package httpapi is the HTTP face of Perdure: a stateless encoder of the verbs
// of package session, in a native form and in OpenAI's. It keeps nothing between
// requests; whatever a client is told comes from the
// session's log. api/openapi.json describes it.
package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/session"
)

// LogReader reads one of the server's logs.
type LogReader interface {
	// Tail gives at most limit records of a tenant after a cursor ("" = from
	// the oldest kept), oldest first, and the cursor to go on from.
	Tail(ctx context.Context, tenant, after string, limit int) (records []json.RawMessage, next string, err error)
}

// AccessRecord is one request, told when its answer has ended.
type AccessRecord struct {
	At        time.Time
	RequestID string
	Tenant    string // empty when the caller was not known
	Method    string
	Route     string // the pattern, such as /v1/sessions/{session_id}; empty for an unknown path
	Status    int    // 499: the client left before the answer was there
	Bytes     int64  // of the answer's body
	Duration  time.Duration
	TTFB      time.Duration // to the first byte of the answer; 0 when there was none
	Session   string
	Turn      string
	Remote    string // address of the client's end of the connection
	Closed    string // why a stream ended before its end: client_gone, stalled, slow_reader, draining or error
}

// Config makes an API. Service, Limits, Clock, Rand and Logger are required.
type Config struct {
	Service *session.Service
	Auth    config.Auth
	Limits  config.Limits
	Clock   env.Clock
	Rand    env.Rand
	Logger  *slog.Logger
	Version string

	// Requests bounds the requests being served. Nil: by Limits.MaxRequests.
	Requests *admit.Limiter
	// Metrics serves /metrics. Nil: 404.
	Metrics http.Handler
	// Ready says why the server cannot serve now. Nil: always ready.
	Ready func() error
	// AccessLog is told of each request on the request's goroutine. It must not
	// block. May be nil.
	AccessLog func(AccessRecord)
	// AccessReader and EventReader serve /v1/access-log and /v1/events. Nil: 404.
	AccessReader LogReader
	EventReader  LogReader
	// LocalOnly refuses requests whose Host is neither localhost nor an IP
	// address, so that a web page cannot reach a server without keys by a name
	// that it lets point to loopback. Set it when the server binds to loopback
	// and has no keys.
	LocalOnly bool
}

// API is the http.Handler of the whole API. Safe for concurrent use.
type API struct {
	cfg      Config
	svc      *session.Service
	router   *router
	requests *admit.Limiter
	origin   *http.CrossOriginProtection
	started  int64 // unix seconds
	landed   []byte

	lines    *lines
	patience time.Duration

	mu       sync.Mutex
	draining bool                // guarded by mu
	watching map[*relay]struct{} // guarded by mu; streams that end only with their client
}

// New makes the handler. Serve it with an http.Server whose ReadHeaderTimeout,
// IdleTimeout and MaxHeaderBytes are those of Limits and whose ReadTimeout and
// WriteTimeout are 0: bodies and streams have deadlines of their own.
func New(cfg Config) *API {
	a := &API{
		cfg: cfg, svc: cfg.Service, router: newRouter(routes), requests: cfg.Requests,
		origin: http.NewCrossOriginProtection(), started: cfg.Clock.Now().Unix(), watching: map[*relay]struct{}{},
		lines: newLines(), patience: patience,
	}
	if a.requests == nil {
		a.requests = admit.NewLimiter(cfg.Limits.MaxRequests)
	}
	a.landed = a.landingPage()
	return a
}

// Drain ends the streams that follow a whole session, with their cursor, and
// refuses new turns and sessions from now on. Turns that run go on, and so do
// the answers that wait for them.
func (a *API) Drain() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.draining = true
	for r := range a.watching {
		r.stop(errDraining)
	}
}

func (a *API) isDraining() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.draining
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{api: a, w: w, r: r, rc: http.NewResponseController(w), method: r.Method, remote: r.RemoteAddr, start: a.cfg.Clock.Now()}
	c.id = a.requestID(r)
	taken := false
	defer func() {
		if v := recover(); !taken {
			a.finish(c, v)
		}
	}()
	_ = c.rc.SetWriteDeadline(time.Time{}) // the last request of this connection may have left one
	if r.ContentLength != 0 {
		_ = c.rc.SetReadDeadline(c.start.Add(a.cfg.Limits.ReadBodyTimeout))
	}
	w.Header()["X-Request-Id"] = []string{c.id}
	err := a.serve(c)
	if taken = errors.Is(err, errTaken); err != nil && !taken {
		c.refuse(err)
	}
}

func (a *API) serve(c *call) (err error) {
	found, near, params := a.router.find(c.r.Method, c.r.URL.Path)
	if found == nil {
		return a.lost(c, near)
	}
	c.route, c.params = found, params
	if found.flags&free == 0 {
		if !a.requests.TryAcquire() {
			return errTooManyRequests
		}
		defer func() {
			if !errors.Is(err, errTaken) {
				a.requests.Release()
			}
		}()
	}
	if a.cfg.LocalOnly && !isLocal(c.r.Host) {
		return errHost
	}
	if err := a.origin.Check(c.r); err != nil {
		return errCrossOrigin
	}
	if found.flags&open == 0 {
		if err := a.authenticate(c); err != nil {
			return err
		}
	}
	if found.flags&loose == 0 && c.r.URL.RawQuery != "" {
		if err := c.readQuery(); err != nil {
			return err
		}
	}
	if found.flags&starts != 0 && a.isDraining() {
		return errDraining
	}
	return found.handle(a, c)
}

// lost answers a request that no route takes.
func (a *API) lost(c *call, near *route) error {
	if near == nil {
		return &refusal{status: http.StatusNotFound, code: "unknown_path", message: fmt.Sprintf("there is nothing at %.200q", c.r.URL.Path), hint: overview()}
	}
	c.route = near
	allow := a.router.allowed(near)
	c.w.Header()["Allow"] = []string{allow}
	return &refusal{status: http.StatusMethodNotAllowed, code: "method_not_allowed",
		message: fmt.Sprintf("%.20s is not for %s", c.r.Method, near.pattern), hint: "allowed: " + allow}
}

// finish ends every request: what panicked becomes an error with an ID, and
// the access log gets its record.
func (a *API) finish(c *call, v any) {
	if v != nil && v != http.ErrAbortHandler { //nolint:errorlint // the value itself, as net/http compares it
		c.panicked(v)
		if c.status == 0 {
			c.refuse(internalError(c.id))
			v = nil
		}
	}
	a.tell(c)
	if v != nil {
		panic(http.ErrAbortHandler) // breaks the connection, so that the client sees that its answer is not whole
	}
}

func (c *call) panicked(v any) {
	c.api.cfg.Logger.Error("request panicked", "request_id", c.id, "route", c.pattern(), "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
}

// tell gives the access log its record.
func (a *API) tell(c *call) {
	if a.cfg.AccessLog != nil {
		a.cfg.AccessLog(c.record())
	}
}

func internalError(id string) *refusal {
	return &refusal{status: http.StatusInternalServerError, code: "internal", message: "the server made a mistake; its log has it under " + id,
		hint: "report it with the log's lines of this ID"}
}

const maxRequestID = 64

// requestID is the client's own, if it is a plain one, else a new one.
func (a *API) requestID(r *http.Request) string {
	if v := r.Header["X-Request-Id"]; len(v) == 1 && isPlain(v[0], maxRequestID) {
		return v[0]
	}
	var b [20]byte
	id := append(b[:0], "req_"...)
	n := a.cfg.Rand.Uint64()
	for shift := 60; shift >= 0; shift -= 4 {
		id = append(id, "0123456789abcdef"[n>>shift&15])
	}
	return string(id)
}

// isPlain reports whether s has 1 to bound characters of A-Z a-z 0-9 _ . -
func isPlain(s string, bound int) bool {
	if s == "" || len(s) > bound {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-') {
			return false
		}
	}
	return true
}

// retryAfter is the header's value: whole seconds, at least one.
func retryAfter(d time.Duration) string {
	return strconv.FormatInt(max(1, int64((d+time.Second-1)/time.Second)), 10)
}
