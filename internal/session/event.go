package session

import (
	"bytes"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Names of public events that are not the agent's own.
const (
	EventTurnQueued   = "turn.queued"
	EventTurnStarted  = "turn.started"
	EventTurnResumed  = "turn.resumed"  // a step was handed out again, after a restart or a retry
	EventTurnRetrying = "turn.retrying" // a model call failed and is tried again later
	EventCancelling   = "turn.cancelling"
	EventToolStarted  = "tool.started"
	EventDelta        = "message.delta" // ephemeral: no ID, not kept
	EventDeleted      = "session.deleted"
)

// Event is one public event of a session. The durable ones have an ID; with
// it a client resumes. SSE is the whole frame in the native form.
type Event struct {
	ID   string
	Name string
	Turn string
	SSE  []byte
	// What it was made from: one is set.
	Durable *wire.Event
	Delta   *stream.Delta
}

// Terminal reports whether the event ends its turn.
func (e *Event) Terminal() bool { return agent.Terminal(e.Name) || e.Name == EventDeleted }

// formatID writes a cursor as clients see it.
func formatID(lsn uint64, n uint32) string {
	return strconv.FormatUint(lsn, 10) + "." + strconv.FormatUint(uint64(n), 10)
}

// ParseID reads a cursor; "" is the beginning.
func ParseID(id string) (core.Cursor, error) {
	if id == "" {
		return core.Cursor{}, nil
	}
	a, b, ok := strings.Cut(id, ".")
	lsn, err1 := strconv.ParseUint(a, 10, 64)
	n, err2 := strconv.ParseUint(b, 10, 32)
	if !ok || err1 != nil || err2 != nil {
		return core.Cursor{}, ErrBadCursor
	}
	return core.Cursor{LSN: lsn, N: uint32(n)}, nil
}

// nameOf gives the public name of a flow's event, "" for one that is not shown.
func nameOf(ev *wire.Event) string {
	switch ev.Type {
	case core.EventPublished:
		return EventTurnQueued
	case core.EventDropped:
		return agent.EventCancelled
	case core.EventCancelRequested:
		return EventCancelling
	case core.EventStepRetrying:
		return EventTurnRetrying
	case core.EventStepRestarted:
		return EventTurnResumed
	case core.EventDeleted:
		return EventDeleted
	case core.EventStepStarted:
		switch ev.Step {
		case agent.StepTurn:
			return EventTurnStarted
		case agent.StepTool:
			return EventToolStarted
		}
		return ""
	case core.EventStarted:
		return ""
	}
	return ev.Type
}

// frame gives the native SSE frame of an event, nil for one that is not shown.
func frame(ev *wire.Event) []byte {
	name := nameOf(ev)
	if name == "" {
		return nil
	}
	b := make([]byte, 0, 160+len(ev.Data)+itemBytes(ev))
	if name != EventDeleted { // told, not kept: there is nothing to resume from
		b = append(b, "id: "...)
		b = strconv.AppendUint(b, ev.Lsn, 10)
		b = append(b, '.')
		b = strconv.AppendUint(b, uint64(ev.N), 10)
		b = append(b, '\n')
	}
	b = append(b, "event: "...)
	b = append(b, name...)
	b = append(b, "\ndata: "...)
	from := len(b)
	b = appendData(b, ev, name)
	oneLine(b[from:])
	return append(b, "\n\n"...)
}

// oneLine turns line breaks into spaces, in place. In valid JSON they stand
// between tokens only, where a space means the same; in a data line they would
// end the frame.
func oneLine(b []byte) {
	for i, c := range b {
		if c == '\n' || c == '\r' {
			b[i] = ' '
		}
	}
}

func itemBytes(ev *wire.Event) int {
	n := 0
	for _, it := range ev.Items {
		n += len(it)
	}
	return n
}

// Describe gives the public name of an event, "" for one that is not shown, and
// its JSON.
func Describe(ev *wire.Event) (name string, data []byte) {
	if name = nameOf(ev); name == "" {
		return "", nil
	}
	return name, appendData(nil, ev, name)
}

// Data gives the JSON of a durable event, as in its data line.
func Data(ev *wire.Event) []byte { return appendData(nil, ev, nameOf(ev)) }

func appendData(b []byte, ev *wire.Event, name string) []byte {
	b = append(b, '{')
	if ev.Scope != "" {
		b = appendField(b, "turn_id", ev.Scope)
		b = append(b, ',')
	}
	b = append(b, `"at":"`...)
	b = time.UnixMicro(ev.AtUs).UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z")
	b = append(b, '"')
	switch name {
	case EventTurnQueued:
		b = append(append(b, `,"message":`...), ev.Data...)
	case EventTurnStarted:
		if len(ev.Items) > 0 {
			b = append(append(b, `,"message":`...), ev.Items[0]...)
		}
	case EventTurnResumed:
		b = appendStep(b, ev)
		b = appendField(append(b, ','), "reason", string(ev.Data))
	case EventTurnRetrying:
		b = appendStep(b, ev)
		b = appendField(append(b, ','), "error", string(ev.Data))
	case EventCancelling, EventDeleted:
		b = appendField(append(b, ','), "reason", string(ev.Data))
	case agent.EventCancelled:
		if ev.Type == core.EventDropped {
			b = appendField(append(b, ','), "reason", string(ev.Data))
			break
		}
		b = appendObject(b, ev.Data)
	case agent.EventMessage:
		if len(ev.Items) > 0 {
			b = append(append(b, `,"message":`...), ev.Items[0]...)
		}
		b = appendObject(b, ev.Data)
	default:
		b = appendObject(b, ev.Data)
	}
	return append(b, '}')
}

func appendStep(b []byte, ev *wire.Event) []byte {
	b = appendField(append(b, ','), "step", ev.Step)
	b = append(b, `,"attempt":`...)
	return strconv.AppendUint(b, uint64(ev.Attempt), 10)
}

// appendObject adds the fields of a JSON object.
func appendObject(b, obj []byte) []byte {
	if len(obj) <= 2 || obj[0] != '{' {
		return b
	}
	b = append(b, ',')
	return append(b, obj[1:len(obj)-1]...)
}

func appendField(b []byte, name, value string) []byte {
	b = append(b, '"')
	b = append(b, name...)
	b = append(b, `":`...)
	return jsontext.AppendString(b, value)
}

// deltaFrame is the native frame of a delta. Offset and length are in bytes of
// the message's UTF-8 text.
func deltaFrame(d *stream.Delta) []byte {
	b := make([]byte, 0, 96+len(d.Scope)+len(d.Text))
	b = append(b, "event: message.delta\ndata: {"...)
	b = appendField(b, "turn_id", d.Scope)
	b = append(b, `,"offset":`...)
	b = strconv.AppendInt(b, int64(d.Offset), 10)
	b = append(b, ',')
	b = appendField(b, "text", d.Text)
	return append(b, "}\n\n"...)
}

func isPartial(ev *wire.Event) bool {
	return ev.Type == agent.EventMessage && bytes.Contains(ev.Data, []byte(`"partial":true`))
}

func sortNewest(list []Session) {
	sort.Slice(list, func(i, j int) bool { return list[i].ID > list[j].ID })
}
