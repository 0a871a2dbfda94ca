package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/oracle"
	"github.com/perdure-dev/perdure/internal/wire"
)

// world is one simulated run: a clock, a queue of events, and everything that
// lives on them. One goroutine runs it.
type world struct {
	p      params
	rng    *source // of faults and choices of the world itself
	nowUs  int64
	seq    uint64
	events queue
	ran    uint64 // events so far
	calm   bool   // faults are over: everything must come to rest

	machines []*machine
	bucket   *bucket // nil: each machine keeps all on its disk
	idleUs   int64   // see restartIdle
	hist     []*history
	oracle   *oracle.Oracle
	clients  []*client
	watchers []*watcher
	attempts map[attemptKey]bool
	ghosts   []*run              // attempts of former lives that still think they run
	known    map[string]bool     // sessions that clients believe in
	acked    map[string]uint64   // newest entry of a flow that a client was told of
	turns    map[string][]string // acknowledged, by flow
	calls    int64               // instants for the oracle: every call and answer has its own

	// Flows of users.
	workers     []*flowWorker
	flowClients []*flowClient
	model       *oracle.Flows
	given       map[taskKey]bool  // attempts that came to workers
	works       map[string]string // by idempotency key, of what was durable
	lostWorks   map[string]string // of what was not
	started     int               // flows that nobody disturbs
	strict      []string          // their IDs
	letters     []*letter
	counted     []*counted
	asks        int // in progress

	mutant   mutant
	harmOnly bool // see Options
	tally    tally
	trace    trace
	broken   error
}

// tally counts for the report.
type tally struct {
	faults           map[string]int
	commits, entries uint64
	takeovers        int
}

func (w *world) fault(kind string) { w.tally.faults[kind]++ }

// event is something that happens at an instant; those of the same instant
// happen in the order in which they were planned.
type event struct {
	atUs int64
	seq  uint64
	do   func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].atUs < q[j].atUs || q[i].atUs == q[j].atUs && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	old := *q
	x := old[len(old)-1]
	old[len(old)-1] = event{}
	*q = old[:len(old)-1]
	return x
}

// after plans do in us microseconds.
func (w *world) after(us int64, do func()) {
	w.seq++
	heap.Push(&w.events, event{w.nowUs + max(us, 0), w.seq, do})
}

// maxEvents bounds one run: above it something goes round in circles.
const maxEvents = 400_000

// runUntil runs events up to an instant, or until stop says so.
func (w *world) runUntil(endUs int64, stop func() bool) {
	for w.broken == nil && len(w.events) > 0 && w.events[0].atUs <= endUs {
		if stop != nil && stop() {
			return
		}
		ev := heap.Pop(&w.events).(event)
		w.nowUs = ev.atUs
		if w.ran++; w.ran > maxEvents {
			w.violate("liveness", "", "over %d events", maxEvents)
			return
		}
		ev.do()
		w.reap()
	}
	if w.broken == nil {
		w.nowUs = max(w.nowUs, endUs)
	}
}

// wallEpoch is when simulations begin, in microseconds since 1970.
const wallEpoch = 1_700_000_000_000_000

// instant gives the next instant for the oracle.
func (w *world) instant() int64 {
	w.calls++
	return w.calls
}

// Violation is a broken rule of the simulator's own.
type Violation struct {
	Rule   string
	FlowID string
	Detail string
}

func (v *Violation) Error() string {
	if v.FlowID == "" {
		return v.Rule + ": " + v.Detail
	}
	return fmt.Sprintf("%s broken in flow %q: %s", v.Rule, v.FlowID, v.Detail)
}

const maxDetail = 4 << 10

// violate records a broken rule; the first ends the run.
func (w *world) violate(rule, flow, format string, args ...any) {
	if w.broken == nil {
		detail := fmt.Sprintf(format, args...)
		v := &Violation{rule, flow, detail[:min(len(detail), maxDetail)]}
		w.broken = v
		w.tell(flow, "VIOLATED %v", v)
	}
}

// judge takes what the oracle found.
func (w *world) judge() {
	if err := w.oracle.Err(); err != nil && w.broken == nil {
		w.broken = err
		var v *oracle.Violation
		if errors.As(err, &v) {
			w.tell(v.FlowID, "VIOLATED %v", v)
		}
	}
}

// trace is the story of a run and its digest.
type trace struct {
	hash  xxhash.Digest
	lines []line
	buf   []byte
}

type line struct {
	flow string
	text string
}

// tell adds a line to the story. Every line is part of the digest.
func (w *world) tell(flow, format string, args ...any) {
	b := fmt.Appendf(w.trace.buf[:0], "%10.6f %s ", float64(w.nowUs)/1e6, shortFlow(flow))
	b = fmt.Appendf(b, format, args...)
	w.trace.buf = b
	_, _ = w.trace.hash.Write(b) // a hash never fails
	w.trace.lines = append(w.trace.lines, line{flow, string(b)})
}

func shortFlow(flow string) string {
	if flow == "" {
		return "--"
	}
	return flow[strings.LastIndexByte(flow, '/')+1:]
}

// storyLines bounds the story of a failure.
const storyLines = 60

// story gives the last lines that concern the flow, or all of them, with those
// of the node in between.
func (t *trace) story(flow string, all bool) []string {
	var out []string
	for _, l := range t.lines {
		if all || flow == "" || l.flow == flow || l.flow == "" {
			out = append(out, l.text)
		}
	}
	if !all && len(out) > storyLines {
		out = out[len(out)-storyLines:]
	}
	return out
}

// learnFlow tells the model of the events of a durable entry.
func (w *world) learnFlow(id string, events []*wire.Event) {
	if !isFlow(id) || len(events) == 0 {
		return
	}
	w.model.Events(id, events)
	if err := w.model.Err(); err != nil && w.broken == nil {
		w.broken = err
		w.tell(id, "VIOLATED %v", err)
	}
}
