package model

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

const testKey = "sk-test-0123456789abcdef"

// newProvider makes a provider for a test server.
func newProvider(t testing.TB, base string, change func(*OpenAIOptions)) *OpenAI {
	t.Helper()
	o := OpenAIOptions{BaseURL: base + "/v1", APIKey: testKey, Dialer: &net.Dialer{}, Clock: env.SystemClock{}}
	if change != nil {
		change(&o)
	}
	p, err := NewOpenAI(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// serve starts a server with one handler for everything.
func serve(t testing.TB, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func simpleRequest() Request {
	return Request{Model: "m", Messages: []json.RawMessage{json.RawMessage(`{"role":"user","content":"hi"}`)}}
}

// textChunk is the usual event of a stream.
func textChunk(text string) string {
	b, _ := json.Marshal(text)
	return `{"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":` +
		string(b) + `},"logprobs":null,"finish_reason":null}]}`
}

const stopChunk = `{"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`

// stream writes events and flushes after each.
func stream(w http.ResponseWriter, events ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range events {
		_, _ = io.WriteString(w, "data: "+e+"\n\n")
		w.(http.Flusher).Flush()
	}
}

type recorder struct {
	pieces []string
	after  func(string) error
}

func (r *recorder) Delta(text []byte) error {
	r.pieces = append(r.pieces, string(text))
	if r.after != nil {
		return r.after(string(text))
	}
	return nil
}

func (r *recorder) all() string { return strings.Join(r.pieces, "") }

// wantError checks kind and code, and that the key is nowhere.
func wantError(t *testing.T, err error, kind Kind, code string) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v is no *Error", err)
	}
	if e.Kind != kind || e.Code != code {
		t.Fatalf("got %s %s (%s), want %s %s", e.Kind, e.Code, e.Message, kind, code)
	}
	if strings.Contains(fmt.Sprintf("%v %+v", err, *e), testKey) {
		t.Fatalf("the key is in the error %+v", e)
	}
	return e
}

func TestRequestOnTheWire(t *testing.T) {
	type seen struct {
		head http.Header
		path string
		body map[string]any
	}
	got := make(chan seen, 1)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		v := seen{head: r.Header, path: r.URL.String()}
		if err := json.NewDecoder(r.Body).Decode(&v.body); err != nil {
			t.Errorf("body: %v", err)
		}
		got <- v
		stream(w, stopChunk, "[DONE]")
	})
	p := newProvider(t, s.URL, func(o *OpenAIOptions) { o.BaseURL = s.URL + "/v1/?api-version=2" })
	_, err := p.Generate(context.Background(), Request{
		Model:          "model \"x\" é",
		Messages:       []json.RawMessage{json.RawMessage(`{"role":"system","content":"s"}`), json.RawMessage(`{"role":"user","content":"u"}`)},
		Tools:          json.RawMessage(`[{"type":"function"}]`),
		Params:         json.RawMessage(` {"temperature":0.5, "stop":["a"]} `),
		IdempotencyKey: "key-1",
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	v := <-got
	if v.path != "/v1/chat/completions?api-version=2" {
		t.Errorf("path %q", v.path)
	}
	want := map[string]any{
		"model": "model \"x\" é", "temperature": 0.5, "stop": []any{"a"}, "stream": true,
		"stream_options": map[string]any{"include_usage": true},
		"tools":          []any{map[string]any{"type": "function"}},
		"messages":       []any{map[string]any{"role": "system", "content": "s"}, map[string]any{"role": "user", "content": "u"}},
	}
	if !reflect.DeepEqual(v.body, want) {
		t.Errorf("body %v\nwant %v", v.body, want)
	}
	for name, want := range map[string]string{
		"Idempotency-Key": "key-1", "Authorization": "Bearer " + testKey, "Content-Type": "application/json",
	} {
		if v.head.Get(name) != want {
			t.Errorf("header %s = %q, want %q", name, v.head.Get(name), want)
		}
	}
}

func TestLargeRequest(t *testing.T) {
	var size atomic.Int64
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if !json.Valid(b) {
			t.Error("invalid body")
		}
		size.Store(int64(len(b)))
		stream(w, stopChunk, "[DONE]")
	})
	p := newProvider(t, s.URL, nil)
	req := simpleRequest()
	req.Messages = append(req.Messages, json.RawMessage(`{"role":"user","content":"`+strings.Repeat("x", 3<<20)+`"}`))
	if _, err := p.Generate(context.Background(), req, nil); err != nil {
		t.Fatal(err)
	}
	if size.Load() < 3<<20 {
		t.Fatalf("the server got %d bytes", size.Load())
	}
}

// TestAnswers holds what the provider makes of whole answers.
func TestAnswers(t *testing.T) {
	usage := `{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`
	tool := func(s string) string { return `{"choices":[{"index":0,"delta":{"tool_calls":[` + s + `]}}]}` }
	data := func(events ...string) string { return "data: " + strings.Join(events, "\n\ndata: ") + "\n\n" }
	hello := Result{Text: "Hello, wörld\n", FinishReason: "stop", Usage: Usage{7, 3}, Shown: true}
	for _, c := range []struct {
		name, contentType, body string
		want                    Result
	}{
		{"stream", "", data(textChunk(""), textChunk("Hello"), textChunk(", wörld\n"), stopChunk, usage, "[DONE]"), hello},
		{"crlf", "", strings.ReplaceAll(data(textChunk("Hello"), textChunk(", wörld\n"), stopChunk, usage, "[DONE]"), "\n", "\r\n"), hello},
		{"cr", "", strings.ReplaceAll(data(textChunk("Hello"), textChunk(", wörld\n"), stopChunk, usage, "[DONE]"), "\n", "\r"), hello},
		{"comments and fields", "", ": hi\n\nevent: x\nid: 1\nretry: 5\n" + data(textChunk("Hello, wörld\n"), stopChunk, usage, "[DONE]"), hello},
		{"no space after the colon", "", strings.ReplaceAll(data(textChunk("Hello, wörld\n"), stopChunk, usage, "[DONE]"), "data: ", "data:"), hello},
		{"data over several lines", "", strings.ReplaceAll(data(textChunk("Hello, wörld\n"), stopChunk, usage, "[DONE]"), `,"delta"`, ",\ndata: \"delta\""), hello},
		{"no done, no last blank line", "", strings.TrimSpace(data(textChunk("Hello, wörld\n"), usage, stopChunk)), hello},
		{"done without finish", "", data(textChunk("a"), "[DONE]"), Result{Text: "a", FinishReason: "stop", Shown: true}},
		{"plain JSON", "application/json", ` {"choices":[{"message":{"role":"assistant","content":"Hello, wörld\n"},"finish_reason":"stop"}],
			"usage":{"prompt_tokens":7,"completion_tokens":3}}`, hello},
		{"plain JSON with a stream's type", "text/event-stream", `{"choices":[{"message":{"content":"x"},"finish_reason":"length"}]}`,
			Result{Text: "x", FinishReason: "length", Shown: true}},
		{"content parts", "", data(`{"choices":[{"delta":{"content":[{"type":"thinking","text":"t"},{"type":"text","text":"a"}]}}]}`, stopChunk),
			Result{Text: "a", FinishReason: "stop", Shown: true}},
		{"refusal", "", data(`{"choices":[{"delta":{"refusal":"no"}}]}`, stopChunk), Result{Text: "no", FinishReason: "stop", Shown: true}},
		{"two tools by index", "", data(
			tool(`{"index":0,"id":"a","type":"function","function":{"name":"get","arguments":""}}`),
			tool(`{"index":0,"function":{"arguments":"{\"x\":"}}`),
			tool(`{"index":1,"id":"b","type":"function","function":{"name":"put","arguments":"{}"}}`),
			tool(`{"index":0,"function":{"arguments":"1}"}}`),
			`{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}`, "[DONE]"),
			Result{ToolCalls: []ToolCall{{"a", "get", `{"x":1}`}, {"b", "put", "{}"}}, FinishReason: "tool_calls"}},
		{"tools all with index 0, name and ID repeated", "", data(
			tool(`{"index":0,"id":"a","function":{"name":"get","arguments":"{"}}`),
			tool(`{"index":0,"id":"a","function":{"name":"get","arguments":"}"}}`),
			tool(`{"index":0,"id":"b","function":{"name":"get","arguments":{"k":2}}}`), "[DONE]"),
			Result{ToolCalls: []ToolCall{{"a", "get", "{}"}, {"b", "get", `{"k":2}`}}, FinishReason: "tool_calls"}},
		{"tools without index or ID", "application/json", `{"choices":[{"message":{"content":null,"tool_calls":[
			{"id":"a","function":{"name":"f","arguments":"1"}},{"id":"b","function":{"name":"f","arguments":"2"}}]},"finish_reason":"tool_calls"}]}`,
			Result{ToolCalls: []ToolCall{{"a", "f", "1"}, {"b", "f", "2"}}, FinishReason: "tool_calls"}},
		{"tool without an ID", "", data(tool(`{"index":0,"function":{"name":"f","arguments":"1"}}`), "[DONE]"),
			Result{ToolCalls: []ToolCall{{"call_0_", "f", "1"}}, FinishReason: "tool_calls"}},
	} {
		for _, step := range []int{0, 1, 7} {
			t.Run(fmt.Sprintf("%s/%d", c.name, step), func(t *testing.T) {
				t.Parallel()
				s := serve(t, func(w http.ResponseWriter, r *http.Request) {
					if c.contentType != "" {
						w.Header().Set("Content-Type", c.contentType)
					}
					for b := c.body; len(b) > 0; {
						n := len(b)
						if step > 0 {
							n = min(step, n)
						}
						_, _ = io.WriteString(w, b[:n])
						w.(http.Flusher).Flush()
						b = b[n:]
					}
				})
				var rec recorder
				got, err := newProvider(t, s.URL, nil).Generate(context.Background(), simpleRequest(), &rec)
				if err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, c.want) {
					t.Errorf("got %+v\nwant %+v", got, c.want)
				}
				if rec.all() != c.want.Text {
					t.Errorf("the sink got %q", rec.pieces)
				}
			})
		}
	}
}

// TestErrorResponses holds the classification of answers that are none.
func TestErrorResponses(t *testing.T) {
	body := func(msg, typ, code string) string {
		return fmt.Sprintf(`{"error":{"message":%q,"type":%q,"code":%q}}`, msg, typ, code)
	}
	date := time.Now().Add(90 * time.Second).UTC().Format(http.TimeFormat)
	for _, c := range []struct {
		name     string
		status   int
		header   [2]string
		body     string
		kind     Kind
		code     string
		upstream string
		message  string // contained
		minAfter time.Duration
		maxAfter time.Duration
	}{
		{name: "429 seconds", status: 429, header: [2]string{"Retry-After", "7"}, body: body("slow down", "requests", "rate_limit_exceeded"),
			kind: KindRetryable, code: CodeRateLimited, upstream: "rate_limit_exceeded", message: "slow down", minAfter: 7 * time.Second, maxAfter: 7 * time.Second},
		{name: "429 date", status: 429, header: [2]string{"Retry-After", date}, body: "{}",
			kind: KindRetryable, code: CodeRateLimited, minAfter: 80 * time.Second, maxAfter: 91 * time.Second},
		{name: "429 ms", status: 429, header: [2]string{"Retry-After-Ms", "250"},
			kind: KindRetryable, code: CodeRateLimited, minAfter: 250 * time.Millisecond, maxAfter: 250 * time.Millisecond},
		{name: "429 quota", status: 429, body: body("no money", "insufficient_quota", "insufficient_quota"),
			kind: KindPermanent, code: CodeQuota, upstream: "insufficient_quota", message: "no money"},
		{name: "500 html", status: 500, body: "<html>oops</html>", kind: KindRetryable, code: CodeUpstream, message: "oops"},
		{name: "503 nothing", status: 503, kind: KindRetryable, code: CodeUpstream, message: "status 503"},
		{name: "501", status: 501, kind: KindPermanent, code: CodeUpstream},
		{name: "401 with the key", status: 401, body: body("Incorrect API key provided: "+testKey+".", "auth", "invalid_api_key"),
			kind: KindPermanent, code: CodeUnauthorized, upstream: "invalid_api_key", message: "provided: [redacted]"},
		{name: "400 string error", status: 400, body: `{"error":"model is loading"}`, kind: KindPermanent, code: CodeInvalidRequest, message: "model is loading"},
		{name: "422 detail", status: 422, body: `{"detail":[{"msg":"field required"}]}`, kind: KindPermanent, code: CodeInvalidRequest, message: "field required"},
		{name: "400 context", status: 400, body: body("too long", "invalid_request_error", "context_length_exceeded"),
			kind: KindPermanent, code: CodeInvalidRequest, upstream: "context_length_exceeded"},
		{name: "404", status: 404, body: "404 page not found", kind: KindPermanent, code: CodeNotFound, message: "page not found"},
		{name: "redirect", status: 307, header: [2]string{"Location", "http://other.example/?k=" + testKey}, kind: KindPermanent, code: CodeNotFound, message: "redirect"},
		{name: "long", status: 400, body: strings.Repeat("é", 40000), kind: KindPermanent, code: CodeInvalidRequest, message: "ééé"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if c.header[0] != "" {
					w.Header().Set(c.header[0], c.header[1])
				}
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			})
			p := newProvider(t, s.URL, nil)
			res, err := p.Generate(context.Background(), simpleRequest(), &recorder{})
			e := wantError(t, err, c.kind, c.code)
			if e.Status != c.status || e.Upstream != c.upstream || !strings.Contains(e.Message, c.message) || len(e.Message) > maxMessage+3 {
				t.Errorf("error %+v", *e)
			}
			if e.RetryAfter < c.minAfter || e.RetryAfter > c.maxAfter {
				t.Errorf("RetryAfter %v", e.RetryAfter)
			}
			if !reflect.DeepEqual(res, Result{}) {
				t.Errorf("result %+v", res)
			}
			if c.name != "long" && p.Stats().Idle != 1 {
				t.Error("the connection was not kept")
			}
		})
	}
}

// TestStreamFailures holds what happens when a stream goes wrong after text.
func TestStreamFailures(t *testing.T) {
	hang := func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	abort := func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }
	event := func(e string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) { stream(w, e) }
	}
	for _, c := range []struct {
		name    string
		then    func(http.ResponseWriter, *http.Request)
		kind    Kind
		code    string
		message string
	}{
		{"reset", abort, KindRetryable, CodeConnection, ""},
		{"silence", hang, KindRetryable, CodeTimeout, "idle"},
		{"early end", func(http.ResponseWriter, *http.Request) {}, KindRetryable, CodeConnection, "before the answer was finished"},
		{"error event", event(`{"error":{"message":"bad ` + testKey + `","type":"server_error","code":null}}`), KindRetryable, CodeUpstream, "bad [redacted]"},
		{"error event with status", event(`{"error":{"message":"x","code":429}}`), KindRetryable, CodeRateLimited, "x"},
		{"error event of the request", event(`{"error":{"message":"x","type":"invalid_request_error"}}`), KindPermanent, CodeInvalidRequest, "x"},
		{"error event as a string", event(`{"error":"boom"}`), KindRetryable, CodeUpstream, "boom"},
		{"no JSON", event(`{"choices":`), KindPermanent, CodeMalformed, "cannot be decoded"},
		{"too large", event(textChunk(strings.Repeat("x", 100))), KindPermanent, CodeTooLarge, "larger"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				stream(w, textChunk("partial "), textChunk("text"))
				c.then(w, r)
			})
			p := newProvider(t, s.URL, func(o *OpenAIOptions) { o.IdleTimeout, o.MaxOutput = 100*time.Millisecond, 100 })
			var rec recorder
			res, err := p.Generate(context.Background(), simpleRequest(), &rec)
			e := wantError(t, err, c.kind, c.code)
			if !strings.Contains(e.Message, c.message) {
				t.Errorf("message %q", e.Message)
			}
			if !strings.HasPrefix(res.Text, "partial text") || !res.Shown || rec.all() != res.Text {
				t.Errorf("result %+v, sink %q", res, rec.pieces)
			}
			if c.name != "early end" && p.Stats().Idle != 0 {
				t.Error("a connection in the middle of a stream was kept")
			}
		})
	}
}

func TestFinishedThenReset(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		stream(w, textChunk("all"), stopChunk)
		panic(http.ErrAbortHandler)
	})
	res, err := newProvider(t, s.URL, nil).Generate(context.Background(), simpleRequest(), &recorder{})
	if err != nil || res.Text != "all" || res.FinishReason != "stop" {
		t.Fatalf("%+v, %v", res, err)
	}
}

func TestFirstByteTimeout(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	p := newProvider(t, s.URL, func(o *OpenAIOptions) { o.FirstByteTimeout = 50 * time.Millisecond })
	res, err := p.Generate(context.Background(), simpleRequest(), nil)
	wantError(t, err, KindRetryable, CodeTimeout)
	if res.Shown {
		t.Error("shown")
	}
}

func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	p := newProvider(t, "http://"+addr, nil)
	_, err = p.Generate(context.Background(), simpleRequest(), nil)
	wantError(t, err, KindRetryable, CodeConnect)
	wantError(t, p.Check(context.Background()), KindRetryable, CodeConnect)
}

func TestCancelClosesUpstream(t *testing.T) {
	var open atomic.Int64
	gone := make(chan struct{}, 10)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		open.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		stream(w, textChunk("one "), textChunk("two"))
		<-r.Context().Done()
		open.Add(-1)
		gone <- struct{}{}
	})
	p := newProvider(t, s.URL, nil)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("superseded")
	rec := recorder{}
	rec.after = func(string) error {
		if rec.all() == "one two" {
			cancel(why)
		}
		return nil
	}
	start := time.Now()
	res, err := p.Generate(ctx, simpleRequest(), &rec)
	took := time.Since(start)
	wantError(t, err, KindCancelled, CodeCancelled)
	if !errors.Is(err, why) {
		t.Errorf("the cause is lost: %v", err)
	}
	if res.Text != "one two" || !res.Shown {
		t.Errorf("result %+v", res)
	}
	if took > 5*time.Second {
		t.Errorf("cancel took %v", took)
	}
	<-gone
	if p.Stats().Idle != 0 {
		t.Error("the connection was kept")
	}
}

func TestCancelWhileWaiting(t *testing.T) {
	arrived := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(arrived)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-arrived; cancel() }()
	res, err := newProvider(t, s.URL, nil).Generate(ctx, simpleRequest(), nil)
	wantError(t, err, KindCancelled, CodeCancelled)
	if res.Shown || !errors.Is(err, context.Canceled) {
		t.Errorf("%+v %v", res, err)
	}
	_, err = newProvider(t, s.URL, nil).Generate(ctx, simpleRequest(), nil)
	wantError(t, err, KindCancelled, CodeCancelled)
}

func TestSinkFailureEndsTheCall(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		stream(w, textChunk("one"))
		<-r.Context().Done()
	})
	boom := errors.New("boom")
	res, err := newProvider(t, s.URL, nil).Generate(context.Background(), simpleRequest(), SinkFunc(func([]byte) error { return boom }))
	wantError(t, err, KindCancelled, CodeSink)
	if !errors.Is(err, boom) || !res.Shown {
		t.Errorf("%+v %v", res, err)
	}
}

func TestSinkPanicReleasesTheConnection(t *testing.T) {
	ended := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		stream(w, textChunk("one"))
		<-r.Context().Done()
		close(ended)
	})
	p := newProvider(t, s.URL, nil)
	func() {
		defer func() { _ = recover() }()
		_, _ = p.Generate(context.Background(), simpleRequest(), SinkFunc(func([]byte) error { panic("x") }))
	}()
	<-ended
}

func TestConnectionsAreReused(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		stream(w, textChunk("a"), stopChunk, "[DONE]")
	})
	p := newProvider(t, s.URL, nil)
	const calls = 20
	for range calls {
		if _, err := p.Generate(context.Background(), simpleRequest(), &recorder{}); err != nil {
			t.Fatal(err)
		}
	}
	if st := p.Stats(); st.Dialed != 1 || st.Reused != calls-1 || st.Idle != 1 || st.Stale != 0 {
		t.Errorf("%+v", st)
	}
}

func TestStaleConnectionIsReplacedOnce(t *testing.T) {
	var calls atomic.Int64
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		stream(w, textChunk("a"), stopChunk, "[DONE]")
	})
	p := newProvider(t, s.URL, nil)
	for range 3 {
		if _, err := p.Generate(context.Background(), simpleRequest(), nil); err != nil {
			t.Fatal(err)
		}
		s.CloseClientConnections()
	}
	if st := p.Stats(); st.Dialed != 3 || st.Stale != 2 || calls.Load() != 3 {
		t.Errorf("%+v, %d calls", st, calls.Load())
	}
}

func TestCoalescing(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for range 5 { // one write, one read
			_, _ = io.WriteString(w, "data: "+textChunk("x")+"\n\n")
		}
		_, _ = io.WriteString(w, "data: "+stopChunk+"\n\ndata: [DONE]\n\n")
	})
	var rec recorder
	res, err := newProvider(t, s.URL, nil).Generate(context.Background(), simpleRequest(), &rec)
	if err != nil || res.Text != "xxxxx" {
		t.Fatal(res, err)
	}
	if len(rec.pieces) > 2 {
		t.Errorf("%d pieces: %q", len(rec.pieces), rec.pieces)
	}
}

func TestTLS(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || r.ProtoMajor != 1 {
			t.Errorf("protocol %s", r.Proto)
		}
		stream(w, textChunk("secret"), stopChunk, "[DONE]")
	}))
	s.EnableHTTP2 = true // we must not be talked into it
	s.StartTLS()
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	p := newProvider(t, s.URL, func(o *OpenAIOptions) { o.TLS = &tls.Config{RootCAs: roots} })
	for range 3 {
		res, err := p.Generate(context.Background(), simpleRequest(), &recorder{})
		if err != nil || res.Text != "secret" {
			t.Fatal(res, err)
		}
	}
	if st := p.Stats(); st.Dialed != 1 {
		t.Errorf("%+v", st)
	}
	ctx, cancel := context.WithCancel(context.Background())
	_, err := p.Generate(ctx, simpleRequest(), SinkFunc(func([]byte) error { cancel(); return ctx.Err() }))
	wantError(t, err, KindCancelled, CodeCancelled)

	_, err = newProvider(t, s.URL, nil).Generate(context.Background(), simpleRequest(), nil)
	if e := wantError(t, err, KindPermanent, CodeTLS); !strings.Contains(e.Message, "certificate") {
		t.Errorf("message %q", e.Message)
	}
	plain := serve(t, func(http.ResponseWriter, *http.Request) {})
	_, err = newProvider(t, strings.Replace(plain.URL, "http:", "https:", 1), nil).Generate(context.Background(), simpleRequest(), nil)
	wantError(t, err, KindPermanent, CodeTLS)
}

func TestLimitedCalls(t *testing.T) {
	const limit, callers = 4, 40
	var now, most atomic.Int64
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		defer now.Add(-1)
		stream(w, textChunk("a"))
		if r.Header.Get("Idempotency-Key") == "hang" {
			<-r.Context().Done()
			return
		}
		stream(w, textChunk("b"), stopChunk, "[DONE]")
	})
	p := newProvider(t, s.URL, nil)
	l := NewLimiter(limit, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for range 5 {
				if err := l.Acquire(context.Background()); err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithCancel(context.Background())
				req := simpleRequest()
				sink := SinkFunc(func([]byte) error { return nil })
				if i%4 == 0 { // a quarter is cancelled in the middle of the stream
					req.IdempotencyKey = "hang"
					sink = func([]byte) error { cancel(); return nil }
				}
				_, err := p.Generate(ctx, req, sink)
				if (err != nil) != (i%4 == 0) {
					t.Error(err)
				}
				cancel()
				l.Release()
			}
		})
	}
	wg.Wait()
	if most.Load() > limit || l.InFlight() != 0 {
		t.Errorf("%d streams at a time, %d permits out", most.Load(), l.InFlight())
	}
}

func TestCheck(t *testing.T) {
	status := http.StatusOK
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "GET" || r.URL.Path != "/v1/models" || r.Header.Get("Authorization") != "Bearer "+testKey {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"data":[]}`)
	})
	p := newProvider(t, s.URL, nil)
	if err := p.Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	status = http.StatusForbidden
	if e := wantError(t, p.Check(context.Background()), KindPermanent, CodeUnauthorized); e.Status != 403 {
		t.Errorf("%+v", e)
	}
	if st := p.Stats(); st.Dialed != 1 {
		t.Errorf("%+v", st)
	}
}

func TestBadOptionsAndRequests(t *testing.T) {
	for _, base := range []string{"", "ftp://x", "http://", "http://u:" + testKey + "@x", "http://x/#f", "http://x/?a b", "http://x\r\n/", "http://[::1"} {
		_, err := NewOpenAI(OpenAIOptions{BaseURL: base, Dialer: &net.Dialer{}, Clock: env.SystemClock{}})
		if err == nil || strings.Contains(err.Error(), testKey) {
			t.Errorf("base %q: %v", base, err)
		}
	}
	if _, err := NewOpenAI(OpenAIOptions{BaseURL: "http://x", APIKey: testKey + "\r\nX: y"}); err == nil || strings.Contains(err.Error(), testKey) {
		t.Errorf("key: %v", err)
	}
	p := newProvider(t, "http://127.0.0.1:1", nil)
	for name, change := range map[string]func(*Request){
		"model":    func(r *Request) { r.Model = "" },
		"messages": func(r *Request) { r.Messages = nil },
		"params":   func(r *Request) { r.Params = json.RawMessage("[1]") },
		"key":      func(r *Request) { r.IdempotencyKey = "a\r\nb: c" },
	} {
		req := simpleRequest()
		change(&req)
		_, err := p.Generate(context.Background(), req, nil)
		if e := wantError(t, err, KindPermanent, CodeInvalidRequest); e.Message == "" {
			t.Error(name)
		}
	}
	for params, ok := range map[string]bool{"": true, `{"a":1}`: true, `{"stream":false}`: false, `{"n":2}`: false, `[]`: false, `{`: false} {
		if err := ValidateParams(json.RawMessage(params)); (err == nil) != ok {
			t.Errorf("params %s: %v", params, err)
		}
	}
}
