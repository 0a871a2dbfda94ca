// Package server assembles one Perdure process from its config: the same for
// the binary and for the end-to-end tests.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/admit"
	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/blob"
	blobfs "github.com/perdure-dev/perdure/internal/blob/fs"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/flows"
	"github.com/perdure-dev/perdure/internal/grpcapi"
	"github.com/perdure-dev/perdure/internal/httpapi"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/schedule"
	"github.com/perdure-dev/perdure/internal/search"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/sink"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/tracing"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Server is one process. Make it with Open, serve with Serve, end with Close.
type Server struct {
	site    *Site
	cfg     *config.Config
	dir     string // of the data
	env     env.Env
	log     *slog.Logger
	metrics *metrics

	lock      io.Closer
	node      string // ID of this process in the store
	store     blob.Store
	objects   *objects // nil = journals are on the local disk
	shared    *state.Shared
	parts     []*part
	set       partition.Set
	hub       *stream.Hub
	gate      *admit.Gate
	pool      *worker.Pool
	sessions  *session.Service
	dispatch  *dispatch.Dispatcher
	declared  *declared
	courier   *partition.Courier
	flows     *flows.Service
	schedules *schedule.Schedules
	searcher  *search.Searcher
	tracer    *tracing.Tracer
	grpc      []*grpcapi.Server
	further   net.Listener // of grpc_listen; nil = none
	cert      *tls.Config  // of further; nil = none
	providers map[string]*agent.Provider
	tools     *tool.Client
	sinks     *sink.Sinks
	api       *httpapi.API
	version   string

	draining atomic.Bool
	lost     chan error // the first partition that lost its journal: the process must stop then

	stopUpkeep context.CancelFunc
	stopPace   context.CancelFunc
	upkeep     sync.WaitGroup
	closed     sync.Once
}

// openTimeout bounds the start.
const openTimeout = 10 * time.Minute

// closeTimeout bounds how long the last answers may take to leave, and as long the
// last spans.
const closeTimeout = 2 * time.Second

// sinkTimeout bounds how long the end waits for the last lines of the logs;
// what is not written then is read from the outbox at the next start.
const sinkTimeout = 5 * time.Second

// ErrTermOver: on an object store, this process is not the active one any more.
// Open it again, and it stands by.
var ErrTermOver = errors.New("this process is no longer the active one of its store")

// ErrStoreAway: the object store does not answer, so nothing can be opened. It is
// worth trying again.
var ErrStoreAway = errors.New("the object store does not answer")

// Site is where and how a process serves. One process may open it several times,
// one after the other, as its terms come and go.
type Site struct {
	Config  *config.Config
	Env     env.Env // FS is replaced by memory when Config.Store says so
	Version string
	Log     *slog.Logger
	// Listener, if there is one, is answered on while the process stands by. It is
	// closed for that, so lend it (see Lend).
	Listener net.Listener

	proven bool // the store holds what it must
}

// Open takes the data directory, recovers every partition and is ready to serve.
// On an object store it first waits until this process is the active one, or ctx
// ends. Errors match ErrTermOver or ErrStoreAway when trying again may help.
func (site *Site) Open(ctx context.Context) (*Server, error) {
	cfg := site.Config
	s := &Server{site: site, dir: filepath.Clean(cfg.Data), cfg: cfg, env: site.Env, version: site.Version, log: site.Log,
		hub: stream.NewHub(), gate: admit.NewGate(cfg.Kernel.MaxInFlightTurns), lost: make(chan error, 1)}
	if inMemory(cfg) {
		s.env.FS, s.dir = vfs.NewMem(), "/"
	}
	if err := s.open(ctx); err != nil {
		err = s.ofTerm(err) // before the end of what it asks
		s.Close()
		if errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrAmbiguous) {
			err = fmt.Errorf("%w: %w", ErrStoreAway, err)
		}
		return nil, err
	}
	return s, nil
}

// ofTerm marks an error that comes of a term that is over, or of another owner.
func (s *Server) ofTerm(err error) error {
	if s.objects == nil || s.objects.term == nil || errors.Is(err, ErrTermOver) || s.objects.valid() && !errors.Is(err, journal.ErrStale) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrTermOver, err)
}

// Open is Site.Open without a listener.
func Open(cfg *config.Config, e env.Env, version string, log *slog.Logger) (*Server, error) {
	return (&Site{Config: cfg, Env: e, Version: version, Log: log}).Open(context.Background())
}

// inMemory says that nothing is persisted: files are in memory, so what is only
// there to outlive the process is left out.
func inMemory(cfg *config.Config) bool { return cfg.Store == "mem:" }

// memoryBytes bounds the journal of a partition and the access log in memory.
const memoryBytes = 4 << 20

func (s *Server) open(ctx context.Context) error {
	var err error
	if s.providers, err = Providers(s.cfg, s.env); err != nil {
		return err
	}
	reg, tools, err := registry(s.cfg, s.env, s.providers)
	if err != nil {
		return err
	}
	s.tools = tools
	s.makeParts()
	var page *waiting
	if onObjects(s.cfg) && s.site.Listener != nil {
		page = s.answerWaiting(s.site.Listener)
		defer page.give()
	}
	if err := s.openStore(ctx); err != nil {
		return err
	}
	if s.objects != nil {
		if err := s.becomeActive(ctx, page); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := s.openGRPC(); err != nil {
		return err
	}
	s.metrics = newMetrics(s)
	handler := &agent.Handler{Registry: reg, Clock: s.env.Clock, OnUsage: s.metrics.usage, Limits: agent.Limits{
		MaxToolRounds: s.cfg.Kernel.MaxToolRounds, MaxToolCalls: s.cfg.Kernel.MaxToolCallsPerRound, TurnTimeout: s.cfg.Kernel.TurnTimeout}}
	if err := s.openFlows(); err != nil {
		return err
	}
	s.pool = worker.New(s.hub, local{handler, s.schedules}, s.log)
	s.sessions = session.New(session.Config{
		Agents: reg, Hub: s.hub, Gate: s.gate, Env: s.env, MaxQueued: s.cfg.Kernel.MaxQueuedTurnsPerSession,
		StreamBound: int(s.cfg.Limits.StreamBufferBytes), StatelessKeep: time.Duration(s.cfg.Kernel.SessionTTLSecs) * time.Second,
		Hooks: session.Hooks{TurnEnded: s.metrics.turnEnded, Events: s.kickSinks},
	})
	return s.openPartitions(ctx)
}

// openStore locks the data directory and checks that it fits.
func (s *Server) openStore(ctx context.Context) error {
	if err := makeDir(s.env.FS, s.dir); err != nil {
		return fmt.Errorf("data directory %s: %w", s.cfg.Data, err)
	}
	lock, err := s.env.FS.Lock(filepath.Join(s.dir, "LOCK"))
	if err != nil {
		return fmt.Errorf("data directory %s cannot be locked; is it in use by another process? %w", s.cfg.Data, err)
	}
	s.lock = lock
	if s.node, err = s.nodeID(); err != nil {
		return err
	}
	if onObjects(s.cfg) {
		err = s.openObjects(ctx)
	} else {
		s.store, err = blobfs.Open(s.env.FS, filepath.Join(s.dir, "objects"))
	}
	if err != nil {
		return fmt.Errorf("object store: %w", err)
	}
	return s.checkLayout(ctx)
}

// openSinks starts the background writers; they read the partitions' outboxes.
func (s *Server) openSinks() error {
	var sources []sink.Source
	c := s.cfg.Sink
	if inMemory(s.cfg) {
		c.MaxBytes = min(c.MaxBytes, memoryBytes)
	} else {
		for _, p := range s.parts {
			sources = append(sources, p.tables)
		}
	}
	var err error
	s.sinks, err = sink.Open(sink.Config{
		FS: s.env.FS, Clock: s.env.Clock, Log: s.log, Dir: filepath.Join(s.dir, "logs"), ExportDir: s.cfg.JSONLDir,
		Partitions: sources, Describe: session.Describe, QueueRecords: c.QueueRecords, BatchRecords: c.BatchRecords,
		FlushInterval: c.FlushInterval, Retention: c.Retention, MaxBytes: int64(c.MaxBytes),
	})
	if err != nil {
		return fmt.Errorf("logs: %w", err)
	}
	return nil
}

func (s *Server) kickSinks(flow string, _ []*wire.Event) {
	if inMemory(s.cfg) {
		return // the sinks have no events to read
	}
	s.sinks.Kick(partition.Of(flow, len(s.parts)))
}

func (s *Server) tenants() []string {
	seen := map[string]bool{"default": true}
	for _, k := range s.cfg.Auth.Keys {
		seen[k.Tenant] = true
	}
	return sortedKeys(seen)
}

func (s *Server) onLost(err error) {
	select {
	case s.lost <- err:
	default:
	}
}

// Sessions gives the verbs.
func (s *Server) Sessions() *session.Service { return s.sessions }

// Ready reports whether requests are served.
func (s *Server) Ready() error {
	if s.draining.Load() {
		return errors.New("draining")
	}
	return nil
}

// Drain refuses new turns and waits until those in flight have ended, or ctx.
// Turns still running then go on at the next start.
func (s *Server) Drain(ctx context.Context) {
	s.draining.Store(true)
	s.sessions.Drain()
	if n := s.sessions.OpenTurns(); n > 0 {
		s.log.Info("draining", "open_turns", n)
	}
	s.drainFlows(ctx)
	if !s.until(ctx, func() bool { return s.sessions.OpenTurns() == 0 }) {
		s.log.Warn("drain timed out; the rest goes on at the next start", "open_turns", s.sessions.OpenTurns())
	}
}

// drainTick is how often a drain looks whether it is done.
const drainTick = 20 * time.Millisecond

// until waits for cond, at most until ctx ends.
func (s *Server) until(ctx context.Context, cond func() bool) bool {
	for !cond() {
		tick := make(chan struct{})
		t := s.env.Clock.AfterFunc(drainTick, func() { close(tick) })
		select {
		case <-ctx.Done():
			t.Stop()
			return cond()
		case <-tick:
		}
	}
	return true
}

// Close ends everything: attempts are left to the next start, what was
// proposed is committed, tables are flushed. Safe to call twice.
func (s *Server) Close() {
	s.closed.Do(func() {
		if s.stopPace != nil {
			s.stopPace()
		}
		if s.stopUpkeep != nil {
			s.stopUpkeep()
			s.upkeep.Wait()
		}
		if s.further != nil {
			_ = s.further.Close() // it is closed already where it was served
		}
		if s.dispatch != nil {
			s.dispatch.Stop()
		}
		if s.pool != nil {
			s.pool.Stop()
		}
		for _, p := range s.parts {
			if p != nil && p.runner != nil {
				p.runner.Stop()
			}
		}
		if s.objects != nil {
			s.objects.release(s)
		}
		if s.sinks != nil {
			ctx, cancel := context.WithTimeout(context.Background(), sinkTimeout)
			s.report("write logs", s.sinks.Close(ctx))
			cancel()
		}
		for _, p := range s.parts {
			if p != nil {
				s.closePartition(p)
			}
		}
		if s.tracer != nil {
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			s.report("send the last spans", s.tracer.Close(ctx))
			cancel()
		}
		if s.objects != nil {
			s.objects.close(s)
		}
		if s.shared != nil {
			s.shared.Close()
		}
		for _, p := range s.providers {
			p.Close()
		}
		if s.tools != nil {
			s.tools.Close()
		}
		if s.lock != nil {
			s.report("unlock data directory", s.lock.Close())
		}
	})
}

func (s *Server) report(what string, err error) {
	if err != nil {
		s.log.Error(what, "error", err.Error())
	}
}

// Serve answers on l until ctx ends, then drains and returns. A lost journal
// ends it with an error.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stopAdmin, err := s.serveAdmin()
	if err != nil {
		s.Close()
		return err
	}
	defer stopAdmin()
	hs := s.httpServer()
	served := make(chan error, 1)
	halves := split(newLimitListener(l, s.cfg.Limits.MaxConnections), s.cfg.Limits.ReadHeaderTimeout, s.env.Clock.Now)
	stopFlows := s.serveFlows(halves.grpc)
	defer stopFlows()
	go func() { _ = hs.Serve(halves.http) }()
	go func() { _ = hs.Serve(s.api.Returned(l.Addr())) }() // ends with hs
	go func() { served <- halves.run() }()
	select {
	case <-ctx.Done():
		if s.objects != nil {
			halves.close() // new connections are held by those that stand by
			s.objects.ending.end()
		}
		drain, cancel := context.WithTimeout(context.Background(), s.cfg.DrainTimeout)
		s.api.Drain()
		s.Drain(drain)
		cancel()
		s.hub.Close(partition.ErrStopped) // streams of turns that go on at the next start
		s.finishFlows()
		end, cancel := context.WithTimeout(context.Background(), closeTimeout)
		_ = hs.Shutdown(end) // what is open after the time is cut below
		s.api.Close(end)
		cancel()
	case err = <-s.lost:
		s.draining.Store(true)
		s.log.Error("stopping: the partitions are not this process's any more", "error", err)
		err = s.ofTerm(err)
	case err = <-served:
	}
	halves.close()
	_ = hs.Close()
	cut, cancel := context.WithCancel(context.Background())
	cancel() // what is still open is closed
	s.api.Close(cut)
	stopFlows()
	s.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
