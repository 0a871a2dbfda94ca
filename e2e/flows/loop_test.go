//go:build e2e

package flows

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
)

const (
	heartbeat   = 200 * time.Millisecond
	loopClients = 12
	loopWorkers = 4
	inboxes     = 4
	counters    = 4
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

// casts are the flows of the workers, by turns: a flow and its child flows are of
// different programs, which come back at different times.
var casts = [2][]string{{"pipeline", "inbox"}, {"fan", "ticker", "parent", "counter", "trip"}}

// loop is one run of kills.
type loop struct {
	t    *testing.T
	rng  *rand.Rand
	srv  *target
	pool *workers
	run  [loopWorkers]*process
	load *load

	serverKills, serverStops, serverPauses, workerKills, workerPauses int
}

// TestKillLoop kills the server and the workers with -9 at random moments while
// clients use them, and holds what clients were told against what is there in
// the end.
func TestKillLoop(t *testing.T) {
	seed := fromEnv(t, "PERDURE_FLOWS_SEED", uint64(time.Now().UnixNano()))
	rounds := int(fromEnv(t, "PERDURE_FLOWS_ROUNDS", 25))
	t.Logf("seed %d", seed)
	k := &loop{t: t, rng: rand.New(rand.NewPCG(seed, 1))}
	k.srv = newTarget(t, fmt.Sprintf("kernel: {partitions: 2}\ndrain_timeout: 300ms\nflows: {worker_heartbeat: %s}\n"+
		// Small and often, so that kills fall into snapshots and trims too.
		"journal: {segment_bytes: 1MiB, snapshot_every: 300ms}\nstate: {memtable_bytes: 256KiB}\n", heartbeat))
	k.srv.start()
	k.pool = newWorkers(t, k.srv)
	for i := range k.run {
		k.run[i] = k.pool.start(casts[i%2]...)
	}
	k.load = newLoad(t, k.srv, seed)
	k.load.begin()
	began := time.Now()
	for k.serverKills < rounds {
		k.live()
		k.endServer()
	}
	k.load.end()
	took := time.Since(began)
	k.settle()
	t.Logf("%d kills, %d stops and %d pauses of the server, %d kills and %d pauses of workers in %v; %s", k.serverKills, k.serverStops, k.serverPauses,
		k.workerKills, k.workerPauses, took.Round(time.Millisecond), k.load.summary())
	t.Logf("checked: %s", k.check())
}

func (k *loop) sleep(from, to time.Duration) {
	time.Sleep(from + time.Duration(k.rng.Int64N(int64(to-from))))
}

// live lets the load run for a random time, and harms a worker now and then.
func (k *loop) live() {
	k.sleep(50*time.Millisecond, 600*time.Millisecond)
	if k.srv.over() {
		k.t.Fatalf("the server ended by itself; its log ends:\n%s", k.srv.log)
	}
	switch i := k.rng.IntN(loopWorkers); k.rng.IntN(6) {
	case 0:
		k.run[i].kill()
		k.workerKills++
		k.sleep(0, 200*time.Millisecond)
		k.run[i] = k.pool.start(casts[i%2]...)
	case 1: // longer than three heartbeats: the server takes it for lost
		k.run[i].signal(syscall.SIGSTOP)
		k.workerPauses++
		k.sleep(4*heartbeat, 5*heartbeat)
		k.run[i].signal(syscall.SIGCONT)
		k.sleep(0, 200*time.Millisecond) // its late answers meet the server that gave them up
	case 2: // a server that was away for a while takes its workers for silent, or not
		k.srv.signal(syscall.SIGSTOP)
		k.serverPauses++
		k.sleep(heartbeat, 5*heartbeat)
		k.srv.signal(syscall.SIGCONT)
		k.sleep(0, 200*time.Millisecond)
	}
}

// endServer ends the server, by a kill or now and then in good order, and starts
// the next one: at times one that is killed before it is ready.
func (k *loop) endServer() {
	if k.rng.IntN(6) == 0 {
		k.srv.stop()
		k.serverStops++
	} else {
		k.srv.kill()
		k.serverKills++
	}
	if said := k.srv.log.String(); strings.Contains(said, "panic") {
		k.t.Fatalf("the server panicked; its log ends:\n%s", said)
	}
	if k.rng.IntN(6) == 0 {
		if err := k.srv.launch(); err != nil {
			k.t.Fatal(err)
		}
		k.sleep(0, 120*time.Millisecond)
		k.srv.kill()
		k.serverKills++
	}
	k.srv.start()
}

// settle waits until no flow runs any more. Those that wait for clients are told
// to end when all others have.
func (k *loop) settle() {
	k.load.rest()
	k.until(`status = running and not type in ("inbox", "counter")`)
	k.load.finish()
	k.until("status = running")
}

// until waits until a query finds nothing.
func (k *loop) until(query string) {
	c := k.load.sure
	ctx := within(k.t, 2*patience)
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		n, err := c.Count(ctx, query)
		if err != nil {
			k.t.Fatal(err)
		}
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			k.stuck(c, query, n)
		}
	}
}

// stuck shows the flows that do not end.
func (k *loop) stuck(c *client.Client, query string, n uint64) {
	var b strings.Builder
	for i, err := range c.Search(within(k.t, patience), query, 5) {
		if err != nil {
			k.t.Fatal(err)
		}
		out, _, _ := k.srv.command(nil, "flow", "describe", i.ID)
		story, _, _ := k.srv.command(nil, "flow", "history", i.ID)
		fmt.Fprintf(&b, "%s%s\n", out, story)
	}
	queues, _, _ := k.srv.command(nil, "queue", "list", "--json")
	k.t.Fatalf("%d flows do not end:\n%s\nqueues: %s", n, &b, queues)
}
