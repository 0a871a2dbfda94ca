//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// long is a turn of the demo model that takes two seconds.
const long = "/words 100"

func TestInterrupt(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	a := p.startTurn(t, id, long, "")
	a.deltas(t, 3)
	b := p.say(t, id, "Hello there") // interrupt is the default
	rest := a.rest(t)
	if end := rest[len(rest)-1]; end.name != "turn.cancelled" || end.field("reason") == "" {
		t.Errorf("the first caller's stream must end with turn.cancelled and a reason:\n%s", show(rest))
	}
	if b.Status != "completed" || !strings.Contains(b.Text, "Hello there") {
		t.Errorf("the second caller got %+v", b)
	}
	got := roles(p.messages(t, id))
	if part := lastText(rest); part == "" || got != "user:"+long+"|assistant:"+part+"(partial)|user:Hello there|assistant:"+b.Text {
		t.Errorf("transcript: %s", got)
	}
}

// TestInterruptInTurn: many callers at once; the last wins, each gets its own
// result, and none waits for ever.
func TestInterruptInTurn(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	const n = 8
	results := collect(n, func(i int) (answer, error) {
		return p.try("POST", "/v1/sessions/"+id+"/turns", turnBody(fmt.Sprintf("caller %d", i), `,"stream":false`))
	})
	completed, seen := 0, map[string]bool{}
	for i, r := range results {
		var tr turn
		if r.err != nil || r.status != 200 || json.Unmarshal([]byte(r.body), &tr) != nil {
			t.Fatalf("caller %d: %v %+v", i, r.err, r.answer)
		}
		if seen[tr.TurnID] {
			t.Errorf("two callers got turn %s", tr.TurnID)
		}
		seen[tr.TurnID] = true
		switch tr.Status {
		case "completed":
			completed++
			if !strings.Contains(tr.Text, fmt.Sprintf("caller %d", i)) {
				t.Errorf("caller %d got the answer to another: %q", i, tr.Text)
			}
		case "cancelled":
			if tr.Reason == "" {
				t.Errorf("caller %d: cancelled without a reason", i)
			}
		default:
			t.Errorf("caller %d: %+v", i, tr)
		}
	}
	if completed == 0 {
		t.Error("no turn completed: the last one should")
	}
}

type result struct {
	answer
	err error
}

// collect runs n callers at once.
func collect(n int, call func(i int) (answer, error)) []result {
	out := make([]result, n)
	done := make(chan struct{})
	for i := range n {
		go func() {
			out[i].answer, out[i].err = call(i)
			done <- struct{}{}
		}()
	}
	for range n {
		<-done
	}
	return out
}

func TestReject(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	a := p.startTurn(t, id, "/words 40", "")
	a.deltas(t, 1)
	p.refused(t, http.StatusConflict, "busy", "POST", "/v1/sessions/"+id+"/turns", `{"input":"me too","on_busy":"reject"}`)
	rest := a.rest(t)
	if rest[len(rest)-1].name != "turn.completed" {
		t.Errorf("a rejected caller must not disturb the running turn:\n%s", show(rest))
	}
	if got := roles(p.messages(t, id)); strings.Contains(got, "me too") {
		t.Errorf("the rejected input is in the transcript: %s", got)
	}
	p.refused(t, http.StatusBadRequest, "not_built_yet", "POST", "/v1/sessions/"+id+"/turns", `{"input":"x","on_busy":"steer"}`)
}

// TestRefusedInterrupt: a turn that admission refuses does not disturb the one
// that it would have interrupted.
func TestRefusedInterrupt(t *testing.T) {
	p := plain{url: serve(t, setup{args: []string{"--kernel.max_in_flight_turns", "1"}}).url}
	id := p.newSession(t, "demo")
	a := p.startTurn(t, id, "/words 40", "")
	a.deltas(t, 1)
	for range 5 {
		p.refused(t, http.StatusTooManyRequests, "overloaded", "POST", "/v1/sessions/"+id+"/turns", `{"input":"me first"}`)
	}
	rest := a.rest(t)
	if rest[len(rest)-1].name != "turn.completed" {
		t.Errorf("a refused caller must not disturb the running turn:\n%s", show(rest))
	}
	if b := p.say(t, id, "now me"); b.Status != "completed" {
		t.Errorf("when the other has ended: %+v", b)
	}
}

// TestEnqueue: each caller gets the answer to its own question, in the order in
// which the questions were accepted.
func TestEnqueue(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	a := p.startTurn(t, id, "/words 25", "")
	a.deltas(t, 1)
	b := p.startTurn(t, id, "question B", `,"on_busy":"enqueue"`)
	queued := b.untilNamed(t, "turn.queued")
	var s struct {
		Status string
		Queued int    `json:"queued_turns"`
		Active string `json:"active_turn"`
	}
	p.do(t, 200, "GET", "/v1/sessions/"+id, "", &s)
	if s.Status != "running" || s.Queued != 1 || s.Active == "" || s.Active == queued[0].turnID() {
		t.Errorf("the session while one runs and one waits: %+v", s)
	}
	c := p.startTurn(t, id, "question C", `,"on_busy":"enqueue"`)
	c.untilNamed(t, "turn.queued")
	for name, e := range map[string]*events{"25": a, "question B": b, "question C": c} {
		rest := e.rest(t)
		if rest[len(rest)-1].name != "turn.completed" || !strings.Contains(lastText(rest), name) && name != "25" {
			t.Errorf("caller of %q got\n%s", name, show(rest))
		}
	}
	var order []string
	for _, m := range p.messages(t, id) {
		if m.Message.Role == "user" {
			order = append(order, m.text())
		}
	}
	if got := strings.Join(order, ", "); got != "/words 25, question B, question C" {
		t.Errorf("order of the conversation: %s", got)
	}
}

func TestEnqueueBound(t *testing.T) {
	p := plain{url: serve(t, setup{args: []string{"--kernel.max_queued_turns_per_session", "1"}}).url}
	id := p.newSession(t, "demo")
	p.startTurn(t, id, "/words 60", "").deltas(t, 1)
	p.startTurn(t, id, "waits", `,"on_busy":"enqueue"`).untilNamed(t, "turn.queued")
	if a := p.refused(t, 429, "queue_full", "POST", "/v1/sessions/"+id+"/turns", `{"input":"too many","on_busy":"enqueue"}`); a.header.Get("Retry-After") == "" {
		t.Error("429 without Retry-After")
	}
	var n struct{ Cancelled int }
	p.do(t, 200, "POST", "/v1/sessions/"+id+"/cancel", `{}`, &n)
	if n.Cancelled != 2 {
		t.Errorf("cancel stopped %d turns, want the running one and the waiting one", n.Cancelled)
	}
}

// TestCancel: what the client has seen of a cancelled answer stays in the
// conversation, marked as partial, and the upstream call ends at once.
func TestCancel(t *testing.T) {
	model := mock(t, "MOCK_TOKENS=2000", "MOCK_TPS=100")
	p := plain{url: serve(t, setup{config: onMock(model)}).url}
	id := p.newSession(t, "helper")
	st := p.startTurn(t, id, "tell me a lot", "")
	first := st.deltas(t, 4)
	var n struct{ Cancelled int }
	p.do(t, 200, "POST", "/v1/sessions/"+id+"/cancel", `{"turn_id":"`+first[0].turnID()+`","reason":"I have seen enough"}`, &n)
	if n.Cancelled != 1 {
		t.Errorf("cancelled %d, want 1", n.Cancelled)
	}
	rest := st.rest(t)
	end := rest[len(rest)-1]
	if end.name != "turn.cancelled" || end.field("reason") != "I have seen enough" {
		t.Errorf("the stream must end with turn.cancelled and the client's reason, got %s", end)
	}
	shown := assemble(t, assemble(t, "", first), rest)
	ms := p.messages(t, id)
	if len(ms) != 2 || !ms[1].Partial || ms[1].text() == "" || !strings.HasPrefix(ms[1].text(), shown) {
		t.Errorf("shown %q; transcript %s", shown, roles(ms))
	}
	idle(t, model)
	p.do(t, 200, "POST", "/v1/sessions/"+id+"/cancel", "", &n) // nothing runs: fine, and says so
	if n.Cancelled != 0 {
		t.Errorf("a second cancel stopped %d", n.Cancelled)
	}
}

// idle waits until a mock has no call in flight.
func idle(t *testing.T, model string) {
	t.Helper()
	eventually(t, "the end of the upstream call", func() bool {
		var st struct {
			InFlight int `json:"in_flight"`
		}
		a, err := plain{url: model}.try("GET", "/stats", "")
		return err == nil && json.Unmarshal([]byte(a.body), &st) == nil && st.InFlight == 0
	})
}

func TestDeleteWhileRunning(t *testing.T) {
	model := mock(t, "MOCK_TOKENS=2000", "MOCK_TPS=100")
	s := serve(t, setup{config: onMock(model)})
	p := plain{url: s.url}
	id := p.newSession(t, "helper")
	watcher := p.follow(t, id, "")
	st := p.startTurn(t, id, "tell me a lot", "")
	st.deltas(t, 2)
	p.do(t, http.StatusNoContent, "DELETE", "/v1/sessions/"+id, "", nil)
	for name, e := range map[string]*events{"caller": st, "watcher": watcher} {
		rest := e.rest(t)
		if len(rest) == 0 || rest[len(rest)-1].name != "session.deleted" {
			t.Errorf("the %s's stream must end with session.deleted:\n%s", name, show(rest))
		}
	}
	idle(t, model)
	gone := func() {
		t.Helper()
		for _, path := range []string{"", "/events", "/messages"} {
			p.refused(t, 404, "not_found", "GET", "/v1/sessions/"+id+path, "")
		}
		p.refused(t, 404, "not_found", "POST", "/v1/sessions/"+id+"/turns", `{"input":"anybody?"}`)
		p.refused(t, 404, "not_found", "DELETE", "/v1/sessions/"+id, "")
	}
	gone()
	s.kill()
	p.url = serve(t, setup{config: onMock(model), data: s.data}).url
	gone()
	// Its name is free again, and nothing of the old one is in the new one.
	p.do(t, http.StatusCreated, "POST", "/v1/sessions", `{"agent":"helper","id":"`+id+`"}`, nil)
	if ms := p.messages(t, id); len(ms) != 0 {
		t.Errorf("a new session has old messages: %s", roles(ms))
	}
}

// TestClientLeaves: a client that hangs up does not cancel the turn.
func TestClientLeaves(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	st := p.startTurn(t, id, "/words 20", "")
	first := st.deltas(t, 1)
	st.close()
	var tr turn
	p.do(t, 200, "GET", "/v1/sessions/"+id+"/turns/"+first[0].turnID()+"?wait=true", "", &tr)
	if tr.Status != "completed" || tr.Partial {
		t.Errorf("the turn of a client that left: %+v", tr)
	}
}

// TestStatusCodesOfTurns: the ways to get a turn wrong, as a newcomer would.
func TestStatusCodesOfTurns(t *testing.T) {
	p := plain{url: serve(t, setup{}).url}
	id := p.newSession(t, "demo")
	at := "/v1/sessions/" + id + "/turns"
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"no session", "POST", "/v1/sessions/nobody/turns", `{"input":"x"}`, 404, "not_found"},
		{"bad session ID", "GET", "/v1/sessions/no%20body", "", 400, "bad_session_id"},
		{"no agent", "POST", "/v1/sessions", `{"agent":"nobody"}`, 404, "agent_not_found"},
		{"agent left out", "POST", "/v1/sessions", `{}`, 400, "invalid_request"},
		{"no input", "POST", at, `{}`, 400, "invalid_request"},
		{"empty input", "POST", at, `{"input":""}`, 400, "invalid_request"},
		{"a misspelt field", "POST", at, `{"imput":"x"}`, 400, "invalid_request"},
		{"not JSON", "POST", at, `input=x`, 400, "invalid_json"},
		{"cut JSON", "POST", at, `{"input":"x"`, 400, "invalid_json"},
		{"policy unknown", "POST", at, `{"input":"x","on_busy":"wait"}`, 400, "invalid_request"},
		{"a turn that never was", "GET", at + "/turn_0", "", 404, "turn_not_found"},
		{"wrong method", "PUT", at, `{}`, 405, "method_not_allowed"},
		{"wrong path", "GET", "/v1/session", "", 404, "unknown_path"},
		{"misspelt query", "GET", "/v1/sessions?limits=3", "", 400, "invalid_request"},
		{"limit", "GET", "/v1/sessions?limit=0", "", 400, "invalid_request"},
		{"large", "POST", at, turnBody(strings.Repeat("x", 300<<10), ""), 413, "too_large"},
		{"larger", "POST", at, turnBody(strings.Repeat("x", 2<<20), ""), 413, "too_large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := time.Now()
			p.refused(t, c.status, c.code, c.method, c.path, c.body)
			if d := time.Since(start); d > time.Second {
				t.Errorf("a refusal took %v", d)
			}
		})
	}
	if ms := p.messages(t, id); len(ms) != 0 {
		t.Errorf("refused requests left messages: %s", roles(ms))
	}
}
