// Package partition is the single writer of one share of the flows. A command
// is applied on an in-memory overlay at once, so that the next one sees it;
// whatever leaves the partition waits until its entry is committed. The tables
// receive only committed entries.
//
// Machine is the whole logic on one goroutine, without goroutines of its own:
// the production Runner and the simulator drive the same one.
package partition

import (
	"errors"
	"fmt"
	"maps"
	"math"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Errors that a proposer may get besides a core.Error.
var (
	// ErrLost: the commit failed or the ownership ended. Whether the command
	// took effect is unknown; ask again with the same request ID.
	ErrLost = errors.New("partition lost its journal; the outcome is unknown")
	// ErrOverloaded: the queue of proposals is full; nothing was done.
	ErrOverloaded = errors.New("partition has too many proposals waiting")
	// ErrStopped: the partition is shutting down; nothing was done.
	ErrStopped = errors.New("partition is stopped")
	// ErrLapsed: whether this process still owns the partition is not known just
	// now, so it does not say what it knows. It matches ErrStopped.
	ErrLapsed = fmt.Errorf("%w: the lease of this process has lapsed, since the store does not answer; ask again", ErrStopped)
)

// Executor runs effects. Its methods are called on the partition's goroutine
// and must not block.
type Executor interface {
	// Reserve takes up to want worker slots for what the next command on the flow
	// starts, and says how many it took. It is called before each command that may
	// start steps, and must be quick.
	Reserve(flowID, flowType string, want int) int
	// Release gives back slots that the command did not use.
	Release(flowID, flowType string, n int)
	// Dispatch hands out an attempt, on a reserved slot. When w.Committed is false
	// the start is not durable yet; Commit follows, or Abort.
	Dispatch(w *Work)
	// Commit says that the start of an attempt dispatched early is durable.
	Commit(w *Work)
	// Cancel asks a running attempt to end early with a result of its own, or,
	// with forget, without one.
	Cancel(flowID string, exec uint64, attempt core.Attempt, reason string, forget bool)
	// Queue says that a step waits for a slot (see core.Queue): propose StartQueued
	// when there is one.
	Queue(q core.Effect)
	// Done says that a step holds its concurrency key no more.
	Done(flowID, flowType string, exec uint64, key string)
	// Abort ends everything: the ownership is lost, no result is wanted.
	Abort()
}

// Unlimited is what Reserve answers where attempts need no slots.
const Unlimited = math.MaxInt32

// Slotless is for executors whose attempts need no slots, to be embedded.
type Slotless struct{}

// Reserve implements Executor.
func (Slotless) Reserve(_, _ string, _ int) int { return Unlimited }

// Release implements Executor.
func (Slotless) Release(_, _ string, _ int) {}

// Queue implements Executor: nothing is queued but steps with a concurrency key.
func (Slotless) Queue(core.Effect) {}

// Done implements Executor.
func (Slotless) Done(_, _ string, _ uint64, _ string) {}

// Outbox takes what flows send to others, at least once. Called on the
// partition's goroutine; it must not block.
type Outbox interface {
	Send(flowID string, out *wire.Outgoing)
}

// Observer is told of committed events, in order, on the partition's goroutine.
type Observer interface {
	Publish(flowID string, events []*wire.Event)
}

// Config makes a Machine.
type Config struct {
	ID       int
	Epoch    uint64
	Nonce    uint64 // names this writer in its frames
	Env      env.Env
	Tables   *state.DB
	Log      Journal
	Executor Executor
	Observer Observer
	Outbox   Outbox // may be nil where no flow sends
	// Valid says whether the ownership surely holds just now: without it nothing is
	// read, since a next owner may know more. nil = always. Safe from any goroutine.
	Valid func() bool

	MaxBatchBytes   int   // a frame's body; default 1 MiB
	MaxBatchEntries int   // default 4096
	MaxHotFlows     int   // decoded flows kept in memory; default 100,000
	MaxTailBytes    int   // events of a flow kept decoded; default 128 KiB
	MaxHotBytes     int   // events of all flows kept decoded; default 64 MiB. Flows at work stay
	IdleUs          int64 // a flow not used this long leaves memory; default 300 s
}

func (c *Config) setDefaults() {
	setDefault(&c.MaxBatchBytes, 1<<20)
	setDefault(&c.MaxBatchEntries, 4096)
	setDefault(&c.MaxHotFlows, 100_000)
	setDefault(&c.MaxTailBytes, 128<<10)
	setDefault(&c.MaxHotBytes, 64<<20)
	setDefault(&c.IdleUs, 300_000_000)
}

func setDefault[T int | int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Machine is one partition. All methods must be called from one goroutine.
type Machine struct {
	cfg       Config
	hot       hotSet
	nextLSN   uint64
	nextSeq   uint64
	committed uint64 // LSN
	lastUs    int64
	building  *batch
	// catchUpBytes are the entries in building while the journal is replayed.
	catchUpBytes int
	inflight     []*batch // oldest first
	timers       timerHeap
	held         []gate // refusals that wait for the lease
	err          error  // why the ownership ended
	stats        Stats
	byType       map[string]uint64
	byStep       map[StepOf]uint64
}

// Stats counts since the machine was made.
type Stats struct {
	Proposals, Entries, Refused, Batches, Bytes uint64
	Dispatched, Prefetched                      uint64 // Prefetched: before their commit
	// EntriesByType is Entries by flow type; beyond MaxTypeStats types they count
	// as of "".
	EntriesByType map[string]uint64
	// EntriesByStep is those of Entries that are of a step: its results, and its
	// starts where these are entries of their own. Beyond MaxStepStats steps they
	// count as of the step "other" of their type.
	EntriesByStep map[StepOf]uint64
}

// StepOf names the steps of one name of a flow type.
type StepOf struct{ FlowType, Step string }

// MaxEntryBytes bounds one command, so that a frame can hold it.
const MaxEntryBytes = journal.MaxBodySize - 1<<20

// What is counted apart at most: flow types, and names of their steps.
const (
	MaxTypeStats = 1000
	MaxStepStats = 2000
)

// Proposal asks for one command. Entry holds the flow ID and the command; the
// machine stamps the rest.
type Proposal struct {
	Entry *wire.Entry
	// Reply is called once, on the partition's goroutine, when the outcome is
	// durable; it must not block. May be nil.
	Reply func(core.Reply, error)
}

// Propose applies a command on the overlay.
func (m *Machine) Propose(p Proposal) {
	m.stats.Proposals++
	if m.err != nil {
		p.answer(core.Reply{}, m.err)
		return
	}
	if err := state.CheckFlowID(p.Entry.FlowId); err != nil {
		p.answer(core.Reply{}, &core.Error{Code: core.Invalid, Message: err.Error()})
		return
	}
	e := p.Entry
	if n := e.SizeVT(); n > MaxEntryBytes {
		p.answer(core.Reply{}, &core.Error{Code: core.LimitReached, Message: fmt.Sprintf("the command has %d bytes, at most %d", n, MaxEntryBytes)})
		return
	}
	h, err := m.load(e.FlowId)
	if err != nil {
		m.fail(err)
		p.answer(core.Reply{}, m.err)
		return
	}
	e.Version, e.Lsn, e.Epoch = core.EntryVersion, m.nextLSN, m.cfg.Epoch
	e.Seed, e.TimeUs = m.cfg.Env.Rand.Uint64(), m.now()
	flowType, slots := m.reserve(h.flow, e)
	out, err := core.Apply(h.flow, e)
	m.release(e.FlowId, flowType, slots, out.Effects)
	if err != nil || !out.Changed {
		if err != nil {
			m.stats.Refused++
		}
		m.refuse(h.lastLSN, gate{run: func() { p.answer(out.Reply, err) }, answer: p.Reply})
		m.forget(h)
		return
	}
	if err := m.append(h, e, out, p); err != nil {
		m.fail(err)
		p.answer(core.Reply{}, m.err)
	}
}

// reserve stamps the entry with the slots that it may use.
func (m *Machine) reserve(f *wire.Flow, e *wire.Entry) (flowType string, slots int) {
	want := wanted(e)
	e.Slots = 0
	if want == 0 {
		return "", 0
	}
	flowType = f.GetType()
	if c := e.GetStartFlow(); c != nil {
		flowType = c.Type
	}
	slots = m.cfg.Executor.Reserve(e.FlowId, flowType, want)
	e.Slots = uint32(min(slots, Unlimited))
	return flowType, slots
}

// release gives back what the entry's dispatches left of its slots.
func (m *Machine) release(flowID, flowType string, slots int, effects []core.Effect) {
	if slots == 0 {
		return
	}
	for i := range effects {
		if effects[i].Kind == core.Dispatch {
			slots--
		}
	}
	if slots > 0 {
		m.cfg.Executor.Release(flowID, flowType, slots)
	}
}

// maxWanted bounds the slots that one entry asks for.
const maxWanted = 256

// wanted says how many steps an entry is likely to start. Too few only means
// that a step is queued and starts in an entry of its own.
func wanted(e *wire.Entry) int {
	n := 1
	switch c := e.Command.(type) {
	case *wire.Entry_StartFlow:
		n = len(c.StartFlow.Steps)
	case *wire.Entry_StepResult:
		n = len(c.StepResult.Next) + len(c.StepResult.Publish) + 1
		if len(c.StepResult.Next) == 1 && len(c.StepResult.Publish) == 0 {
			n = 1 // the usual
		}
	case *wire.Entry_Update:
		n = len(c.Update.Next) + len(c.Update.Publish)
	case *wire.Entry_Reset_:
		n = len(c.Reset_.Steps) + len(c.Reset_.Publish)
	case *wire.Entry_SetAttributes, *wire.Entry_StopFlow, *wire.Entry_DeleteFlow, *wire.Entry_DropMessages, *wire.Entry_Checkpoint:
		n = 0
	}
	return min(n, maxWanted)
}

func (p Proposal) answer(r core.Reply, err error) {
	if p.Reply != nil {
		p.Reply(r, err)
	}
}

// now is the wall clock, kept from going back.
func (m *Machine) now() int64 {
	m.lastUs = max(m.lastUs, m.cfg.Env.Clock.Now().UnixMicro())
	return m.lastUs
}

// append takes an accepted entry into the batch that is being built.
func (m *Machine) append(h *hotFlow, e *wire.Entry, out core.Output, p Proposal) error {
	b := m.building
	if b == nil {
		b = newBatch(m.nextLSN)
		m.building = b
	}
	if err := b.add(e); err != nil {
		return err
	}
	m.nextLSN++
	m.stats.Entries++
	m.count(h.flow, e, out)
	m.changed(h, e.Lsn, out)
	b.touch(h)
	b.gates = append(b.gates, gate{lsn: e.Lsn, hot: h, flowID: e.FlowId, events: out.Events, removed: out.Removed, private: closes(out), quiet: out.Flow.GetQuiet(), effects: m.takeEffects(h, e, out.Effects), reply: out.Reply, answer: p.Reply})
	return nil
}

// count counts an entry by the type of its flow, which may be new or gone, and by
// its step.
func (m *Machine) count(before *wire.Flow, e *wire.Entry, out core.Output) {
	typ := out.Flow.GetType()
	if out.Flow == nil {
		typ = before.GetType()
	}
	if _, ok := m.byType[typ]; !ok && len(m.byType) >= MaxTypeStats {
		typ = ""
	}
	m.byType[typ]++
	step := core.StepOfEntry(e, out)
	if step == "" {
		return
	}
	k := StepOf{typ, step}
	if _, ok := m.byStep[k]; !ok && len(m.byStep) >= MaxStepStats {
		k.Step = "other"
	}
	m.byStep[k]++
}

func closes(out core.Output) bool { return out.Flow != nil && out.Flow.Closes }

// takeEffects turns dispatches into work and starts those that may begin
// before their commit.
func (m *Machine) takeEffects(h *hotFlow, e *wire.Entry, effects []core.Effect) []effect {
	if len(effects) == 0 {
		return nil
	}
	out := make([]effect, len(effects))
	for i, ef := range effects {
		out[i].Effect = ef
		if ef.Kind != core.Dispatch {
			continue
		}
		out[i].work = m.work(h, ef.Task)
		m.stats.Dispatched++
		if ef.Task.Prefetch || ef.Task.Spec.Async && !mintsRun(e) {
			m.stats.Prefetched++
			out[i].early = true
			m.building.hurried = m.building.hurried || ef.Task.Spec.Async
			m.cfg.Executor.Dispatch(out[i].work)
		}
	}
	return out
}

// mintsRun reports whether an entry begins a run. Its first steps wait for its
// commit even when they are ASYNC: were it lost, the same start would mint
// another run ID, and with it other idempotency keys for what they did.
func mintsRun(e *wire.Entry) bool {
	switch e.Command.(type) {
	case *wire.Entry_StartFlow, *wire.Entry_Reset_:
		return true
	}
	return false
}

// Read calls fn with a copy of the flow (nil if there is none), when what it
// shows is durable.
func (m *Machine) Read(flowID string, fn func(*wire.Flow, error)) {
	if m.err != nil {
		fn(nil, m.err)
		return
	}
	if err := state.CheckFlowID(flowID); err != nil {
		fn(nil, &core.Error{Code: core.Invalid, Message: err.Error()})
		return
	}
	h, err := m.load(flowID)
	if err != nil {
		m.fail(err)
		fn(nil, m.err)
		return
	}
	var f *wire.Flow
	if h.flow != nil {
		f = h.flow.CloneVT()
	}
	m.atGate(h.lastLSN, func() { fn(f, nil) }, func(_ core.Reply, err error) { fn(nil, err) })
	m.forget(h)
}

// View calls extract at once with the flow (nil if there is none), and done when
// what it saw is durable, or with an error; after an error before extract, done
// alone is called. extract may keep what never changes (attributes and their
// list, messages, byte slices), but not the flow.
func (m *Machine) View(flowID string, extract func(*wire.Flow), done func(error)) {
	if m.err != nil {
		done(m.err)
		return
	}
	if err := state.CheckFlowID(flowID); err != nil {
		done(&core.Error{Code: core.Invalid, Message: err.Error()})
		return
	}
	h, err := m.load(flowID)
	if err != nil {
		m.fail(err)
		done(m.err)
		return
	}
	extract(h.flow)
	m.atGate(h.lastLSN, func() { done(nil) }, func(_ core.Reply, err error) { done(err) })
	m.forget(h)
}

// maxHeld bounds the refusals that wait for the lease.
const maxHeld = QueueBound

// refuse answers a command that changes nothing. While the lease has lapsed the
// answer waits, since it shows what may be old, and the one who proposed must hear
// of a refusal all the same.
func (m *Machine) refuse(lsn uint64, g gate) {
	if lsn > m.committed || m.valid() || len(m.held) >= maxHeld {
		m.atGate(lsn, g.run, g.answer)
		return
	}
	m.held = append(m.held, g)
}

// Held reports whether answers wait for the lease: call Revalidate by and by.
func (m *Machine) Held() bool { return len(m.held) > 0 }

// Revalidate gives the answers that waited, if the lease is valid again.
func (m *Machine) Revalidate() {
	if len(m.held) == 0 || !m.valid() {
		return
	}
	held := m.held
	m.held = nil
	for i := range held {
		held[i].run()
	}
}

func (m *Machine) dropHeld(err error) {
	held := m.held
	m.held = nil
	for _, g := range held {
		if g.answer != nil {
			g.answer(core.Reply{}, err)
		}
	}
}

func (m *Machine) valid() bool { return m.cfg.Valid == nil || m.cfg.Valid() }

// atGate runs fn when lsn is committed; lost is called instead when it never is.
func (m *Machine) atGate(lsn uint64, fn func(), lost func(core.Reply, error)) {
	if lsn <= m.committed {
		if m.valid() {
			fn()
		} else if lost != nil {
			lost(core.Reply{}, ErrLapsed)
		}
		return
	}
	b := m.building
	for _, in := range m.inflight {
		if lsn <= in.lastLSN() {
			b = in
			break
		}
	}
	b.gates = append(b.gates, gate{lsn: lsn, run: fn, answer: lost})
}

// Full reports whether the batch being built is at its bound: Seal it first.
func (m *Machine) Full() bool {
	b := m.building
	return b != nil && (len(b.body) >= m.cfg.MaxBatchBytes || b.count >= uint32(m.cfg.MaxBatchEntries))
}

// Building reports whether there is something to seal.
func (m *Machine) Building() bool { return m.building != nil && m.building.count > 0 }

// InFlight counts sealed batches that are not committed.
func (m *Machine) InFlight() int { return len(m.inflight) }

// Seal closes the batch being built and gives its frame; ok is false when
// there is nothing to commit. Append the frames to the journal in order and
// call Committed for each, or Fail.
func (m *Machine) Seal() (f journal.Frame, ok bool) {
	b := m.building
	if b == nil || m.err != nil || b.count == 0 {
		return journal.Frame{}, false
	}
	m.building = nil
	b.rows = m.cfg.Tables.NewBatch()
	b.encodeRows()
	f = journal.Frame{Epoch: m.cfg.Epoch, Nonce: m.cfg.Nonce, Seq: m.nextSeq, FirstLSN: b.firstLSN, Count: b.count, Body: b.body}
	m.nextSeq++
	m.inflight = append(m.inflight, b)
	m.stats.Batches++
	m.stats.Bytes += uint64(len(b.body))
	return f, true
}

// Hurried reports whether the newest sealed batch has work that goes on before
// its commit: the one who commits it should not keep the machine waiting.
func (m *Machine) Hurried() bool {
	return len(m.inflight) > 0 && m.inflight[len(m.inflight)-1].hurried
}

// Committed opens the gates of the oldest batch in flight and writes its rows.
func (m *Machine) Committed() {
	if m.err != nil || len(m.inflight) == 0 {
		return
	}
	b := m.inflight[0]
	m.inflight = m.inflight[1:]
	m.committed = b.lastLSN()
	for i := range b.gates {
		m.open(&b.gates[i])
	}
	err := b.rows.Commit(m.committed)
	b.rows.Close()
	if err != nil {
		m.fail(fmt.Errorf("write tables: %w", err))
		return
	}
	b.untouch(m)
}

func (m *Machine) open(g *gate) {
	if g.run != nil {
		g.run()
		return
	}
	// Events come first: the start of a step is shown before what the step
	// writes, which begins with the release of its effect.
	if len(g.events) > 0 {
		m.cfg.Observer.Publish(g.flowID, g.events)
	}
	for i := range g.effects {
		m.perform(&g.effects[i])
	}
	if g.answer != nil {
		g.answer(g.reply, nil)
	}
}

func (m *Machine) perform(ef *effect) {
	switch ef.Kind {
	case core.Dispatch:
		ef.work.committed.Store(true)
		if ef.early {
			m.cfg.Executor.Commit(ef.work)
		} else {
			m.cfg.Executor.Dispatch(ef.work)
		}
	case core.CancelAttempt:
		m.cfg.Executor.Cancel(ef.FlowID, ef.Exec, ef.Attempt, ef.Reason, ef.Forget)
	case core.SetTimer:
		m.timers.add(ef.AtUs, ef.FlowID, ef.Exec)
	case core.ClearTimer:
		m.timers.clear(ef.AtUs, ef.FlowID, ef.Exec, m.lastUs)
	case core.Queue:
		m.cfg.Executor.Queue(ef.Effect)
	case core.ReleaseKey:
		m.cfg.Executor.Done(ef.FlowID, ef.FlowType, ef.Exec, ef.Key)
	case core.Send:
		m.cfg.Outbox.Send(ef.FlowID, ef.Out)
	}
}

// Fail ends the ownership: the journal refused a frame. Everything that waits
// is answered with ErrLost.
func (m *Machine) Fail(err error) { m.fail(err) }

func (m *Machine) fail(err error) {
	if m.err != nil {
		return
	}
	m.err = fmt.Errorf("%w: partition %d: %w", ErrLost, m.cfg.ID, err)
	m.cfg.Executor.Abort()
	all := m.inflight
	if m.building != nil {
		all = append(all, m.building)
	}
	m.inflight, m.building = nil, nil
	m.dropHeld(m.err)
	for _, b := range all {
		for _, g := range b.gates {
			if g.answer != nil {
				g.answer(core.Reply{}, m.err)
			}
		}
	}
}

// Err says why the ownership ended, or nil.
func (m *Machine) Err() error { return m.err }

// Stats gives the counters.
func (m *Machine) Stats() Stats {
	st := m.stats
	st.EntriesByType, st.EntriesByStep = maps.Clone(m.byType), maps.Clone(m.byStep)
	return st
}

// CommittedLSN is the newest committed entry.
func (m *Machine) CommittedLSN() uint64 { return m.committed }
