package client

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	historyPage = 500
	searchPage  = 200
	maxLive     = 4096 // running attempts whose output Watch keeps the place of
)

// HistoryOptions say which part of a log to read; the zero value is all of it.
type HistoryOptions struct {
	After       Cursor // the event after this one is the first
	RunID       string // empty = all runs that are kept
	NewestFirst bool
	Live        bool // go on with what comes, until the run is closed
}

// History gives the events of a flow's log. A live one survives a lost
// connection, and gives no event twice. It ends after the first error.
func (c *Client) History(ctx context.Context, id string, o HistoryOptions) iter.Seq2[*Event, error] {
	if o.Live && o.NewestFirst {
		return failed[*Event](invalid("Choose one of them.", "a live history has its newest event last"))
	}
	if o.Live {
		return c.liveHistory(ctx, id, o)
	}
	return pages(func(p *page[*wire.Cursor, *Event]) error {
		if p.first {
			p.next = o.After.wire()
		}
		a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_History{History: &wire.HistoryRequest{
			FlowId: id, RunId: o.RunID, After: p.next, Limit: historyPage, NewestFirst: o.NewestFirst,
		}}}, read)
		if err != nil {
			return err
		}
		re, err := reply(a, a.GetHistory())
		if err != nil {
			return err
		}
		for _, e := range re.Events {
			p.items = append(p.items, fromEvent(e))
		}
		p.next, p.more = re.Next, re.Next != nil && len(re.Events) > 0
		return nil
	})
}

func (c *Client) liveHistory(ctx context.Context, id string, o HistoryOptions) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		err := c.follow(ctx, o.After, func(after *wire.Cursor) *wire.Call {
			return &wire.Call{Verb: &wire.Call_History{History: &wire.HistoryRequest{FlowId: id, RunId: o.RunID, After: after, Live: true}}}
		}, func(r *wire.HistoryReply) bool {
			for _, e := range r.Events {
				if !yield(fromEvent(e), nil) {
					return false
				}
			}
			return true
		})
		if err != nil {
			yield(nil, err)
		}
	}
}

// Seen is what Watch gives: an event, or text that a running step puts out.
type Seen struct {
	Event  *Event
	Output *Output
}

// Watch gives the events of a flow after a cursor, and between them what its
// running steps put out, as it comes, until the run is closed. A text is given
// once; when Offset is beyond what was given before, some was missed.
func (c *Client) Watch(ctx context.Context, id string, after Cursor) iter.Seq2[Seen, error] {
	return func(yield func(Seen, error) bool) {
		shown := outputs{}
		err := c.follow(ctx, after, func(after *wire.Cursor) *wire.Call {
			return &wire.Call{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: id, After: after}}}
		}, func(r *wire.HistoryReply) bool {
			for _, o := range r.Outputs {
				if fresh := shown.fresh(o); fresh != nil && !yield(Seen{Output: fresh}, nil) {
					return false
				}
			}
			for _, e := range r.Events {
				if e.Type == "step.completed" || e.Type == "step.failed" || e.Type == "step.cancelled" {
					delete(shown, e.Exec)
				}
				if !yield(Seen{Event: fromEvent(e)}, nil) {
					return false
				}
			}
			return true
		})
		if err != nil {
			yield(Seen{}, err)
		}
	}
}

// outputs is how much of each running attempt's text was given.
type outputs map[uint64]shownText

type shownText struct {
	attempt uint32
	end     uint64
}

// fresh is the part of o that was not given before; nil = none of it. After the
// connection was lost, the server begins at offset 0 again.
func (s outputs) fresh(o *wire.OutputPart) *Output {
	was, ok := s[o.Exec]
	if !ok && len(s) >= maxLive {
		clear(s)
	}
	if was.attempt != o.Attempt {
		was = shownText{attempt: o.Attempt}
	}
	text, offset := o.Text, o.Offset
	if offset < was.end {
		known := was.end - offset
		if known >= uint64(len(text)) {
			return nil
		}
		text, offset = text[known:], was.end
	}
	if text == "" {
		return nil
	}
	was.end = offset + uint64(len(text))
	s[o.Exec] = was
	return &Output{Exec: o.Exec, Attempt: int(o.Attempt), Offset: offset, Text: text}
}

// follow reads a stream of events to its end; after a lost connection, or when
// the reader was too slow, it goes on behind the last event that was read.
func (c *Client) follow(ctx context.Context, after Cursor, open func(*wire.Cursor) *wire.Call, give func(*wire.HistoryReply) bool) error {
	if c.long.Acquire(ctx, 1) != nil {
		return contextError(ctx, false)
	}
	defer c.long.Release(1)
	at := after.wire()
	again := retries{patience: c.patience, since: time.Now()}
	for {
		done, err := c.followOnce(ctx, open(at), func(r *wire.HistoryReply) bool {
			if n := len(r.Events); n > 0 {
				at = &wire.Cursor{Lsn: r.Events[n-1].Lsn, N: r.Events[n-1].N}
			}
			again.reset()
			return give(r)
		})
		if done {
			return nil
		}
		var e *Error
		if errors.Is(err, errSlow) || errors.As(err, &e) && e.Code == codeSlowReader {
			continue // it has read at least what was on the way
		}
		pause, ok := again.next(ctx, err, waiting)
		if !ok || !sleep(ctx, pause) {
			return final(ctx, err, waiting, false)
		}
	}
}

// followOnce reads one stream; done says that nothing follows, or that give
// wants no more.
func (c *Client) followOnce(ctx context.Context, w *wire.Call, give func(*wire.HistoryReply) bool) (done bool, err error) {
	l := c.pick()
	s, err := l.get(ctx, c.patience)
	if err != nil {
		return false, err
	}
	if err := stamp(ctx, w); err != nil {
		return false, err
	}
	l.open.Add(1)
	defer l.open.Add(-1)
	k := &call{ch: make(chan result, followBuffer), stream: true}
	if err := s.start(k, w, w.SizeVT()); err != nil {
		return false, unsent(err)
	}
	defer s.forget(k)
	for {
		select {
		case <-ctx.Done():
			return false, contextError(ctx, false)
		case r, ok := <-k.ch:
			switch {
			case !ok:
				return false, k.err
			case r.answer.Error != nil:
				return false, fromWire(r.answer.Error)
			}
			h := r.answer.GetHistory()
			if h != nil && !give(h) || !r.answer.More {
				return true, nil
			}
		}
	}
}

// Search gives the runs that a query finds, newest first; limit bounds them,
// 0 = all. An error in the query says where in its Position.
func (c *Client) Search(ctx context.Context, query string, limit int) iter.Seq2[*Info, error] {
	left := 0
	return pages(func(p *page[string, *Info]) error {
		if p.first {
			left = limit
		}
		n := searchPage
		if limit > 0 {
			n = min(n, left)
		}
		a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Query: query, Limit: uint32(n), Page: p.next}}}, read)
		if err != nil {
			return err
		}
		re, err := reply(a, a.GetSearch())
		if err != nil {
			return err
		}
		for _, f := range re.Flows {
			p.items = append(p.items, fromInfo(f))
		}
		left -= len(re.Flows)
		p.next, p.more = re.Next, re.Next != "" && (limit <= 0 || left > 0)
		return nil
	})
}

// Count says how many runs a query finds.
func (c *Client) Count(ctx context.Context, query string) (uint64, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Query: query, Count: true}}}, read)
	if err != nil {
		return 0, err
	}
	re, err := reply(a, a.GetSearch())
	if err != nil {
		return 0, err
	}
	return re.Count, nil
}

// page is one page of a listing, and where the next one begins.
type page[N, T any] struct {
	first bool
	next  N
	more  bool
	items []T
}

// pages gives the items of page after page. The sequence can be read again:
// it begins anew then.
func pages[N, T any](load func(*page[N, T]) error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		p := page[N, T]{first: true}
		for {
			p.items, p.more = p.items[:0], false
			if err := load(&p); err != nil {
				var none T
				yield(none, err)
				return
			}
			p.first = false
			for _, it := range p.items {
				if !yield(it, nil) {
					return
				}
			}
			if !p.more {
				return
			}
		}
	}
}

func failed[T any](err error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		yield(none, err)
	}
}
