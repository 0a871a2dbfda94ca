//go:build e2e

package clients

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestWrongCommandLines: a mistake ends with 2 and words that name it; nothing
// is started or made.
func TestWrongCommandLines(t *testing.T) {
	for _, c := range []struct {
		name string
		env  []string
		args []string
		says []string
	}{
		{"unknown flag", nil, []string{"serve", "--bogus"}, []string{"--bogus"}},
		{"unknown command", nil, []string{"serv"}, []string{"serv"}},
		{"an argument too many", nil, []string{"serve", "now"}, []string{"now"}},
		{"bad address", nil, []string{"serve", "--listen", "nowhere"}, []string{"listen", "nowhere"}},
		{"bad number", nil, []string{"serve", "--kernel.partitions", "many"}, []string{"kernel.partitions", "many"}},
		{"number out of range", nil, []string{"serve", "--kernel.partitions", "0"}, []string{"kernel.partitions", "1", "256"}},
		{"unknown key", nil, []string{"serve", "--set", "kernel.partition=3"}, []string{"kernel.partition"}},
		{"bad variable", []string{"PERDURE_KERNEL_PARTITIONS=x"}, []string{"serve"}, []string{"PERDURE_KERNEL_PARTITIONS"}},
		{"no such file", nil, []string{"serve", "--config", "/nowhere/perdure.yaml"}, []string{"/nowhere/perdure.yaml"}},
		{"all addresses without keys", nil, []string{"serve", "--listen", "0.0.0.0:0"}, []string{"0.0.0.0:0", "auth.keys", "insecure"}},
		{"a missing secret", nil, []string{"serve", "--set", "providers.x.type=openai", "--set", "providers.x.base_url=http://127.0.0.1:1/v1",
			"--set", "providers.x.model=m", "--set", "providers.x.api_key_env=NOT_SET_ANYWHERE"}, []string{"NOT_SET_ANYWHERE"}},
		{"doctor", nil, []string{"doctor", "--bogus"}, []string{"--bogus"}},
		{"chat", nil, []string{"chat", "--bogus"}, []string{"--bogus"}},
		{"mock", []string{"MOCK_TPS=fast"}, []string{"mockllm"}, []string{"MOCK_TPS", "fast"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, errs, code := run(t, c.env, c.args...)
			if code != 2 {
				t.Errorf("exit code %d, want 2\n%s%s", code, out, errs)
			}
			for _, want := range c.says {
				if !strings.Contains(errs, want) {
					t.Errorf("the message does not name %q:\n%s", want, errs)
				}
			}
			if strings.Contains(errs, "goroutine ") || strings.Count(errs, "\n") > 12 {
				t.Errorf("not a message for people:\n%s", errs)
			}
		})
	}
}

// TestOneProcessAtATime: a second server on the same data is refused, and the
// first goes on undisturbed.
func TestOneProcessAtATime(t *testing.T) {
	s := serve(t, setup{})
	_, errs, code := run(t, nil, "serve", "--data", s.data, "--listen", "127.0.0.1:0")
	if code != 1 || !strings.Contains(errs, s.data) || !strings.Contains(errs, "process") && !strings.Contains(errs, "server") {
		t.Errorf("exit code %d, want 1 and words that name %s:\n%s", code, s.data, errs)
	}
	p := plain{url: s.url}
	if tr := p.say(t, p.newSession(t, "demo"), "Hello"); tr.Status != "completed" {
		t.Errorf("the first server afterwards: %+v", tr)
	}
	// The same address is refused by name, too.
	_, errs, code = run(t, nil, "serve", "--data", filepath.Join(t.TempDir(), "other"), "--listen", strings.TrimPrefix(s.url, "http://"))
	if code != 1 || !strings.Contains(errs, strings.TrimPrefix(s.url, "http://")) {
		t.Errorf("exit code %d for an address in use:\n%s", code, errs)
	}
}

func TestPartitionCountIsFixed(t *testing.T) {
	s := serve(t, setup{args: []string{"--kernel.partitions", "3"}})
	p := plain{url: s.url}
	id := p.newSession(t, "demo")
	s.stop(t)
	_, errs, code := run(t, nil, "serve", "--data", s.data, "--listen", "127.0.0.1:0", "--kernel.partitions", "5")
	if code == 0 || !strings.Contains(errs, "3") || !strings.Contains(errs, "5") || !strings.Contains(errs, "partitions") {
		t.Errorf("exit code %d, want a refusal that names both counts:\n%s", code, errs)
	}
	p.url = serve(t, setup{data: s.data, args: []string{"--kernel.partitions", "3"}}).url
	p.do(t, 200, "GET", "/v1/sessions/"+id, "", nil)
}

// TestInsecureIsAsked: --insecure is the way to serve all addresses without
// keys, and doctor worries.
func TestInsecureIsAsked(t *testing.T) {
	s := serve(t, setup{args: []string{"--listen", "0.0.0.0:0", "--insecure"}})
	plain{url: s.url}.do(t, 200, "GET", "/v1/agents", "", nil)
	out, _, code := run(t, nil, "doctor", "--json", "--listen", "0.0.0.0:0", "--insecure")
	if code != 0 || !strings.Contains(out, "insecure") {
		t.Errorf("doctor: exit code %d\n%s", code, out)
	}
}

// TestForeignPages: without keys, a web page can neither name the server by a
// host of its own nor post to it.
func TestForeignPages(t *testing.T) {
	s := serve(t, setup{})
	p := plain{url: s.url}
	p.refused(t, 403, "cross_origin", "POST", "/v1/sessions", `{"agent":"demo"}`, "Origin", "https://evil.example")
	req, err := http.NewRequest("GET", s.url+"/v1/sessions", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = "evil.example"
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp.Body); resp.StatusCode != 403 || !strings.Contains(body, "host_not_allowed") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func TestDoctor(t *testing.T) {
	model := mock(t)
	good, bad := writeFile(t, "good.yaml", onMock(model)), writeFile(t, "bad.yaml", onMock("http://127.0.0.1:1"))
	wrong := writeFile(t, "wrong.yaml", "kernel:\n  partitions: lots\n")
	for _, c := range []struct {
		name, config, check string
		code                int
	}{
		{"all is well", good, "provider mock", 0},
		{"a provider that is not there", bad, "provider mock", 1},
		{"a wrong configuration", wrong, "config", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			data := filepath.Join(t.TempDir(), "data")
			out, errs, code := run(t, nil, "doctor", "--json", "--config", c.config, "--data", data)
			if code != c.code {
				t.Errorf("exit code %d, want %d\n%s%s", code, c.code, out, errs)
			}
			if strings.Count(out, "\n") != 1 {
				t.Errorf("want one object on one line:\n%s", out)
			}
			var rep struct {
				Status string
				Checks []struct{ Name, Status, Detail, Hint string }
			}
			if err := json.Unmarshal([]byte(out), &rep); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			found := ""
			for _, ch := range rep.Checks {
				if ch.Name == c.check {
					found = ch.Status
				}
				if ch.Status == "fail" && ch.Hint == "" {
					t.Errorf("a failure without a hint: %+v", ch)
				}
			}
			if want := map[int]string{0: "ok", 1: "fail"}[c.code]; found != want {
				t.Errorf("check %q is %q, want %q:\n%s", c.check, found, want, out)
			}
			if c.code == 1 && rep.Status != "fail" {
				t.Errorf("the whole is %q", rep.Status)
			}
			if left, err := os.ReadDir(data); err == nil && len(left) > 0 {
				t.Errorf("doctor left %v in the data directory", left)
			}
		})
	}
}

func TestChatCommand(t *testing.T) {
	h := newToolHost(t)
	p := plain{url: serve(t, setup{config: toolConfig("http://127.0.0.1:1", h) + nodeAgents + "  teller: {provider: demo, tools: [weather]}\n"}).url}
	out, errs, code := run(t, nil, "chat", "--target", p.url, "-m", "Hello terminal")
	if code != 0 || !strings.Contains(out, "Hello terminal") || strings.Contains(out, "\x1b") {
		t.Errorf("exit code %d\n%s\n%s", code, out, errs)
	}
	// Piped lines are a conversation.
	id := p.newSession(t, "demo")
	out, errs, code = runIn(t, "first\nsecond\n", nil, "chat", "--target", p.url, "--session", id)
	if code != 0 || !strings.Contains(out, "turn 1") || !strings.Contains(out, "turn 2") {
		t.Errorf("exit code %d\n%s\n%s", code, out, errs)
	}
	if n := len(p.messages(t, id)); n != 4 {
		t.Errorf("the conversation has %d messages, want 4", n)
	}
	// Tools are shown.
	out, _, code = run(t, nil, "chat", "--target", p.url, "--agent", "teller", "-m", `/tool weather {"city":"Oslo"}`)
	if code != 0 || !strings.Contains(out, "weather") || !strings.Contains(out, `"sky":"clear"`) {
		t.Errorf("exit code %d\n%s", code, out)
	}
	// What goes wrong is said on standard error and by the exit code.
	out, errs, code = run(t, nil, "chat", "--target", p.url, "--agent", "nobody", "-m", "Hello")
	if code != 3 || !strings.Contains(errs, "nobody") {
		t.Errorf("unknown agent: exit code %d\n%s\n%s", code, out, errs)
	}
	out, errs, code = run(t, nil, "chat", "--target", "http://127.0.0.1:1", "-m", "Hello")
	if code != 3 || !strings.Contains(errs, "http://127.0.0.1:1") {
		t.Errorf("no server: exit code %d\n%s\n%s", code, out, errs)
	}
	out, errs, code = run(t, nil, "chat", "--target", p.url, "--agent", "helper", "-m", "Hello")
	if code != 1 || !strings.Contains(errs, "failed") {
		t.Errorf("a turn that fails: exit code %d\n%s\n%s", code, out, errs)
	}
}

// TestChatCtrlC: Ctrl-C cancels the turn on the server, and the terminal shows
// the end of it.
func TestChatCtrlC(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	c := launch(t, nil, "chat", "--target", p.url, "--session", id, "-m", "/words 300")
	eventually(t, "the first words", func() bool { return strings.Count(c.stdout.String(), " ") > 3 })
	if err := c.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code, errs := c.code(t), c.stderr.String(); code != 1 || !strings.Contains(errs, "cancelled") {
		t.Errorf("exit code %d; the terminal must say that the turn was cancelled:\n%s", code, errs)
	}
	if ms := p.messages(t, id); len(ms) != 2 || !ms[1].Partial {
		t.Errorf("transcript: %s", roles(ms))
	}
}

// TestGreeting runs the command that the server prints at its start, as a
// newcomer would paste it.
func TestGreeting(t *testing.T) {
	s := serve(t, setup{})
	_, rest, ok1 := strings.Cut(s.stderr.String(), "Try it:\n")
	command, _, ok2 := strings.Cut(rest, "\n\n")
	if !ok1 || !ok2 || !strings.Contains(command, "curl ") {
		t.Fatalf("no command in the greeting:\n%s", &s.stderr)
	}
	out, err := exec.Command("bash", "-c", command).Output()
	if err != nil || !strings.Contains(string(out), `"finish_reason":"stop"`) || !strings.HasSuffix(strings.TrimSpace(string(out)), "data: [DONE]") {
		t.Errorf("%s\n%v\n%s", command, err, out)
	}
}
