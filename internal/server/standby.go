package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/partition"
)

// followRetry is the rest after a failure to follow a journal.
const followRetry = 2 * time.Second

// standby is a process that waits until it is active: it answers on the server's
// address that it is not, and keeps the tables close behind the journals.
type standby struct {
	s       *Server
	page    *waiting // nil = nobody is answered
	hurry   chan<- struct{}
	active  atomic.Pointer[string] // address; nil = not known
	cancel  context.CancelFunc
	follows sync.WaitGroup
}

// behind is what follows the journal of one partition.
type behind struct {
	tables *partition.Follower
	log    *objectlog.Follower
}

// stands takes how this process stands; it is called until it is active. The first
// call begins the following.
func (st *standby) stands(ctx context.Context, now cluster.Standing) {
	if st.cancel == nil {
		ctx, st.cancel = context.WithCancel(ctx)
		st.follows.Go(func() { watchTermOf(ctx, st.s.env, st.address, st.hurry) })
		for _, p := range st.s.parts {
			st.follows.Add(1)
			go func() {
				defer st.follows.Done()
				st.s.follow(ctx, p)
			}()
		}
	}
	if now.Trouble != nil {
		st.s.log.Warn("standing by; the store does not answer", "error", now.Trouble)
	} else if now.Active.Node != "" {
		st.s.log.Info("standing by", "active", now.Active.Node, "address", now.Active.Address, "state", now.State.String())
	}
	address := now.Active.Address
	if now.State != cluster.Alive {
		address = ""
	}
	st.active.Store(&address)
	if st.page != nil {
		st.page.stands(now.Active.Node, address)
	}
}

func (st *standby) address() string {
	if a := st.active.Load(); a != nil {
		return *a
	}
	return ""
}

// stop ends the following, which is as far as it came.
func (st *standby) stop() {
	if st.cancel != nil {
		st.cancel()
		st.follows.Wait()
	}
	if st.page != nil {
		st.page.stands("", "")
	}
}

// follow keeps a partition's tables behind its journal until ctx ends.
func (s *Server) follow(ctx context.Context, p *part) {
	for ctx.Err() == nil {
		err := s.followOn(ctx, p)
		rest := s.cfg.Cluster.FollowEvery
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, objectlog.ErrTrimmed):
			err = s.dropTables(p) // a snapshot holds what was trimmed
			fallthrough
		default:
			if err != nil {
				s.log.Warn("a journal cannot be followed; it is tried again", "partition", p.id, "error", err)
			}
			rest = followRetry
		}
		if !s.wait(ctx, rest) {
			return
		}
	}
}

// followOn takes what has come since the last time.
func (s *Server) followOn(ctx context.Context, p *part) error {
	if p.behind == nil {
		m, err := cluster.Read(ctx, s.store, p.id)
		if errors.Is(err, blob.ErrNotFound) {
			return nil // nobody has owned it yet
		}
		if err != nil {
			return err
		}
		if p.tables == nil {
			if err := s.openTables(ctx, p, m.HeadLSN); err != nil {
				return err
			}
		}
		p.behind = &behind{
			tables: partition.Follow(s.partitionConfig(p)),
			log: objectlog.NewFollower(objectlog.FollowerOptions{Store: s.store, Prefix: logPrefix(p.id), HeadSeq: m.HeadSeq, HeadLSN: m.HeadLSN, Clock: s.env.Clock,
				Head: func(ctx context.Context) (seq, lsn uint64, err error) {
					m, err := cluster.Read(ctx, s.store, p.id)
					return m.HeadSeq, m.HeadLSN, err
				}}),
		}
	}
	_, err := p.behind.log.Next(ctx, p.behind.tables.Apply)
	p.followed.Store(p.behind.tables.NextLSN() - 1)
	return err
}

// dropTables closes the tables of a partition and removes them.
func (s *Server) dropTables(p *part) error {
	p.behind = nil
	if p.tables != nil {
		err := p.tables.Close()
		p.tables = nil
		if err != nil {
			return fmt.Errorf("close tables of partition %d: %w", p.id, err)
		}
	}
	if err := s.env.FS.RemoveAll(p.tablesDir(s)); err != nil {
		return fmt.Errorf("remove tables of partition %d: %w", p.id, err)
	}
	return nil
}
