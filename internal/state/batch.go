package state

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of the writer's own rows.
const (
	MaxMetaKey   = 1 << 10
	MaxMetaValue = 1 << 20
)

// knownOpen bounds the memory of which flows have an index row.
const knownOpen = 4096

// outboxWipe is how many trimmed outbox rows are gathered before a range
// deletion: many small ones would cost every read of the outbox.
const outboxWipe = 256

// Batch gathers rows of one or more entries, to become visible and durable
// together. It is used by one goroutine. Rows are encoded when they are put:
// the caller may change its values afterwards. The first bad row spoils the
// batch: Commit then writes nothing and gives the reason.
type Batch struct {
	d     *DB
	b     pebble.Batch // of no DB, so that it lives through Shrink
	err   error
	marks []mark // changes of the derived rows, in order
	rows  uint64 // outbox rows
	first pos    // lowest event
	last  pos    // highest event
	key   []byte

	entries []byte // of the search index, see mark
}

// mark is what a flow that was put or deleted asks of the derived rows.
type mark struct {
	id       string
	open     bool
	over     bool // deleted or closed
	fresh    bool // only: see Fresh
	from, to int  // its entry list in entries
}

// NewBatch gives an empty batch; Close gives it back.
func (d *DB) NewBatch() *Batch {
	b := batchPool.Get().(*Batch)
	b.d = d
	return b
}

// Close gives the batch back for use by others; rows not committed are gone.
func (b *Batch) Close() {
	b.Reset()
	b.d = nil
	batchPool.Put(b)
}

// Reset makes the batch empty.
func (b *Batch) Reset() {
	b.b.Reset()
	clear(b.marks)
	b.marks, b.entries = b.marks[:0], b.entries[:0]
	b.err, b.rows, b.first, b.last = nil, 0, pos{}, pos{}
}

// Len is the number of bytes gathered.
func (b *Batch) Len() int { return b.b.Len() }

func (b *Batch) fail(err error) bool {
	if err != nil && b.err == nil {
		b.err = err
	}
	return b.err != nil
}

// encoder is what vtprotobuf gives every message.
type encoder interface {
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
}

// put encodes m straight into the batch.
func (b *Batch) put(key []byte, m encoder) {
	op := b.b.SetDeferred(len(key), m.SizeVT())
	copy(op.Key, key)
	if n, err := m.MarshalToSizedBufferVT(op.Value); err != nil || n != len(op.Value) {
		b.fail(fmt.Errorf("state: encode row: %d of %d bytes, %w", n, len(op.Value), err))
	}
	b.fail(op.Finish())
}

// PutFlow writes a flow with all its attributes and keeps the index of open flows.
func (b *Batch) PutFlow(f *wire.Flow) { b.PutFlowSince(f, 0) }

// PutFlowSince writes a flow whose attributes were set before lsn are in the
// tables already: large ones of these are not written again.
func (b *Batch) PutFlowSince(f *wire.Flow, lsn uint64) {
	if b.fail(CheckFlowID(f.GetId())) {
		return
	}
	attributes, requests := f.Attributes, f.Requests
	f.Attributes = b.putValues(f.Id, attributes, lsn)
	f.Requests = b.putRequests(f.Id, requests, lsn)
	b.key = appendIDKey(b.key[:0], tableFlow, f.Id)
	b.put(b.key, f)
	m := mark{id: f.Id, open: core.HasOutstanding(f), over: f.Status != wire.Status_RUNNING, from: len(b.entries)}
	b.entries = appendEntries(b.entries, f)
	f.Attributes, f.Requests = attributes, requests
	m.to = len(b.entries)
	b.marks = append(b.marks, m)
}

// PutEvent writes one event of a flow. Its LSN must be above the LSN the
// tables are at when the batch is committed, and not above the batch's own.
func (b *Batch) PutEvent(flowID string, e *wire.Event) {
	b.PutPrivateEvent(flowID, e)
	if b.err == nil && b.d.o.Outbox {
		op := b.b.SetDeferred(1+cursorBytes, len(flowID))
		op.Key[0] = tableOutbox
		putPos(op.Key[1:], pos{e.Lsn, e.N})
		copy(op.Value, flowID)
		b.fail(op.Finish())
		b.rows++
	}
}

// PutPrivateEvent is PutEvent for an event that sinks are not told of.
func (b *Batch) PutPrivateEvent(flowID string, e *wire.Event) {
	if b.fail(CheckFlowID(flowID)) {
		return
	}
	p := pos{e.Lsn, e.N}
	b.key = appendEventKey(b.key[:0], flowID, p)
	b.put(b.key, e)
	if b.first == (pos{}) || p.less(b.first) {
		b.first = p
	}
	if b.last.less(p) {
		b.last = p
	}
}

// DeleteFlow deletes a flow, its index rows and all its events, those put into
// this batch before included. Outbox rows stay, so that sinks move on.
func (b *Batch) DeleteFlow(id string) {
	if b.fail(CheckFlowID(id)) {
		return
	}
	b.key = appendIDKey(b.key[:0], tableFlow, id)
	b.fail(b.b.Delete(b.key, nil))
	b.fail(b.b.DeleteRange(appendEventsKey(nil, id), afterEvents(nil, id), nil))
	b.fail(b.b.DeleteRange(appendPartsKey(nil, id, 0), appendPartsKey(nil, id, 0xff), nil))
	b.marks = append(b.marks, mark{id: id, over: true})
}

// PutMeta writes one of the writer's own small rows; a nil value deletes it.
// These rows are not part of Hash.
func (b *Batch) PutMeta(key string, value []byte) {
	if key == "" || len(key) > MaxMetaKey || len(value) > MaxMetaValue {
		b.fail(fmt.Errorf("state: meta row %q: key of %d bytes, at most %d; value of %d bytes, at most %d",
			clip([]byte(key)), len(key), MaxMetaKey, len(value), MaxMetaValue))
		return
	}
	b.key = append(append(b.key[:0], tableMeta), key...)
	if value == nil {
		b.fail(b.b.Delete(b.key, nil))
		return
	}
	b.fail(b.b.Set(b.key, value, nil))
}

// Commit makes all rows visible at once and brings the tables to appliedLSN,
// which may not be lower than before. The batch is empty afterwards and can be
// used again. Nothing is durable before FlushedLSN says so. After an error
// nothing was written.
func (b *Batch) Commit(appliedLSN uint64) error {
	defer b.Reset()
	if b.err != nil {
		return b.err
	}
	d := b.d
	if !d.gate.enter() {
		return ErrClosed
	}
	defer d.gate.leave()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := b.checkOrder(d.prog.applied, appliedLSN); err != nil {
		return err
	}
	b.writeMarks()
	next := d.prog
	next.applied = appliedLSN
	next.outbox += b.rows
	wiped := b.wipeOutbox(next)
	b.writeProgress(next)
	if b.err == nil {
		b.err = d.apply(&b.b)
	}
	if b.err != nil {
		clear(d.known) // unsure: the next marks are written blindly
		clear(d.indexed)
		return b.err
	}
	d.prog, d.moved = next, false
	d.indexed.settle(b.marks)
	if wiped {
		d.wiped, d.owed = next.trimmed, 0
	}
	return nil
}

// checkOrder keeps the tables a prefix of the journal: an entry applied twice
// or out of order is a defect of the caller that must not reach the rows.
func (b *Batch) checkOrder(from, to uint64) error {
	if to < from {
		return fmt.Errorf("state: commit of LSN %d, tables are at %d already", to, from)
	}
	if b.first != (pos{}) && (b.first.lsn <= from || b.last.lsn > to) {
		return fmt.Errorf("state: events of LSN %d to %d in a batch that leads from %d to %d", b.first.lsn, b.last.lsn, from, to)
	}
	return nil
}

// writeMarks turns marks into index rows, but for those known to be there.
func (b *Batch) writeMarks() {
	known := b.d.known
	for i := range b.marks {
		m := &b.marks[i]
		if b.writeIndex(m); m.fresh {
			continue
		}
		if open, ok := known[m.id]; ok && open == m.open {
			continue
		}
		if len(known) >= knownOpen {
			clear(known)
		}
		known[m.id] = m.open
		b.key = appendIDKey(b.key[:0], tableOpen, m.id)
		if m.open {
			b.fail(b.b.Set(b.key, nil, nil))
		} else {
			b.fail(b.b.Delete(b.key, nil))
		}
	}
}

// wipeOutbox deletes trimmed outbox rows once there are enough of them.
func (b *Batch) wipeOutbox(p progress) bool {
	if b.d.owed < outboxWipe {
		return false
	}
	end, ok := p.trimmed.next()
	if !ok {
		return false
	}
	start := appendOutboxKey(nil, b.d.wiped)
	b.fail(b.b.DeleteRange(start, appendOutboxKey(nil, end), nil))
	return true
}

func (b *Batch) writeProgress(p progress) {
	op := b.b.SetDeferred(1, progressBytes)
	op.Key[0] = tableProgress
	p.encode(op.Value)
	b.fail(op.Finish())
}

// rowOverhead is what a row costs in a memtable besides its bytes, at most.
const rowOverhead = 256

// apply hands a batch to Pebble. In manual mode it flushes before Pebble would
// do so in the background. The caller holds d.mu.
func (d *DB) apply(b *pebble.Batch) error {
	const limit = 224 << 10 // Pebble's first memtable has 256 KiB
	size := int64(b.Len()) + int64(b.Count())*rowOverhead
	if d.o.Manual && d.used > 0 && d.used+size > limit {
		if err := d.flushLocked(); err != nil {
			return err
		}
	}
	if err := d.trouble.get(); err != nil && d.db.Metrics().MemTable.Count >= stopWritesMemTable-1 {
		return fmt.Errorf("state: tables in %q cannot be flushed and memory is full: %w", d.dir, err)
	}
	if err := d.commit(b); err != nil {
		return fmt.Errorf("state: write to tables in %q: %w", d.dir, err)
	}
	d.used += size
	if d.o.Manual && size > limit {
		return d.flushLocked()
	}
	return nil
}

func (d *DB) commit(b *pebble.Batch) (err error) {
	// Pebble panics with an error when a batch is over its bound of 4 GiB.
	defer func() {
		if r := recover(); r != nil {
			rerr, ok := r.(error)
			if !ok || !errors.Is(rerr, pebble.ErrBatchTooLarge) {
				panic(r)
			}
			err = rerr
		}
	}()
	return d.db.Apply(b, pebble.NoSync)
}
