package state

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Shrink gives memory back after a busy time: Pebble keeps memtables at the
// size they grew to, and only opening anew begins small again. It flushes and
// opens the tables again, some 10 ms in which calls wait. It does nothing and
// gives false when the memtable is small still, or the tables are in use just
// now. After an error the tables are closed, and Open tells what is wrong.
func (d *DB) Shrink() (bool, error) {
	if !d.gate.enter() {
		return false, ErrClosed
	}
	small := d.db.Metrics().MemTable.Size <= initialMemTable
	d.gate.leave()
	if small {
		return false, nil
	}
	if err := d.Flush(); err != nil {
		return false, err
	}
	if !d.gate.pause() {
		return false, nil
	}
	dead := false
	defer func() { d.gate.resume(dead) }()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.quiet() {
		return false, nil
	}
	if err := d.reopen(); err != nil {
		dead = true
		d.release()
		return false, d.openError(err)
	}
	return true, nil
}

// initialMemTable is the size Pebble begins with when there are tables already.
const initialMemTable = 512 << 10

// quiet reports whether nothing came behind the flush: all is in table files.
func (d *DB) quiet() bool {
	if d.moved {
		return false
	}
	p, err := d.durableProgress()
	return err == nil && p == d.prog
}

func (d *DB) reopen() error {
	former := d.metrics()
	if err := d.db.Close(); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	db, err := pebble.Open(d.dir, d.pebbleOptions())
	if err != nil {
		return err
	}
	d.db, d.used, d.former = db, 0, former
	return nil
}
