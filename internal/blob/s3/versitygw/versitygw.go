// Package versitygw runs versitygw, a real S3 server on a folder, for tests.
// It honours If-None-Match and If-Match of PUT exactly, but does not sync what
// it writes: killing the process loses nothing, losing the machine might.
package versitygw

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// Variable names the environment variable that holds the binary's path.
const Variable = "PERDURE_VERSITYGW"

// The server's one account.
const (
	AccessKey = "perdure-test"
	SecretKey = "perdure-test-secret"
	Region    = "us-east-1"
)

const (
	startLimit = 20 * time.Second
	startPause = 20 * time.Millisecond
	startTries = 5 // another process may take the free port first
	maxOutput  = 16 << 10
)

// Binary is the path in the environment variable, or what scripts/versitygw.sh
// of the checkout at root builds: a minute the first time.
func Binary(ctx context.Context, root string) (string, error) {
	if path := os.Getenv(Variable); path != "" {
		return path, nil
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "scripts", "versitygw.sh"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("versitygw: building it: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Server is a running process.
type Server struct {
	bin, dir, addr string

	mu   sync.Mutex // guards all below
	cmd  *exec.Cmd  // nil: stopped
	done chan struct{}
	out  *tail
}

// Start runs bin on a free port of the loopback, with the buckets in dir (made
// if missing), and returns when it answers. The caller stops it.
func Start(ctx context.Context, bin, dir string, buckets ...string) (*Server, error) {
	for _, b := range buckets {
		if err := os.MkdirAll(filepath.Join(dir, b), 0o750); err != nil {
			return nil, fmt.Errorf("versitygw: %w", err)
		}
	}
	var err error
	for range startTries {
		var addr string
		if addr, err = freeAddress(); err != nil {
			return nil, err
		}
		s := &Server{bin: bin, dir: dir, addr: addr}
		if err = s.Restart(ctx); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("versitygw: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// URL is the endpoint, to be used with path style.
func (s *Server) URL() string { return "http://" + s.addr }

// Dir is the folder whose folders are the buckets.
func (s *Server) Dir() string { return s.dir }

// PID is the process, 0 when it is stopped: to be halted by signals, say.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}

// Stop kills the process and waits for its end. It may be called twice.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
}

func (s *Server) stop() { // s.mu is held
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // its end shows in done
	<-s.done
	s.cmd = nil
}

// Restart runs the server again, on the same folder and address, after killing
// the former process if it runs.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
	s.out = &tail{}
	cmd := exec.Command(s.bin, "--port", s.addr, "--region", Region, "--keep-alive", "--quiet", "posix", s.dir)
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+AccessKey, "ROOT_SECRET_KEY="+SecretKey)
	cmd.Stdout, cmd.Stderr = s.out, s.out
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("versitygw: %w", err)
	}
	s.cmd, s.done = cmd, make(chan struct{})
	go func(done chan struct{}) {
		defer close(done)
		_ = cmd.Wait() // killed in the end
	}(s.done)
	if err := s.answers(ctx); err != nil {
		s.stop()
		return fmt.Errorf("versitygw at %s: %w; it said: %s", s.addr, err, s.out)
	}
	return nil
}

// answers waits until the server does. s.mu is held.
func (s *Server) answers(ctx context.Context) error {
	clock := env.SystemClock{}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer clock.AfterFunc(startLimit, cancel).Stop()
	sleep := blob.SleepBy(clock)
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil { // whatever it says of a request without a signature
			return resp.Body.Close()
		}
		if sleep(ctx, startPause) != nil {
			return fmt.Errorf("no answer: %w", err)
		}
		select {
		case <-s.done:
			return errors.New("it ended")
		default:
		}
	}
}

// tail keeps the end of what the process prints.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - maxOutput; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.buf.String()
}
