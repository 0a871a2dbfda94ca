//go:build e2e

package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// load is the clients of one server: each with its own sessions, and a watcher
// of each session.
type load struct {
	l    *ledger
	api  *api
	seed uint64

	// gate is held for reading by whoever has a request open. With the server
	// dead, the harness takes it for writing: then all answers are in the
	// ledger, and none is on its way.
	gate sync.RWMutex
	// killed is raised before each kill and when its successor is ready: an odd
	// number means that connections may break.
	killed atomic.Int64

	stop     atomic.Bool
	clients  sync.WaitGroup
	watchers sync.WaitGroup
	settled  context.Context // ends when watchers may go
	leave    context.CancelFunc
	nextText atomic.Int64
}

func newLoad(l *ledger, base string, seed uint64) *load {
	w := &load{l: l, api: newAPI(base), seed: seed}
	w.settled, w.leave = context.WithCancel(context.Background())
	return w
}

func (w *load) run(clients int) {
	for i := range clients {
		w.clients.Add(1)
		go func() {
			defer w.clients.Done()
			c := &client{load: w, n: i, rng: rand.New(rand.NewPCG(w.seed, uint64(i)))}
			for !w.stop.Load() {
				c.session()
			}
		}()
	}
}

// client is one caller; its sessions are its own.
type client struct {
	*load
	n    int
	rng  *rand.Rand
	made int
}

// opsPerSession is how many operations a session sees before its client takes
// a new one.
const opsPerSession = 30

// session makes a session, uses it, and deletes or leaves it.
func (c *client) session() {
	agent := "plain"
	if c.rng.IntN(2) == 0 {
		agent = "tooled"
	}
	r := newRecord(c.l, fmt.Sprintf("c%d-%d", c.n, c.made), agent)
	c.made++
	c.l.add(r)
	if !c.create(r) {
		return
	}
	c.watch(r)
	for range opsPerSession {
		if c.stop.Load() {
			return
		}
		c.act(r)
	}
	if c.rng.IntN(2) == 0 {
		c.delete(r)
	}
}

func (c *client) pause(max time.Duration) {
	time.Sleep(time.Duration(c.rng.Int64N(int64(max))))
}

// create asks again until there is an answer.
func (c *client) create(r *record) bool {
	body := map[string]any{"id": r.id, "agent": r.agent}
	for !c.stop.Load() {
		o := r.begin(&op{kind: opCreate, key: "create-" + r.id})
		ans, err := c.once(func() (*answer, error) { return c.api.call(http.MethodPost, "/v1/sessions", o.key, body) })
		if c.lost(r, o, ans, err) {
			c.pause(50 * time.Millisecond)
			continue
		}
		if ans.status == http.StatusCreated {
			r.end(o, acked, "", "")
			return true
		}
		r.end(o, refused, "", ans.String())
		c.l.fail(r, "create was answered %s", ans)
		return false
	}
	return false
}

// undisturbed reports whether no server was killed since killed was kills.
func (w *load) undisturbed(kills int64) bool { return kills%2 == 0 && w.killed.Load() == kills }

// once runs a request within the gate.
func (w *load) once(fn func() (*answer, error)) (*answer, error) {
	w.gate.RLock()
	defer w.gate.RUnlock()
	return fn()
}

// lost ends an operation that got no answer, or one that says as much.
func (c *client) lost(r *record, o *op, ans *answer, err error) bool {
	switch {
	case errors.Is(err, errUnsent):
		r.end(o, unsent, "", "")
	case errors.Is(err, context.DeadlineExceeded):
		r.end(o, doubt, "", err.Error())
		c.l.fail(r, "no answer to %s within %s", o, hung)
	case err != nil:
		r.end(o, doubt, "", err.Error())
	case ans.status == http.StatusServiceUnavailable && ans.code == "outcome_unknown":
		r.end(o, doubt, "", ans.code)
	case ans.status == http.StatusServiceUnavailable && ans.code == "draining":
		r.end(o, refused, "", ans.code)
	default:
		return false
	}
	return true
}

func (c *client) act(r *record) {
	switch n := c.rng.IntN(100); {
	case n < 65:
		c.turn(r, &op{kind: opTurn, key: c.key(), text: fmt.Sprintf("text %d of %s", c.nextText.Add(1), r.id),
			policy: []string{"interrupt", "enqueue", "enqueue", "reject"}[c.rng.IntN(4)]})
	case n < 78:
		if o := r.earlier(c.rng.IntN(4)); o != nil {
			c.turn(r, &op{kind: opTurn, key: o.key, text: o.text, policy: o.policy, retry: true})
		}
	case n < 86:
		c.cancel(r)
	case n < 92:
		c.readBack(r)
	default:
		c.pause(120 * time.Millisecond)
	}
}

// key gives an idempotency key, mostly.
func (c *client) key() string {
	if c.rng.IntN(5) == 0 {
		return ""
	}
	return fmt.Sprintf("k-%d-%d", c.n, c.rng.Uint64())
}

func (c *client) turn(r *record, o *op) {
	c.gate.RLock()
	defer c.gate.RUnlock()
	kills := c.killed.Load()
	ctx, cancel := context.WithTimeout(context.Background(), hung)
	defer cancel()
	streams := c.rng.IntN(3) > 0
	r.begin(o)
	resp, err := c.api.send(ctx, http.MethodPost, "/v1/sessions/"+r.id+"/turns", o.key,
		map[string]any{"input": o.content(), "stream": streams, "on_busy": o.policy})
	if err != nil {
		c.lost(r, o, nil, err)
		c.pause(30 * time.Millisecond)
		return
	}
	if resp.StatusCode != http.StatusOK || !streams {
		ans, err := read(resp)
		if c.lost(r, o, ans, err) {
			return
		}
		c.answered(r, o, ans)
		return
	}
	c.accepted(r, o, resp.Header.Get("X-Perdure-Turn"))
	if c.rng.IntN(10) < 4 { // leaves early; the turn goes on
		defer time.AfterFunc(time.Duration(c.rng.Int64N(int64(150*time.Millisecond))), cancel).Stop()
		kills = -1
	}
	c.readTurn(r, o, resp.Body, kills)
	_ = resp.Body.Close()
}

// accepted is the acknowledgement of a turn's input.
func (c *client) accepted(r *record, o *op, turn string) {
	known := ""
	if o.retry {
		known = r.known(o.key)
	}
	r.end(o, acked, turn, "")
	switch {
	case turn == "":
		c.l.fail(r, "%s was accepted without a turn's ID", o)
	case known != "" && turn != known:
		c.l.fail(r, "key %s made turn %s, and asked again %s", o.key, known, turn)
	}
}

// answered takes an answer that is not a stream.
func (c *client) answered(r *record, o *op, ans *answer) {
	_, maybe := r.isDeleted()
	switch {
	case ans.status == http.StatusOK:
		var v struct {
			Turn   string `json:"turn_id"`
			Status string `json:"status"`
		}
		if err := json.Unmarshal(ans.body, &v); err != nil {
			c.l.fail(r, "answer to %s: %v", o, err)
		}
		c.accepted(r, o, v.Turn)
		if v.Status != "completed" && v.Status != "failed" && v.Status != "cancelled" {
			c.l.fail(r, "the wait for %s ended with the turn %q", o, v.Status)
		}
	case ans.status == http.StatusConflict && ans.code == "busy" && o.policy == "reject",
		ans.status == http.StatusTooManyRequests && ans.code == "queue_full" && o.policy != "interrupt",
		ans.status == http.StatusNotFound && maybe:
		if o.retry && r.known(o.key) != "" && ans.status != http.StatusNotFound {
			c.l.fail(r, "a repeated request was refused: %s: %s", o, ans)
		}
		r.end(o, refused, "", ans.code)
	default:
		r.end(o, refused, "", ans.String())
		c.l.fail(r, "unexpected answer to %s: %s", o, ans)
	}
}

// readTurn reads the stream of a turn to its end. Deltas join without a gap
// and are what the message then says.
func (c *client) readTurn(r *record, o *op, body io.Reader, kills int64) {
	var text strings.Builder
	last := ""
	err := frames(body, func(f frame) error {
		r.saw(f, false)
		switch f.event {
		case "message.delta":
			c.delta(r, o, f, &text)
		case "message.completed":
			c.message(r, o, f, &text)
		}
		last = f.event
		return nil
	})
	if err == io.EOF {
		if !terminal(last) && last != "session.deleted" && !(last == "stream.closed" && !c.undisturbed(kills)) {
			c.l.fail(r, "the stream of %s ended in order with %q", o, last)
		}
		return
	}
	if errors.Is(err, context.DeadlineExceeded) {
		c.l.fail(r, "the stream of %s did not end within %s", o, hung)
	}
	if c.undisturbed(kills) {
		c.l.fail(r, "the stream of %s broke, and nobody killed the server: %v", o, err)
	}
}

func (c *client) delta(r *record, o *op, f frame, text *strings.Builder) {
	var d struct {
		Offset int    `json:"offset"`
		Text   string `json:"text"`
	}
	if err := json.Unmarshal(f.data, &d); err != nil {
		c.l.fail(r, "delta of %s: %v", o, err)
		return
	}
	if d.Offset == 0 {
		text.Reset()
	}
	if d.Offset != text.Len() {
		c.l.fail(r, "delta of %s at offset %d, after %d bytes", o, d.Offset, text.Len())
		text.Reset()
		text.WriteString(strings.Repeat("?", d.Offset)) // one report is enough
	}
	text.WriteString(d.Text)
}

func (c *client) message(r *record, o *op, f frame, text *strings.Builder) {
	var m struct {
		Message struct{ Content *string } `json:"message"`
	}
	if err := json.Unmarshal(f.data, &m); err != nil {
		c.l.fail(r, "message of %s: %v", o, err)
		return
	}
	if said := text.String(); said != "" && (m.Message.Content == nil || *m.Message.Content != said) {
		c.l.fail(r, "the client of %s was shown %q, and the message is %s", o, said, f.data)
	}
	text.Reset()
}

func (c *client) cancel(r *record) {
	o := &op{kind: opCancel}
	body := map[string]any{}
	if c.rng.IntN(2) == 0 {
		if t := r.earlier(0); t != nil && t.turn != "" {
			o.turn = t.turn
			body["turn_id"] = t.turn
		}
	}
	r.begin(o)
	ans, err := c.once(func() (*answer, error) {
		return c.api.call(http.MethodPost, "/v1/sessions/"+r.id+"/cancel", "", body)
	})
	if c.lost(r, o, ans, err) {
		return
	}
	if ans.status != http.StatusOK {
		r.end(o, refused, "", ans.String())
		c.l.fail(r, "unexpected answer to %s: %s", o, ans)
		return
	}
	r.end(o, acked, "", "")
}

// delete asks until the session is gone.
func (c *client) delete(r *record) {
	for !c.stop.Load() {
		o := r.begin(&op{kind: opDelete})
		ans, err := c.once(func() (*answer, error) { return c.api.call(http.MethodDelete, "/v1/sessions/"+r.id, "", nil) })
		if c.lost(r, o, ans, err) {
			c.pause(50 * time.Millisecond)
			continue
		}
		switch {
		case ans.status == http.StatusNoContent:
			r.end(o, acked, "", "")
		case ans.status == http.StatusNotFound && r.deletesInDoubt():
			r.end(o, acked, "", "an earlier one did it")
		default:
			r.end(o, refused, "", ans.String())
			c.l.fail(r, "unexpected answer to %s: %s", o, ans)
		}
		return
	}
}

// readBack reads the conversation: each turn that the client knows to have
// ended is in it.
func (c *client) readBack(r *record) {
	ended := r.endedTexts()
	var got []json.RawMessage
	_, err := c.once(func() (_ *answer, err error) {
		got, err = c.api.messages(r.id)
		return nil, err
	})
	if err != nil {
		return // the log is compared in full after each kill
	}
	if missing := missingTexts(ended, got); missing != "" {
		c.l.fail(r, "the turn of %q has ended, and the conversation lacks it: %s", missing, got)
	}
}

// endedTexts gives the inputs of turns that started and were seen to end.
func (r *record) endedTexts() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	started := map[string]bool{}
	for _, raw := range r.seen {
		if eventOf(raw) != "turn.started" {
			continue
		}
		var d struct {
			Turn string `json:"turn_id"`
		}
		_, data, _ := strings.Cut(raw, "\ndata: ")
		if json.Unmarshal([]byte(data), &d) == nil {
			started[d.Turn] = true
		}
	}
	var out []string
	for _, o := range r.ops {
		if o.kind == opTurn && o.outcome == acked && started[o.turn] && r.ended[o.turn] != "" {
			out = append(out, o.text)
		}
	}
	return out
}

// eventOf gives the name of the event in a frame.
func eventOf(raw string) string {
	_, after, _ := strings.Cut(raw, "\nevent: ")
	name, _, _ := strings.Cut(after, "\n")
	return name
}

func missingTexts(want []string, got []json.RawMessage) string {
	have := map[string]int{}
	for _, raw := range got {
		var m struct{ Role, Content string }
		if json.Unmarshal(raw, &m) == nil && m.Role == "user" {
			have[m.Content]++
		}
	}
	for _, text := range want {
		if have[text] != 1 {
			return text
		}
	}
	return ""
}

// watch follows a session for the rest of the test. Each time the stream breaks
// it goes on from its cursor, or from one a little before: a client that was
// killed as well remembers less than it was sent.
func (w *load) watch(r *record) {
	w.watchers.Add(1)
	go func() {
		defer w.watchers.Done()
		for w.settled.Err() == nil && w.watchOnce(r) {
			time.Sleep(20 * time.Millisecond)
		}
	}()
}

// watchOnce reports whether there may be more.
func (w *load) watchOnce(r *record) bool {
	w.gate.RLock()
	defer w.gate.RUnlock()
	ans, _ := w.api.follow(w.settled, r.id, r.rewind(rand.IntN(4)), func(f frame) error {
		if f.event == "session.deleted" {
			r.mu.Lock()
			r.deleted = true
			r.mu.Unlock()
		}
		r.saw(f, true)
		return nil
	})
	sure, maybe := r.isDeleted()
	if ans != nil && ans.status == http.StatusNotFound && !maybe {
		w.l.fail(r, "the session is gone, and nobody deleted it: %s", ans)
		return false
	}
	if ans != nil && ans.status == http.StatusBadRequest {
		w.l.fail(r, "the watcher's cursor %s was refused: %s", r.cursor(), ans)
		return false
	}
	return !sure && (ans == nil || ans.status != http.StatusNotFound)
}
