// Package sim runs whole servers in a simulated world: the production code of
// core, partition, journal, state, blob and stream on one goroutine, a
// simulated clock, seeded randomness and a disk that crashes, or several machines
// with these and one object store. Models, tools and clients are actors. Faults are drawn from the seed, and checkers stay on
// while they are injected.
//
// The same seed gives the same run: the same events, faults, trace digest and
// state hash.
package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/perdure-dev/perdure/internal/blob"
	blobfs "github.com/perdure-dev/perdure/internal/blob/fs"
	"github.com/perdure-dev/perdure/internal/oracle"
)

// Result is what one seed gave. Digest covers the whole story, StateHash the
// tables at the end.
type Result struct {
	Seed      uint64         `json:"seed"`
	Scenario  string         `json:"scenario"`
	OK        bool           `json:"ok"`
	Events    uint64         `json:"events"`
	Entries   uint64         `json:"entries"`
	Commits   uint64         `json:"commits"`
	Crashes   int            `json:"crashes"`
	Takeovers int            `json:"takeovers,omitempty"` // epochs that sealed a log
	Fenced    int            `json:"fenced,omitempty"`    // processes that ended since they might not be the owner
	Puts      int            `json:"puts,omitempty"`      // to the object store
	Turns     int            `json:"turns"`
	Flows     int            `json:"flows"`
	Commands  map[string]int `json:"commands"` // accepted, by kind
	Faults    map[string]int `json:"faults"`
	Digest    string         `json:"digest"`
	StateHash string         `json:"state_hash"`
	Failure   string         `json:"failure,omitempty"`
	Story     []string       `json:"story,omitempty"` // of a failure, the newest line last
}

// Line gives the result on one line.
func (r *Result) Line() string {
	var b strings.Builder
	verdict := "ok"
	if !r.OK {
		verdict = "FAILED"
	}
	fmt.Fprintf(&b, "seed=%d scenario=%s %s events=%d entries=%d commits=%d turns=%d flows=%d crashes=%d", r.Seed, r.Scenario, verdict, r.Events, r.Entries, r.Commits, r.Turns, r.Flows, r.Crashes)
	if r.Puts > 0 {
		fmt.Fprintf(&b, " takeovers=%d fenced=%d puts=%d", r.Takeovers, r.Fenced, r.Puts)
	}
	fmt.Fprintf(&b, " digest=%s state=%s faults=", r.Digest, r.StateHash)
	for i, k := range slices.Sorted(maps.Keys(r.Faults)) {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%s:%d", k, r.Faults[k])
	}
	return b.String()
}

// JSON gives the result as one object on one line.
func (r *Result) JSON() string {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Sprintf("{\"seed\":%d,\"ok\":false}", r.Seed) // plain values always encode
	}
	return string(b)
}

// Options of a run. Whole keeps the whole story, not only that of a failure.
type Options struct {
	Scenario string // see Scenarios; "" gives each seed one of them in turn
	Whole    bool
	// HarmOnly leaves out what is checked of the objects in the store: only what
	// clients, workers and later owners see counts.
	HarmOnly bool
}

// mutant breaks the engine on purpose: the simulator must notice.
type mutant struct {
	diskLies     bool // syncs of the journal do nothing
	ackEarly     bool // batches are acknowledged before their append
	dropDispatch bool // some attempts are never run
	noTimers     bool // timers do not fire
	showEarly    bool // text is shown before its commit
	seeTwice     bool // a reader does not mind its cursor
	inventAnswer bool // clients are told of turns that nobody took

	doubleSlots bool // a worker's credits count twice
	leakSlots   bool // reserved slots that were not used are lost
	runEarly    bool // steps are handed out before their commit
	dropQueue   bool // some steps without a slot are forgotten
	ignoreKeys  bool // concurrency keys do not limit
	dropSends   bool // some sends are forgotten
	forgetKeys  bool // deliveries are not known again
	loseUpdates bool // transactional calls do not look whether what they read is new

	ignoreLease bool // a node answers although its lease is over
	trimFar     bool // logs are trimmed beyond their snapshots
	skipFrames  bool // a follower passes over some frames
}

// Run runs one seed. An error means that the options are wrong.
func Run(seed uint64, o Options) (*Result, error) { return runMutant(seed, o, mutant{}) }

func runMutant(seed uint64, o Options, m mutant) (*Result, error) {
	if o.Scenario == "" {
		all := Scenarios()
		o.Scenario = all[seed%uint64(len(all))]
	}
	rng := &source{mix(seed ^ hashName(o.Scenario))}
	p, err := draw(o.Scenario, rng)
	if err != nil {
		return nil, err
	}
	w := newWorld(p, rng, m)
	w.harmOnly = o.HarmOnly
	w.tell("", "seed %d, %+v", seed, p)
	w.live()
	return w.result(seed, o), nil
}

func newWorld(p params, rng *source, m mutant) *world {
	w := &world{
		p: p, rng: rng, oracle: oracle.New(), mutant: m,
		known: map[string]bool{}, acked: map[string]uint64{}, turns: map[string][]string{},
		model: oracle.NewFlows(), given: map[taskKey]bool{}, works: map[string]string{}, lostWorks: map[string]string{},
		attempts: map[attemptKey]bool{}, tally: tally{faults: map[string]int{}},
	}
	w.trace.hash.Reset()
	if p.scenario == "objects" {
		w.bucket = newBucket(w)
	}
	w.addMachines()
	for i := range p.partitions {
		w.hist = append(w.hist, newHistory(w, i))
	}
	return w
}

// live is one run from the first boot to the verdict. A panic of what is
// simulated is a violation, too.
func (w *world) live() {
	defer func() {
		if v := recover(); v != nil {
			w.violate("panic", "", "%v\n%s", v, debug.Stack())
			for _, m := range w.machines {
				m.node = nil // in no state to be read
			}
		}
	}()
	for _, m := range w.machines {
		m.boot()
	}
	w.reap()
	w.startClients()
	if w.p.flows() {
		w.startWorkers()
		w.setUpFlows()
		w.runUntil(w.p.lengthUs, func() bool { return w.asks == 0 })
		w.startFlowClients()
		w.disturbWorkers()
	}
	for i := range w.p.sessions {
		w.watch(w.sessionID(i), true)
	}
	w.plan()
	w.runUntil(w.p.lengthUs, nil)
	w.finish()
}

func openStore(d *disk) (blob.Store, error) { return blobfs.Open(d, dataDir+"/objects") }

func (w *world) result(seed uint64, o Options) *Result {
	r := &Result{
		Seed: seed, Scenario: w.p.scenario, OK: w.broken == nil, Events: w.ran, Entries: w.tally.entries, Commits: w.tally.commits,
		Crashes: w.tally.faults["kill"] + w.tally.faults["power"], Faults: w.tally.faults,
	}
	for _, id := range slices.Sorted(maps.Keys(w.turns)) {
		r.Turns += len(w.turns[id])
	}
	r.Flows, r.Commands = w.model.Runs(), map[string]int{}
	for _, h := range w.hist {
		for kind, n := range h.fold.kinds {
			r.Commands[kind] += n
		}
	}
	if n := w.active(); n != nil {
		h := uint64(0)
		for _, p := range n.parts {
			if p.tables == nil {
				continue
			}
			one, err := p.tables.Hash()
			if err != nil {
				w.violate("tables", "", "partition %d: hash: %v", p.id, err)
			}
			h = mix(h ^ one)
		}
		r.StateHash = fmt.Sprintf("%016x", h)
	}
	for _, m := range w.machines {
		if m.node != nil {
			m.node.discard()
		}
	}
	if w.bucket != nil {
		r.Takeovers, r.Fenced, r.Puts = w.tally.takeovers, w.tally.faults["ousted"], w.bucket.puts
	}
	r.Digest = fmt.Sprintf("%016x", w.trace.hash.Sum64())
	if w.broken != nil {
		r.OK, r.Failure = false, w.broken.Error()
		r.Story = w.trace.story(flowOf(w.broken), false)
	}
	if o.Whole {
		r.Story = w.trace.story("", true)
	}
	return r
}

func flowOf(err error) string {
	var own *Violation
	var other *oracle.Violation
	switch {
	case errors.As(err, &own):
		return own.FlowID
	case errors.As(err, &other):
		return other.FlowID
	}
	return ""
}

// Check says what is wrong with the name of a scenario, or nil.
func Check(scenario string) error {
	if scenario == "" {
		return nil
	}
	_, err := draw(scenario, &source{})
	return err
}

// RunMany runs n seeds from first on, at most workers at a time, each a world
// of its own, and calls report for each, in order of the seeds.
func RunMany(ctx context.Context, first uint64, n, workers int, o Options, report func(*Result)) error {
	if err := Check(o.Scenario); err != nil {
		return err
	}
	workers = max(1, min(workers, n))
	results := make([]chan *Result, n)
	for i := range results {
		results[i] = make(chan *Result, 1)
	}
	next := make(chan int)
	var wg sync.WaitGroup
	for range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range next {
				r, _ := Run(first+uint64(i), o) // the options were checked above
				results[i] <- r
			}
		}()
	}
	go func() {
		defer close(next)
		for i := range n {
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer wg.Wait()
	for i := range n {
		select {
		case r := <-results[i]:
			report(r)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
