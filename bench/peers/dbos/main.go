// Command dbos puts DBOS under the load of Perdure's benchmark. DBOS is a
// library: its workflows run in this process, on PostgreSQL. See README.md.
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

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	bench "github.com/perdure-dev/perdure/bench/peers/drive"
)

const (
	// wakesPerWorkflow bounds the rows of one waiting workflow; the next one goes
	// on in its place.
	wakesPerWorkflow = 50
	// patience bounds the waits for events and messages.
	patience = time.Minute
	topic    = "wake"
)

type peer struct {
	database string
	dbos     dbos.Context

	mu    sync.Mutex
	slots []*slot
}

// slot is where a client of channel-wake meets its waiting workflow.
type slot struct {
	wakes int            // of one workflow
	id    chan string    // of the workflow that waits
	woke  chan time.Time // when it went on
	quit  <-chan struct{}
}

func main() {
	p := &peer{}
	flag.StringVar(&p.database, "database", "", "PostgreSQL URL of the system database")
	(&bench.Command{
		Peer: "dbos", Open: p.open,
		Scenarios: []bench.Scenario{
			{Name: "flow-start", Prepare: p.flow(1)},
			{Name: "sequential-steps", Units: bench.Steps, Prepare: p.flow(bench.Steps)},
			{Name: "rpc-read", Prepare: p.getEvent},
			{Name: "channel-wake", Prepare: p.wake(wakesPerWorkflow)},
			{Name: "channel-wake-once", Prepare: p.wake(1)},
		},
	}).Main()
}

func (p *peer) open(ctx context.Context) (func(), error) {
	c, err := dbos.NewContext(ctx, dbos.Config{
		AppName: "perdure-bench", DatabaseURL: p.database, ApplicationVersion: "1",
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return nil, err
	}
	dbos.RegisterWorkflow(c, steps)
	dbos.RegisterWorkflow(c, holder)
	dbos.RegisterWorkflow(c, p.waiter, dbos.WithWorkflowName("waiter"))
	if err := dbos.Launch(c); err != nil {
		return nil, err
	}
	p.dbos = c
	return func() { _ = dbos.Shutdown(c, 10*time.Second) }, nil
}

// steps takes n steps one after the other, each recorded before the next.
func steps(ctx dbos.Context, n int) (int, error) {
	sum := 0
	for range n {
		v, err := dbos.RunAsStep(ctx, func(context.Context) (int, error) { return sum + 1, nil }, dbos.WithStepName("add"))
		if err != nil {
			return 0, err
		}
		sum = v
	}
	return sum, nil
}

func (p *peer) flow(n int) func(context.Context, int) (bench.Op, error) {
	return func(context.Context, int) (bench.Op, error) {
		return func(context.Context, int, time.Time) (time.Time, error) {
			h, err := dbos.RunWorkflow(p.dbos, steps, n)
			if err != nil {
				return time.Time{}, err
			}
			out, err := h.GetResult()
			if err == nil && out != n {
				err = fmt.Errorf("a flow of %d steps gave %d", n, out)
			}
			return time.Time{}, err
		}, nil
	}
}

// holder sets the event that rpc-read gets.
func holder(ctx dbos.Context, n int) (int, error) {
	return n, dbos.SetEvent(ctx, "n", n)
}

func (p *peer) getEvent(ctx context.Context, clients int) (bench.Op, error) {
	for i := range bench.Objects {
		h, err := dbos.RunWorkflow(p.dbos, holder, i, dbos.WithWorkflowID(objectID(i)))
		if err == nil {
			_, err = h.GetResult()
		}
		if err != nil {
			return nil, err
		}
	}
	turn := make([]int, clients)
	return func(_ context.Context, client int, _ time.Time) (time.Time, error) {
		// Each client walks over all of them from a place of its own.
		turn[client]++
		i := (turn[client] + client*bench.Objects/clients) % bench.Objects
		n, err := dbos.GetEvent[int](p.dbos, objectID(i), "n", patience)
		if err == nil && n != i {
			err = fmt.Errorf("the event of %d is %d", i, n)
		}
		return time.Time{}, err
	}, nil
}

func objectID(i int) string { return "o" + strconv.Itoa(i) }

// waiter receives again and again, and a new workflow goes on at the end.
func (p *peer) waiter(ctx dbos.Context, number int) (int, error) {
	id, err := dbos.GetWorkflowID(ctx)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	s := p.slots[number]
	p.mu.Unlock()
	for range s.wakes {
		select {
		case s.id <- id:
		case <-s.quit:
			return 0, nil // the point is over
		}
		_, err := dbos.Recv[int](ctx, topic, patience)
		now := time.Now()
		if errors.Is(err, dbos.ErrTimeout) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		select {
		case s.woke <- now:
		case <-s.quit:
			return 0, nil
		}
	}
	go func() { _ = p.start(number) }()
	return 0, nil
}

func (p *peer) start(number int) error {
	_, err := dbos.RunWorkflow(p.dbos, p.waiter, number)
	return err
}

// wake keeps a waiting workflow for each client, which wakes it so many times
// before the next takes its place.
func (p *peer) wake(wakes int) func(context.Context, int) (bench.Op, error) {
	return func(ctx context.Context, clients int) (bench.Op, error) {
		p.mu.Lock()
		first := len(p.slots)
		for range clients {
			p.slots = append(p.slots, &slot{wakes: wakes, id: make(chan string, 1), woke: make(chan time.Time), quit: ctx.Done()})
		}
		mine := p.slots[first:]
		p.mu.Unlock()
		for i := range mine {
			if err := p.start(first + i); err != nil {
				return nil, err
			}
		}
		return func(ctx context.Context, client int, _ time.Time) (time.Time, error) {
			s := mine[client]
			var id string
			select {
			case id = <-s.id:
			case <-ctx.Done():
				return time.Time{}, ctx.Err()
			}
			if err := dbos.Send(p.dbos, id, 1, topic); err != nil {
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
}
