//go:build e2e

package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
)

// fromEnv reads a whole number.
func fromEnv(t *testing.T, name string, def uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return def
	}
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q: want a whole number", name, text)
	}
	return v
}

// loop is one run of kills.
type loop struct {
	t      *testing.T
	seed   uint64
	rng    *rand.Rand
	l      *ledger
	srv    *target
	model  string
	tools  *toolServer
	load   *load
	before *disk // of the last kill
	round  int
	opens  int // steps that were open when a server died
}

const loopClients = 20

// TestKillLoop kills the server with -9 at random moments while clients use
// it, reads the disk it left, and starts it again.
func TestKillLoop(t *testing.T) {
	rounds := int(fromEnv(t, "PERDURE_CRASH_ROUNDS", 50))
	k := newLoop(t, fromEnv(t, "PERDURE_CRASH_SEED", uint64(time.Now().UnixNano())))
	k.srv.mustStart()
	k.load.run(loopClients)
	for k.round = 1; k.round <= rounds; k.round++ {
		k.live()
		k.kill()
		k.restart()
	}
	k.settle()
	t.Logf("seed %d: %d kills, %d steps open at a kill, tools: %s; %s", k.seed, rounds, k.opens, k.tools, k.l.summary())
	if k.opens == 0 || k.l.counts["frames turn.resumed"] == 0 {
		t.Error("no kill hit a running turn: the test proved nothing")
	}
}

func newLoop(t *testing.T, seed uint64) *loop {
	k := &loop{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), l: newLedger()}
	data, err := os.MkdirTemp("", "perdure-crash-")
	if err != nil {
		t.Fatal(err)
	}
	k.tools = newToolServer(t, seed, func(format string, args ...any) { k.l.fail(nil, format, args...) })
	k.model = mockModel(t, "MOCK_TTFT_MS=15", "MOCK_TPS=150", "MOCK_TOKENS=12", "MOCK_ERROR_RATE=0.12",
		"MOCK_ERROR_KINDS=500,429,reset,eof,stall", "MOCK_RETRY_AFTER_MS=50", fmt.Sprintf("MOCK_SEED=%d", seed),
		"MOCK_TOOL=*", "MOCK_TOOL_ARGS="+toolArgs)
	k.srv = newTarget(t, data, config(k.model, k.tools.URL,
		// Small and often, so that kills fall into snapshots and trims too.
		"journal: {segment_bytes: 1MiB, snapshot_every: 300ms}\n", "state: {memtable_bytes: 256KiB}\n"))
	k.load = newLoad(k.l, k.srv.url(), seed)
	t.Cleanup(func() {
		k.load.stop.Store(true)
		k.load.leave()
		if k.before != nil {
			k.before.close()
		}
		if t.Failed() {
			t.Logf("seed %d, round %d; the data directory is kept, with the last server's log in test.log: %s", k.seed, k.round, data)
			_ = os.WriteFile(filepath.Join(data, "test.log"), []byte(k.srv.log.String()), 0o600) // best effort
			return
		}
		_ = os.RemoveAll(data)
	})
	return k
}

// live lets the load run for a random time.
func (k *loop) live() {
	k.sleep(50*time.Millisecond, 1200*time.Millisecond)
	if k.rng.IntN(5) == 0 { // a pause of the whole process changes nothing
		k.srv.signal(syscall.SIGSTOP)
		k.sleep(20*time.Millisecond, 300*time.Millisecond)
		if k.rng.IntN(2) == 0 {
			k.srv.signal(syscall.SIGCONT)
			k.sleep(0, 100*time.Millisecond)
		}
	}
	if k.srv.gone() {
		k.t.Fatalf("seed %d, round %d: the server ended by itself: %v; its log ends:\n%s", k.seed, k.round, k.srv.err, k.srv.log)
	}
}

func (k *loop) sleep(from, to time.Duration) {
	time.Sleep(from + time.Duration(k.rng.Int64N(int64(to-from))))
}

// kill ends the server and holds the ledger against its disk. The gate stays
// closed.
func (k *loop) kill() {
	k.load.breaking()
	k.srv.kill()
	if said := k.srv.log.line("panic"); said != "" {
		k.l.fail(nil, "the server panicked: %s", said)
	}
	k.load.gate.Lock()
	d, err := readDisk(k.srv.data)
	if err != nil {
		k.t.Fatalf("seed %d, round %d: read the disk after the kill: %v", k.seed, k.round, err)
	}
	for _, s := range d.parts {
		k.opens += len(s.open)
	}
	if k.before != nil {
		if err := d.checkTakeUp(k.before); err != nil {
			k.l.fail(nil, "%v", err)
		}
		k.before.close()
	}
	k.before = d
	k.checkAll(false)
	k.verdict()
}

// checkAll checks the sessions that changed since the last check, or all.
func (k *loop) checkAll(all bool) {
	calls := k.tools.snapshot()
	for _, r := range k.l.all() {
		r.mu.Lock()
		dirty := r.dirty
		r.mu.Unlock()
		if !dirty && !all {
			continue
		}
		if err := k.before.check(r, calls); err != nil {
			k.t.Fatalf("read the disk: %v", err)
		}
	}
}

// verdict ends the test when a promise was broken.
func (k *loop) verdict() {
	k.t.Helper()
	if broken := k.l.failures(); len(broken) > 0 {
		k.t.Fatalf("seed %d, round %d:\n%s", k.seed, k.round, strings.Join(broken, "\n"))
	}
}

// restart starts the next server: now and then one that is killed before it is
// ready, and every other time with a look at what it takes up again before
// the clients come back.
func (k *loop) restart() {
	if k.rng.IntN(6) == 0 {
		k.srv.start()
		k.sleep(0, 120*time.Millisecond)
		k.load.gate.Unlock()
		k.kill()
	}
	k.srv.start()
	look := k.round%2 == 0
	if !look {
		k.load.gate.Unlock()
	}
	if err := k.srv.ready(); err != nil {
		k.t.Fatalf("seed %d, round %d: %v", k.seed, k.round, err)
	}
	if look {
		k.checkResumed()
		k.load.gate.Unlock()
	}
	k.load.calm()
}

// checkResumed: what was open on the disk is what clients are told first.
func (k *loop) checkResumed() {
	for _, s := range k.before.parts {
		byFlow := map[string][]core.Effect{}
		for _, ef := range s.open {
			byFlow[ef.FlowID] = append(byFlow[ef.FlowID], ef)
		}
		for flow, open := range byFlow {
			if err := k.resumed(flow, open); err != nil {
				k.l.fail(nil, "round %d: after the restart of flow %s: %v", k.round, flow, err)
			}
		}
	}
}

var errSeen = errors.New("seen enough")

func (k *loop) resumed(flow string, open []core.Effect) error {
	f, err := k.before.of(flow).tables.Flow(flow)
	if err != nil {
		return err
	}
	want := map[string]int{}
	for _, ef := range open {
		want[ef.Task.Scope+" "+ef.Task.Name]++
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	left := len(open)
	after := fmt.Sprintf("%d.%d", f.LastEvent.Lsn, f.LastEvent.N)
	ans, err := k.load.api.follow(ctx, strings.TrimPrefix(flow, "default/s/"), after, func(fr frame) error {
		var d struct {
			Turn   string `json:"turn_id"`
			Step   string `json:"step"`
			Reason string `json:"reason"`
		}
		if err := json.Unmarshal(fr.data, &d); err != nil {
			return err
		}
		if fr.id == "" {
			return nil
		}
		if want[d.Turn+" "+d.Step]--; fr.event != "turn.resumed" || want[d.Turn+" "+d.Step] < 0 {
			return fmt.Errorf("got %q, open were %v", fr.raw, want)
		}
		if left--; left == 0 {
			return errSeen
		}
		return nil
	})
	switch {
	case ans != nil:
		return fmt.Errorf("the events are answered with %s", ans)
	case errors.Is(err, errSeen):
		return nil
	}
	return err
}

// breaking says that connections may break from now on.
func (w *load) breaking() {
	if w.killed.Load()%2 == 0 {
		w.killed.Add(1)
	}
}

// calm says that the server is there again.
func (w *load) calm() {
	if w.killed.Load()%2 == 1 {
		w.killed.Add(1)
	}
}

// settle stops the load and waits for the end of all work: nothing is stuck,
// every watcher has everything, and the oracle agrees.
func (k *loop) settle() {
	k.load.stop.Store(true)
	k.load.clients.Wait()
	k.verdict()
	k.quiet()
	var live []*record
	for _, r := range k.l.all() {
		if k.idle(r) {
			live = append(live, r)
		}
	}
	for _, r := range live {
		k.caughtUp(r)
	}
	k.verdict()
	k.checkLimit()
	k.load.leave()
	k.load.watchers.Wait()
	if said := k.srv.log.line("panic"); said != "" {
		k.l.fail(nil, "the server panicked: %s", said)
	}
	k.srv.signal(syscall.SIGTERM)
	if code, err := k.srv.exit(patience); err != nil || code != 0 {
		k.t.Fatalf("the server ended with code %d, %v; its log ends:\n%s", code, err, k.srv.log)
	}
	d, err := readDisk(k.srv.data)
	if err != nil {
		k.t.Fatalf("read the disk at the end: %v", err)
	}
	if k.before != nil {
		if err := d.checkTakeUp(k.before); err != nil {
			k.l.fail(nil, "%v", err)
		}
		k.before.close()
	}
	k.before = d
	k.checkAll(true)
	if err := d.judge(k.l.all(), true); err != nil {
		k.l.fail(nil, "%v", err)
	}
	k.verdict()
}

// quiet waits until no turn is in flight.
func (k *loop) quiet() {
	deadline := time.Now().Add(2 * patience)
	for {
		n, err := k.srv.metric("perdure_in_flight_turns")
		if err == nil && n == 0 {
			return
		}
		if time.Now().After(deadline) {
			k.t.Fatalf("seed %d: %g turns are still in flight, %v", k.seed, n, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// idle checks that a session is there and at rest, or rightly gone.
func (k *loop) idle(r *record) bool {
	v, ans, err := k.load.api.session(r.id)
	sure, maybe := r.isDeleted()
	r.mu.Lock()
	created := slices.ContainsFunc(r.ops, func(o *op) bool { return o.kind == opCreate && o.outcome == acked })
	r.mu.Unlock()
	switch {
	case err != nil:
		k.l.fail(r, "read the session: %v", err)
	case ans.status == http.StatusNotFound && created && !maybe, ans.status == http.StatusOK && sure,
		ans.status != http.StatusNotFound && ans.status != http.StatusOK:
		k.l.fail(r, "created %v, deleted %v (%v), and it answers %s", created, sure, maybe, ans)
	case ans.status == http.StatusOK && (v.Status != "idle" || v.Queued != 0 || v.Turn != ""):
		k.l.fail(r, "it is stuck: %s", ans)
	case ans.status == http.StatusOK:
		return created
	}
	return false
}

// caughtUp reads the log of a session afresh, and waits until its watcher has
// the same.
func (k *loop) caughtUp(r *record) {
	v, _, err := k.load.api.session(r.id)
	if err != nil {
		k.l.fail(r, "read the session: %v", err)
		return
	}
	evs, err := k.fresh(r, v.Last)
	if err != nil {
		k.l.fail(r, "read the events: %v", err)
		return
	}
	got, err := k.load.api.messages(r.id)
	if err != nil {
		k.l.fail(r, "read the conversation: %v", err)
	}
	deadline := time.Now().Add(patience)
	for len(evs) > 0 && r.cursor() != evs[len(evs)-1] {
		if time.Now().After(deadline) {
			k.l.fail(r, "the watcher is at %s, the log at %s", r.cursor(), evs[len(evs)-1])
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.mu.Lock()
	watched := slices.Clone(r.watched)
	r.mu.Unlock()
	if !slices.Equal(watched, evs) {
		k.l.fail(r, "the watcher saw %v, a fresh read %v", watched, evs)
	}
	if missing := missingTexts(r.endedTexts(), got); missing != "" {
		k.l.fail(r, "the conversation lacks %q: %s", missing, got)
	}
}

// fresh reads the events from the beginning up to the cursor last. When that
// one is of an event that is not shown, nothing was said yet.
func (k *loop) fresh(r *record, last string) ([]string, error) {
	r.mu.Lock()
	said := len(r.seen) > 0
	r.mu.Unlock()
	if !said {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var ids []string
	_, err := k.load.api.follow(ctx, r.id, "", func(f frame) error {
		if f.id == "" {
			return nil
		}
		r.saw(f, false)
		ids = append(ids, f.id)
		if f.id == last {
			return errSeen
		}
		return nil
	})
	if errors.Is(err, errSeen) {
		return ids, nil
	}
	return ids, fmt.Errorf("the stream ended before %s: %w", last, err)
}

// checkLimit: the provider never had more calls than its limit allows.
func (k *loop) checkLimit() {
	resp, err := http.Get(k.model + "/stats")
	if err != nil {
		k.t.Fatal(err)
	}
	ans, err := read(resp)
	if err != nil {
		k.t.Fatal(err)
	}
	var st struct {
		Requests int `json:"requests"`
		Max      int `json:"max_concurrent"`
	}
	if err := json.Unmarshal(ans.body, &st); err != nil {
		k.t.Fatal(err)
	}
	k.t.Logf("mock: %s", strings.TrimSpace(string(ans.body)))
	if st.Requests == 0 || st.Max > concurrencyLimit+lateAborts {
		k.l.fail(nil, "the provider saw %d requests, and %d at the same time; the limit is %d", st.Requests, st.Max, concurrencyLimit)
	}
}

// summary tells what the load did.
func (l *ledger) summary() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var parts []string
	for what, n := range l.counts {
		parts = append(parts, fmt.Sprintf("%s %d", what, n))
	}
	slices.Sort(parts)
	return fmt.Sprintf("%d sessions; %s", len(l.sessions), strings.Join(parts, ", "))
}
