package objectlog

import (
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Budget is a bound on the PUTs per second of all logs of a node: a bucket of
// tokens, one for each frame, that logs which wait get in the order in which
// they asked. Repetitions are never held back, they are paid for afterwards.
// Safe for concurrent use.
type Budget struct {
	clock env.Clock
	every time.Duration // time of one token

	mu      sync.Mutex    // guards all below
	next    time.Time     // when the next token is there; up to burst in the past
	burst   time.Duration // what is saved up while nobody asks, beside the next token
	waiting []*claim      // oldest first; each log once
	timer   env.Timer
}

// claim is one log's part in a budget. Its fields are guarded by Budget.mu.
type claim struct {
	held    bool // a token to be used by the next frame
	waits   bool
	granted func() // called when a token came that was waited for; must not block
}

// saved is the time whose tokens may be spent at once after a pause.
const saved = 100 * time.Millisecond

// NewBudget makes a budget of perSecond PUTs (at least 1).
func NewBudget(clock env.Clock, perSecond int) *Budget {
	b := &Budget{clock: clock, every: time.Second / time.Duration(max(perSecond, 1))}
	b.burst = max(saved-b.every, 0)
	b.next = clock.Now().Add(-b.burst)
	return b
}

// ask reports whether c holds a token; if not, it waits for one from now on.
func (b *Budget) ask(c *claim) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.held || c.waits {
		return c.held
	}
	now := b.clock.Now()
	if len(b.waiting) == 0 && b.take(now) {
		c.held = true
		return true
	}
	c.waits = true
	b.waiting = append(b.waiting, c)
	b.arm(now)
	return false
}

// spend uses c's token for a frame, or pays afterwards for one that was put
// without.
func (b *Budget) spend(c *claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.held {
		c.held = false
		return
	}
	b.pay()
}

// repeated pays for a repetition.
func (b *Budget) repeated() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pay()
}

func (b *Budget) pay() {
	now := b.clock.Now()
	if !b.take(now) {
		// In debt by at most what a second brings, so that an outage does not
		// silence the node after it.
		b.next = b.next.Add(b.every)
		if limit := now.Add(time.Second); b.next.After(limit) {
			b.next = limit
		}
	}
}

// take takes a token if there is one.
func (b *Budget) take(now time.Time) bool {
	if full := now.Add(-b.burst); b.next.Before(full) {
		b.next = full
	}
	if now.Before(b.next) {
		return false
	}
	b.next = b.next.Add(b.every)
	return true
}

// leave gives c's place and token up.
func (b *Budget) leave(c *claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.held, c.waits = false, false
	for i, w := range b.waiting {
		if w == c {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			return
		}
	}
}

// arm wakes the budget when the next token is there and somebody waits. b.mu is
// held.
func (b *Budget) arm(now time.Time) {
	if b.timer == nil && len(b.waiting) > 0 {
		b.timer = b.clock.AfterFunc(max(b.next.Sub(now), 0), b.grant)
	}
}

// grant hands out the tokens that have come.
func (b *Budget) grant() {
	b.mu.Lock()
	b.timer = nil
	now := b.clock.Now()
	var told []func()
	for len(b.waiting) > 0 && b.take(now) {
		c := b.waiting[0]
		b.waiting = b.waiting[1:]
		c.held, c.waits = true, false
		told = append(told, c.granted)
	}
	b.arm(now)
	b.mu.Unlock()
	for _, f := range told {
		f()
	}
}
