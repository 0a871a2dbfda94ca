package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Bounds and shares of a lease's TTL.
const (
	MinTTL     = time.Second
	MaxTTL     = time.Minute
	DefaultTTL = 10 * time.Second

	marginShare  = 20 // the margin is TTL/20, on each side
	timeoutShare = 4  // one request may take TTL/4
	retryShare   = 40 // after a refusal the next try is TTL/40 later
	// maxAttempts is how many renewals of unknown outcome are remembered: more
	// than are made within a TTL.
	maxAttempts = 64
)

// margin is what the holder takes off its TTL and a watcher adds: their clocks may
// run apart by up to a tenth.
func margin(ttl time.Duration) time.Duration { return ttl / marginShare }

// renewEvery is a bit more than a third: two renewals may fail.
func renewEvery(ttl time.Duration) time.Duration { return ttl * 35 / 100 }

// CheckTTL says whether a lease may have this TTL.
func CheckTTL(ttl time.Duration) error {
	if ttl < MinTTL || ttl > MaxTTL || ttl%time.Millisecond != 0 {
		return fmt.Errorf("%w: lease TTL %v, want %v to %v in whole milliseconds", ErrInvalid, ttl, MinTTL, MaxTTL)
	}
	return nil
}

// Node is a node's lease as it is stored. While its content keeps changing the
// node lives; Nonce is drawn anew by each process.
type Node struct {
	Format   int    `json:"format"`
	ID       string `json:"id"`
	Address  string `json:"address"` // may be empty
	Version  string `json:"version"` // of the program; may be empty
	Nonce    string `json:"nonce"`
	Counter  uint64 `json:"counter"` // one more with each write
	TTLms    int64  `json:"ttl_ms"`
	Released bool   `json:"released"`
}

// NodeKey is the key of a node's lease.
func NodeKey(id string) string { return nodePrefix + id + nodeSuffix }

const nodePrefix, nodeSuffix = "nodes/", ".json"

// TTL is how long the lease holds after its renewal was sent, at most.
func (n Node) TTL() time.Duration { return time.Duration(n.TTLms) * time.Millisecond }

// DecodeNode reads what is stored under key. Errors: ErrTooNew, ErrDamaged.
func DecodeNode(key string, data []byte) (Node, error) {
	var n Node
	if _, err := decodeRecord(key, data, &n); err != nil {
		return Node{}, err
	}
	if err := n.check(); err != nil {
		return Node{}, damaged(key, err)
	}
	return n, nil
}

func (n Node) check() error {
	if n.Format != recordFormat {
		return fmt.Errorf("format %d", n.Format)
	}
	if n.Counter == 0 {
		return errors.New("counter 0")
	}
	if n.TTLms > MaxTTL.Milliseconds() { // before it can overflow
		return fmt.Errorf("TTL of %d ms", n.TTLms)
	}
	return errors.Join(checkNode(n.ID), checkText("address", n.Address), checkText("version", n.Version), checkNonce(n.Nonce), CheckTTL(n.TTL()))
}

// Op is one request that a state machine wants made.
type Op struct {
	Key  string
	Data []byte // nil: a Get, else a Put
	If   blob.PutOptions
}

// Answer is what became of an Op. The instants are of the asker's Boot clock:
// Asked before the request was sent, Now after the answer came.
type Answer struct {
	Data       []byte // of a Get
	Token      blob.Token
	Err        error
	Asked, Now time.Duration
}

// Holder is the state machine of one node's lease, for one life of its process:
//
//	for { if op, ok := h.Next(now); ok { h.Answer(do(op)) } else { wait until h.Wake() } }
//
// It has one request on its way at a time, of which each should be given up
// after TTL/4. All instants are of one Boot clock. It is not safe for concurrent
// use.
type Holder struct {
	self Node // as last written or tried
	key  string

	busy    bool
	reading bool          // the next request is a Get
	due     time.Duration // when it may be made
	token   blob.Token    // of the object; "" if there is none
	tried   []attempt     // the newest last

	until     time.Duration // the lease holds before this instant; 0: not yet
	releasing bool
	giveUp    time.Duration // when releasing: the end of the tries
	over      error
	trouble   error // of the last answer
}

// attempt is a write, which may land late.
type attempt struct {
	counter uint64
	sent    time.Duration
}

// NewHolder makes a holder that wants the lease from now on. self needs ID,
// Nonce and TTLms; Counter and Released are its own business.
func NewHolder(self Node, now time.Duration) (*Holder, error) {
	self.Format, self.Counter, self.Released = recordFormat, 1, false
	if err := self.check(); err != nil {
		return nil, fmt.Errorf("%w: lease: %w", ErrInvalid, err)
	}
	self.Counter = 0
	return &Holder{self: self, key: NodeKey(self.ID), reading: true, due: now}, nil
}

// Until is the instant before which the lease holds, 0 while it does not.
func (h *Holder) Until() time.Duration {
	if h.over != nil || h.releasing {
		return 0
	}
	return h.until
}

// Over is nil while the machine goes on; then ErrLost, ErrReleased, or what keeps
// the lease from being taken.
func (h *Holder) Over() error { return h.over }

// Trouble is what was wrong with the last answer, nil if nothing.
func (h *Holder) Trouble() error { return h.trouble }

// Wake is when Next is to be called again, unless a request is on its way: then
// after its answer.
func (h *Holder) Wake() time.Duration {
	if until := h.Until(); until > 0 {
		return min(h.due, until)
	}
	return h.due
}

// Release ends the lease at once; the next request says so to the others.
func (h *Holder) Release(now time.Duration) {
	if h.over == nil && !h.releasing {
		h.releasing, h.due, h.giveUp = true, now, now+h.self.TTL()
	}
}

// Next is the request to make now, if any.
func (h *Holder) Next(now time.Duration) (Op, bool) {
	h.lapse(now)
	if h.over != nil || h.busy || now < h.due {
		return Op{}, false
	}
	h.busy = true
	if h.reading {
		return Op{Key: h.key}, true
	}
	h.self.Counter++
	h.self.Released = h.releasing
	if len(h.tried) == maxAttempts {
		h.tried = h.tried[1:]
	}
	h.tried = append(h.tried, attempt{h.self.Counter, now})
	return Op{Key: h.key, Data: encodeRecord(h.self), If: blob.PutOptions{IfMatch: h.token, IfNoneMatch: h.token == ""}}, true
}

// lapse ends the lease for good when its time is over: from here on another node
// may have taken over, and a renewal that still lands does not change that.
func (h *Holder) lapse(now time.Duration) {
	switch {
	case h.over != nil:
	case h.releasing && now >= h.giveUp:
		h.over = fmt.Errorf("%w: the store did not take its release%s", ErrLost, because(h.trouble))
	case !h.releasing && h.until > 0 && now >= h.until:
		h.over = fmt.Errorf("%w: it could not be renewed for %v%s", ErrLost, h.self.TTL()-margin(h.self.TTL()), because(h.trouble))
	}
}

func because(err error) string {
	if err == nil {
		return ": this process was stopped or starved"
	}
	return ": " + err.Error()
}

// Answer takes what became of the request on its way.
func (h *Holder) Answer(a Answer) {
	h.busy = false
	h.lapse(a.Now) // first: an answer that comes after the end proves nothing
	if h.over != nil {
		return
	}
	h.trouble = a.Err
	switch {
	case h.reading && errors.Is(a.Err, blob.ErrNotFound):
		h.missing(a.Now)
	case h.reading && a.Err == nil:
		h.found(a)
	case a.Err == nil:
		h.token = a.Token
		h.wrote(h.self, a.Now)
	case !h.reading && (errors.Is(a.Err, blob.ErrPrecondition) || errors.Is(a.Err, blob.ErrAmbiguous)):
		h.reading, h.due = true, a.Now
	case errors.Is(a.Err, blob.ErrDenied) && h.until == 0: // wrong settings show at the start
		h.over = a.Err
	default:
		h.due = a.Now + h.self.TTL()/retryShare
	}
}

// missing: there is no lease under this node's ID.
func (h *Holder) missing(now time.Duration) {
	switch {
	case h.releasing:
		h.over = ErrReleased
	case h.until > 0:
		h.over = fmt.Errorf("%w: %s was deleted", ErrLost, h.key)
	default:
		h.token, h.reading, h.due, h.trouble = "", false, now, nil
	}
}

// found: the store holds a lease under this node's ID.
func (h *Holder) found(a Answer) {
	n, err := DecodeNode(h.key, a.Data)
	mine := err == nil && n.Nonce == h.self.Nonce
	switch {
	case mine:
		h.token, h.reading = a.Token, false
		h.wrote(n, a.Now)
	case h.releasing:
		h.over = ErrReleased // it is another's by now
	case err != nil:
		h.over = err
	case h.until > 0:
		h.over = fmt.Errorf("%w: another process has taken the lease of node %q: give each process a data directory of its own, and never a copy", ErrLost, h.self.ID)
	default: // of a former life, or of a write that this one raced with: it is free
		h.token, h.reading, h.due = a.Token, false, a.Now
		h.self.Counter = max(h.self.Counter, n.Counter)
	}
}

// wrote: the store holds what this life has written as n.
func (h *Holder) wrote(n Node, now time.Duration) {
	if n.Released {
		h.over = ErrReleased
		return
	}
	ttl := h.self.TTL()
	h.due = now // an attempt that is forgotten proves nothing: write again
	for _, t := range h.tried {
		if t.counter == n.Counter {
			h.due = max(now, t.sent+renewEvery(ttl))
			if end := t.sent + ttl - margin(ttl); end > now { // counted from before it was sent
				h.until = max(h.until, end)
			}
		}
	}
	if h.releasing {
		h.due = now
	}
}
