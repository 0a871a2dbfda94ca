package stream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func event(lsn uint64, exec uint64, typ string) *wire.Event {
	return &wire.Event{Lsn: lsn, Exec: exec, Type: typ, Scope: "turn"}
}

// read gives what is queued, as one word a frame. It must not have to wait.
func read(t *testing.T, s *Sub) string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // whatever is queued is given all the same
	frames, err := s.Next(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		return err.Error()
	}
	var words []string
	for _, f := range frames {
		switch {
		case f.Item != nil:
			words = append(words, fmt.Sprintf("%s@%d", f.Item.Event.Type, f.Item.Event.Lsn))
		case f.Delta != nil:
			words = append(words, fmt.Sprintf("%d:%d+%q", f.Delta.Exec, f.Delta.Offset, f.Delta.Text))
		default:
			words = append(words, fmt.Sprint(f.Note))
		}
	}
	return strings.Join(words, " ")
}

func want(t *testing.T, s *Sub, text string) {
	t.Helper()
	if got := read(t, s); got != text {
		t.Fatalf("read %s\nwant %s", got, text)
	}
}

func TestFramesComeInTheOrderTheyWerePublished(t *testing.T) {
	h := NewHub()
	a, b := h.Subscribe("f", 0), h.Subscribe("f", 0)
	other := h.Subscribe("g", 0)
	h.Publish("f", []*wire.Event{event(1, 7, "started"), event(1, 0, "second")})
	h.Delta("f", "turn", 7, 1, "Hel")
	a.Push("note")
	h.Delta("f", "turn", 7, 1, "lo")
	h.Publish("f", []*wire.Event{event(2, 7, "message")})
	want(t, a, `started@1 second@1 7:0+"Hel" note 7:3+"lo" message@2`)
	want(t, b, `started@1 second@1 7:0+"Hel" 7:3+"lo" message@2`)
	want(t, other, "")
	want(t, a, "") // each frame once
}

func TestSubscribeBeginsWithTheMessageSoFar(t *testing.T) {
	h := NewHub()
	h.Delta("f", "turn", 7, 1, "Hel")
	h.Delta("f", "turn", 7, 1, "lo")
	s := h.Subscribe("f", 0)
	h.Delta("f", "turn", 7, 1, "!")
	want(t, s, `7:0+"Hello" 7:5+"!"`)
	h.Delta("f", "turn", 7, 2, "Again") // a new attempt begins at 0
	want(t, s, `7:0+"Again"`)
	want(t, h.Subscribe("f", 0), `7:0+"Again"`)
}

func TestPartialIsForgotten(t *testing.T) {
	for name, end := range map[string]func(h *Hub){
		"by the event of its step": func(h *Hub) { h.Publish("f", []*wire.Event{event(3, 7, "message")}) },
		"by Drop":                  func(h *Hub) { h.Drop("f", 7) },
	} {
		t.Run(name, func(t *testing.T) {
			h := NewHub()
			h.Delta("f", "turn", 7, 1, "text")
			h.Publish("f", []*wire.Event{event(1, 0, "of no step"), event(2, 8, "of another")})
			if h.Watched() != 1 {
				t.Fatal("events of others ended the message")
			}
			end(h)
			if n := h.Watched(); n != 0 {
				t.Fatalf("%d topics left", n)
			}
			want(t, h.Subscribe("f", 0), "")
		})
	}
}

func TestTopicsGoWithTheirLastUser(t *testing.T) {
	h := NewHub()
	a, b := h.Subscribe("f", 0), h.Subscribe("f", 0)
	h.Delta("f", "turn", 7, 1, "text")
	a.Close()
	a.Close()
	if h.Watched() != 1 {
		t.Fatal("a second reader's topic went")
	}
	b.Close()
	if h.Watched() != 1 {
		t.Fatal("a running message's topic went")
	}
	h.Drop("f", 7)
	h.Drop("f", 7)
	if h.Watched() != 0 {
		t.Fatal("an unused topic stayed")
	}
	h.Publish("f", []*wire.Event{event(1, 7, "nobody listens")})
	if h.Watched() != 0 {
		t.Fatal("publishing made a topic")
	}
}

func TestSlowReaderGetsWhatWasQueuedThenTheError(t *testing.T) {
	h := NewHub()
	slow, quick := h.Subscribe("f", 1000), h.Subscribe("f", 1000)
	n := 0
	for ; n < 20; n++ {
		h.Publish("f", []*wire.Event{{Lsn: uint64(n + 1), Type: "x", Data: make([]byte, 100)}})
		want(t, quick, fmt.Sprintf("x@%d", n+1))
	}
	frames, err := slow.Next(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(frames) != 1000/(100+1+frameOverhead) {
		t.Fatalf("%d frames within a bound of 1000 bytes", len(frames))
	}
	for i, f := range frames {
		if f.Item.Event.Lsn != uint64(i+1) {
			t.Fatalf("frame %d is event %d", i, f.Item.Event.Lsn)
		}
	}
	for range 2 {
		if _, err := slow.Next(context.Background()); !errors.Is(err, ErrSlowReader) {
			t.Fatalf("want ErrSlowReader, got %v", err)
		}
	}
	h.Publish("f", []*wire.Event{event(99, 0, "later")})
	if _, err := slow.Next(context.Background()); !errors.Is(err, ErrSlowReader) {
		t.Fatalf("a frame came after the gap: %v", err)
	}
	want(t, quick, "later@99")
}

func TestOneFrameAboveTheBoundIsGiven(t *testing.T) {
	h := NewHub()
	s := h.Subscribe("f", 10)
	h.Publish("f", []*wire.Event{{Lsn: 1, Type: "big", Data: make([]byte, 1000)}})
	want(t, s, "big@1")
	h.Publish("f", []*wire.Event{event(2, 0, "next")})
	want(t, s, "next@2")
}

// A reader who comes back to a message longer than its bound gets on.
func TestSnapshotIsNotChargedToTheReader(t *testing.T) {
	h := NewHub()
	h.Delta("f", "turn", 7, 1, strings.Repeat("x", 5000))
	s := h.Subscribe("f", 1000)
	h.Delta("f", "turn", 7, 1, "y")
	want(t, s, fmt.Sprintf(`7:0+%q 7:5000+"y"`, strings.Repeat("x", 5000)))
}

func TestCloseWakesTheReader(t *testing.T) {
	h := NewHub()
	s := h.Subscribe("f", 0)
	got := make(chan error)
	go func() {
		_, err := s.Next(context.Background())
		got <- err
	}()
	s.Close()
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	cause := errors.New("gone home")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	if _, err := h.Subscribe("f", 0).Next(ctx); !errors.Is(err, cause) {
		t.Fatalf("want the context's cause, got %v", err)
	}
}

func TestItemIsEncodedOnce(t *testing.T) {
	h := NewHub()
	a, b := h.Subscribe("f", 0), h.Subscribe("f", 0)
	h.Publish("f", []*wire.Event{event(1, 0, "x")})
	calls := 0
	for _, s := range []*Sub{a, b} {
		frames, err := s.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if got := frames[0].Item.Encoded(func(ev *wire.Event) []byte { calls++; return []byte(ev.Type) }); string(got) != "x" {
			t.Fatalf("encoded %q", got)
		}
	}
	if calls != 1 {
		t.Fatalf("encoded %d times", calls)
	}
}

// Readers come and go while a writer writes messages: each reader can always
// rebuild the text by the rule of Delta, sees the events in order, and nothing
// is left at the end.
func TestConcurrentReadersRebuildTheText(t *testing.T) {
	h := NewHub()
	const messages, pieces = 60, 20
	piece := func(exec uint64, i int) string { return fmt.Sprintf("<%d.%d>", exec, i) }
	whole := func(exec uint64) string {
		var b strings.Builder
		for i := range pieces {
			b.WriteString(piece(exec, i))
		}
		return b.String()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var readers sync.WaitGroup
	for r := range 4 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			for round := 0; ctx.Err() == nil; round++ {
				s := h.Subscribe("f", 1<<30)
				last := follow(ctx, t, s, 3+(r+round)%40, whole)
				s.Close()
				if last == messages {
					return
				}
			}
		}()
	}
	for exec := uint64(1); exec <= messages; exec++ {
		for i := range pieces {
			h.Delta("f", "turn", exec, 1, piece(exec, i))
		}
		h.Publish("f", []*wire.Event{event(exec, exec, "message")})
	}
	cancel()
	readers.Wait()
	if n := h.Watched(); n != 0 {
		t.Fatalf("%d topics left", n)
	}
}

// follow reads about n frames and gives the last event's number.
func follow(ctx context.Context, t *testing.T, s *Sub, n int, whole func(uint64) string) (last uint64) {
	text := map[uint64]string{}
	for seen := 0; seen < n; {
		frames, err := s.Next(ctx)
		if err != nil {
			return last
		}
		for _, f := range frames {
			seen++
			if d := f.Delta; d != nil {
				if d.Offset > len(text[d.Exec]) {
					t.Errorf("gap in message %d: piece at %d after %d bytes", d.Exec, d.Offset, len(text[d.Exec]))
				}
				text[d.Exec] = text[d.Exec][:min(d.Offset, len(text[d.Exec]))] + d.Text
				if !strings.HasPrefix(whole(d.Exec), text[d.Exec]) {
					t.Errorf("message %d reads %q", d.Exec, text[d.Exec])
				}
				continue
			}
			ev := f.Item.Event
			if last != 0 && ev.Lsn != last+1 {
				t.Errorf("event %d after %d", ev.Lsn, last)
			}
			last = ev.Lsn
			if got, ok := text[ev.Exec]; ok && got != whole(ev.Exec) {
				t.Errorf("message %d ended as %q", ev.Exec, got)
			}
		}
	}
	return last
}

func BenchmarkPublish(b *testing.B) {
	for _, readers := range []int{1, 100} {
		b.Run(fmt.Sprintf("%d-readers", readers), func(b *testing.B) {
			h := NewHub()
			subs := make([]*Sub, readers)
			for i := range subs {
				subs[i] = h.Subscribe("f", 0)
			}
			evs := []*wire.Event{{Lsn: 1, Type: "message.completed", Data: make([]byte, 200)}}
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				h.Publish("f", evs)
				for _, s := range subs {
					_, _ = s.Next(ctx)
				}
			}
		})
	}
}

func BenchmarkDelta(b *testing.B) {
	h := NewHub()
	s := h.Subscribe("f", 0)
	ctx := context.Background()
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		h.Delta("f", "turn_0123456789abcdef", 3, 1, "token ")
		_, _ = s.Next(ctx)
		if n++; n%500 == 0 {
			h.Drop("f", 3) // messages end
		}
	}
}

// TestNotify: fn is called for what is there already, for what comes and for
// the end, and what Ready says is what Next does.
func TestNotify(t *testing.T) {
	h := NewHub()
	s := h.Subscribe("f", 0)
	if s.Ready() {
		t.Fatal("ready without a frame")
	}
	h.Publish("f", []*wire.Event{event(1, 0, "a")})
	calls := 0
	expect := func(what string, n int, ready bool) {
		t.Helper()
		if calls != n || s.Ready() != ready {
			t.Fatalf("%s: %d calls, ready %v; want %d, %v", what, calls, s.Ready(), n, ready)
		}
	}
	s.Notify(func() { calls++ })
	expect("a frame before it", 1, true)
	want(t, s, "a@1")
	expect("read", 1, false)
	h.Publish("f", []*wire.Event{event(2, 0, "b")})
	expect("an event", 2, true)
	s.Push("note")
	expect("a note", 3, true)
	want(t, s, "b@2 note")
	h.Close(ErrClosed)
	expect("the end", 4, true)
	want(t, s, ErrClosed.Error())
	s.Notify(func() { calls++ })
	expect("after the end", 5, true)
}
