package httpapi

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
)

// TestRefusals sends what must be refused and checks status, code and what the
// message names.
func TestRefusals(t *testing.T) {
	w := newWorld(t)
	id := w.session()
	turns := "/v1/sessions/" + id + "/turns"
	tests := []struct {
		name, method, path, body string
		status                   int
		code, says               string
	}{
		{"unknown path", "GET", "/v1/nothing", "", 404, "unknown_path", "/v1/sessions"},
		{"deeper than any path", "GET", "/v1/a/b/c/d/e/f/g/h/i", "", 404, "unknown_path", ""},
		{"empty segment", "GET", "/v1/sessions/", "", 404, "unknown_path", ""},
		{"wrong method", "PATCH", "/v1/sessions", "", 405, "method_not_allowed", "POST, GET"},
		{"wrong method on root", "POST", "/", "", 405, "method_not_allowed", "GET, HEAD"},
		{"empty body", "POST", turns, "", 400, "invalid_json", "empty"},
		{"white body", "POST", turns, "  ", 400, "invalid_json", "empty"},
		{"no JSON", "POST", turns, `{"input": x}`, 400, "invalid_json", "at byte 11"},
		{"cut JSON", "POST", turns, `{"input": "x"`, 400, "invalid_json", "unexpected end"},
		{"not UTF-8", "POST", turns, "{\"input\": \"\xff\"}", 400, "invalid_json", "UTF-8"},
		{"too deep", "POST", turns, `{"input":` + strings.Repeat("[", 80) + strings.Repeat("]", 80) + `}`, 400, "invalid_json", "64 deep"},
		{"no object", "POST", turns, `[1]`, 400, "invalid_request", "must be an object, is an array"},
		{"unknown field", "POST", turns, `{"input":"x","streem":true}`, 400, "invalid_request", "streem: is not a known field"},
		{"doubled field", "POST", turns, `{"input":"x","input":"y"}`, 400, "invalid_request", "input: is there twice"},
		{"no input", "POST", turns, `{"stream":true}`, 400, "invalid_request", "input: is missing"},
		{"empty input", "POST", turns, `{"input":""}`, 400, "invalid_request", "input: must not be empty"},
		{"number input", "POST", turns, `{"input":12}`, 400, "invalid_request", "input: must be a string or an array of content parts, is a number"},
		{"bad part", "POST", turns, `{"input":[{"type":"text","text":"x"},{"type":"text"}]}`, 400, "invalid_request", "input[1].text: is missing"},
		{"part without type", "POST", turns, `{"input":[{}]}`, 400, "invalid_request", "input[0].type: is missing"},
		{"no part", "POST", turns, `{"input":[]}`, 400, "invalid_request", "input: must have a content part"},
		{"bad role", "POST", turns, `{"input":{"role":"system","content":"x"}}`, 400, "invalid_request", "input.role: \"system\" is not allowed; allowed: user"},
		{"no content", "POST", turns, `{"input":{"role":"user"}}`, 400, "invalid_request", "input.content: is missing"},
		{"text stream", "POST", turns, `{"input":"x","stream":"yes"}`, 400, "invalid_request", "stream: must be a boolean, is a string"},
		{"unknown policy", "POST", turns, `{"input":"x","on_busy":"wait"}`, 400, "invalid_request", "allowed: interrupt, reject, enqueue, steer, rollback"},
		{"steer", "POST", turns, `{"input":"x","on_busy":"steer"}`, 400, "not_built_yet", "use interrupt, reject or enqueue"},
		{"rollback", "POST", turns, `{"input":"x","on_busy":"rollback"}`, 400, "not_built_yet", "not built yet"},
		{"long prompt", "POST", turns, `{"input":"` + strings.Repeat("x", 9<<10) + `"}`, 413, "too_large", "limits.max_prompt_bytes"},
		{"long body", "POST", turns, `{"input":"` + strings.Repeat("x", 70<<10) + `"}`, 413, "too_large", "limits.max_body_bytes"},
		{"turn of no session", "POST", "/v1/sessions/none/turns", `{"input":"x"}`, 404, "not_found", `session \"none\" does not exist`},
		{"bad session ID", "POST", "/v1/sessions/a!b/turns", `{"input":"x"}`, 400, "bad_session_id", "1 to 128 characters"},
		{"no turn", "GET", turns + "/turn_1", "", 404, "turn_not_found", "turn_1"},
		{"bad wait", "GET", turns + "/turn_1?wait=1", "", 400, "invalid_request", "wait: \\\"1\\\" is not allowed"},

		{"no agent", "POST", "/v1/sessions", `{}`, 400, "invalid_request", "agent: is missing"},
		{"unknown agent", "POST", "/v1/sessions", `{"agent":"x"}`, 404, "agent_not_found", "GET /v1/agents"},
		{"session again", "POST", "/v1/sessions", `{"agent":"demo","id":"` + id + `"}`, 409, "already_exists", "exists already"},
		{"bad new ID", "POST", "/v1/sessions", `{"agent":"demo","id":"a/b"}`, 400, "bad_session_id", ""},
		{"reserved ID", "POST", "/v1/sessions", `{"agent":"demo","id":"chat_1"}`, 400, "bad_session_id", "chat_"},
		{"bad metadata", "POST", "/v1/sessions", `{"agent":"demo","metadata":[1]}`, 400, "invalid_request", "metadata: must be an object"},
		{"long metadata", "POST", "/v1/sessions", `{"agent":"demo","metadata":{"a":"` + strings.Repeat("x", 17<<10) + `"}}`, 400, "invalid_request", "metadata: has"},
		{"bad retention", "POST", "/v1/sessions", `{"agent":"demo","retention":"soon"}`, 400, "invalid_request", "retention: \\\"soon\\\" is not allowed"},
		{"negative retention", "POST", "/v1/sessions", `{"agent":"demo","retention":"-1h"}`, 400, "invalid_request", "retention:"},
		{"bad message", "POST", "/v1/sessions", `{"agent":"demo","messages":[{"role":"user","content":"x"},{"role":"boss","content":"x"}]}`, 400, "invalid_request", "messages[1].role: \\\"boss\\\" is not allowed"},
		{"message without content", "POST", "/v1/sessions", `{"agent":"demo","messages":[{"role":"user"}]}`, 400, "invalid_request", "messages[0].content: is missing"},
		{"tool without call", "POST", "/v1/sessions", `{"agent":"demo","messages":[{"role":"tool","content":"x"}]}`, 400, "invalid_request", "messages[0].tool_call_id: is missing"},
		{"call of the user", "POST", "/v1/sessions", `{"agent":"demo","messages":[{"role":"user","content":"x","tool_calls":[]}]}`, 400, "invalid_request", "messages[0].tool_calls: is only for messages of the assistant"},

		{"list limit", "GET", "/v1/sessions?limit=0", "", 400, "invalid_request", "limit: \\\"0\\\" is not allowed; allowed: 1 to 1000"},
		{"list query", "GET", "/v1/sessions?order=asc", "", 400, "invalid_request", "order: is not a known query parameter"},
		{"list after", "GET", "/v1/sessions?after=a%2Fb", "", 400, "bad_session_id", ""},
		{"query where there is none", "GET", "/v1/agents?limit=1", "", 400, "invalid_request", "limit: is not a known query parameter; allowed here: none"},
		{"bad query", "GET", "/v1/agents?%zz", "", 400, "invalid_request", "query: is not well-formed"},
		{"doubled query", "GET", "/v1/sessions?limit=1&limit=2", "", 400, "invalid_request", "limit: is there twice"},
		{"get no session", "GET", "/v1/sessions/none", "", 404, "not_found", "none"},
		{"delete no session", "DELETE", "/v1/sessions/none", "", 404, "not_found", "none"},
		{"cancel no session", "POST", "/v1/sessions/none/cancel", "", 404, "not_found", "none"},
		{"cancel unknown field", "POST", "/v1/sessions/" + id + "/cancel", `{"turn":"x"}`, 400, "invalid_request", "turn: is not a known field"},
		{"cancel long reason", "POST", "/v1/sessions/" + id + "/cancel", `{"reason":"` + strings.Repeat("x", 2000) + `"}`, 400, "invalid_request", "reason: has 2000 bytes, at most 1024"},
		{"messages cursor", "GET", "/v1/sessions/" + id + "/messages?after=x", "", 400, "bad_cursor", ""},
		{"messages ahead", "GET", "/v1/sessions/" + id + "/messages?after=999999.0", "", 400, "cursor_ahead", ""},
		{"events cursor", "GET", "/v1/sessions/" + id + "/events?after=x", "", 400, "bad_cursor", ""},
		{"events ahead", "GET", "/v1/sessions/" + id + "/events?after=999999.0", "", 400, "cursor_ahead", ""},
		{"events of no session", "GET", "/v1/sessions/none/events", "", 404, "not_found", "none"},
		{"events of no turn", "GET", "/v1/sessions/" + id + "/events?turn_id=turn_1", "", 404, "turn_not_found", "turn_1"},

		{"no log", "GET", "/v1/access-log", "", 404, "not_kept", "access log"},
		{"no event log", "GET", "/v1/events", "", 404, "not_kept", "event log"},
		{"no metrics", "GET", "/metrics", "", 404, "not_kept", "metrics"},

		{"get no agent", "GET", "/v1/agents/none", "", 404, "agent_not_found", "none"},
		{"delete no agent", "DELETE", "/v1/agents/none", "", 404, "agent_not_found", "none"},
		{"delete agent of config", "DELETE", "/v1/agents/demo", "", 409, "agent_in_config", "config"},
		{"put agent of config", "PUT", "/v1/agents/demo", `{"provider":"script"}`, 409, "agent_in_config", "config"},
		{"post agent of config", "POST", "/v1/agents", `{"name":"demo","provider":"script"}`, 409, "already_exists", "demo"},
		{"agent without name", "POST", "/v1/agents", `{"provider":"script"}`, 400, "invalid_request", "name: is missing"},
		{"agent without provider", "POST", "/v1/agents", `{"name":"a"}`, 400, "invalid_request", "provider: is missing"},
		{"agent of no provider", "POST", "/v1/agents", `{"name":"a","provider":"x"}`, 400, "invalid_agent", "there are: [script]"},
		{"agent with bad name", "PUT", "/v1/agents/a!b", `{"provider":"script"}`, 400, "invalid_agent", "name:"},
		{"agent with two names", "PUT", "/v1/agents/a", `{"name":"b","provider":"script"}`, 400, "invalid_request", "name: is \\\"b\\\", but the path says \\\"a\\\""},
		{"agent with unknown field", "PUT", "/v1/agents/a", `{"provider":"script","temperature":1}`, 400, "invalid_request", "temperature: is not a known field"},
		{"agent with bad tool", "PUT", "/v1/agents/a", `{"provider":"script","tools":[{"name":"t","http":{"uri":"x"}}]}`, 400, "invalid_request", "tools[0].http.uri: is not a known field"},
		{"agent with bad timeout", "PUT", "/v1/agents/a", `{"provider":"script","tools":[{"name":"t","http":{"timeout":"x"}}]}`, 400, "invalid_request", "tools[0].http.timeout:"},
		{"agent with hidden header", "PUT", "/v1/agents/a", `{"provider":"script","tools":[{"name":"t","http":{"headers":{"X-A":"[redacted]"}}}]}`, 400, "invalid_request", "tools[0].http.headers.X-A: is [redacted]"},
		{"agent with bad header", "PUT", "/v1/agents/a", `{"provider":"script","tools":[{"name":"t","http":{"headers":{"X-A":1}}}]}`, 400, "invalid_request", "tools[0].http.headers"},
		{"agent with unknown tool", "PUT", "/v1/agents/a", `{"provider":"script","tools":["t"]}`, 400, "invalid_agent", "tools[0]: tool"},
		{"agent with bad parameters", "PUT", "/v1/agents/a", `{"provider":"script","parameters":[1]}`, 400, "invalid_request", "parameters: must be an object"},
		{"agent with bad window", "PUT", "/v1/agents/a", `{"provider":"script","max_context_messages":1.5}`, 400, "invalid_request", "max_context_messages: must be an integer, is 1.5"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := w.do(tt.method, tt.path, tt.body)
			if a.status != tt.status || a.get(t, "error.code") != tt.code {
				t.Fatalf("%d %s, want %d %s", a.status, a.body, tt.status, tt.code)
			}
			says := tt.says
			if !strings.Contains(says, `\`) {
				says = strings.ReplaceAll(says, `"`, `\"`)
			}
			if !strings.Contains(string(a.body), says) {
				t.Errorf("%s does not say %q", a.body, tt.says)
			}
			if tt.status == 405 && a.header.Get("Allow") == "" {
				t.Error("no Allow header")
			}
		})
	}
	if n := w.log.Len(); n > 0 {
		t.Errorf("the log has %d bytes of errors: %s", n, w.log)
	}
}

// TestErrorsOfBelow: each error that the packages below may give has its answer.
func TestErrorsOfBelow(t *testing.T) {
	for _, tt := range []struct {
		err    error
		status int
		code   string
		retry  bool
	}{
		{fmt.Errorf("%w: partition 1: %w", partition.ErrLost, errors.New("disk")), 503, "outcome_unknown", true},
		{partition.ErrOverloaded, 429, "overloaded", true},
		{partition.ErrStopped, 503, "draining", true},
		{stream.ErrSlowReader, 503, "outcome_unknown", true},
		{&session.Overloaded{RetryAfter: time.Second}, 429, "overloaded", true},
		{&core.Error{Code: core.NotFound}, 404, "not_found", false},
		{&core.Error{Code: core.Exists}, 409, "already_exists", false},
		{&core.Error{Code: core.Busy}, 409, "busy", false},
		{&core.Error{Code: core.QueueFull}, 429, "queue_full", true},
		{&core.Error{Code: core.StaleAttempt}, 409, "stale_attempt", false},
		{&core.Error{Code: core.NotDue}, 409, "not_due", false},
		{&core.Error{Code: core.Invalid}, 400, "invalid", false},
		{&core.Error{Code: core.LimitReached}, 413, "limit_reached", false},
		{fmt.Errorf("%w: x", agent.ErrNoAgent), 404, "agent_not_found", false},
		{agent.ErrConfigged, 409, "agent_in_config", false},
		{&agent.DefinitionError{Path: "tools[0]", Problem: "x"}, 400, "invalid_agent", false},
		{session.ErrBadID, 400, "bad_session_id", false},
		{session.ErrBadCursor, 400, "bad_cursor", false},
		{session.ErrCursorAhead, 400, "cursor_ahead", false},
		{context.Canceled, 499, "client_gone", false},
	} {
		r, ok := refusalOf(fmt.Errorf("somewhere: %w", tt.err))
		if !ok || r.status != tt.status || r.code != tt.code || (r.retry > 0) != tt.retry {
			t.Errorf("%v: %+v", tt.err, r)
		}
	}
	if _, ok := refusalOf(errors.New("secret path /x")); ok {
		t.Error("an error that no one foresaw is shown to clients")
	}
}

func TestContentType(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct {
		given string
		want  int
	}{
		{"application/json", 201}, {"application/json; charset=utf-8", 201}, {"Application/JSON", 201}, {"application/ld+json", 201},
		{"", 415}, {"text/plain", 415}, {"application/x-www-form-urlencoded", 415}, {"multipart/form-data; boundary=x", 415},
	} {
		if a := w.do("POST", "/v1/sessions", `{"agent":"demo"}`, "Content-Type", tt.given); a.status != tt.want {
			t.Errorf("%q: %d %s", tt.given, a.status, a.body)
		}
	}
}

func keys(c *Config) {
	for tenant, key := range map[string]string{"a": "key-of-a", "b": "key-of-b"} {
		c.Auth.Keys = append(c.Auth.Keys, &config.APIKey{Name: tenant, Tenant: tenant, Digest: sha256.Sum256([]byte(key))})
	}
}

func TestKeys(t *testing.T) {
	w := newWorld(t, keys)
	for _, tt := range []struct {
		header string
		want   int
	}{
		{"Bearer key-of-a", 200}, {"bearer key-of-b", 200}, {"", 401}, {"Bearer ", 401}, {"Basic key-of-a", 401}, {"Bearer key-of-c", 401}, {"Bearer key-of-a ", 200}, {"key-of-a", 401},
	} {
		a := w.do("GET", "/v1/sessions", "", "Authorization", tt.header)
		if a.status != tt.want {
			t.Errorf("%q: %d %s", tt.header, a.status, a.body)
		}
		if a.status == 401 && (a.header.Get("WWW-Authenticate") == "" || strings.Contains(string(a.body), "key-of")) {
			t.Errorf("%q: %v %s", tt.header, a.header, a.body)
		}
	}
	for _, path := range []string{"/", "/healthz", "/readyz", "/openapi.json"} {
		if a := w.do("GET", path, ""); a.status != 200 {
			t.Errorf("%s without a key: %d", path, a.status)
		}
	}
	for _, rt := range routes {
		if rt.flags&open == 0 {
			if a := w.do(rt.method, strings.NewReplacer("{", "", "}", "").Replace(rt.pattern), ""); a.status != 401 {
				t.Errorf("%s %s without a key: %d", rt.method, rt.pattern, a.status)
			}
		}
	}
}

// TestTenants: what one tenant makes does not exist for another.
func TestTenants(t *testing.T) {
	w := newWorld(t, keys)
	a, b := []string{"Authorization", "Bearer key-of-a"}, []string{"Authorization", "Bearer key-of-b"}
	id := w.session(a...)
	turn := w.do("POST", "/v1/sessions/"+id+"/turns", `{"input":"hello"}`, a...).get(t, "turn_id")
	if r := w.do("PUT", "/v1/agents/mine", `{"provider":"script"}`, a...); r.status != 201 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	s := "/v1/sessions/" + id
	for _, tt := range []struct{ method, path, body string }{
		{"GET", s, ""}, {"DELETE", s, ""}, {"POST", s + "/turns", `{"input":"x"}`}, {"POST", s + "/cancel", ""}, {"GET", s + "/events", ""},
		{"GET", s + "/messages", ""}, {"GET", s + "/turns/" + turn, ""}, {"GET", "/v1/agents/mine", ""}, {"DELETE", "/v1/agents/mine", ""},
		{"GET", "/v1/models/mine", ""}, {"POST", "/v1/chat/completions", `{"model":"mine","messages":[{"role":"user","content":"x"}]}`},
	} {
		if r := w.do(tt.method, tt.path, tt.body, b...); r.status != 404 {
			t.Errorf("%s %s of another tenant: %d %s", tt.method, tt.path, r.status, r.body)
		}
	}
	for _, path := range []string{"/v1/sessions", "/v1/agents", "/v1/models"} {
		if r := w.do("GET", path, "", b...); strings.Contains(string(r.body), id) || strings.Contains(string(r.body), "mine") {
			t.Errorf("%s shows what is another tenant's: %s", path, r.body)
		}
	}
	if r := w.do("POST", "/v1/sessions", `{"agent":"demo","id":"`+id+`"}`, b...); r.status != 201 {
		t.Errorf("the ID is taken by another tenant: %d %s", r.status, r.body)
	}
	if r := w.do("GET", s, "", a...); r.get(t, "messages") != "2" {
		t.Errorf("a's own session: %s", r.body)
	}
}

func TestForeignPages(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.LocalOnly = true })
	for _, tt := range []struct {
		name, method, path, body string
		headers                  []string
		want                     int
	}{
		{"own page", "POST", "/v1/sessions", `{"agent":"demo"}`, []string{"Sec-Fetch-Site", "same-origin"}, 201},
		{"no page", "POST", "/v1/sessions", `{"agent":"demo"}`, nil, 201},
		{"foreign page", "POST", "/v1/sessions", `{"agent":"demo"}`, []string{"Sec-Fetch-Site", "cross-site"}, 403},
		{"foreign origin", "POST", "/v1/sessions", `{"agent":"demo"}`, []string{"Origin", "http://evil.example"}, 403},
		{"foreign name", "GET", "/v1/sessions", "", []string{"Host", "evil.example"}, 403},
		{"foreign name with port", "GET", "/v1/sessions", "", []string{"Host", "127.0.0.1.evil.example:8080"}, 403},
		{"localhost", "GET", "/v1/sessions", "", []string{"Host", "localhost:1"}, 200},
		{"sub of localhost", "GET", "/v1/sessions", "", []string{"Host", "a.localhost"}, 200},
		{"IPv6", "GET", "/v1/sessions", "", []string{"Host", "[::1]:8080"}, 200},
		{"IPv6 without port", "GET", "/v1/sessions", "", []string{"Host", "[::1]"}, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := w.request(tt.method, tt.path, tt.body, tt.headers...)
			if len(tt.headers) > 0 && tt.headers[0] == "Host" {
				req.Host = tt.headers[1]
			}
			resp, err := w.srv.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != tt.want {
				t.Errorf("%d, want %d", resp.StatusCode, tt.want)
			}
		})
	}
}

func TestPanicIsAnswered(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Metrics = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("secret detail") })
	})
	a := w.do("GET", "/metrics", "", "X-Request-Id", "mine.1")
	if a.status != 500 || a.get(t, "error.code") != "internal" || strings.Contains(string(a.body), "secret") || !strings.Contains(string(a.body), "mine.1") {
		t.Errorf("%d %s", a.status, a.body)
	}
	if log := w.log.String(); !strings.Contains(log, "mine.1") || !strings.Contains(log, "secret detail") {
		t.Errorf("log: %s", log)
	}
	if a := w.do("GET", "/healthz", ""); a.status != 200 {
		t.Errorf("the server is gone: %d", a.status)
	}
}

// TestPanicInTheMiddle: an answer that has begun is broken off, so that the
// client sees that it is not whole.
func TestPanicInTheMiddle(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Metrics = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = rw.Write([]byte("half"))
			_ = http.NewResponseController(rw).Flush()
			panic("late")
		})
	})
	resp, err := w.srv.Client().Do(w.request("GET", "/metrics", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Body.Read(make([]byte, 100)); err == nil || err.Error() == "EOF" {
		t.Errorf("the client is told nothing: %v", err)
	}
}

func TestOverload(t *testing.T) {
	w := newWorld(t)
	var running []*frames
	for range maxTurns {
		running = append(running, w.open("POST", "/v1/sessions/"+w.session()+"/turns", `{"input":"hold","stream":true}`))
	}
	id := w.session()
	for _, tt := range []struct{ path, body, code string }{
		{"/v1/sessions/" + id + "/turns", `{"input":"x"}`, "overloaded"},
		{"/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"x"}]}`, "overloaded"},
	} {
		a := w.do("POST", tt.path, tt.body)
		if a.status != 429 || a.header.Get("Retry-After") == "" || a.get(t, "error.code") != tt.code {
			t.Errorf("%s: %d %v %s", tt.path, a.status, a.header, a.body)
		}
	}
	for range running {
		w.script.release <- struct{}{}
	}
	for _, f := range running {
		f.until("turn.completed")
	}
	if a := w.do("POST", "/v1/sessions/"+id+"/turns", `{"input":"x"}`); a.status != 200 {
		t.Errorf("after the overload: %d %s", a.status, a.body)
	}
}

func TestRequestBound(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.MaxRequests = 1 })
	id := w.session()
	w.awaitRecord("/v1/sessions")
	f := w.open("GET", "/v1/sessions/"+id+"/events", "")
	a := w.do("GET", "/v1/sessions", "")
	if a.status != 503 || a.header.Get("Retry-After") != "1" || a.get(t, "error.code") != "too_many_requests" {
		t.Errorf("%d %v %s", a.status, a.header, a.body)
	}
	if a := w.do("GET", "/readyz", ""); a.status != 200 {
		t.Errorf("readyz while full: %d", a.status)
	}
	_ = f.resp.Body.Close()
	w.awaitRecord("/v1/sessions/{session_id}/events")
	if a := w.do("GET", "/v1/sessions", ""); a.status != 200 {
		t.Errorf("after the stream has ended: %d %s", a.status, a.body)
	}
}
