//go:build e2e

// Package docs runs what the README tells a newcomer to run.
package docs

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var runnable = regexp.MustCompile("(?s)<!-- run -->\n```sh\n(.*?)```")

func TestREADMECommands(t *testing.T) {
	bin := os.Getenv("PERDURE_BIN")
	if bin == "" {
		t.Fatal("PERDURE_BIN names no binary; run make e2e")
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := runnable.FindAllStringSubmatch(string(readme), -1)
	if len(blocks) < 4 {
		t.Fatalf("README has %d runnable blocks, at least 4 are expected", len(blocks))
	}
	dir := t.TempDir()
	addr := serve(t, bin, dir)
	for _, b := range blocks {
		script := strings.ReplaceAll(b[1], "127.0.0.1:8080", addr)
		script = strings.ReplaceAll(script, "/tmp/", dir+"/")
		script = strings.ReplaceAll(script, "bin/perdure", bin)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
		cmd.Env = append(os.Environ(), "PERDURE_TARGET=http://"+addr)
		out, err := cmd.CombinedOutput()
		cancel()
		if err != nil || bytes.Contains(out, []byte(`"error"`)) {
			t.Errorf("README's commands failed (%v):\n%s\n%s", err, b[1], out)
		}
		t.Logf("%s\n%s", b[1], out)
	}
}

func serve(t *testing.T, bin, dir string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	cmd := exec.Command(bin, "serve", "--data", filepath.Join(dir, "data"), "--listen", addr)
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("serve ended with %v:\n%s", err, log.String())
		}
	})
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		resp, err := http.Get("http://" + addr + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return addr
			}
		}
		time.Sleep(10 * time.Millisecond) // another process: there is nothing to wait on but its port
	}
	t.Fatalf("the server did not get ready:\n%s", log.String())
	return ""
}
