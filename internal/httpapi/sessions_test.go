package httpapi

import (
	"fmt"
	"strings"
	"testing"
)

func TestSessions(t *testing.T) {
	w := newWorld(t)
	a := w.do("POST", "/v1/sessions", `{"agent":"demo","id":"s1","metadata":{ "a": [1, 2] },"retention":"72h","messages":[{"content":"hi","role":"user"},{"role":"assistant","content":"ho"}]}`)
	if a.status != 201 || a.header.Get("Location") != "/v1/sessions/s1" || a.get(t, "id") != "s1" || a.get(t, "messages") != "2" || a.get(t, "metadata.a.1") != "2" {
		t.Fatalf("%d %v %s", a.status, a.header, a.body)
	}
	if b := w.do("GET", "/v1/sessions/s1", ""); string(b.body) != string(a.body) {
		t.Errorf("%s\n%s", a.body, b.body)
	}
	if b := w.do("POST", "/v1/sessions", `{"agent":"demo","id":"s2"}`, "Idempotency-Key", "k"); b.status != 201 {
		t.Errorf("%d %s", b.status, b.body)
	}
	if b := w.do("POST", "/v1/sessions", `{"agent":"demo","id":"s2"}`, "Idempotency-Key", "k"); b.status != 201 {
		t.Errorf("again with its key: %d %s", b.status, b.body)
	}
	for i := 3; i < 8; i++ {
		_ = w.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":"demo","id":"s%d"}`, i))
	}
	var seen []string
	after := ""
	for pages := 0; ; pages++ {
		page := w.do("GET", "/v1/sessions?limit=3&after="+after, "")
		for i := range 3 {
			if id := page.get(t, fmt.Sprintf("sessions.%d.id", i)); id != "" {
				seen = append(seen, id)
			}
		}
		if after = page.get(t, "next"); after == "" {
			break
		}
		if pages > 5 {
			t.Fatal("the listing does not end")
		}
	}
	if got := strings.Join(seen, " "); got != "s7 s6 s5 s4 s3 s2 s1" {
		t.Errorf("listed %s", got)
	}
	empty := newWorld(t)
	if a := empty.do("GET", "/v1/sessions", ""); string(a.body) != "{\"sessions\":[]}\n" {
		t.Errorf("no sessions: %s", a.body)
	}
}

func TestMessages(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	_ = w.do("POST", path+"/turns", `{"input":"one"}`)
	_ = w.do("POST", path+"/turns", `{"input":"tool"}`)
	var got []string
	after := ""
	for range 20 {
		page := w.do("GET", path+"/messages?limit=1&after="+after, "")
		for i := range 10 {
			p := fmt.Sprintf("messages.%d.message.", i)
			if role := page.get(t, p+"role"); role != "" {
				got = append(got, role+":"+page.get(t, p+"content"))
			}
		}
		if after = page.get(t, "next"); after == "" {
			break
		}
	}
	want := `user:one assistant:you said one user:tool assistant:Let me see. tool:there is no tool "missing" assistant:The tool answered.`
	if s := strings.Join(got, " "); s != want {
		t.Errorf("got  %s\nwant %s", s, want)
	}
}

func TestAgents(t *testing.T) {
	w := newWorld(t)
	def := `{"provider":"script","instructions":"be kind","parameters":{"temperature":0.1},"max_context_messages":10}`
	a := w.do("PUT", "/v1/agents/mine", def)
	if a.status != 201 || a.header.Get("Location") != "/v1/agents/mine" || a.get(t, "source") != "api" || a.get(t, "parameters.temperature") != "0.1" {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if b := w.do("PUT", "/v1/agents/mine", string(a.body)); b.status != 200 || string(b.body) != string(a.body) {
		t.Errorf("what was read, sent back: %d %s", b.status, b.body)
	}
	if b := w.do("POST", "/v1/agents", `{"name":"mine","provider":"script"}`); b.status != 409 {
		t.Errorf("made twice: %d %s", b.status, b.body)
	}
	if b := w.do("POST", "/v1/agents", `{"name":"second","provider":"script"}`); b.status != 201 {
		t.Errorf("%d %s", b.status, b.body)
	}
	list := w.do("GET", "/v1/agents", "")
	for i, want := range []string{"demo config", "mine api", "other config", "second api"} {
		p := fmt.Sprintf("agents.%d.", i)
		if got := list.get(t, p+"name") + " " + list.get(t, p+"source"); got != want {
			t.Errorf("agent %d is %s, want %s", i, got, want)
		}
	}
	s := w.do("POST", "/v1/sessions", `{"agent":"mine"}`).get(t, "id")
	if b := w.do("POST", "/v1/sessions/"+s+"/turns", `{"input":"x"}`); b.get(t, "status") != "completed" || !strings.HasPrefix(w.script.calls()[0], `{"content":"be kind","role":"system"}`) {
		t.Errorf("%s\n%v", b.body, w.script.calls())
	}
	if b := w.do("DELETE", "/v1/agents/mine", ""); b.status != 204 {
		t.Errorf("%d %s", b.status, b.body)
	}
	if b := w.do("POST", "/v1/sessions/"+s+"/turns", `{"input":"x"}`); b.get(t, "status") != "failed" || b.get(t, "error.code") != "agent_not_found" {
		t.Errorf("turn of a deleted agent: %s", b.body)
	}
}

func TestServerRoutes(t *testing.T) {
	ready := error(nil)
	w := newWorld(t, func(c *Config) { c.Ready = func() error { return ready } })
	if a := w.do("GET", "/", ""); a.status != 200 || a.get(t, "version") != "test" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := w.do("GET", "/healthz", ""); a.get(t, "status") != "ok" {
		t.Errorf("%s", a.body)
	}
	if a := w.do("GET", "/readyz", ""); a.get(t, "status") != "ready" {
		t.Errorf("%s", a.body)
	}
	ready = fmt.Errorf("partition 1 replays its journal")
	if a := w.do("GET", "/readyz", ""); a.status != 503 || a.get(t, "error.code") != "not_ready" || !strings.Contains(string(a.body), "replays") {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestRequestID(t *testing.T) {
	w := newWorld(t)
	for given, kept := range map[string]bool{"abc-1": true, "": false, "a b": false, strings.Repeat("x", 65): false, "a/../b": false} {
		got := w.do("GET", "/healthz", "", "X-Request-Id", given).header.Get("X-Request-Id")
		if (got == given) != kept || !kept && !strings.HasPrefix(got, "req_") {
			t.Errorf("%q became %q", given, got)
		}
	}
}

func TestAccessRecord(t *testing.T) {
	w := newWorld(t, keys)
	id := w.session("Authorization", "Bearer key-of-b")
	a := w.do("POST", "/v1/sessions/"+id+"/turns", `{"input":"x"}`, "Authorization", "Bearer key-of-b", "X-Request-Id", "r1")
	r := w.awaitRecord("/v1/sessions/{session_id}/turns")
	if r.Tenant != "b" || r.Method != "POST" || r.Status != 200 || r.Bytes != int64(len(a.body)) || r.Session != id || r.Turn != a.get(t, "turn_id") ||
		r.RequestID != "r1" || r.Duration <= 0 || r.TTFB <= 0 || r.TTFB > r.Duration || r.At.IsZero() || !strings.HasPrefix(r.Remote, "127.0.0.1:") || r.Closed != "" {
		t.Errorf("%+v", r)
	}
	_ = w.do("GET", "/nothing", "")
	if r := w.awaitRecord(""); r.Status != 404 || r.Tenant != "" {
		t.Errorf("%+v", r)
	}
}
