//go:build e2e

// Package flows drives users' flows from outside, as an installation has them:
// the real binary as server, workers that are processes of their own (this test
// binary, started again) and clients over the network. It kills and stops them at
// any moment, sends what no good program sends, and compares what clients were
// told with what the server knows afterwards.
//
// PERDURE_BIN names the binary; `make e2e` builds it and sets that.
// PERDURE_FLOWS_ROUNDS and PERDURE_FLOWS_SEED steer the kill loop.
package flows

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
)

// patience bounds each wait for something that must come.
const patience = 30 * time.Second

func binary(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("PERDURE_BIN")
	if bin == "" {
		t.Fatal("PERDURE_BIN is not set: run `make e2e`, or build the binary and set it to its path")
	}
	return bin
}

// eventually looks again and again until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("did not come within %v: %s", patience, what)
		}
	}
}

// freeAddress gives a loopback address that was free a moment ago; a restarted
// server must come back where its clients look for it.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// tail keeps the newest bytes of a log.
type tail struct {
	mu sync.Mutex
	b  []byte // guarded by mu
}

const tailBytes = 64 << 10

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if over := len(l.b) - tailBytes; over > 0 {
		l.b = append(l.b[:0], l.b[over:]...)
	}
	return len(p), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b)
}

// process is one run of a program.
type process struct {
	cmd  *exec.Cmd
	log  *tail
	done chan struct{} // closed when it is over
}

// environ is the environment of a process: nothing of the tests' own that would
// change its settings.
func environ(extra ...string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.TempDir()}, extra...)
}

func launch(env []string, argv ...string) (*process, error) {
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), log: &tail{}, done: make(chan struct{})}
	p.cmd.Env = env
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // the code is in ProcessState
		close(p.done)
	}()
	return p, nil
}

func (p *process) over() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // it may be over

// kill is kill -9; it returns when the process is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// exit waits for the process to end by itself and gives its exit code.
func (p *process) exit(t *testing.T) int {
	t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatalf("the process did not end within %s; its log ends:\n%s", patience, p.log)
		return 0
	}
}

// target is a server at an address: its command line, and the process when it
// runs.
type target struct {
	t    *testing.T
	addr string
	data string
	argv []string
	env  []string
	*process
}

// newTarget prepares a server on a scratch folder. It is killed at the test's
// end; when that failed, the log is shown.
func newTarget(t *testing.T, config string, env ...string) *target {
	t.Helper()
	dir := t.TempDir()
	s := &target{t: t, addr: freeAddress(t), data: filepath.Join(dir, "data"), env: environ(env...)}
	conf := filepath.Join(dir, "perdure.yaml")
	if err := os.WriteFile(conf, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	s.argv = []string{binary(t), "serve", "--data", s.data, "--listen", s.addr, "--config", conf}
	t.Cleanup(func() {
		if s.process == nil {
			return
		}
		if !s.over() {
			s.kill()
		}
		if t.Failed() {
			t.Logf("the server's log ends:\n%s", s.log)
		}
	})
	return s
}

// start runs the server and waits until it is ready.
func (s *target) start() {
	s.t.Helper()
	if err := s.launch(); err != nil {
		s.t.Fatal(err)
	}
	if err := s.ready(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *target) launch() (err error) {
	s.process, err = launch(s.env, s.argv...)
	return err
}

func (s *target) url(path string) string { return "http://" + s.addr + path }

// ready waits until the server answers that it is.
func (s *target) ready() error {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if s.isReady() {
			return nil
		}
		if s.over() {
			return fmt.Errorf("the server ended while it started; its log ends:\n%s", s.log)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the server is not ready after %s; its log ends:\n%s", patience, s.log)
		}
	}
}

func (s *target) isReady() bool {
	resp, err := http.Get(s.url("/readyz"))
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// stop asks the server to end, as an init system does.
func (s *target) stop() {
	s.t.Helper()
	s.signal(syscall.SIGTERM)
	if code := s.exit(s.t); code != 0 {
		s.t.Fatalf("SIGTERM: exit code %d, want 0; the log ends:\n%s", code, s.log)
	}
}

// metric reads one metric without labels.
func (s *target) metric(name string) float64 {
	s.t.Helper()
	resp, err := http.Get(s.url("/metrics"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				s.t.Fatal(err)
			}
			return v
		}
	}
	s.t.Fatalf("there is no metric %s", name)
	return 0
}

// client connects to the server; the client ends with the test.
func (s *target) client(o client.Options) *client.Client {
	s.t.Helper()
	o.Address = s.addr
	c, err := client.Dial(within(s.t, patience), o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// within gives a context of the test that ends after d.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// command runs the binary to its end and gives what it said and its exit code.
func (s *target) command(env []string, args ...string) (stdout, stderr string, code int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(s.t), args...)
	cmd.Env = environ(append(env, "PERDURE_ADDRESS="+s.addr)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if ctx.Err() != nil || err != nil && !errors.As(err, &exit) {
		s.t.Fatalf("perdure %s: %v:\n%s%s", strings.Join(args, " "), err, &out, &errs)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
