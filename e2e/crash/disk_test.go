//go:build e2e

package crash

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// smallDisk mounts a file system of a fixed size and gives its folder and a
// function that grows it.
func smallDisk(t *testing.T, megabytes int) (dir string, grow func(megabytes int)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may mount a small file system")
	}
	dir = t.TempDir()
	size := func(mb int) string { return fmt.Sprintf("size=%dm", mb) }
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, size(megabytes)); err != nil {
		t.Skipf("mounting a tmpfs is not permitted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir, func(mb int) {
		t.Helper()
		if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, size(mb)); err != nil {
			t.Fatalf("grow the file system: %v", err)
		}
	}
}

// TestFullDisk fills the disk under a server: it says so or ends, and never
// acknowledges what it could not keep. With room again, a restart has
// everything.
func TestFullDisk(t *testing.T) {
	dir, grow := smallDisk(t, 24)
	model := mockModel(t, "MOCK_TTFT_MS=2", "MOCK_TPS=0", "MOCK_TOKENS=4")
	srv := newTarget(t, dir, config(model, "", "journal: {segment_bytes: 4MiB}\n"))
	srv.mustStart()
	a, l := newAPI(srv.url()), newLedger()
	fillDisk(t, srv, a, l)
	turns := l.counts["turn acked"]
	if turns == 0 {
		t.Fatalf("no turn was acknowledged; the log ends:\n%s", srv.log)
	}
	if code, err := srv.exit(5 * time.Second); err == nil {
		t.Logf("after %d turns the server ended with code %d: %s", turns, code, srv.log.line("stopping"))
		if code <= 0 || !strings.Contains(srv.log.String(), "no space left on device") {
			t.Errorf("it ended with code %d and does not say that the disk is full:\n%s", code, srv.log)
		}
	} else {
		t.Logf("after %d turns the server goes on without room", turns)
		if said := srv.log.line("panic"); said != "" {
			t.Errorf("the server panicked: %s", said)
		}
		srv.kill()
	}
	stillFull(t, srv)
	grow(64)
	recovers(t, srv, l, a)
}

// fillDisk sends long turns until the server has refused some, or is gone.
func fillDisk(t *testing.T, srv *target, a *api, l *ledger) {
	t.Helper()
	r := recordedSession(t, a, l, "full-0")
	for i, refusals := 0, 0; i < 2000 && refusals < 10 && !srv.gone(); i++ {
		if i > 0 && i%10 == 0 && refusals == 0 { // a long conversation would only be slow
			next := newRecord(l, fmt.Sprintf("full-%d", i), "plain")
			l.add(next)
			o := next.begin(&op{kind: opCreate})
			ans, err := a.call(http.MethodPost, "/v1/sessions", "", map[string]any{"id": next.id, "agent": "plain"})
			if err == nil && ans.status == http.StatusCreated {
				next.end(o, acked, "", "")
				r = next
			}
		}
		// Noise, so that compression does not make room.
		text := fmt.Sprintf("text %d %s", i, noise(uint64(i), 100<<10))
		o := r.begin(&op{kind: opTurn, key: fmt.Sprint("key ", i), text: text, policy: "enqueue"})
		ans, err := a.call(http.MethodPost, "/v1/sessions/"+r.id+"/turns", o.key, map[string]any{"input": text, "on_busy": o.policy})
		switch {
		case errors.Is(err, errUnsent):
			r.end(o, unsent, "", "")
			return
		case err == nil && ans.status == http.StatusOK:
			r.end(o, acked, turnOf(t, ans), "")
			if !strings.Contains(string(ans.body), `"status":"completed"`) {
				t.Errorf("turn %d: %.300s", i, ans)
			}
			continue
		case err == nil && ans.status < 500:
			t.Errorf("the answer on a full disk is %s", ans)
		}
		if refusals == 0 {
			t.Logf("turn %d on a full disk: %v, %v", i, ans, err)
		}
		refusals++
	}
}

// stillFull: a start on a full disk ends with an error that says so, or serves
// what is there; it breaks nothing.
func stillFull(t *testing.T, srv *target) {
	t.Helper()
	srv.start()
	err := srv.ready()
	if err == nil {
		t.Log("a server starts on the full disk")
		time.Sleep(200 * time.Millisecond) // it may try to go on with what is open
		if !srv.gone() {
			srv.kill()
		}
		return
	}
	if !srv.gone() {
		t.Fatal(err)
	}
	t.Logf("a start on the full disk ends with code %d: %s", srv.cmd.ProcessState.ExitCode(), srv.log.line("perdure: "))
	if !strings.Contains(srv.log.String(), "no space left on device") {
		t.Errorf("it does not say that the disk is full:\n%s", srv.log)
	}
}

// noise is text that hardly compresses, different for each seed.
func noise(seed uint64, n int) string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	b := make([]byte, n)
	x := seed*0x9e3779b97f4a7c15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = letters[x>>58]
	}
	return string(b)
}
