package oracle

import (
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// The names of events, as clients know them.
const (
	flowStarted      = "flow.started"
	flowDeleted      = "flow.deleted"
	channelPublished = "channel.published"
	channelDropped   = "channel.dropped"
	stepStarted      = "step.started"
	turnPrefix       = "turn."
)

func terminal(typ string) bool {
	return typ == "turn.completed" || typ == "turn.failed" || typ == "turn.cancelled"
}

type cursor struct {
	lsn uint64
	n   uint32
}

func (c cursor) before(d cursor) bool { return c.lsn < d.lsn || c.lsn == d.lsn && c.n < d.n }

// message is what the events said about one message.
type message struct {
	seen, waited, started, dropped bool
	ended                          string // the terminal event
	seenAt, startAt                cursor
	startItem                      []byte
}

func (m *message) over() bool { return m.ended != "" || m.dropped }

// eventLog follows the events of one flow ID.
type eventLog struct {
	seen     bool
	deleted  bool
	replaced bool // a new run began whose forerunner was not seen to end
	last     cursor
	events   uint64 // of this run
	items    uint64 // of this run
	running  string // the message whose turn runs
	messages map[string]*message
	talk     conversation
}

// message gives what is known of a message; a new one when nothing is.
func (l *eventLog) message(id string) *message {
	if m := l.messages[id]; m != nil {
		return m
	}
	return &message{}
}

type failure func(rule Rule, format string, args ...any)

func (l *eventLog) add(ev *wire.Event, fail failure) {
	at := cursor{ev.Lsn, ev.N}
	if !l.checkCursor(ev, at, fail) {
		return
	}
	l.last = at
	if l.messages == nil {
		l.messages = map[string]*message{}
	}
	switch begins := ev.Type == flowStarted; {
	case !begins && (!l.seen || l.deleted):
		fail(Cursors, "%s at %v: a flow's log begins with %s", ev.Type, at, flowStarted)
	case begins:
		l.replaced = l.replaced || l.seen && !l.deleted
		l.events, l.items, l.running, l.talk = 0, 0, "", conversation{}
	}
	l.seen, l.deleted = true, ev.Type == flowDeleted
	l.events++
	l.items += uint64(len(ev.Items))
	if ev.Scope != "" {
		l.scoped(ev, at, fail)
	}
	for _, it := range ev.Items {
		if err := l.talk.add(it); err != "" {
			fail(Conversation, "%s at %v: %s", ev.Type, at, err)
		}
	}
	if terminal(ev.Type) {
		if err := l.talk.rest(); err != "" {
			fail(Conversation, "%s at %v: %s", ev.Type, at, err)
		}
	}
}

// checkCursor: strictly increasing, and no hole within the events of one commit.
func (l *eventLog) checkCursor(ev *wire.Event, at cursor, fail failure) bool {
	if l.seen && !l.last.before(at) {
		fail(Cursors, "%s at %v came after %v", ev.Type, at, l.last)
		return false
	}
	if want := l.last.n + 1; l.seen && at.lsn == l.last.lsn && at.n != want {
		fail(Cursors, "%s at %v: %d is missing", ev.Type, at, want)
	}
	if (!l.seen || at.lsn != l.last.lsn) && at.n != 0 {
		fail(Cursors, "%s at %v: 0 is missing", ev.Type, at)
	}
	return true
}

// scoped follows a message from its acceptance to its end.
func (l *eventLog) scoped(ev *wire.Event, at cursor, fail failure) {
	m := l.messages[ev.Scope]
	if m == nil {
		m = &message{seen: true, seenAt: at}
		l.messages[ev.Scope] = m
	}
	if m.over() {
		fail(Ended, "%s of %s at %v comes after its end", ev.Type, ev.Scope, at)
		return
	}
	switch {
	case ev.Type == channelPublished:
		if m.waited || m.started {
			fail(Ended, "%s of %s at %v, which was accepted before", ev.Type, ev.Scope, at)
		}
		m.waited = true
	case ev.Type == channelDropped:
		if m.started {
			fail(Ended, "%s of %s at %v, which was started", ev.Type, ev.Scope, at)
		}
		m.dropped = true
	case ev.Type == stepStarted && l.running == "" && !m.started:
		l.running, m.started, m.startAt = ev.Scope, true, at
		if len(ev.Items) > 0 {
			m.startItem = ev.Items[0]
		}
	case l.running != ev.Scope:
		fail(OneTurn, "%s of %s at %v while %q runs", ev.Type, ev.Scope, at, l.running)
	case terminal(ev.Type):
		m.ended, l.running = ev.Type, ""
	case strings.HasPrefix(ev.Type, turnPrefix):
		fail(Ended, "%s at %v is no known end of a turn", ev.Type, at)
	}
}
