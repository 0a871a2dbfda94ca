//go:build e2e

package clients

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// nodeTimeout bounds one run of npm or node.
const nodeTimeout = 2 * time.Minute

// nodeFiles are what npm needs and what it must install from.
var nodeFiles = []string{"package.json", "package-lock.json", ".npmrc"}

// TestNode runs node/openai.test.mjs: the same scenarios with the npm client.
func TestNode(t *testing.T) {
	dir := t.TempDir()
	modules := installNode(t)
	copyFiles(t, dir, append(nodeFiles, "openai.test.mjs"))
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	h := newToolHost(t)
	main := serve(t, setup{config: toolConfig(mock(t, "MOCK_TOOL=*", `MOCK_TOOL_ARGS={"city":"Oslo"}`), h) + nodeAgents})
	busy := serve(t, setup{args: []string{"--kernel.max_in_flight_turns", "1"}})
	const key = "a-key-of-the-node-test"
	auth := serve(t, setup{config: "auth:\n  keys: [{name: node, key_env: NODE_KEY}]\n", env: []string{"NODE_KEY=" + key}})

	out, err := node(t, dir, []string{
		"PERDURE_URL=" + main.url, "PERDURE_BUSY_URL=" + busy.url, "PERDURE_AUTH_URL=" + auth.url, "PERDURE_AUTH_KEY=" + key,
	}, "node", "--test", "--test-reporter=spec", "openai.test.mjs")
	if err != nil {
		t.Errorf("node --test: %v\n%s", err, out)
	} else {
		t.Log(out)
	}
	calls := h.seen("/weather")
	if len(calls) != 2 || calls[0].body != `{"city":"Oslo"}` {
		t.Errorf("the tool server saw %+v, want two calls", calls)
	}
}

// nodeAgents are the agents of the node tests beside those with tools.
const nodeAgents = `
  helper: {provider: mock}
  demo: {provider: demo}
`

// installNode installs the locked packages, once for each lock file and user,
// and gives their folder.
func installNode(t *testing.T) string {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("%s is missing: `make e2e` installs it, or install nodejs (18 or newer) and npm", program)
		}
	}
	lock, err := os.ReadFile("node/package-lock.json")
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	sum := sha256.Sum256(lock)
	done := filepath.Join(cache, "perdure-e2e", hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(done); err == nil {
		return filepath.Join(done, "node_modules")
	}
	if err := os.MkdirAll(filepath.Dir(done), 0o755); err != nil {
		t.Fatal(err)
	}
	fresh, err := os.MkdirTemp(filepath.Dir(done), "install-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(fresh) // gone already when it became the cache
	copyFiles(t, fresh, nodeFiles)
	if out, err := node(t, fresh, nil, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"); err != nil {
		t.Fatalf("npm ci: %v\n%s", err, out)
	}
	if err := os.Rename(fresh, done); err != nil {
		if _, there := os.Stat(done); there != nil { // not by another run either
			t.Fatal(err)
		}
	}
	return filepath.Join(done, "node_modules")
}

func copyFiles(t *testing.T, dir string, names []string) {
	t.Helper()
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join("node", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// node runs npm or node in a folder and gives what it said.
func node(t *testing.T, dir string, env []string, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), nodeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), append(env, "NO_COLOR=1", "OPENAI_LOG=off", "NO_PROXY=127.0.0.1")...)
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = errors.Join(err, errors.New("it did not end in time"))
	}
	return string(out), err
}
