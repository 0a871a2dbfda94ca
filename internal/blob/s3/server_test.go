package s3_test

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob/s3"
	"github.com/perdure-dev/perdure/internal/env"
)

// serve starts a server that answers with handle and counts its requests.
func serve(tb testing.TB, handle http.HandlerFunc) (endpoint string, requests *atomic.Int32) {
	requests = &atomic.Int32{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		handle(w, r)
	}))
	tb.Cleanup(server.Close)
	return server.URL, requests
}

// refuse answers like S3.
func refuse(w http.ResponseWriter, status int, code, more string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>words of the store</Message>%s</Error>`, code, more)
}

// reset breaks the client's connection.
func reset(w http.ResponseWriter) {
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// hasty is the system's clock with timers that end early.
type hasty struct {
	env.SystemClock
	factor time.Duration
}

func (c hasty) AfterFunc(d time.Duration, f func()) env.Timer {
	return c.SystemClock.AfterFunc(d/c.factor, f)
}

// fuse is the system's clock with timers that end when it burns, which passes a
// minute.
type fuse struct {
	env.SystemClock
	mu      sync.Mutex // guards all below
	pending []func()
	burnt   time.Duration
}

func (c *fuse) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.SystemClock.Now().Add(c.burnt)
}

func (c *fuse) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending = append(c.pending, f)
	return c.SystemClock.AfterFunc(d*1000, func() {})
}

func (c *fuse) burn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.burnt += time.Minute
	for _, f := range c.pending {
		f()
	}
	c.pending = nil
}

// patient has no timeouts to speak of, and hardly a pause before it tries again.
func patient(c *s3.Config) { c.Clock, c.Timeout = hasty{factor: 1000}, 10*time.Hour }

// unfit is an S3 server with an own idea of conditions.
type unfit struct {
	mu      sync.Mutex
	objects map[string][]byte
	refuses func(r *http.Request, object []byte, exists bool) bool
}

func etag(data []byte) string {
	sum := md5.Sum(data)
	return `"` + hex.EncodeToString(sum[:]) + `"`
}

func (u *unfit) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	u.mu.Lock()
	defer u.mu.Unlock()
	object, exists := u.objects[r.URL.Path]
	switch r.Method {
	case http.MethodGet:
		if !exists {
			refuse(w, http.StatusNotFound, "NoSuchKey", "")
			return
		}
		w.Header().Set("Etag", etag(object))
		_, _ = w.Write(object)
	case http.MethodDelete:
		delete(u.objects, r.URL.Path)
		w.WriteHeader(http.StatusNoContent)
	case http.MethodPut:
		if u.refuses(r, object, exists) {
			refuse(w, http.StatusPreconditionFailed, "PreconditionFailed", "")
			return
		}
		u.objects[r.URL.Path] = bytes.Clone(body)
		w.Header().Set("Etag", etag(body))
	}
}

// dialTo connects to addr whatever is asked for.
type dialTo string

func (a dialTo) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return env.Real().Dialer.DialContext(ctx, network, string(a))
}

func with[T any](v T, change func(*T)) T {
	change(&v)
	return v
}
