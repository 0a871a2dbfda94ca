package sim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// watcher reads the events of a session as session.Watcher does: it subscribes,
// reads the log behind its cursor, and goes on with what is queued. When its
// connection breaks it comes back with its cursor.
type watcher struct {
	w        *world
	flow     string
	n        *node // it reads from
	observer bool  // tells the oracle; one for each flow
	last     core.Cursor
	from     core.Cursor // began here
	sub      *stream.Sub
	catching bool // reads what came before it was subscribed
	waits    bool // an attempt to connect is planned
	texts    map[textKey]*text
	said     uint64 // steps up to this one have said their message
}

type textKey struct {
	scope string
	exec  uint64
}

// text is a message being written.
type text struct {
	attempt uint32
	said    string
}

// gone is a context that has ended: a read that does not wait.
var gone = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// maxWatchers bounds the readers of one run.
const maxWatchers = 24

// watch begins to watch a flow, the observer from its beginning, others from
// somewhere that another one has come to.
func (w *world) watch(flow string, observer bool) {
	if len(w.watchers) >= maxWatchers {
		return
	}
	v := &watcher{w: w, flow: flow, observer: observer}
	if !observer && len(w.watchers) > 0 && w.rng.percent(70) {
		if o := w.watchers[w.rng.intn(len(w.watchers))]; o.flow == flow {
			v.last, v.from = o.last, o.last
		}
	}
	w.watchers = append(w.watchers, v)
	v.connect(0)
}

func (v *watcher) part() *part { return v.n.parts[partition.Of(v.flow, len(v.n.parts))] }

// connect plans an attempt to connect.
func (v *watcher) connect(us int64) {
	if v.sub != nil {
		v.sub.Close()
		v.sub = nil
	}
	if v.waits {
		return
	}
	v.waits = true
	v.w.after(us, func() {
		v.waits = false
		v.open()
	})
}

func (v *watcher) open() {
	w := v.w
	n := w.serving(nil)
	if n == nil {
		v.connect(200_000)
		return
	}
	v.n = n
	v.texts, v.catching = map[textKey]*text{}, true
	sub := n.hub.Subscribe(v.flow, w.p.subBytes)
	v.sub = sub
	v.part().submit(request{flow: v.flow, read: func(f *wire.Flow, err error) {
		if v.sub != sub {
			return
		}
		if err != nil || f == nil {
			v.connect(300_000)
			return
		}
		if at := (core.Cursor{LSN: f.LastEvent.GetLsn(), N: f.LastEvent.GetN()}); at.LSN < v.last.LSN && !w.p.liars {
			w.violate("watch", v.flow, "the log ends at %v, a watcher has seen %v", at, v.last)
		}
		n.inLife(w.rng.between(0, 5_000), func() { v.page(sub) })
	}})
	// When the life ends before it answers, nobody does.
	w.after(2_000_000, func() {
		if v.sub == sub && n.dead {
			v.connect(0)
		}
	})
}

// page reads a part of the log.
func (v *watcher) page(sub *stream.Sub) {
	if v.sub != sub {
		return
	}
	w, n := v.w, 0
	var got []*wire.Event
	err := v.part().tables.Events(v.flow, v.last.LSN, v.last.N, w.p.pageEvents, func(ev *wire.Event) error {
		got = append(got, ev)
		n++
		return nil
	})
	if err != nil {
		w.violate("watch", v.flow, "read the log: %v", err)
		return
	}
	for _, ev := range got {
		v.take(ev)
	}
	if n == w.p.pageEvents {
		v.n.inLife(w.rng.between(0, 5_000), func() { v.page(sub) })
		return
	}
	v.poll(sub)
}

// poll takes what is queued, now and again.
func (v *watcher) poll(sub *stream.Sub) {
	if v.sub != sub {
		return
	}
	w := v.w
	frames, err := sub.Next(gone)
	for _, f := range frames {
		switch {
		case f.Item != nil:
			if v.last.Before(f.Item.Event) || w.mutant.seeTwice {
				v.take(f.Item.Event)
			}
		case f.Delta != nil:
			v.delta(f.Delta)
		}
	}
	v.catching = false
	switch {
	case err != nil && !errors.Is(err, context.Canceled):
		w.fault("slow-reader")
		v.connect(w.rng.between(0, 50_000))
		return
	case !w.calm && w.rng.intn(1000) < w.p.watcherDrops:
		w.fault("watcher-drops")
		v.connect(w.rng.between(0, 1_000_000))
		return
	}
	w.after(w.rng.between(1_000, 200_000), func() {
		if v.n.dead {
			v.connect(w.rng.between(0, 100_000))
			return
		}
		v.poll(sub)
	})
}

// log gives all events of the flow that ever were durable.
func (v *watcher) log() []shown {
	return v.w.hist[partition.Of(v.flow, v.w.p.partitions)].fold.shown[v.flow]
}

// at finds a cursor in the log: the index of its event, -1 for the beginning,
// -2 when it is not there.
func (v *watcher) at(c core.Cursor) int {
	if c == (core.Cursor{}) {
		return -1
	}
	i, ok := slices.BinarySearchFunc(v.log(), c, func(s shown, c core.Cursor) int {
		return cmp.Or(cmp.Compare(s.at.LSN, c.LSN), cmp.Compare(s.at.N, c.N))
	})
	if !ok {
		return -2
	}
	return i
}

// take checks and keeps the next durable event: the one that follows in the
// log; only what was deleted may be passed over.
func (v *watcher) take(ev *wire.Event) {
	w, log := v.w, v.log()
	from, to := v.at(v.last), v.at(core.CursorOf(ev))
	switch {
	case to < 0:
		w.violate("watch", v.flow, "event %d.%d %s is shown and is not durable", ev.Lsn, ev.N, ev.Type)
		return
	case log[to].sum != sumOf(ev):
		w.violate("watch", v.flow, "event %d.%d %s is not as it was committed", ev.Lsn, ev.N, ev.Type)
	case to <= from:
		w.violate("watch", v.flow, "event %d.%d %s is shown after %d.%d", ev.Lsn, ev.N, ev.Type, v.last.LSN, v.last.N)
	case to == from+1, ev.Type == core.EventStarted:
	case ev.Type == core.EventDeleted && v.catching: // deleted while it read
	case v.catching && deletedSince(log[from+1:to]) || v.catching && deletedSince(log[to:]):
		return // what is queued has lost its beginning with the deletion
	default:
		w.violate("watch", v.flow, "event %d.%d %s is shown after %d.%d, %d between are missing", ev.Lsn, ev.N, ev.Type, v.last.LSN, v.last.N, to-from-1)
	}
	v.last = core.CursorOf(ev)
	if !json.Valid(session.Data(ev)) {
		w.violate("watch", v.flow, "event %d.%d %s has data that is not JSON: %s", ev.Lsn, ev.N, ev.Type, session.Data(ev))
	}
	whole := to == from+1 || ev.Type == core.EventStarted // the oracle minds an end without a beginning
	if v.observer && whole {
		w.oracle.Event(v.flow, ev)
		w.judge()
	}
	v.checkText(ev)
}

func deletedSince(log []shown) bool {
	return slices.ContainsFunc(log, func(s shown) bool { return s.kind == core.EventDeleted })
}

// delta follows a message being written.
func (v *watcher) delta(d *stream.Delta) {
	if d.Exec <= v.said {
		return // queued before the log was read
	}
	t := v.texts[textKey{d.Scope, d.Exec}]
	if t == nil || t.attempt != d.Attempt {
		t = &text{attempt: d.Attempt}
		v.texts[textKey{d.Scope, d.Exec}] = t
	}
	if d.Offset > len(t.said) {
		v.w.violate("watch", v.flow, "text of step %d goes on at %d, %d bytes were shown", d.Exec, d.Offset, len(t.said))
		return
	}
	t.said = t.said[:d.Offset] + d.Text
}

// checkText: the message is what was shown while it was written.
func (v *watcher) checkText(ev *wire.Event) {
	if ev.Type == core.EventStarted {
		v.said = 0 // a new run counts its steps anew
	}
	if ev.Type != agent.EventMessage {
		return
	}
	v.said = max(v.said, ev.Exec)
	key := textKey{ev.Scope, ev.Exec}
	t := v.texts[key]
	if t == nil {
		return
	}
	delete(v.texts, key)
	var m struct {
		Content string `json:"content"`
	}
	if err := json.Unmarshal(ev.Items[0], &m); err != nil || m.Content != t.said && t.attempt == ev.Attempt {
		v.w.violate("watch", v.flow, "step %d showed %.200q and its message is %.200q (%v)", ev.Exec, t.said, m.Content, err)
	}
}

// caughtUp reports whether the watcher has seen all of a flow that exists.
func (v *watcher) caughtUp() bool {
	log := v.log()
	i := v.at(v.last)
	return i == len(log)-1 || i == len(log)-2 && log[len(log)-1].kind == core.EventDeleted ||
		len(log) > 0 && log[len(log)-1].kind == core.EventDeleted
}
