package load

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mockllm"
)

// fake is a server with the contract's session routes and a limit of turns.
type fake struct {
	t     *testing.T
	url   string
	ttft  time.Duration
	total time.Duration
	limit int    // turns at a time, 0 = no limit
	retry string // Retry-After of a rejection, "" leaves it out
	// misbehave, when set, answers a turn in place of the normal stream.
	misbehave func(w http.ResponseWriter, r *http.Request)

	mu       sync.Mutex
	sessions map[string]bool // open
	created  int
	deleted  int
	active   int
	turns    int
	refused  map[string]time.Time // when a session was last rejected
	tooSoon  int                  // retries before Retry-After had passed
	auth     string               // the last Authorization header
}

func newFake(t *testing.T, f *fake) *fake {
	t.Helper()
	f.t, f.sessions, f.refused = t, map[string]bool{}, map[string]time.Time{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sessions", f.create)
	mux.HandleFunc("POST /v1/sessions/{id}/turns", f.turn)
	mux.HandleFunc("DELETE /v1/sessions/{id}", f.remove)
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	f.url = srv.URL
	return f
}

func (f *fake) create(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.created++
	f.auth = r.Header.Get("Authorization")
	id := "s" + strconv.Itoa(f.created)
	f.sessions[id] = true
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, `{"id":%q,"agent":"x"}`, id)
}

func (f *fake) remove(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sessions[r.PathValue("id")] {
		http.Error(w, "unknown", http.StatusNotFound)
		return
	}
	delete(f.sessions, r.PathValue("id"))
	f.deleted++
	w.WriteHeader(http.StatusNoContent)
}

// admit reports the status that a turn is refused with, 0 for none.
func (f *fake) admit(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sessions[id] {
		return http.StatusNotFound
	}
	if wait, err := strconv.ParseFloat(f.retry, 64); err == nil {
		if at, ok := f.refused[id]; ok && time.Since(at) < time.Duration(wait*float64(time.Second)) {
			f.tooSoon++
		}
	}
	if f.limit > 0 && f.active >= f.limit {
		f.refused[id] = time.Now()
		return http.StatusTooManyRequests
	}
	delete(f.refused, id)
	f.active++
	f.turns++
	return 0
}

func (f *fake) turn(w http.ResponseWriter, r *http.Request) {
	if code := f.admit(r.PathValue("id")); code != 0 {
		if code == http.StatusTooManyRequests && f.retry != "" {
			w.Header().Set("Retry-After", f.retry)
		}
		http.Error(w, `{"error":{"code":"refused"}}`, code)
		return
	}
	leave := sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.active--
	})
	defer leave()
	if f.misbehave != nil {
		f.misbehave(w, r)
		return
	}
	began := time.Now()
	wait := func(until time.Duration) { <-time.NewTimer(until - time.Since(began)).C }
	say := func(event string) {
		_, _ = io.WriteString(w, event)
		w.(http.Flusher).Flush()
	}
	w.Header().Set("Content-Type", "text/event-stream")
	say("id: 1.0\nevent: turn.started\ndata: {}\n\n: heartbeat\n\n")
	wait(f.ttft)
	say("event: message.delta\ndata: {\"text\":\"hi\"}\n\n")
	wait(f.total)
	leave() // before the client can know of the end: it may ask again at once
	say("id: 2.0\nevent: turn.completed\ndata: {}\n\n")
}

// upstream runs a mock provider and returns its base URL.
func upstream(t *testing.T, cfg mockllm.Config) string {
	t.Helper()
	m, err := mockllm.New(cfg, env.Real())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = m.Serve(l) }()
	t.Cleanup(func() { _ = m.Close() })
	return "http://" + l.Addr().String() + "/v1"
}

// output is a writer that many goroutines may use.
type output struct {
	mu sync.Mutex
	b  strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}
