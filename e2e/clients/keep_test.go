//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestIdempotencyKey: the same key is the same turn, whether asked again at
// once, at the same time, or of the next process.
func TestIdempotencyKey(t *testing.T) {
	s := serve(t, setup{})
	p := plain{url: s.url}
	id := p.newSession(t, "demo")
	at := "/v1/sessions/" + id + "/turns"
	results := collect(6, func(int) (answer, error) {
		return p.try("POST", at, turnBody("pay the bill", `,"stream":false`), "Idempotency-Key", "bill-1")
	})
	var first turn
	for i, r := range results {
		var tr turn
		if r.err != nil || r.status != 200 || json.Unmarshal([]byte(r.body), &tr) != nil {
			t.Fatalf("caller %d: %v %+v", i, r.err, r.answer)
		}
		if i == 0 {
			first = tr
		}
		if tr.TurnID != first.TurnID || tr.Status != "completed" || tr.Text != first.Text {
			t.Errorf("caller %d got %+v, caller 0 %+v", i, tr, first)
		}
	}
	s.kill()
	p.url = serve(t, setup{data: s.data}).url
	if again := p.say(t, id, "pay the bill", "Idempotency-Key", "bill-1"); again.TurnID != first.TurnID || again.Text != first.Text {
		t.Errorf("after a restart: %+v, want %+v", again, first)
	}
	// Streamed, the turn that is over is told again from its beginning.
	again := p.startTurn(t, id, "pay the bill", "", "Idempotency-Key", "bill-1").rest(t)
	if got := names(again); got != "turn.started message.completed turn.completed" || lastText(again) != first.Text {
		t.Errorf("streamed again: %s", show(again))
	}
	if other := p.say(t, id, "pay the bill", "Idempotency-Key", "bill-2"); other.TurnID == first.TurnID {
		t.Error("another key gave the same turn")
	}
	if n := strings.Count(roles(p.messages(t, id)), "user:pay the bill"); n != 2 {
		t.Errorf("the input is in the transcript %d times, want 2", n)
	}
	p.refused(t, 400, "invalid_request", "POST", at, `{"input":"x"}`, "Idempotency-Key", strings.Repeat("k", 256))
}

func TestIdempotentCreate(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	body := `{"agent":"demo","id":"mine","metadata":{"user":"ada"}}`
	for range 2 {
		var s struct {
			ID       string
			Metadata struct{ User string }
		}
		p.do(t, http.StatusCreated, "POST", "/v1/sessions", body, &s, "Idempotency-Key", "make-mine")
		if s.ID != "mine" || s.Metadata.User != "ada" {
			t.Errorf("session: %+v", s)
		}
	}
	p.refused(t, http.StatusConflict, "already_exists", "POST", "/v1/sessions", body)
	p.refused(t, http.StatusConflict, "already_exists", "POST", "/v1/sessions", body, "Idempotency-Key", "another")
}

// ownTool is the definition of an agent that brings a tool with a header.
func ownTool(toolURL string) string {
	b, _ := json.Marshal(map[string]any{ // plain values always encode
		"provider": "demo",
		"tools": []any{map[string]any{
			"name": "weather", "description": "The weather of a city",
			"parameters": map[string]any{"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string"}}},
			"http":       map[string]any{"url": toolURL, "headers": map[string]string{"X-Team": "red-and-blue"}},
		}},
	})
	return string(b)
}

// TestAgents: an agent made over the API works at once, is there after a power
// cut, and shows no header values.
func TestAgents(t *testing.T) {
	s := serve(t, setup{})
	p := plain{url: s.url}
	p.do(t, http.StatusCreated, "PUT", "/v1/agents/forecaster", `{"provider":"demo"}`, nil)
	p.do(t, http.StatusOK, "PUT", "/v1/agents/forecaster", `{"provider":"demo","instructions":"Speak of the sky."}`, nil)
	id := p.newSession(t, "forecaster")
	if tr := p.say(t, id, "Hello"); tr.Status != "completed" {
		t.Errorf("%+v", tr)
	}
	s.kill()
	s = serve(t, setup{data: s.data})
	p.url = s.url
	var a struct{ Name, Provider, Instructions, Source string }
	p.do(t, 200, "GET", "/v1/agents/forecaster", "", &a)
	if a.Name != "forecaster" || a.Instructions != "Speak of the sky." || a.Source != "api" {
		t.Errorf("after a restart: %+v", a)
	}
	if tr := p.say(t, id, "Hello again"); tr.Status != "completed" || !strings.Contains(tr.Text, "turn 2") {
		t.Errorf("its session after a restart: %+v", tr)
	}
	var list struct{ Agents []struct{ Name string } }
	p.do(t, 200, "GET", "/v1/agents", "", &list)
	if len(list.Agents) != 2 || list.Agents[0].Name != "demo" || list.Agents[1].Name != "forecaster" {
		t.Errorf("agents: %+v", list)
	}

	p.refused(t, 409, "agent_in_config", "PUT", "/v1/agents/demo", `{"provider":"demo"}`)
	p.refused(t, 409, "agent_in_config", "DELETE", "/v1/agents/demo", "")
	p.refused(t, 409, "already_exists", "POST", "/v1/agents", `{"name":"forecaster","provider":"demo"}`)
	p.refused(t, 400, "invalid_agent", "PUT", "/v1/agents/x", `{"provider":"nobody"}`)
	p.refused(t, 400, "invalid_agent", "PUT", "/v1/agents/x", `{"provider":"demo","tools":["unknown"]}`)
	p.refused(t, 400, "invalid_request", "PUT", "/v1/agents/x", `{"provider":"demo","tols":[]}`)

	p.do(t, http.StatusNoContent, "DELETE", "/v1/agents/forecaster", "", nil)
	p.refused(t, 404, "agent_not_found", "GET", "/v1/agents/forecaster", "")
	if tr := p.say(t, id, "Anybody there?"); tr.Status != "failed" || tr.Error == nil || tr.Error.Message == "" {
		t.Errorf("a turn of a deleted agent must fail and say why: %+v", tr)
	}
	s.kill()
	p.url = serve(t, setup{data: s.data}).url
	p.refused(t, 404, "agent_not_found", "GET", "/v1/agents/forecaster", "")
}

// TestAgentTools: an agent made over the API uses the tools of the config, here
// two at a time and one with arguments that do not fit.
func TestAgentTools(t *testing.T) {
	h := newToolHost(t)
	p := plain{url: serve(t, setup{config: toolConfig(mock(t), h)}).url}
	p.do(t, http.StatusCreated, "PUT", "/v1/agents/mine", `{"provider":"demo","tools":["weather"]}`, nil)
	id := p.newSession(t, "mine")
	tr := p.say(t, id, "/tool weather {\"city\":\"Oslo\"}\n/tool weather {\"city\":\"Rome\"}")
	if tr.Status != "completed" || len(tr.ToolCalls) != 2 || tr.ToolCalls[0].IsError || tr.ToolCalls[1].IsError {
		t.Errorf("%+v", tr)
	}
	calls := h.seen("/weather")
	if len(calls) != 2 || calls[0].key == calls[1].key {
		t.Errorf("the tool server saw %+v, want two calls with keys of their own", calls)
	}
	bad := p.say(t, id, `/tool weather {"town":1}`)
	if bad.Status != "completed" || len(bad.ToolCalls) != 1 || !bad.ToolCalls[0].IsError {
		t.Errorf("a call with bad arguments must go back to the model as an error: %+v", bad)
	}
	answered(t, p.messages(t, id))
	if len(h.seen("/weather")) != 2 {
		t.Error("a call with bad arguments reached the tool")
	}
}

// TestOwnTool: a client may bring a tool, but neither see header values again
// nor reach into the machine with it.
func TestOwnTool(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	body := ownTool("https://tools.example.com/weather")
	a := p.do(t, http.StatusCreated, "PUT", "/v1/agents/own", body, nil)
	for _, view := range []string{a.body, p.do(t, 200, "GET", "/v1/agents/own", "", nil).body, p.do(t, 200, "GET", "/v1/agents", "", nil).body} {
		if strings.Contains(view, "red-and-blue") || !strings.Contains(view, "X-Team") {
			t.Errorf("a header's name must be shown and its value not: %s", view)
		}
	}
	for _, url := range []string{"http://127.0.0.1:80/", "http://localhost/", "http://[::1]/", "http://10.0.0.1/", "http://169.254.169.254/latest", "file:///etc/passwd"} {
		p.refused(t, 400, "invalid_agent", "PUT", "/v1/agents/spy", ownTool(url))
	}
	p.refused(t, 400, "invalid_agent", "PUT", "/v1/agents/spy", strings.Replace(body, `"headers"`, `"allow_private":true,"headers"`, 1))
	p.refused(t, 404, "agent_not_found", "GET", "/v1/agents/spy", "")
	// A host name that a resolver may take for 127.0.0.1 gets no further.
	h := newToolHost(t)
	p.do(t, http.StatusCreated, "PUT", "/v1/agents/spy", ownTool(strings.Replace(h.url, "127.0.0.1", "2130706433", 1)+"/weather"), nil)
	tr := p.say(t, p.newSession(t, "spy"), `/tool weather {"city":"Oslo"}`)
	if tr.Status != "completed" || len(tr.ToolCalls) != 1 || !tr.ToolCalls[0].IsError || len(h.seen("/weather")) != 0 {
		t.Errorf("%+v; the tool server saw %+v", tr, h.seen("/weather"))
	}
}

// TestListPaging: each session once, newest first, whatever partition it is on.
func TestListPaging(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	const n = 25
	made := map[string]bool{}
	for range n {
		made[p.newSession(t, "demo")] = true
	}
	var got []string
	after := ""
	for page := 0; ; page++ {
		var list struct {
			Sessions []struct{ ID, Agent, Status string }
			Next     string
		}
		p.do(t, 200, "GET", "/v1/sessions?limit=10&after="+after, "", &list)
		for _, s := range list.Sessions {
			got = append(got, s.ID)
			if !made[s.ID] || s.Agent != "demo" || s.Status != "idle" {
				t.Errorf("unknown, or twice, or wrong: %+v", s)
			}
			delete(made, s.ID)
		}
		if page < 2 && len(list.Sessions) != 10 {
			t.Errorf("page %d has %d sessions, want 10", page, len(list.Sessions))
		}
		if after = list.Next; after == "" {
			break
		}
	}
	// IDs made by the server begin with their time, to the millisecond.
	if len(got) != n || !slices.IsSortedFunc(got, func(a, b string) int { return strings.Compare(b, a) }) {
		t.Errorf("%d sessions, want %d, newest first: %v", len(got), n, got)
	}
}

// TestTranscriptPaging reads a conversation in pages of different sizes.
func TestTranscriptPaging(t *testing.T) {
	p := plain{url: serve(t, setup{config: onMock(mock(t))}).url}
	id := p.newSession(t, "helper")
	for i := range 5 {
		p.say(t, id, fmt.Sprintf("question %d", i))
	}
	want := roles(p.messages(t, id))
	if n := strings.Count(want, "user:"); n != 5 {
		t.Fatalf("transcript: %s", want)
	}
	for limit := 1; limit <= 11; limit++ {
		var all []message
		for after := ""; ; {
			var page struct {
				Messages []message
				Next     string
			}
			p.do(t, 200, "GET", fmt.Sprintf("/v1/sessions/%s/messages?limit=%d&after=%s", id, limit, after), "", &page)
			if len(page.Messages) > limit {
				t.Errorf("limit %d gave %d messages", limit, len(page.Messages))
			}
			all = append(all, page.Messages...)
			if after = page.Next; after == "" {
				break
			}
			if len(all) > 20 {
				t.Fatalf("limit %d: the pages never end", limit)
			}
		}
		if got := roles(all); got != want {
			t.Errorf("limit %d: %s\nwant %s", limit, got, want)
		}
	}
}

// TestLogs: the access log and the event log are readable over the API.
func TestLogs(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	p.say(t, id, "Hello")
	for _, path := range []string{"/v1/access-log", "/v1/events"} {
		eventually(t, "the session in "+path, func() bool {
			a, err := p.try("GET", path, "")
			return err == nil && a.status == 200 && strings.Contains(a.body, id)
		})
	}
}
