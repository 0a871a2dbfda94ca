// Package s3proxy stands between nodes and an S3 server in tests: it adds the
// latency and the faults of a store that is far away. Signatures stay valid,
// since it changes nothing of a request, its Host header included.
package s3proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// Rules are what becomes of requests. Percents are drawn for each request, one
// draw for all: together they may be 100.
type Rules struct {
	Latency blob.Latencies // a half before the store is asked, a half after it answered

	SlowDown   int // percent answered 503 SlowDown; the store does not hear of them
	Lost       int // percent whose connection is reset; the store does not hear of them
	AnswerLost int // percent that the store does, then the connection is reset
	Late       int // percent whose connection is reset, and that the store does LateBy later
	LateBy     time.Duration
	// WritesOnly spares GET and HEAD the faults.
	WritesOnly bool
}

// Stats counts requests since the start.
type Stats struct {
	Requests                           uint64 // that reached the proxy
	SlowDowns, Lost, AnswersLost, Late uint64 // by what Rules did to them
	Held                               uint64 // that came while it held
}

// Options say where the proxy is.
type Options struct {
	Listen string // host:port; "" is a free port of the loopback
	Target string // http://host:port of the store
	Clock  env.Clock
	Rand   env.Rand
}

// Proxy is running. Safe for concurrent use.
type Proxy struct {
	opts      Options
	target    *url.URL
	listener  net.Listener
	server    *http.Server
	transport *http.Transport
	sleep     func(context.Context, time.Duration) error
	closed    context.Context // ends at Close, under mu
	shut      func()
	running   sync.WaitGroup // the server, and late writes

	mu    sync.Mutex // guards all below
	rules Rules
	stats Stats
	conns map[net.Conn]bool
	cut   bool
	held  chan struct{} // not nil while it holds; closed at its end
}

// Start runs a proxy without faults. The caller closes it.
func Start(opts Options) (*Proxy, error) {
	target, err := url.Parse(opts.Target)
	if err != nil || target.Host == "" {
		return nil, fmt.Errorf("s3proxy: target %q: want http://host:port", opts.Target)
	}
	if opts.Listen == "" {
		opts.Listen = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", opts.Listen)
	if err != nil {
		return nil, fmt.Errorf("s3proxy: %w", err)
	}
	p := &Proxy{
		opts: opts, target: target, listener: listener,
		transport: &http.Transport{MaxIdleConnsPerHost: blob.MaxList, DisableCompression: true},
		sleep:     blob.SleepBy(opts.Clock), conns: map[net.Conn]bool{},
	}
	p.closed, p.shut = context.WithCancel(context.Background())
	p.server = &http.Server{Handler: p, ConnState: p.connState, ReadHeaderTimeout: time.Minute}
	p.running.Go(func() { _ = p.server.Serve(listener) }) // until Close
	return p, nil
}

// URL is the endpoint for clients.
func (p *Proxy) URL() string { return "http://" + p.listener.Addr().String() }

// Set changes the rules for requests that come from now on.
func (p *Proxy) Set(r Rules) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = r
}

// Stats is a snapshot.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

// Cut resets all connections, and new ones as soon as they are made, until Heal.
// What the store is doing, it does.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	for c := range p.conns {
		reset(c)
	}
}

// Hold lets nothing through in either direction until Heal, as a network does
// that drops packets: no answer, no error. Requests whose clients have given up
// by then never reach the store.
func (p *Proxy) Hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(chan struct{})
	}
}

// Heal ends Cut and Hold.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
	if p.held != nil {
		close(p.held)
		p.held = nil
	}
}

// Close ends all connections and waits. Late writes that are not done yet are
// lost.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.shut()
	p.mu.Unlock()
	p.Heal()
	_ = p.server.Close()
	p.running.Wait()
	p.transport.CloseIdleConnections()
}

// connState keeps count of the connections.
func (p *Proxy) connState(c net.Conn, s http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch s {
	case http.StateNew:
		if p.cut {
			reset(c)
			return
		}
		p.conns[c] = true
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	}
}

// reset closes c so that the peer sees a reset.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// fate is what becomes of one request.
type fate struct {
	slowDown, lost, answerLost, late bool
	lateBy, before, after            time.Duration
}

// draw decides about r, by the same number of draws for each.
func (p *Proxy) draw(r *http.Request) fate {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Requests++
	rules := &p.rules
	delay := rules.Latency[kindOf(r)].Draw(p.opts.Rand)
	roll := int(p.opts.Rand.Uint64() % 100)
	f := fate{lateBy: rules.LateBy, before: delay / 2, after: delay - delay/2}
	if rules.WritesOnly && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		return f
	}
	limit := 0
	for _, c := range []struct {
		percent int
		fate    *bool
		count   *uint64
	}{
		{rules.SlowDown, &f.slowDown, &p.stats.SlowDowns},
		{rules.Lost, &f.lost, &p.stats.Lost},
		{rules.AnswerLost, &f.answerLost, &p.stats.AnswersLost},
		{rules.Late, &f.late, &p.stats.Late},
	} {
		if limit += c.percent; roll < limit {
			*c.fate = true
			*c.count++
			break
		}
	}
	return f
}

func kindOf(r *http.Request) blob.Kind {
	switch {
	case r.Method == http.MethodPut || r.Method == http.MethodPost:
		return blob.KindPut
	case r.Method == http.MethodDelete:
		return blob.KindDelete
	case r.URL.Query().Has("list-type"):
		return blob.KindList
	}
	return blob.KindGet
}

const slowDown = `<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>`

// ServeHTTP implements http.Handler. Having read all of the body, it notices
// when the client gives up.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, blob.MaxObjectSize))
	if err != nil {
		hangUp(w)
		return
	}
	f := p.draw(r)
	if p.sleep(r.Context(), f.before) != nil || !p.pass(r.Context()) || f.lost {
		hangUp(w)
		return
	}
	switch {
	case f.slowDown:
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, slowDown) // the client may be gone
		return
	case f.late:
		p.later(r, body, f.lateBy)
		hangUp(w)
		return
	}
	resp, err := p.ask(r.Context(), r, body)
	if err != nil {
		hangUp(w)
		return
	}
	defer resp.Body.Close()
	if p.sleep(r.Context(), f.after) != nil || f.answerLost || !p.pass(r.Context()) {
		hangUp(w)
		return
	}
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body) // a short one shows in its length
}

// pass waits while the proxy holds. false: the client has given up.
func (p *Proxy) pass(ctx context.Context) bool {
	p.mu.Lock()
	held := p.held
	if held != nil {
		p.stats.Held++
	}
	p.mu.Unlock()
	if held == nil {
		return ctx.Err() == nil
	}
	select {
	case <-held:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// later does the request after the client was told that its connection broke.
func (p *Proxy) later(r *http.Request, body []byte, by time.Duration) {
	r = r.Clone(p.closed)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Err() != nil {
		return
	}
	p.running.Go(func() {
		if p.sleep(p.closed, by) != nil || !p.pass(p.closed) {
			return
		}
		if resp, err := p.ask(p.closed, r, body); err == nil {
			_ = resp.Body.Close()
		}
	})
}

// ask sends the request to the store.
func (p *Proxy) ask(ctx context.Context, r *http.Request, body []byte) (*http.Response, error) {
	out := r.Clone(ctx)
	out.RequestURI, out.Host = "", r.Host
	out.URL.Scheme, out.URL.Host = p.target.Scheme, p.target.Host
	out.Body, out.ContentLength = http.NoBody, int64(len(body))
	if len(body) > 0 {
		out.Body = io.NopCloser(bytes.NewReader(body))
		// Used only when nothing has left on a connection that the store closed.
		out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	}
	resp, err := p.transport.RoundTrip(out)
	if err != nil {
		return nil, fmt.Errorf("s3proxy: %w", err)
	}
	return resp, nil
}

// hangUp resets the client's connection.
func hangUp(w http.ResponseWriter) {
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // closes it
	}
	reset(c)
}
