package state

import (
	"context"
	"fmt"
	"time"
)

// Metrics is what the tables cost and do. Counters run since Open.
type Metrics struct {
	Flushes          int64
	Compactions      int64
	FlushedBytes     uint64 // written to table files by flushes
	CompactedBytes   uint64 // written to table files by compactions
	CompactionTime   time.Duration
	CompactionDebt   uint64 // bytes to compact until at rest, an estimate
	WriteStalls      int64
	BackgroundErrors int64
	MemTableBytes    uint64
	DiskBytes        uint64
	TableFiles       int64
	L0Files          int64
	L0Sublevels      int32
	CacheBytes       int64 // of the shared block cache
	CacheHits        int64
	CacheMisses      int64
	OutboxRows       int64
}

// Metrics gives the present figures; zero when closed.
func (d *DB) Metrics() Metrics {
	if !d.gate.enter() {
		return Metrics{}
	}
	defer d.gate.leave()
	m := d.metrics()
	m.OutboxRows = d.OutboxLen()
	return m
}

func (d *DB) metrics() Metrics {
	p := d.db.Metrics()
	m := Metrics{
		Flushes: p.Flush.Count, Compactions: p.Compact.Count,
		CompactionTime: p.Compact.Duration, CompactionDebt: p.Compact.EstimatedDebt,
		WriteStalls: d.stalls.Load(), BackgroundErrors: d.failed.Load(),
		MemTableBytes: p.MemTable.Size, DiskBytes: p.DiskSpaceUsage(),
		L0Files: p.Levels[0].TablesCount, L0Sublevels: p.Levels[0].Sublevels,
		CacheBytes: p.BlockCache.Size, CacheHits: p.BlockCache.Hits, CacheMisses: p.BlockCache.Misses,
	}
	for i := range p.Levels {
		m.FlushedBytes += p.Levels[i].TableBytesFlushed
		m.CompactedBytes += p.Levels[i].TableBytesCompacted
		m.TableFiles += p.Levels[i].TablesCount
	}
	m.Flushes += d.former.Flushes
	m.Compactions += d.former.Compactions
	m.FlushedBytes += d.former.FlushedBytes
	m.CompactedBytes += d.former.CompactedBytes
	m.CompactionTime += d.former.CompactionTime
	return m
}

// Compact merges all table files, for the simulator and for tests.
func (d *DB) Compact(ctx context.Context) error {
	if !d.gate.enter() {
		return ErrClosed
	}
	defer d.gate.leave()
	if err := d.db.Compact(ctx, []byte{tablePart}, []byte{tableProgress + 1}, false); err != nil {
		return fmt.Errorf("state: compact tables in %q: %w", d.dir, err)
	}
	return nil
}
