package state

import (
	"fmt"
	"io/fs"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/perdure-dev/perdure/internal/env"
)

// Defaults of Options.
const (
	DefaultCacheBytes    = 16 << 20 // memtables count against it: with 8 MiB four partitions leave no room for blocks
	DefaultMemTableBytes = 1 << 20
	defaultOpenFiles     = 256
)

// Options configures one DB.
type Options struct {
	FS env.FS // required

	// Shared caches of several DBs. Nil: the DB has its own, of CacheBytes.
	Shared     *Shared
	CacheBytes int64 // block cache when Shared is nil; default DefaultCacheBytes

	// MemTableBytes is the size at which rows go from memory to a table file;
	// default DefaultMemTableBytes. Pebble begins with 256 KiB and doubles up.
	MemTableBytes int64

	// Outbox keeps a row per event for sinks, until TrimOutbox.
	Outbox bool

	// Manual starts nothing in the background by itself: no compactions, no
	// table statistics, and a full memtable is flushed by the commit that
	// fills it, before it returns. Flush and Compact drive the rest.
	Manual bool

	// Log gets what Pebble has to say; nil drops it. It may be called from
	// any goroutine and must not call the DB.
	Log func(level Level, message string)
}

// Level is the weight of a log message.
type Level uint8

// The levels. After Fatal the program panics: Pebble cannot go on, and a
// restart recovers from table files and journal.
const (
	Info Level = iota
	Error
	Fatal
)

// Shared is memory that several DBs of one process share: the block cache and
// the open table files.
type Shared struct {
	cache *pebble.Cache
	files *pebble.FileCache
}

// NewShared makes the caches: cacheBytes of blocks and memtables together, and
// at most openFiles open table files. 0 = the default of each.
func NewShared(cacheBytes int64, openFiles int) *Shared {
	if cacheBytes <= 0 {
		cacheBytes = DefaultCacheBytes
	}
	if openFiles <= 0 {
		openFiles = defaultOpenFiles
	}
	return &Shared{cache: pebble.NewCache(cacheBytes), files: pebble.NewFileCache(1, openFiles)}
}

// Close gives the caches up once no DB uses them any more.
func (s *Shared) Close() {
	s.files.Unref()
	s.cache.Unref()
}

// Drop empties the block cache, to give memory back after a busy time.
func (s *Shared) Drop() { s.cache.Reserve(int(s.cache.MaxSize()))() }

const (
	compactL0          = 16 // L0 sublevels; keys come in no order, so each compaction rewrites most of the level below
	stopWritesL0       = 64 // L0 sublevels; each costs reads, a stalled writer costs more
	stopWritesMemTable = 6
	manualStopWrites   = 1000
	tableBytesL0       = 2 << 20
	tableBytes         = 16 << 20 // a snapshot reads a table file whole
)

func (d *DB) pebbleOptions() *pebble.Options {
	size := d.o.MemTableBytes
	if size <= 0 {
		size = DefaultMemTableBytes
	}
	po := &pebble.Options{
		FS: d.o.FS, Cache: d.shared.cache, FileCache: d.shared.files,
		DisableWAL:                  true,
		FormatMajorVersion:          pebble.FormatTableFormatV6, // fixed: a change is an upgrade to plan
		MemTableSize:                uint64(size),
		MemTableStopWritesThreshold: stopWritesMemTable,
		L0StopWritesThreshold:       stopWritesL0,
		L0CompactionThreshold:       compactL0,
		CompactionConcurrencyRange:  func() (int, int) { return 1, 1 },
		MaxManifestFileSize:         1 << 20,
		DisableAutomaticCompactions: d.o.Manual,
		DisableTableStats:           d.o.Manual,
		Logger:                      (*logger)(d),
		EventListener:               d.listener(),
	}
	for i := range po.TargetFileSizes {
		po.TargetFileSizes[i] = min(int64(tableBytesL0)<<i, tableBytes)
	}
	po.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionFastest })
	for i := range po.Levels {
		po.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	if d.o.Manual {
		po.L0StopWritesThreshold = manualStopWrites
		po.MemTableStopWritesThreshold = manualStopWrites
	}
	// With one compaction at a time nothing waits for a grant but behind a
	// running one, whose end grants. The default scheduler also wakes ten
	// times a second for each DB, for nothing.
	po.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	return po
}

func (d *DB) listener() *pebble.EventListener {
	return &pebble.EventListener{
		FlushEnd: func(i pebble.FlushInfo) {
			d.flushed.stale.Store(true)
			if i.Err == nil {
				d.trouble.clear()
			}
		},
		WriteStallBegin: func(pebble.WriteStallBeginInfo) { d.stalls.Add(1) },
		BackgroundError: func(err error) {
			d.failed.Add(1)
			if d.trouble.set(err) { // the first of a row; Pebble tries again at once
				d.log(Error, fmt.Sprintf("tables in %q: background work failed: %v", d.dir, err))
			}
		},
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			d.failed.Add(1)
			d.log(Error, fmt.Sprintf("tables in %q: damaged file %s: %v", d.dir, i.Path, i.Details))
		},
	}
}

// trouble is the newest error of background work, until a flush succeeds.
// Pebble tries a failed flush again for ever and lets writers wait meanwhile;
// with this they get an answer.
type trouble struct {
	mu   sync.Mutex
	err  error
	fail chan struct{} // closed by the next error
}

// set reports whether there was no trouble before.
func (t *trouble) set(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := t.err == nil
	t.err = err
	if t.fail != nil {
		close(t.fail)
		t.fail = nil
	}
	return first
}

func (t *trouble) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = nil
}

func (t *trouble) get() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// next is closed by an error that comes after this call.
func (t *trouble) next() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.fail == nil {
		t.fail = make(chan struct{})
	}
	return t.fail
}

func (d *DB) log(l Level, message string) {
	if d.o.Log != nil {
		d.o.Log(l, message)
	}
}

// logger is Pebble's view of Options.Log.
type logger DB

func (l *logger) Infof(format string, args ...any) { (*DB)(l).log(Info, fmt.Sprintf(format, args...)) }
func (l *logger) Errorf(format string, args ...any) {
	(*DB)(l).log(Error, fmt.Sprintf(format, args...))
}

// Fatalf must not return: Pebble calls it when it cannot write its manifest
// any more, and what it would do next is not defined.
func (l *logger) Fatalf(format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	(*DB)(l).log(Fatal, message)
	panic("state: tables in " + l.dir + ": " + message)
}

var errNotExist = fs.ErrNotExist

var batchPool = sync.Pool{New: func() any { return new(Batch) }}
