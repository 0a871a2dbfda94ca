package state

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Flow gives a flow, or nil when there is none. The caller owns it.
func (d *DB) Flow(id string) (*wire.Flow, error) {
	if err := CheckFlowID(id); err != nil {
		return nil, err
	}
	if !d.gate.enter() {
		return nil, ErrClosed
	}
	defer d.gate.leave()
	f, err := get(d, appendIDKey(nil, tableFlow, id), decodeFlow)
	if f == nil || err != nil {
		return nil, err
	}
	return f, d.fill(f)
}

// Meta gives one of the writer's own rows, or nil when there is none.
func (d *DB) Meta(key string) ([]byte, error) {
	if !d.gate.enter() {
		return nil, ErrClosed
	}
	defer d.gate.leave()
	row, err := get(d, append([]byte{tableMeta}, key...), func(v []byte) (*[]byte, error) {
		c := append([]byte{}, v...)
		return &c, nil
	})
	if row == nil {
		return nil, err
	}
	return *row, err
}

// get reads and decodes one row; nil when there is none.
func get[T any](d *DB, key []byte, decode func([]byte) (*T, error)) (*T, error) {
	row, closer, err := d.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, d.readError(err)
	}
	defer closer.Close()
	v, err := decode(row)
	if err != nil {
		return nil, d.readError(err)
	}
	return v, nil
}

// Events calls fn with the events of a flow behind (afterLSN, afterN), in
// order, at most limit of them (0 or less: all). (0, 0) is before the first.
// An error of fn ends the walk and is returned. fn owns the event.
func (d *DB) Events(flowID string, afterLSN uint64, afterN uint32, limit int, fn func(*wire.Event) error) error {
	if err := CheckFlowID(flowID); err != nil {
		return err
	}
	lower := appendEventsKey(nil, flowID)
	if after := (pos{afterLSN, afterN}); after != (pos{}) {
		next, ok := after.next()
		if !ok {
			return nil
		}
		lower = appendPos(lower, next)
	}
	return d.scan(lower, afterEvents(nil, flowID), limit, false, eventRow(fn))
}

// EventsBefore calls fn with the events of a flow before (lsn, n), the newest
// first, at most limit of them (0 or less: all). (0, 0) begins at the newest.
func (d *DB) EventsBefore(flowID string, lsn uint64, n uint32, limit int, fn func(*wire.Event) error) error {
	if err := CheckFlowID(flowID); err != nil {
		return err
	}
	upper := afterEvents(nil, flowID)
	if before := (pos{lsn, n}); before != (pos{}) {
		upper = appendEventKey(nil, flowID, before)
	}
	return d.scan(appendEventsKey(nil, flowID), upper, limit, true, eventRow(fn))
}

func eventRow(fn func(*wire.Event) error) func(key, row []byte) error {
	return func(_, row []byte) error {
		e, err := decodeEvent(row)
		if err != nil {
			return err
		}
		return fn(e)
	}
}

// Flows calls fn with the flows whose ID begins with prefix, in order of ID or
// against it, at most limit of them (0 or less: all). A page begins behind
// after, the last ID of the page before; empty = the first page.
func (d *DB) Flows(prefix, after string, limit int, desc bool, fn func(*wire.Flow) error) error {
	lower := appendIDKey(nil, tableFlow, prefix)
	upper := prefixEnd(appendIDKey(nil, tableFlow, prefix))
	if after != "" {
		at := appendIDKey(nil, tableFlow, after)
		if desc && string(at) < string(upper) {
			upper = at
		}
		if next := append(at[:len(at):len(at)], 0); !desc && string(next) > string(lower) {
			lower = next
		}
	}
	if string(lower) >= string(upper) {
		return nil
	}
	return d.scan(lower, upper, limit, desc, func(_, row []byte) error {
		f, err := decodeFlow(row)
		if err != nil {
			return err
		}
		if err := d.fill(f); err != nil {
			return err
		}
		return fn(f)
	})
}

// OpenFlows calls fn with the flows that have outstanding effects, in order of
// ID, at a cost that grows with these and not with all flows. Large values of
// attributes are left out (the attribute has their size), and idempotency keys.
func (d *DB) OpenFlows(fn func(*wire.Flow) error) error {
	return d.scan([]byte{tableOpen}, []byte{tableOpen + 1}, 0, false, func(key, _ []byte) error {
		f, err := get(d, appendIDKey(nil, tableFlow, string(key[1:])), decodeFlow)
		if err != nil {
			return err
		}
		if f == nil {
			return fmt.Errorf("%w: open flow %q has no row", ErrDamaged, key[1:])
		}
		return fn(f)
	})
}

// scan walks the rows in [lower, upper).
func (d *DB) scan(lower, upper []byte, limit int, desc bool, fn func(key, row []byte) error) (err error) {
	if !d.gate.enter() {
		return ErrClosed
	}
	defer d.gate.leave()
	it, err := d.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return d.readError(err)
	}
	defer func() {
		if cerr := it.Close(); err == nil && cerr != nil {
			err = d.readError(cerr)
		}
	}()
	first, next := it.First, it.Next
	if desc {
		first, next = it.Last, it.Prev
	}
	for ok, n := first(), 0; ok && (limit <= 0 || n < limit); ok, n = next(), n+1 {
		row, err := it.ValueAndErr()
		if err != nil {
			return d.readError(err)
		}
		if err := fn(it.Key(), row); err != nil {
			return d.readError(err)
		}
	}
	return nil
}

// readError names the folder in errors of damage; others pass as they are.
func (d *DB) readError(err error) error {
	switch {
	case errors.Is(err, ErrDamaged):
		return fmt.Errorf("state: tables in %q: %w", d.dir, err)
	case pebble.IsCorruptionError(err):
		return fmt.Errorf("state: tables in %q: %w: %w", d.dir, ErrDamaged, err)
	}
	return err
}

// Hash is a hash over all flows and events in key order. It depends on these
// rows alone: not on flushes and compactions, not on derived rows.
func (d *DB) Hash() (uint64, error) {
	h := xxhash.New()
	var size [16]byte
	add := func(key, row []byte) error {
		binary.BigEndian.PutUint64(size[:8], uint64(len(key)))
		binary.BigEndian.PutUint64(size[8:], uint64(len(row)))
		_, _ = h.Write(size[:]) // a hash never fails
		_, _ = h.Write(key)
		_, _ = h.Write(row)
		if key[0] == tableFlow {
			return d.hashParts(h, row)
		}
		return nil
	}
	for _, table := range []byte{tableEvent, tableFlow} {
		if err := d.scan([]byte{table}, []byte{table + 1}, 0, false, add); err != nil {
			return 0, err
		}
	}
	return h.Sum64(), nil
}
