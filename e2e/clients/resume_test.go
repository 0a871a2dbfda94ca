//go:build e2e

package clients

import (
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestResumeAfterKill cuts the power in the middle of an answer. The client
// comes back to a new process with its last event ID and must end up with what
// an undisturbed reader of the log has: no gap, nothing twice.
func TestResumeAfterKill(t *testing.T) {
	conf := onMock(mock(t, "MOCK_TOKENS=60", "MOCK_TPS=100"))
	s := serve(t, setup{config: conf})
	p := plain{url: s.url}
	id := p.newSession(t, "helper")
	if first := p.say(t, id, "first"); first.Status != "completed" {
		t.Fatalf("the first turn: %+v", first)
	}

	st := p.startTurn(t, id, "second", "")
	before := st.deltas(t, 5)
	shown := assemble(t, "", before)
	s.kill()
	for f, ok := st.next(t); ok; f, ok = st.next(t) { // what was under way when it died
		before = append(before, f)
	}
	had := durable(before)
	if len(had) == 0 || had[0].name != "turn.started" || had[0].turnID() == "" {
		t.Fatalf("a turn's stream must begin with turn.started:\n%s", show(before))
	}
	turnID, last := had[0].turnID(), had[len(had)-1].id

	s = serve(t, setup{config: conf, data: s.data})
	p.url = s.url
	after := p.follow(t, id, "?turn_id="+turnID, "Last-Event-ID", last).rest(t)
	if len(after) == 0 || after[len(after)-1].name != "turn.completed" {
		t.Fatalf("the turn must go on to its end after the restart:\n%s", show(after))
	}
	if !strings.Contains(names(after), "turn.resumed") {
		t.Errorf("a client must be told that the turn was resumed:\n%s", show(after))
	}
	all := p.follow(t, id, "?turn_id="+turnID).rest(t)
	sameFrames(t, "before the kill and after it", append(had, durable(after)...), all)
	text := lastText(all)
	if text == "" || !strings.HasPrefix(text, shown) {
		t.Errorf("shown before the kill: %q, in the end: %q", shown, text)
	}
	if got := assemble(t, "", after); got != text && got != "" {
		t.Errorf("deltas after the restart make %q, the message is %q", got, text)
	}
	want := "user:first|assistant:" + text + "|user:second|assistant:" + text
	if got := roles(p.messages(t, id)); got != want {
		t.Errorf("transcript:\n%s\nwant\n%s", got, want)
	}
	// A client that has had the end is told not to come back.
	p.do(t, http.StatusNoContent, "GET", "/v1/sessions/"+id+"/events?turn_id="+turnID, "", nil, "Last-Event-ID", all[len(all)-1].id)
}

// TestKillInTool cuts the power while a tool is being called. The call is made
// again under the same idempotency key, and has one result.
func TestKillInTool(t *testing.T) {
	h := newToolHost(t)
	conf := toolConfig(mock(t, "MOCK_TOOL=*", `MOCK_TOOL_ARGS={"city":"Oslo"}`), h)
	s := serve(t, setup{config: conf})
	p := plain{url: s.url}
	id := p.newSession(t, "holder")
	st := p.startTurn(t, id, "hold on", "")
	had := durable(st.untilNamed(t, "tool.started"))
	eventually(t, "the call of the tool", func() bool { return len(h.seen("/hold")) == 1 })
	s.kill()

	p.url = serve(t, setup{config: conf, data: s.data}).url
	after := p.follow(t, id, "?turn_id="+had[0].turnID(), "Last-Event-ID", had[len(had)-1].id).rest(t)
	if len(after) == 0 || after[len(after)-1].name != "turn.completed" {
		t.Fatalf("the turn must go on to its end after the restart:\n%s", show(after))
	}
	sameFrames(t, "before the kill and after it", append(had, durable(after)...), p.follow(t, id, "?turn_id="+had[0].turnID()).rest(t))
	if calls := h.seen("/hold"); len(calls) != 2 || calls[0].key == "" || calls[0].key != calls[1].key || calls[0].body != calls[1].body {
		t.Errorf("the tool server saw %+v, want the same call twice", calls)
	}
	ms := p.messages(t, id)
	answered(t, ms)
	if results := toolResults(ms); len(results) != 1 || results[0].text() != `{"city":"Oslo","sky":"clear"}` {
		t.Errorf("transcript: %s", roles(ms))
	}
}

// TestResumeFromEveryCursor reads a session's log from each of its events on.
func TestResumeFromEveryCursor(t *testing.T) {
	s := serve(t, setup{config: onMock(mock(t))})
	p := plain{url: s.url}
	id := p.newSession(t, "helper")
	for i := range 3 {
		p.say(t, id, "question "+strconv.Itoa(i))
	}
	count := 0
	third := func(f frame) bool {
		if terminal(f) {
			count++
		}
		return count == 3
	}
	all := p.follow(t, id, "").until(t, "the third end", third)
	for i, f := range all {
		if f.id == "" {
			t.Fatalf("a replayed event without ID: %s", f)
		}
		if i == len(all)-1 {
			break
		}
		count = strings.Count(names(all[:i+1]), "turn.completed")
		sameFrames(t, "from "+f.id, p.follow(t, id, "?after="+f.id).until(t, "the third end", third), all[i+1:])
	}
	p.refused(t, 400, "bad_cursor", "GET", "/v1/sessions/"+id+"/events?after=soon", "")
	p.refused(t, 400, "cursor_ahead", "GET", "/v1/sessions/"+id+"/events", "", "Last-Event-ID", "99999999.0")
}

// TestLiveWatcher follows a session while another client talks in it.
func TestLiveWatcher(t *testing.T) {
	s := serve(t, setup{config: onMock(mock(t, "MOCK_TTFT_MS=50", "MOCK_TPS=100"))})
	p := plain{url: s.url}
	id := p.newSession(t, "helper")
	watcher := p.follow(t, id, "")
	var seen []frame
	for i := range 3 {
		said := p.startTurn(t, id, "question "+strconv.Itoa(i), "").rest(t)
		got := watcher.until(t, "the turn's end", terminal)
		sameFrames(t, "the watcher and the caller", got, said)
		if text := assemble(t, "", got); text != lastText(said) {
			t.Errorf("the watcher saw %q live, the message is %q", text, lastText(said))
		}
		seen = append(seen, got...)
	}
	n := 0
	replay := p.follow(t, id, "").until(t, "all", func(f frame) bool { n++; return n == len(durable(seen)) })
	sameFrames(t, "live and replayed", seen, replay)
}

// TestDrain: SIGTERM lets the running turn finish, tells watchers, refuses new
// turns meanwhile, and ends with 0. The next process has everything.
func TestDrain(t *testing.T) {
	conf := onMock(mock(t, "MOCK_TOKENS=80", "MOCK_TPS=80"))
	s := serve(t, setup{config: conf})
	p := plain{url: s.url}
	id, other := p.newSession(t, "helper"), p.newSession(t, "helper")
	watcher := p.follow(t, other, "")
	st := p.startTurn(t, id, "a long one", "")
	st.deltas(t, 2)
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "/readyz says 503", func() bool {
		a, err := p.try("GET", "/readyz", "")
		return err == nil && a.status == http.StatusServiceUnavailable
	})
	for _, path := range []string{"/v1/sessions/" + other + "/turns", "/v1/sessions"} {
		body := map[bool]string{true: `{"agent":"helper"}`, false: `{"input":"x"}`}[path == "/v1/sessions"]
		if a := p.refused(t, 503, "draining", "POST", path, body); a.header.Get("Retry-After") == "" {
			t.Errorf("POST %s: 503 without Retry-After", path)
		}
	}
	if got := names(watcher.rest(t)); got != "stream.closed" {
		t.Errorf("a watcher of the whole session got %q at the end, want stream.closed", got)
	}
	rest := st.rest(t)
	if len(rest) == 0 || rest[len(rest)-1].name != "turn.completed" {
		t.Fatalf("the running turn must finish:\n%s", show(rest))
	}
	if code := s.code(t); code != 0 {
		t.Fatalf("exit code %d, want 0", code)
	}
	p.url = serve(t, setup{config: conf, data: s.data}).url
	if got, want := roles(p.messages(t, id)), "user:a long one|assistant:"+lastText(rest); got != want {
		t.Errorf("after the restart: %s, want %s", got, want)
	}
}

// TestDrainTimeout: a turn that outlasts the drain is neither lost nor failed;
// the next process goes on with it.
func TestDrainTimeout(t *testing.T) {
	conf := onMock(mock(t, "MOCK_TOKENS=100", "MOCK_TPS=50")) // two seconds
	s := serve(t, setup{config: conf, args: []string{"--drain-timeout", "100ms"}})
	p := plain{url: s.url}
	id := p.newSession(t, "helper")
	st := p.startTurn(t, id, "a very long one", "")
	first := st.deltas(t, 1)
	s.stop(t)
	last := ""
	for f, ok := st.next(t); ok; f, ok = st.next(t) {
		if last = f.name; terminal(f) {
			t.Errorf("the turn must not end with the server: %s", f)
		}
	}
	if last != "stream.closed" {
		t.Errorf("the stream ended with %q, and must say that it was closed", last)
	}
	p.url = serve(t, setup{config: conf, data: s.data}).url
	rest := p.follow(t, id, "?turn_id="+first[0].turnID(), "Last-Event-ID", first[0].id).rest(t)
	if len(rest) == 0 || rest[len(rest)-1].name != "turn.completed" {
		t.Fatalf("the turn must go on at the next start:\n%s", show(rest))
	}
}
