package tool

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestCallRequest(t *testing.T) {
	schema := Schema(`{"type":"object","properties":{"id":{},"part":{}},"required":["id","part"]}`)
	tests := []struct {
		name, method, url, args string
		request, body           string // what the server must see
		problem                 string // or what the model must be told
	}{
		{"query", "GET", "http://example.com/a?fixed=1", `{"id":"x y&z","part":2.50,"q":[true,"b"],"n":null}`, "GET /a?fixed=1&id=x+y%26z&part=2.50&q=true&q=b", "", ""},
		{"delete", "DELETE", "http://example.com/a/{id}", `{"id":7,"part":"p"}`, "DELETE /a/7?part=p", "", ""},
		{"path", "GET", "http://example.com/{id}/b-{part}.json", `{"id":"a/b?c#d%2f","part":"é"}`, "GET /a%2Fb%3Fc%23d%252f/b-%C3%A9.json", "", ""},
		{"body", "POST", "http://example.com", `{ "id" : "<a>", "part": [1.50, {"b":null}] }`, "POST /", `{"id":"<a>","part":[1.50,{"b":null}]}`, ""},
		{"body without what is in the path", "PUT", "http://example.com/{id}", `{"id":"a","part":1}`, "PUT /a", `{"part":1}`, ""},
		{"key given twice", "PATCH", "http://example.com/", `{"id":1,"id":2,"part":{"a":1,"a":2}}`, "PATCH /", `{"id":2,"part":{"a":2}}`, ""},

		{"object in the query", "GET", "http://example.com/", `{"id":{"a":1},"part":1}`, "", "", `argument "id" goes into the query`},
		{"list of lists in the query", "GET", "http://example.com/", `{"id":[[1]],"part":1}`, "", "", `argument "id" goes into the query`},
		{"fixed query", "GET", "http://example.com/?q=1", `{"id":1,"part":1,"q":2}`, "", "", `"q" is set by the tool`},
		{"empty step", "GET", "http://example.com/{id}", `{"id":"","part":1}`, "", "", "not empty"},
		{"list in the path", "GET", "http://example.com/{id}", `{"id":[1],"part":1}`, "", "", "goes into the path"},
		{"climb", "GET", "http://example.com/a/{id}", `{"id":"..","part":1}`, "", "", ". or .."},
		{"climb behind a slash", "GET", "http://example.com/a/{id}", `{"id":"x/../../b","part":1}`, "", "", ". or .."},
		{"climb behind a backslash", "GET", "http://example.com/a/{id}", `{"id":"x\\..","part":1}`, "", "", ". or .."},
		{"climb of two dots apart", "GET", "http://example.com/a/.{id}", `{"id":".","part":1}`, "", "", ". or .."},
		{"climb of two arguments", "GET", "http://example.com/{id}{part}/b", `{"id":".","part":"."}`, "", "", ". or .."},
		{"long URL", "GET", "http://example.com/", `{"id":"` + strings.Repeat("a", MaxURLBytes) + `","part":1}`, "", "", "at most 8192"},
		{"invalid", "GET", "http://example.com/", `{"id":1}`, "", "", "missing property 'part'"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := publicWorld(t, func(rw http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				fmt.Fprintf(rw, "%s %s|%s|%s|%s", r.Method, r.RequestURI, body, r.Header.Get("Content-Type"), r.Host)
			})
			def := definition(tt.method, tt.url)
			def.Parameters = schema
			got := mustCompile(t, def, w.client(t, newHandClock())).Call(t.Context(), Call{Arguments: tt.args})
			if tt.problem != "" {
				if !got.IsError || got.Retryable || !strings.Contains(got.Content, "invalid arguments") || !strings.Contains(got.Content, tt.problem) {
					t.Errorf("got %+v, want the error %q", got, tt.problem)
				}
				if len(w.dials()) > 0 {
					t.Error("a connection was made")
				}
				return
			}
			contentType := ""
			if tt.body != "" {
				contentType = "application/json"
			}
			want := Result{Content: tt.request + "|" + tt.body + "|" + contentType + "|example.com", Status: 200}
			if got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestCallHeaders(t *testing.T) {
	seen := make(chan http.Header, 2)
	w := publicWorld(t, func(rw http.ResponseWriter, r *http.Request) { seen <- r.Header })
	def := definition("POST", "http://example.com/")
	def.HTTP.Headers = map[string]string{"authorization": "Bearer ${TOKEN}", "X-Price": "$$5 or $6", "accept": "text/plain"}
	tool := mustCompile(t, def, w.client(t, newHandClock()))
	for range 2 {
		tool.Call(t.Context(), Call{IdempotencyKey: "effect-7"})
		h := <-seen
		for name, want := range map[string]string{"Authorization": "Bearer s3cr3t-t0ken", "X-Price": "$5 or $6", "Accept": "text/plain", "Idempotency-Key": "effect-7", "User-Agent": "perdure"} {
			if h.Get(name) != want {
				t.Errorf("%s: %q, want %q", name, h.Get(name), want)
			}
		}
	}
	tool.Call(t.Context(), Call{})
	if h := <-seen; h["Idempotency-Key"] != nil {
		t.Errorf("no key was given, %q was sent", h["Idempotency-Key"])
	}
	for _, key := range []string{"a\nb", strings.Repeat("k", MaxIdempotencyKeyBytes+1)} {
		if r := tool.Call(t.Context(), Call{IdempotencyKey: key}); !r.IsError || len(seen) > 0 {
			t.Errorf("key %.20q: %+v", key, r)
		}
	}
}

func TestCallAnswers(t *testing.T) {
	clock := newHandClock()
	date := clock.Now().Add(90 * time.Second).Format(http.TimeFormat)
	tests := []struct {
		name      string
		status    int
		header    string // Retry-After
		body      string
		content   string
		retryable bool
		after     time.Duration
		isError   bool
	}{
		{"ok", 200, "", `{"a":1}`, `{"a":1}`, false, 0, false},
		{"created", 201, "", "made", "made", false, 0, false},
		{"empty", 204, "", "", "HTTP 204 No Content, empty body", false, 0, false},
		{"redirect without a place", 304, "", "", "tool probe failed: HTTP 304 Not Modified: ", false, 0, true},
		{"bad request", 400, "", "no city", "tool probe failed: HTTP 400 Bad Request: no city", false, 0, true},
		{"server error", 500, "5", "oops", "tool probe failed: HTTP 500 Internal Server Error: oops", false, 0, true},
		{"unknown status", 599, "", "x", "tool probe failed: HTTP 599: x", false, 0, true},
		{"too many", 429, "7", "slow", "tool probe failed: HTTP 429 Too Many Requests: slow", true, 7 * time.Second, true},
		{"bad gateway", 502, "-3", "", "tool probe failed: HTTP 502 Bad Gateway: ", true, 0, true},
		{"unavailable until a date", 503, date, "", "tool probe failed: HTTP 503 Service Unavailable: ", true, 90 * time.Second, true},
		{"gateway timeout, long", 504, "999999999999", "", "tool probe failed: HTTP 504 Gateway Timeout: ", true, time.Hour, true},
		{"too many, nonsense", 429, "soon", "", "tool probe failed: HTTP 429 Too Many Requests: ", true, 0, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := publicWorld(t, func(rw http.ResponseWriter, _ *http.Request) {
				if tt.header != "" {
					rw.Header().Set("Retry-After", tt.header)
				}
				rw.WriteHeader(tt.status)
				io.WriteString(rw, tt.body)
			})
			got := mustCompile(t, definition("GET", "http://example.com/"), w.client(t, clock)).Call(t.Context(), Call{})
			want := Result{Content: tt.content, IsError: tt.isError, Retryable: tt.retryable, RetryAfter: tt.after, Status: tt.status}
			if got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestCallBodies(t *testing.T) {
	tests := []struct {
		name, contentType, body string
		status, most            int
		want                    string
		truncated               bool
	}{
		{"exactly the bound", "text/plain", "0123456789", 200, 10, "0123456789", false},
		{"one more", "text/plain", "0123456789a", 200, 10, "0123456789\n[truncated: the body is longer than 10 bytes]", true},
		{"cut inside a rune", "application/json", "01234567€€", 200, 10, "01234567\n[truncated: the body is longer than 10 bytes]", true},
		{"excerpt of an error", "text/plain", strings.Repeat("e", MaxErrorExcerptBytes+1), 400, 0, "tool probe failed: HTTP 400 Bad Request: " + strings.Repeat("e", MaxErrorExcerptBytes) + "\n[truncated: the body is longer than 4096 bytes]", true},
		{"binary", "image/png", "\x89PNG\xff\xfe", 200, 0, `[binary body of type "image/png", not shown]`, false},
		{"text of another alphabet", "text/plain; charset=latin1", "caf\xe9", 200, 0, "caf\uFFFD", false},
		{"replacement grows", "text/plain", "\xe9a\xe9a\xe9a", 200, 6, "\uFFFDa\n[truncated: the body is longer than 6 bytes]", true},
		{"secret", "text/plain", "you sent s3cr3t-t0ken, yes", 200, 0, "you sent [redacted], yes", false},
		{"secret across the bound", "text/plain", "01234567s3cr3t-t0ken and more", 200, 10, "01234567[r\n[truncated: the body is longer than 10 bytes]", true},
		{"many secrets do not draw a cut one in", "text/plain", strings.Repeat("s3cr3t-t0ken", 4), 200, 30, "[redacted][redacted][redacted]\n[truncated: the body is longer than 30 bytes]", true},
		{"secret in an error", "text/plain", "bad s3cr3t-t0ken", 401, 0, "tool probe failed: HTTP 401 Unauthorized: bad [redacted]", false},
		{"secret inside JSON", "application/json", `{"a":"pass\"word\u0026more"}`, 200, 0, `{"a":"[redacted]"}`, false},
		{"secret inside a URL", "text/plain", `pass%22word%26more`, 200, 0, "[redacted]", false},
		{"secrets that overlap", "text/plain", "xabcdefghiy", 200, 0, "x[redacted]y", false},
		{"literal credential", "text/plain", "literal-credential Basic literal-credential", 200, 0, "[redacted] [redacted]", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := publicWorld(t, func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", tt.contentType)
				rw.WriteHeader(tt.status)
				io.WriteString(rw, tt.body)
			})
			def := definition("GET", "http://example.com/")
			def.HTTP.MaxResponseBytes = tt.most
			def.HTTP.Headers = map[string]string{"X-A": "${TOKEN}", "X-B": "${QUOTED}", "X-C": "${OVERLAP_A}-${OVERLAP_B}", "X-Auth": "Basic literal-credential"}
			got := mustCompile(t, def, w.client(t, newHandClock())).Call(t.Context(), Call{})
			if got.Content != tt.want || got.Truncated != tt.truncated || got.Status != tt.status {
				t.Errorf("got %+v, want %q, truncated %v", got, tt.want, tt.truncated)
			}
			if !utf8.ValidString(got.Content) {
				t.Error("the content is not UTF-8")
			}
		})
	}
}

// blocked is a server that answers nothing until the test ends; begun tells
// that a request has come. With a first part, it sends that.
func blocked(t *testing.T, first string) (http.HandlerFunc, <-chan struct{}) {
	begun, end := make(chan struct{}, 8), make(chan struct{})
	t.Cleanup(func() { close(end) })
	return func(rw http.ResponseWriter, r *http.Request) {
		if first != "" {
			io.WriteString(rw, first)
			rw.(http.Flusher).Flush()
		}
		begun <- struct{}{}
		select {
		case <-end:
		case <-r.Context().Done():
		}
	}, begun
}

func TestCallTimesOut(t *testing.T) {
	for name, first := range map[string]string{"before the answer": "", "inside the body": "half of"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.name("example.com", []string{public})
			h, begun := blocked(t, first)
			w.serve(t, public+":80", h)
			clock := newHandClock()
			def := definition("GET", "http://example.com/")
			def.HTTP.Timeout = Duration(7 * time.Second)
			tool := mustCompile(t, def, w.client(t, clock))
			done := make(chan Result, 1)
			go func() { done <- tool.Call(t.Context(), Call{}) }()
			<-begun
			clock.advance(7*time.Second - 1)
			select {
			case r := <-done:
				t.Fatalf("ended early with %+v", r)
			default:
			}
			clock.advance(1)
			r := <-done
			if !r.IsError || r.Retryable || r.Content != "tool probe failed: timed out after 7s" {
				t.Errorf("got %+v", r)
			}
			if n := clock.pending(); n != 0 {
				t.Errorf("%d timers are left", n)
			}
		})
	}
}

func TestCallIsCancelled(t *testing.T) {
	w := newWorld()
	w.name("example.com", []string{public})
	h, begun := blocked(t, "")
	w.serve(t, public+":80", h)
	tool := mustCompile(t, definition("GET", "http://example.com/"), w.client(t, newHandClock()))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan Result, 1)
	go func() { done <- tool.Call(ctx, Call{}) }()
	<-begun
	cancel()
	if r := <-done; !r.IsError || r.Retryable || r.Content != "tool probe failed: cancelled" {
		t.Errorf("got %+v", r)
	}
}

func TestCallCannotConnect(t *testing.T) {
	w := newWorld()
	w.name("example.com", []string{public})
	w.name("empty.example", []string{})
	c := w.client(t, newHandClock())
	tests := []struct {
		url, says string
		retryable bool
	}{
		{"http://example.com/", "connection refused", true},
		{"http://empty.example/", "no address", true},
		{"http://gone.example/", "no such host", false},
	}
	for _, tt := range tests {
		r := mustCompile(t, definition("GET", tt.url), c).Call(t.Context(), Call{})
		if !r.IsError || r.Retryable != tt.retryable || !strings.Contains(r.Content, "could not connect") || !strings.Contains(r.Content, tt.says) {
			t.Errorf("%s: got %+v", tt.url, r)
		}
	}
}

// A connection that hangs ends by the bound of connecting, and a call that
// ends before that may be made again, because nothing was sent.
func TestCallHangsWhileConnecting(t *testing.T) {
	for _, tt := range []struct {
		timeout time.Duration
		says    string
	}{{time.Minute, "could not connect: dial 93.184.216.34:80: timed out after 10s"}, {10 * time.Second, ""}, {5 * time.Second, "timed out after 5s"}} {
		w := newWorld()
		w.name("example.com", []string{public})
		w.hang = true
		clock := newHandClock()
		def := definition("POST", "http://example.com/")
		def.HTTP.Timeout = Duration(tt.timeout)
		tool := mustCompile(t, def, w.client(t, clock))
		done := make(chan Result, 1)
		go func() { done <- tool.Call(t.Context(), Call{}) }()
		waitFor(t, func() bool { return len(w.dials()) == 1 })
		clock.advance(min(tt.timeout, connectTimeout))
		if r := <-done; !r.IsError || !r.Retryable || !strings.Contains(r.Content, tt.says) {
			t.Errorf("timeout %s: got %+v", tt.timeout, r)
		}
		clock.advance(connectTimeout) // lets the dial end that outlived its call
	}
}

func TestCallBreaksOff(t *testing.T) {
	w := publicWorld(t, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Length", "100")
		io.WriteString(rw, "half")
	})
	r := mustCompile(t, definition("GET", "http://example.com/"), w.client(t, newHandClock())).Call(t.Context(), Call{})
	if !r.IsError || r.Retryable || r.Status != 200 || !strings.Contains(r.Content, "broke off after 4 bytes") {
		t.Errorf("got %+v", r)
	}
}

// waitFor yields until ok, for conditions that another goroutine brings about.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("waited in vain")
		}
	}
}
