package server

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
)

// Upkeep of a partition: when the journal has grown or aged, the tables are
// flushed, a snapshot is taken and verified, and the journal is trimmed up to
// what both hold.
const (
	upkeepEvery  = 10 * time.Second // at most between two looks
	sweepEvery   = time.Hour        // blobs that no flow names any more
	releaseEvery = 5 * time.Second

	trimCollections = 5 // of a small heap: some ms each
)

func snapshotPrefix(id int) string { return fmt.Sprintf("p%03d/snapshot", id) }

func (s *Server) startUpkeep(ctx context.Context) {
	for _, p := range s.parts {
		s.upkeep.Add(1)
		go func() {
			defer s.upkeep.Done()
			s.maintain(ctx, p)
		}()
	}
	works := []func(context.Context){s.releaseMemory, s.sweepBlobs, s.rememberTypes}
	if s.objects != nil {
		works = append(works, s.sweepLeases)
	}
	for _, work := range works {
		s.upkeep.Add(1)
		go func() {
			defer s.upkeep.Done()
			work(ctx)
		}()
	}
}

// sweepBlobs deletes large values that nothing names any more.
func (s *Server) sweepBlobs(ctx context.Context) {
	for s.wait(ctx, sweepEvery) {
		n, err := s.flows.Sweep(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			s.log.Error("large values could not be swept; the next try is in an hour", "error", err)
		case n > 0:
			s.log.Info("swept large values that no flow names", "deleted", n)
		}
	}
}

// wait sleeps for d and reports whether ctx is still on.
func (s *Server) wait(ctx context.Context, d time.Duration) bool {
	tick := make(chan struct{})
	t := s.env.Clock.AfterFunc(d, func() { close(tick) })
	defer t.Stop()
	select {
	case <-tick:
		return true
	case <-ctx.Done():
		return false
	}
}

func (s *Server) maintain(ctx context.Context, p *part) {
	last := s.env.Clock.Now()
	trimmed := p.tables.FlushedLSN()
	c := s.cfg.Journal
	if inMemory(s.cfg) {
		c.SnapshotBytes = min(c.SnapshotBytes, memoryBytes)
	}
	for s.wait(ctx, min(upkeepEvery, c.SnapshotEvery)) {
		age := s.env.Clock.Now().Sub(last)
		if p.tables.AppliedLSN() == trimmed || p.log.Size() < int64(c.SnapshotBytes) && age < c.SnapshotEvery {
			continue
		}
		lsn, err := s.snapshot(ctx, p)
		if errors.Is(err, journal.ErrStale) {
			s.onLost(err) // it would never be able to trim again
			return
		}
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				s.log.Error("snapshot failed; the journal is kept", "partition", p.id, "error", err)
			}
			continue
		}
		trimmed, last = lsn, s.env.Clock.Now()
	}
}

// snapshot takes one and trims the journal up to it.
func (s *Server) snapshot(ctx context.Context, p *part) (uint64, error) {
	if err := p.tables.Flush(); err != nil {
		return 0, fmt.Errorf("flush tables: %w", err)
	}
	upTo := p.tables.FlushedLSN()
	if !inMemory(s.cfg) {
		m, err := p.tables.Snapshot(ctx, s.store, snapshotPrefix(p.id), s.snapshotOptions(p))
		if err != nil {
			return 0, err
		}
		upTo = min(upTo, m.AppliedLSN)
	}
	if s.objects != nil {
		return upTo, p.log.Trim(upTo)
	}
	var trimErr error
	if err := p.runner.OnLog(ctx, func() { trimErr = p.log.Trim(upTo) }); err != nil {
		return upTo, err // the trim may still be under way: its error is not ours to read
	}
	return upTo, trimErr
}

func (s *Server) snapshotOptions(p *part) state.SnapshotOptions {
	o := state.SnapshotOptions{Epoch: p.epoch()}
	if s.objects != nil {
		o.Valid = s.objects.valid
	}
	return o
}

// releaseMemory gives memory back to the system once, each time the server has
// gone quiet after work: sessions have left memory and nothing is written. The
// tables shrink their memtables, idle connections, the block cache and the
// code of busy times are dropped; the runtime alone would keep all of it for
// minutes, and the tables for ever.
func (s *Server) releaseMemory(ctx context.Context) {
	var last, released uint64 // sums of applied LSNs
	for s.wait(ctx, releaseEvery) {
		applied := uint64(0)
		for _, p := range s.parts {
			applied += p.tables.AppliedLSN()
		}
		quiet := applied == last && s.pool.Running() == 0
		last = applied
		if !quiet || applied == released || s.hotFlows(ctx) > 0 {
			continue
		}
		for _, p := range s.providers {
			if idle, ok := p.Provider.(interface{ DropIdle() }); ok {
				idle.DropIdle()
			}
		}
		s.tools.Close() // idle connections; calls dial anew
		s.shared.Drop()
		trimRuntime() // first, or the tables are spread over what the burst leaves
		for _, p := range s.parts {
			if _, err := p.tables.Shrink(); err != nil {
				s.log.Warn("tables kept their memory", "partition", p.id, "error", err)
			}
		}
		trimRuntime()
		env.DropCode()
		released = applied
	}
}

// trimRuntime makes the runtime give back what it keeps for the next burst.
// Each scheduler slot keeps 64 dead goroutines with their stacks and a span of
// every size class; only giving the slot up frees those. sync.Pool gives its
// memory up in the second collection, and each halves stacks that are too large.
func trimRuntime() {
	procs := runtime.GOMAXPROCS(1)
	for range trimCollections {
		runtime.GC()
	}
	debug.FreeOSMemory()
	runtime.GOMAXPROCS(procs)
}

func (s *Server) hotFlows(ctx context.Context) int {
	n := 0
	for _, r := range s.set {
		_ = r.Do(ctx, func(m *partition.Machine) { n += m.HotFlows() }) // only fails at the end
	}
	return n
}
