package session

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestTurnIsWatchedFromItsStartToItsEnd(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	names, text := w.rest(w.start("x", "one two three", enqueue))
	names = slices.DeleteFunc(names, func(n string) bool { return n == EventDelta }) // none, when the model was quicker than the commit
	if want := []string{EventTurnStarted, agent.EventMessage, agent.EventCompleted}; text != "one two three" || !slices.Equal(names, want) {
		t.Fatalf("%q %q", names, text)
	}
}

func TestQueuedTurn(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	first := w.start("x", "hold", enqueue)
	w.awaitHeld()
	second := w.start("x", "mine", enqueue)
	if !first.Started || second.Started {
		t.Fatalf("started: first %t second %t", first.Started, second.Started)
	}
	w.release <- struct{}{}
	names, text := w.rest(second)
	if names[0] != EventTurnQueued || names[1] != EventTurnStarted || names[len(names)-1] != agent.EventCompleted || text != "mine" {
		t.Fatalf("%q %q", names, text) // nothing of the first turn is among them
	}
	w.rest(first)
}

// A request that is sent again gets the same turn, whole, while it runs and
// after it has ended.
func TestDuplicateRequestGetsTheWholeTurn(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	req := turnRequest("hold", enqueue)
	req.RequestID = "r1"
	again := func() *Watcher {
		t.Helper()
		watch, err := w.svc.StartTurn(w.ctx, tenant, "x", req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(watch.Close)
		return watch
	}
	first := again()
	w.awaitHeld()
	during := again()
	if first.Duplicate || !during.Duplicate || during.Turn() != first.Turn() {
		t.Fatalf("first %+v, again %+v", first, during)
	}
	w.release <- struct{}{}
	wantNames, wantText := w.rest(first)
	if names, text := w.rest(during); text != wantText || names[0] != EventTurnStarted {
		t.Errorf("during: %q %q, the first got %q", names, text, wantNames)
	}
	after := again()
	names, _ := w.rest(after)
	if want := []string{EventTurnStarted, agent.EventMessage, agent.EventCompleted}; !after.Duplicate || !slices.Equal(names, want) {
		t.Errorf("after: %q", names)
	}
}

// A start whose request IDs were forgotten has no turn to show, and says so.
func TestDuplicateStartWithoutATurn(t *testing.T) {
	w := newWorld(t, 0)
	create := CreateRequest{ID: "x", Agent: "a", RequestID: "r1"}
	watch, _, err := w.svc.CreateAndStart(w.ctx, tenant, create, turnRequest("hi", enqueue))
	if err != nil {
		t.Fatal(err)
	}
	w.rest(watch)
	watch.Close()
	if _, _, err := w.svc.CreateAndStart(w.ctx, tenant, create, turnRequest("hi", enqueue)); code(err) != core.Exists {
		t.Fatalf("want %s, got %v", core.Exists, err)
	}
	w.settled(map[string]int{agent.EventCompleted: 1})
}

func TestWatchFromAnyCursor(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	watch := w.start("x", "hi", enqueue)
	var ids []string
	for {
		evs, err := watch.Next(w.ctx)
		if errors.Is(err, ErrEnded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if e.ID != "" {
				ids = append(ids, e.ID)
			}
		}
	}
	for i, id := range ids[:len(ids)-1] {
		again, err := w.svc.WatchTurn(w.ctx, tenant, "x", watch.Turn(), id)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for {
			evs, err := again.Next(w.ctx)
			if errors.Is(err, ErrEnded) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range evs {
				got = append(got, e.ID)
				if e.Durable == nil || !strings.Contains(string(e.SSE), "id: "+e.ID+"\n") {
					t.Errorf("%+v", e)
				}
			}
		}
		again.Close()
		if !slices.Equal(got, ids[i+1:]) {
			t.Errorf("after %s: %v, want %v", id, got, ids[i+1:])
		}
	}
}

func TestWatcherThatComesInTheMiddleGetsTheTextSoFar(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	turn := w.start("x", "hold this text", enqueue).Turn()
	w.awaitHeld()
	watch, err := w.svc.WatchTurn(w.ctx, tenant, "x", turn, "")
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	w.release <- struct{}{}
	if names, text := w.rest(watch); text != "hold this text on" || names[0] != EventTurnStarted || names[1] != EventDelta {
		t.Fatalf("%q %q", names, text)
	}
}

func TestDeletedSessionEndsItsWatchers(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	turn := w.start("x", "hold", enqueue)
	w.awaitHeld()
	queued := w.start("x", "waits", enqueue)
	all, err := w.svc.Watch(w.ctx, tenant, "x", "")
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	if err := w.svc.Delete(w.ctx, tenant, "x"); err != nil {
		t.Fatal(err)
	}
	w.create("x") // the next session of that ID is not theirs
	for _, watch := range []*Watcher{turn, queued, all} {
		names, _ := w.rest(watch)
		if names[len(names)-1] != EventDeleted {
			t.Errorf("%q", names)
		}
	}
}

// A turn that begins in the next session of an ID is not ended by the news that
// the one before was deleted.
func TestTurnOfTheNextSessionOfAnID(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	r := w.set.For(tenant + "/s/x")
	held, hold := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	run := func(f func() error) {
		proposals := func() (n uint64) {
			if err := r.Do(w.ctx, func(m *partition.Machine) { n = m.Stats().Proposals }); err != nil {
				t.Fatal(err)
			}
			return n
		}
		before := proposals()
		all.Add(1)
		go func() {
			defer all.Done()
			if err := f(); err != nil {
				t.Error(err)
			}
		}()
		for proposals() == before && w.ctx.Err() == nil {
		}
	}
	go func() {
		if err := r.OnLog(w.ctx, func() { close(held); <-hold }); err != nil {
			t.Error(err)
		}
	}()
	<-held // nothing is committed now
	run(func() error { return w.svc.Delete(w.ctx, tenant, "x") })
	run(func() error { return second(w.svc.Create(w.ctx, tenant, CreateRequest{ID: "x", Agent: "a"})) })
	run(func() error {
		watch, err := w.svc.StartTurn(w.ctx, tenant, "x", turnRequest("hi", enqueue))
		if err != nil {
			return err
		}
		defer watch.Close()
		if names, text := w.rest(watch); text != "hi" || names[0] != EventTurnStarted {
			return fmt.Errorf("%q %q", names, text)
		}
		return nil
	})
	close(hold)
	all.Wait()
}

// No delta is given once its message is complete: a client would show the text
// a second time.
func TestNoDeltaAfterItsMessage(t *testing.T) {
	delta := func(exec uint64) stream.Frame {
		return stream.Frame{Delta: &stream.Delta{Scope: "t1", Exec: exec, Text: "x"}}
	}
	item := func(lsn, exec uint64, typ string) stream.Frame {
		return stream.Frame{Item: &stream.Item{Event: &wire.Event{Lsn: lsn, Exec: exec, Type: typ, Scope: "t1"}}}
	}
	watch := &Watcher{}
	var got []string
	for _, e := range watch.convert(nil, []stream.Frame{
		delta(4), item(10, 4, agent.EventMessage), delta(4), delta(7), item(11, 7, agent.EventMessage), item(11, 7, agent.EventMessage),
		item(9, 7, agent.EventCompleted), item(12, 7, agent.EventCompleted), delta(7), delta(8)}) {
		word := e.Name
		if e.Delta != nil {
			word = fmt.Sprint("delta ", e.Delta.Exec)
		}
		got = append(got, word)
	}
	if want := "delta 4,message.completed,delta 7,message.completed,turn.completed,delta 8"; strings.Join(got, ",") != want {
		t.Fatalf("%s\nwant %s", strings.Join(got, ","), want)
	}
}

// Watchers come at any moment, from any cursor, and each sees exactly the rest
// of the log, in order, and text that fits.
func TestWatchersSeeEachEventOnce(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	const turns = 60
	var mu sync.Mutex
	seen := map[string][]string{} // by cursor: the IDs after it
	var readers sync.WaitGroup
	read := func(after string, from int) {
		defer readers.Done()
		watch, err := w.svc.Watch(w.ctx, tenant, "x", after)
		if err != nil {
			t.Error(err)
			return
		}
		defer watch.Close()
		var ids []string
		text := map[uint64]string{}
		for done := from; done < turns; {
			evs, err := watch.Next(w.ctx)
			if err != nil {
				t.Error(err)
				return
			}
			for _, e := range evs {
				if d := e.Delta; d != nil {
					if d.Offset > len(text[d.Exec]) {
						t.Errorf("delta at %d after %d bytes", d.Offset, len(text[d.Exec]))
						return
					}
					text[d.Exec] = text[d.Exec][:d.Offset] + d.Text
					continue
				}
				ids = append(ids, e.ID)
				if e.Name == agent.EventMessage {
					if said, ok := text[e.Durable.Exec]; ok && !strings.Contains(string(e.Durable.Items[0]), `"`+said+`"`) {
						t.Errorf("deltas %q of message %s", said, e.Durable.Items[0])
					}
				}
				if e.Name == agent.EventCompleted {
					done++
				}
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if had, ok := seen[after]; ok && !slices.Equal(had, ids) {
			t.Errorf("after %q two watchers saw %v and %v", after, had, ids)
		}
		seen[after] = ids
	}
	last := ""
	for i := range turns {
		if i%6 == 0 {
			readers.Add(3)
			go read(last, i)
			go read("", 0)
			go read("", 0)
		}
		watch := w.start("x", fmt.Sprintf("turn %d of many", i), enqueue)
		for ended := false; !ended; {
			evs, err := watch.Next(w.ctx)
			if ended = errors.Is(err, ErrEnded); err != nil && !ended {
				t.Fatal(err)
			}
			for _, e := range evs {
				if e.ID != "" {
					last = e.ID
				}
			}
		}
		watch.Close()
	}
	readers.Wait()
	all := seen[""]
	if len(all) != 3*turns { // started, message, completed
		t.Fatalf("%d events", len(all))
	}
	for after, ids := range seen {
		from := slices.Index(all, after) + 1
		if !slices.Equal(ids, all[from:]) {
			t.Errorf("after %q: %d events, want %d", after, len(ids), len(all)-from)
		}
	}
	if n := w.hub.Watched(); n != 0 {
		t.Errorf("%d flows are watched", n)
	}
}
