// Package admit decides who gets in: pure arithmetic on counters, no queue, no
// goroutine and no clock (the caller passes the time).
//
// # The rule of the Gate
//
// At most limit turns are in flight. A tenant's fair share is limit divided by
// the tenants that are active (have turns in flight or a live claim), at least
// one. A request is admitted when a slot is free and
//
//   - its tenant is under its share, or
//   - more slots are free than other tenants have claimed.
//
// A tenant under its share that is refused because the gate is full leaves a
// claim: the next slots that come free are kept for it, up to its share, for
// claimWindow. So a greedy tenant may use the whole gate while nobody else
// wants it, and gives way as its turns end, without any accepted turn being
// cut short.
//
// The gate is work-conserving up to claims: a free slot that nobody under his
// share has asked for within claimWindow is never refused.
package admit

import (
	"sync"
	"time"
)

const (
	// claimWindow is how long a refused tenant's claim is kept. It is longer
	// than any Retry-After told to a claimant, so that a client that obeys
	// finds its slot.
	claimWindow   = 5 * time.Second
	maxClaimRetry = 4 * time.Second

	minRetry = time.Second // one step of the Retry-After header
	maxRetry = 30 * time.Second

	firstTurn = time.Second // estimate of a turn before one has ended
)

// Reason says why a request was refused.
type Reason uint8

const (
	// Admitted is no refusal.
	Admitted Reason = iota
	// OverLimit means that every slot is taken.
	OverLimit
	// OverShare means that the free slots are kept for tenants under their
	// fair share.
	OverShare

	reasons
)

// String is the metric label of the reason.
func (r Reason) String() string {
	switch r {
	case OverLimit:
		return "limit"
	case OverShare:
		return "fair_share"
	}
	return "admitted"
}

// Decision is the answer to one request.
type Decision struct {
	// Ticket is given back to Release when Reason is Admitted.
	Ticket Ticket
	Reason Reason
	// RetryAfter is when a refused client should come again: from 1 s to 30 s,
	// estimated from the length of recent turns and the number of clients
	// sent away before it, so that they do not all come back at once.
	RetryAfter time.Duration
}

// Ticket is one admitted turn. The zero value is no ticket. Copies are the same
// ticket: only the first Release counts.
type Ticket struct {
	slot int32 // index + 1
	gen  uint32
}

// Stats is a reading of the counters.
type Stats struct {
	InFlight  int
	Limit     int // 0 = off
	Tenants   int // tenants with turns in flight or a live claim
	OverLimit uint64
	OverShare uint64
}

// Gate bounds the turns in flight, fairly between tenants. It is safe for
// concurrent use. Memory is bounded by the limit (when off, by the most turns
// that were in flight at once).
type Gate struct {
	limit int // 0 = off; fixed

	mu       sync.Mutex
	tenants  map[string]*tenant // guarded by mu, as all below
	spare    *tenant            // free list, through next
	slots    []slot
	free     int32 // first free slot + 1; 0 = none
	inFlight int
	claims   int // live claims of all tenants
	oldest   *tenant
	newest   *tenant // claim holders in the order of expiry
	refused  [reasons]uint64
	turn     time.Duration // moving average of a turn's length
}

type slot struct {
	tenant *tenant
	start  time.Time
	gen    uint32
	next   int32 // free list; index + 1
}

type tenant struct {
	name     string
	inFlight int
	claims   int
	expires  time.Time
	line     time.Time // when the last client of it that was sent away finds a slot
	prev     *tenant   // list of claim holders
	next     *tenant   // the same, or the free list
}

// NewGate makes a gate for at most limit turns; 0 = off (turns are counted and
// never refused).
func NewGate(limit int) *Gate {
	return &Gate{limit: max(limit, 0), tenants: map[string]*tenant{}, turn: firstTurn}
}

// Acquire asks for a slot. It never blocks.
func (g *Gate) Acquire(name string, now time.Time) Decision {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(now)

	t := g.tenants[name]
	if g.limit > 0 {
		if reason := g.refusal(t); reason != Admitted {
			g.refused[reason]++
			return Decision{Reason: reason, RetryAfter: g.sendAway(t, name, now)}
		}
	}
	if t == nil {
		t = g.add(name)
	}
	if t.claims > 0 {
		g.dropClaims(t, 1)
	}
	t.inFlight++
	g.inFlight++
	if g.inFlight < g.limit {
		t.line = time.Time{} // room is left: nobody waits
	}
	return Decision{Ticket: g.take(t, now)}
}

// Release gives a slot back. It reports whether the ticket was still held.
func (g *Gate) Release(k Ticket, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := int(k.slot) - 1
	if i < 0 || i >= len(g.slots) || g.slots[i].gen != k.gen || g.slots[i].tenant == nil {
		return false
	}
	s := &g.slots[i]
	t := s.tenant
	if d := now.Sub(s.start); d >= 0 {
		g.turn += (d - g.turn) / 16
	}
	s.tenant = nil
	s.gen++
	s.next, g.free = g.free, k.slot
	t.inFlight--
	g.inFlight--
	g.forget(t)
	return true
}

// Stats reads the counters.
func (g *Gate) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Stats{
		InFlight: g.inFlight, Limit: g.limit, Tenants: len(g.tenants),
		OverLimit: g.refused[OverLimit], OverShare: g.refused[OverShare],
	}
}

// refusal applies the rule of the package comment; t is nil for a tenant that
// is not active.
func (g *Gate) refusal(t *tenant) Reason {
	free := g.limit - g.inFlight
	if free <= 0 {
		return OverLimit
	}
	others := g.claims
	held := 0
	if t != nil {
		others -= t.claims
		held = t.inFlight
	}
	if held < g.share(t) || free > others {
		return Admitted
	}
	return OverShare
}

// share is the fair share of t, counting t as active.
func (g *Gate) share(t *tenant) int {
	active := len(g.tenants)
	if t == nil {
		active++
	}
	return max(g.limit/active, 1)
}

// claim notes that a tenant under its share was refused. The number of claim
// holders without a turn in flight is bounded by the limit, because each holds
// a claim of at least one slot.
func (g *Gate) claim(t *tenant, name string, now time.Time) bool {
	held, claims := 0, 0
	if t != nil {
		held, claims = t.inFlight, t.claims
	}
	if held >= g.share(t) {
		return false
	}
	if held+claims < g.share(t) && g.claims < g.limit {
		if t == nil {
			t = g.add(name)
		}
		t.claims++
		g.claims++
	}
	if t == nil || t.claims == 0 {
		return false
	}
	g.unlink(t)
	t.expires = now.Add(claimWindow)
	t.prev = g.newest
	if g.newest != nil {
		g.newest.next = t
	} else {
		g.oldest = t
	}
	g.newest = t
	return true
}

// expire drops the claims whose holders did not come back.
func (g *Gate) expire(now time.Time) {
	for t := g.oldest; t != nil && !now.Before(t.expires); t = g.oldest {
		g.dropClaims(t, t.claims)
		g.forget(t)
	}
}

func (g *Gate) dropClaims(t *tenant, n int) {
	t.claims -= n
	g.claims -= n
	if t.claims == 0 {
		g.unlink(t)
	}
}

// unlink takes t out of the list of claim holders, if it is in it.
func (g *Gate) unlink(t *tenant) {
	if t.prev == nil && g.oldest != t {
		return
	}
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		g.oldest = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	} else {
		g.newest = t.prev
	}
	t.prev, t.next = nil, nil
}

// sendAway leaves a claim where there is a right to one, and says when to come
// back: each tenant's clients stand in a virtual line of their own, which moves
// one place every turn/share, so that a greedy tenant's crowd does not lengthen
// another's wait.
func (g *Gate) sendAway(t *tenant, name string, now time.Time) time.Duration {
	claimed := g.claim(t, name, now)
	if t == nil {
		t = g.tenants[name]
	}
	if t == nil {
		return minRetry // too many tenants for a claim each
	}
	if t.line.Before(now) {
		t.line = now
	}
	t.line = t.line.Add(g.turn / time.Duration(g.share(t)))
	last := now.Add(maxRetry)
	if claimed {
		last = now.Add(maxClaimRetry)
	}
	if t.line.After(last) {
		t.line = last
	}
	return max(t.line.Sub(now), minRetry)
}

func (g *Gate) add(name string) *tenant {
	t := g.spare
	if t == nil {
		t = &tenant{}
	} else {
		g.spare, t.next = t.next, nil
	}
	t.name = name
	g.tenants[name] = t
	return t
}

// forget drops a tenant that is no longer active.
func (g *Gate) forget(t *tenant) {
	if t.inFlight > 0 || t.claims > 0 {
		return
	}
	delete(g.tenants, t.name)
	*t = tenant{next: g.spare}
	g.spare = t
}

func (g *Gate) take(t *tenant, now time.Time) Ticket {
	if g.free == 0 {
		g.slots = append(g.slots, slot{})
		g.free = int32(len(g.slots))
	}
	k := Ticket{slot: g.free}
	s := &g.slots[k.slot-1]
	g.free = s.next
	s.tenant, s.start, s.next = t, now, 0
	k.gen = s.gen
	return k
}
