package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

// ActiveKey is the key of the object that names the active node.
const ActiveKey = "cluster/active.json"

const (
	pollShare = 20 // a standby looks every TTL/20
	minPoll   = 100 * time.Millisecond

	hurryFor  = 5 * time.Second // after Hurry
	hurryPoll = 20 * time.Millisecond
)

// Active names the node that was elected last. Whether it is still active, its
// lease tells.
type Active struct {
	Format   int    `json:"format"`
	Epoch    uint64 `json:"epoch"` // one more at each election
	Node     string `json:"node"`
	Address  string `json:"address"` // may be empty
	Nonce    string `json:"nonce"`   // of its lease
	TTLms    int64  `json:"ttl_ms"`  // of its lease
	Released bool   `json:"released"`
}

// DecodeActive reads what is stored under ActiveKey. Errors: ErrTooNew,
// ErrDamaged.
func DecodeActive(data []byte) (Active, error) {
	var a Active
	if _, err := decodeRecord(ActiveKey, data, &a); err != nil {
		return Active{}, err
	}
	if err := a.check(); err != nil {
		return Active{}, damaged(ActiveKey, err)
	}
	return a, nil
}

func (a Active) check() error {
	if a.Format != recordFormat {
		return fmt.Errorf("format %d", a.Format)
	}
	if a.Epoch == 0 {
		return errors.New("epoch 0")
	}
	if a.TTLms > MaxTTL.Milliseconds() { // before it can overflow
		return fmt.Errorf("TTL of %d ms", a.TTLms)
	}
	return errors.Join(checkNode(a.Node), checkText("address", a.Address), checkNonce(a.Nonce), CheckTTL(a.ttl()))
}

func (a Active) ttl() time.Duration { return time.Duration(a.TTLms) * time.Millisecond }

// ReadActive is who was elected last. blob.ErrNotFound: nobody yet.
func ReadActive(ctx context.Context, store blob.Store) (Active, error) {
	obj, err := store.Get(ctx, ActiveKey)
	if err != nil {
		return Active{}, fmt.Errorf("cluster: read %s: %w", ActiveKey, err)
	}
	return DecodeActive(obj.Data)
}

// Candidate is the state machine of a node that wants to be the active one. It is
// driven as a Holder is, beside the Holder of the same life, and only after that
// lease has been taken: a named node without a lease would be taken for one whose
// lease was replaced. Being elected means something only while the lease holds.
type Candidate struct {
	self Active
	poll time.Duration
	fast time.Duration // it looks often until then

	doing   phase
	busy    bool
	due     time.Duration
	claimed time.Duration // when the last claim was made
	tried   uint64        // its epoch; 0: none yet

	cur     Active     // as read, or as won
	token   blob.Token // of cur; "" if nobody was elected yet
	sight   *Sight     // of cur's life
	elected bool
	over    error
	trouble error
}

// phase is what a candidate's next request is for.
type phase uint8

const (
	looking  phase = iota // who is active?
	watching              // does it live?
	claiming
)

// NewCandidate makes a candidate. Of self it needs Node, Nonce and TTLms.
func NewCandidate(self Active, now time.Duration) (*Candidate, error) {
	self.Format, self.Epoch, self.Released = recordFormat, 1, false
	if err := self.check(); err != nil {
		return nil, fmt.Errorf("%w: candidate: %w", ErrInvalid, err)
	}
	poll := max(minPoll, self.ttl()/pollShare)
	return &Candidate{self: self, poll: poll, due: now, claimed: now - poll}, nil
}

// Elected is the term that was won.
func (c *Candidate) Elected() (Active, bool) { return c.cur, c.elected }

// Over is what keeps this node from ever being elected, nil if nothing.
func (c *Candidate) Over() error { return c.over }

// Wake is when Next is to be called again, unless a request is on its way: then
// after its answer.
func (c *Candidate) Wake() time.Duration { return c.due }

// Hurry says that the active node is about to resign, or may be gone: the candidate
// looks at once, and often for a while.
func (c *Candidate) Hurry(now time.Duration) {
	c.fast = now + hurryFor
	c.due = min(c.due, now)
}

// rest is the time between two looks.
func (c *Candidate) rest(now time.Duration) time.Duration {
	if now < c.fast {
		return min(c.poll, hurryPoll)
	}
	return c.poll
}

// Next is the request to make now, if any.
func (c *Candidate) Next(now time.Duration) (Op, bool) {
	if c.busy || c.elected || c.over != nil || now < c.due {
		return Op{}, false
	}
	c.busy = true
	switch c.doing {
	case looking:
		return Op{Key: ActiveKey}, true
	case watching:
		return Op{Key: NodeKey(c.cur.Node)}, true
	}
	c.claimed, c.tried = now, c.cur.Epoch+1
	return Op{Key: ActiveKey, Data: encodeRecord(c.claim()), If: blob.PutOptions{IfMatch: c.token, IfNoneMatch: c.token == ""}}, true
}

func (c *Candidate) claim() Active {
	a := c.self
	a.Epoch = c.tried
	return a
}

// Answer takes what became of the request on its way.
func (c *Candidate) Answer(a Answer) {
	c.busy = false
	c.trouble = a.Err
	switch doing := c.doing; {
	case doing == looking && errors.Is(a.Err, blob.ErrNotFound):
		c.cur, c.token, c.trouble = Active{}, "", nil
		c.take(a.Now)
	case doing == looking && a.Err == nil:
		c.looked(a)
	case doing == watching && (a.Err == nil || errors.Is(a.Err, blob.ErrNotFound)):
		c.trouble = nil
		c.watched(a)
	case doing == claiming && a.Err == nil:
		c.cur, c.token, c.elected = c.claim(), a.Token, true
	case doing == claiming && (errors.Is(a.Err, blob.ErrPrecondition) || errors.Is(a.Err, blob.ErrAmbiguous)):
		c.doing, c.due = looking, a.Now
	default:
		c.doing, c.due = looking, a.Now+c.rest(a.Now)
	}
}

// looked: a node was elected before.
func (c *Candidate) looked(a Answer) {
	cur, err := DecodeActive(a.Data)
	if err != nil {
		c.over = err
		return
	}
	if cur.Nonce != c.cur.Nonce || c.sight == nil {
		c.sight = NewSight(cur.Nonce, cur.ttl())
	}
	c.cur, c.token = cur, a.Token
	switch {
	case c.tried > 0 && cur == c.claim():
		c.elected = true // the claim has landed, its answer was lost
	case cur.Released, cur.Node == c.self.Node: // of a former life, or of a former term of this one
		c.take(a.Now)
	default:
		c.doing, c.due = watching, a.Now
	}
}

// watched: the active node's lease was read.
func (c *Candidate) watched(a Answer) {
	if c.sight.Observe(a) != Alive {
		c.take(a.Now)
		return
	}
	c.doing, c.due = looking, a.Now+c.rest(a.Now)
	if end := c.sight.Due(); end > a.Now {
		c.due = min(c.due, end)
	}
}

// take claims, not more often than a standby looks.
func (c *Candidate) take(now time.Duration) {
	c.doing, c.due = claiming, max(now, c.claimed+c.rest(now))
}
