//go:build e2e

package flows

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
)

// What makes this binary a worker instead of a test.
const (
	envAddress = "E2E_WORKER_ADDRESS"
	envLedger  = "E2E_WORKER_LEDGER"
	envKey     = "E2E_WORKER_KEY"
	envRoom    = "E2E_WORKER_CONCURRENCY"
	envFlows   = "E2E_WORKER_FLOWS" // names with commas between; empty = all
)

func TestMain(m *testing.M) {
	if address := os.Getenv(envAddress); address != "" {
		if err := work(address); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// work is the worker process: it runs the program's flows until SIGTERM.
func work(address string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	room, err := strconv.Atoi(os.Getenv(envRoom))
	if err != nil {
		return err
	}
	if err := book.open(os.Getenv(envLedger)); err != nil {
		return err
	}
	mine := program
	if names := os.Getenv(envFlows); names != "" {
		mine = nil
		for _, f := range program {
			if slices.Contains(strings.Split(names, ","), f.Name()) {
				mine = append(mine, f)
			}
		}
	}
	w, err := flow.NewWorker(flow.WorkerOptions{Address: address, Key: os.Getenv(envKey), Concurrency: room,
		ID: fmt.Sprintf("e2e-%d", os.Getpid()), Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), DrainTimeout: 10 * time.Second}, mine...)
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

// workers starts worker processes whose ledgers lie in one folder.
type workers struct {
	t    *testing.T
	addr string
	key  string
	room int
	dir  string
	next int
}

func newWorkers(t *testing.T, s *target) *workers {
	return &workers{t: t, addr: s.addr, dir: t.TempDir(), room: 64}
}

// start runs one more worker, of these flows or of all. It is killed at the
// test's end.
func (w *workers) start(flows ...string) *process {
	w.t.Helper()
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	w.next++
	p, err := launch(environ(envFlows+"="+strings.Join(flows, ","), envAddress+"="+w.addr, envKey+"="+w.key, envRoom+"="+strconv.Itoa(w.room),
		envLedger+"="+filepath.Join(w.dir, fmt.Sprintf("%04d.jsonl", w.next))), self)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if !p.over() {
			p.kill()
		}
		if w.t.Failed() {
			w.t.Logf("the log of worker %d ends:\n%s", p.cmd.Process.Pid, lastLines(p.log.String(), 2000))
		}
	})
	return p
}

func lastLines(s string, n int) string { return s[max(0, len(s)-n):] }

// deed is one line of a ledger: a handler was called, and did something outside
// that a crash does not take back.
type deed struct {
	Key     string   `json:"key"`     // the idempotency key
	Attempt int      `json:"attempt"` // 1 for the first hand-out
	Flow    string   `json:"flow"`
	Type    string   `json:"type"`
	Step    string   `json:"step"`
	Async   bool     `json:"async,omitempty"`
	Took    []string `json:"took,omitempty"` // messages that the step consumed
}

// ledger is where the handlers of this process write their deeds.
type ledger struct{ f *os.File }

var book ledger

func (l *ledger) open(path string) (err error) {
	l.f, err = os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return err
}

// write appends in one call, so that a kill leaves whole lines, but for the last.
func (l *ledger) write(d deed) {
	b, err := json.Marshal(d)
	if err == nil {
		_, err = l.f.Write(append(b, '\n'))
	}
	if err != nil {
		panic(err) // of a test's own file
	}
}

// deeds reads all ledgers, in the order of the workers' starts.
func (w *workers) deeds() []deed {
	w.t.Helper()
	files, err := filepath.Glob(filepath.Join(w.dir, "*.jsonl"))
	if err != nil {
		w.t.Fatal(err)
	}
	var all []deed
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			w.t.Fatal(err)
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			var d deed
			if json.Unmarshal(lines.Bytes(), &d) == nil { // else the kill cut it
				all = append(all, d)
			}
		}
		_ = f.Close()
	}
	return all
}
