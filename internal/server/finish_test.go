package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// TestStopLeavesNoCallUnknown: a server that is told to stop while clients ask it
// for things answers all that it took; what it did not take is refused. After the
// next start each flow has exactly what its client was told.
func TestStopLeavesNoCallUnknown(t *testing.T) {
	dir := t.TempDir()
	s := openServer(t, dir)
	address, end := serving(t, s)

	sum := flow.NewAttribute[int]("sum")
	entered, release := make(chan bool, 1), make(chan bool)
	add := flow.NewLockedRPC("add", func(ctx *flow.UpdateContext, n int) (int, error) {
		if n == 0 {
			entered <- true
			<-release
		}
		was, err := sum.Get(ctx)
		sum.Set(ctx, was+1)
		return was + 1, err
	})
	never := flow.StepFunc("never", func(*flow.Context, flow.None) (flow.Decision, error) { return flow.DeadEnd(), nil }).
		WithWait(func(*flow.Context, flow.None) (flow.Wait, error) {
			return flow.AnyOf(flow.After("long", time.Hour)), nil
		})
	sums := flow.Define("sums", sum, add, flow.Step(never))
	stopWorker := working(t, flow.WorkerOptions{Address: address}, sums)

	late, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(late, client.Options{Address: address, Patience: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const callers = 16
	id := func(i int) string { return fmt.Sprint("sum-", i) }
	for i := range callers + 2 {
		eventually(t, late, func() error {
			_, err := client.Start(late, c, sums, id(i), flow.To(never, flow.None{}))
			return err
		})
	}

	var all sync.WaitGroup
	refused := func(what string, err error) {
		if !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrUnknown) {
			t.Errorf("%s: %v, want it refused", what, err)
		}
	}
	var asked, told [callers]atomic.Int64
	for i := range callers {
		all.Go(func() {
			for {
				n, err := client.Call(late, c, id(i), add, 1)
				if err != nil {
					refused("call", err)
					return
				}
				told[i].Store(int64(n))
			}
		})
		all.Go(func() {
			for {
				// Without a key of its own: to repeat it is not safe.
				n := asked[i].Load() + 1
				if err := c.SetAttributes(late, id(callers), client.Attribute{Name: "sum", Value: []byte("1")}); err != nil {
					refused("write", err)
					return
				}
				asked[i].Store(n)
			}
		})
	}
	all.Go(func() {
		_, err := c.Wait(late, id(0), "")
		refused("wait", err)
	})
	all.Go(func() {
		for _, err := range c.Watch(late, id(1), client.Cursor{}) {
			if err != nil {
				refused("watch", err)
			}
		}
	})
	inHand := make(chan error, 1)
	go func() {
		_, err := client.Call(late, c, id(callers+1), add, 0)
		inHand <- err
	}()
	<-entered
	eventually(t, late, func() error {
		for i := range callers {
			if told[i].Load() < 3 || asked[i].Load() < 3 {
				return fmt.Errorf("caller %d has no answers", i)
			}
		}
		return nil
	})
	ended := make(chan bool)
	go func() { end(); close(ended) }()
	eventually(t, late, func() error {
		if s.Ready() == nil {
			return errors.New("it does not stop")
		}
		return nil
	})
	close(release)
	if err := <-inHand; err != nil {
		t.Errorf("the call that a worker had when the stop came: %v", err)
	}
	all.Wait()
	<-ended
	stopWorker()
	c.Close()

	s = openServer(t, dir)
	address, _ = serving(t, s)
	if c, err = client.Dial(late, client.Options{Address: address}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range callers {
		if got, err := client.Get(late, c, id(i), sum); err != nil || int64(got) != told[i].Load() {
			t.Errorf("flow %s has %d, %v; its client was told %d", id(i), got, err, told[i].Load())
		}
	}
}
