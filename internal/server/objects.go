package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
)

// releaseTimeout bounds what an ending process tells the others, so that they need
// not wait for the end of its lease.
const releaseTimeout = 5 * time.Second

// objects is what a server on an object store has besides: its lease there, its
// term as the active process, and what its journals share.
type objects struct {
	measured blob.Measured
	lease    *cluster.Lease
	term     *cluster.Term // nil while it stands by
	ending   *term         // of that term
	budget   *objectlog.Budget
}

// onObjects says that journals and snapshots are on an object store; the data
// directory is a cache then.
func onObjects(cfg *config.Config) bool { return strings.HasPrefix(cfg.Store, "s3:") }

// valid reports whether this process surely is the active one.
func (o *objects) valid() bool { return o.term != nil && o.term.Valid() }

// OpenStore reaches the object store of a URL. Its credentials come from the
// environment, which lookup reads, a shared file or the machine's role.
func OpenStore(url string, e env.Env, lookup func(name string) string) (blob.Measured, error) {
	cfg, err := s3.ParseURL(url, lookup)
	if err != nil {
		return nil, err
	}
	cfg.Dialer, cfg.Clock, cfg.Rand = e.Dialer, e.Clock, e.Rand
	return s3.Open(cfg)
}

// openObjects reaches the store and proves that it can be built on.
func (s *Server) openObjects(ctx context.Context) error {
	if err := s.checkAddress(); err != nil {
		return err
	}
	store, err := OpenStore(s.cfg.Store, s.env, s.cfg.Environ)
	if err != nil {
		return err
	}
	s.objects = &objects{measured: store, ending: newTerm()}
	s.store = store
	if d := s.cfg.Journal.AddedLatency; d > 0 {
		s.store = blob.Delayed(store, blob.Latencies{blob.KindPut: blob.Around(d)}, s.env.Clock, s.env.Rand)
	}
	if n := s.cfg.Journal.MaxPuts; n > 0 {
		s.objects.budget = objectlog.NewBudget(s.env.Clock, n)
	}
	if s.site.proven {
		return nil
	}
	name, _, _ := strings.Cut(s.cfg.Store, "?")
	err = blob.Prove(ctx, store, blob.Proof{Name: name, Prefix: "proof", Clock: s.env.Clock, Rand: s.env.Rand})
	s.site.proven = err == nil
	return err
}

// becomeActive stands by until this process is the active one. Meanwhile it
// follows the journals, and page answers.
func (s *Server) becomeActive(ctx context.Context, page *waiting) error {
	o := s.objects
	var err error
	hurry := make(chan struct{}, 1)
	o.lease, err = cluster.Hold(ctx, cluster.LeaseConfig{Store: s.store, Env: s.env, Node: s.node, Address: s.address(), Version: s.version,
		TTL: s.cfg.Cluster.LeaseTTL, Hurry: hurry})
	if err != nil {
		return err
	}
	st := &standby{s: s, page: page, hurry: hurry}
	o.term, err = cluster.Elect(ctx, o.lease, func(now cluster.Standing) { st.stands(ctx, now) })
	st.stop()
	if errors.Is(err, cluster.ErrLost) {
		return fmt.Errorf("%w: %w", ErrTermOver, err)
	}
	if err == nil {
		s.log.Info("this process is active", "node", s.node, "term", o.term.Epoch())
	}
	return err
}

// watchTerm stops the server when its term is over.
func (s *Server) watchTerm() {
	t := s.objects.term
	<-t.Lost()
	if err := t.Err(); !errors.Is(err, cluster.ErrReleased) {
		s.onLost(err)
	}
}

// openObjectLog opens a partition's journal on the object store.
func (s *Server) openObjectLog(ctx context.Context, p *part, nonce uint64) (journalLog, error) {
	m := p.owned.Manifest()
	opts := objectlog.Options{
		Store: s.store, Prefix: logPrefix(p.id), Epoch: m.Epoch, Nonce: nonce,
		Window: s.cfg.Journal.MaxInFlight, FormerWindow: m.Window, HeadSeq: m.HeadSeq, HeadLSN: m.HeadLSN,
		Valid: s.objects.valid, Advance: p.owned.Advance, Budget: s.objects.budget,
		Confirm: p.owned.Confirm,
		Linger:  s.cfg.Journal.Linger, Clock: s.env.Clock, Rand: s.env.Rand, Log: s.log.With("partition", p.id),
	}
	if former := p.owned.Former(); former.Released {
		opts.TailSeq = former.TailSeq
	}
	if p.behind != nil {
		opts.Known = p.behind.log.Known()
	}
	return objectlog.Open(ctx, opts)
}

// sweepLeases deletes what processes have left that are gone for long.
func (s *Server) sweepLeases(ctx context.Context) {
	watch := cluster.NewWatch(cluster.LeaseConfig{Store: s.store, Env: s.env})
	for s.wait(ctx, sweepEvery) {
		seen, err := watch.Poll(ctx)
		if err != nil {
			s.log.Warn("leases could not be looked at; the next try is in an hour", "error", err)
			continue
		}
		for _, n := range seen {
			if n.Quiet >= sweepEvery && (n.State == cluster.Released || n.State == cluster.Expired) {
				s.report("delete an old lease", s.store.Delete(ctx, cluster.NodeKey(n.Node.ID), blob.DeleteOptions{}))
			}
		}
	}
}

// release gives up what this process holds as the active one, when its partitions
// have stopped in good order; the tables are not needed for that.
func (o *objects) release(s *Server) {
	if o.term == nil || !o.valid() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	var all sync.WaitGroup
	for _, p := range s.parts {
		if p.runner != nil && p.runner.Err() == nil {
			all.Go(func() {
				if err := p.owned.Release(ctx, p.log.NextSeq()); !errors.Is(err, cluster.ErrFenced) {
					s.report("release partition", err)
				}
			})
		}
	}
	// Whoever takes over does not wait for the releases: they only spare it the
	// search for the journals' ends.
	all.Go(func() { s.report("resign", o.term.Resign(ctx)) })
	all.Wait()
}

// close gives up the lease.
func (o *objects) close(s *Server) {
	if o.lease == nil || o.lease.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	s.report("release lease", o.lease.Release(ctx))
}
