//go:build e2e

package flows

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// fate is what a client knows of a call.
type fate string

const (
	acked   fate = "acknowledged"
	doubt   fate = "in doubt"
	refused fate = "refused" // surely without effect
)

func fateOf(err error) fate {
	switch {
	case err == nil:
		return acked
	case errors.Is(err, client.ErrUnknown):
		return doubt
	}
	return refused
}

// outcome is what a flow of the load is to end with.
type outcome struct {
	status client.Status
	output string // JSON
	failed string // part of the error
}

// started is a start that a client asked for.
type started struct {
	id   string
	kind string
	fate fate
	want outcome
}

// letter is a message that a client published.
type letter struct {
	inbox, name string
	client, n   int
	fate        fate
}

// remark is an attribute that a client set.
type remark struct {
	counter, key string
	value        int
	fate         fate
}

// addition is a locked RPC that a client called, or a look at the counter.
type addition struct {
	op      porcupine.Operation
	counter string
	name    string // empty: a look
	fate    fate
}

// load is the clients of the loop, and what they were told.
type load struct {
	t     *testing.T
	seed  uint64
	sure  *client.Client // waits for as long as a restart takes
	hasty *client.Client // tries once, so that it is left in doubt
	stop  atomic.Bool
	all   sync.WaitGroup
	epoch time.Time
	next  atomic.Int64
	busy  atomic.Int64 // clients at work

	mu      sync.Mutex // guards what follows
	starts  []started
	letters []letter
	remarks []remark
	adds    []addition
	counts  map[string]int
	follow  map[string][]client.Event // live histories of the inboxes
	ended   map[string][]string       // what finish gave, by counter
}

func newLoad(t *testing.T, s *target, seed uint64) *load {
	return &load{t: t, seed: seed, epoch: time.Now(), counts: map[string]int{}, follow: map[string][]client.Event{}, ended: map[string][]string{},
		sure: s.client(client.Options{Patience: patience}), hasty: s.client(client.Options{Patience: -1})}
}

func inboxID(i int) string   { return fmt.Sprintf("inbox-%d", i) }
func counterID(i int) string { return fmt.Sprintf("counter-%d", i) }

// begin starts the flows that are always there, and the clients.
func (l *load) begin() {
	ctx := within(l.t, patience)
	eventually(l.t, "both workers", func() bool {
		w, err := l.sure.Workers(ctx)
		return err == nil && len(w) == loopWorkers
	})
	for i := range inboxes {
		if _, err := client.Start(ctx, l.sure, inbox, inboxID(i), flow.To(Take{}, flow.None{})); err != nil {
			l.t.Fatal(err)
		}
		l.all.Go(func() { l.watch(inboxID(i)) })
	}
	for i := range counters {
		if _, err := client.Start(ctx, l.sure, counter, counterID(i), flow.NoStep); err != nil {
			l.t.Fatal(err)
		}
	}
	l.busy.Store(loopClients)
	for i := range loopClients {
		l.all.Go(func() { l.live(i) })
	}
}

// watch follows the log of a flow to its end, over all restarts.
func (l *load) watch(id string) {
	var seen []client.Event
	for e, err := range l.sure.History(l.t.Context(), id, client.HistoryOptions{Live: true}) {
		if err != nil {
			l.t.Errorf("the live history of %s ended after %d events: %v", id, len(seen), err)
			break
		}
		seen = append(seen, *e)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow[id] = seen
}

// end stops the clients; the watchers go on.
func (l *load) end() { l.stop.Store(true) }

// rest waits until the clients have stopped.
func (l *load) rest() {
	ctx := within(l.t, 2*patience)
	for l.busy.Load() > 0 {
		if ctx.Err() != nil {
			l.t.Fatalf("%d clients do not come to an end", l.busy.Load())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// finish ends the inboxes and the counters, and waits for those who follow them.
func (l *load) finish() {
	ctx := within(l.t, 2*patience)
	for i := range inboxes {
		if err := client.Publish(ctx, l.sure, inboxID(i), closing, true); err != nil {
			l.t.Fatalf("close %s: %v", inboxID(i), err)
		}
	}
	for i := range counters {
		all, err := again(ctx, func() ([]string, error) {
			return client.Call(ctx, l.sure, counterID(i), finish, flow.None{})
		})
		if err != nil {
			l.t.Fatalf("finish %s: %v", counterID(i), err)
		}
		l.ended[counterID(i)] = all
	}
	over := make(chan struct{})
	go func() { l.all.Wait(); close(over) }()
	select {
	case <-over:
	case <-ctx.Done():
		l.t.Fatal("the live histories of the inboxes do not end")
	}
}

// again asks until a worker has answered.
func again[T any](ctx context.Context, fn func() (T, error)) (v T, err error) {
	for ctx.Err() == nil {
		if v, err = fn(); err == nil || !lostWorker(err) {
			return v, err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return v, err
}

// lostWorker is a call that failed since its worker, or all of them, are gone.
func lostWorker(err error) bool {
	var e *client.Error
	return errors.As(err, &e) && (e.Code == "worker_lost" || errors.Is(err, client.ErrNoWorker) || errors.Is(err, client.ErrUnknownType))
}

// live is one client: it starts flows of all kinds, and between them publishes,
// calls and sets.
func (l *load) live(id int) {
	defer l.busy.Add(-1)
	rng := rand.New(rand.NewPCG(l.seed, uint64(100+id)))
	for n := 0; !l.stop.Load(); n++ {
		c := l.sure
		if rng.IntN(3) == 0 {
			c = l.hasty
		}
		var s started
		if rng.IntN(3) > 0 {
			s = l.start(c, rng)
		}
		for range rng.IntN(4) {
			switch rng.IntN(8) {
			case 0, 1, 2:
				l.publish(c, rng, id, n)
			case 3, 4, 5:
				l.add(c, rng, id)
			case 6:
				l.look(c, rng, id)
			case 7:
				l.set(c, rng, id)
			}
		}
		if s.fate == acked { // a client that waits for what it started keeps the load bounded
			ctx, cancel := context.WithTimeout(l.t.Context(), 5*time.Second)
			_, err := l.sure.Wait(ctx, s.id, "")
			cancel()
			l.count("wait", err)
		}
	}
}

func (l *load) count(what string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[what+" "+string(fateOf(err))]++
	if e := (*client.Error)(nil); errors.As(err, &e) {
		l.counts["code "+e.Code]++
	}
}

// start starts a flow of some kind.
func (l *load) start(c *client.Client, rng *rand.Rand) started {
	s := started{id: fmt.Sprintf("f-%d", l.next.Add(1))}
	done := func(output string) outcome { return outcome{status: client.Completed, output: output} }
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	var err error
	switch s.kind = []string{"pipeline", "fan", "ticker", "parent", "trip", "ticker in vain"}[rng.IntN(6)]; s.kind {
	case "pipeline":
		n := 1 + rng.IntN(10)
		s.want = done(fmt.Sprint(n))
		_, err = client.Start(ctx, c, pipeline, s.id, flow.To(Seq{}, Job{Left: n, Nap: rng.IntN(8)}))
	case "fan":
		n := 1 + rng.IntN(6)
		s.want = done(fmt.Sprint(n * (n + 1) / 2))
		_, err = client.Start(ctx, c, fan, s.id, flow.To(Split{}, n))
	case "ticker":
		s.want = done(`"ticked"`)
		_, err = client.Start(ctx, c, ticker, s.id, flow.To(Tick{}, 1+rng.IntN(3)), flow.Delay(time.Duration(rng.IntN(100))*time.Millisecond))
	case "ticker in vain":
		s.kind, s.want = "ticker", outcome{status: client.TimedOut}
		_, err = client.Start(ctx, c, ticker, s.id, flow.To(Tick{}, 1000), flow.RunTimeout(time.Duration(100+rng.IntN(200))*time.Millisecond))
	case "parent":
		n := 1 + rng.IntN(4)
		s.want = done(fmt.Sprint(2 * n))
		_, err = client.Start(ctx, c, parent, s.id, flow.To(Both{}, Job{Left: n, Nap: rng.IntN(4)}))
	case "trip":
		t := Trip{Full: rng.IntN(2) == 0}
		if s.want = done(`"booked"`); t.Full {
			s.want = outcome{status: client.Failed, failed: "refunded: the flight is full"}
		}
		_, err = client.Start(ctx, c, trip, s.id, flow.To(Hotel{}, t))
	}
	s.fate = fateOf(err)
	l.count("start", err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.starts = append(l.starts, s)
	return s
}

func (l *load) publish(c *client.Client, rng *rand.Rand, id, n int) {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	m := letter{inbox: inboxID(rng.IntN(inboxes)), client: id, n: int(l.next.Add(1))}
	m.name = fmt.Sprintf("%s from %d: %d", m.inbox, id, m.n)
	err := client.Publish(ctx, c, m.inbox, letters, m.name)
	m.fate = fateOf(err)
	l.count("publish", err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.letters = append(l.letters, m)
}

// since is the clock of the histories.
func (l *load) since() int64 { return int64(time.Since(l.epoch)) }

func (l *load) add(c *client.Client, rng *rand.Rand, id int) {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	a := addition{counter: counterID(rng.IntN(counters)), name: fmt.Sprintf("%d.%d", id, l.next.Add(1))}
	a.op = porcupine.Operation{ClientId: id, Input: a.name, Call: l.since()}
	n, err := client.Call(ctx, c, a.counter, add, a.name)
	a.op.Output, a.op.Return, a.fate = n, l.since(), fateOf(err)
	l.count("add", err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.adds = append(l.adds, a)
}

// look reads a counter, by its RPC or, without a worker, by its attribute.
func (l *load) look(c *client.Client, rng *rand.Rand, id int) {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	a := addition{counter: counterID(rng.IntN(counters))}
	a.op = porcupine.Operation{ClientId: id, Input: "", Call: l.since()}
	var n int
	var err error
	if rng.IntN(2) == 0 {
		n, err = client.Call(ctx, c, a.counter, size, flow.None{})
	} else {
		var all []string
		all, err = client.Get(ctx, c, a.counter, added)
		n = len(all)
	}
	a.op.Output, a.op.Return, a.fate = n, l.since(), fateOf(err)
	l.count("look", err)
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.adds = append(l.adds, a)
}

func (l *load) set(c *client.Client, rng *rand.Rand, id int) {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	r := remark{counter: counterID(rng.IntN(counters)), value: int(l.next.Add(1))}
	r.key = fmt.Sprintf("%d-%d", id, rng.IntN(20))
	err := client.Set(ctx, c, r.counter, notes.At(r.key), r.value)
	r.fate = fateOf(err)
	l.count("set", err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remarks = append(l.remarks, r)
}

func (l *load) summary() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(l.counts)) {
		fmt.Fprintf(&b, "%s %d, ", k, l.counts[k])
	}
	return strings.TrimSuffix(b.String(), ", ")
}
