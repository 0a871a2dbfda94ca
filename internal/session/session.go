// Package session holds the verbs of agent sessions: what every API surface
// calls. A session is a flow with an input channel; this package turns verbs
// into commands and the flow's log into the public events of a session.
package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Errors beside those of core, partition and agent.
var (
	ErrBadID     = errors.New("a session ID has 1 to 128 characters of A-Z a-z 0-9 _ . -")
	ErrBadCursor = errors.New("an event ID has the form 12.0, as in the id lines of the stream")
	// ErrCursorAhead: the cursor is beyond the log, so it is of another session
	// or of another server.
	ErrCursorAhead = errors.New("the event ID is beyond the end of this session's log")
)

// Overloaded is the refusal of a turn by admission. It changed nothing.
type Overloaded struct{ RetryAfter time.Duration }

func (o *Overloaded) Error() string { return "too many turns are in flight" }

// Hooks are told of what happens; they run on a partition's goroutine and must
// not block. Any may be nil.
type Hooks struct {
	TurnEnded func(tenant, outcome string, took time.Duration)
	Events    func(flowID string, events []*wire.Event)
}

// Config makes a Service.
type Config struct {
	Agents           *agent.Registry
	Hub              *stream.Hub
	Gate             *admit.Gate
	Env              env.Env
	Hooks            Hooks
	MaxQueued        int // turns waiting on one session
	StreamBound      int // bytes a reader may fall behind
	StatelessKeep    time.Duration
	MaxMetadataBytes int // default 16 KiB
}

// Service is the verbs. Safe for concurrent use after Bind.
type Service struct {
	cfg      Config
	set      partition.Set
	open     openTurns
	draining atomic.Bool
	agents   sync.Mutex // held while an agent's definition changes
}

// New makes a Service; Bind it before use.
func New(cfg Config) *Service {
	if cfg.MaxMetadataBytes == 0 {
		cfg.MaxMetadataBytes = 16 << 10
	}
	s := &Service{cfg: cfg}
	s.open.init()
	return s
}

// Bind says where the flows are.
func (s *Service) Bind(set partition.Set) { s.set = set }

// Drain refuses new turns from now on; those in flight go on.
func (s *Service) Drain() { s.draining.Store(true) }

// Session is what clients see of one.
type Session struct {
	ID         string          `json:"id"`
	Agent      string          `json:"agent"`
	Status     string          `json:"status"` // idle or running
	CreatedAt  time.Time       `json:"created_at"`
	UpdatedAt  time.Time       `json:"updated_at"`
	ActiveTurn string          `json:"active_turn,omitempty"`
	Queued     int             `json:"queued_turns"`
	Messages   uint64          `json:"messages"`
	Metadata   json.RawMessage `json:"metadata,omitempty"`
	LastEvent  string          `json:"last_event_id"`
}

// CreateRequest asks for a session.
type CreateRequest struct {
	ID        string // empty: one is made
	Agent     string
	Metadata  json.RawMessage   // a JSON object, or nil
	History   []json.RawMessage // messages in normal form (see UserMessage), or nil
	Retention time.Duration     // deleted when idle this long; 0 = kept
	RequestID string            // idempotency key; only useful with an ID
	Stateless bool              // not listed; see FlowID
}

var validID = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,128}$`)

const attributeMetadata = "metadata"

// flowID is where a session lives: under its tenant's prefix.
func flowID(tenant, id string) (string, error) {
	if !validID.MatchString(id) {
		return "", ErrBadID
	}
	if strings.HasPrefix(id, statelessPrefix) {
		return tenant + "/c/" + id, nil
	}
	return tenant + "/s/" + id, nil
}

// statelessPrefix marks sessions that a stateless API made for one request.
const statelessPrefix = "chat_"

// TenantOf gives the tenant of a flow.
func TenantOf(flowID string) string {
	t, _, _ := strings.Cut(flowID, "/")
	return t
}

// IDOf gives the session ID of a flow; ok is false for other flows.
func IDOf(flowID string) (id string, ok bool) {
	p := strings.SplitN(flowID, "/", 3)
	if len(p) != 3 || p[1] != "s" && p[1] != "c" {
		return "", false
	}
	return p[2], true
}

func (s *Service) mintID(prefix string) string {
	return fmt.Sprintf("%s%012x%016x", prefix, s.cfg.Env.Clock.Now().UnixMilli(), s.cfg.Env.Rand.Uint64())
}

func (s *Service) startEntry(tenant string, req CreateRequest) (*wire.Entry, string, error) {
	if req.ID == "" {
		req.ID = s.mintID("s_")
		if req.Stateless {
			req.ID = s.mintID(statelessPrefix)
		}
	}
	flow, err := flowID(tenant, req.ID)
	if err != nil {
		return nil, "", err
	}
	a, err := s.cfg.Agents.Get(tenant, req.Agent)
	if err != nil {
		return nil, "", fmt.Errorf("%w: %q", err, req.Agent)
	}
	start := &wire.StartFlow{
		Type: agent.FlowType, Attributes: []*wire.Attribute{{Name: agent.AttributeAgent, Value: []byte(req.Agent)}},
		Steps: []*wire.StepSpec{a.FirstStep()}, RetentionUs: req.Retention.Microseconds(), RequestId: req.RequestID,
	}
	if len(req.Metadata) > 0 {
		start.Attributes = append(start.Attributes, &wire.Attribute{Name: attributeMetadata, Value: req.Metadata})
	}
	for _, m := range req.History {
		start.Items = append(start.Items, m)
	}
	return &wire.Entry{FlowId: flow, Command: &wire.Entry_StartFlow{StartFlow: start}}, req.ID, nil
}

// Create makes a session. core.Exists when there is one of that ID.
func (s *Service) Create(ctx context.Context, tenant string, req CreateRequest) (*Session, error) {
	if len(req.Metadata) > s.cfg.MaxMetadataBytes {
		return nil, &core.Error{Code: core.LimitReached, Message: fmt.Sprintf("metadata has %d bytes, at most %d", len(req.Metadata), s.cfg.MaxMetadataBytes)}
	}
	e, id, err := s.startEntry(tenant, req)
	if err != nil {
		return nil, err
	}
	if _, err := s.set.For(e.FlowId).Call(ctx, e); err != nil {
		return nil, err
	}
	return s.Get(ctx, tenant, id)
}

func noSession(id string) error {
	return &core.Error{Code: core.NotFound, Message: fmt.Sprintf("session %q does not exist", id)}
}

// Get reads a session.
func (s *Service) Get(ctx context.Context, tenant, id string) (*Session, error) {
	flow, err := flowID(tenant, id)
	if err != nil {
		return nil, err
	}
	f, err := s.set.For(flow).Read(ctx, flow)
	if err != nil {
		return nil, err
	}
	if f == nil {
		return nil, noSession(id)
	}
	v := view(f)
	return &v, nil
}

func view(f *wire.Flow) Session {
	id, _ := IDOf(f.Id)
	v := Session{
		ID: id, Agent: string(core.AttributeOf(f, agent.AttributeAgent)), Status: "idle",
		CreatedAt: time.UnixMicro(f.CreatedUs).UTC(), UpdatedAt: time.UnixMicro(f.UpdatedUs).UTC(),
		Metadata: core.AttributeOf(f, attributeMetadata), Messages: f.ItemCount,
	}
	if f.LastEvent != nil {
		v.LastEvent = formatID(f.LastEvent.Lsn, f.LastEvent.N)
	}
	for _, st := range f.Steps {
		if st.State != wire.Step_WAITING || st.Scope != "" {
			v.Status, v.ActiveTurn = "running", st.Scope
		}
	}
	for _, c := range f.Channels {
		if c.Name == agent.Input {
			v.Queued = len(c.Pending)
		}
	}
	return v
}

// MaxPage bounds one page of a listing.
const MaxPage = 1000

// List gives the tenant's sessions by ID, newest first for IDs made here,
// after the given one, and whether there are more.
func (s *Service) List(ctx context.Context, tenant, after string, limit int) ([]Session, bool, error) {
	if limit <= 0 || limit > MaxPage {
		limit = 100
	}
	prefix := tenant + "/s/"
	start := ""
	if after != "" {
		start = prefix + after
	}
	var all []Session
	for _, r := range s.set {
		if err := r.Do(ctx, func(*partition.Machine) {}); err != nil { // what was acknowledged is in the tables
			return nil, false, err
		}
		err := r.Tables().Flows(prefix, start, limit+1, true, func(f *wire.Flow) error {
			all = append(all, view(f))
			return nil
		})
		if err != nil {
			return nil, false, err
		}
	}
	sortNewest(all)
	if len(all) > limit {
		return all[:limit], true, nil
	}
	return all, false, nil
}

// Delete ends a session and everything of it; a running turn is cancelled.
func (s *Service) Delete(ctx context.Context, tenant, id string) error {
	flow, err := flowID(tenant, id)
	if err != nil {
		return err
	}
	_, err = s.set.For(flow).Call(ctx, &wire.Entry{FlowId: flow, Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "deleted by a client"}}})
	return named(err, id)
}

// Cancel stops the turn with the ID, or, with none, the running turn and all
// that wait. It says how many steps and waiting turns were told to stop.
func (s *Service) Cancel(ctx context.Context, tenant, id, turn, reason string) (int, error) {
	flow, err := flowID(tenant, id)
	if err != nil {
		return 0, err
	}
	if reason == "" {
		reason = "cancelled by a client"
	}
	rep, err := s.set.For(flow).Call(ctx, &wire.Entry{FlowId: flow, Command: &wire.Entry_Cancel{
		Cancel: &wire.Cancel{Scope: turn, Channel: agent.Input, Reason: reason}}})
	return rep.Cancelled, named(err, id)
}

// named says "session" where the core says "flow".
func named(err error, id string) error {
	var ce *core.Error
	if errors.As(err, &ce) && ce.Code == core.NotFound {
		return noSession(id)
	}
	return err
}

// Message is one message of the conversation.
type Message struct {
	EventID string          `json:"event_id"`
	TurnID  string          `json:"turn_id,omitempty"`
	At      time.Time       `json:"at"`
	Partial bool            `json:"partial,omitempty"`
	Message json.RawMessage `json:"message"` // OpenAI chat form
}

// Messages gives the conversation after a cursor ("" = from the beginning), at
// most limit events' worth, and the cursor to go on from ("" = no more).
func (s *Service) Messages(ctx context.Context, tenant, id, after string, limit int) ([]Message, string, error) {
	flow, cur, err := s.readable(ctx, tenant, id, after)
	if err != nil {
		return nil, "", err
	}
	if limit <= 0 || limit > MaxPage {
		limit = 100
	}
	out := []Message{}
	for {
		n := 0
		err := s.set.For(flow).Tables().Events(flow, cur.LSN, cur.N, MaxPage, func(ev *wire.Event) error {
			n++
			if len(out) >= limit {
				return errEnough
			}
			cur = core.CursorOf(ev)
			for _, it := range ev.Items {
				out = append(out, Message{EventID: formatID(ev.Lsn, ev.N), TurnID: ev.Scope, At: time.UnixMicro(ev.AtUs).UTC(), Message: it, Partial: isPartial(ev)})
			}
			return nil
		})
		if errors.Is(err, errEnough) {
			return out, formatID(cur.LSN, cur.N), nil
		}
		if err != nil || n < MaxPage {
			return out, "", err
		}
	}
}

var errEnough = errors.New("page is full")

// readable checks that the session is there and brings the tables up to what
// was acknowledged.
func (s *Service) readable(ctx context.Context, tenant, id, after string) (string, core.Cursor, error) {
	flow, err := flowID(tenant, id)
	if err != nil {
		return "", core.Cursor{}, err
	}
	cur, err := ParseID(after)
	if err != nil {
		return "", cur, err
	}
	r := s.set.For(flow)
	f, err := r.Read(ctx, flow)
	if err != nil {
		return "", cur, err
	}
	if f == nil {
		return "", cur, noSession(id)
	}
	if last := (core.Cursor{LSN: f.LastEvent.GetLsn(), N: f.LastEvent.GetN()}); cur.LSN > last.LSN || cur.LSN == last.LSN && cur.N > last.N {
		return "", cur, ErrCursorAhead
	}
	return flow, cur, r.Do(ctx, func(*partition.Machine) {})
}
