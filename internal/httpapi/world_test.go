package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
)

// script is a model that does what the last user message says.
type script struct {
	held    chan string   // gets the word after "hold" when such a call waits
	release chan struct{} // lets one call go on that waits

	mu   sync.Mutex
	seen []string // guarded by mu; the messages of each call, joined
}

func (s *script) Check(context.Context) error { return nil }
func (s *script) Close()                      {}

func (s *script) calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.seen...)
}

func (s *script) Generate(ctx context.Context, req model.Request, sink model.Sink) (model.Result, error) {
	var all []string
	for _, m := range req.Messages {
		all = append(all, string(m))
	}
	s.mu.Lock()
	s.seen = append(s.seen, strings.Join(all, "\n"))
	s.mu.Unlock()
	last := req.Messages[len(req.Messages)-1]
	res := model.Result{FinishReason: "stop", Usage: model.Usage{Prompt: len(req.Messages), Completion: 2}}
	say := func(text string) {
		res.Text += text
		res.Shown = true
		_ = sink.Delta([]byte(text))
	}
	if bytes.HasPrefix(last, []byte(`{"role":"tool"`)) {
		say("The tool ")
		say("answered.")
		return res, nil
	}
	word := lastWords(last)
	verb, rest, _ := strings.Cut(word, " ")
	switch verb {
	case "hold":
		say("before ")
		s.held <- rest
		select {
		case <-s.release:
		case <-ctx.Done():
			return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeCancelled, Message: "cancelled"}
		}
		say("after")
	case "silent":
		s.held <- rest
		select {
		case <-s.release:
		case <-ctx.Done():
			return res, &model.Error{Kind: model.KindCancelled, Code: model.CodeCancelled, Message: "cancelled"}
		}
		say("late")
	case "fail":
		return model.Result{}, &model.Error{Kind: model.KindPermanent, Code: rest, Message: "the model said no", Hint: "ask another"}
	case "break":
		say("half ")
		return res, &model.Error{Kind: model.KindPermanent, Code: model.CodeConnection, Message: "broken"}
	case "tool":
		say("Let me see.")
		res.FinishReason = "tool_calls"
		res.ToolCalls = []model.ToolCall{{ID: "call_1", Name: "missing", Arguments: "{}"}}
	case "big": // half a megabyte, once it is let
		say("big ")
		select {
		case <-s.release:
		case <-ctx.Done():
		}
		for range 64 {
			say(strings.Repeat("x", 8<<10))
		}
	case "":
	default:
		say("you said ")
		say(word)
	}
	return res, nil
}

func lastWords(msg json.RawMessage) string {
	var m struct{ Content json.RawMessage }
	_ = json.Unmarshal(msg, &m)
	var s string
	if json.Unmarshal(m.Content, &s) == nil {
		return s
	}
	return string(m.Content)
}

// maxTurns is how many turns a world admits at once.
const maxTurns = 8

// world is a whole server in this process, on memory, with a scripted model.
type world struct {
	t      testing.TB
	api    *API
	srv    *httptest.Server
	script *script
	svc    *session.Service
	hub    *stream.Hub
	log    *bytes.Buffer

	mu      sync.Mutex
	records []AccessRecord // guarded by mu
	arrived chan AccessRecord
	moved   chan struct{} // a token for each answer that left net/http
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, script: &script{held: make(chan string, 64), release: make(chan struct{}, 64)}, hub: stream.NewHub(), log: &bytes.Buffer{}, arrived: make(chan AccessRecord, 4096), moved: make(chan struct{}, 64)}
	e := env.Real()
	e.FS = vfs.NewMem()
	logger := slog.New(slog.NewTextHandler(&lockedWriter{w: w.log}, nil))
	providers := map[string]*agent.Provider{"script": {Provider: w.script, Name: "script", Model: "m", Limiter: model.NewLimiter(0, 0)}}
	reg := agent.NewRegistry(providers, map[string]tool.Definition{}, nil)
	for _, name := range []string{"demo", "other"} {
		if err := reg.AddConfig(agent.Definition{Name: name, Provider: "script"}); err != nil {
			t.Fatal(err)
		}
	}
	gate := admit.NewGate(maxTurns)
	w.svc = session.New(session.Config{Agents: reg, Hub: w.hub, Gate: gate, Env: e, MaxQueued: 2, StreamBound: 64 << 10, StatelessKeep: time.Hour})
	handler := &agent.Handler{Registry: reg, Limits: agent.Limits{MaxToolRounds: 4, MaxToolCalls: 4, TurnTimeout: time.Minute}, Clock: e.Clock}
	pool := worker.New(w.hub, handler, logger)
	set := w.partitions(e, pool)
	w.svc.Bind(set)
	pool.Bind(set)
	cfg := Config{Service: w.svc, Limits: limits(), Clock: e.Clock, Rand: e.Rand, Logger: logger, Version: "test", AccessLog: w.record}
	for _, f := range change {
		f(&cfg)
	}
	w.api = New(cfg)
	w.api.patience = worldPatience
	w.srv = httptest.NewUnstartedServer(w.api)
	w.srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateHijacked {
			select {
			case w.moved <- struct{}{}:
			default: // nobody counts
			}
		}
	}
	w.srv.Start()
	returned := w.api.Returned(w.srv.Listener.Addr())
	go func() { _ = w.srv.Config.Serve(returned) }() // ends with it
	t.Cleanup(func() {
		w.srv.CloseClientConnections()
		w.api.Close(past)
		w.srv.Close()
		for _, r := range set {
			r.Stop()
		}
		pool.Stop()
	})
	return w
}

func (w *world) partitions(e env.Env, pool *worker.Pool) partition.Set {
	var set partition.Set
	for i := range 2 {
		db, err := state.Open(fmt.Sprintf("state-%d", i), state.Options{FS: e.FS})
		if err != nil {
			w.t.Fatal(err)
		}
		log, err := journal.Open(e.FS, fmt.Sprintf("journal-%d", i), journal.Options{Rand: e.Rand})
		if err != nil {
			w.t.Fatal(err)
		}
		m, _, err := partition.Open(partition.Config{ID: i, Epoch: 1, Nonce: 1, Env: e, Tables: db, Log: log, Executor: pool, Observer: w.svc})
		if err != nil {
			w.t.Fatal(err)
		}
		set = append(set, partition.Start(m, func(err error) { w.t.Errorf("partition lost: %v", err) }))
		w.t.Cleanup(func() { _ = log.Close(); _ = db.Close() })
	}
	return set
}

// past is over already.
var past = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func limits() config.Limits {
	return config.Limits{MaxBodyBytes: 64 << 10, MaxPromptBytes: 8 << 10, MaxRequests: 1000, ReadBodyTimeout: 5 * time.Second,
		StreamHeartbeat: time.Minute, StreamStall: 5 * time.Second}
}

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer // guarded by mu
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func (w *world) record(r AccessRecord) {
	w.mu.Lock()
	w.records = append(w.records, r)
	w.mu.Unlock()
	w.arrived <- r
}

// awaitRecord waits for the access record of a route.
func (w *world) awaitRecord(route string) AccessRecord {
	w.t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case r := <-w.arrived:
			if r.Route == route {
				return r
			}
		case <-timeout:
			w.t.Fatalf("no access record of %s", route)
		}
	}
}

// answer is a response that was read to its end.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (w *world) request(method, path, body string, headers ...string) *http.Request {
	w.t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, w.srv.URL+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return req
}

func (w *world) do(method, path, body string, headers ...string) answer {
	w.t.Helper()
	req := w.request(method, path, body, headers...)
	resp, err := w.srv.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	a := answer{resp.StatusCode, resp.Header, b}
	w.conforms(req, body, a)
	return a
}

// session makes a session of agent demo.
func (w *world) session(headers ...string) string {
	w.t.Helper()
	a := w.do("POST", "/v1/sessions", `{"agent":"demo"}`, headers...)
	if a.status != 201 {
		w.t.Fatalf("create session: %d %s", a.status, a.body)
	}
	return a.get(w.t, "id")
}

// get reads a field of a JSON answer by a dotted path; numbers as text.
func (a answer) get(t testing.TB, path string) string {
	t.Helper()
	return lookUp(t, a.body, path)
}

func lookUp(t testing.TB, body []byte, path string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatalf("not JSON: %v: %s", err, body)
	}
	for _, name := range strings.Split(path, ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[name]
		case []any:
			var i int
			if _, err := fmt.Sscan(name, &i); err != nil || i >= len(x) {
				return ""
			}
			v = x[i]
		default:
			return ""
		}
	}
	if v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

// frame is one event of a stream.
type frame struct{ id, event, data, comment string }

// frames reads an event stream, strictly as the standard says.
type frames struct {
	t    testing.TB
	resp *http.Response
	r    *bufio.Reader
	op   operation
}

func (w *world) open(method, path, body string, headers ...string) *frames {
	w.t.Helper()
	req := w.request(method, path, body, headers...)
	resp, err := w.srv.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		w.t.Fatalf("%s %s is no stream: %d %s", method, path, resp.StatusCode, b)
	}
	op, _ := w.operation(req)
	return &frames{w.t, resp, bufio.NewReader(resp.Body), op}
}

// next gives the next frame; ok is false at the end.
func (f *frames) next() (out frame, ok bool) {
	f.t.Helper()
	any := false
	for {
		line, err := f.r.ReadString('\n')
		if err == io.EOF && line == "" && !any {
			return out, false
		}
		if err != nil {
			f.t.Fatalf("stream broke: %v", err)
		}
		line = strings.TrimSuffix(line, "\n")
		if line == "" {
			f.conforms(out)
			return out, true
		}
		any = true
		name, val, found := strings.Cut(line, ":")
		if !found {
			f.t.Fatalf("not a line of an event stream: %q", line)
		}
		val = strings.TrimPrefix(val, " ")
		switch name {
		case "":
			out.comment = val
		case "id":
			out.id = val
		case "event":
			out.event = val
		case "data":
			out.data += val
		default:
			f.t.Fatalf("unknown field %q", line)
		}
	}
}

// until reads up to an event of that name.
func (f *frames) until(event string) frame {
	f.t.Helper()
	for {
		fr, ok := f.next()
		if !ok {
			f.t.Fatalf("stream ended before %s", event)
		}
		if fr.event == event {
			return fr
		}
	}
}

func (f *frames) rest() (all []frame) {
	f.t.Helper()
	for {
		fr, ok := f.next()
		if !ok {
			return all
		}
		all = append(all, fr)
	}
}

func names(fs []frame) string {
	var out []string
	for _, f := range fs {
		if f.event != "" {
			out = append(out, f.event)
		}
	}
	return strings.Join(out, " ")
}

// worldPatience is the API's patience in tests.
var worldPatience = patience

// TestMain runs all tests twice: with answers that stay on net/http unless they
// take long, and with answers that leave it as soon as they wait.
func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if code == 0 && flag.Lookup("test.fuzz").Value.String() == "" && flag.Lookup("test.bench").Value.String() == "" {
		worldPatience = 0
		code = m.Run()
	}
	os.Exit(code)
}
