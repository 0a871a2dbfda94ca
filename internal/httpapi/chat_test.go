package httpapi

import (
	"encoding/json"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"strings"
	"testing"
	"time"
)

const chatPath = "/v1/chat/completions"

func chat(input string, more string) string {
	return `{"model":"demo","messages":[{"role":"user","content":"` + input + `"}]` + more + `}`
}

// chunks reads a chat stream: its text, finish reason, usage and error.
type chunks struct {
	text, finish, errorCode string
	usage                   string
	done                    bool
	roles, pings            int
}

func readChunks(t *testing.T, f *frames) (out chunks) {
	t.Helper()
	for {
		fr, ok := f.next()
		switch {
		case !ok:
			return out
		case fr.comment != "":
			out.pings++
			continue
		case fr.data == "[DONE]":
			out.done = true
			continue
		}
		data := []byte(fr.data)
		if out.done {
			t.Errorf("behind [DONE]: %s", data)
		}
		if c := lookUp(t, data, "error.code"); c != "" {
			out.errorCode = c
			continue
		}
		if lookUp(t, data, "choices.0.delta.role") != "" {
			if out.roles++; out.text != "" {
				t.Errorf("the role comes behind text: %s", data)
			}
		}
		out.text += lookUp(t, data, "choices.0.delta.content")
		if r := lookUp(t, data, "choices.0.finish_reason"); r != "" {
			out.finish = r
		}
		if u := lookUp(t, data, "usage.total_tokens"); u != "" {
			out.usage = u
		}
	}
}

func TestChat(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct{ name, input, text, usage string }{
		{"plain", "hello", "you said hello", "3"},
		{"quotes and umlauts", `a \"b\" ü \n 🙂`, "you said a \"b\" ü \n 🙂", "3"},
		{"tool", "tool", "Let me see.\n\nThe tool answered.", "8"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := w.do("POST", chatPath, chat(tt.input, ""))
			if a.status != 200 || a.get(t, "choices.0.message.content") != tt.text || a.get(t, "choices.0.finish_reason") != "stop" || a.get(t, "usage.total_tokens") != tt.usage {
				t.Errorf("%d %s", a.status, a.body)
			}
			f := w.open("POST", chatPath, chat(tt.input, `,"stream":true,"stream_options":{"include_usage":true}`))
			if f.resp.Header.Get("X-Perdure-Session") == "" || f.resp.Header.Get("X-Perdure-Turn") == "" {
				t.Errorf("headers %v", f.resp.Header)
			}
			if got, want := readChunks(t, f), (chunks{text: tt.text, finish: "stop", usage: tt.usage, done: true, roles: 1}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if got := readChunks(t, w.open("POST", chatPath, chat(tt.input, `,"stream":true`))); got.usage != "" {
				t.Errorf("usage, though not asked for: %+v", got)
			}
		})
	}
}

// TestChatHistory: the messages of a request reach the model in normal form,
// and the session that was made for it is not listed.
func TestChatHistory(t *testing.T) {
	w := newWorld(t)
	a := w.do("POST", chatPath, `{"model":"demo","temperature":0.5,"future":{"x":[1]},"tools":[],"tool_choice":"none","n":1,"messages":[
		{"content":"be brief","role":"system"},
		{"content" : [ {"type":"text", "text":"a  b"} ], "name":"kim", "role":"user"},
		{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{ }"}}]},
		{"tool_call_id":"c1","role":"tool","content":"42"},
		{"role":"assistant","content":"ok"},
		{"name":"kim","content":"go","role":"user"}]}`)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	want := `{"role":"system","content":"be brief"}
{"role":"user","content":[{"type":"text","text":"a  b"}],"name":"kim"}
{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{ }"}}]}
{"role":"tool","tool_call_id":"c1","content":"42"}
{"role":"assistant","content":"ok"}
{"role":"user","content":"go"}`
	if got := w.script.calls()[0]; got != want {
		t.Errorf("the model got\n%s\nwant\n%s", got, want)
	}
	id := a.header.Get("X-Perdure-Session")
	if !strings.HasPrefix(id, statelessPrefix) {
		t.Errorf("session %q", id)
	}
	if l := w.do("GET", "/v1/sessions", ""); strings.Contains(string(l.body), id) {
		t.Errorf("it is listed: %s", l.body)
	}
	if s := w.do("GET", "/v1/sessions/"+id, ""); s.get(t, "messages") != "7" {
		t.Errorf("session: %s", s.body)
	}
}

func TestChatSession(t *testing.T) {
	w := newWorld(t)
	h := []string{"X-Perdure-Session", "mine"}
	first := w.do("POST", chatPath, `{"model":"demo","messages":[{"role":"system","content":"brief"},{"role":"user","content":"one"}]}`, h...)
	if first.status != 200 || first.header.Get("X-Perdure-Session") != "mine" {
		t.Fatalf("%d %s", first.status, first.body)
	}
	_ = w.do("POST", chatPath, `{"model":"demo","messages":[{"role":"system","content":"brief"},{"role":"user","content":"made up"},{"role":"user","content":"two"}]}`, h...)
	want := `{"role":"system","content":"brief"}
{"role":"user","content":"one"}
{"role":"assistant","content":"you said one"}
{"role":"user","content":"two"}`
	if got := w.script.calls()[1]; got != want {
		t.Errorf("the model got\n%s\nwant\n%s", got, want)
	}
	if a := w.do("GET", "/v1/sessions", ""); a.get(t, "sessions.0.id") != "mine" {
		t.Errorf("not listed: %s", a.body)
	}
	for _, tt := range []struct {
		session, body string
		status        int
		code          string
	}{
		{"mine", `{"model":"other","messages":[{"role":"user","content":"x"}]}`, 409, "agent_mismatch"},
		{"a b", chat("x", ""), 400, "bad_session_id"},
		{"chat_new", chat("x", ""), 400, "bad_session_id"},
	} {
		if a := w.do("POST", chatPath, tt.body, "X-Perdure-Session", tt.session); a.status != tt.status || a.get(t, "error.code") != tt.code {
			t.Errorf("%s: %d %s", tt.session, a.status, a.body)
		}
	}
	f := w.open("POST", chatPath, chat("hold", `,"stream":true`), h...)
	if a := w.do("POST", chatPath, chat("x", ""), "X-Perdure-Session", "mine", "X-Perdure-On-Busy", "reject"); a.status != 409 || a.get(t, "error.code") != "busy" {
		t.Errorf("busy: %d %s", a.status, a.body)
	}
	if a := w.do("POST", chatPath, chat("x", ""), "X-Perdure-Session", "mine", "X-Perdure-On-Busy", "steer"); a.status != 400 || a.get(t, "error.code") != "not_built_yet" {
		t.Errorf("steer: %d %s", a.status, a.body)
	}
	if a := w.do("POST", chatPath, chat("next", ""), h...); a.status != 200 {
		t.Errorf("interrupting: %d %s", a.status, a.body)
	}
	if got := readChunks(t, f); got.errorCode != "turn_cancelled" || got.done || got.text != "before " {
		t.Errorf("interrupted: %+v", got)
	}
}

func TestChatIdempotency(t *testing.T) {
	w := newWorld(t)
	a := w.do("POST", chatPath, chat("once", ""), "Idempotency-Key", "k")
	b := w.do("POST", chatPath, chat("once", ""), "Idempotency-Key", "k")
	c := readChunks(t, w.open("POST", chatPath, chat("once", `,"stream":true`), "Idempotency-Key", "k"))
	if a.status != 200 || a.get(t, "id") != b.get(t, "id") || c.text != "you said once" || !c.done {
		t.Errorf("%s\n%s\n%+v", a.body, b.body, c)
	}
	if n := len(w.script.calls()); n != 1 {
		t.Errorf("%d model calls", n)
	}
}

// TestChatFailures: before any output a failed turn is an HTTP error, behind it
// an error inside the stream.
func TestChatFailures(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct {
		input  string
		status int
		code   string
	}{
		{"fail rate_limited", 429, "model_rate_limited"},
		{"fail provider_queue_full", 503, "model_provider_queue_full"},
		{"fail invalid_request", 400, "model_invalid_request"},
		{"fail timeout", 504, "model_timeout"},
		{"fail unauthorized", 502, "model_unauthorized"},
	} {
		for _, more := range []string{"", `,"stream":true`} {
			a := w.do("POST", chatPath, chat(tt.input, more))
			if a.status != tt.status || a.get(t, "error.code") != tt.code || !strings.Contains(a.get(t, "error.message"), "the model said no (ask another)") {
				t.Errorf("%s%s: %d %s", tt.input, more, a.status, a.body)
			}
			if (a.header.Get("Retry-After") != "") != (tt.status == 429 || tt.status == 503) {
				t.Errorf("%s: Retry-After %q", tt.input, a.header.Get("Retry-After"))
			}
		}
	}
	if got := readChunks(t, w.open("POST", chatPath, chat("break", `,"stream":true`))); got.errorCode != "model_connection_lost" || got.done || got.text != "half " {
		t.Errorf("%+v", got)
	}
	if a := w.do("POST", chatPath, chat("break", "")); a.status != 502 || a.get(t, "error.code") != "model_connection_lost" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestChatEmptyAnswer(t *testing.T) {
	w := newWorld(t)
	if got := readChunks(t, w.open("POST", chatPath, chat("", `,"stream":true`))); got.text != "" || got.finish != "stop" || !got.done || got.roles != 1 {
		t.Errorf("%+v", got)
	}
	if a := w.do("POST", chatPath, chat("", "")); a.status != 200 || a.get(t, "choices.0.message.role") != "assistant" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestChatHeartbeat(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.StreamHeartbeat = 10 * time.Millisecond })
	f := w.open("POST", chatPath, chat("silent", `,"stream":true`)) // the headers come with the first ping
	w.script.release <- struct{}{}
	if got := readChunks(t, f); got.text != "late" || !got.done || got.roles != 1 || got.pings == 0 {
		t.Errorf("%+v", got)
	}
}

func TestChatRefusals(t *testing.T) {
	w := newWorld(t)
	user := `[{"role":"user","content":"x"}]`
	for _, tt := range []struct {
		body   string
		status int
		code   string
		param  string
	}{
		{`{}`, 400, "invalid_request", "model"},
		{`{"model":"demo"}`, 400, "invalid_request", "messages"},
		{`{"model":"demo","messages":[]}`, 400, "invalid_request", "messages"},
		{`{"model":"demo","messages":null}`, 400, "invalid_request", "messages"},
		{`{"model":1,"messages":` + user + `}`, 400, "invalid_request", "model"},
		{`{"model":"none","messages":` + user + `}`, 404, "model_not_found", ""},
		{`{"model":"demo","messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}`, 400, "invalid_request", "messages[1].role"},
		{`{"model":"demo","messages":[{"role":"user","content":null}]}`, 400, "invalid_request", "messages[0].content"},
		{`{"model":"demo","messages":[{"role":"assistant","tool_calls":[{"id":"a"}]},{"role":"user","content":"x"}]}`, 400, "invalid_request", "messages[0].tool_calls[0].function.name"},
		{`{"model":"demo","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]},{"role":"user","content":"x"}]}`, 400, "invalid_request", "messages[0].tool_calls[0].id"},
		{`{"model":"demo","n":2,"messages":` + user + `}`, 400, "unsupported_parameter", "n"},
		{`{"model":"demo","tools":[{"type":"function"}],"messages":` + user + `}`, 400, "unsupported_parameter", "tools"},
		{`{"model":"demo","functions":[{}],"messages":` + user + `}`, 400, "unsupported_parameter", "functions"},
		{`{"model":"demo","tool_choice":"required","messages":` + user + `}`, 400, "unsupported_parameter", "tool_choice"},
		{`{"model":"demo","response_format":{"type":"json_object"},"messages":` + user + `}`, 400, "unsupported_parameter", "response_format.type"},
		{`{"model":"demo","logprobs":true,"messages":` + user + `}`, 400, "unsupported_parameter", "logprobs"},
		{`{"model":"demo","modalities":["text","audio"],"messages":` + user + `}`, 400, "unsupported_parameter", "modalities"},
		{`{"model":"demo","audio":{},"messages":` + user + `}`, 400, "unsupported_parameter", "audio"},
		{`{"model":"demo","stream":"x","messages":` + user + `}`, 400, "invalid_request", "stream"},
		{`{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("x", 9<<10) + `"}]}`, 413, "too_large", ""},
		{`{`, 400, "invalid_json", ""},
	} {
		a := w.do("POST", chatPath, tt.body)
		if a.status != tt.status || a.get(t, "error.code") != tt.code || a.get(t, "error.param") != tt.param {
			t.Errorf("%.200s: %d %s", tt.body, a.status, a.body)
		}
	}
	if n := len(w.script.calls()); n != 0 {
		t.Errorf("%d model calls for refused requests", n)
	}
}

func TestModels(t *testing.T) {
	w := newWorld(t)
	a := w.do("GET", "/v1/models", "")
	if a.get(t, "data.0.id") != "demo" || a.get(t, "data.1.id") != "other" {
		t.Errorf("%s", a.body)
	}
	if a := w.do("GET", "/v1/models/demo", ""); a.get(t, "id") != "demo" || a.get(t, "object") != "model" {
		t.Errorf("%s", a.body)
	}
	if a := w.do("GET", "/v1/models/none", ""); a.status != 404 || a.get(t, "error.code") != "model_not_found" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// TestAppendString: what is written is JSON, and means what was given.
func TestAppendString(t *testing.T) {
	for _, s := range []string{"", "plain", "a\"b\\c", "\x00\x1f\n\r\t", "ü🙂\u2028", "bad \xff\xc3", "\xed\xa0\x80", "end \xe2\x82"} {
		b := jsontext.AppendString(nil, s)
		var got string
		if err := json.Unmarshal(b, &got); err != nil {
			t.Errorf("%q: %v", b, err)
		}
		if want := strings.ToValidUTF8(s, "\ufffd"); got != want && len(got) < len(want) {
			t.Errorf("%q became %q", s, got)
		}
	}
}
