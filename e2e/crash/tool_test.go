//go:build e2e

package crash

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// toolCall is the requests that came with one idempotency key.
type toolCall struct {
	run   string
	exec  uint64
	args  string
	count int
}

// toolServer is the tool that agents call: it notes each key, is slow at
// random, and fails at times.
type toolServer struct {
	*httptest.Server
	fail func(format string, args ...any)

	mu    sync.Mutex
	calls map[string]*toolCall
	rng   *rand.Rand
}

const (
	toolArgs    = `{"q":"what"}`
	toolSlow    = 80 * time.Millisecond
	toolFailing = 12 // one of so many answers is 503
)

func newToolServer(t *testing.T, seed uint64, fail func(format string, args ...any)) *toolServer {
	s := &toolServer{fail: fail, calls: map[string]*toolCall{}, rng: rand.New(rand.NewPCG(seed, 0x7001))}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(s.Close)
	return s
}

func (s *toolServer) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller was killed
	}
	slow, fails := s.note(r.Header.Get("Idempotency-Key"), string(body))
	select {
	case <-time.After(slow):
	case <-r.Context().Done():
		return
	}
	if fails {
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, `{"found":"it"}`) // the caller may be gone
}

func (s *toolServer) note(key, args string) (slow time.Duration, fails bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.calls[key]
	if c == nil {
		c = &toolCall{args: args}
		at := strings.LastIndexByte(key, '-')
		var err error
		if at > 0 {
			c.run = key[:at]
			c.exec, err = strconv.ParseUint(key[at+1:], 10, 64)
		}
		if at <= 0 || err != nil {
			s.fail("the tool was called with the idempotency key %q", key)
		}
		s.calls[key] = c
	}
	c.count++
	if c.args != args || args != toolArgs {
		s.fail("the tool was called with key %s for %s, and before for %s; the model said %s", key, args, c.args, toolArgs)
	}
	return time.Duration(s.rng.Int64N(int64(toolSlow))), s.rng.IntN(toolFailing) == 0
}

// snapshot copies what is known.
func (s *toolServer) snapshot() map[string]*toolCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]*toolCall, len(s.calls))
	for k, c := range s.calls {
		copied := *c
		out[k] = &copied
	}
	return out
}

func (s *toolServer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	again := 0
	for _, c := range s.calls {
		again += c.count - 1
	}
	return fmt.Sprintf("%d keys, %d requests again", len(s.calls), again)
}
