package client

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Status of a run.
type Status int

// A run is Running until it closes, and then keeps its status.
const (
	Running Status = iota
	Completed
	Failed
	Cancelled
	Terminated
	TimedOut
)

var statusNames = [...]string{"running", "completed", "failed", "cancelled", "terminated", "timed_out"}

// String gives the name that queries and JSON use.
func (s Status) String() string { return nameOf(statusNames[:], int(s)) }

// MarshalText implements encoding.TextMarshaler.
func (s Status) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Status) UnmarshalText(b []byte) error { return parseName(s, statusNames[:], "status", b) }

// Reuse is what a start does when a flow of its ID is there already.
type Reuse int

const (
	Refuse    Reuse = iota // ErrExists, whatever its state
	IfClosed               // a new run when the former one is closed
	IfFailed               // a new run when the former one closed other than completed
	Terminate              // a running one is terminated first
	Attach                 // a running one is taken as it is; a closed one gets a new run
)

var reuseNames = [...]string{"refuse", "if_closed", "if_failed", "terminate", "attach"}

// String gives the name that the command line uses.
func (r Reuse) String() string { return nameOf(reuseNames[:], int(r)) }

// MarshalText implements encoding.TextMarshaler.
func (r Reuse) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Reuse) UnmarshalText(b []byte) error { return parseName(r, reuseNames[:], "reuse policy", b) }

// Overlap is what a schedule does when the flow it started last still runs.
type Overlap int

const (
	Skip           Overlap = iota // no flow for this instant
	BufferOne                     // one waits until the last has ended
	Allow                         // they run side by side
	CancelOther                   // the last one is cancelled
	TerminateOther                // the last one is terminated
)

var overlapNames = [...]string{"skip", "buffer_one", "allow", "cancel_other", "terminate_other"}

// String gives the name that the command line uses.
func (o Overlap) String() string { return nameOf(overlapNames[:], int(o)) }

// MarshalText implements encoding.TextMarshaler.
func (o Overlap) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Overlap) UnmarshalText(b []byte) error {
	return parseName(o, overlapNames[:], "overlap policy", b)
}

// Index is how an attribute can be searched for.
type Index int

const (
	NotIndexed Index = iota
	Keyword          // a JSON string, or an array of them
	Int
	Float
	Bool
	Time // RFC 3339
)

var indexNames = [...]string{"none", "keyword", "int", "float", "bool", "time"}

// String gives the name that JSON uses.
func (i Index) String() string { return nameOf(indexNames[:], int(i)) }

// MarshalText implements encoding.TextMarshaler.
func (i Index) MarshalText() ([]byte, error) { return []byte(i.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *Index) UnmarshalText(b []byte) error { return parseName(i, indexNames[:], "index", b) }

func nameOf(names []string, i int) string {
	if i >= 0 && i < len(names) {
		return names[i]
	}
	return "unknown(" + strconv.Itoa(i) + ")"
}

func parseName[T ~int](v *T, names []string, what string, text []byte) error {
	for i, n := range names {
		if n == strings.ReplaceAll(string(text), "-", "_") {
			*v = T(i)
			return nil
		}
	}
	return invalid("It is one of "+strings.Join(names, ", ")+".", "there is no %s %q", what, text)
}

// Cursor is a place in a flow's log; the zero Cursor is before its begin.
type Cursor struct {
	LSN uint64
	N   uint32
}

// String gives "lsn.n".
func (c Cursor) String() string { return fmt.Sprintf("%d.%d", c.LSN, c.N) }

// MarshalText implements encoding.TextMarshaler.
func (c Cursor) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (c *Cursor) UnmarshalText(b []byte) error {
	lsn, n, ok := strings.Cut(string(b), ".")
	l, err := strconv.ParseUint(lsn, 10, 64)
	m, err2 := strconv.ParseUint(n, 10, 32)
	if !ok || err != nil || err2 != nil {
		return invalid(`A cursor is two numbers with a dot, as "12.0".`, "%q is not a cursor", b)
	}
	*c = Cursor{l, uint32(m)}
	return nil
}

func (c Cursor) wire() *wire.Cursor {
	if c == (Cursor{}) {
		return nil
	}
	return &wire.Cursor{Lsn: c.LSN, N: c.N}
}

// Attribute is a durable variable of a flow.
type Attribute struct {
	Name  string          `json:"name"`
	Value json.RawMessage `json:"value,omitempty"` // empty where only its size is told; in SetAttributes: remove it
	Index Index           `json:"index,omitempty"`
	Size  uint64          `json:"size,omitempty"` // bytes of a value that is not here
}

// Info is a run seen from outside.
type Info struct {
	ID         string          `json:"id"`
	Type       string          `json:"type"`
	RunID      string          `json:"run_id"`
	Status     Status          `json:"status"`
	Created    time.Time       `json:"created"`
	Updated    time.Time       `json:"updated,omitzero"`
	Closed     time.Time       `json:"closed,omitzero"`
	TimeoutAt  time.Time       `json:"timeout_at,omitzero"`
	Output     json.RawMessage `json:"output,omitempty"`
	Error      string          `json:"error,omitempty"`
	Cancelling bool            `json:"cancelling,omitempty"` // told to stop, and still winding down
	Priority   int             `json:"priority,omitempty"`
	Parent     string          `json:"parent,omitempty"`
	Steps      []StepInfo      `json:"steps,omitempty"` // live ones
	Attributes []Attribute     `json:"attributes,omitempty"`
	Channels   []ChannelInfo   `json:"channels,omitempty"`
	Events     uint64          `json:"events"`
	StepsDone  uint64          `json:"steps_done"`
}

// StepInfo is a live step.
type StepInfo struct {
	Exec           uint64    `json:"exec"`
	Step           string    `json:"step"`
	State          string    `json:"state"` // waiting, queued, running, backoff, delayed
	Attempts       int       `json:"attempts"`
	Retries        int       `json:"retries,omitempty"`
	Started        time.Time `json:"started,omitzero"`
	Next           time.Time `json:"next,omitzero"`       // of a backoff or a timer
	WaitsFor       string    `json:"waits_for,omitempty"` // in words
	Worker         string    `json:"worker,omitempty"`
	ConcurrencyKey string    `json:"concurrency_key,omitempty"`
}

// ChannelInfo says how much waits in a channel.
type ChannelInfo struct {
	Name    string `json:"name"`
	Pending int    `json:"pending"`
}

// Message waits in a channel.
type Message struct {
	ID      string          `json:"id"`
	Payload json.RawMessage `json:"payload"` // nil when it is too large to be listed
	At      time.Time       `json:"at"`
	Size    uint64          `json:"size,omitempty"` // bytes of a payload that is too large to be listed
}

// Event is one line of a flow's log.
type Event struct {
	Cursor     Cursor            `json:"cursor"`
	At         time.Time         `json:"at"`
	Type       string            `json:"type"`                 // flow.started, step.completed, …
	RunID      string            `json:"run_id,omitempty"`     // of what begins a run
	MessageID  string            `json:"message_id,omitempty"` // of a channel's event
	Channel    string            `json:"channel,omitempty"`
	Step       string            `json:"step,omitempty"`
	Exec       uint64            `json:"exec,omitempty"`
	Attempt    int               `json:"attempt,omitempty"`
	Text       string            `json:"text,omitempty"`  // an error, a reason, the name of an RPC
	Input      json.RawMessage   `json:"input,omitempty"` // of a step that was started
	Items      []json.RawMessage `json:"items,omitempty"` // messages that started a step; the output of a flow
	Attributes []Attribute       `json:"attributes,omitempty"`
	Next       []string          `json:"next,omitempty"` // steps that a completed one led to
	Async      bool              `json:"async,omitempty"`
}

// Output is text that a running step puts out. It is shown while it comes and
// is not kept.
type Output struct {
	Exec    uint64 `json:"exec"`
	Attempt int    `json:"attempt"`
	Offset  uint64 `json:"offset"` // of the text in all the attempt has put out
	Text    string `json:"text"`
}

// Queue is what waits for workers of one flow type.
type Queue struct {
	FlowType    string          `json:"flow_type"`
	Queued      uint64          `json:"queued"`
	Running     uint64          `json:"running"`
	Workers     uint64          `json:"workers"`
	TaskCredits uint64          `json:"task_credits"` // steps that the workers would take now
	RPCCredits  uint64          `json:"rpc_credits"`
	Oldest      time.Time       `json:"oldest,omitzero"` // since when the oldest waits
	Priorities  []PriorityCount `json:"priorities,omitempty"`
	Keys        []KeyCount      `json:"keys,omitempty"`
}

// PriorityCount is what waits of one priority.
type PriorityCount struct {
	Priority int    `json:"priority"`
	Queued   uint64 `json:"queued"`
}

// KeyCount is what waits and runs of one concurrency key.
type KeyCount struct {
	Key     string `json:"key"`
	Queued  uint64 `json:"queued"`
	Running uint64 `json:"running"`
	Limit   uint64 `json:"limit"`
}

// Worker is a connected worker.
type Worker struct {
	ID          string    `json:"id"`
	Build       string    `json:"build,omitempty"`
	SDK         string    `json:"sdk,omitempty"`
	Address     string    `json:"address,omitempty"`
	FlowTypes   []string  `json:"flow_types"`
	Running     uint64    `json:"running"`
	TaskCredits uint64    `json:"task_credits"`
	Connected   time.Time `json:"connected"` // its oldest stream
	Draining    bool      `json:"draining,omitempty"`
	Streams     int       `json:"streams,omitempty"` // that it has open
}
