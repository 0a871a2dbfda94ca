package state

import (
	"fmt"
	"path/filepath"
	"runtime"

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

// initialMemTable is the size Pebble begins with.
const initialMemTable = 256 << 10

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
	if err := d.dropLogs(); err != nil {
		return err
	}
	d.db, d.known = nil, map[string]bool{}
	runtime.GC() // or the new tables take new memory, while the old ones' stays in use in part
	db, err := pebble.Open(d.dir, d.pebbleOptions())
	if err != nil {
		return err
	}
	d.db, d.used, d.former = db, 0, former
	return nil
}

// dropLogs removes Pebble's write-ahead logs of closed tables. They are empty,
// since none is written, but while there is one Pebble takes up a memtable for
// its replay, keeps that one in reserve, and begins with another of twice the
// size.
func (d *DB) dropLogs() error {
	names, err := d.o.FS.List(d.dir)
	if err != nil {
		return fmt.Errorf("list %q: %w", d.dir, err)
	}
	for _, name := range names {
		if filepath.Ext(name) != ".log" {
			continue
		}
		if err := d.o.FS.Remove(filepath.Join(d.dir, name)); err != nil {
			return fmt.Errorf("remove an empty log: %w", err)
		}
	}
	return nil
}
