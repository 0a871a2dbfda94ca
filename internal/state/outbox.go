package state

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Outbox calls fn with the events behind (afterLSN, afterN) that were not
// trimmed, in order, at most limit of them (0 or less: all). e is nil when the
// flow was deleted since. An error of fn ends the walk and is returned.
func (d *DB) Outbox(afterLSN uint64, afterN uint32, limit int, fn func(lsn uint64, n uint32, flowID string, e *wire.Event) error) error {
	after := pos{afterLSN, afterN}
	if t := d.trimmed(); after.less(t) {
		after = t
	}
	return d.scanOutbox(after, nil, limit, func(p pos, flowID string) error {
		e, err := get(d, appendEventKey(nil, flowID, p), decodeEvent)
		if err != nil {
			return err
		}
		return fn(p.lsn, p.n, flowID, e)
	})
}

// scanOutbox walks the rows behind after, up to upto when it is not nil.
func (d *DB) scanOutbox(after pos, upto *pos, limit int, fn func(p pos, flowID string) error) error {
	lower, upper := []byte{tableOutbox}, []byte{tableOutbox + 1}
	if after != (pos{}) {
		next, ok := after.next()
		if !ok {
			return nil
		}
		lower = appendOutboxKey(nil, next)
	}
	if upto != nil {
		if next, ok := upto.next(); ok {
			upper = appendOutboxKey(nil, next)
		}
	}
	return d.scan(lower, upper, limit, false, func(key, row []byte) error {
		p, err := decodeOutboxKey(key)
		if err != nil {
			return err
		}
		if len(row) == 0 || len(row) > core.MaxIDBytes {
			return fmt.Errorf("%w: outbox row of %d bytes", ErrDamaged, len(row))
		}
		return fn(p, string(row))
	})
}

// TrimOutbox says that sinks are done with all events up to (lsn, n). The rows
// are gone at once for readers and from the tables with a later commit: after
// a crash sinks may see events again, at least once. It may be called by any
// goroutine; its cost grows with the rows trimmed.
func (d *DB) TrimOutbox(lsn uint64, n uint32) error {
	d.trim.Lock()
	defer d.trim.Unlock()
	d.mu.Lock()
	from, to := d.prog.trimmed, pos{lsn, n}
	if to.lsn > d.prog.applied {
		to = pos{d.prog.applied, ^uint32(0)} // what is not applied cannot be done with
	}
	d.mu.Unlock()
	if !from.less(to) {
		return nil
	}
	// No commit adds rows at or below the applied LSN, so the count holds.
	var rows uint64
	if err := d.scanOutbox(from, &to, 0, func(pos, string) error { rows++; return nil }); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prog.trimmed, d.moved = to, true
	d.prog.outbox -= min(rows, d.prog.outbox)
	d.owed += rows
	return nil
}

// OutboxLen is the number of events that wait for sinks.
func (d *DB) OutboxLen() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return int64(d.prog.outbox)
}

func (d *DB) trimmed() pos {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.prog.trimmed
}
