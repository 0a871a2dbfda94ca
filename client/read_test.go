package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func event(lsn uint64, typ string) *wire.Event {
	return &wire.Event{Lsn: lsn, Type: typ, AtUs: int64(lsn)}
}

func historyAnswer(r *wire.HistoryReply, more bool) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_History{History: r}, More: more}
}

// TestHistoryPages: all pages, in order, and none after the last.
func TestHistoryPages(t *testing.T) {
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		after := c.GetHistory().After.GetLsn()
		switch after {
		case 0, 2:
			answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(after+1, "a"), event(after+2, "b")}, Next: &wire.Cursor{Lsn: after + 2}}, false))
		default:
			answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(after+1, "c")}}, false))
		}
	})
	c := f.client(Options{})
	events := c.History(background(t), "f", HistoryOptions{})
	for range 2 { // a sequence can be read again
		var got []uint64
		for e, err := range events {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Cursor.LSN)
		}
		if fmt.Sprint(got) != "[1 2 3 4 5]" {
			t.Errorf("got %v", got)
		}
	}
	for _, err := range c.History(background(t), "f", HistoryOptions{Live: true, NewestFirst: true}) {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
}

// TestWatchSurvives: after a lost connection it goes on behind the last event,
// and text that was shown is not shown again.
func TestWatchSurvives(t *testing.T) {
	var f *fake
	var tries atomic.Int32
	var afters []string
	f = newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		afters = append(afters, fmt.Sprint(c.GetWatch().After.GetLsn()))
		part := func(attempt uint32, offset uint64, text string) *wire.OutputPart {
			return &wire.OutputPart{Exec: 1, Attempt: attempt, Offset: offset, Text: text}
		}
		if tries.Add(1) == 1 {
			answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(7, "step.started")}}, true))
			answer(historyAnswer(&wire.HistoryReply{Outputs: []*wire.OutputPart{part(1, 0, "one ")}}, true))
			answer(historyAnswer(&wire.HistoryReply{Outputs: []*wire.OutputPart{part(1, 4, "two ")}}, true))
			return
		}
		answer(historyAnswer(&wire.HistoryReply{Outputs: []*wire.OutputPart{part(1, 0, "one two three ")}}, true))
		answer(historyAnswer(&wire.HistoryReply{Outputs: []*wire.OutputPart{part(2, 0, "again ")}}, true))
		answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(8, "step.completed"), event(9, "flow.completed")}}, false))
	})
	c := f.client(Options{})
	var got strings.Builder
	for s, err := range c.Watch(background(t), "f", Cursor{}) {
		switch {
		case err != nil:
			t.Fatal(err)
		case s.Event != nil:
			fmt.Fprintf(&got, "[%s] ", s.Event.Type)
		default:
			got.WriteString(s.Output.Text)
			if s.Output.Text == "two " {
				f.cut()
			}
		}
	}
	if want := "[step.started] one two three again [step.completed] [flow.completed] "; got.String() != want {
		t.Errorf("got  %q\nwant %q", got.String(), want)
	}
	if fmt.Sprint(afters) != "[0 7]" {
		t.Errorf("asked after %v", afters)
	}
}

// TestSlowWatcher: a reader that is slower than the server neither holds up
// other calls nor misses an event.
func TestSlowWatcher(t *testing.T) {
	const events = 1000
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		h := c.GetHistory()
		if h == nil {
			echo(c, answer)
			return
		}
		for lsn := h.After.GetLsn() + 1; lsn <= events; lsn++ {
			answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(lsn, "x")}}, lsn < events))
		}
	})
	c := f.client(Options{})
	next := uint64(1)
	for e, err := range c.History(background(t), "f", HistoryOptions{Live: true}) {
		if err != nil || e.Cursor.LSN != next {
			t.Fatalf("got %v, %v, want %d", e, err, next)
		}
		if next%100 == 1 {
			if _, err := c.RPC(background(t), "f", "r", 1, RPCOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		next++
	}
	if next != events+1 {
		t.Errorf("%d events", next-1)
	}
}

// TestWatchEnds: by its reader, by its context, and by the server's word.
func TestWatchEnds(t *testing.T) {
	cancelled := make(chan uint64, 10)
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if c.GetWatch().FlowId == "none" {
			answer(refuseWith("not_found", 0))
			return
		}
		answer(historyAnswer(&wire.HistoryReply{Events: []*wire.Event{event(1, "x")}}, true))
	})
	f.onCancel = func(id uint64) { cancelled <- id }
	c := f.client(Options{})
	for range c.Watch(background(t), "f", Cursor{}) {
		break
	}
	<-cancelled
	ctx, cancel := context.WithCancel(background(t))
	defer cancel()
	for _, err := range c.Watch(ctx, "f", Cursor{}) {
		cancel()
		if err != nil && !errors.Is(err, ErrCanceled) {
			t.Error(err)
		}
	}
	<-cancelled
	n := 0
	for _, err := range c.Watch(background(t), "none", Cursor{}) {
		if n++; !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
	}
	if n != 1 {
		t.Errorf("%d errors", n)
	}
}

func TestSearch(t *testing.T) {
	var limits []uint32
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		q := c.GetSearch()
		limits = append(limits, q.Limit)
		if strings.Contains(q.Query, "bad") {
			answer(&wire.Answer{Error: &wire.Error{Code: "invalid", Message: "no", Position: 4}})
			return
		}
		r := &wire.SearchReply{Count: 250}
		for range min(q.Limit, 200) {
			r.Flows = append(r.Flows, &wire.FlowInfo{FlowId: "f"})
		}
		r.Next = "p" + q.Page
		answer(&wire.Answer{Result: &wire.Answer_Search{Search: r}})
	})
	c := f.client(Options{})
	n := 0
	for _, err := range c.Search(background(t), `status = running`, 250) {
		if n++; err != nil {
			t.Fatal(err)
		}
	}
	if n != 250 || fmt.Sprint(limits) != "[200 50]" {
		t.Errorf("%d flows, limits %v", n, limits)
	}
	for _, err := range c.Search(background(t), "x = bad", 0) {
		var e *Error
		if !errors.As(err, &e) || e.Position != 4 {
			t.Errorf("got %v", err)
		}
	}
	if n, err := c.Count(background(t), ""); err != nil || n != 250 {
		t.Errorf("%d, %v", n, err)
	}
}
