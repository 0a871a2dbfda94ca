package sim

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// history is what one partition's journal must hold, kept outside of it: every
// entry whose append was reported as done, and what follows from these by the
// core alone.
type history struct {
	w       *world
	id      int
	entries [][]byte // by LSN, from 1
	// pending is the frame whose append has begun and is not reported: it may
	// be in the journal or not.
	pending *journal.Frame
	fold    *fold
	timeUs  int64
	epoch   uint64
}

func newHistory(w *world, id int) *history {
	return &history{w: w, id: id, fold: newFold()}
}

func (h *history) last() uint64 { return uint64(len(h.entries)) }

// learn takes a frame that has become durable.
func (h *history) learn(f journal.Frame) {
	if f.FirstLSN != h.last()+1 {
		h.w.violate("journal", "", "partition %d: frame begins at entry %d, the history ends at %d", h.id, f.FirstLSN, h.last())
		return
	}
	h.pending = nil
	for raw, err := range journal.Entries(f.Body) {
		if err != nil {
			h.w.violate("journal", "", "partition %d: %v", h.id, err)
			return
		}
		raw = bytes.Clone(raw)
		h.entries = append(h.entries, raw)
		if err := h.fold.apply(raw); err != nil {
			h.w.violate("replay", "", "partition %d entry %d: %v", h.id, h.last(), err)
			return
		}
		h.checkStamp()
		h.w.learnFlow(h.fold.newest.FlowId, h.fold.told)
	}
	h.w.tally.commits++
	h.w.tally.entries += uint64(f.Count)
}

// checkStamp: time and epoch never go back.
func (h *history) checkStamp() {
	e := h.fold.newest
	if e.Lsn != h.last() || e.Epoch < h.epoch {
		h.w.violate("journal", e.FlowId, "partition %d entry %d calls itself %d, epoch %d after %d", h.id, h.last(), e.Lsn, e.Epoch, h.epoch)
	}
	if e.TimeUs < h.timeUs {
		h.w.violate("time", e.FlowId, "partition %d entry %d has time %d, the one before has %d", h.id, e.Lsn, e.TimeUs, h.timeUs)
	}
	h.epoch, h.timeUs = e.Epoch, e.TimeUs
	if err := h.fold.costs(); err != "" {
		h.w.violate("commits", e.FlowId, "%s", err)
	}
}

// checkLog compares a journal that was opened after a life's end: it holds all
// that was reported, in these bytes, and at most the one frame in flight more.
func (h *history) checkLog(l *journal.Log) {
	fail := func(format string, args ...any) {
		h.w.violate("journal", "", "partition %d: %s", h.id, fmt.Sprintf(format, args...))
	}
	next := l.FirstLSN()
	var extra *journal.Frame
	err := l.Replay(0, func(f journal.Frame) error {
		if f.FirstLSN > h.last() {
			if p := h.pending; p == nil || extra != nil || f.FirstLSN != p.FirstLSN || !bytes.Equal(f.Body, p.Body) {
				fail("frame of entry %d was never written like that", f.FirstLSN)
			}
			f.Body = bytes.Clone(f.Body)
			extra = &f
			return nil
		}
		for raw, err := range journal.Entries(f.Body) {
			if err != nil || !bytes.Equal(raw, h.entries[next-1]) {
				fail("entry %d is not what was written", next)
				return nil
			}
			next++
		}
		return nil
	})
	switch {
	case err != nil:
		fail("%v", err)
	case next != h.last()+1:
		fail("ends at entry %d, acknowledged up to %d", next-1, h.last())
	case extra != nil:
		h.w.tell("", "partition %d: the frame in flight, entry %d on, had reached the disk", h.id, extra.FirstLSN)
		h.learn(*extra)
	}
	h.pending = nil
}

// fold is the state that follows from entries by the core alone.
type fold struct {
	lsn    uint64
	newest *wire.Entry
	flows  map[string]*wire.Flow
	rows   map[string][]*wire.Event // the events the tables hold
	shown  map[string][]shown       // every event ever, deleted ones too
	turns  map[string]*cost         // by scope, while the turn lasts
	broken string
	told   []*wire.Event     // by the newest entry
	undone map[string][]sent // messages sent to other flows, by sender
	kinds  map[string]int    // changing commands, by kind
}

// shown is an event that readers may see.
type shown struct {
	at   core.Cursor
	kind string
	sum  uint64
}

// cost counts what a turn took.
type cost struct {
	lastLSN                uint64
	entries, steps, queued int
	disturbed              bool
}

func newFold() *fold {
	return &fold{flows: map[string]*wire.Flow{}, rows: map[string][]*wire.Event{}, shown: map[string][]shown{}, turns: map[string]*cost{},
		undone: map[string][]sent{}, kinds: map[string]int{}}
}

func (f *fold) apply(raw []byte) error {
	e := &wire.Entry{}
	if err := e.UnmarshalVT(raw); err != nil {
		return err
	}
	out, err := core.Apply(f.flows[e.FlowId], e)
	if err != nil {
		return fmt.Errorf("was accepted once and is refused now: %w", err)
	}
	f.lsn++
	f.newest, f.told = e, out.Events
	f.kinds[strings.TrimPrefix(fmt.Sprintf("%T", e.Command), "*wire.Entry_")]++
	f.countSends(e, out.Effects)
	for _, ev := range out.Events {
		f.shown[e.FlowId] = append(f.shown[e.FlowId], shown{core.CursorOf(ev), ev.Type, sumOf(ev)})
		if ev.Type == core.EventDeleted {
			delete(f.rows, e.FlowId)
			continue
		}
		if out.Flow.GetQuiet() {
			continue // shown, and not kept
		}
		f.rows[e.FlowId] = append(f.rows[e.FlowId], ev)
		f.count(ev)
	}
	if out.Flow == nil {
		delete(f.flows, e.FlowId)
	} else {
		f.flows[e.FlowId] = out.Flow
	}
	return nil
}

func sumOf(ev *wire.Event) uint64 {
	b, err := ev.MarshalVT()
	if err != nil {
		return 0
	}
	return xxhash.Sum64(b)
}

// count books an event on its turn.
func (f *fold) count(ev *wire.Event) {
	if ev.Scope == "" {
		return
	}
	c := f.turns[ev.Scope]
	if c == nil {
		c = &cost{}
		f.turns[ev.Scope] = c
	}
	if ev.Lsn != c.lastLSN {
		c.lastLSN = ev.Lsn
		c.entries++
	}
	switch ev.Type {
	case core.EventStepStarted:
		c.steps++
	case core.EventPublished:
		c.queued++
	case core.EventStepRestarted, core.EventStepRetrying, core.EventCancelRequested, core.EventDropped:
		c.disturbed = true
	case "turn.completed":
		// One commit accepts the input and starts the first step; each result
		// is one more and starts what follows. A turn that waited was accepted
		// by a commit of its own.
		if want := 1 + c.steps + c.queued; !c.disturbed && c.entries != want {
			f.broken = fmt.Sprintf("turn %s of %d steps took %d commits, want %d", ev.Scope, c.steps, c.entries, want)
		}
	}
}

// costs gives what is wrong with the commits of the turns that ended, or "".
func (f *fold) costs() string { return f.broken }

// upTo folds the first lsn entries anew.
func (h *history) upTo(lsn uint64) *fold {
	f := newFold()
	for _, raw := range h.entries[:lsn] {
		if err := f.apply(raw); err != nil {
			h.w.violate("replay", "", "partition %d entry %d: %v", h.id, f.lsn+1, err)
			return f
		}
	}
	return f
}

// differs says where tables differ from the fold, or "".
func (f *fold) differs(d *state.DB) string {
	var diff string
	n := 0
	err := d.Flows("", "", 0, false, func(have *wire.Flow) (err error) {
		n++
		want := f.flows[have.Id]
		if have, err = d.Flow(have.Id); err != nil { // with the values that have rows of their own
			return err
		}
		if diff == "" && (want == nil || !have.EqualVT(want)) {
			diff = fmt.Sprintf("flow %q is %v, want %v", have.Id, have, want)
		}
		return nil
	})
	if err != nil {
		return err.Error()
	}
	if diff == "" && n != len(f.flows) {
		diff = fmt.Sprintf("%d flows, want %d", n, len(f.flows))
	}
	for _, id := range slices.Sorted(maps.Keys(f.flows)) {
		if diff != "" {
			return diff
		}
		diff = f.differsIn(d, id)
	}
	return diff
}

func (f *fold) differsIn(d *state.DB, id string) string {
	rows, i := f.rows[id], 0
	diff := ""
	err := d.Events(id, 0, 0, 0, func(ev *wire.Event) error {
		if i >= len(rows) || !ev.EqualVT(rows[i]) {
			diff = fmt.Sprintf("event %d of flow %q, at %d.%d, is not what was committed", i, id, ev.Lsn, ev.N)
		}
		i++
		return nil
	})
	switch {
	case err != nil:
		return err.Error()
	case diff == "" && i != len(rows):
		return fmt.Sprintf("flow %q has %d events, want %d", id, i, len(rows))
	}
	return diff
}
