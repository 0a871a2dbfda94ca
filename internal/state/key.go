package state

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// The whole key layout. The first byte names the table; numbers are
// big-endian, so that byte order is number order.
//
//	a <flow ID> 00 v <name>        a large attribute  → its value
//	a <flow ID> 00 r <slot:1>      an idempotency key → wire.Request
//	e <flow ID> 00 <lsn:8> <n:4>   one event          → wire.Event
//	f <flow ID>                    one flow           → wire.Flow
//	i …                            the search index   → see indexkey.go (derived)
//	m <key>                        the writer's row   → the writer's bytes
//	o <flow ID>                    open flow          → empty       (derived)
//	q <lsn:8> <n:4>                outbox of sinks    → flow ID     (derived)
//	s                              progress           → see progress
//
// A flow ID has no NUL byte, so the NUL behind it in the event table ends it:
// no flow's events lie within another's, whatever the IDs.
const (
	tablePart     = 'a'
	tableEvent    = 'e'
	tableFlow     = 'f'
	tableMeta     = 'm'
	tableOpen     = 'o'
	tableOutbox   = 'q'
	tableProgress = 's'
)

const cursorBytes = 8 + 4

// pos is a place in the order of events of a partition.
type pos struct {
	lsn uint64
	n   uint32
}

func (p pos) less(q pos) bool { return p.lsn < q.lsn || (p.lsn == q.lsn && p.n < q.n) }

// next gives the smallest place above p; ok is false when there is none.
func (p pos) next() (_ pos, ok bool) {
	switch {
	case p.n != ^uint32(0):
		return pos{p.lsn, p.n + 1}, true
	case p.lsn != ^uint64(0):
		return pos{p.lsn + 1, 0}, true
	}
	return p, false
}

// CheckFlowID says whether id can be a key: 1 to core.MaxIDBytes bytes, no NUL.
func CheckFlowID(id string) error {
	if id == "" || len(id) > core.MaxIDBytes {
		return fmt.Errorf("state: flow ID has %d bytes, must have 1 to %d", len(id), core.MaxIDBytes)
	}
	for i := 0; i < len(id); i++ {
		if id[i] == 0 {
			return fmt.Errorf("state: flow ID %q has a NUL byte", id)
		}
	}
	return nil
}

func appendPos(b []byte, p pos) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, p.lsn), p.n)
}

func putPos(b []byte, p pos) {
	binary.BigEndian.PutUint64(b, p.lsn)
	binary.BigEndian.PutUint32(b[8:], p.n)
}

func decodePos(b []byte) pos {
	return pos{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
}

func appendIDKey(b []byte, table byte, id string) []byte { return append(append(b, table), id...) }

// appendEventsKey gives what every event key of the flow begins with.
func appendEventsKey(b []byte, id string) []byte { return append(appendIDKey(b, tableEvent, id), 0) }

func appendEventKey(b []byte, id string, p pos) []byte { return appendPos(appendEventsKey(b, id), p) }

func appendOutboxKey(b []byte, p pos) []byte { return appendPos(append(b, tableOutbox), p) }

// afterEvents is the first key behind all events of the flow.
func afterEvents(b []byte, id string) []byte { return append(appendIDKey(b, tableEvent, id), 1) }

// Parts of a flow that are not in its row.
const (
	partValue   = 'v'
	partRequest = 'r'
)

// appendPartsKey gives what the keys of all parts of one kind begin with.
func appendPartsKey(b []byte, id string, kind byte) []byte {
	return append(appendIDKey(b, tablePart, id), 0, kind)
}

func appendValueKey(b []byte, id, name string) []byte {
	return append(appendPartsKey(b, id, partValue), name...)
}

// appendRequestKey gives the slot of an idempotency key: a younger one takes the
// row of the one that is forgotten for it.
func appendRequestKey(b []byte, id string, seq uint64) []byte {
	return append(appendPartsKey(b, id, partRequest), byte(seq%core.MaxRequests))
}

// prefixEnd gives the first key behind all keys with this prefix, in place.
// The table byte is never 0xff, so there always is one.
func prefixEnd(key []byte) []byte {
	for i := len(key) - 1; i >= 0; i-- {
		if key[i] != 0xff {
			key[i]++
			return key[:i+1]
		}
	}
	return nil
}

// decodeEventKey is the inverse of appendEventKey.
func decodeEventKey(key []byte) (id string, p pos, err error) {
	cut := len(key) - cursorBytes - 1
	if cut < 2 || key[0] != tableEvent || key[cut] != 0 {
		return "", pos{}, fmt.Errorf("%w: event key %x", ErrDamaged, clip(key))
	}
	raw := key[1:cut]
	if bytes.IndexByte(raw, 0) >= 0 || len(raw) > core.MaxIDBytes {
		return "", pos{}, fmt.Errorf("%w: event key %x", ErrDamaged, clip(key))
	}
	return string(raw), decodePos(key[cut+1:]), nil
}

// decodeOutboxKey is the inverse of appendOutboxKey.
func decodeOutboxKey(key []byte) (pos, error) {
	if len(key) != 1+cursorBytes || key[0] != tableOutbox {
		return pos{}, fmt.Errorf("%w: outbox key %x", ErrDamaged, clip(key))
	}
	return decodePos(key[1:]), nil
}

// clip bounds what of a damaged row goes into an error.
func clip(b []byte) []byte { return b[:min(len(b), 64)] }

// rowVersion is the version of the whole layout: keys and values.
const rowVersion = 1

// progress is the row that says how far the tables are. It travels in every
// batch, so tables and progress are never apart.
type progress struct {
	applied uint64 // LSN of the last entry whose rows are in
	outbox  uint64 // outbox rows above trimmed
	trimmed pos    // outbox rows up to here are done with, there or not
}

const progressBytes = 1 + 8 + 8 + cursorBytes

func (p progress) encode(b []byte) {
	b[0] = rowVersion
	binary.BigEndian.PutUint64(b[1:], p.applied)
	binary.BigEndian.PutUint64(b[9:], p.outbox)
	putPos(b[17:], p.trimmed)
}

func decodeProgress(b []byte) (progress, error) {
	if len(b) > 0 && b[0] > rowVersion {
		return progress{}, fmt.Errorf("state: tables have layout %d, this program reads up to %d: use a newer program", b[0], rowVersion)
	}
	if len(b) != progressBytes || b[0] == 0 {
		return progress{}, fmt.Errorf("%w: progress row %x", ErrDamaged, clip(b))
	}
	return progress{
		applied: binary.BigEndian.Uint64(b[1:]),
		outbox:  binary.BigEndian.Uint64(b[9:]),
		trimmed: decodePos(b[17:]),
	}, nil
}

func decodeFlow(row []byte) (*wire.Flow, error) {
	f := &wire.Flow{}
	if err := f.UnmarshalVT(row); err != nil {
		return nil, fmt.Errorf("%w: flow row: %v", ErrDamaged, err)
	}
	return f, nil
}

func decodeEvent(row []byte) (*wire.Event, error) {
	e := &wire.Event{}
	if err := e.UnmarshalVT(row); err != nil {
		return nil, fmt.Errorf("%w: event row: %v", ErrDamaged, err)
	}
	return e, nil
}
