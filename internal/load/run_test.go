package load

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/mockllm"
)

func TestClosedLoop(t *testing.T) {
	f := newFake(t, &fake{ttft: 5 * time.Millisecond, total: 10 * time.Millisecond})
	up := upstream(t, mockllm.Config{TTFT: 5 * time.Millisecond, TPS: 1000, Tokens: 5})
	var out, errs output
	table := filepath.Join(t.TempDir(), "t.txt")
	points, err := Run(context.Background(), Config{
		Target: f.url, Upstream: up, Sweep: []int{1, 4}, Duration: 300 * time.Millisecond, APIKey: "sesame",
		JSON: true, Out: &out, Err: &errs, Table: table, Labels: map[string]string{"store": "mem"},
	})
	if err != nil || len(points) != 2 {
		t.Fatalf("%d points, %v", len(points), err)
	}
	if errs.String() != "" {
		t.Errorf("stderr: %s", errs.String())
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d lines of JSON, want one a point:\n%s", len(lines), out.String())
	}
	for i, line := range lines {
		checkKeys(t, line)
		p := points[i]
		if p.Turns < 3*p.Concurrency || p.Errors != 0 || p.Rejected != 0 || p.BrokenStreams != 0 {
			t.Errorf("c=%d: %+v", p.Concurrency, p)
		}
		if p.TTFT.P50 < 5 || p.Turn.P50 < 10 || p.TTFT.P50 >= p.Turn.P50 || *p.Turn.Max < p.Turn.P99 {
			t.Errorf("c=%d: TTFT %+v, turn %+v", p.Concurrency, p.TTFT, p.Turn)
		}
		// A closed loop: each worker has one turn under way nearly all the time.
		if busy := p.TurnsPerS * p.Turn.P50 / 1000; busy > float64(p.Concurrency)*1.01 {
			t.Errorf("c=%d: %.2f turns under way on average", p.Concurrency, busy)
		}
		if *p.FloorMS < 10 || p.Mock == nil || p.Server.RSS == 0 || p.Server.PSS == 0 || p.Server.Private == 0 {
			t.Errorf("c=%d: floor %v, mock %v, server %+v", p.Concurrency, *p.FloorMS, p.Mock, p.Server)
		}
	}
	if f.created != 5 || f.deleted != 5 {
		t.Errorf("%d sessions created, %d deleted, want one a worker: 5", f.created, f.deleted)
	}
	if f.auth != "Bearer sesame" || strings.Contains(out.String(), "sesame") {
		t.Errorf("the key must be sent (%q) and not shown", f.auth)
	}
	if b, err := os.ReadFile(table); err != nil || !bytes.Contains(b, []byte("turns/s")) {
		t.Errorf("table: %v\n%s", err, b)
	}
}

// checkKeys holds a line against what other tools rely on.
func checkKeys(t *testing.T, line string) {
	t.Helper()
	var got map[string]json.RawMessage
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	want := map[string][]string{
		"concurrency": nil, "turns": nil, "turns_per_s": nil, "errors": nil, "rejected": nil, "floor_ms": nil,
		"ttft_ms": {"p50", "p95", "p99"}, "turn_ms": {"p50", "p95", "p99", "max"},
		"server":   {"rss_bytes", "pss_bytes", "private_bytes", "cpu_ms_per_turn"},
		"settings": {"duration", "ramp", "input_bytes", "cpus", "kernel", "go_version", "store", "started_at"},
	}
	for key, members := range want {
		if got[key] == nil {
			t.Errorf("no %s in %s", key, line)
			continue
		}
		var inner map[string]json.RawMessage
		_ = json.Unmarshal(got[key], &inner) // numbers have no members
		for _, m := range members {
			if inner[m] == nil {
				t.Errorf("no %s.%s in %s", key, m, line)
			}
		}
	}
}

func TestRejectedWorkersWait(t *testing.T) {
	f := newFake(t, &fake{total: 20 * time.Millisecond, limit: 1, retry: "0.03"})
	var errs output
	points, err := Run(context.Background(), Config{Target: f.url, Concurrency: 4, Ramp: time.Millisecond, Duration: 400 * time.Millisecond, Err: &errs})
	if err != nil {
		t.Fatal(err)
	}
	p := points[0]
	if p.Rejected == 0 || p.Errors != 0 || p.Turns == 0 || p.RejectedMS == nil {
		t.Errorf("rejected %d, errors %d, turns %d: %s", p.Rejected, p.Errors, p.Turns, errs.String())
	}
	if f.tooSoon != 0 {
		t.Errorf("%d retries came before Retry-After had passed", f.tooSoon)
	}
}

func TestTurnsPerSession(t *testing.T) {
	f := newFake(t, &fake{total: time.Millisecond})
	points, err := Run(context.Background(), Config{Target: f.url, Duration: 100 * time.Millisecond, Ramp: time.Millisecond, TurnsPerSession: 3})
	if err != nil || points[0].Errors != 0 {
		t.Fatalf("%+v, %v", points, err)
	}
	if want := (f.turns + 2) / 3; f.created != want || f.deleted != want {
		t.Errorf("%d turns in %d sessions (%d deleted), want %d", f.turns, f.created, f.deleted, want)
	}
}

// silence never answers. The server sees the client go only once it has read
// the body.
func silence(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// Every way in which a turn can go wrong falls in its class, is counted each
// time and shown once.
func TestErrorClasses(t *testing.T) {
	sse := func(body string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, body)
		}
	}
	raw := func(reply string, linger int) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(c, reply)
			if l, ok := c.(interface{ SetLinger(int) error }); ok && linger >= 0 {
				_ = l.SetLinger(linger)
			}
			_ = c.Close()
		}
	}
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	cases := []struct {
		name, class string
		answer      func(http.ResponseWriter, *http.Request)
	}{
		{"failed", errFailed, sse("event: turn.failed\ndata: {\"code\":\"x\"}\n\n")},
		{"cancelled", errFailed, sse("event: turn.cancelled\n\n")},
		{"no terminal event", errBroken, sse("event: message.delta\ndata: x\n\n")},
		{"empty", errBroken, sse("")},
		{"cut in a chunk", errBroken, raw(head+"40\r\nevent: message.delta\n", -1)},
		{"cut between chunks", errBroken, raw(head+"3\r\nabc\r\n", -1)},
		{"reset in the stream", errBroken, raw(head, 0)},
		{"goes on after its end", errUnclean, raw(head+"15\r\nevent:turn.completed\n\r\n1\r\n\n\r\n5\r\nstuff\r\n0\r\n\r\n", -1)},
		{"never closed properly", errUnclean, raw(head+"17\r\nevent:turn.completed\n\n\n\r\n", -1)},
		{"500", err5xx, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "boom", 500) }},
		{"400", err4xx, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", 400) }},
		{"429 without Retry-After", errNoRetry, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusTooManyRequests) }},
		{"no stream", errFailed, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") }},
		{"no HTTP", errConnect, raw("hello, this is no HTTP\r\n\r\n", -1)},
		{"no answer", errConnect, raw("", -1)},
		{"silence", errTimeout, silence},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t, &fake{misbehave: c.answer})
			var errs output
			points, err := Run(context.Background(), Config{
				Target: f.url, Concurrency: 2, Ramp: time.Millisecond, Duration: 150 * time.Millisecond, TurnTimeout: 300 * time.Millisecond, Err: &errs,
			})
			if err != nil {
				t.Fatal(err)
			}
			p := points[0]
			if p.Turns != 0 || p.Errors < 2 || p.Errors != p.ErrorKinds[c.class] {
				t.Errorf("turns %d, errors %d by kind %v, want all %s", p.Turns, p.Errors, p.ErrorKinds, c.class)
			}
			if want := map[bool]int64{true: p.Errors}[c.class == errBroken]; p.BrokenStreams != want {
				t.Errorf("broken streams %d, want %d", p.BrokenStreams, want)
			}
			if n := strings.Count(errs.String(), "first "+c.class); n != 1 {
				t.Errorf("shown %d times, want once:\n%s", n, errs.String())
			}
		})
	}
}

// What a broken stream left half read is not taken for part of the next.
func TestBrokenStreamDoesNotLeak(t *testing.T) {
	var turns atomic.Int64
	f := newFake(t, &fake{misbehave: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		if turns.Add(1) == 1 {
			_, _ = io.WriteString(w, "event: message.delta\ndata: half of")
			return
		}
		_, _ = io.WriteString(w, "event: turn.completed\n\n")
	}})
	points, err := Run(context.Background(), Config{Target: f.url, Ramp: time.Millisecond, Duration: 300 * time.Millisecond})
	if err != nil || points[0].Errors != 1 || points[0].BrokenStreams != 1 || points[0].Turns == 0 {
		t.Errorf("want one broken stream and then only good turns: %+v, %v", points, err)
	}
}

// An open loop must not wait for the server: with one worker and arrivals at
// twice its speed, the later ones have waited longer and longer.
func TestOpenLoopCountsFromTheIntendedStart(t *testing.T) {
	f := newFake(t, &fake{total: 20 * time.Millisecond})
	points, err := Run(context.Background(), Config{Target: f.url, Rate: 100, Concurrency: 1, Ramp: time.Millisecond, Duration: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	p := points[0]
	if p.Turns != 30 || p.OfferedPerS != 100 || p.Errors != 0 || p.Workers != 1 {
		t.Errorf("%+v", p)
	}
	if *p.Turn.Max < 250 {
		t.Errorf("the last of 30 turns of 20 ms, all due within 300 ms, took %v ms from its intended start, want about 300", *p.Turn.Max)
	}
	many, err := Run(context.Background(), Config{Target: f.url, Rate: 100, Ramp: time.Millisecond, Duration: 200 * time.Millisecond})
	if err != nil || many[0].Turns != 20 || many[0].Workers < 2 {
		t.Errorf("without a cap: %+v, %v", many, err)
	}
}

func TestOverload(t *testing.T) {
	f := newFake(t, &fake{total: 20 * time.Millisecond, limit: 4, retry: "1"})
	up := upstream(t, mockllm.Config{TTFT: time.Millisecond, Tokens: 1})
	var out output
	cfg := OverloadConfig{
		Config: Config{Target: f.url, Upstream: up, Concurrency: 4, Duration: 200 * time.Millisecond, JSON: true, Out: &out},
		For:    300 * time.Millisecond, MaxRejectedP99: 5 * time.Second, MaxRecovery: 5 * time.Second,
	}
	rep, err := Overload(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !rep.Pass || rep.RecoveryMS < 0 || rep.Overload.Rejected == 0 || rep.Overload.Turns == 0 {
		t.Errorf("%+v", rep)
	}
	if r := rep.Overload.OfferedPerS / rep.AcceptedPerS; r < 9 || r > 11 {
		t.Errorf("offered %.1f times the accepted rate, want 10", r)
	}
	if !json.Valid([]byte(out.String())) || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("want one object on one line: %s", out.String())
	}
	// The upstream was never asked during the overload, so a limit on it can't
	// be said to have held.
	cfg.UpstreamLimit, cfg.JSON, out = 4, false, output{}
	if rep, err = Overload(context.Background(), cfg); err != nil || rep.Pass || !strings.Contains(out.String(), "FAILED") {
		t.Errorf("pass %v, %v:\n%s", rep.Pass, err, out.String())
	}
}

func TestRunRefuses(t *testing.T) {
	for name, c := range map[string]Config{
		"no target":   {},
		"https":       {Target: "https://x"},
		"concurrency": {Target: "http://x", Concurrency: -1},
		"sweep":       {Target: "http://x", Sweep: []int{0}},
		"rate":        {Target: "http://x", Rate: -1},
		"both":        {Target: "http://x", Rate: 1, Sweep: []int{1}},
		"nobody":      {Target: "http://127.0.0.1:1"},
		"no upstream": {Target: "http://127.0.0.1:1", Upstream: "ftp://x"},
	} {
		if p, err := Run(context.Background(), c); err == nil {
			t.Errorf("%s: %+v", name, p)
		}
	}
}

func TestCancelEndsTheRun(t *testing.T) {
	f := newFake(t, &fake{misbehave: silence})
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := Run(ctx, Config{Target: f.url, Concurrency: 3, Ramp: time.Millisecond}); err == nil {
		t.Error("want the context's error")
	}
}
