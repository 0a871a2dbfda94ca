//go:build e2e

package crash

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// tracer gives a command line that runs the server under strace. It follows
// threads, names files, and traces the calls that make data durable.
func tracer(t *testing.T, out string, more ...string) []string {
	t.Helper()
	path, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed (apt-get install strace): syncs are not counted from outside")
	}
	if out, err := exec.Command(path, "-f", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("strace may not trace here: %v: %s", err, out)
	}
	return append([]string{path, "-f", "-y", "-qq", "-o", out, "-e", "trace=fdatasync,fsync,sync_file_range,msync"}, more...)
}

// syncCall is a sync and the file it is of. A call that another thread
// interrupts has two lines; the second, "resumed", has no file.
var syncCall = regexp.MustCompile(`^\d+ +(fdatasync|fsync|sync_file_range|msync)\(\d+<([^>]*)>`)

// syncs counts the syncs of a trace by file.
func syncs(t *testing.T, trace string) map[string]int {
	t.Helper()
	f, err := os.Open(trace)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]int{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if m := syncCall.FindStringSubmatch(lines.Text()); m != nil {
			out[m[1]+" "+m[2]]++
		}
	}
	return out
}

var segmentSync = regexp.MustCompile(`^fdatasync .*/journal/journal-\d+\.seg$`)

// journalSyncs counts the fdatasyncs of journal segments.
func journalSyncs(t *testing.T, trace string) int {
	n := 0
	for call, times := range syncs(t, trace) {
		if segmentSync.MatchString(call) {
			n += times
		}
	}
	return n
}

func total(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// newTraced makes a server that runs under strace; trace is where that writes.
func newTraced(t *testing.T, data, tool string, more ...string) (srv *target, trace string) {
	t.Helper()
	trace = filepath.Join(t.TempDir(), "trace")
	argv := tracer(t, trace, more...)
	model := mockModel(t, "MOCK_TTFT_MS=2", "MOCK_TPS=0", "MOCK_TOKENS=4", "MOCK_TOOL=*", "MOCK_TOOL_ARGS="+toolArgs)
	srv = newTarget(t, data, configWith(model, tool, 10*time.Second))
	srv.argv = argv
	return srv, trace
}

func mustSession(t *testing.T, a *api, id, agent string) {
	t.Helper()
	ans, err := a.call(http.MethodPost, "/v1/sessions", "", map[string]any{"id": id, "agent": agent})
	if err != nil || ans.status != http.StatusCreated {
		t.Fatalf("create session: %v, %v", ans, err)
	}
}

// TestOneSyncPerBatch counts, from outside of the process, the fdatasync calls
// of sequential turns: two batches a turn, its input and its result, and one
// call for each.
func TestOneSyncPerBatch(t *testing.T) {
	const turns = 50
	srv, trace := newTraced(t, t.TempDir(), "")
	srv.mustStart()
	a := newAPI(srv.url())
	mustSession(t, a, "one", "plain")
	batches, counted, seen := srv.mustMetric("perdure_journal_batches_total"), srv.mustMetric("perdure_journal_syncs_total"), journalSyncs(t, trace)
	for i := range turns {
		ans, err := a.call(http.MethodPost, "/v1/sessions/one/turns", "", map[string]any{"input": fmt.Sprint("turn ", i)})
		if err != nil || ans.status != http.StatusOK || !strings.Contains(string(ans.body), `"status":"completed"`) {
			t.Fatalf("turn %d: %v, %v", i, ans, err)
		}
	}
	batches = srv.mustMetric("perdure_journal_batches_total") - batches
	counted = srv.mustMetric("perdure_journal_syncs_total") - counted
	srv.signal(syscall.SIGTERM)
	if _, err := srv.exit(patience); err != nil {
		t.Fatal(err)
	}
	all := syncs(t, trace)
	seen = journalSyncs(t, trace) - seen
	t.Logf("%d turns: %g batches, %g syncs by the server's count, %d by strace; start, logs and tables made %d syncs of their own",
		turns, batches, counted, seen, total(all)-seen)
	if batches != 2*turns {
		t.Errorf("%d turns made %g batches, want %d", turns, batches, 2*turns)
	}
	if counted != batches {
		t.Errorf("the server counts %g syncs of %g batches", counted, batches)
	}
	if float64(seen) != batches {
		t.Errorf("strace saw %d fdatasyncs of journal segments for %g batches", seen, batches)
	}
}

// TestNothingLeavesBeforeItsSync makes each fdatasync slow: no answer, no event
// and no tool call may leave the server before the sync of its batch has
// returned. A kill cannot show that, for it keeps what was written.
func TestNothingLeavesBeforeItsSync(t *testing.T) {
	const delay = 150 * time.Millisecond
	var begin atomic.Int64 // of the turn, nanoseconds
	early := func(what string, syncs int) {
		if took := time.Duration(time.Now().UnixNano() - begin.Load()); took < time.Duration(syncs)*delay {
			t.Errorf("%s left after %s; %d syncs of %s come before", what, took, syncs, delay)
		}
	}
	var calls atomic.Int64
	tool := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		early("the tool call", 2) // the input's and the model's answer's
		w.WriteHeader(http.StatusNoContent)
	}))
	defer tool.Close()
	srv, _ := newTraced(t, t.TempDir(), tool.URL, "-e", fmt.Sprintf("inject=fdatasync:delay_enter=%d", delay.Microseconds()))
	srv.mustStart()
	a := newAPI(srv.url())
	begin.Store(time.Now().UnixNano())
	mustSession(t, a, "slow", "tooled")
	early("the session's acknowledgement", 1)
	const turns = 3
	for range turns {
		begin.Store(time.Now().UnixNano())
		resp, err := a.send(context.Background(), http.MethodPost, "/v1/sessions/slow/turns", "", map[string]any{"input": "hello", "stream": true})
		if err != nil {
			t.Fatal(err)
		}
		early("the turn's acknowledgement", 1)
		messages, last := 0, ""
		err = frames(resp.Body, func(f frame) error {
			syncs := map[string]int{"message.completed": 2 + 2*messages, "tool.started": 2, "tool.completed": 3, "turn.completed": 4}
			early(f.event, max(1, syncs[f.event]))
			if f.event == "message.completed" {
				messages++
			}
			last = f.event
			return nil
		})
		_ = resp.Body.Close()
		if err != io.EOF || last != "turn.completed" {
			t.Errorf("the turn's stream ended with %q, %v", last, err)
		}
	}
	if calls.Load() != turns {
		t.Errorf("the tool was called %d times in %d turns", calls.Load(), turns)
	}
}

// TestFailedSync: when the disk refuses a sync, what waits for it is not
// acknowledged, the server ends visibly, and the next one has all that was.
func TestFailedSync(t *testing.T) {
	data := t.TempDir()
	const good = 30 // fdatasyncs of one thread before the disk breaks for it
	srv, _ := newTraced(t, data, "", "-e", fmt.Sprintf("inject=fdatasync:error=EIO:when=%d+", good))
	srv.mustStart()
	a, l := newAPI(srv.url()), newLedger()
	r := recordedSession(t, a, l, "broken")
	refusals := 0
	for i := 0; i < 4*good && !srv.gone() && refusals == 0; i++ {
		o := r.begin(&op{kind: opTurn, key: fmt.Sprint("key ", i), text: fmt.Sprint("text ", i), policy: "enqueue"})
		ans, err := a.call(http.MethodPost, "/v1/sessions/"+r.id+"/turns", o.key, map[string]any{"input": o.text, "on_busy": o.policy})
		switch {
		case err == nil && ans.status == http.StatusOK:
			r.end(o, acked, turnOf(t, ans), "")
		case err == nil && ans.status != http.StatusServiceUnavailable:
			t.Errorf("the answer on a broken disk is %s", ans)
		default:
			refusals++
			t.Logf("turn %d on a broken disk: %v, %v", i, ans, err)
		}
	}
	code, err := srv.exit(patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d turns were acknowledged; then the server ended with code %d: %s", l.counts["turn acked"], code, srv.log.line("stopping"))
	if code == 0 || !strings.Contains(srv.log.String(), "journal") {
		t.Errorf("the server ended with code %d and does not say why:\n%s", code, srv.log)
	}
	if l.counts["turn acked"] == 0 || refusals == 0 {
		t.Errorf("%d turns were acknowledged and %d refused: the disk did not break in between", l.counts["turn acked"], refusals)
	}
	recovers(t, srv, l, a)
}

// recordedSession makes a session and its record.
func recordedSession(t *testing.T, a *api, l *ledger, id string) *record {
	t.Helper()
	r := newRecord(l, id, "plain")
	l.add(r)
	o := r.begin(&op{kind: opCreate})
	mustSession(t, a, id, r.agent)
	r.end(o, acked, "", "")
	return r
}

func turnOf(t *testing.T, ans *answer) string {
	t.Helper()
	turn := ans.header.Get("X-Perdure-Turn")
	if turn == "" {
		t.Errorf("an answer without a turn's ID: %s", ans)
	}
	return turn
}

// retry asks again for each turn of a session that got no answer, and for the
// newest that did: the same key gives the same turn, and runs it once.
func (k *loop) retry(r *record) {
	for _, o := range r.unsure() {
		again := r.begin(&op{kind: opTurn, key: o.key, text: o.text, policy: o.policy, retry: true})
		ans, err := k.load.api.call(http.MethodPost, "/v1/sessions/"+r.id+"/turns", o.key, map[string]any{"input": o.text, "on_busy": o.policy})
		if err != nil || ans.status != http.StatusOK {
			k.l.fail(r, "the repeated request %s: %v, %v", &o, ans, err)
			continue
		}
		turn := turnOf(k.t, ans)
		if o.turn != "" && turn != o.turn {
			k.l.fail(r, "key %s made turn %s, and asked again %s", o.key, o.turn, turn)
		}
		r.end(again, acked, turn, "")
	}
}

// unsure gives the turns without an answer, and the newest with one.
func (r *record) unsure() []op {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []op
	answered := false
	for _, o := range slices.Backward(r.ops) {
		if o.kind == opTurn && o.key != "" && (o.outcome == doubt || o.outcome == acked && !answered) {
			out = append(out, *o)
			answered = answered || o.outcome == acked
		}
	}
	return out
}

// recovers starts the server on a disk that is well again, lets it end what
// was left, and holds the ledger against the disk.
func recovers(t *testing.T, srv *target, l *ledger, a *api) {
	t.Helper()
	srv.argv = nil
	srv.mustStart()
	k := &loop{t: t, srv: srv, l: l, load: &load{l: l, api: a}, tools: &toolServer{}}
	k.quiet()
	for _, r := range l.all() {
		if k.idle(r) {
			k.retry(r)
		}
	}
	k.quiet()
	srv.signal(syscall.SIGTERM)
	if code, err := srv.exit(patience); err != nil || code != 0 {
		t.Fatalf("the server ended with code %d, %v", code, err)
	}
	d, err := readDisk(srv.data)
	if err != nil {
		t.Fatal(err)
	}
	k.before = d
	defer d.close()
	k.checkAll(true)
	if err := d.judge(l.all(), true); err != nil {
		t.Error(err)
	}
	k.verdict()
}
