package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// Figures of the scenarios.
const (
	largeAttributes = 10
	largeBytes      = 16 << 10
	timerDelay      = 100 * time.Millisecond
	// waitersPerClient lets a woken flow come to rest before it is woken again.
	waitersPerClient = 2
	// preparing is how many flows are started at a time before the load.
	preparing = 64
)

// scenario is one that can be measured.
type scenario struct {
	name string
	what string // what an operation is, and its latency, in words
	// perOp is how many units an operation has; nil = 1.
	perOp func(*Job) int
	// objects is how many flows the calls spread over, when the job does not say.
	objects int
	prepare func(ctx context.Context, r *rig) (Op, error)
}

// scenarios are all that there are, in the order of the documents.
var scenarios = []*scenario{
	{name: "sequential-steps", what: "a step; latency is from the start call to the client's result, by the steps of the flow",
		perOp: func(j *Job) int { return j.Steps }, prepare: prepareSteps},
	{name: "flow-start", what: "a flow of one step; latency is from the start call to its result",
		prepare: func(_ context.Context, r *rig) (Op, error) { return r.runFlow(r.programs.steps, 1), nil }},
	{name: "rpc-read", what: "a call of a worker's handler that reads an attribute", objects: 1024, prepare: prepareRead},
	{name: "rpc-locked-update", what: "a call of a worker's handler that changes an attribute, durably", objects: 1024, prepare: prepareUpdate},
	{name: "attribute-read", what: "a call that reads ten attributes of 16 KiB, without a worker", objects: 256, prepare: prepareAttributes},
	{name: "channel-wake", what: "a message that wakes a waiting flow; latency is from the publish call to when the handler starts",
		prepare: prepareWake},
	{name: "channel-wake-once", what: "the same, each flow woken once: its start is a part of the load, not of the latency", prepare: prepareWakeOnce},
	{name: "timers", what: "a flow that sleeps until an instant; latency is how late its handler starts", prepare: prepareTimers},
	{name: "mixed", what: "of ten operations four reads, two updates, two flows of one step, two wakes", objects: 1024, prepare: prepareMixed},
}

// Scenarios lists names and what they measure.
func Scenarios() (names, what []string) {
	for _, s := range scenarios {
		names, what = append(names, s.name), append(what, s.what)
	}
	return names, what
}

func findScenario(name string) (*scenario, error) {
	names := make([]string, 0, len(scenarios))
	for _, s := range scenarios {
		if s.name == name {
			return s, nil
		}
		names = append(names, s.name)
	}
	return nil, fmt.Errorf("there is no scenario %q: use one of %s", name, strings.Join(names, ", "))
}

// rig is what the operations of one job have.
type rig struct {
	job      *Job
	client   *client.Client
	programs *programs // definitions only: no handler runs in the client
	wakes    *wakeReceiver
	flows    atomic.Uint64 // started by operations
}

// flowID is of a flow that is started once.
func (r *rig) flowID(kind string) string {
	return r.job.Run + kind + "/" + strconv.FormatUint(r.flows.Add(1), 10)
}

// runFlow runs a flow of n steps to its end.
func (r *rig) runFlow(f *flow.Flow, n int) Op {
	return func(ctx context.Context, _ int, _ time.Time) (time.Time, error) {
		id := r.flowID("run")
		if _, err := client.Start(ctx, r.client, f, id, flow.To(flow.Ref[progress]("next"), progress{Of: n})); err != nil {
			return time.Time{}, fmt.Errorf("start: %w", err)
		}
		got, err := client.Result[int](ctx, r.client, id)
		if err != nil {
			return time.Time{}, fmt.Errorf("result: %w", err)
		}
		if got != n {
			return time.Time{}, fmt.Errorf("a flow of %d steps gave %d", n, got)
		}
		return time.Time{}, nil
	}
}

func prepareSteps(_ context.Context, r *rig) (Op, error) {
	return r.runFlow(r.programs.sequence(r.job.Durability), r.job.Steps), nil
}

// each runs do for 0 to n-1, several at a time, and gives the first error.
func each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, preparing) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				if err := do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// startHolders starts the flows that calls are spread over.
func (r *rig) startHolders(ctx context.Context, with func(i int) []flow.StartOption) error {
	return each(ctx, r.job.Objects, func(ctx context.Context, i int) error {
		opts := append([]flow.StartOption{flow.Reuse(flow.AttachExisting)}, with(i)...)
		_, err := client.Start(ctx, r.client, r.programs.holder, holderID(i), flow.NoStep, opts...)
		return err
	})
}

// spread gives each client a walk over all objects from a place of its own.
func (r *rig) spread() func(client int) string {
	ids := make([]string, r.job.Objects)
	for i := range ids {
		ids[i] = holderID(i)
	}
	turn := make([]int, r.job.Clients)
	return func(client int) string {
		turn[client]++
		return ids[(turn[client]+client*len(ids)/len(turn))%len(ids)]
	}
}

func (r *rig) startNumbers(ctx context.Context) error {
	return r.startHolders(ctx, func(i int) []flow.StartOption { return []flow.StartOption{flow.With(number, i)} })
}

func prepareRead(ctx context.Context, r *rig) (Op, error) {
	object := r.spread()
	return func(ctx context.Context, c int, _ time.Time) (time.Time, error) {
		_, err := client.Call(ctx, r.client, object(c), get, flow.None{})
		return time.Time{}, err
	}, r.startNumbers(ctx)
}

func prepareUpdate(ctx context.Context, r *rig) (Op, error) {
	object := r.spread()
	return func(ctx context.Context, c int, _ time.Time) (time.Time, error) {
		_, err := client.Call(ctx, r.client, object(c), add, 1)
		return time.Time{}, err
	}, r.startNumbers(ctx)
}

func prepareAttributes(ctx context.Context, r *rig) (Op, error) {
	// Values that do not compress, as real ones would not to nothing.
	text := make([]byte, largeBytes-2) // and the quotes
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range text {
		text[i] = 'a' + byte(rng.IntN(26))
	}
	err := r.startHolders(ctx, func(int) []flow.StartOption {
		var opts []flow.StartOption
		for i := range largeAttributes {
			opts = append(opts, flow.With(large.At(i), string(text)))
		}
		return opts
	})
	object := r.spread()
	return func(ctx context.Context, c int, _ time.Time) (time.Time, error) {
		got, err := r.client.Attributes(ctx, object(c))
		if err != nil {
			return time.Time{}, err
		}
		n := 0
		for _, a := range got {
			n += len(a.Value)
		}
		if len(got) != largeAttributes || n != largeAttributes*largeBytes {
			err = fmt.Errorf("%d attributes with %d bytes came, want %d with %d", len(got), n, largeAttributes, largeAttributes*largeBytes)
		}
		return time.Time{}, err
	}, err
}

// errNoWake is a handler that does not start.
var errNoWake = errors.New("the message was acknowledged, and its handler did not start in time")

// wakePatience is how long a handler may take to start.
const wakePatience = 30 * time.Second

// await gives when a waiter's handler started.
func await(ctx context.Context, woke <-chan time.Time) (time.Time, error) {
	// The channel is nearly always ready soon; a timer is made for the rest.
	late := time.NewTimer(wakePatience)
	defer late.Stop()
	select {
	case t := <-woke:
		return t, nil
	case <-ctx.Done():
		return time.Time{}, ctx.Err()
	case <-late.C:
		return time.Time{}, errNoWake
	}
}

// waiter is a flow that waits for messages, and where the client hears of it.
type waiter struct {
	id     string
	number int
	woke   <-chan time.Time
}

func (r *rig) newWaiter() (w waiter) {
	w.number, w.woke = r.wakes.slot()
	return w
}

// start starts its flow, under a new ID.
func (w *waiter) start(ctx context.Context, r *rig, once bool) error {
	w.id = r.flowID("waiter")
	_, err := client.Start(ctx, r.client, r.programs.waiter, w.id, flow.To(flow.Ref[waiting]("wait"), waiting{w.number, once}))
	return err
}

// wake wakes it and gives when its handler started.
func (w *waiter) wake(ctx context.Context, r *rig) (time.Time, error) {
	select {
	case <-w.woke: // of an attempt that was handed out again
	default:
	}
	if err := client.Publish(ctx, r.client, w.id, wakeUp, 1); err != nil {
		return time.Time{}, err
	}
	return await(ctx, w.woke)
}

func prepareWake(ctx context.Context, r *rig) (Op, error) {
	all := make([]waiter, r.job.Clients*waitersPerClient)
	err := each(ctx, len(all), func(ctx context.Context, i int) error {
		all[i] = r.newWaiter()
		return all[i].start(ctx, r, false)
	})
	turn := make([]int, r.job.Clients)
	return func(ctx context.Context, c int, _ time.Time) (time.Time, error) {
		turn[c] = (turn[c] + 1) % waitersPerClient
		return all[c*waitersPerClient+turn[c]].wake(ctx, r)
	}, err
}

// prepareWakeOnce keeps a started waiter at hand for each client: it starts the
// next one when the last was woken.
func prepareWakeOnce(ctx context.Context, r *rig) (Op, error) {
	ready := make([]waiter, r.job.Clients)
	err := each(ctx, len(ready), func(ctx context.Context, i int) error {
		ready[i] = r.newWaiter()
		return ready[i].start(ctx, r, true)
	})
	return func(ctx context.Context, c int, from time.Time) (time.Time, error) {
		begin := time.Now()
		woke, err := ready[c].wake(ctx, r)
		if err != nil {
			return time.Time{}, err
		}
		return from.Add(woke.Sub(begin)), ready[c].start(ctx, r, true)
	}, err
}

func prepareTimers(_ context.Context, r *rig) (Op, error) {
	numbers, woke := make([]int, r.job.Clients), make([]<-chan time.Time, r.job.Clients)
	for i := range woke {
		numbers[i], woke[i] = r.wakes.slot()
	}
	return func(ctx context.Context, c int, from time.Time) (time.Time, error) {
		due := time.Now().Add(timerDelay).Truncate(time.Millisecond)
		first := flow.To(flow.Ref[sleeping]("sleep"), sleeping{numbers[c], due.UnixMilli()})
		if _, err := client.Start(ctx, r.client, r.programs.timers, r.flowID("timer"), first); err != nil {
			return time.Time{}, err
		}
		at, err := await(ctx, woke[c])
		// Truncated to a millisecond, due has no monotonic reading any more.
		return from.Add(time.Duration(at.UnixNano() - due.UnixNano())), err
	}, nil
}

func prepareMixed(ctx context.Context, r *rig) (Op, error) {
	read, err1 := prepareRead(ctx, r)
	update, err2 := prepareUpdate(ctx, r)
	wake, err3 := prepareWake(ctx, r)
	start := r.runFlow(r.programs.steps, 1)
	mix := [10]Op{read, start, read, update, wake, read, start, read, update, wake}
	turn := make([]int, r.job.Clients)
	for c := range turn {
		turn[c] = c // or all clients would do the same thing at once
	}
	return func(ctx context.Context, c int, from time.Time) (time.Time, error) {
		turn[c] = (turn[c] + 1) % len(mix)
		return mix[turn[c]](ctx, c, from)
	}, errors.Join(err1, err2, err3)
}
