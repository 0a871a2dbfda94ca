package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/wire"
)

// knownIndexed bounds the memory of what is indexed of flows that run: a flow
// that is not known costs a read of its row.
const knownIndexed = 16 << 10

// An entry list is what the index has of a flow: its creation, 8 bytes, and the
// entries, sorted, each behind its length in 2 bytes. Empty: the flow is not
// indexed. It is compared as a whole, and its difference from the list before
// is what a commit writes.

// appendEntries gives the entry list of a flow as its row has it: large values
// are not in there. Flows that are not users' have none.
func appendEntries(b []byte, f *wire.Flow) []byte {
	if !f.Closes {
		return b
	}
	if _, _, ok := userFlow(f.Id); !ok {
		return b
	}
	b = binary.BigEndian.AppendUint64(b, uint64(f.CreatedUs))
	b = appendEntry(b, func(b []byte) []byte {
		return appendValue(appendField(b, query.Status, ""), query.Value{Kind: query.Number, Int: int64(f.Status)}, false)
	})
	b = appendEntry(b, func(b []byte) []byte {
		return appendValue(appendField(b, query.Type, ""), query.Value{Kind: query.Text, Text: f.Type}, false)
	})
	if f.ClosedUs != 0 {
		b = appendEntry(b, func(b []byte) []byte {
			b = append(appendField(b, query.Closed, ""), byte(query.Instant))
			return binary.BigEndian.AppendUint64(b, ordered(f.ClosedUs))
		})
	}
	for _, a := range f.Attributes {
		b = appendAttribute(b, a)
	}
	return b
}

func appendEntry(b []byte, write func([]byte) []byte) []byte {
	at := len(b)
	b = write(append(b, 0, 0))
	binary.BigEndian.PutUint16(b[at:], uint16(len(b)-at-2))
	return b
}

// appendAttribute gives one entry for each value of an attribute, in order.
func appendAttribute(b []byte, a *wire.Attribute) []byte {
	if a.Index == wire.Attribute_NONE || len(a.Value) == 0 || isLarge(a) {
		return b
	}
	var one [1]query.Value
	values := one[:0]
	query.Values(a, func(v query.Value) bool {
		v.Text = cut(v.Text)
		values = append(values, v)
		return true
	})
	if len(values) > 1 { // texts
		slices.SortFunc(values, query.Compare)
		values = slices.CompactFunc(values, func(v, w query.Value) bool { return v.Text == w.Text })
	}
	for _, v := range values {
		b = appendEntry(b, func(b []byte) []byte {
			return appendValue(appendField(b, query.Attribute, a.Name), v, false)
		})
	}
	return b
}

// entries walks an entry list.
type entries struct {
	created []byte
	rest    []byte
}

func entriesOf(list []byte) entries {
	if len(list) < placeBytes {
		return entries{}
	}
	return entries{list[:placeBytes], list[placeBytes:]}
}

// next gives nil at the end.
func (e *entries) next() []byte {
	if len(e.rest) == 0 {
		return nil
	}
	n := 2 + int(binary.BigEndian.Uint16(e.rest))
	entry := e.rest[2:n]
	e.rest = e.rest[n:]
	return entry
}

// indexed is what the index has of flows that run, as of the last commit and
// the batch that is being committed. The DB's mu guards it.
type indexed map[string][]byte

// settle forgets the flows of a committed batch that are closed or deleted, and
// others when there are too many. Which ones does not matter: a flow that is
// not known is read.
func (known indexed) settle(marks []mark) {
	for _, m := range marks {
		if m.over {
			delete(known, m.id)
		}
	}
	if len(known) <= knownIndexed {
		return
	}
	for id := range known {
		if delete(known, id); len(known) <= knownIndexed-knownIndexed/16 {
			return
		}
	}
}

// Fresh promises that the tables have no row of this flow, nor will they get
// one from a batch in flight. It spares the first PutFlow after it a read.
func (b *Batch) Fresh(flowID string) {
	b.marks = append(b.marks, mark{id: flowID, fresh: true})
}

// writeIndex brings the index from what it has of a flow to what the mark says.
func (b *Batch) writeIndex(m *mark) {
	tenant, id, ok := userFlow(m.id)
	if !ok {
		return
	}
	list := b.entries[m.from:m.to]
	old, ok := b.d.indexed[m.id]
	if m.fresh {
		if !ok {
			b.d.indexed[m.id] = nil
		}
		return
	}
	if ok && bytes.Equal(old, list) {
		return
	}
	if !ok {
		row, err := get(b.d, appendIDKey(nil, tableFlow, m.id), decodeFlow)
		if b.fail(err) {
			return
		}
		if row != nil {
			old = appendEntries(nil, row)
		}
	}
	b.diffIndex(tenant, id, old, list)
	b.d.indexed[m.id] = bytes.Clone(list)
}

// diffIndex writes the rows that one list has and the other has not.
func (b *Batch) diffIndex(tenant, id string, old, list []byte) {
	was, is := entriesOf(old), entriesOf(list)
	moved := !bytes.Equal(was.created, is.created)
	x, y := was.next(), is.next()
	for x != nil || y != nil {
		c := 1
		switch {
		case y == nil:
			c = -1
		case x != nil:
			c = bytes.Compare(x, y)
		}
		if c <= 0 && (c != 0 || moved) {
			b.fail(b.b.Delete(b.indexKey(tenant, id, x, was.created), nil))
		}
		if c >= 0 && (c != 0 || moved) {
			b.fail(b.b.Set(b.indexKey(tenant, id, y, is.created), nil, nil))
		}
		if c <= 0 {
			x = was.next()
		}
		if c >= 0 {
			y = is.next()
		}
	}
}

func (b *Batch) indexKey(tenant, id string, entry, created []byte) []byte {
	b.key = append(appendIndexPrefix(b.key[:0], tenant), entry...)
	b.key = appendPlace(b.key, Place{int64(binary.BigEndian.Uint64(created)), id})
	return b.key
}

// indexVersion changes whenever the rows of the index or what is indexed do,
// the bound of large values included: the index is built anew then.
const indexVersion = 1

// buildBytes is what one batch of a build gathers.
const buildBytes = 1 << 20

// buildLog is after how many flows a build says how far it is.
const buildLog = 100_000

// buildIndex writes the index anew when the tables have none of this version:
// they are older than it, or a build was broken off. The version goes last, and
// tables are durable in order, so there is never a version without its index.
func (d *DB) buildIndex() error {
	v, err := get(d, []byte{tableIndex}, func(row []byte) (*byte, error) {
		version := byte(0)
		if len(row) == 1 {
			version = row[0]
		}
		return &version, nil
	})
	if err != nil || v != nil && *v == indexVersion {
		return err
	}
	b := d.NewBatch()
	defer b.Close()
	if err := d.scan([]byte{tableIndex}, []byte{tableIndex + 1}, 1, false, func(_, _ []byte) error {
		return b.b.DeleteRange([]byte{tableIndex}, []byte{tableIndex + 1}, nil)
	}); err != nil {
		return err
	}
	flows, indexed := 0, 0
	err = d.scan([]byte{tableFlow}, []byte{tableFlow + 1}, 0, false, func(_, row []byte) error {
		f, err := decodeFlow(row)
		if err != nil {
			return err
		}
		if flows++; flows%buildLog == 0 {
			d.log(Info, fmt.Sprintf("tables in %q: the search index is being built: %d flows so far", d.dir, flows))
		}
		list := appendEntries(nil, f)
		if len(list) == 0 {
			return nil
		}
		indexed++
		tenant, id, _ := userFlow(f.Id)
		b.diffIndex(tenant, id, nil, list)
		if b.Len() < buildBytes {
			return b.err
		}
		return b.applyIndex()
	})
	if err != nil {
		return err
	}
	b.fail(b.b.Set([]byte{tableIndex}, []byte{indexVersion}, nil))
	if err := b.applyIndex(); err != nil {
		return err
	}
	if flows > 0 {
		d.log(Info, fmt.Sprintf("tables in %q: the search index was built: %d of %d flows are in it", d.dir, indexed, flows))
	}
	return nil
}

// applyIndex writes a part of the index beside the order of entries.
func (b *Batch) applyIndex() error {
	if b.err != nil {
		return b.err
	}
	err := b.d.apply(&b.b)
	b.Reset()
	return err
}
