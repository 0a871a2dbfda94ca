package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

// MaxNodes is the most leases that a store may hold.
const MaxNodes = blob.MaxList - 1

// State is what one node knows of another's life.
type State uint8

// The states of a life.
const (
	Unknown  State = iota // not seen yet
	Alive                 // its lease may hold
	Expired               // its lease is over, for good
	Released              // it has given its lease up
)

// String is the state in words.
func (s State) String() string { return [...]string{"unknown", "alive", "expired", "released"}[s] }

// Sight is what a node has seen of another life's lease, of which it judges by its
// own Boot clock alone. It is a state machine without I/O, not safe for
// concurrent use.
type Sight struct {
	nonce   string
	ttl     time.Duration
	state   State
	content string        // as it was seen last
	first   time.Duration // when that content was seen first
}

// NewSight watches the life with this nonce and TTL. A life without a TTL is
// judged by the largest one.
func NewSight(nonce string, ttl time.Duration) *Sight {
	if CheckTTL(ttl) != nil {
		ttl = MaxTTL
	}
	return &Sight{nonce: nonce, ttl: ttl}
}

// State is the judgement after the last Observe.
func (s *Sight) State() State { return s.state }

// Due is when an unchanged lease will be over. Only a Get that is asked then or
// later tells.
func (s *Sight) Due() time.Duration { return s.first + s.ttl + margin(s.ttl) }

// Observe takes the answer to a Get of the node's lease. A lease that is not there,
// or is of another life, cannot be renewed by this one any more; but how long
// it still holds is known only from the time that passes.
func (s *Sight) Observe(a Answer) State {
	content, released := "", false // not there, or of another life
	switch {
	case errors.Is(a.Err, blob.ErrNotFound):
	case a.Err != nil:
		return s.state
	default:
		n, err := DecodeNode("", a.Data)
		if err != nil || n.Nonce == s.nonce {
			content, released = string(a.Data), n.Released
		}
	}
	switch {
	case s.state == Unknown || content != s.content:
		s.content, s.first, s.state = content, a.Now, Alive
	case a.Asked >= s.Due():
		s.state = Expired
	}
	if released {
		s.state = Released
	}
	return s.state
}

// Seen is one node as a Watch sees it.
type Seen struct {
	Node  Node // as stored; only ID is set if it cannot be read
	State State
	// Quiet is for how long the lease has not changed, as far as was seen.
	Quiet time.Duration
}

// Watch sees the leases of all nodes. It has no goroutine: whoever wants to know
// calls Poll, every TTL/20 or less often. It is safe for concurrent use.
type Watch struct {
	cfg LeaseConfig // Store, Env and TTL

	mu     sync.Mutex // held during a Poll
	listed time.Duration
	ids    []string
	sights map[string]*Sight // by node ID
}

// NewWatch makes a watch. Of cfg it needs Store, Env and TTL.
func NewWatch(cfg LeaseConfig) *Watch {
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	return &Watch{cfg: cfg, sights: map[string]*Sight{}}
}

// Poll reads every known lease, in the order of their IDs, and looks for new ones
// at first and once per TTL.
func (w *Watch) Poll(ctx context.Context) ([]Seen, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := w.cfg.Env.Boot(); w.ids == nil || now-w.listed >= w.cfg.TTL {
		if err := w.list(ctx); err != nil {
			return nil, err
		}
		w.listed = now
	}
	out := make([]Seen, 0, len(w.ids))
	for _, id := range w.ids {
		a := do(ctx, w.cfg, Op{Key: NodeKey(id)})
		if a.Err != nil && !errors.Is(a.Err, blob.ErrNotFound) {
			return nil, fmt.Errorf("cluster: read the lease of node %s: %w", id, a.Err)
		}
		out = append(out, w.see(id, a))
	}
	return out, nil
}

func (w *Watch) see(id string, a Answer) Seen {
	seen := Seen{Node: Node{ID: id}}
	s := w.sights[id]
	if n, err := DecodeNode(NodeKey(id), a.Data); err == nil {
		seen.Node = n
		if s == nil || s.nonce != n.Nonce {
			s = NewSight(n.Nonce, n.TTL())
		}
	}
	if s == nil {
		s = NewSight("", MaxTTL)
	}
	w.sights[id] = s
	seen.State = s.Observe(a)
	seen.Quiet = a.Now - s.first
	return seen
}

func (w *Watch) list(ctx context.Context) error {
	infos, err := w.cfg.Store.List(ctx, nodePrefix, "", MaxNodes+1)
	if err != nil {
		return fmt.Errorf("cluster: list %s: %w", nodePrefix, err)
	}
	if len(infos) > MaxNodes {
		return fmt.Errorf("%w: more than %d leases under %s: delete those of nodes that are gone", ErrInvalid, MaxNodes, nodePrefix)
	}
	w.ids = make([]string, 0, len(infos))
	known := make(map[string]*Sight, len(infos))
	for _, info := range infos {
		id := strings.TrimSuffix(strings.TrimPrefix(info.Key, nodePrefix), nodeSuffix)
		if checkNode(id) != nil || NodeKey(id) != info.Key {
			continue // not a lease
		}
		w.ids = append(w.ids, id)
		if s := w.sights[id]; s != nil {
			known[id] = s
		}
	}
	w.sights = known
	return nil
}
