//go:build e2e

// Package crash proves durability from outside: it runs the real binary as a
// process, kills it at any moment, fills its disk, stops its clock, counts its
// syncs, and compares what clients were told with what the disk holds.
//
// PERDURE_BIN names the binary; without it the test builds one.
// PERDURE_CRASH_ROUNDS and PERDURE_CRASH_SEED steer the kill loop.
package crash

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
)

// patience bounds each wait for something that must come.
const patience = 30 * time.Second

var built struct {
	once sync.Once
	path string
	err  error
}

// binary gives the program under test.
func binary(t *testing.T) string {
	t.Helper()
	if bin := os.Getenv("PERDURE_BIN"); bin != "" {
		return bin
	}
	built.once.Do(func() {
		dir, err := os.MkdirTemp("", "perdure-crash-bin-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "perdure")
		cmd := exec.Command("go", "build", "-o", built.path, "../../cmd/perdure")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if built.err != nil {
		t.Fatalf("build the program under test: %v", built.err)
	}
	return built.path
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

// process is one run of a program.
type process struct {
	cmd  *exec.Cmd
	pid  int
	log  *tail
	done chan struct{}
	err  error // of Wait, after done
}

// tail keeps the newest bytes of a log.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 32 << 10

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if over := len(l.b) - tailBytes; over > 0 {
		l.b = append(l.b[:0], l.b[over:]...)
	}
	return len(p), nil
}

// line gives the first line of the log that holds word, or "".
func (l *tail) line(word string) string {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, word) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b)
}

// launch starts a program in a process group of its own, so that a helper in
// front of it (strace) goes with it.
func launch(environ []string, argv ...string) (*process, error) {
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), log: &tail{}, done: make(chan struct{})}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PERDURE_") { // of the tests, or of a server of the developer
			p.cmd.Env = append(p.cmd.Env, v)
		}
	}
	p.cmd.Env = append(p.cmd.Env, environ...)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.pid = p.cmd.Process.Pid
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) gone() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// signal goes to the whole process group.
func (p *process) signal(s syscall.Signal) { _ = syscall.Kill(-p.pid, s) }

// kill is kill -9; it returns when the process is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// exit waits for the process to end by itself and gives its exit code.
func (p *process) exit(within time.Duration) (int, error) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-time.After(within):
		return 0, fmt.Errorf("the process did not end within %s; its log ends:\n%s", within, p.log)
	}
}

// target is a server at an address: its command line, and the process when it
// runs.
type target struct {
	t    *testing.T
	bin  string
	addr string
	data string
	argv []string // in front of the program, such as strace
	conf string
	*process
}

func newTarget(t *testing.T, data, config string) *target {
	t.Helper()
	s := &target{t: t, bin: binary(t), addr: freeAddress(t), data: data}
	s.conf = filepath.Join(t.TempDir(), "perdure.yaml")
	if err := os.WriteFile(s.conf, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s.process != nil && !s.gone() {
			s.kill()
		}
	})
	return s
}

func (s *target) url() string { return "http://" + s.addr }

// start runs the server; it does not wait for it.
func (s *target) start() {
	s.t.Helper()
	argv := append(append([]string{}, s.argv...), s.bin, "serve", "--data", s.data, "--listen", s.addr, "--config", s.conf)
	p, err := launch(nil, argv...)
	if err != nil {
		s.t.Fatalf("start the server: %v", err)
	}
	s.process = p
}

// ready waits until the server answers that it is.
func (s *target) ready() error {
	return s.process.answers(s.url() + "/readyz")
}

func (s *target) mustStart() {
	s.t.Helper()
	s.start()
	if err := s.ready(); err != nil {
		s.t.Fatal(err)
	}
}

var errGone = errors.New("the process has ended")

func (p *process) answers(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.done:
			return fmt.Errorf("%w while it started (%v); its log ends:\n%s", errGone, p.err, p.log)
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer after %s; the log ends:\n%s", url, patience, p.log)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// metric reads one unlabelled metric.
func (s *target) metric(name string) (float64, error) {
	resp, err := http.Get(s.url() + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("there is no metric %s", name)
}

func (s *target) mustMetric(name string) float64 {
	s.t.Helper()
	v, err := s.metric(name)
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

// mockModel runs the mock provider as a process and gives its URL.
func mockModel(t *testing.T, environ ...string) string {
	t.Helper()
	addr := freeAddress(t)
	p, err := launch(environ, binary(t), "mockllm", "--listen", addr)
	if err != nil {
		t.Fatalf("start the mock model: %v", err)
	}
	t.Cleanup(p.kill)
	if err := p.answers("http://" + addr + "/stats"); err != nil {
		t.Fatal(err)
	}
	return "http://" + addr
}

// config is a server's configuration: the mock as provider, agent plain, and
// agent tooled with one tool when there is a URL of it.
func config(model, tool string, more ...string) string {
	return configWith(model, tool, 500*time.Millisecond, more...)
}

// configWith is config where a model may be silent for so long.
func configWith(model, tool string, silence time.Duration, more ...string) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "kernel:\n  partitions: %d\n", partitions)
	fmt.Fprintf(&b, "providers:\n  mock:\n    type: openai\n    base_url: %q\n    model: mock\n    concurrency_limit: %d\n"+
		"    first_byte_timeout: %s\n    idle_timeout: %s\n"+
		"    retry: {max_attempts: 6, initial_interval: 20ms, max_interval: 200ms}\n", model+"/v1", concurrencyLimit, 4*silence, silence)
	agents := "agents:\n  plain: {provider: mock}\n"
	if tool != "" {
		fmt.Fprintf(&b, "tools:\n  lookup:\n    description: looks something up\n"+
			"    parameters: {type: object, properties: {q: {type: string}}, required: [q]}\n"+
			"    http: {url: %q, allow_private: true, timeout: %s}\n", tool, 4*silence)
		agents += "  tooled: {provider: mock, tools: [lookup]}\n"
	}
	b.WriteString(agents)
	for _, m := range more {
		b.WriteString(m)
	}
	return b.String()
}

const (
	partitions       = 2
	concurrencyLimit = 8
	// lateAborts is how many aborted calls the mock may still count: it learns
	// of an abort only when it has seen the connection's end, and by then the
	// permit may have gone to the next call.
	lateAborts = 4
)
