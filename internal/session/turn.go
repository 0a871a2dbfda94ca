package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// TurnRequest asks for a turn.
type TurnRequest struct {
	// Content is the user's message: a JSON string, or an array of content
	// parts in the OpenAI form.
	Content   json.RawMessage
	OnBusy    wire.Publish_OnBusy
	RequestID string // idempotency key within the session
}

// UserMessage gives a message in the normal form in which conversations are
// kept: role first, on one line. content is valid JSON.
func UserMessage(content json.RawMessage) json.RawMessage {
	b := make([]byte, 0, len(content)+32)
	b = append(b, `{"role":"user","content":`...)
	b = append(b, content...)
	oneLine(b)
	return append(b, '}')
}

// answer is the note that a proposal's outcome leaves in the subscription, in
// order with the events around it.
type answer struct {
	reply core.Reply
	err   error
}

// StartTurn gives input to a session and watches the turn it begins. The input
// is durable when this returns. Closing the watcher does not cancel the turn.
func (s *Service) StartTurn(ctx context.Context, tenant, id string, req TurnRequest) (*Watcher, error) {
	flow, err := flowID(tenant, id)
	if err != nil {
		return nil, err
	}
	e := &wire.Entry{FlowId: flow, Command: &wire.Entry_Publish{Publish: s.publish(req)}}
	w, err := s.begin(ctx, tenant, flow, e, s.set.For(flow))
	return w, named(err, id)
}

// CreateAndStart makes a session and begins its first turn, in one commit.
func (s *Service) CreateAndStart(ctx context.Context, tenant string, create CreateRequest, req TurnRequest) (*Watcher, string, error) {
	e, id, err := s.startEntry(tenant, create)
	if err != nil {
		return nil, "", err
	}
	c := e.Command.(*wire.Entry_StartFlow).StartFlow
	c.Publish = append(c.Publish, s.publish(req))
	if create.Stateless {
		c.RetentionUs = s.cfg.StatelessKeep.Microseconds()
	}
	w, err := s.begin(ctx, tenant, e.FlowId, e, s.set.For(e.FlowId))
	return w, id, err
}

func (s *Service) publish(req TurnRequest) *wire.Publish {
	return &wire.Publish{Channel: agent.Input, Payload: UserMessage(req.Content), OnBusy: req.OnBusy,
		MaxPending: uint32(max(s.cfg.MaxQueued, 1)), RequestId: req.RequestID}
}

func (s *Service) begin(ctx context.Context, tenant, flow string, e *wire.Entry, r *partition.Runner) (*Watcher, error) {
	if s.draining.Load() {
		return nil, partition.ErrStopped
	}
	slot := s.cfg.Gate.Acquire(tenant, s.cfg.Env.Clock.Now())
	if slot.Reason != admit.Admitted {
		return nil, &Overloaded{RetryAfter: slot.RetryAfter}
	}
	leave := func() { s.cfg.Gate.Release(slot.Ticket, s.cfg.Env.Clock.Now()) }
	w := &Watcher{s: s, flow: flow, sub: s.cfg.Hub.Subscribe(flow, s.cfg.StreamBound)}
	err := r.Submit(partition.Proposal{Entry: e, Reply: func(rep core.Reply, err error) {
		if err != nil || rep.Duplicate || len(rep.MessageIDs) == 0 {
			leave()
		} else {
			s.open.add(flow, openTurn{rep.MessageIDs[0], e.TimeUs, slot.Ticket})
		}
		w.sub.Push(answer{rep, err})
	}})
	if err != nil {
		leave()
		w.Close()
		return nil, err
	}
	if err := w.awaitAnswer(ctx); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// Watcher reads the events of a session, or of one turn. For one goroutine.
type Watcher struct {
	s      *Service
	flow   string
	sub    *stream.Sub
	turn   string         // only this turn; "" = all
	last   core.Cursor    // events up to here were given
	replay bool           // the log from last on is to be read first
	early  []Event        // came with or before the answer
	held   []stream.Frame // came with or before the answer; given when the log was read
	ended  bool
	said   uint64 // steps up to this one have said their message: no delta of them any more
	// Started: the turn runs; else it waits in the queue.
	Started bool
	// Duplicate: the request ID was seen before; this is that turn.
	Duplicate bool
}

// Turn is the ID of the turn that is watched.
func (w *Watcher) Turn() string { return w.turn }

// awaitAnswer reads up to the outcome of the proposal and keeps the events of
// its turn that came before.
func (w *Watcher) awaitAnswer(ctx context.Context) error {
	var frames []stream.Frame
	for {
		got, err := w.sub.Next(ctx)
		if err != nil {
			return err
		}
		frames = append(frames, got...)
		for i, f := range frames {
			a, ok := f.Note.(answer)
			if !ok {
				continue
			}
			if a.err != nil {
				return a.err
			}
			if len(a.reply.MessageIDs) == 0 { // a start that was seen before, and its turn is forgotten
				return &core.Error{Code: core.Exists, Message: "the session was made by this request before; its first turn is not remembered any more"}
			}
			w.turn, w.Started, w.Duplicate = a.reply.MessageIDs[0], a.reply.Started, a.reply.Duplicate
			frames[i] = stream.Frame{}
			for j := range frames[:i] { // of a former life of this ID: the answer is of a later one
				if it := frames[j].Item; it != nil && it.Event.Type == core.EventDeleted {
					frames[j] = stream.Frame{}
				}
			}
			if w.Duplicate {
				// It may have ended long ago, so the log comes first. What was
				// queued meanwhile is behind it: the text shown so far, too.
				w.replay, w.held = true, frames
				return nil
			}
			w.early = w.convert(nil, frames)
			return nil
		}
	}
}

// Watch follows a session from after a cursor ("" = from its beginning).
func (s *Service) Watch(ctx context.Context, tenant, id, after string) (*Watcher, error) {
	return s.watch(ctx, tenant, id, after, "")
}

// WatchTurn follows one turn from after a cursor.
func (s *Service) WatchTurn(ctx context.Context, tenant, id, turn, after string) (*Watcher, error) {
	return s.watch(ctx, tenant, id, after, turn)
}

func (s *Service) watch(ctx context.Context, tenant, id, after, turn string) (*Watcher, error) {
	flow, err := flowID(tenant, id)
	if err != nil {
		return nil, err
	}
	// Subscribed before the log is read: nothing falls between the two.
	sub := s.cfg.Hub.Subscribe(flow, s.cfg.StreamBound)
	_, cur, err := s.readable(ctx, tenant, id, after)
	if err != nil {
		sub.Close()
		return nil, err
	}
	return &Watcher{s: s, flow: flow, sub: sub, turn: turn, last: cur, replay: true}, nil
}

// replayPage is how many events of the log one Next gives.
const replayPage = 256

// Next waits for events and gives all there are, in order. io.EOF-like end:
// after a turn's terminal event a watcher of that turn gives ErrEnded.
func (w *Watcher) Next(ctx context.Context) ([]Event, error) {
	if len(w.early) > 0 {
		out := w.early
		w.early = nil
		return out, nil
	}
	for !w.ended {
		out, err := w.more(ctx)
		if err != nil || len(out) > 0 {
			return out, err
		}
	}
	return nil, ErrEnded
}

// ErrEnded says that the watched turn has ended and all its events were given.
var ErrEnded = errors.New("the turn has ended")

func (w *Watcher) more(ctx context.Context) ([]Event, error) {
	if !w.replay {
		if frames := w.held; len(frames) > 0 {
			w.held = nil
			return w.convert(nil, frames), nil
		}
		frames, err := w.sub.Next(ctx)
		if err != nil {
			return nil, err
		}
		return w.convert(nil, frames), nil
	}
	if w.Duplicate {
		if err := w.s.set.For(w.flow).Do(ctx, func(*partition.Machine) {}); err != nil {
			return nil, err
		}
	}
	var out []Event
	n := 0
	err := w.s.set.For(w.flow).Tables().Events(w.flow, w.last.LSN, w.last.N, replayPage, func(ev *wire.Event) error {
		n++
		out = w.durable(out, ev, nil)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the session's log: %w", err)
	}
	w.replay = n == replayPage
	return out, nil
}

func (w *Watcher) convert(out []Event, frames []stream.Frame) []Event {
	for _, f := range frames {
		switch {
		case f.Item != nil:
			out = w.durable(out, f.Item.Event, f.Item.Encoded)
		case f.Delta != nil:
			if !w.ended && f.Delta.Exec > w.said && (w.turn == "" || f.Delta.Scope == w.turn) {
				out = append(out, Event{Name: EventDelta, Turn: f.Delta.Scope, SSE: deltaFrame(f.Delta), Delta: f.Delta})
			}
		}
	}
	return out
}

// durable adds a durable event that is new to this watcher and its own.
func (w *Watcher) durable(out []Event, ev *wire.Event, encoded func(func(*wire.Event) []byte) []byte) []Event {
	// The end of the session is never old news: when the ID was used again
	// meanwhile, the log that was read may be the next session's.
	if w.ended || ev.Type != core.EventDeleted && !w.last.Before(ev) {
		return out
	}
	w.last = core.CursorOf(ev)
	if ev.Type == agent.EventMessage || agent.Terminal(ev.Type) {
		w.said = max(w.said, ev.Exec)
	}
	name := nameOf(ev)
	deleted := name == EventDeleted
	if name == "" || w.turn != "" && ev.Scope != w.turn && !deleted {
		return out
	}
	e := Event{Name: name, Turn: ev.Scope, Durable: ev}
	if !deleted {
		e.ID = formatID(ev.Lsn, ev.N)
	}
	if encoded != nil {
		e.SSE = encoded(frame)
	} else {
		e.SSE = frame(ev)
	}
	if w.turn != "" && e.Terminal() || deleted {
		w.ended = true
	}
	return append(out, e)
}

// Close ends watching; the turn goes on.
func (w *Watcher) Close() { w.sub.Close() }

// openTurns is the turns that were accepted and have not ended: what the gate
// counts. Its size is bounded by the gate, or by the steps in flight.
type openTurns struct {
	mu    sync.Mutex
	flows map[string][]openTurn // guarded by mu
}

type openTurn struct {
	id      string
	startUs int64
	slot    admit.Ticket
}

func (o *openTurns) init() { o.flows = map[string][]openTurn{} }

func (o *openTurns) add(flow string, t openTurn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flows[flow] = append(o.flows[flow], t)
}

// end takes a turn out; turn "" takes all of the flow.
func (o *openTurns) end(flow, turn string) []openTurn {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := o.flows[flow]
	if turn == "" {
		delete(o.flows, flow)
		return list
	}
	for i, t := range list {
		if t.id != turn {
			continue
		}
		if len(list) == 1 {
			delete(o.flows, flow)
		} else {
			o.flows[flow] = append(list[:i:i], list[i+1:]...)
		}
		return []openTurn{t}
	}
	return nil
}

// Publish implements partition.Observer: it lets ended turns out of the gate and
// hands committed events to the readers. In this order, so that a client that
// sees its turn end finds the place free for its next one.
func (s *Service) Publish(flow string, events []*wire.Event) {
	for _, ev := range events {
		switch {
		case ev.Type == core.EventDropped || agent.Terminal(ev.Type):
			s.ended(flow, ev, s.open.end(flow, ev.Scope))
		case ev.Type == core.EventDeleted:
			s.ended(flow, ev, s.open.end(flow, ""))
		}
	}
	s.cfg.Hub.Publish(flow, events)
	if s.cfg.Hooks.Events != nil {
		s.cfg.Hooks.Events(flow, events)
	}
}

func (s *Service) ended(flow string, ev *wire.Event, turns []openTurn) {
	tenant := TenantOf(flow)
	for _, t := range turns {
		s.cfg.Gate.Release(t.slot, s.cfg.Env.Clock.Now())
		if s.cfg.Hooks.TurnEnded != nil {
			s.cfg.Hooks.TurnEnded(tenant, nameOf(ev), time.Duration(ev.AtUs-t.startUs)*time.Microsecond)
		}
	}
}

// Recover counts the turns of a flow that were open when the process began.
// Call it before the flow's partition runs. They go on even when the gate has
// no slot left for them: accepted turns always finish.
func (s *Service) Recover(f *wire.Flow) {
	if f.Type != agent.FlowType {
		return
	}
	seen := map[string]bool{}
	add := func(id string, at int64) {
		if id != "" && !seen[id] {
			seen[id] = true
			slot := s.cfg.Gate.Acquire(TenantOf(f.Id), s.cfg.Env.Clock.Now())
			s.open.add(f.Id, openTurn{id, at, slot.Ticket})
		}
	}
	for _, st := range f.Steps {
		add(st.Scope, st.FirstStartUs)
	}
	for _, c := range f.Channels {
		if c.Name == agent.Input {
			for _, m := range c.Pending {
				add(m.Id, m.AtUs)
			}
		}
	}
}

// OpenTurns counts the turns in flight or waiting.
func (s *Service) OpenTurns() int {
	s.open.mu.Lock()
	defer s.open.mu.Unlock()
	n := 0
	for _, l := range s.open.flows {
		n += len(l)
	}
	return n
}
