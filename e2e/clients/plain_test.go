//go:build e2e

package clients

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// plain is an HTTP client that knows nothing but the documents.
type plain struct {
	url string
	key string
}

// answer is a response read to its end.
type answer struct {
	status int
	header http.Header
	body   string
}

func (p plain) request(method, path, body string, header ...string) (*http.Response, error) {
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	req, err := http.NewRequestWithContext(ctx, method, p.url+path, r)
	if err != nil {
		cancel()
		return nil, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if p.key != "" {
		req.Header.Set("Authorization", "Bearer "+p.key)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		cancel()
		return nil, err
	}
	resp.Body = &bodyWithCancel{resp.Body, cancel}
	return resp, nil
}

type bodyWithCancel struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (b *bodyWithCancel) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}

// try sends a request and reads the whole answer. For any goroutine.
func (p plain) try(method, path, body string, header ...string) (answer, error) {
	resp, err := p.request(method, path, body, header...)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(b)}, err
}

// do is try that must get the wanted status; into, if not nil, gets the body.
func (p plain) do(t *testing.T, want int, method, path, body string, into any, header ...string) answer {
	t.Helper()
	a, err := p.try(method, path, body, header...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if a.status != want {
		t.Fatalf("%s %s %s: status %d, want %d: %s", method, path, body, a.status, want, a.body)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(a.body), into); err != nil {
			t.Fatalf("%s %s: %v in %s", method, path, err, a.body)
		}
	}
	return a
}

// refused is do for an error: it must be in the one form, with that code.
func (p plain) refused(t *testing.T, status int, code, method, path, body string, header ...string) answer {
	t.Helper()
	var e struct {
		Error struct{ Code, Message, Hint string }
	}
	a := p.do(t, status, method, path, body, &e, header...)
	if e.Error.Code != code || e.Error.Message == "" {
		t.Fatalf("%s %s %s: want error %q with a message, got %s", method, path, body, code, a.body)
	}
	return a
}

func (p plain) newSession(t *testing.T, agent string) string {
	t.Helper()
	var s struct{ ID string }
	p.do(t, http.StatusCreated, "POST", "/v1/sessions", `{"agent":"`+agent+`"}`, &s)
	if s.ID == "" {
		t.Fatal("a session without an ID")
	}
	return s.ID
}

// turn is the JSON form of a turn.
type turn struct {
	TurnID       string `json:"turn_id"`
	SessionID    string `json:"session_id"`
	Status       string
	Text         string
	FinishReason string `json:"finish_reason"`
	Partial      bool
	ToolCalls    []struct {
		Name    string
		Content string
		IsError bool `json:"is_error"`
	} `json:"tool_calls"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
	}
	Error  *struct{ Code, Message, Hint string }
	Reason string
}

func turnBody(input, more string) string {
	b, _ := json.Marshal(input) // a string always encodes
	return `{"input":` + string(b) + more + `}`
}

// say gives input and waits for the turn's result.
func (p plain) say(t *testing.T, session, input string, header ...string) turn {
	t.Helper()
	var out turn
	p.do(t, http.StatusOK, "POST", "/v1/sessions/"+session+"/turns", turnBody(input, `,"stream":false`), &out, header...)
	return out
}

// message is one line of a transcript.
type message struct {
	EventID string `json:"event_id"`
	TurnID  string `json:"turn_id"`
	Partial bool
	Message struct {
		Role      string
		Content   any
		CallID    string `json:"tool_call_id"`
		ToolCalls []struct {
			ID       string
			Function struct{ Name, Arguments string }
		} `json:"tool_calls"`
	}
}

func (m message) text() string { s, _ := m.Message.Content.(string); return s }

func (p plain) messages(t *testing.T, session string) []message {
	t.Helper()
	var out []message
	after := ""
	for range 100 {
		var page struct {
			Messages []message
			Next     string
		}
		p.do(t, http.StatusOK, "GET", "/v1/sessions/"+session+"/messages?limit=7&after="+after, "", &page)
		out = append(out, page.Messages...)
		if page.Next == "" {
			return out
		}
		after = page.Next
	}
	t.Fatal("the transcript never ends")
	return nil
}

// roles is a transcript in short: "user:Hi|assistant:Hello".
func roles(ms []message) string {
	var b []string
	for _, m := range ms {
		s := m.Message.Role + ":" + m.text()
		if m.Partial {
			s += "(partial)"
		}
		b = append(b, s)
	}
	return strings.Join(b, "|")
}

// frame is one event of a stream.
type frame struct {
	id, name string
	data     []byte
}

func (f frame) field(name string) any {
	var m map[string]any
	_ = json.Unmarshal(f.data, &m) // checked when it was read
	return m[name]
}

func (f frame) turnID() string { s, _ := f.field("turn_id").(string); return s }

func (f frame) String() string { return fmt.Sprintf("%s %s %.200s", f.id, f.name, f.data) }

// events is an open stream, read in the background so that a test can look at
// it while it runs.
type events struct {
	resp   *http.Response
	frames chan frame
	err    error // set before frames is closed
}

// stream opens a stream; it must be one.
func (p plain) stream(t *testing.T, method, path, body string, header ...string) *events {
	t.Helper()
	resp, err := p.request(method, path, body, append(header, "Accept", "text/event-stream")...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || ct != "text/event-stream" {
		t.Fatalf("%s %s: status %d, type %q: %s", method, path, resp.StatusCode, ct, readAll(t, resp.Body))
	}
	e := &events{resp: resp, frames: make(chan frame, 4096)}
	go e.read()
	t.Cleanup(e.close)
	return e
}

// startTurn begins a turn and streams it.
func (p plain) startTurn(t *testing.T, session, input, more string, header ...string) *events {
	t.Helper()
	return p.stream(t, "POST", "/v1/sessions/"+session+"/turns", turnBody(input, `,"stream":true`+more), header...)
}

func (p plain) follow(t *testing.T, session, query string, header ...string) *events {
	t.Helper()
	return p.stream(t, "GET", "/v1/sessions/"+session+"/events"+query, "", header...)
}

func (e *events) close() { _ = e.resp.Body.Close() }

// read follows the form of server-sent events: lines of fields, an empty line
// ends an event, a line that begins with a colon is a comment.
func (e *events) read() {
	defer close(e.frames)
	sc := bufio.NewScanner(e.resp.Body)
	sc.Buffer(nil, 8<<20)
	var f frame
	for sc.Scan() {
		line := sc.Bytes()
		if len(line) == 0 {
			if f.name != "" || f.data != nil {
				if !json.Valid(f.data) {
					e.err = fmt.Errorf("the data of %s is not JSON", f)
					return
				}
				e.frames <- f
			}
			f = frame{}
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "id":
			f.id = string(value)
		case "event":
			f.name = string(value)
		case "data":
			f.data = append(f.data, value...)
		case "":
		default:
			e.err = fmt.Errorf("not a line of an event stream: %q", line)
			return
		}
	}
	if e.err = sc.Err(); e.err == nil && (f.name != "" || f.id != "") {
		e.err = fmt.Errorf("the stream ended inside an event: %s", f)
	}
}

// next waits for the next frame; ok is false at the stream's end.
func (e *events) next(t *testing.T) (frame, bool) {
	t.Helper()
	select {
	case f, ok := <-e.frames:
		return f, ok
	case <-time.After(patience):
		t.Fatalf("no frame and no end of the stream within %v", patience)
		return frame{}, false
	}
}

// until reads up to the first frame that is wanted.
func (e *events) until(t *testing.T, what string, want func(frame) bool) []frame {
	t.Helper()
	var out []frame
	for {
		f, ok := e.next(t)
		if !ok {
			t.Fatalf("the stream ended (%v) before %s; it had:\n%s", e.err, what, show(out))
		}
		out = append(out, f)
		if want(f) {
			return out
		}
	}
}

func (e *events) untilNamed(t *testing.T, name string) []frame {
	t.Helper()
	return e.until(t, name, func(f frame) bool { return f.name == name })
}

// deltas reads until n deltas came.
func (e *events) deltas(t *testing.T, n int) []frame {
	t.Helper()
	return e.until(t, fmt.Sprintf("%d deltas", n), func(f frame) bool {
		if f.name == "message.delta" {
			n--
		}
		return n <= 0
	})
}

// rest reads to the end, which must be a clean one.
func (e *events) rest(t *testing.T) []frame {
	t.Helper()
	var out []frame
	for {
		f, ok := e.next(t)
		if !ok {
			if e.err != nil {
				t.Fatalf("the stream broke: %v after\n%s", e.err, show(out))
			}
			return out
		}
		out = append(out, f)
	}
}

func show(frames []frame) string {
	var b strings.Builder
	for _, f := range frames {
		fmt.Fprintln(&b, "  ", f)
	}
	return b.String()
}

// durable gives the frames with an ID.
func durable(frames []frame) []frame {
	var out []frame
	for _, f := range frames {
		if f.id != "" {
			out = append(out, f)
		}
	}
	return out
}

// names lists the names of frames, deltas once in a row.
func names(frames []frame) string {
	var out []string
	for _, f := range frames {
		if f.name != "message.delta" || len(out) == 0 || out[len(out)-1] != f.name {
			out = append(out, f.name)
		}
	}
	return strings.Join(out, " ")
}

// assemble puts deltas together by their offsets, as a client's screen would;
// text that was shown is never taken back.
func assemble(t *testing.T, text string, frames []frame) string {
	t.Helper()
	for _, f := range frames {
		if f.name != "message.delta" {
			continue
		}
		var d struct {
			Offset int
			Text   string
		}
		if err := json.Unmarshal(f.data, &d); err != nil {
			t.Fatal(err)
		}
		if d.Offset > len(text) {
			t.Fatalf("a gap in the text: %d bytes are shown, the next delta is %s", len(text), f)
		}
		if end := d.Offset + len(d.Text); end > len(text) {
			text = text[:d.Offset] + d.Text
		}
	}
	return text
}

// lastText is the text of the last completed message.
func lastText(frames []frame) string {
	for i := len(frames) - 1; i >= 0; i-- {
		if frames[i].name == "message.completed" {
			m, _ := frames[i].field("message").(map[string]any)
			s, _ := m["content"].(string)
			return s
		}
	}
	return ""
}

// sameFrames fails unless both have the same durable frames in the same order.
func sameFrames(t *testing.T, what string, got, want []frame) {
	t.Helper()
	g, w := durable(got), durable(want)
	if show(g) != show(w) {
		t.Fatalf("%s: got\n%swant\n%s", what, show(g), show(w))
	}
}

func nameIn(list ...string) func(frame) bool {
	return func(f frame) bool {
		for _, n := range list {
			if f.name == n {
				return true
			}
		}
		return false
	}
}

// terminal are the events that end a turn.
var terminal = nameIn("turn.completed", "turn.failed", "turn.cancelled")
