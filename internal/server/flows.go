package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/effect/worker"
	"github.com/perdure-dev/perdure/internal/flows"
	"github.com/perdure-dev/perdure/internal/grpcapi"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/schedule"
	"github.com/perdure-dev/perdure/internal/search"
	"github.com/perdure-dev/perdure/internal/tracing"
	"github.com/perdure-dev/perdure/internal/wire"
)

// userFlow reports whether a flow is of a user's program: its steps are run by
// workers that connect. All others run in this process.
func userFlow(flowID string) bool {
	_, rest, _ := strings.Cut(flowID, "/")
	return strings.HasPrefix(rest, "f/")
}

// executor gives each flow's effects to those who run them.
type executor struct {
	local  *worker.Pool
	remote *dispatch.Dispatcher
}

func (x executor) of(flowID string) partition.Executor {
	if userFlow(flowID) {
		return x.remote
	}
	return x.local
}

// Reserve implements partition.Executor.
func (x executor) Reserve(flowID, flowType string, want int) int {
	return x.of(flowID).Reserve(flowID, flowType, want)
}

// Release implements partition.Executor.
func (x executor) Release(flowID, flowType string, n int) { x.of(flowID).Release(flowID, flowType, n) }

// Dispatch implements partition.Executor.
func (x executor) Dispatch(w *partition.Work) { x.of(w.FlowID).Dispatch(w) }

// Commit implements partition.Executor.
func (x executor) Commit(w *partition.Work) { x.of(w.FlowID).Commit(w) }

// Cancel implements partition.Executor.
func (x executor) Cancel(flowID string, exec uint64, a core.Attempt, reason string, forget bool) {
	x.of(flowID).Cancel(flowID, exec, a, reason, forget)
}

// Queue implements partition.Executor.
func (x executor) Queue(q core.Effect) { x.of(q.FlowID).Queue(q) }

// Done implements partition.Executor.
func (x executor) Done(flowID, flowType string, exec uint64, key string) {
	x.of(flowID).Done(flowID, flowType, exec, key)
}

// Abort implements partition.Executor.
func (x executor) Abort() {
	x.local.Abort()
	x.remote.Abort()
}

// observer tells those who watch of committed events.
type observer struct{ s *Server }

// Publish implements partition.Observer.
func (o observer) Publish(flowID string, events []*wire.Event) {
	if !userFlow(flowID) {
		o.s.sessions.Publish(flowID, events)
		return
	}
	o.s.hub.Publish(flowID, events)
	o.s.flows.Publish(flowID, events)
}

// local runs the steps of this process: of agents and of schedules.
type local struct {
	agents    worker.Handler
	schedules worker.Handler
}

func (l local) of(flowType string) worker.Handler {
	if flowType == schedule.Type {
		return l.schedules
	}
	return l.agents
}

// Run implements worker.Handler.
func (l local) Run(ctx context.Context, call *worker.Call) *wire.StepResult {
	return l.of(call.FlowType).Run(ctx, call)
}

// Fail implements worker.Handler.
func (l local) Fail(w *partition.Work, err error) *wire.StepResult {
	return l.of(w.FlowType).Fail(w, err)
}

// openFlows makes what serves users' flows, before there are partitions.
func (s *Server) openFlows() error {
	c := s.cfg.Flows
	ratio, err := strconv.ParseFloat(c.TraceRatio, 64)
	if err != nil {
		return fmt.Errorf("flows.trace_ratio: %w", err)
	}
	if c.TraceEndpoint != "" {
		if s.tracer, err = tracing.Open(context.Background(), c.TraceEndpoint, s.version, ratio); err != nil {
			return err
		}
	}
	s.dispatch = dispatch.New(dispatch.Config{
		Clock: s.env.Clock, Hub: s.hub, Log: s.log, Server: "perdure " + s.version,
		Heartbeat: c.WorkerHeartbeat, Timeout: c.AttemptTimeout, RPCTimeout: c.CallTimeout,
		Check: func(tenant, flowType string, r *wire.StepResult) error {
			return s.flows.CheckResult(tenant, flowType, r)
		},
		Hooks: dispatch.Hooks{Declares: s.declares, Attempt: s.metrics.flows.attempt, RPC: s.metrics.flows.rpc, Begin: s.beginSpan},
	})
	s.declared = newDeclared(s.dispatch, s.store)
	for _, tenant := range s.tenants() {
		if err := s.declared.load(context.Background(), tenant); err != nil {
			s.log.Error("flow types of former workers are not known until they are back", "error", err)
		}
	}
	s.courier = partition.NewCourier(s.env.Clock)
	s.schedules = schedule.New(schedule.Config{Clock: s.env.Clock, Starter: s.startScheduled})
	s.flows = flows.New(flows.Config{
		Hub: s.hub, Env: s.env, Workers: s.declared, Searcher: finder{s}, Schedules: s.schedules, Blobs: s.store,
		Retention: c.Retention, CallTimeout: c.CallTimeout, Trace: s.traceStart,
	})
	return nil
}

// traceStart makes the span of a flow's start.
func (s *Server) traceStart(parent []byte, id, flowType string) []byte {
	return s.tracer.Flow(parent, id, flowType, s.env.Clock.Now())
}

// beginSpan makes the span of an attempt or a call.
func (s *Server) beginSpan(trace []byte, what, id, flowType, name string, number uint32) (child []byte, end func(string)) {
	child, finish := s.tracer.Begin(trace, what, id, flowType, name, number, s.env.Clock.Now())
	if finish == nil {
		return child, nil
	}
	return child, func(outcome string) { finish(outcome, s.env.Clock.Now()) }
}

// bindFlows gives what serves users' flows the partitions.
func (s *Server) bindFlows() {
	s.searcher = search.New(s.set, s.env.Clock)
	s.flows.Bind(s.set)
	s.schedules.Bind(s.set)
	s.dispatch.Bind(dispatch.Partitions(s.set))
	s.courier.Bind(s.set)
}

// startScheduled is a start as clients ask for it.
func (s *Server) startScheduled(tenant string, req *wire.StartRequest) (string, *wire.StartFlow, error) {
	return s.flows.StartCommand(tenant, req)
}

// finder is the searcher, which there is once the partitions are open.
type finder struct{ s *Server }

// Search implements flows.Searcher.
func (f finder) Search(ctx context.Context, tenant string, q *wire.SearchRequest) (*wire.SearchReply, error) {
	reply, err := f.s.searcher.Search(ctx, tenant, q)
	var bad *query.Error
	if errors.As(err, &bad) {
		text := bad.Message
		if bad.Hint != "" {
			text += " (" + bad.Hint + ")"
		}
		return nil, &flows.Error{Code: flows.Invalid, Message: text, Position: int32(bad.Pos)}
	}
	return reply, err
}

// largeValues moves blobs between their two forms: streams and pieces.
type largeValues struct{ flows *flows.Service }

// Put implements grpcapi.Blobs.
func (v largeValues) Put(ctx context.Context, tenant, flowID, from string, r io.Reader) (*wire.BlobRef, error) {
	buf := make([]byte, grpcapi.MaxChunk)
	return v.flows.PutBlob(ctx, tenant, flowID, from, func() ([]byte, error) {
		n, err := io.ReadFull(r, buf)
		if n > 0 && (err == nil || errors.Is(err, io.ErrUnexpectedEOF)) {
			return buf[:n], nil
		}
		return nil, err
	})
}

// Get implements grpcapi.Blobs.
func (v largeValues) Get(ctx context.Context, tenant string, ref *wire.BlobRef) (io.ReadCloser, error) {
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		w.CloseWithError(v.flows.GetBlob(ctx, tenant, ref, func(p []byte) error {
			_, err := w.Write(p)
			return err
		}))
	}()
	return r, nil
}

// Drop implements grpcapi.Blobs.
func (v largeValues) Drop(ctx context.Context, tenant string, ref *wire.BlobRef) error {
	return v.flows.DropBlob(ctx, tenant, ref)
}

// openGRPC takes the further address and its certificate: what is wrong with
// them is said before the server calls itself ready.
func (s *Server) openGRPC() error {
	if c := s.cfg.Flows; c.CertFile != "" || c.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return fmt.Errorf("flows.cert_file and flows.key_file: %w", err)
		}
		s.cert = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if s.cfg.GRPCListen == "" {
		return nil
	}
	l, err := net.Listen("tcp", s.cfg.GRPCListen)
	if err != nil {
		return fmt.Errorf("grpc_listen: %w (choose another with --grpc-listen)", err)
	}
	s.further = l
	return nil
}

// serveFlows answers gRPC on the listeners until stop is called.
func (s *Server) serveFlows(shared net.Listener) (stop func()) {
	cfg := grpcapi.Config{Flows: s.flows, Blobs: largeValues{s.flows}, Dispatch: s.dispatch, Clock: s.env.Clock, Log: s.log, Auth: s.cfg.Auth}
	serve := func(cfg grpcapi.Config, l net.Listener) {
		g := grpcapi.NewServer(cfg)
		s.grpc = append(s.grpc, g)
		go func() { _ = g.Serve(l) }()
	}
	serve(cfg, shared)
	if s.further != nil {
		s.log.Info("listening for gRPC", "address", s.further.Addr().String(), "tls", s.cert != nil)
		cfg.TLS = s.cert
		serve(cfg, newLimitListener(s.further, s.cfg.Limits.MaxConnections))
	}
	return func() {
		for _, g := range s.grpc {
			g.Stop()
		}
	}
}

// finishFlows answers what clients have asked, for closeTimeout.
func (s *Server) finishFlows() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	for _, g := range s.grpc {
		if err := g.Finish(ctx); err != nil {
			s.log.Warn("calls of clients are left without an answer", "error", err)
		}
	}
}

// drainFlows lets workers finish what they have, until ctx ends.
func (s *Server) drainFlows(ctx context.Context) {
	for _, g := range s.grpc {
		g.Drain()
	}
	s.dispatch.Drain()
	if n := s.dispatch.Running(); n > 0 {
		s.log.Info("draining", "running_steps", n)
	}
	s.until(ctx, func() bool { return s.dispatch.Running() == 0 })
	s.dispatch.Stop()
}
