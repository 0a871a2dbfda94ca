//go:build e2e

package flows

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// hold starts a flow whose only step works for ms, and waits until it has begun.
func hold(t *testing.T, c *client.Client, id string, ms int) {
	t.Helper()
	ctx := within(t, patience)
	if _, err := client.Start(ctx, c, holding, id, flow.To(Hold{}, ms)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the begin of "+id, func() bool {
		i, err := c.Describe(ctx, id)
		return err == nil && len(i.Steps) == 1 && i.Steps[0].State == "running"
	})
}

// ended says how a flow ended, and at which attempt.
func ended(t *testing.T, c *client.Client, id string) (client.Status, int) {
	t.Helper()
	ctx := within(t, patience)
	i, err := c.Wait(ctx, id, "")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for e, err := range c.History(ctx, id, client.HistoryOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		n = max(n, e.Attempt)
	}
	return i.Status, n
}

// TestServerDrains: SIGTERM lets running steps finish within drain_timeout; the
// workers come to the next server at the address by themselves.
func TestServerDrains(t *testing.T) {
	s := newTarget(t, "drain_timeout: 10s\n")
	s.start()
	pool := newWorkers(t, s)
	worker := pool.start()
	c := s.client(client.Options{Patience: patience})
	eventually(t, "the worker", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 })
	hold(t, c, "held", 1500)
	s.stop()
	s.start()
	if status, n := ended(t, c, "held"); status != client.Completed || n != 1 {
		t.Errorf("the step that ran when the server was stopped: %s at attempt %d, want completed at the first", status, n)
	}
	hold(t, c, "next", 10)
	if status, _ := ended(t, c, "next"); status != client.Completed {
		t.Errorf("the flow after it is %s", status)
	}
	if worker.over() {
		t.Errorf("the worker has ended:\n%s", worker.log)
	}
	if n := strings.Count(worker.log.String(), "msg=connected"); n != 2 {
		t.Errorf("the worker has connected %d times, want 2", n)
	}
}

// TestServerDrainsOnlySoLong: a step that runs longer than drain_timeout is left
// to the next server.
func TestServerDrainsOnlySoLong(t *testing.T) {
	s := newTarget(t, "drain_timeout: 300ms\n")
	s.start()
	newWorkers(t, s).start()
	c := s.client(client.Options{Patience: patience})
	eventually(t, "the worker", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 })
	hold(t, c, "held", 2500)
	began := time.Now()
	s.stop()
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the drain took %v, want about 300ms", took)
	}
	s.start()
	if status, n := ended(t, c, "held"); status != client.Completed || n != 2 {
		t.Errorf("the step that was left behind: %s at attempt %d, want completed at the second", status, n)
	}
}

// TestWorkerDrains: SIGTERM lets a worker finish what it has; it gets nothing
// new, which goes to the others.
func TestWorkerDrains(t *testing.T) {
	s := newTarget(t, "")
	s.start()
	pool := newWorkers(t, s)
	first := pool.start()
	c := s.client(client.Options{})
	eventually(t, "the worker", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 })
	hold(t, c, "held", 1000)
	first.signal(syscall.SIGTERM)
	eventually(t, "the drain", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 && w[0].Draining })
	ctx := within(t, patience)
	if _, err := client.Start(ctx, c, holding, "other", flow.To(Hold{}, 1)); err != nil {
		t.Fatal(err)
	}
	pool.start()
	for _, id := range []string{"other", "held"} {
		if status, n := ended(t, c, id); status != client.Completed || n != 1 {
			t.Errorf("%s is %s at attempt %d, want completed at the first", id, status, n)
		}
	}
	if code := first.exit(t); code != 0 {
		t.Errorf("the worker ended with %d:\n%s", code, first.log)
	}
}
