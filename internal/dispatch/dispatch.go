// Package dispatch hands the steps of users' flows to the workers that are
// connected, and takes their results.
//
// Work is never lost here, since none of it lives here: a step is durable in its
// flow before (or, when it says so, while) it is handed out, and what a worker
// that left had is proposed to be handed out again. All that this package knows
// comes from the partitions and from the workers' frames, and is gone with the
// process; the partitions say again what is outstanding.
//
// A worker grants credits, one for each task it can take. A partition reserves
// one before it applies a command that may start a step, so that result and next
// start are one entry; without one the step is queued here, and started by a
// command of its own when a worker has room. Queues are by priority, within one
// by arrival; between tenants the starts take turns.
//
// The package starts no goroutines: partitions, streams and the clock call it.
// Nothing it calls while it holds a lock blocks.
package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds.
const (
	MaxCredits      = 1 << 16 // tasks, and as many RPCs, that a worker may have room for
	MaxWorkers      = 4096    // streams of one tenant
	MaxTypes        = 256     // flow types of one worker
	MaxKnownTypes   = 4096    // flow types of one tenant that are remembered
	MaxNames        = 1024    // steps of a flow type, and as many RPCs, attributes and channels
	MaxName         = core.MaxName
	MaxWaitingCalls = 8192     // RPCs that wait for a worker, of one flow type
	MaxProposals    = 256      // starts of queued steps that are proposed and not answered
	MaxOutput       = 1 << 20  // bytes that one attempt may show
	MaxTask         = 96 << 20 // bytes of a task or call with all that its handler gets
	MaxSeries       = 1000     // step and RPC names of one flow type that have statistics of their own

	floodSlack     = 256 // answers beyond those asked for, as repeats may give
	inlineShare    = 4   // steps that go on in their flow for each one that was queued, when credits are short
	quantum        = 16  // starts of one tenant before the next one's turn
	overloadRetry  = 20 * time.Millisecond
	checkpointRest = 5 * time.Second // between two checkpoints of a step that are kept
	silentBeats    = 3               // a worker that misses this many is lost
	stickySlots    = 1 << 12         // flows of a tenant whose last worker is remembered; a power of two
)

// Proposer takes commands for the flows; a partition.Set through Partitions.
type Proposer interface {
	// Submit never blocks; see partition.Runner.Submit.
	Submit(flowID string, p partition.Proposal) error
	// SubmitWait waits for room, until ctx ends.
	SubmitWait(ctx context.Context, flowID string, p partition.Proposal) error
}

// Partitions proposes to the partitions of this process.
func Partitions(set partition.Set) Proposer { return partitions{set} }

type partitions struct{ set partition.Set }

func (p partitions) Submit(flowID string, q partition.Proposal) error {
	return p.set.For(flowID).Submit(q)
}

func (p partitions) SubmitWait(ctx context.Context, flowID string, q partition.Proposal) error {
	return p.set.For(flowID).SubmitWait(ctx, q)
}

// Hooks are told what ended; they must be quick. Each may be nil. took is from
// the hand-out to the answer, queued from when the step wanted a worker to the
// hand-out.
type Hooks struct {
	// Declares is told what a worker declares before it counts; it may block.
	Declares func(tenant string, types []*wire.FlowType)
	// Attempt: outcome is completed, retried, failed, timeout, lost, late or refused.
	Attempt func(flowType, step, outcome string, took, queued time.Duration)
	// RPC: outcome is completed, failed, timeout, lost, cancelled, or the code of a
	// refusal.
	RPC func(flowType, name, outcome string, took time.Duration)
	// Begin opens the span of a hand-out whose flow or call has a trace (a W3C
	// trace parent); what is "step" or "rpc", id the flow's as users see it, number
	// that of the attempt. child is the trace parent for the handler. end, if not
	// nil, is called once, with an outcome as above, with cancelled, or with
	// unknown: the partition was lost, the next owner hands the step out again. Both
	// are called under a lock.
	Begin func(trace []byte, what, id, flowType, name string, number uint32) (child []byte, end func(outcome string))
}

// Config makes a Dispatcher. Clock, Hub and Log are needed.
type Config struct {
	Clock env.Clock
	Hub   *stream.Hub // shows what running steps put out
	Log   *slog.Logger
	Hooks Hooks

	// Check looks at what a handler wrote before it is proposed, and may fill in
	// what only the server knows; after an error, which reads "code: message", the
	// step fails. May be nil. It is called on the streams' goroutines.
	Check func(tenant, flowType string, r *wire.StepResult) error

	Server     string        // name and version, for people
	MaxPayload uint64        // bytes of a value in line; default 64 KiB
	Heartbeat  time.Duration // of workers; default 5 s
	Timeout    time.Duration // of attempts whose step says nothing; default 1 h
	RPCTimeout time.Duration // of calls that say nothing; default 30 s
}

func (c *Config) setDefaults() {
	if c.Server == "" {
		c.Server = "perdure"
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = 64 << 10
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = 5 * time.Second
	}
	if c.Timeout == 0 {
		c.Timeout = time.Hour
	}
	if c.RPCTimeout == 0 {
		c.RPCTimeout = 30 * time.Second
	}
}

// Codes of refusals, beside those of core; all errors given out are *core.Error.
const (
	Unsupported core.Code = "unsupported_protocol"
	Flood       core.Code = "flood"       // a worker does what it was not asked for
	WorkerLost  core.Code = "worker_lost" // before it answered
	NoWorker    core.Code = "no_worker"   // took the call within its time
	Deadline    core.Code = "deadline"
	Cancelled   core.Code = "cancelled"
	Overloaded  core.Code = "overloaded"
	Unavailable core.Code = "unavailable" // the server stops
	TooLarge    core.Code = "too_large"   // for a frame
)

// Errors that end workers and calls when the server stops.
var (
	ErrDraining = refuse(Unavailable, "the server stops: connect again")
	ErrAborted  = refuse(Unavailable, "the server lost a partition and stops: connect again")
)

func refuse(code core.Code, format string, args ...any) *core.Error {
	return &core.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Dispatcher is the workers of one process. Safe for concurrent use.
type Dispatcher struct {
	cfg      Config
	epoch    time.Time // of now
	ctx      context.Context
	cancel   context.CancelCauseFunc
	draining atomic.Bool
	stopped  atomic.Bool
	lastCall atomic.Uint64
	late     atomic.Uint64 // answers to nothing that their worker had
	proposer atomic.Pointer[Proposer]
	tenants  atomic.Pointer[tenants]
	sched    scheduler

	mu sync.Mutex // guards the replacing of tenants
}

// tenants is never changed, only replaced.
type tenants struct {
	byName map[string]*tenant
	all    []*tenant // in the order they came
}

// New makes a dispatcher. It may be given to partitions at once; what they
// propose through it waits for Bind.
func New(cfg Config) *Dispatcher {
	cfg.setDefaults()
	d := &Dispatcher{cfg: cfg, epoch: cfg.Clock.Now()}
	d.ctx, d.cancel = context.WithCancelCause(context.Background())
	d.tenants.Store(&tenants{})
	return d
}

// Bind says where commands go.
func (d *Dispatcher) Bind(p Proposer) {
	d.proposer.Store(&p)
	for _, t := range d.tenants.Load().all {
		d.wake(t)
	}
}

// now is microseconds since the dispatcher was made; it does not jump with the
// wall clock.
func (d *Dispatcher) now() int64 { return d.cfg.Clock.Now().Sub(d.epoch).Microseconds() }

// split takes a flow's ID apart: tenant, and the ID as users see it.
func split(flowID string) (tenant, id string, ok bool) {
	tenant, rest, ok := strings.Cut(flowID, "/")
	if !ok || len(rest) < 3 || rest[:2] != "f/" {
		return "", "", false
	}
	return tenant, rest[2:], true
}

// tenantOf gives the tenant's part, nil when there is none yet.
func (d *Dispatcher) tenantOf(name string) *tenant { return d.tenants.Load().byName[name] }

// makeTenant gives the tenant's part. Tenants come with keys and with flows, so
// their number is bounded by the settings.
func (d *Dispatcher) makeTenant(name string) *tenant {
	if t := d.tenantOf(name); t != nil {
		return t
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.tenants.Load()
	if t := old.byName[name]; t != nil {
		return t
	}
	t := &tenant{d: d, name: name, lanes: map[string]*lane{}, runs: map[string]*attempt{},
		queued: map[string]*entry{}, calls: map[uint64]*call{}, known: map[string]*wire.FlowType{}}
	next := &tenants{byName: map[string]*tenant{name: t}, all: append(slices.Clone(old.all), t)}
	maps.Copy(next.byName, old.byName)
	d.tenants.Store(next)
	return t
}

// Drain tells all workers that the server stops: nothing new is handed out, and
// what they have they may finish.
func (d *Dispatcher) Drain() {
	if d.draining.Swap(true) {
		return
	}
	for _, t := range d.tenants.Load().all {
		t.mu.Lock()
		for _, w := range t.workers {
			w.tell(func(f *wire.ServerFrame) { f.Drain = true })
		}
		t.mu.Unlock()
	}
}

// Stop ends all streams; nothing is proposed any more. What the workers have is
// handed out again by the next owner; calls that wait for one are refused.
func (d *Dispatcher) Stop() { d.end(ErrDraining) }

// Abort implements partition.Executor: the ownership is lost.
func (d *Dispatcher) Abort() { d.end(ErrAborted) }

func (d *Dispatcher) end(err *core.Error) {
	d.draining.Store(true)
	if d.stopped.Swap(true) {
		return
	}
	d.cancel(err)
	for _, t := range d.tenants.Load().all {
		t.mu.Lock()
		if t.timer != nil {
			t.timer.Stop()
			t.timer = nil
		}
		for _, w := range t.workers {
			w.out.Close(err)
		}
		var out after
		now := d.now()
		for _, c := range t.calls {
			if c.w == nil {
				out.calls = append(out.calls, c.end(now, nil, err, string(err.Code)))
			}
		}
		t.mu.Unlock()
		out.run(t)
	}
}

// Running counts the attempts and calls that workers have.
func (d *Dispatcher) Running() int {
	n := 0
	for _, t := range d.tenants.Load().all {
		t.mu.Lock()
		for _, w := range t.workers {
			n += w.tasks.n + w.rpcs.n
		}
		t.mu.Unlock()
	}
	return n
}

// submit proposes without waiting.
func (d *Dispatcher) submit(flowID string, p partition.Proposal) error {
	to := d.proposer.Load()
	if to == nil || d.stopped.Load() {
		return partition.ErrStopped
	}
	return (*to).Submit(flowID, p)
}

// submitWait proposes and waits for room.
func (d *Dispatcher) submitWait(flowID string, p partition.Proposal) error {
	to := d.proposer.Load()
	if to == nil || d.stopped.Load() {
		return partition.ErrStopped
	}
	return (*to).SubmitWait(d.ctx, flowID, p)
}

// verdict is what the outcome of a proposal means.
type verdict uint8

const (
	accepted verdict = iota
	late             // somebody was quicker, or the flow is gone
	busy             // not now; of starts only
	refused          // for what it says
	lost             // nobody knows, and the next owner will say
)

func judge(err error) verdict {
	if err == nil {
		return accepted
	}
	var ce *core.Error
	if !errors.As(err, &ce) {
		return lost
	}
	switch ce.Code {
	case core.StaleAttempt, core.NotFound, core.Closed:
		return late
	case core.Busy:
		return busy
	default:
		return refused
	}
}
