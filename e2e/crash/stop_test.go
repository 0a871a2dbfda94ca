//go:build e2e

package crash

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// TestStoppedProcess stops the whole process in the middle of turns and lets
// it go on: streams go on where they were, no client sees an error, and no turn
// fails, for nothing was wrong but the clock.
func TestStoppedProcess(t *testing.T) {
	l := newLedger()
	seed := fromEnv(t, "PERDURE_CRASH_SEED", uint64(time.Now().UnixNano()))
	tools := newToolServer(t, seed, func(format string, args ...any) { l.fail(nil, format, args...) })
	model := mockModel(t, "MOCK_TTFT_MS=20", "MOCK_TPS=100", "MOCK_TOKENS=10", "MOCK_TOOL=*", "MOCK_TOOL_ARGS="+toolArgs)
	// A stop longer than the provider's silence would count as such.
	srv := newTarget(t, t.TempDir(), configWith(model, tools.URL, 30*time.Second))
	srv.mustStart()
	k := &loop{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 2)), l: l, srv: srv, model: model, tools: tools, load: newLoad(l, srv.url(), seed)}
	k.load.run(loopClients)
	for range 5 {
		k.sleep(100*time.Millisecond, 400*time.Millisecond)
		srv.signal(syscall.SIGSTOP)
		k.sleep(100*time.Millisecond, 900*time.Millisecond)
		srv.signal(syscall.SIGCONT)
		k.verdict()
	}
	k.sleep(300*time.Millisecond, 600*time.Millisecond)
	k.settle()
	defer k.before.close()
	for _, r := range l.all() {
		if failed := r.failedTurn(); failed != "" {
			t.Errorf("session %s: a turn failed: %s", r.id, failed)
		}
	}
	for what, n := range l.counts {
		if n > 0 && (what == fmt.Sprintf("%s %s", opTurn, doubt) || what == fmt.Sprintf("%s %s", opTurn, unsent)) {
			t.Errorf("%d of %q, and the server was only stopped", n, what)
		}
	}
	t.Logf("seed %d: %s", seed, l.summary())
}

// failedTurn gives the end of a turn that failed, or "".
func (r *record) failedTurn() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.ended {
		if raw := r.seen[id]; len(raw) > 0 && eventOf(raw) == "turn.failed" {
			return raw
		}
	}
	return ""
}
