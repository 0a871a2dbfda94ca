// Command temporal puts Temporal under the load of Perdure's benchmark. Its
// worker runs in this process, too. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	bench "github.com/perdure-dev/perdure/bench/peers/drive"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	queue     = "bench"
	namespace = "bench"
	// objects is fewer than the other peers have: each is started first, and
	// holds a place in the worker's cache.
	objects = 256
	// wakesPerRun bounds the history of a waiting workflow; it goes on as new.
	wakesPerRun = 50
	startLimit  = time.Minute
)

type peer struct {
	target string
	client client.Client

	mu    sync.Mutex
	slots []*slot
}

// slot is where a client of channel-wake meets its waiting workflow.
type slot struct{ woke chan time.Time }

func main() {
	p := &peer{}
	flag.StringVar(&p.target, "target", "127.0.0.1:7233", "host and port of the frontend")
	(&bench.Command{
		Peer: "temporal", Open: p.open,
		Scenarios: []bench.Scenario{
			{Name: "flow-start", Prepare: p.flow(1, false)},
			{Name: "flow-start-local", Prepare: p.flow(1, true)},
			{Name: "sequential-steps", Units: bench.Steps, Prepare: p.flow(bench.Steps, false)},
			{Name: "sequential-steps-local", Units: bench.Steps, Prepare: p.flow(bench.Steps, true)},
			{Name: "rpc-read", Prepare: p.read},
			{Name: "rpc-locked-update", Prepare: p.update},
			{Name: "channel-wake", Prepare: p.wake},
		},
	}).Main()
}

// open registers the namespace, connects, and starts a worker.
func (p *peer) open(ctx context.Context) (func(), error) {
	log := sdklog.NewStructuredLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err := p.register(ctx, log); err != nil {
		return nil, err
	}
	c, err := client.DialContext(ctx, client.Options{HostPort: p.target, Namespace: namespace, Logger: log})
	if err != nil {
		return nil, err
	}
	w := worker.New(c, queue, worker.Options{
		MaxConcurrentWorkflowTaskExecutionSize: 1000, MaxConcurrentActivityExecutionSize: 1000,
		MaxConcurrentLocalActivityExecutionSize: 1000,
	})
	w.RegisterWorkflow(steps)
	w.RegisterWorkflow(object)
	w.RegisterWorkflowWithOptions(p.waiter, workflow.RegisterOptions{Name: "waiter"})
	w.RegisterActivityWithOptions(add, activity.RegisterOptions{Name: "add"})
	if err := w.Start(); err != nil {
		c.Close()
		return nil, err
	}
	p.client = c
	return func() { w.Stop(); c.Close() }, nil
}

// register makes the namespace and waits until the server knows it.
func (p *peer) register(ctx context.Context, log sdklog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	n, err := client.NewNamespaceClient(client.Options{HostPort: p.target, Logger: log})
	if err != nil {
		return err
	}
	defer n.Close()
	err = n.Register(ctx, &workflowservice.RegisterNamespaceRequest{Namespace: namespace, WorkflowExecutionRetentionPeriod: durationpb.New(24 * time.Hour)})
	var exists *serviceerror.NamespaceAlreadyExists
	if err != nil && !errors.As(err, &exists) {
		return fmt.Errorf("register namespace %s: %w", namespace, err)
	}
	for {
		// Its caches learn of a namespace within seconds.
		c, err := client.DialContext(ctx, client.Options{HostPort: p.target, Namespace: namespace, Logger: log})
		if err != nil {
			return err
		}
		_, err = c.DescribeTaskQueue(ctx, queue, 1)
		c.Close()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("namespace %s: %w", namespace, err)
		case <-time.After(time.Second):
		}
	}
}

type stepsInput struct {
	Steps int
	Local bool
}

func add(_ context.Context, n int) (int, error) { return n + 1, nil }

// steps takes its steps one after the other, as activities.
func steps(ctx workflow.Context, in stepsInput) (int, error) {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
	ctx = workflow.WithLocalActivityOptions(ctx, workflow.LocalActivityOptions{StartToCloseTimeout: time.Minute})
	sum := 0
	for range in.Steps {
		var f workflow.Future
		if in.Local {
			f = workflow.ExecuteLocalActivity(ctx, add, sum)
		} else {
			f = workflow.ExecuteActivity(ctx, "add", sum)
		}
		if err := f.Get(ctx, &sum); err != nil {
			return 0, err
		}
	}
	return sum, nil
}

func (p *peer) flow(n int, local bool) func(context.Context, int) (bench.Op, error) {
	return func(context.Context, int) (bench.Op, error) {
		return func(ctx context.Context, _ int, _ time.Time) (time.Time, error) {
			run, err := p.client.ExecuteWorkflow(ctx, client.StartWorkflowOptions{TaskQueue: queue}, steps, stepsInput{n, local})
			if err != nil {
				return time.Time{}, err
			}
			var out int
			err = run.Get(ctx, &out)
			if err == nil && out != n {
				err = fmt.Errorf("a flow of %d steps gave %d", n, out)
			}
			return time.Time{}, err
		}, nil
	}
}

// object holds one number: query "get", update "add".
func object(ctx workflow.Context, n int) error {
	if err := workflow.SetQueryHandler(ctx, "get", func() (int, error) { return n, nil }); err != nil {
		return err
	}
	if err := workflow.SetUpdateHandler(ctx, "add", func(_ workflow.Context, by int) (int, error) { n += by; return n, nil }); err != nil {
		return err
	}
	err := workflow.Await(ctx, func() bool {
		return workflow.GetInfo(ctx).GetContinueAsNewSuggested() && workflow.AllHandlersFinished(ctx)
	})
	if err != nil {
		return err
	}
	return workflow.NewContinueAsNewError(ctx, object, n)
}

func objectID(i int) string { return "o" + strconv.Itoa(i) }

// overObjects starts the objects that are not there, and lets each client walk
// over all of them from a place of its own.
func (p *peer) overObjects(ctx context.Context, clients int, do func(context.Context, string) error) (bench.Op, error) {
	for i := range objects {
		o := client.StartWorkflowOptions{ID: objectID(i), TaskQueue: queue}
		if _, err := p.client.ExecuteWorkflow(ctx, o, object, 1); err != nil {
			return nil, err
		}
	}
	turn := make([]int, clients)
	return func(ctx context.Context, client int, _ time.Time) (time.Time, error) {
		turn[client]++
		return time.Time{}, do(ctx, objectID((turn[client]+client*objects/clients)%objects))
	}, nil
}

func (p *peer) read(ctx context.Context, clients int) (bench.Op, error) {
	return p.overObjects(ctx, clients, func(ctx context.Context, id string) error {
		v, err := p.client.QueryWorkflow(ctx, id, "", "get")
		if err != nil {
			return err
		}
		var n int
		return v.Get(&n)
	})
}

func (p *peer) update(ctx context.Context, clients int) (bench.Op, error) {
	return p.overObjects(ctx, clients, func(ctx context.Context, id string) error {
		h, err := p.client.UpdateWorkflow(ctx, client.UpdateWorkflowOptions{
			WorkflowID: id, UpdateName: "add", Args: []any{1}, WaitForStage: client.WorkflowUpdateStageCompleted,
		})
		if err != nil {
			return err
		}
		var n int
		return h.Get(ctx, &n)
	})
}

// waiter receives signals; the driver sees each in this process.
func (p *peer) waiter(ctx workflow.Context, number int) error {
	p.mu.Lock()
	s := p.slots[number]
	p.mu.Unlock()
	signals := workflow.GetSignalChannel(ctx, "wake")
	for n := 0; n < wakesPerRun || signals.Len() > 0; n++ {
		var v int
		signals.Receive(ctx, &v)
		if workflow.IsReplaying(ctx) {
			continue
		}
		select { // a workflow must not block on what is not the SDK's
		case s.woke <- time.Now():
		default:
		}
	}
	return workflow.NewContinueAsNewError(ctx, "waiter", number)
}

func (p *peer) wake(ctx context.Context, clients int) (bench.Op, error) {
	p.mu.Lock()
	first := len(p.slots)
	for range clients {
		p.slots = append(p.slots, &slot{woke: make(chan time.Time, 1)})
	}
	mine := p.slots[first:]
	p.mu.Unlock()
	id := func(i int) string { return "w" + strconv.Itoa(first+i) }
	for i := range mine {
		if _, err := p.client.ExecuteWorkflow(ctx, client.StartWorkflowOptions{ID: id(i), TaskQueue: queue}, "waiter", first+i); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context, client int, _ time.Time) (time.Time, error) {
		s := mine[client]
		if err := p.client.SignalWorkflow(ctx, id(client), "", "wake", 1); err != nil {
			return time.Time{}, err
		}
		select {
		case t := <-s.woke:
			return t, nil
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		}
	}, nil
}
