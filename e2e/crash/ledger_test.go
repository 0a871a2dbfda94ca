//go:build e2e

package crash

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// ledger is what clients were told: the ground truth that a crash may not
// take back.
type ledger struct {
	start time.Time

	mu       sync.Mutex
	sessions []*record
	broken   []string // broken promises, the first ones
	counts   map[string]int
}

const maxBroken = 10

func newLedger() *ledger { return &ledger{start: time.Now(), counts: map[string]int{}} }

func (l *ledger) now() int64 { return int64(time.Since(l.start)) }

func (l *ledger) count(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[what]++
}

func (l *ledger) add(r *record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions = append(l.sessions, r)
}

func (l *ledger) all() []*record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.sessions)
}

// fail notes a broken promise; r may be nil.
func (l *ledger) fail(r *record, format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	if r != nil {
		msg = fmt.Sprintf("session %s: %s\n%s", r.id, msg, r.story())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.broken) < maxBroken {
		l.broken = append(l.broken, fmt.Sprintf("at %.3fs: %s", time.Since(l.start).Seconds(), msg))
	}
}

func (l *ledger) failures() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.broken)
}

// kind of an operation.
type kind string

const (
	opCreate kind = "create"
	opTurn   kind = "turn"
	opCancel kind = "cancel"
	opDelete kind = "delete"
)

// outcome of an operation, as its client knows it.
type outcome string

const (
	acked   outcome = "acked"   // it is done
	refused outcome = "refused" // it is not, and never will be
	doubt   outcome = "doubt"   // no answer came
	unsent  outcome = "unsent"  // nobody was there to ask
)

// op is one operation of a client.
type op struct {
	kind     kind
	key      string // idempotency key
	text     string // of a turn; unique
	policy   string // on_busy of a turn
	turn     string // its turn, or the one a cancel meant
	retry    bool   // asked before with the same key
	outcome  outcome
	from, to int64
	note     string
}

func (o *op) String() string {
	return fmt.Sprintf("%9.3f-%.3f %s %s %s key=%s %q %s %s", float64(o.from)/1e9, float64(o.to)/1e9, o.kind, o.policy, o.turn, o.key, o.text, o.outcome, o.note)
}

// content is the text as the JSON the client sends.
func (o *op) content() json.RawMessage {
	b, _ := json.Marshal(o.text) // a string always encodes
	return b
}

// record is the ledger of one session.
type record struct {
	id, agent string
	l         *ledger

	mu      sync.Mutex
	ops     []*op
	seen    map[string]string // frame by cursor: the same bytes whenever it is shown
	watched []string          // cursors in the order in which the watcher got them
	mayBe   bool              // a delete was asked for
	deleted bool              // a delete was acknowledged, or the watcher was told
	dirty   bool              // changed since the last check
	ended   map[string]string // terminal event by turn
}

func newRecord(l *ledger, id, agent string) *record {
	return &record{id: id, agent: agent, l: l, seen: map[string]string{}, ended: map[string]string{}}
}

func (r *record) flow() string { return "default/s/" + r.id }

// begin notes an operation before it is sent: until its end it may or may not
// have happened.
func (r *record) begin(o *op) *op {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.from, o.outcome = r.l.now(), doubt
	if o.kind == opDelete {
		r.mayBe = true
	}
	r.ops = append(r.ops, o)
	r.dirty = true
	return o
}

func (r *record) end(o *op, is outcome, turn, note string) {
	r.mu.Lock()
	o.to, o.outcome, o.note = r.l.now(), is, note
	if turn != "" {
		o.turn = turn
	}
	if is == acked && o.kind == opDelete {
		r.deleted = true
	}
	if o.kind == opDelete && (is == refused || is == unsent) && !r.deletesInDoubt() {
		r.mayBe = r.deleted
	}
	r.mu.Unlock()
	r.l.count(string(o.kind) + " " + string(is))
}

func (r *record) deletesInDoubt() bool {
	return slices.ContainsFunc(r.ops, func(o *op) bool { return o.kind == opDelete && o.outcome == doubt })
}

func (r *record) isDeleted() (sure, maybe bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.deleted, r.mayBe
}

// saw notes a durable frame. Whoever reads it, and whenever, the same cursor
// has the same bytes.
func (r *record) saw(f frame, watcher bool) {
	if f.id == "" {
		return
	}
	var event struct {
		Turn string `json:"turn_id"`
	}
	if err := json.Unmarshal(f.data, &event); err != nil {
		r.l.fail(r, "frame %s is not JSON: %v: %q", f.id, err, f.raw)
		return
	}
	problem := r.note(f, event.Turn, watcher)
	if problem != "" {
		r.l.fail(r, "%s", problem)
	}
	r.l.count("frames")
	if f.event == "turn.resumed" {
		r.l.count("frames turn.resumed")
	}
}

func (r *record) note(f frame, turn string, watcher bool) (problem string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dirty = true
	if had, ok := r.seen[f.id]; ok && had != f.raw {
		problem = fmt.Sprintf("cursor %s was\n%s, and is\n%s", f.id, had, f.raw)
	}
	r.seen[f.id] = f.raw
	if terminal(f.event) {
		if had := r.ended[turn]; had != "" && had != f.id {
			problem = fmt.Sprintf("turn %s ended at %s, and again at %s", turn, had, f.id)
		}
		r.ended[turn] = f.id
	}
	if watcher {
		if n := len(r.watched); n > 0 && !cursorLess(r.watched[n-1], f.id) {
			problem = fmt.Sprintf("the watcher got %s behind %s", f.id, r.watched[n-1])
		}
		r.watched = append(r.watched, f.id)
	}
	return problem
}

func (r *record) cursor() string { return r.rewind(0) }

// rewind lets the watcher forget its last n events and gives its cursor.
func (r *record) rewind(n int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watched = r.watched[:max(0, len(r.watched)-n)]
	if len(r.watched) == 0 {
		return ""
	}
	return r.watched[len(r.watched)-1]
}

// earlier picks the n-th newest turn with a key that may have been taken.
func (r *record) earlier(n int) *op {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.ops) - 1; i >= 0; i-- {
		if o := r.ops[i]; o.kind == opTurn && o.key != "" && (o.outcome == acked || o.outcome == doubt) {
			if n == 0 {
				c := *o
				return &c
			}
			n--
		}
	}
	return nil
}

// known gives the turn that a key is known to have made.
func (r *record) known(key string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.ops {
		if o.key == key && o.outcome == acked {
			return o.turn
		}
	}
	return ""
}

// story tells what happened to the session, the newest last.
func (r *record) story() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, o := range r.ops[max(0, len(r.ops)-15):] {
		fmt.Fprintf(&b, "    %s\n", o)
	}
	ids := make([]string, 0, len(r.seen))
	for id := range r.seen {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int {
		if cursorLess(a, b) {
			return -1
		}
		return 1
	})
	for _, id := range ids[max(0, len(ids)-20):] {
		fmt.Fprintf(&b, "    saw %s\n", strings.ReplaceAll(strings.TrimSpace(r.seen[id]), "\n", " "))
	}
	return b.String()
}

func terminal(event string) bool {
	return event == "turn.completed" || event == "turn.failed" || event == "turn.cancelled"
}

// cursorLess orders event IDs.
func cursorLess(a, b string) bool {
	var al, an, bl, bn uint64
	_, _ = fmt.Sscanf(a, "%d.%d", &al, &an) // the server's own IDs; nonsense fails the comparison with the log
	_, _ = fmt.Sscanf(b, "%d.%d", &bl, &bn)
	return al < bl || al == bl && an < bn
}
