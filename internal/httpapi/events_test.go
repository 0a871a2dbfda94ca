package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

func turn(input string) string { return `{"input":"` + input + `","stream":true}` }

// TestResume: from each cursor of a session's log on come exactly the events
// behind it, and then what happens live.
func TestResume(t *testing.T) {
	w := newWorld(t)
	id := w.session()
	path := "/v1/sessions/" + id
	var log []frame
	for _, input := range []string{"one", "tool", "break"} {
		for _, fr := range w.open("POST", path+"/turns", turn(input)).rest() {
			if fr.id != "" {
				log = append(log, fr)
			}
		}
	}
	for i := -1; i < len(log); i++ {
		last := ""
		if i >= 0 {
			last = log[i].id
		}
		var f *frames
		if i%2 == 0 {
			f = w.open("GET", path+"/events?after=1.0", "", "Last-Event-ID", last) // the header is stronger
		} else {
			f = w.open("GET", path+"/events?after="+last, "")
		}
		if fr, _ := f.next(); fr.comment != "connected" {
			t.Fatalf("first frame %v", fr)
		}
		for _, want := range log[i+1:] {
			got, ok := f.next()
			if !ok || got != want {
				t.Fatalf("after %q: got %v, want %v", last, got, want)
			}
		}
		live := w.open("POST", path+"/turns", turn("live")).rest()
		for _, want := range live {
			if want.id == "" {
				continue
			}
			for {
				got, ok := f.next()
				if ok && got.id == "" {
					continue // a delta
				}
				if !ok || got != want {
					t.Fatalf("live after %q: got %v, want %v", last, got, want)
				}
				break
			}
			log = append(log, want)
		}
		_ = f.resp.Body.Close()
		if i > 12 {
			break // the log grows with each round
		}
	}
}

func TestEventsOfOneTurn(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	first := w.do("POST", path+"/turns", `{"input":"one"}`)
	_ = w.do("POST", path+"/turns", `{"input":"two"}`)
	id := first.get(t, "turn_id")
	all := w.open("GET", path+"/events?turn_id="+id, "").rest()
	if got := names(all); got != "turn.started message.completed turn.completed" {
		t.Errorf("events: %s", got)
	}
	some := w.open("GET", path+"/events?turn_id="+id, "", "Last-Event-ID", all[1].id).rest()
	if got := names(some); got != "message.completed turn.completed" {
		t.Errorf("resumed: %s", got)
	}
	if a := w.do("GET", path+"/events?turn_id="+id, "", "Last-Event-ID", first.get(t, "last_event_id")); a.status != 204 {
		t.Errorf("after its end: %d %s", a.status, a.body)
	}
}

// TestDisconnectDoesNotCancel: the client leaves, the turn goes on.
func TestDisconnectDoesNotCancel(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	f := w.open("POST", path+"/turns", turn("hold on"))
	id := f.resp.Header.Get("X-Perdure-Turn")
	f.until("message.delta")
	_ = f.resp.Body.Close()
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Closed != "client_gone" || r.Status != 200 || r.Turn != id || r.TTFB == 0 || r.Bytes == 0 {
		t.Errorf("access record %+v", r)
	}
	if a := w.do("GET", path+"/turns/"+id, ""); a.get(t, "status") != "running" {
		t.Errorf("after the client left: %s", a.body)
	}
	w.script.release <- struct{}{}
	if a := w.do("GET", path+"/turns/"+id+"?wait=true", ""); a.get(t, "status") != "completed" || a.get(t, "text") != "before after" {
		t.Errorf("the turn was cut: %s", a.body)
	}
}

// TestWaitingClientLeaves: nothing is sent, and the access log says why.
func TestWaitingClientLeaves(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	req := w.request("POST", path+"/turns", `{"input":"hold"}`).WithContext(ctx)
	go func() {
		defer close(gone)
		if resp, err := w.srv.Client().Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	<-w.script.held
	cancel()
	<-gone
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Status != statusClientGone || r.Closed != "client_gone" || r.TTFB != 0 {
		t.Errorf("access record %+v", r)
	}
	w.script.release <- struct{}{}
}

func TestBusy(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	running := w.open("POST", path+"/turns", turn("hold"))
	if a := w.do("POST", path+"/turns", `{"input":"x","on_busy":"reject"}`); a.status != 409 || a.get(t, "error.code") != "busy" {
		t.Errorf("reject: %d %s", a.status, a.body)
	}
	var queued []*frames
	for range 2 {
		f := w.open("POST", path+"/turns", `{"input":"x","on_busy":"enqueue","stream":true}`)
		f.until("turn.queued")
		queued = append(queued, f)
	}
	if a := w.do("POST", path+"/turns", `{"input":"x","on_busy":"enqueue"}`); a.status != 429 || a.get(t, "error.code") != "queue_full" || a.header.Get("Retry-After") == "" {
		t.Errorf("full queue: %d %s", a.status, a.body)
	}
	if a := w.do("GET", path, ""); a.get(t, "status") != "running" || a.get(t, "queued_turns") != "2" || a.get(t, "active_turn") != running.resp.Header.Get("X-Perdure-Turn") {
		t.Errorf("session: %s", a.body)
	}
	waits := queued[1].resp.Header.Get("X-Perdure-Turn")
	if a := w.do("GET", path+"/turns/"+waits, ""); a.get(t, "status") != "queued" {
		t.Errorf("queued turn: %s", a.body)
	}
	if a := w.do("POST", path+"/cancel", `{"turn_id":"`+waits+`","reason":"enough"}`); a.get(t, "cancelled") != "1" {
		t.Errorf("cancel: %d %s", a.status, a.body)
	}
	if fr := queued[1].until("turn.cancelled"); lookUp(t, []byte(fr.data), "reason") != "enough" {
		t.Errorf("cancelled in the queue: %v", fr)
	}
	last := w.open("POST", path+"/turns", turn("interrupting"))
	if fr := running.until("turn.cancelled"); lookUp(t, []byte(fr.data), "reason") != "superseded" {
		t.Errorf("interrupted: %v", fr)
	}
	queued[0].until("turn.cancelled")
	if got := names(last.rest()); !strings.HasSuffix(got, "turn.completed") {
		t.Errorf("the interrupting turn: %s", got)
	}
	if a := w.do("POST", path+"/cancel", ""); a.get(t, "cancelled") != "0" {
		t.Errorf("nothing to cancel: %s", a.body)
	}
}

// TestCancelKeepsWhatWasShown: screen and conversation agree.
func TestCancelKeepsWhatWasShown(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	f := w.open("POST", path+"/turns", turn("hold"))
	f.until("message.delta")
	if a := w.do("POST", path+"/cancel", `{}`); a.get(t, "cancelled") != "1" {
		t.Errorf("cancel: %s", a.body)
	}
	if got := names(f.rest()); got != "turn.cancelling message.completed turn.cancelled" {
		t.Errorf("events: %s", got)
	}
	a := w.do("GET", path+"/turns/"+f.resp.Header.Get("X-Perdure-Turn"), "")
	if a.get(t, "status") != "cancelled" || a.get(t, "text") != "before " || a.get(t, "partial") != "true" || a.get(t, "reason") != "cancelled by a client" {
		t.Errorf("turn: %s", a.body)
	}
}

func TestIdempotentTurn(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session() + "/turns"
	first := w.do("POST", path, `{"input":"x"}`, "Idempotency-Key", "k1")
	again := w.do("POST", path, `{"input":"x"}`, "Idempotency-Key", "k1")
	if string(first.body) != string(again.body) || first.status != 200 {
		t.Errorf("%s\n%s", first.body, again.body)
	}
	if got := names(w.open("POST", path, turn("x"), "Idempotency-Key", "k1").rest()); got != "turn.started message.completed turn.completed" {
		t.Errorf("streamed again: %s", got)
	}
	if a := w.do("POST", path, `{"input":"y"}`, "Idempotency-Key", "k1"); a.status != 422 || !strings.Contains(string(a.body), "idempotency_key_reused") {
		t.Errorf("the key with another input: %d %s", a.status, a.body)
	}
	if n := len(w.script.calls()); n != 1 {
		t.Errorf("%d model calls", n)
	}
	if a := w.do("POST", path, `{"input":"x"}`, "Idempotency-Key", strings.Repeat("k", 256)); a.status != 400 {
		t.Errorf("long key: %d", a.status)
	}
}

func TestHeartbeat(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.StreamHeartbeat = 10 * time.Millisecond })
	path := "/v1/sessions/" + w.session()
	f := w.open("POST", path+"/turns", turn("silent"))
	f.until("turn.started")
	for range 3 {
		if fr, ok := f.next(); !ok || fr.comment != "ping" {
			t.Fatalf("frame %v", fr)
		}
	}
	w.script.release <- struct{}{}
	f.until("turn.completed")
	if _, ok := f.next(); ok {
		t.Error("there is something behind the terminal event")
	}
}

func TestDrain(t *testing.T) {
	w := newWorld(t)
	id := w.session()
	path := "/v1/sessions/" + id
	running := w.open("POST", path+"/turns", turn("hold"))
	watch := w.open("GET", path+"/events", "")
	cursor := watch.until("turn.started").id
	w.api.Drain()
	if fr := watch.until("stream.closed"); lookUp(t, []byte(fr.data), "reason") != "draining" || lookUp(t, []byte(fr.data), "last_event_id") != cursor {
		t.Errorf("%v, cursor %s", fr, cursor)
	}
	if _, ok := watch.next(); ok {
		t.Error("the stream goes on")
	}
	for _, r := range []struct{ method, path, body string }{
		{"POST", path + "/turns", `{"input":"x"}`}, {"POST", "/v1/sessions", `{"agent":"demo"}`}, {"GET", path + "/events", ""}, {"GET", "/readyz", ""},
	} {
		if a := w.do(r.method, r.path, r.body); a.status != 503 || a.get(t, "error.code") != "draining" || a.header.Get("Retry-After") == "" {
			t.Errorf("%s %s while draining: %d %s", r.method, r.path, a.status, a.body)
		}
	}
	w.script.release <- struct{}{}
	running.until("turn.completed")
	if a := w.do("GET", path+"/messages", ""); a.status != 200 {
		t.Errorf("reading while draining: %d", a.status)
	}
}

func TestDeleteEndsStreams(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	running := w.open("POST", path+"/turns", turn("hold"))
	watch := w.open("GET", path+"/events", "")
	if a := w.do("DELETE", path, ""); a.status != 204 || len(a.body) > 0 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	for _, f := range []*frames{running, watch} {
		if fr := f.until("session.deleted"); fr.id != "" {
			t.Errorf("%v", fr)
		}
		if _, ok := f.next(); ok {
			t.Error("the stream goes on")
		}
	}
	if a := w.do("GET", path, ""); a.status != 404 {
		t.Errorf("%d", a.status)
	}
}

// blocked is the ResponseWriter of a client that takes nothing until it is let.
type blocked struct {
	httptest.ResponseRecorder
	first chan struct{} // closed by the first write
	let   chan struct{}
}

func (b *blocked) Write(p []byte) (int, error) {
	select {
	case <-b.first:
	default:
		close(b.first)
	}
	<-b.let
	return b.ResponseRecorder.Write(p)
}

func (b *blocked) Flush() {}

// TestSlowReader: a reader that falls behind is closed with its cursor, and
// resumes from there without a gap.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sessions/" + w.session()
	slow := &blocked{ResponseRecorder: *httptest.NewRecorder(), first: make(chan struct{}), let: make(chan struct{})}
	ended := make(chan struct{})
	req := httptest.NewRequest("POST", path+"/turns", strings.NewReader(turn("big")))
	req.Header.Set("Content-Type", "application/json")
	go func() {
		defer close(ended)
		w.api.ServeHTTP(slow, req)
	}()
	<-slow.first
	w.script.release <- struct{}{}
	id := slow.Header().Get("X-Perdure-Turn")
	whole := w.do("GET", path+"/turns/"+id+"?wait=true", "")
	if whole.get(t, "status") != "completed" || len(whole.get(t, "text")) != 4+(512<<10) {
		t.Fatalf("the turn: %.300s", whole.body)
	}
	close(slow.let)
	<-ended
	out := slow.Body.String()
	i := strings.Index(out, "event: stream.closed\ndata: ")
	if i < 0 {
		t.Fatalf("no stream.closed: …%s", out[max(0, len(out)-300):])
	}
	data := strings.TrimSpace(out[i+len("event: stream.closed\ndata: "):])
	specOf(t).check(t, "event.stream.closed", []byte(data))
	if lookUp(t, []byte(data), "reason") != "slow_reader" {
		t.Errorf("%s", data)
	}
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Closed != "slow_reader" {
		t.Errorf("access record %+v", r)
	}
	rest := w.open("GET", path+"/events?turn_id="+id, "", "Last-Event-ID", lookUp(t, []byte(data), "last_event_id")).rest()
	if got := names(rest); got != "message.completed turn.completed" {
		t.Errorf("resumed: %s", got)
	}
}

// TestStalledReader: a connection that takes no byte is given up.
func TestStalledReader(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.StreamStall = 100 * time.Millisecond })
	srv := httptest.NewUnstartedServer(w.api)
	srv.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_ = c.(*net.TCPConn).SetWriteBuffer(4 << 10)
		return ctx
	}
	srv.Start()
	defer srv.Close()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	path := "/v1/sessions/" + w.session()
	req := w.request("POST", path+"/turns", turn("big"))
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	w.script.release <- struct{}{}
	if r := w.awaitRecord("/v1/sessions/{session_id}/turns"); r.Closed != "stalled" {
		t.Errorf("access record %+v", r)
	}
	if a := w.do("GET", path+"/turns/"+w.turnOf(path)+"?wait=true", ""); a.get(t, "status") != "completed" {
		t.Errorf("%.300s", a.body)
	}
}

// turnOf gives the newest turn of a session.
func (w *world) turnOf(path string) string {
	w.t.Helper()
	f := w.open("GET", path+"/events", "")
	defer f.resp.Body.Close()
	return lookUp(w.t, []byte(f.until("turn.started").data), "turn_id")
}

// TestSlowBody: a client that does not send its body is not waited for.
func TestSlowBody(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.ReadBodyTimeout = 50 * time.Millisecond })
	conn, err := net.Dial("tcp", w.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.Write([]byte("POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"))
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	_, _ = got.ReadFrom(conn)
	if !strings.HasPrefix(got.String(), "HTTP/1.1 408 ") || !strings.Contains(got.String(), "body_timeout") {
		t.Errorf("got %q", got.String())
	}
}

// TestChunkedBody: a body without a length is bounded too.
func TestChunkedBody(t *testing.T) {
	w := newWorld(t)
	for size, want := range map[int]int{10: 201, 70 << 10: 413} {
		body := `{"agent":"demo"` + strings.Repeat(" ", size) + `}`
		req := w.request("POST", "/v1/sessions", "")
		req.Header.Set("Content-Type", "application/json")
		req.Body = http.NoBody
		req = req.Clone(context.Background())
		req.Body = struct {
			*strings.Reader
			nopClose
		}{strings.NewReader(body), nopClose{}}
		req.ContentLength = -1
		resp, err := w.srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%d bytes: %d, want %d", size, resp.StatusCode, want)
		}
	}
}

type nopClose struct{}

func (nopClose) Close() error { return nil }

// reader is a LogReader over a list.
type reader []json.RawMessage

func (r reader) Tail(_ context.Context, tenant, after string, limit int) ([]json.RawMessage, string, error) {
	return append(r[:min(limit, len(r))], json.RawMessage(`{"tenant":"`+tenant+`","after":"`+after+`"}`)), "7", nil
}

func TestLogs(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.AccessReader, c.EventReader = reader{json.RawMessage(`{"n":1}`)}, reader{json.RawMessage(`{"n":2}`)}
		c.Metrics = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/plain; version=0.0.4")
			_, _ = rw.Write([]byte("perdure_up 1\n"))
		})
	})
	for path, n := range map[string]string{"/v1/access-log": "1", "/v1/events": "2"} {
		a := w.do("GET", path+"?limit=1&after=5", "")
		if a.get(t, "records.0.n") != n || a.get(t, "records.1.tenant") != "default" || a.get(t, "records.1.after") != "5" || a.get(t, "next") != "7" {
			t.Errorf("%s: %s", path, a.body)
		}
	}
	if a := w.do("GET", "/metrics?x=1", ""); a.status != 200 || string(a.body) != "perdure_up 1\n" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestOnBusyWords(t *testing.T) {
	for word, want := range map[string]wire.Publish_OnBusy{"interrupt": wire.Publish_INTERRUPT, "reject": wire.Publish_REJECT, "enqueue": wire.Publish_ENQUEUE} {
		v, err := parse([]byte(`{"input":"x","on_busy":"` + word + `"}`))
		if err != nil {
			t.Fatal(err)
		}
		if req, err := decodeTurn(v); err != nil || req.onBusy != want {
			t.Errorf("%s: %v %v", word, req.onBusy, err)
		}
	}
}
