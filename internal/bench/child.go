package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// keptWords is how much of a process's last words is kept for an error.
	keptWords = 4 << 10
	// killAfter is what a process has to end by itself.
	killAfter = 10 * time.Second
	// maxReport bounds a line of a worker or client.
	maxReport = 1 << 20
)

// lastWords keeps the end of what is written; safe for concurrent use.
type lastWords struct {
	mu   sync.Mutex
	kept []byte
}

func (l *lastWords) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, b...)
	if over := len(l.kept) - keptWords; over > 0 {
		l.kept = append(l.kept[:0], l.kept[over:]...)
	}
	return len(b), nil
}

func (l *lastWords) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(string(l.kept))
}

// child is a process that was started here.
type child struct {
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	words *lastWords
	done  chan struct{} // closed when it has ended
	err   error         // how; valid when done is closed
}

// startChild starts a process in a group of its own, so that a terminal's
// interrupt is ours to pass on. Reports gets its standard output line by line;
// nil keeps that with its other words.
func startChild(name string, reports func(Report), env []string, binary string, args ...string) (*child, error) {
	c := &child{name: name, cmd: exec.Command(binary, args...), words: &lastWords{}, done: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = c.words
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	var out io.Reader
	if reports == nil {
		c.cmd.Stdout = c.words
	} else if out, err = c.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	go func() {
		defer close(c.done)
		if out != nil {
			readReports(out, reports)
		}
		c.err = c.cmd.Wait()
	}()
	return c, nil
}

func readReports(out io.Reader, reports func(Report)) {
	sc := bufio.NewScanner(out)
	sc.Buffer(nil, maxReport)
	for sc.Scan() {
		var r Report
		if err := json.Unmarshal(sc.Bytes(), &r); err != nil {
			r = Report{Kind: kindFailed, Error: fmt.Sprintf("a report that is none: %.200q", sc.Text())}
		}
		reports(r)
	}
	_, _ = io.Copy(io.Discard, out)
}

// tell writes v as a line of its input.
func (c *child) tell(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err = c.stdin.Write(append(b, '\n')); err != nil {
		return c.ended(err)
	}
	return nil
}

// ended says how the process ended, with its last words.
func (c *child) ended(cause error) error {
	select {
	case <-c.done:
		if c.err != nil {
			cause = c.err
		}
	default:
	}
	if cause == nil {
		cause = errors.New("it ended")
	}
	if w := c.words.String(); w != "" {
		return fmt.Errorf("%s: %w; its last words:\n%s", c.name, cause, w)
	}
	return fmt.Errorf("%s: %w", c.name, cause)
}

// stop ends the process and waits for it.
func (c *child) stop() {
	if c == nil {
		return
	}
	_ = c.stdin.Close()
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(killAfter, func() { _ = c.cmd.Process.Kill() })
	defer kill.Stop()
	<-c.done
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// RunScript runs a script to its end. When ctx ends, the script is asked to stop,
// and cleans up.
func RunScript(ctx context.Context, script string, env []string, out, progress io.Writer) error {
	cmd := exec.CommandContext(ctx, "bash", script)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = out, progress
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 2 * killAfter
	return cmd.Run()
}
