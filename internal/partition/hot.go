package partition

import (
	"container/list"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// hotFlow is a flow decoded in memory: the overlay.
type hotFlow struct {
	id      string
	flow    *wire.Flow // nil: does not exist
	fresh   bool       // the tables know nothing of it
	lastLSN uint64     // the newest entry that changed it
	usedUs  int64
	pins    int // batches not yet in the tables
	inBatch *batch
	elem    *list.Element

	// tail is the newest events, each one that is not in the tables among
	// them. It is only ever appended to or replaced: work shares it.
	tail      []*wire.Event
	tailFrom  core.Cursor // tail has every event after this one
	tailBytes int
}

// hotSet is the bounded cache of decoded flows, least recently used last.
type hotSet struct {
	byID  map[string]*hotFlow
	lru   list.List
	bytes int // of all tails
}

// shrinkScan bounds how many flows in use one shrink steps over.
const shrinkScan = 64

// load gives the flow, from memory or from the tables.
func (m *Machine) load(id string) (*hotFlow, error) {
	if h := m.hot.byID[id]; h != nil {
		m.hot.lru.MoveToFront(h.elem)
		h.usedUs = m.lastUs
		return h, nil
	}
	f, err := m.cfg.Tables.Flow(id)
	if err != nil {
		return nil, err
	}
	h := &hotFlow{id: id, flow: f, fresh: f == nil, usedUs: m.lastUs}
	if f != nil && f.LastEvent != nil {
		h.tailFrom = core.Cursor{LSN: f.LastEvent.Lsn, N: f.LastEvent.N}
		h.lastLSN = 0 // in the tables, so committed
	}
	h.elem = m.hot.lru.PushFront(h)
	m.hot.byID[id] = h
	return h, nil
}

// changed takes the output of an entry into the overlay.
func (m *Machine) changed(h *hotFlow, lsn uint64, out core.Output) {
	if h.flow == nil { // created, perhaps again
		m.hot.bytes -= h.tailBytes
		h.tail, h.tailBytes, h.tailFrom = nil, 0, core.Cursor{}
	}
	before := h.tailBytes
	h.flow, h.lastLSN = out.Flow, lsn
	if closes(out) {
		return // nobody asks for the history of its work
	}
	for _, ev := range out.Events {
		h.tail = append(h.tail, ev)
		h.tailBytes += eventBytes(ev)
	}
	m.hot.bytes += h.tailBytes - before
}

// written cuts the tail to its bound; only events up to lsn are in the tables.
func (h *hotFlow) written(lsn uint64, bound int) {
	if h.tailBytes <= bound {
		return
	}
	i := 0
	for i < len(h.tail) && h.tail[i].Lsn <= lsn && h.tailBytes > bound/2 {
		h.tailBytes -= eventBytes(h.tail[i])
		h.tailFrom = core.Cursor{LSN: h.tail[i].Lsn, N: h.tail[i].N}
		i++
	}
	h.tail = append([]*wire.Event(nil), h.tail[i:]...)
}

func eventBytes(ev *wire.Event) int {
	n := 200 + len(ev.Data) + len(ev.Type) + len(ev.Scope)
	for _, it := range ev.Items {
		n += len(it)
	}
	return n
}

// shrink drops flows at rest, least recently used first, while there are more
// than the bounds.
func (s *hotSet) shrink(flows, bytes int) {
	el := s.lru.Back()
	for scanned := 0; el != nil && (len(s.byID) > flows || s.bytes > bytes) && scanned < shrinkScan; scanned++ {
		prev := el.Prev()
		if h := el.Value.(*hotFlow); h.pins == 0 && (h.flow == nil || !core.IsRunning(h.flow)) {
			s.drop(h)
		}
		el = prev
	}
}

func (s *hotSet) drop(h *hotFlow) {
	s.lru.Remove(h.elem)
	s.bytes -= h.tailBytes
	delete(s.byID, h.id)
}

// PageOut drops flows that were not used for the idle time and are at rest,
// and says how many went. They come back from the tables when next used.
func (m *Machine) PageOut() int {
	before := m.now() - m.cfg.IdleUs
	n := 0
	for el := m.hot.lru.Back(); el != nil; {
		h := el.Value.(*hotFlow)
		if h.usedUs > before {
			break
		}
		el = el.Prev()
		if h.pins == 0 && (h.flow == nil || !core.IsRunning(h.flow)) {
			m.hot.drop(h)
			n++
		}
	}
	if n > 0 && len(m.hot.byID) == 0 {
		m.hot.byID = map[string]*hotFlow{} // a Go map keeps its buckets
	}
	return n
}

// forget drops what was loaded in vain, so that asking for unknown flows
// costs no memory.
func (m *Machine) forget(h *hotFlow) {
	if h.flow == nil && h.pins == 0 {
		m.hot.drop(h)
	}
}

// HotFlows counts the flows in memory.
func (m *Machine) HotFlows() int { return len(m.hot.byID) }

// Work is an attempt handed out, with the newest part of its flow's log, which
// may not be in the tables yet.
type Work struct {
	*core.Task
	tail      []*wire.Event
	tailFrom  core.Cursor
	machine   *Machine
	committed atomic.Bool
}

func (m *Machine) work(h *hotFlow, t *core.Task) *Work {
	return &Work{Task: t, tail: h.tail[:len(h.tail):len(h.tail)], tailFrom: h.tailFrom, machine: m}
}

// Committed reports whether the attempt's start is durable.
func (w *Work) Committed() bool { return w.committed.Load() }

// historyPage bounds one read of the log from the tables.
const historyPage = 1024

// History calls fn for each event of the flow up to the attempt's start, its
// own start event included, oldest first. Not for flows that close: their
// handlers go by attributes. Safe on any goroutine.
func (w *Work) History(fn func(*wire.Event) error) error {
	if w.tailFrom.LSN != 0 {
		if err := w.stored(fn); err != nil {
			return err
		}
	}
	for _, ev := range w.tail {
		if err := fn(ev); err != nil {
			return err
		}
	}
	return nil
}

// stored reads what is before the tail from the tables.
func (w *Work) stored(fn func(*wire.Event) error) error {
	var at core.Cursor
	for {
		n := 0
		done := false
		err := w.machine.cfg.Tables.Events(w.FlowID, at.LSN, at.N, historyPage, func(ev *wire.Event) error {
			n++
			at.LSN, at.N = ev.Lsn, ev.N
			if w.tailFrom.Before(ev) {
				done = true
				return nil
			}
			return fn(ev)
		})
		if err != nil || done || n < historyPage {
			return err
		}
	}
}
