package session

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	enqueue   = wire.Publish_ENQUEUE
	reject    = wire.Publish_REJECT
	interrupt = wire.Publish_INTERRUPT
)

// Each way in which a turn can end gives its ticket back, once.
func TestTicketsAreGivenBackOnce(t *testing.T) {
	outcomes := func(pairs ...any) map[string]int {
		m := map[string]int{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i].(string)] = pairs[i+1].(int)
		}
		return m
	}
	for _, c := range []struct {
		name string
		run  func(w *world)
		want map[string]int
	}{
		{"completed", func(w *world) {
			w.start("x", "hi", enqueue)
			w.await(agent.EventCompleted)
		}, outcomes(agent.EventCompleted, 1)},
		{"failed", func(w *world) {
			w.start("x", "fail", enqueue)
			w.await(agent.EventFailed)
		}, outcomes(agent.EventFailed, 1)},
		{"cancelled", func(w *world) {
			w.start("x", "hold", enqueue)
			w.awaitHeld()
			if n, err := w.svc.Cancel(w.ctx, tenant, "x", "", ""); n != 1 || err != nil {
				w.t.Errorf("cancelled %d, %v", n, err)
			}
			w.await(agent.EventCancelled)
		}, outcomes(agent.EventCancelled, 1)},
		{"cancelled while it waits", func(w *world) {
			w.start("x", "hold", enqueue)
			second := w.start("x", "second", enqueue)
			w.awaitHeld()
			if n, err := w.svc.Cancel(w.ctx, tenant, "x", second.Turn(), ""); n != 1 || err != nil {
				w.t.Errorf("cancelled %d, %v", n, err)
			}
			w.await(agent.EventCancelled)
			w.release <- struct{}{}
			w.await(agent.EventCompleted)
		}, outcomes(agent.EventCancelled, 1, agent.EventCompleted, 1)},
		{"superseded, running and waiting", func(w *world) {
			w.start("x", "hold", enqueue)
			w.awaitHeld()
			w.start("x", "second", enqueue)
			w.start("x", "third", interrupt)
			w.await(agent.EventCancelled)
			w.await(agent.EventCancelled)
			w.await(agent.EventCompleted)
		}, outcomes(agent.EventCancelled, 2, agent.EventCompleted, 1)},
		{"deleted with the session", func(w *world) {
			w.start("x", "hold", enqueue)
			w.start("x", "second", enqueue)
			if err := w.svc.Delete(w.ctx, tenant, "x"); err != nil {
				w.t.Error(err)
			}
			w.await(EventDeleted)
		}, outcomes(EventDeleted, 2)},
		{"refused", func(w *world) {
			w.start("x", "hold", enqueue)
			w.start("x", "second", enqueue)
			w.start("x", "third", enqueue)
			if _, err := w.svc.StartTurn(w.ctx, tenant, "x", turnRequest("no", reject)); code(err) != core.Busy {
				w.t.Errorf("reject: %v", err)
			}
			if _, err := w.svc.StartTurn(w.ctx, tenant, "x", turnRequest("no", enqueue)); code(err) != core.QueueFull {
				w.t.Errorf("enqueue: %v", err)
			}
			if _, err := w.svc.StartTurn(w.ctx, tenant, "none", turnRequest("no", enqueue)); code(err) != core.NotFound {
				w.t.Errorf("no session: %v", err)
			}
			if n := w.gate.Stats().InFlight; n != 3 {
				w.t.Errorf("%d tickets out, want 3", n)
			}
			if _, err := w.svc.Cancel(w.ctx, tenant, "x", "", ""); err != nil {
				w.t.Error(err)
			}
			for range 3 {
				w.await(agent.EventCancelled)
			}
		}, outcomes(agent.EventCancelled, 3)},
		{"duplicate", func(w *world) {
			req := turnRequest("hold", enqueue)
			req.RequestID = "r1"
			first, err := w.svc.StartTurn(w.ctx, tenant, "x", req)
			if err != nil {
				w.t.Fatal(err)
			}
			defer first.Close()
			w.awaitHeld()
			again, err := w.svc.StartTurn(w.ctx, tenant, "x", req)
			if err != nil || !again.Duplicate || again.Turn() != first.Turn() {
				w.t.Fatalf("%+v %v", again, err)
			}
			defer again.Close()
			if n := w.gate.Stats().InFlight; n != 1 {
				w.t.Errorf("%d tickets out, want 1", n)
			}
			w.release <- struct{}{}
			w.await(agent.EventCompleted)
		}, outcomes(agent.EventCompleted, 1)},
		{"made with the session", func(w *world) {
			watch, id, err := w.svc.CreateAndStart(w.ctx, tenant, CreateRequest{Agent: "a", Stateless: true}, turnRequest("hi", enqueue))
			if err != nil || id == "" {
				w.t.Fatal(err)
			}
			defer watch.Close()
			if names, text := w.rest(watch); text != "hi" {
				w.t.Errorf("%q %q", names, text)
			}
		}, outcomes(agent.EventCompleted, 1)},
		{"made with a session that is there", func(w *world) {
			if _, _, err := w.svc.CreateAndStart(w.ctx, tenant, CreateRequest{ID: "x", Agent: "a"}, turnRequest("hi", enqueue)); code(err) != core.Exists {
				w.t.Error(err)
			}
		}, outcomes()},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 10)
			w.create("x")
			c.run(w)
			w.settled(c.want)
		})
	}
}

func TestOverload(t *testing.T) {
	w := newWorld(t, 1)
	w.create("x")
	w.create("y")
	w.start("x", "hold", enqueue)
	var over *Overloaded
	if _, err := w.svc.StartTurn(w.ctx, tenant, "y", turnRequest("hi", enqueue)); !errors.As(err, &over) || over.RetryAfter <= 0 {
		t.Fatalf("want Overloaded, got %v", err)
	}
	w.release <- struct{}{}
	w.await(agent.EventCompleted)
	w.start("y", "hi", enqueue)
	w.await(agent.EventCompleted)
	w.settled(map[string]int{agent.EventCompleted: 2})
}

// A client that takes turns one after another, at the limit, is never refused.
func TestPlaceIsFreeWhenTheEndIsSeen(t *testing.T) {
	w := newWorld(t, 1)
	w.create("x")
	for range 50 {
		w.rest(w.start("x", "hi", reject))
	}
}

func TestDrainRefusesNewTurnsOnly(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	watch := w.start("x", "hold", enqueue)
	w.awaitHeld()
	w.svc.Drain()
	if _, err := w.svc.StartTurn(w.ctx, tenant, "x", turnRequest("hi", enqueue)); !errors.Is(err, partition.ErrStopped) {
		t.Fatalf("want ErrStopped, got %v", err)
	}
	w.release <- struct{}{}
	if names, text := w.rest(watch); text != "hold on" {
		t.Errorf("%q %q", names, text)
	}
	w.settled(map[string]int{agent.EventCompleted: 1})
}

// A request that is given up by its caller is a turn all the same.
func TestLeavingDoesNotCancelTheTurn(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	w.start("x", "hold", enqueue).Close()
	w.awaitHeld()
	w.release <- struct{}{}
	w.await(agent.EventCompleted)
	w.settled(map[string]int{agent.EventCompleted: 1})
	if n := w.hub.Watched(); n != 0 {
		t.Errorf("%d flows are watched", n)
	}
}

// What was open when the process ended counts from the start of the next one,
// also beyond the gate's limit, and ends as any other.
func TestRecover(t *testing.T) {
	w := newWorld(t, 10)
	for i := range 3 {
		id := fmt.Sprint("x", i)
		w.create(id)
		w.start(id, "hold", enqueue)
		w.start(id, "waits", enqueue)
	}
	w.create("idle")
	for range 3 {
		w.awaitHeld()
	}
	w.restart(4)
	if n, s := w.svc.OpenTurns(), w.gate.Stats(); n != 6 || s.InFlight != 4 {
		t.Fatalf("%d turns open, %d tickets out", n, s.InFlight)
	}
	for range 3 {
		w.awaitHeld()
		w.release <- struct{}{}
	}
	for range 6 {
		w.await(agent.EventCompleted)
	}
	w.settled(map[string]int{agent.EventCompleted: 6})
}

func TestTicketsUnderConcurrency(t *testing.T) {
	w := newWorld(t, 0)
	const sessions = 4
	var wg sync.WaitGroup
	for i := range sessions {
		id := fmt.Sprint("x", i)
		w.create(id)
		for k := range 3 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for n := range 20 {
					busy := []wire.Publish_OnBusy{enqueue, reject, interrupt}[(k+n)%3]
					watch, err := w.svc.StartTurn(w.ctx, tenant, id, turnRequest("a b c", busy))
					if err != nil {
						if c := code(err); c != core.Busy && c != core.QueueFull {
							t.Error(err)
						}
						continue
					}
					if n%4 == 0 {
						if _, err := w.svc.Cancel(w.ctx, tenant, id, "", ""); err != nil {
							t.Error(err)
						}
					}
					if n%2 == 0 {
						w.rest(watch)
					}
					watch.Close()
				}
			}()
		}
	}
	wg.Wait()
	for i := range sessions { // what still runs
		if _, err := w.svc.Cancel(w.ctx, tenant, fmt.Sprint("x", i), "", ""); err != nil {
			t.Error(err)
		}
	}
	for w.svc.OpenTurns() > 0 && w.ctx.Err() == nil {
		for _, r := range w.set {
			if err := r.Do(w.ctx, func(*partition.Machine) {}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := w.gate.Stats().InFlight; n != 0 {
		t.Errorf("%d tickets out", n)
	}
}
