package partition

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// batch is one journal frame in the making, with what waits for its commit.
type batch struct {
	firstLSN uint64
	count    uint32
	body     []byte
	scratch  []byte
	gates    []gate
	dirty    []*hotFlow // flows changed in this batch, each once
	rows     *state.Batch
	hurried  bool // has ASYNC steps that were handed out already
}

// gate holds back what one entry lets out.
type gate struct {
	lsn     uint64
	hot     *hotFlow
	flowID  string
	events  []*wire.Event
	removed []string // attributes
	private bool     // sinks are not told: of a flow that closes
	quiet   bool     // events are not kept
	effects []effect
	reply   core.Reply
	answer  func(core.Reply, error)
	run     func() // a read or a refusal; the rest is unset then, but answer for a loss
}

type effect struct {
	core.Effect
	work  *Work
	early bool // dispatched before the commit
}

func newBatch(firstLSN uint64) *batch { return &batch{firstLSN: firstLSN} }

func (b *batch) lastLSN() uint64 { return b.firstLSN + uint64(b.count) - 1 }

func (b *batch) add(e *wire.Entry) error {
	n := e.SizeVT()
	if cap(b.scratch) < n {
		b.scratch = make([]byte, n+n/2)
	}
	b.scratch = b.scratch[:n]
	if _, err := e.MarshalToSizedBufferVT(b.scratch); err != nil {
		return fmt.Errorf("encode entry %d: %w", e.Lsn, err)
	}
	b.body = journal.AppendEntry(b.body, b.scratch)
	b.count++
	return nil
}

// touch marks a flow as changed in this batch.
func (b *batch) touch(h *hotFlow) {
	if h.inBatch == b {
		return
	}
	h.inBatch = b
	h.pins++
	b.dirty = append(b.dirty, h)
}

// encodeRows fixes what the tables get, as of now: later entries may change
// the flows before this batch is committed.
func (b *batch) encodeRows() {
	for _, g := range b.gates {
		if g.hot == nil {
			continue
		}
		for _, ev := range g.events {
			if ev.Type == core.EventDeleted {
				b.rows.DeleteFlow(g.flowID) // what follows may create it anew
				continue
			}
			if g.quiet {
				continue
			}
			if g.private {
				b.rows.PutPrivateEvent(g.flowID, ev)
			} else {
				b.rows.PutEvent(g.flowID, ev)
			}
		}
		for _, name := range g.removed {
			b.rows.DropValue(g.flowID, name)
		}
	}
	for _, h := range b.dirty {
		if h.flow != nil {
			if h.fresh {
				b.rows.Fresh(h.id)
				h.fresh = false
			}
			b.rows.PutFlowSince(h.flow, b.firstLSN)
		}
	}
}

// untouch lets the flows of a committed batch leave memory again.
func (b *batch) untouch(m *Machine) {
	for _, h := range b.dirty {
		h.pins--
		if h.inBatch == b {
			h.inBatch = nil
		}
		before := h.tailBytes
		h.written(b.lastLSN(), m.cfg.MaxTailBytes)
		m.hot.bytes += h.tailBytes - before
	}
	m.hot.shrink(m.cfg.MaxHotFlows, m.cfg.MaxHotBytes)
}
