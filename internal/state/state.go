// Package state holds the ordered tables of one partition: flows, their
// events, the writer's own small rows and the outbox of sinks.
//
// The tables have no write-ahead log, since the journal is one. Each batch
// carries the LSN it brings the tables to, and Pebble flushes in order, so
// after a crash the tables are a prefix of the journal: replay goes on behind
// AppliedLSN. The journal may be trimmed up to FlushedLSN.
//
// One goroutine writes; any number may read at the same time.
package state

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/perdure-dev/perdure/internal/env"
)

// ErrDamaged says that files or rows cannot be read. The tables can be had
// again from a snapshot and the journal behind it; see Restore.
var ErrDamaged = errors.New("tables are damaged")

// ErrClosed says that the tables were closed.
var ErrClosed = errors.New("state: closed")

// DB is the tables of one partition.
type DB struct {
	dir    string
	o      Options
	db     *pebble.DB
	shared *Shared
	own    bool // shared was made by Open
	gate   gate
	stalls atomic.Int64
	former Metrics      // counters of before Shrink; changed while no call runs
	failed atomic.Int64 // background errors

	trouble trouble

	mu      sync.Mutex // serialises commits; guards the fields below
	prog    progress   // what the newest progress row says
	wiped   pos        // outbox rows up to here were range-deleted
	owed    uint64     // rows between wiped and prog.trimmed
	moved   bool       // prog.trimmed is ahead of the newest progress row
	known   map[string]bool
	indexed indexed
	used    int64 // Manual: estimate of bytes in the memtable

	trim sync.Mutex // serialises TrimOutbox

	flushed struct {
		stale atomic.Bool // a flush ended since lsn was read
		sync.Mutex
		lsn uint64
	}

	snap snapshotter
}

// Open opens or creates the tables in dir. One process may have them open. An
// error that is ErrDamaged names dir and can be answered with Restore.
func Open(dir string, o Options) (*DB, error) {
	if o.FS == nil {
		return nil, errors.New("state: Options.FS is missing")
	}
	d := &DB{dir: dir, o: o, known: map[string]bool{}, indexed: indexed{}, shared: o.Shared}
	if d.shared == nil {
		d.shared, d.own = NewShared(o.CacheBytes, 0), true
	}
	if err := o.FS.RemoveAll(checkpointDir(dir)); err != nil {
		return nil, fmt.Errorf("state: remove what a crashed snapshot left: %w", err)
	}
	db, err := pebble.Open(dir, d.pebbleOptions())
	if err != nil {
		d.release()
		return nil, d.openError(err)
	}
	d.db = db
	d.gate.init()
	err = d.load()
	if err == nil {
		err = d.buildIndex()
	}
	if err != nil {
		_ = db.Close()
		d.release()
		return nil, d.openError(err)
	}
	return d, nil
}

// load reads the progress; what is in the tables now is in table files.
func (d *DB) load() error {
	row, closer, err := d.db.Get([]byte{tableProgress})
	if errors.Is(err, pebble.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer closer.Close()
	if d.prog, err = decodeProgress(row); err != nil {
		return err
	}
	d.flushed.lsn = d.prog.applied
	return nil
}

// openError tells damage from the other reasons why a folder does not open.
func (d *DB) openError(err error) error {
	damaged := errors.Is(err, ErrDamaged) || pebble.IsCorruptionError(err) || missingFile(d.o.FS, d.dir, err) ||
		strings.Contains(err.Error(), "object size mismatch") // Pebble gives a cut table file no mark
	if !damaged {
		return fmt.Errorf("state: open tables in %q: %w", d.dir, err)
	}
	return fmt.Errorf("state: open tables in %q: %w (%w); move the folder away, restore it from the newest snapshot, and the journal is replayed behind it", d.dir, ErrDamaged, err)
}

// missingFile says whether a folder that has files lacks one it must have.
func missingFile(fs env.FS, dir string, err error) bool {
	if !errors.Is(err, errNotExist) {
		return false
	}
	names, lerr := fs.List(dir)
	return lerr == nil && len(names) > 0
}

// Close ends all use of the tables. Calls that run are waited for; it must not
// be called from within a callback. It does not flush: rows that are not in
// table files yet come back by replay, which a Flush before Close spares.
func (d *DB) Close() error {
	if !d.gate.close() {
		return ErrClosed
	}
	err := d.db.Close()
	d.release()
	return err
}

func (d *DB) release() {
	if d.own {
		d.shared.Close()
	}
}

// AppliedLSN is the LSN of the last entry whose rows were written; they may
// still be in memory. 0 = none.
func (d *DB) AppliedLSN() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.prog.applied
}

// FlushedLSN is the LSN up to which all rows are durable in table files,
// flushes by Pebble itself included. It never goes back.
func (d *DB) FlushedLSN() uint64 {
	d.flushed.Lock()
	defer d.flushed.Unlock()
	if !d.flushed.stale.Swap(false) {
		return d.flushed.lsn
	}
	lsn, err := d.readFlushedLSN()
	if err != nil {
		d.flushed.stale.Store(true) // a lower bound is right, only late
		return d.flushed.lsn
	}
	d.flushed.lsn = max(d.flushed.lsn, lsn)
	return d.flushed.lsn
}

func (d *DB) readFlushedLSN() (uint64, error) {
	if !d.gate.enter() {
		return 0, ErrClosed
	}
	defer d.gate.leave()
	p, err := d.durableProgress()
	return p.applied, err
}

// durableProgress reads the progress row past the memtables: flushes are in
// order and of whole batches, so it says what the table files hold.
func (d *DB) durableProgress() (p progress, err error) {
	it, err := d.db.NewIter(&pebble.IterOptions{
		LowerBound: []byte{tableProgress}, UpperBound: []byte{tableProgress + 1},
		OnlyReadGuaranteedDurable: true,
	})
	if err != nil {
		return progress{}, err
	}
	defer it.Close()
	if !it.First() {
		return progress{}, it.Error()
	}
	row, err := it.ValueAndErr()
	if err != nil {
		return progress{}, err
	}
	return decodeProgress(row)
}

// Flush writes all rows to table files and waits until they are durable. Other
// than in manual mode, commits go on meanwhile.
func (d *DB) Flush() error {
	if !d.gate.enter() {
		return ErrClosed
	}
	defer d.gate.leave()
	d.mu.Lock()
	if err := d.saveTrim(); err != nil {
		d.mu.Unlock()
		return err
	}
	if d.o.Manual {
		defer d.mu.Unlock()
		return d.flushLocked()
	}
	d.mu.Unlock()
	return d.flush()
}

// saveTrim writes the progress row for a trim that no commit carried yet, so
// that an orderly stop does not show sinks events again.
func (d *DB) saveTrim() error {
	if !d.moved {
		return nil
	}
	b := d.NewBatch()
	defer b.Close()
	if b.writeProgress(d.prog); b.err != nil {
		return b.err
	}
	if err := d.apply(&b.b); err != nil {
		return err
	}
	d.moved = false
	return nil
}

func (d *DB) flushLocked() error {
	d.used = 0
	return d.flush()
}

func (d *DB) flush() error {
	fail := d.trouble.next()
	done, err := d.db.AsyncFlush()
	if err == nil {
		select {
		case <-done:
			return nil
		case <-fail:
		}
		select {
		case <-done: // all the same
			return nil
		default:
		}
		if err = d.trouble.get(); err == nil {
			err = errors.New("background work failed")
		}
	}
	return fmt.Errorf("state: flush tables in %q: %w", d.dir, err)
}
