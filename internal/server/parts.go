package server

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// part is one partition and what it stands on.
type part struct {
	id     int
	tables *state.DB
	log    journalLog
	owned  *cluster.Owned
	runner *partition.Runner
	behind *behind // of a standby; nil when nothing was followed
	// followed is the newest entry that a standby has in its tables.
	followed atomic.Uint64
}

// journalLog is a partition's journal as the server keeps it, near or far.
type journalLog interface {
	partition.Journal
	// Trim gives up what is not needed above an LSN.
	Trim(upTo uint64) error
	// Size is in bytes.
	Size() int64
	Close() error
}

// logPrefix is where the journal of a partition is in an object store.
func logPrefix(id int) string { return fmt.Sprintf("p%03d", id) }

func (p *part) epoch() uint64 { return p.owned.Manifest().Epoch }

func (p *part) tablesDir(s *Server) string {
	return filepath.Join(s.dir, fmt.Sprintf("p%03d", p.id), "tables")
}

// recoverGC is the collector's pace while journals are replayed: most of what that
// allocates is garbage at once.
const recoverGC = 400

func (s *Server) openPartitions(ctx context.Context) error {
	defer debug.SetGCPercent(debug.SetGCPercent(recoverGC))
	machines := make([]*partition.Machine, len(s.parts))
	var g errgroup.Group
	g.SetLimit(4)
	for i := range s.parts {
		g.Go(func() (err error) {
			machines[i], err = s.openPartition(ctx, s.parts[i])
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := s.openSinks(); err != nil {
		return err
	}
	for i, p := range s.parts {
		if err := p.tables.OpenFlows(func(f *wire.Flow) error { s.sessions.Recover(f); return nil }); err != nil {
			return fmt.Errorf("partition %d: read open flows: %w", p.id, err)
		}
		p.runner = partition.Start(machines[i], s.onLost)
		s.set = append(s.set, p.runner)
	}
	s.sessions.Bind(s.set)
	s.bindFlows()
	s.api = s.newAPI()
	if err := s.sessions.LoadAgents(s.tenants(), func(tenant, name string, err error) {
		s.log.Warn("agent left out", "tenant", tenant, "agent", name, "error", err)
	}); err != nil {
		return err
	}
	s.pool.Bind(s.set)
	if s.objects != nil {
		go s.watchTerm() // ends with the term
	}
	ctx, s.stopUpkeep = context.WithCancel(context.Background())
	s.startUpkeep(ctx)
	return nil
}

// makeParts names the partitions; none is open yet.
func (s *Server) makeParts() {
	s.shared = state.NewShared(int64(s.cfg.State.CacheBytes), 0)
	s.parts = make([]*part, s.cfg.Kernel.Partitions)
	for i := range s.parts {
		s.parts[i] = &part{id: i}
	}
}

func (s *Server) openPartition(ctx context.Context, p *part) (*partition.Machine, error) {
	nonce := s.env.Rand.Uint64()
	var err error
	if p.owned, err = cluster.Take(ctx, s.store, p.id, s.claim()); err != nil {
		return nil, err
	}
	follower, err := s.tablesFor(ctx, p)
	if err != nil {
		return nil, err
	}
	if p.log, err = s.openLog(ctx, p, nonce); err != nil {
		return nil, fmt.Errorf("partition %d: %w", p.id, err)
	}
	cfg := s.partitionConfig(p)
	cfg.Epoch, cfg.Nonce, cfg.Log = p.epoch(), nonce, p.log
	cfg.Executor, cfg.Observer, cfg.Outbox = executor{s.pool, s.dispatch}, observer{s}, s.courier
	if s.objects != nil {
		cfg.Valid = s.objects.valid
	}
	m, rec, err := follower.TakeOver(cfg)
	if err == nil && (rec.Entries > 0 || rec.Redispatched > 0) {
		s.log.Info("partition recovered", "partition", p.id, "epoch", cfg.Epoch, "entries", rec.Entries, "open_flows", rec.OpenFlows,
			"resumed_steps", rec.Redispatched, "timers", rec.Timers)
	}
	return m, err
}

// partitionConfig is what does not depend on who owns the partition.
func (s *Server) partitionConfig(p *part) partition.Config {
	return partition.Config{
		ID: p.id, Env: s.env, Tables: p.tables, MaxBatchBytes: int(s.cfg.Journal.MaxBatchBytes),
		MaxHotFlows: max(s.cfg.Kernel.MaxSessionsInMemory/len(s.parts), 16),
		MaxHotBytes: int(s.cfg.Kernel.MaxSessionBytes) / len(s.parts),
		IdleUs:      int64(s.cfg.Kernel.SessionTTLSecs) * 1_000_000,
	}
}

// openTables opens the tables as they are here, or brings the newest snapshot
// back when they are gone or end before the journal begins.
func (s *Server) openTables(ctx context.Context, p *part, headLSN uint64) error {
	dir := p.tablesDir(s)
	if err := makeDir(s.env.FS, s.env.FS.PathDir(dir)); err != nil {
		return fmt.Errorf("partition %d: %w", p.id, err)
	}
	if err := s.restoreIfMissing(ctx, p.id, dir); err != nil {
		return err
	}
	if err := s.openTablesHere(p, dir); err != nil || s.objects == nil || p.tables.AppliedLSN()+1 >= headLSN {
		return err
	}
	// Left behind by a life in which another process went on. The journal from
	// there on is trimmed.
	s.log.Info("tables are older than the journal and are replaced by a snapshot", "partition", p.id, "applied_lsn", p.tables.AppliedLSN(), "journal_begins", headLSN)
	if err := s.dropTables(p); err != nil {
		return err
	}
	if err := s.restoreIfMissing(ctx, p.id, dir); err != nil {
		return err
	}
	return s.openTablesHere(p, dir)
}

func (s *Server) openTablesHere(p *part, dir string) error {
	var err error
	p.tables, err = state.Open(dir, state.Options{
		FS: s.env.FS, Shared: s.shared, MemTableBytes: int64(s.cfg.State.MemtableBytes), Outbox: !inMemory(s.cfg),
		Log: func(l state.Level, msg string) {
			if l != state.Info {
				s.log.Error("tables", "partition", p.id, "message", msg)
			}
		}})
	if err != nil {
		return fmt.Errorf("partition %d: %w", p.id, err)
	}
	return nil
}

// tablesFor gives the tables of a partition that this process owns now, as a
// standby has kept them or as they are found.
func (s *Server) tablesFor(ctx context.Context, p *part) (*partition.Follower, error) {
	head := p.owned.Manifest().HeadLSN
	if p.behind != nil && p.behind.tables.NextLSN() >= head {
		return p.behind.tables, nil
	}
	if p.tables != nil { // opened, and never followed, or too far behind
		if err := p.tables.Close(); err != nil {
			return nil, fmt.Errorf("partition %d: close tables: %w", p.id, err)
		}
		p.tables, p.behind = nil, nil
	}
	if err := s.openTables(ctx, p, head); err != nil {
		return nil, err
	}
	return partition.Follow(s.partitionConfig(p)), nil
}

// openLog opens the journal of a partition that this process owns.
func (s *Server) openLog(ctx context.Context, p *part, nonce uint64) (journalLog, error) {
	if s.objects != nil {
		return s.openObjectLog(ctx, p, nonce)
	}
	opts := journal.Options{SegmentSize: int64(s.cfg.Journal.SegmentBytes), Rand: s.env.Rand, Go: func(f func()) { go f() }}
	if d := s.cfg.Journal.AddedLatency; d > 0 {
		wait, around := blob.SleepBy(s.env.Clock), blob.Around(d)
		opts.AddedLatency = func() { _ = wait(context.Background(), around.Draw(s.env.Rand)) } // only the context's end is an error
	}
	return journal.Open(s.env.FS, filepath.Join(s.dir, fmt.Sprintf("p%03d", p.id), "journal"), opts)
}

// restoreIfMissing brings the newest snapshot back when the tables are gone.
func (s *Server) restoreIfMissing(ctx context.Context, id int, dir string) error {
	if _, err := s.env.FS.Stat(dir); err == nil {
		return nil
	}
	m, err := state.Restore(ctx, s.store, snapshotPrefix(id), s.env.FS, dir)
	if errors.Is(err, state.ErrNoSnapshot) {
		return nil // a new partition, or one whose first snapshot was not finished: the journal has all
	}
	if err != nil {
		return fmt.Errorf("partition %d: restore tables from the newest snapshot: %w", id, err)
	}
	if s.objects == nil {
		s.log.Warn("tables were missing and came back from a snapshot", "partition", id, "applied_lsn", m.AppliedLSN)
	}
	return nil
}

// closePartition ends a partition whose runner has stopped.
func (s *Server) closePartition(p *part) {
	if p.tables != nil {
		s.report("flush tables", p.tables.Flush())
		s.report("close tables", p.tables.Close())
	}
	if p.log != nil {
		s.report("close journal", p.log.Close())
	}
}
