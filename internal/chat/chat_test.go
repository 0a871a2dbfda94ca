package chat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// script is a server that answers requests in turn; a request that is not the
// next one fails the test.
type script struct {
	t     *testing.T
	mu    sync.Mutex
	steps []step // guarded by mu
	srv   *httptest.Server
}

type step struct {
	request string // method, path and body
	answer  func(w http.ResponseWriter, r *http.Request)
}

func serve(t *testing.T, steps ...step) *script {
	s := &script{t: t, steps: steps}
	s.srv = httptest.NewServer(s)
	t.Cleanup(func() {
		s.srv.CloseClientConnections()
		s.srv.Close()
		if len(s.steps) > 0 {
			t.Errorf("never asked: %s", s.steps[0].request)
		}
	})
	return s
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	got := strings.TrimSpace(r.Method + " " + r.URL.RequestURI() + " " + string(body))
	s.mu.Lock()
	if len(s.steps) == 0 || s.steps[0].request != got {
		s.t.Errorf("unexpected %s, the script goes on with %d steps", got, len(s.steps))
		s.mu.Unlock()
		http.Error(w, "no", http.StatusTeapot)
		return
	}
	answer := s.steps[0].answer
	s.steps = s.steps[1:]
	s.mu.Unlock()
	answer(w, r)
}

func (s *script) client() *Client { return &Client{Target: s.srv.URL + "/", HTTP: s.srv.Client()} }

// stream writes frames and, when broken, cuts the connection.
func stream(broken bool, frames ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("X-Perdure-Turn", "t1")
		w.WriteHeader(http.StatusOK)
		for _, f := range frames {
			_, _ = io.WriteString(w, f)
		}
		_ = http.NewResponseController(w).Flush()
		if broken {
			panic(http.ErrAbortHandler)
		}
	}
}

func answer(status int, body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

const (
	postTurn  = `POST /v1/sessions/s1/turns {"input":"hi","stream":true}`
	started   = "id: 5.0\nevent: turn.started\ndata: {\"turn_id\":\"t1\"}\n\n"
	message   = "id: 7.0\nevent: message.completed\ndata: {\"message\":{\"role\":\"assistant\",\"content\":\"Hello there!\"}}\n\n"
	completed = "id: 7.1\nevent: turn.completed\ndata: {}\n\n"
)

func delta(offset int, text string) string {
	return fmt.Sprintf("event: message.delta\ndata: {\"turn_id\":\"t1\",\"offset\":%d,\"text\":%q}\n\n", offset, text)
}

// converse says one message and gives what is on the screen.
func converse(t *testing.T, s *script) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	err := Run(ctx, Options{Client: s.client(), Session: "s1", Once: "hi", Out: &out})
	return out.String(), err
}

func TestTextIsShownOnce(t *testing.T) {
	for name, frames := range map[string][]string{
		"in pieces":            {started, ": heartbeat\n\n", delta(0, "Hello "), delta(6, "there!"), message, completed},
		"no pieces":            {started, message, completed},
		"some pieces":          {started, delta(0, "Hello "), message, completed},
		"again from the start": {started, delta(0, "Hello "), delta(0, "Hello there"), delta(11, "!"), message, completed},
		"a gap":                {started, delta(6, "there!"), message, completed},
		"old news":             {started, delta(0, "Hello there"), delta(0, "Hello "), delta(6, "there!"), message, completed},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := converse(t, serve(t, step{postTurn, stream(false, frames...)}))
			if err != nil || got != "Hello there!\n" {
				t.Fatalf("%q %v", got, err)
			}
		})
	}
}

func TestBrokenStreamIsResumed(t *testing.T) {
	const events = "GET /v1/sessions/s1/events?"
	got, err := converse(t, serve(t,
		step{postTurn, stream(true, started, delta(0, "Hello "), "event: message.delta\ndata: {\"offset\":6,\"text\":\"NO")},
		step{events + "after=5.0&turn_id=t1", stream(true, ": connected\n\n", delta(0, "Hello th"))},
		step{events + "after=5.0&turn_id=t1", answer(http.StatusServiceUnavailable, `{"error":{"code":"stopping","message":"stopping"}}`)},
		step{events + "after=5.0&turn_id=t1", stream(true, delta(0, "Hello there"), message)},
		step{events + "after=7.0&turn_id=t1", stream(false, completed)},
	))
	if err != nil || strings.ReplaceAll(got, "the server is away; trying again…\n", "") == got {
		t.Fatalf("%q %v", got, err)
	}
	text := strings.NewReplacer("\nthe server is away; trying again…\n", "", "the server is away; trying again…\n", "").Replace(got)
	if strings.TrimSpace(text) != "Hello there!" {
		t.Fatalf("%q", got)
	}
}

func TestStreamThatBrokeBeforeItsFirstEventIsResumed(t *testing.T) {
	got, err := converse(t, serve(t,
		step{postTurn, stream(true)},
		step{"GET /v1/sessions/s1/events?turn_id=t1", stream(false, started, message, completed)},
	))
	if err != nil || got != "Hello there!\n" {
		t.Fatalf("%q %v", got, err)
	}
}

func TestTurnThatEndedWithTheStream(t *testing.T) {
	_, err := converse(t, serve(t,
		step{postTurn, stream(true, started)},
		step{"GET /v1/sessions/s1/events?after=5.0&turn_id=t1", answer(http.StatusNoContent, "")},
	))
	if err != nil {
		t.Fatal(err)
	}
}

// What will be refused again is not asked again.
func TestRefusedResumeEnds(t *testing.T) {
	_, err := converse(t, serve(t,
		step{postTurn, stream(true, started)},
		step{"GET /v1/sessions/s1/events?after=5.0&turn_id=t1", answer(http.StatusNotFound, `{"error":{"code":"session_not_found","message":"session \"s1\" does not exist"}}`)},
	))
	var refused *Refusal
	if !errors.As(err, &refused) || refused.Status != http.StatusNotFound {
		t.Fatalf("want the refusal, got %v", err)
	}
}

func TestRefusalsAreShown(t *testing.T) {
	for want, body := range map[string]string{
		"no room (429 overloaded); try later": `{"error":{"code":"overloaded","message":"no room","hint":"try later"}}`,
		"the server answered 429":             "<html>",
	} {
		_, err := converse(t, serve(t, step{postTurn, answer(http.StatusTooManyRequests, body)}))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// In a conversation a refusal is shown and the next line is read.
func TestConversationGoesOnAfterARefusal(t *testing.T) {
	s := serve(t,
		step{`POST /v1/sessions {"agent":"demo"}`, answer(http.StatusCreated, `{"id":"s1"}`)},
		step{postTurn, answer(http.StatusConflict, `{"error":{"code":"busy","message":"the session is busy"}}`)},
		step{`POST /v1/sessions {"agent":"demo"}`, answer(http.StatusCreated, `{"id":"s2"}`)},
		step{`POST /v1/sessions/s2/turns {"input":"hi","stream":true}`, stream(false, started,
			"event: tool.started\ndata: {\"name\":\"look\",\"arguments\":\"{}\"}\n\n",
			"event: tool.completed\ndata: {\"name\":\"look\",\"content\":\"no\\nluck\",\"is_error\":true}\n\n",
			"id: 9.0\nevent: turn.failed\ndata: {\"error\":{\"code\":\"c\",\"message\":\"it broke\",\"hint\":\"mend it\"}}\n\n")})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	err := Run(ctx, Options{Client: s.client(), Agent: "demo", In: strings.NewReader("hi\n/id\n\n/help\n/new\nhi\n"), Out: &out})
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for _, want := range []string{"Session s1", "the session is busy (409 busy)", "s1\n", "Commands:", "Session s2", "⚙ look {}", "✗ look: no luck", "failed: it broke (mend it)"} {
		i := strings.Index(out.String()[at:], want)
		if i < 0 {
			t.Fatalf("no %q in its place:\n%s", want, out.String())
		}
		at += i
	}
}

func TestInterruptCancelsTheTurn(t *testing.T) {
	asked := make(chan struct{})
	interrupts := make(chan struct{})
	s := serve(t,
		step{postTurn, func(w http.ResponseWriter, r *http.Request) {
			stream(false, started, delta(0, "Hel"))(w, r)
			interrupts <- struct{}{}
			<-asked
			stream(false, "id: 8.0\nevent: turn.cancelled\ndata: {\"reason\":\"cancelled in the terminal\"}\n\n")(w, r)
		}},
		step{`POST /v1/sessions/s1/cancel {"reason":"cancelled in the terminal"}`, func(w http.ResponseWriter, r *http.Request) {
			answer(http.StatusOK, "{}")(w, r)
			close(asked)
		}})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	err := Run(ctx, Options{Client: s.client(), Session: "s1", Once: "hi", Out: &out, Interrupts: interrupts})
	var turn *TurnError
	if !errors.As(err, &turn) || turn.Reason != "cancelled in the terminal" || out.String() != "Hel\n" {
		t.Fatalf("%q %v", out.String(), err)
	}
}

func TestUnreachableServer(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	srv.Close()
	err := Run(context.Background(), Options{Client: &Client{Target: srv.URL, HTTP: &http.Client{}}, Agent: "demo", Out: io.Discard})
	if err == nil || !strings.Contains(err.Error(), "not reachable") {
		t.Fatal(err)
	}
}

func TestKeyIsSent(t *testing.T) {
	s := serve(t, step{"POST /v1/sessions {\"agent\":\"a\"}", func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Authorization"); got != "Bearer k1" {
			t.Errorf("authorization %q", got)
		}
		answer(http.StatusCreated, `{"id":"s1"}`)(w, r)
	}})
	c := s.client()
	c.Key = "k1"
	if id, err := c.Create(context.Background(), "a"); err != nil || id != "s1" {
		t.Fatal(id, err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(started + delta(0, "a") + message + completed)
	f.Add("event: x\r\ndata: 1\r\n\r\n")
	f.Add("id: 1\n\nevent: y\n\n")
	f.Add(": only\n:\n\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		n := 0
		last, done, err := read(strings.NewReader(text), func(ev Event) {
			n++
			(&screen{w: io.Discard}).event(ev)
			if ev.Name == "" || strings.ContainsAny(ev.ID+ev.Name, "\n") {
				t.Fatalf("%+v", ev)
			}
		})
		if done == (err != nil) || last != "" && n == 0 {
			t.Fatalf("%q %t %v after %d events", last, done, err, n)
		}
	})
}

// Whatever pieces come, in any order, nothing is shown twice and nothing out of
// place.
func FuzzDeltas(f *testing.F) {
	f.Add([]byte{0, 3, 3, 4, 0, 9})
	f.Fuzz(func(t *testing.T, cuts []byte) {
		const text = "0123456789abcdefghijklmnopqrstuvwxyz"
		var out bytes.Buffer
		s := &screen{w: &out}
		for i := 0; i+1 < len(cuts); i += 2 {
			from := int(cuts[i]) % len(text)
			to := from + int(cuts[i+1])%(len(text)-from+1)
			b, err := json.Marshal(map[string]any{"offset": from, "text": text[from:to]})
			if err != nil {
				t.Fatal(err)
			}
			s.event(Event{Name: "message.delta", Data: b})
			if !strings.HasPrefix(text, out.String()) {
				t.Fatalf("on the screen: %q", out.String())
			}
		}
		b, _ := json.Marshal(map[string]any{"message": map[string]string{"content": text}})
		s.event(Event{Name: "message.completed", Data: b})
		if out.String() != text+"\n" {
			t.Fatalf("on the screen: %q", out.String())
		}
	})
}

func TestAgentIsPicked(t *testing.T) {
	for _, c := range []struct{ list, want, problem string }{
		{`["only"]`, "only", ""},
		{`["a","demo"]`, "demo", ""},
		{`["a","b"]`, "", "choose one with --agent: a, b"},
		{`[]`, "", "no agent"},
	} {
		var names []string
		if err := json.Unmarshal([]byte(c.list), &names); err != nil {
			t.Fatal(err)
		}
		var body struct {
			Agents []map[string]string `json:"agents"`
		}
		for _, n := range names {
			body.Agents = append(body.Agents, map[string]string{"name": n})
		}
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		s := serve(t, step{"GET /v1/agents", answer(http.StatusOK, string(raw))})
		got, err := pick(context.Background(), s.client())
		if got != c.want || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%s: %q, %v", c.list, got, err)
		}
	}
}
