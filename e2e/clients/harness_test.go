//go:build e2e

// Package clients drives the real binary, as a process, with clients that do
// not know it: the Go module openai-go, the npm package openai and plain HTTP.
// PERDURE_BIN names the binary; `make e2e` builds it and sets that.
package clients

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

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
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("did not come within %v: %s", patience, what)
		}
	}
}

// output keeps what a process says.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
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

// process is a run of the binary in the background.
type process struct {
	cmd    *exec.Cmd
	stdout output
	stderr output
	exited chan struct{} // closed when over
}

// environ is the environment of a process: nothing of the tests' own that
// would change its configuration.
func environ(extra []string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.TempDir()}, extra...)
}

// launch starts the binary and stops it, the hard way, at the test's end.
func launch(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(binary(t), args...), exited: make(chan struct{})}
	p.cmd.Env = environ(env)
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // the code is in ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("perdure %s said:\n%s", strings.Join(args, " "), &p.stderr)
		}
	})
	return p
}

// kill ends it as a power cut would, as far as a process can tell.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error means that it is over already
	<-p.exited
}

func (p *process) over() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// code waits for the end and gives the exit code.
func (p *process) code(t *testing.T) int {
	t.Helper()
	eventually(t, "the end of "+strings.Join(p.cmd.Args, " "), p.over)
	return p.cmd.ProcessState.ExitCode()
}

// find waits until the process says something that matches, and gives the
// first group of it.
func (p *process) find(t *testing.T, re *regexp.Regexp) string {
	t.Helper()
	var m []string
	eventually(t, re.String()+" from "+strings.Join(p.cmd.Args, " "), func() bool {
		m = re.FindStringSubmatch(p.stderr.String())
		if m == nil && p.over() {
			t.Fatalf("%s ended with code %d:\n%s", strings.Join(p.cmd.Args, " "), p.cmd.ProcessState.ExitCode(), &p.stderr)
		}
		return m != nil
	})
	return m[1]
}

// server is a running `perdure serve`.
type server struct {
	*process
	url  string
	data string
}

// setup says how to start a server.
type setup struct {
	data   string // empty: a new directory
	config string // YAML, may be empty
	env    []string
	args   []string
}

var readyLine = regexp.MustCompile(`Perdure is ready at (http://\S+)`)

// serve starts a server on a free port and waits until it is ready.
func serve(t *testing.T, s setup) *server {
	t.Helper()
	if s.data == "" {
		s.data = filepath.Join(t.TempDir(), "data")
	}
	args := []string{"serve", "--data", s.data, "--listen", "127.0.0.1:0"}
	if s.config != "" {
		args = append(args, "--config", writeFile(t, "perdure.yaml", s.config))
	}
	p := launch(t, s.env, append(args, s.args...)...)
	srv := &server{process: p, data: s.data}
	srv.url = p.find(t, readyLine)
	eventually(t, "/readyz", func() bool {
		resp, err := http.Get(srv.url + "/readyz")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return srv
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var mockLine = regexp.MustCompile(`mock model on (http://\S+)/v1`)

// mock starts a mock model that answers tokens words at tps a second and gives
// its address, without /v1.
func mock(t *testing.T, env ...string) string {
	t.Helper()
	return launch(t, append([]string{"MOCK_TTFT_MS=5", "MOCK_TPS=400", "MOCK_TOKENS=8"}, env...), "mockllm", "--listen", "127.0.0.1:0").find(t, mockLine)
}

// onMock is the configuration of an agent `helper` on a mock.
func onMock(url string) string {
	return `
providers:
  mock: {type: openai, base_url: "` + url + `/v1", model: mock-model}
agents:
  helper: {provider: mock, instructions: "Be brief."}
`
}

// run runs a command to its end and gives what it said and its exit code.
func run(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runIn(t, "", env, args...)
}

func runIn(t *testing.T, stdin string, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(t), args...)
	cmd.Dir = t.TempDir()
	cmd.Env = environ(env)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if ctx.Err() != nil {
		t.Fatalf("perdure %s did not end within %v:\n%s%s", strings.Join(args, " "), patience, &out, &errs)
	}
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// stop asks a server to end, as an init system does.
func (s *server) stop(t *testing.T) {
	t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := s.code(t); code != 0 {
		t.Fatalf("SIGTERM: exit code %d, want 0:\n%s", code, &s.stderr)
	}
}

func readAll(t *testing.T, r io.ReadCloser) string {
	t.Helper()
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
