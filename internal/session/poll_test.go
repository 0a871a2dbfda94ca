package session

import (
	"errors"
	"slices"
	"testing"

	"github.com/perdure-dev/perdure/internal/agent"
)

// polled reads a watcher to its end without ever waiting in it, and gives the
// names of its durable events.
func (w *world) polled(watch *Watcher) (names []string) {
	w.t.Helper()
	wake := make(chan struct{}, 1)
	watch.Notify(func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	for range wake {
		for {
			evs, err := watch.Poll(w.ctx)
			if errors.Is(err, ErrEnded) {
				return names
			}
			if err != nil {
				w.t.Fatalf("after %q: %v", names, err)
			}
			if len(evs) == 0 {
				break
			}
			for _, e := range evs {
				if e.Durable != nil {
					names = append(names, e.Name)
				}
			}
		}
	}
	return names
}

// TestPoll: whoever polls when told gets all that whoever waits gets: of a turn
// that runs, of one that was asked for twice, and from the log.
func TestPoll(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	want := []string{EventTurnStarted, agent.EventMessage, agent.EventCompleted}
	req := turnRequest("hold", enqueue)
	req.RequestID = "r1"
	live, err := w.svc.StartTurn(w.ctx, tenant, "x", req)
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	w.awaitHeld()
	for {
		evs, err := live.Poll(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(evs) == 0 {
			break // it runs, and Poll does not wait
		}
		if evs[0].Name != EventTurnStarted && evs[0].Delta == nil {
			t.Fatalf("events %v", evs)
		}
	}
	again, err := w.svc.StartTurn(w.ctx, tenant, "x", req)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	w.release <- struct{}{}
	if got := w.polled(live); !slices.Equal(got, want[1:]) {
		t.Errorf("live: %q", got)
	}
	if got := w.polled(again); !slices.Equal(got, want) {
		t.Errorf("asked for twice: %q", got)
	}
	logged, err := w.svc.WatchTurn(w.ctx, tenant, "x", live.Turn(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer logged.Close()
	if got := w.polled(logged); !slices.Equal(got, want) {
		t.Errorf("from the log: %q", got)
	}
}
