package mockllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// start runs a mock on a free port and returns it with its base URL.
func start(t testing.TB, cfg Config) (*Server, string) {
	t.Helper()
	s, err := New(cfg, env.Real())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		_ = s.Close()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return s, "http://" + l.Addr().String()
}

// fast is a mock that answers in about 10 ms.
func fast() Config { return Config{TTFT: 5 * time.Millisecond, TPS: 1000, Tokens: 5} }

type chunk struct {
	ID      string
	Choices []struct {
		Delta struct {
			Role, Content string
			ToolCalls     []struct {
				ID       string
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		Finish *string `json:"finish_reason"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

func post(t testing.TB, url, body string) *http.Response {
	t.Helper()
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// stream reads a whole SSE reply: its chunks, and whether [DONE] ended it.
func stream(t testing.TB, r io.Reader) (chunks []chunk, done bool) {
	t.Helper()
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		switch {
		case !ok:
		case data == "[DONE]":
			done = true
		default:
			var c chunk
			if err := json.Unmarshal([]byte(data), &c); err != nil {
				t.Fatalf("frame %q: %v", data, err)
			}
			chunks = append(chunks, c)
		}
	}
	return chunks, done
}

func text(chunks []chunk) (s, finish string) {
	for _, c := range chunks {
		for _, ch := range c.Choices {
			s += ch.Delta.Content
			if ch.Finish != nil {
				finish = *ch.Finish
			}
		}
	}
	return s, finish
}

func TestStream(t *testing.T) {
	s, url := start(t, fast())
	for _, usage := range []bool{false, true} {
		began := time.Now()
		resp := post(t, url, fmt.Sprintf(`{"model":"m\"x","stream":true,"stream_options":{"include_usage":%v},"messages":[{"role":"user","content":"hi"}]}`, usage))
		chunks, done := stream(t, resp.Body)
		if took := time.Since(began); took < 10*time.Millisecond {
			t.Errorf("reply took %v, want at least TTFT + tokens/TPS = 10ms", took)
		}
		got, finish := text(chunks)
		if want := "Durable turns stream one token "; got != want || finish != "stop" || !done {
			t.Errorf("text %q finish %q done %v, want %q, stop, true", got, finish, done, want)
		}
		if last := chunks[len(chunks)-1]; (last.Usage != nil) != usage {
			t.Errorf("usage asked %v, got %+v", usage, last.Usage)
		} else if usage && (last.Usage.Completion != 5 || last.Usage.Prompt == 0) {
			t.Errorf("usage %+v", last.Usage)
		}
	}
	if st := s.Stats(); st.Requests != 2 || st.Completed != 2 || st.InFlight != 0 || st.MaxConcurrent != 1 || st.Tokens != 10 {
		t.Errorf("stats %+v", st)
	}
}

func TestWhole(t *testing.T) {
	_, url := start(t, fast())
	var got struct {
		Choices []struct {
			Message struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
	}
	resp := post(t, url, `{"messages":[]}`)
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if len(got.Choices) != 1 || got.Choices[0].Message.Content != "Durable turns stream one token " || got.Choices[0].Finish != "stop" {
		t.Errorf("got %+v", got)
	}
}

// writes counts the writes of a connection.
type writes struct {
	net.Conn
	n *int
}

func (w writes) Write(b []byte) (int, error) { *w.n++; return w.Conn.Write(b) }

func TestUnpacedIsOneWrite(t *testing.T) {
	s, err := New(Config{Tokens: 8}, env.Real())
	if err != nil {
		t.Fatal(err)
	}
	client, server := net.Pipe()
	n := 0
	go func() {
		h := handler{s: s, c: writes{server, &n}, br: bufio.NewReader(server)}
		h.loop()
		_ = server.Close()
	}()
	go func() {
		_, _ = io.WriteString(client, "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 15\r\nConnection: close\r\n\r\n{\"stream\":true}")
	}()
	b, err := io.ReadAll(client)
	if err != nil || !bytes.HasSuffix(b, []byte("data: [DONE]\n\n\r\n0\r\n\r\n")) {
		t.Fatalf("%v: %q", err, b)
	}
	if n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
}

func TestPaceIsAbsolute(t *testing.T) {
	r := reply{cfg: &Config{TTFT: 2 * time.Second, TPS: 200, Tokens: 8}}
	for i, want := range []time.Duration{2000, 2005, 2010, 2015, 2020, 2025, 2030, 2035, 2040} {
		if got := r.due(i); got != want*time.Millisecond {
			t.Errorf("frame %d is due at %v, want %v ms", i, got, want)
		}
	}
}

func TestToolCall(t *testing.T) {
	_, url := start(t, Config{Tokens: 3, Tool: "*", ToolArgs: "{\n\"city\": \"Bern \\\"x\\\"\"}"})
	tools := `"tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object","name":"not this"}}},{"type":"function","function":{"name":"other"}}]`
	cases := []struct {
		name, body, finish string
	}{
		{"offered", `{"stream":true,` + tools + `,"messages":[{"role":"system","content":"s"},{"content":"go","role":"user"}]}`, "tool_calls"},
		{"after result", `{"stream":true,"messages":[{"role":"user","content":"go"},{"role":"tool","content":"x"}],` + tools + `}`, "stop"},
		{"none offered", `{"stream":true,"messages":[{"role":"user","content":"go"}],"tools":[]}`, "stop"},
	}
	for _, c := range cases {
		chunks, done := stream(t, post(t, url, c.body).Body)
		_, finish := text(chunks)
		if finish != c.finish || !done {
			t.Errorf("%s: finish %q done %v, want %q", c.name, finish, done, c.finish)
		}
		if c.finish != "tool_calls" {
			continue
		}
		var name, args string
		for _, ch := range chunks {
			for _, call := range ch.Choices[0].Delta.ToolCalls {
				name += call.Function.Name
				args += call.Function.Arguments
			}
		}
		var parsed struct{ City string }
		if err := json.Unmarshal([]byte(args), &parsed); err != nil || name != "weather" || parsed.City != `Bern "x"` {
			t.Errorf("%s: called %q with %q (%v)", c.name, name, args, err)
		}
	}
	resp := post(t, url, strings.Replace(cases[0].body, "true", "false", 1))
	if b, _ := io.ReadAll(resp.Body); !json.Valid(b) || !bytes.Contains(b, []byte(`"name":"weather"`)) {
		t.Errorf("whole tool call: %s", b)
	}
}

func TestFaults(t *testing.T) {
	for _, kind := range allFaults {
		t.Run(string(kind), func(t *testing.T) {
			cfg := fast()
			cfg.ErrorRate, cfg.ErrorKinds, cfg.RetryAfter = 1, []Fault{kind}, 1500*time.Millisecond
			s, url := start(t, cfg)
			req, _ := http.NewRequest("POST", url+"/v1/chat/completions", strings.NewReader(`{"stream":true}`))
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			switch kind {
			case Fault500, Fault429:
				if got := fmt.Sprint(resp.StatusCode); got != string(kind) {
					t.Errorf("status %s", got)
				}
				if ra := resp.Header.Get("Retry-After"); kind == Fault429 && (ra != "2" || resp.Header.Get("retry-after-ms") != "1500") {
					t.Errorf("Retry-After %q", ra)
				}
			case FaultStall:
				if b := make([]byte, 1); func() bool { _, err := resp.Body.Read(b); return err != nil }() {
					t.Error("want the first half of the reply")
				}
				if st := s.Stats(); st.InFlight != 1 {
					t.Errorf("a stalled reply is in flight, got %+v", st)
				}
				return // Close in the clean-up must not wait for it
			default:
				b, err := io.ReadAll(resp.Body)
				if bytes.Contains(b, []byte("[DONE]")) || !bytes.Contains(b, []byte("Durable")) {
					t.Errorf("want half a reply, got %q", b)
				}
				if (err != nil) != (kind == FaultReset) {
					t.Errorf("read error: %v", err)
				}
			}
			if st := s.Stats(); st.Errors != 1 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

func TestFaultsAreDeterministic(t *testing.T) {
	draw := func(seed uint64) (out []Fault, failed int) {
		c := Config{ErrorRate: 0.25, Seed: seed}
		for n := range uint64(4000) {
			f := c.fault(n)
			out = append(out, f)
			if f != "" {
				failed++
			}
		}
		return out, failed
	}
	a, failed := draw(1)
	b, _ := draw(1)
	c, _ := draw(2)
	if fmt.Sprint(a) != fmt.Sprint(b) || fmt.Sprint(a) == fmt.Sprint(c) {
		t.Error("the seed must decide, and alone")
	}
	if failed < 900 || failed > 1100 {
		t.Errorf("%d of 4000 failed, want about 1000", failed)
	}
}

// A client that goes away must leave in_flight at once, not when the next
// token is due: checks of a concurrency limit rely on it.
func TestAbortIsSeenAtOnce(t *testing.T) {
	s, url := start(t, Config{TTFT: time.Hour, TPS: 1, Tokens: 1})
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
	until(t, func() bool { return s.Stats().InFlight == 1 })
	_ = c.Close()
	until(t, func() bool { st := s.Stats(); return st.InFlight == 0 && st.Aborted == 1 })
}

// until polls a condition that becomes true on its own, for at most 10 s.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for i := 0; !ok(); i++ {
		if i == 10_000 {
			t.Fatal("did not happen in 10 s")
		}
		<-tick.C
	}
}

func TestMaxConcurrentAndReset(t *testing.T) {
	s, url := start(t, Config{TTFT: 50 * time.Millisecond, Tokens: 1})
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			resp, err := http.Post(url+"/chat/completions", "", strings.NewReader(`{"stream":true}`))
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if m := s.Stats().MaxConcurrent; m < 2 || m > 8 {
		t.Errorf("max_concurrent %d of 8", m)
	}
	if _, err := http.Post(url+"/stats/reset", "", nil); err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get(url + "/stats")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var st Stats
	if err := json.NewDecoder(resp.Body).Decode(&st); err != nil || st.MaxConcurrent != 0 || st.Requests != 8 {
		t.Errorf("after reset: %+v, %v", st, err)
	}
}

func TestHTTP(t *testing.T) {
	_, url := start(t, Config{Tokens: 1})
	addr := strings.TrimPrefix(url, "http://")
	chat := "POST /v1/chat/completions HTTP/1.1\r\n"
	cases := []struct{ name, req, want string }{
		{"models", "GET /v1/models?x=1 HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK"},
		{"unknown", "GET /nope HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "},
		{"not http", "hello\r\n\r\n", "HTTP/1.1 400 "},
		{"bad length", chat + "Content-Length: -1\r\n\r\n", "HTTP/1.1 400 "},
		{"too large", chat + "Content-Length: 99999999\r\n\r\n", "HTTP/1.1 413 "},
		{"no colon", chat + "nonsense\r\n\r\n", "HTTP/1.1 400 "},
		{"long header", chat + "A: " + strings.Repeat("a", 10_000) + "\r\n\r\n", "HTTP/1.1 431 "},
		{"many headers", chat + strings.Repeat("A: "+strings.Repeat("a", 100)+"\r\n", 1000) + "\r\n", "HTTP/1.1 431 "},
		{"not json", chat + "Content-Length: 3\r\n\r\nabc", "HTTP/1.1 400 "},
		{"chunked", chat + "Transfer-Encoding: chunked\r\n\r\n3\r\n{\"s\r\nc;x=y\r\ntream\":true}\r\n0\r\nT: v\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream"},
		{"bad chunk", chat + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 400 "},
		{"continue", chat + "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"},
		{"two on one connection", "GET /readyz HTTP/1.1\r\n\r\nGET /nope HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 404"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.WriteString(conn, c.req); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(c.want))
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != c.want {
				t.Errorf("got %q (%v), want %q", got, err, c.want)
			}
		})
	}
}

func TestConfigFromEnv(t *testing.T) {
	vars := map[string]string{"MOCK_TTFT_MS": "1.5", "MOCK_TPS": "0", "MOCK_TOKENS": "3", "MOCK_ERROR_RATE": "0.1", "MOCK_ERROR_KINDS": "500, stall", "MOCK_SEED": "7", "MOCK_TOOL": "t", "MOCK_RETRY_AFTER_MS": "0"}
	get := func(k string) string { return vars[k] }
	c, err := ConfigFromEnv(get)
	want := Config{TTFT: 1500 * time.Microsecond, Tokens: 3, ErrorRate: 0.1, ErrorKinds: []Fault{Fault500, FaultStall}, Seed: 7, Tool: "t"}
	if err != nil || fmt.Sprint(c) != fmt.Sprint(want) {
		t.Errorf("got %+v, %v", c, err)
	}
	if c, err = ConfigFromEnv(func(string) string { return "" }); err != nil || fmt.Sprint(c) != fmt.Sprint(DefaultConfig()) {
		t.Errorf("defaults: %+v, %v", c, err)
	}
	for k, v := range map[string]string{"MOCK_TTFT_MS": "-1", "MOCK_TPS": "x", "MOCK_TOKENS": "1e9", "MOCK_ERROR_RATE": "2", "MOCK_SEED": "-1", "MOCK_ERROR_KINDS": "503", "MOCK_TOOL_ARGS": "{"} {
		vars = map[string]string{k: v}
		if _, err := ConfigFromEnv(get); err == nil {
			t.Errorf("%s=%s was taken", k, v)
		} else if k != "MOCK_ERROR_KINDS" && k != "MOCK_TOOL_ARGS" && !strings.Contains(err.Error(), k) {
			t.Errorf("%s=%s: the error does not name it: %v", k, v, err)
		}
	}
}

func FuzzScanAsk(f *testing.F) {
	for _, s := range []string{`{"stream":true,"model":"m","messages":[{"role":"user","content":"a\"b\\"}]}`, `{}`, `{"tools":[{"function":{"name":"n"}}],"stream_options":{"include_usage":true}}`, `{"a":[1,{"b":null}],}`, `{"stream":"true"}`, `[`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := scanAsk(b)
		var members map[string]json.RawMessage
		if json.Unmarshal(b, &members) != nil || bytes.ContainsAny(b, "\\") || nested(b) > maxDepth {
			return // not JSON, or escaped keys, which the scanner does not decode
		}
		if members == nil {
			return // null
		}
		if err != nil {
			t.Fatalf("valid object %q refused", b)
		}
		if v, ok := lastMember(b, "stream"); ok && (string(v) == "true") != a.stream {
			t.Fatalf("stream %v in %q", a.stream, b)
		}
	})
}

func nested(b []byte) int { return bytes.Count(b, []byte("{")) + bytes.Count(b, []byte("[")) }

// lastMember finds a member by its exact name, the last one winning.
func lastMember(b []byte, name string) (v json.RawMessage, ok bool) {
	d := json.NewDecoder(bytes.NewReader(b))
	if tok, err := d.Token(); err != nil || tok != json.Delim('{') {
		return nil, false
	}
	for d.More() {
		k, err := d.Token()
		if err != nil {
			return nil, false
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, false
		}
		if k == name {
			v, ok = raw, true
		}
	}
	return v, ok
}

func FuzzReadHead(f *testing.F) {
	f.Add([]byte("POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"))
	f.Add([]byte("GET /x?y HTTP/1.0\nTransfer-Encoding: chunked\n\n1\r\na\r\n0\r\n\r\n"))
	f.Add([]byte("GET\r\n\r\n"))
	s, err := New(Config{}, env.Real())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		br := bufio.NewReader(bytes.NewReader(b))
		hd, err := readHead(br)
		if err != nil {
			if se := (statusError{}); errors.As(err, &se) && reasons[se.status] == "" {
				t.Fatalf("status %d has no reason", se.status)
			}
			return
		}
		hd.expect = false
		h := handler{s: s, br: br}
		body, err := h.readBody(hd, nil)
		if err == nil && !hd.chunked && int64(len(body)) != max(hd.length, 0) {
			t.Fatalf("body of %d bytes, want %d", len(body), hd.length)
		}
	})
}
