package flows

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// history answers with one page of the log, or, live, with page after page up
// to what is there and then with what comes, until the run is closed.
func (c *call) history(req *wire.HistoryRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil && req.Live && req.NewestFirst {
		err = refuse(Invalid, "a live history cannot be newest first")
	}
	if err != nil {
		c.fail(err)
		return
	}
	l := &logReader{c: c, flowID: flowID, run: req.RunId, last: cursor(req.After), limit: MaxPage, newest: req.NewestFirst}
	if req.Limit > 0 && req.Limit < MaxPage {
		l.limit = int(req.Limit)
	}
	if req.Live {
		c.follow(l)
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		if err := l.open(ctx); err != nil {
			return nil, err
		}
		events, more, err := l.page(ctx)
		if err != nil {
			return nil, err
		}
		return historyAnswer(events, l.next(more), nil), nil
	})
}

// watch is a live history of all runs with what running steps put out.
func (c *call) watch(req *wire.WatchRequest) {
	flowID, err := c.flow(req.FlowId)
	if err != nil {
		c.fail(err)
		return
	}
	c.follow(&logReader{c: c, flowID: flowID, last: cursor(req.After), limit: MaxPage, outputs: true})
}

func historyAnswer(events []*wire.Event, next *wire.Cursor, outputs []*wire.OutputPart) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_History{History: &wire.HistoryReply{Events: events, Next: next, Outputs: outputs}}}
}

func cursor(c *wire.Cursor) core.Cursor { return core.Cursor{LSN: c.GetLsn(), N: c.GetN()} }

// maxPageBytes is about how much one page of the log holds, unless one event is
// larger.
const maxPageBytes = 1 << 20

// logReader reads the log of a flow, or of one of its runs. For one goroutine.
type logReader struct {
	c       *call
	flowID  string
	run     string // empty = all
	last    core.Cursor
	limit   int
	newest  bool
	outputs bool

	from, to core.Cursor // the run's events: [from, to); a zero one is no bound
	closed   bool        // as of the newest event that was seen
	ended    map[uint64]bool
}

// open finds the flow and its run, and brings the tables up to what was
// acknowledged. A cursor beyond the log is of another flow, or of another server.
func (l *logReader) open(ctx context.Context) error {
	var end, start core.Cursor
	var newest string
	err := l.c.s.viewed(ctx, l.flowID, func(f *wire.Flow) {
		end, start = cursor(f.LastEvent), cursor(f.RunStart)
		newest, l.closed = f.RunId, f.Status != wire.Status_RUNNING
	})
	if err != nil {
		return err
	}
	if less(end, l.last) {
		return refuse(BadCursor, "the cursor %d.%d is beyond the end of the log of flow %q", l.last.LSN, l.last.N, UserID(l.flowID))
	}
	if err := settled(ctx, l.c.s.cfg.Set.For(l.flowID)); err != nil {
		return err
	}
	switch l.run {
	case "":
		return nil
	case newest:
		l.from = start
	default:
		l.closed = true
		if l.from, l.to, err = l.c.s.findRun(ctx, l.flowID, l.run); err != nil {
			return err
		}
	}
	if first := before(l.from); !l.newest && less(l.last, first) {
		l.last = first
	}
	if l.newest && l.to != (core.Cursor{}) && (l.last == (core.Cursor{}) || less(l.to, l.last)) {
		l.last = l.to
	}
	return nil
}

// findRun gives the place of a former run in the log: its first event, and the
// first one of the run behind it.
func (s *Service) findRun(ctx context.Context, flowID, run string) (from, to core.Cursor, err error) {
	err = s.cfg.Set.For(flowID).Tables().Events(flowID, 0, 0, 0, func(ev *wire.Event) error {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !opens(ev):
		case from != (core.Cursor{}):
			to = core.CursorOf(ev)
			return errEnough
		case ev.Scope == run:
			from = core.CursorOf(ev)
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	if err == nil && from == (core.Cursor{}) {
		err = refuse(UnknownRun, "flow %q has no run %q, or its log is not kept any more", UserID(flowID), run)
	}
	return from, to, err
}

// opens reports whether an event is the first one of a run.
func opens(ev *wire.Event) bool { return ev.Type == core.EventStarted || ev.Type == core.EventReset }

func less(a, b core.Cursor) bool { return a.LSN < b.LSN || a.LSN == b.LSN && a.N < b.N }

// before gives the cursor behind which c is the first.
func before(c core.Cursor) core.Cursor {
	switch {
	case c == core.Cursor{}:
		return c
	case c.N > 0:
		return core.Cursor{LSN: c.LSN, N: c.N - 1}
	}
	return core.Cursor{LSN: c.LSN - 1, N: math.MaxUint32}
}

// page reads on from the last event. more says that there are further ones.
func (l *logReader) page(ctx context.Context) (events []*wire.Event, more bool, err error) {
	bytes := 0
	take := func(ev *wire.Event) error {
		at := core.CursorOf(ev)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case l.newest && less(at, l.from), !l.newest && l.to != (core.Cursor{}) && !less(at, l.to):
			return errEnough
		case len(events) == l.limit || len(events) > 0 && bytes > maxPageBytes:
			more = true
			return errEnough
		}
		bytes += ev.SizeVT()
		events, l.last = append(events, ev), at
		l.notice(ev)
		return nil
	}
	t := l.c.s.cfg.Set.For(l.flowID).Tables()
	if l.newest {
		err = t.EventsBefore(l.flowID, l.last.LSN, l.last.N, l.limit+1, take)
	} else {
		err = t.Events(l.flowID, l.last.LSN, l.last.N, l.limit+1, take)
	}
	if errors.Is(err, errEnough) {
		err = nil
	}
	return events, more, err
}

// notice keeps what an event says of the run.
func (l *logReader) notice(ev *wire.Event) {
	switch {
	case l.newest:
	case opens(ev):
		l.closed = false
	case core.IsCloser(ev.Type), ev.Type == core.EventDeleted:
		l.closed = true
	case ev.Type == core.EventStepCompleted, ev.Type == core.EventStepFailed, ev.Type == core.EventStepCancelled:
		if l.ended != nil {
			l.ended[ev.Exec] = true
		}
	}
}

// next is where to go on; nil at the end.
func (l *logReader) next(more bool) *wire.Cursor {
	if !more {
		return nil
	}
	return &wire.Cursor{Lsn: l.last.LSN, N: l.last.N}
}

// follow answers with the log and then with what comes, until the run is closed.
// It subscribes before it reads, so nothing falls between the two; what was
// read already is dropped by its cursor. A call without a timeout has no end of
// its own.
func (c *call) follow(l *logReader) {
	var d time.Duration
	if c.req.TimeoutUs > 0 {
		d = c.timeout()
	}
	c.spawn(c.s.streams, d, func(ctx context.Context) {
		sub := c.s.cfg.Hub.Subscribe(l.flowID, c.s.cfg.StreamBound)
		defer sub.Close()
		if err := l.follow(ctx, sub); err != nil {
			c.fail(c.ended(ctx, err))
			return
		}
		c.answer(historyAnswer(nil, nil, nil))
	})
}

func (l *logReader) follow(ctx context.Context, sub *stream.Sub) error {
	if err := l.open(ctx); err != nil {
		return err
	}
	for more := true; more; {
		l.ended = map[uint64]bool{} // a page's worth is enough: what runs now has ended lately
		events, rest, err := l.page(ctx)
		if err != nil {
			return err
		}
		l.send(events, nil)
		more = rest
	}
	ended := l.ended
	l.ended = nil
	for !l.closed {
		frames, err := sub.Next(ctx)
		if err != nil {
			return err
		}
		if l.take(frames, ended) {
			return nil
		}
	}
	return nil
}

// take answers with frames; true when the run that was asked for is over.
func (l *logReader) take(frames []stream.Frame, ended map[uint64]bool) (over bool) {
	var events []*wire.Event
	var outputs []*wire.OutputPart
	for _, f := range frames {
		switch {
		case f.Item != nil:
			ev := f.Item.Event
			if !l.last.Before(ev) {
				continue
			}
			if l.run != "" && opens(ev) {
				over = true
				break
			}
			l.last = core.CursorOf(ev)
			l.notice(ev)
			events = append(events, ev)
		case f.Delta != nil && l.outputs && !ended[f.Delta.Exec]:
			d := f.Delta
			outputs = append(outputs, &wire.OutputPart{Exec: d.Exec, Attempt: d.Attempt, Offset: uint64(d.Offset), Text: d.Text})
		}
		if over {
			break
		}
	}
	l.send(events, outputs)
	return over
}

func (l *logReader) send(events []*wire.Event, outputs []*wire.OutputPart) {
	if len(events) == 0 && len(outputs) == 0 {
		return
	}
	a := historyAnswer(events, l.next(true), outputs)
	a.More = true
	l.c.answer(a)
}
