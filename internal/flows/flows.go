// Package flows holds the verbs of users' flows: what is behind a Call and its
// Answer of proto/perdure/v1. A verb checks what it was given, turns it into
// commands for the partition that owns the flow, and answers when their outcome
// is durable. Verbs that are used often (start, publish, rpc, attributes, wait)
// run on the callbacks of partitions and workers, without a goroutine of their
// own; those that read the log or move blobs have one, of a bounded number.
package flows

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds. What is over them is refused, never cut.
const (
	MaxFlowID       = 256      // bytes of a flow ID as users see it
	MaxBlob         = 64 << 20 // bytes of a blob
	MaxPage         = 1000     // events of one HistoryReply
	MaxPublish      = 1000     // payloads of one PublishRequest
	MaxLockWaiters  = 256      // locked RPCs that wait for one flow
	MaxFlowWaiters  = 4096     // wait and wait_attribute calls of one flow
	maxListed       = 1000     // steps or channels that a FlowInfo shows
	largeValue      = 1 << 10  // bytes of an attribute's value that a FlowInfo leaves out
	maxRecoverDepth = 8        // recovery steps of recovery steps, before the core looks
	maxConflicts    = 16       // runs of a locked RPC's handler, each after a step changed an attribute
	maxResets       = 5        // computations of a reset, each after the log has grown

	maxTimeout   = 24 * time.Hour
	maxPriority  = 9
	retryAfter   = 50 * time.Millisecond // what a refusal for load asks to wait
	keepForever  = -1                    // StartRequest.retention_us
	stateType    = "state"               // a flow of attributes alone: no worker, no declaration
	reservedType = "perdure."            // types of the engine's own begin so
)

// Workers is the dispatch of flows to the workers that are connected. Its
// methods are called on partition goroutines and must not block.
type Workers interface {
	// Call hands an RPC to a worker of the type. done is called once, on any
	// goroutine, with the worker's result, or with an error when there was none
	// within the timeout; one that is a *core.Error gives its code. t is the
	// callee's from then on, but for its attributes.
	Call(flowID, flowType string, t *wire.RpcTask, timeout time.Duration, done func(*wire.RpcResult, error))
	// CancelCall tells the worker that nobody waits for the result of t, as it was
	// given to Call, any more; done is called soon. A call that is over is no error.
	CancelCall(flowID string, t *wire.RpcTask)
	// KnownType is the union of what the workers of a type declared, those that
	// left included; ok is false when there never was one. It is not to be
	// changed.
	KnownType(tenant, flowType string) (t *wire.FlowType, ok bool)
	Queues(tenant string) []*wire.Queue
	Workers(tenant string) []*wire.WorkerInfo
	// RunningOn names the worker that has a step; empty when none has.
	RunningOn(flowID string, exec uint64) string
}

// Searcher finds flows. An error of its own that has a code is a *Error.
type Searcher interface {
	Search(ctx context.Context, tenant string, q *wire.SearchRequest) (*wire.SearchReply, error)
}

// Schedules serves the schedule verbs of a Call; the answer's ID is not needed.
type Schedules interface {
	Do(ctx context.Context, tenant string, c *wire.Call) (*wire.Answer, error)
}

// Config makes a Service. Set, Hub, Env and Workers are needed.
type Config struct {
	Set       partition.Set
	Hub       *stream.Hub
	Env       env.Env
	Workers   Workers
	Searcher  Searcher   // nil: search is refused
	Schedules Schedules  // nil: schedules are refused
	Blobs     blob.Store // nil: blobs are refused

	// Trace is told of each flow that is to be started, with its starter's W3C trace
	// parent, and gives the one that the flow has; empty = it is not traced. It must
	// not block. nil: that of the starter.
	Trace func(parent []byte, id, flowType string) []byte

	Retention   time.Duration // of closed flows whose start says nothing; default 7 days
	CallTimeout time.Duration // of calls that say nothing; default 60 s
	MaxPayload  int           // bytes of an input, value or message in line; default 64 KiB
	StreamBound int           // bytes that a watcher may fall behind; default that of the hub

	MaxWaiters     int // calls that wait for a flow's end or an attribute; default 200,000
	MaxLockWaiting int // locked RPCs that wait for their flow's lock; default 100,000
	MaxStreams     int // watches and live histories; default 10,000
	MaxReads       int // verbs at work that read the log, search or look at blobs; default 256
	MaxBlobs       int // blobs being moved; each costs up to 5 MiB; default 32
}

func (c *Config) setDefaults() {
	setDefault(&c.Retention, 7*24*time.Hour)
	setDefault(&c.CallTimeout, time.Minute)
	setDefault(&c.MaxPayload, 64<<10)
	setDefault(&c.MaxWaiters, 200_000)
	setDefault(&c.MaxLockWaiting, 100_000)
	setDefault(&c.MaxStreams, 10_000)
	setDefault(&c.MaxReads, 256)
	setDefault(&c.MaxBlobs, 32)
}

func setDefault[T int | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Service is the verbs. Safe for concurrent use.
type Service struct {
	cfg     Config
	waiters waiters
	locks   locks
	reads   bound
	streams bound
	blobs   blobs
	running sync.WaitGroup
}

// New makes a Service. The set may be given later, with Bind, but before the
// first call.
func New(cfg Config) *Service {
	cfg.setDefaults()
	s := &Service{cfg: cfg, reads: newBound(cfg.MaxReads), streams: newBound(cfg.MaxStreams)}
	s.waiters.init(cfg.MaxWaiters)
	s.locks.init(cfg.MaxLockWaiting)
	s.blobs.init(cfg.MaxBlobs)
	return s
}

// Bind says where the flows are.
func (s *Service) Bind(set partition.Set) { s.cfg.Set = set }

// Publish tells calls that wait of a flow's committed events. It is called on
// partition goroutines, in order; it does not block.
func (s *Service) Publish(flowID string, events []*wire.Event) { s.waiters.publish(flowID, events) }

// Close waits for the goroutines of the service's own. End the contexts of the
// calls first.
func (s *Service) Close() { s.running.Wait() }

// FlowID is where a user's flow lives.
func FlowID(tenant, id string) string { return tenant + "/f/" + id }

// UserID gives the ID by which its tenant knows a flow; IDs of other flows are
// given as they are.
func UserID(flowID string) string {
	if _, rest, ok := strings.Cut(flowID, "/"); ok {
		if id, ok := strings.CutPrefix(rest, "f/"); ok {
			return id
		}
	}
	return flowID
}

// call is one Call on its way. It is answered once, or, by streams, several
// times with more and then once.
type call struct {
	s      *Service
	ctx    context.Context
	tenant string
	req    *wire.Call
	send   func(*wire.Answer)
	until  time.Time // set by the verbs that wait; see remaining
}

func (c *call) answer(a *wire.Answer) {
	a.Id = c.req.Id
	c.send(a)
}

func (c *call) fail(err error) { c.answer(&wire.Answer{Error: c.wire(err)}) }

// timeout is how long the caller waits.
func (c *call) timeout() time.Duration {
	if c.req.TimeoutUs == 0 {
		return c.s.cfg.CallTimeout
	}
	return min(time.Duration(c.req.TimeoutUs)*time.Microsecond, maxTimeout)
}

// remaining is what is left of it; the time begins with the first question.
// Not safe for concurrent use.
func (c *call) remaining() time.Duration {
	now := c.s.cfg.Env.Clock.Now()
	if c.until.IsZero() {
		c.until = now.Add(c.timeout())
	}
	return c.until.Sub(now)
}

// Do answers one call. It returns at once. answer is called on any goroutine,
// also on a partition's, and must not block there: exactly once without more.
// Answers with more, and the last one behind them, come from a goroutine that
// only this call has; there answer may block, which holds the stream back. ctx
// ends the call early; a command that is on its way takes effect all the same.
// The call is the service's from now on.
func (s *Service) Do(ctx context.Context, tenant string, req *wire.Call, answer func(*wire.Answer)) {
	c := &call{s: s, ctx: ctx, tenant: tenant, req: req, send: answer}
	if req.TimeoutUs < 0 {
		c.fail(refuse(Invalid, "the timeout is negative"))
		return
	}
	if ctx.Err() != nil {
		c.fail(c.gone())
		return
	}
	switch v := req.Verb.(type) {
	case *wire.Call_Start:
		c.start(given(v.Start))
	case *wire.Call_Publish:
		c.publish(given(v.Publish))
	case *wire.Call_Rpc:
		c.rpc(given(v.Rpc))
	case *wire.Call_GetAttributes:
		c.getAttributes(given(v.GetAttributes))
	case *wire.Call_SetAttributes:
		c.setAttributes(given(v.SetAttributes))
	case *wire.Call_WaitAttribute:
		c.waitAttribute(given(v.WaitAttribute))
	case *wire.Call_Wait:
		c.wait(given(v.Wait))
	case *wire.Call_Describe:
		c.describe(given(v.Describe))
	default:
		c.rare()
	}
}

// rare serves the verbs that are not called thousands of times a second.
func (c *call) rare() {
	switch v := c.req.Verb.(type) {
	case *wire.Call_Stop:
		c.stop(given(v.Stop))
	case *wire.Call_Delete:
		c.delete(given(v.Delete))
	case *wire.Call_ListMessages:
		c.listMessages(given(v.ListMessages))
	case *wire.Call_DropMessages:
		c.dropMessages(given(v.DropMessages))
	case *wire.Call_SkipTimer:
		c.skipTimer(given(v.SkipTimer))
	case *wire.Call_Reset_:
		c.reset(given(v.Reset_))
	case *wire.Call_History:
		c.history(given(v.History))
	case *wire.Call_Watch:
		c.watch(given(v.Watch))
	case *wire.Call_Search:
		c.search(given(v.Search))
	case *wire.Call_Queues:
		c.answer(&wire.Answer{Result: &wire.Answer_Queues{Queues: &wire.QueuesReply{Queues: c.s.cfg.Workers.Queues(c.tenant)}}})
	case *wire.Call_Workers:
		c.answer(&wire.Answer{Result: &wire.Answer_Workers{Workers: &wire.WorkersReply{Workers: c.s.cfg.Workers.Workers(c.tenant)}}})
	case *wire.Call_PutSchedule, *wire.Call_GetSchedule, *wire.Call_ListSchedules, *wire.Call_PauseSchedule,
		*wire.Call_TriggerSchedule, *wire.Call_BackfillSchedule, *wire.Call_DeleteSchedule:
		c.schedule()
	case nil:
		c.fail(refuse(Invalid, "the call has no verb"))
	default:
		c.fail(refuse(NotServed, "this server does not know the verb %T", v))
	}
}

func (c *call) search(q *wire.SearchRequest) {
	if c.s.cfg.Searcher == nil {
		c.fail(refuse(NotServed, "search is not served by this node"))
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		rep, err := c.s.cfg.Searcher.Search(ctx, c.tenant, q)
		return &wire.Answer{Result: &wire.Answer_Search{Search: rep}}, err
	})
}

func (c *call) schedule() {
	if c.s.cfg.Schedules == nil {
		c.fail(refuse(NotServed, "schedules are not served by this node"))
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		return c.s.cfg.Schedules.Do(ctx, c.tenant, c.req)
	})
}
