package server

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// termPath is a request that the active process answers when it is about to resign:
// one that stands by then looks at the store often, and needs not wait for its next
// look. It says nothing that the connection's end would not.
const termPath = "/cluster/term"

const (
	maxTermWatchers = 64
	watchRetry      = time.Second
)

// term tells those who watch that this process is about to resign.
type term struct {
	ending   chan struct{}
	once     sync.Once
	watchers atomic.Int32
}

func newTerm() *term { return &term{ending: make(chan struct{})} }

func (t *term) end() { t.once.Do(func() { close(t.ending) }) }

// over serves termPath before next.
func (t *term) over(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != termPath {
			next.ServeHTTP(w, r)
			return
		}
		defer t.watchers.Add(-1)
		if t.watchers.Add(1) > maxTermWatchers {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		select {
		case <-t.ending:
			w.WriteHeader(http.StatusNoContent)
		case <-r.Context().Done():
		}
	})
}

// watchTermOf waits for the end of the term of the process that address names, again
// and again, and pokes hurry each time.
func watchTermOf(ctx context.Context, e env.Env, address func() string, hurry chan<- struct{}) {
	for ctx.Err() == nil {
		if to := address(); to != "" && termOf(ctx, e.Dialer, to) && ctx.Err() == nil {
			select {
			case hurry <- struct{}{}:
			default:
			}
		}
		rest := make(chan struct{})
		t := e.Clock.AfterFunc(watchRetry, func() { close(rest) })
		select {
		case <-rest:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

// termOf asks and waits for the answer, or the connection's end; false: it could not
// ask.
func termOf(ctx context.Context, d env.Dialer, address string) bool {
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	defer c.Close() //nolint:errcheck // nothing is lost
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err := io.WriteString(c, "GET "+termPath+" HTTP/1.1\r\nHost: "+address+"\r\nConnection: close\r\n\r\n"); err != nil {
		return false
	}
	_, _ = c.Read(make([]byte, 1)) // whatever comes
	return true
}
