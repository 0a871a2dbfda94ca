// Package schedule starts flows at times. A schedule is a flow itself, of type
// Type, with the ID <tenant>/x/<id>: what it is and what it has done are its
// attributes, the next instant is a timer that it waits for, and what it starts
// leaves through its outbox. So a schedule is as durable as what it starts, and
// a server that was down makes up for what it missed, within bounds.
//
// Its step "tick" waits for the next instant or for an order of the channel
// "control", whichever comes first, decides what is due (see decide.go), and
// waits again. A flow that must be over before the next one begins is started
// by a step "watch" of its own, which waits for its end and tells "tick".
package schedule

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Type is the flow type of schedules; route its steps to Schedules.
const Type = "perdure.schedule"

const (
	stepTick  = "tick"
	stepWatch = "watch" // its input is the flow's ID as users see it

	channelControl = "control"

	attrBook  = "book"  // JSON of book
	attrSpec  = "spec"  // wire.Schedule
	attrStart = "start" // wire.StartFlow, without what differs from flow to flow

	infix = "/x/"
)

// Bounds of schedules.
const (
	MaxID       = 128  // bytes of an ID
	MaxBackfill = 1000 // instants of one backfill, and of all that wait
	maxPrefix   = 200  // bytes of what flow IDs begin with
	maxNote     = 1 << 10
	maxJitter   = 24 * time.Hour
	maxCatchUp  = 366 * 24 * time.Hour
	maxOrders   = 256 // that wait for one schedule
	ordersATurn = 64
	startsATurn = 100
	missedCount = 1000 // missed instants that are counted one by one
)

const defaultCatchUp = time.Minute

// Starter checks a start and gives the flow's ID and the command that starts it.
type Starter func(tenant string, req *wire.StartRequest) (flowID string, cmd *wire.StartFlow, err error)

// Config makes Schedules.
type Config struct {
	Clock   env.Clock
	Starter Starter
}

// Schedules runs the steps of schedules (it is a worker.Handler) and serves
// their verbs. Safe for concurrent use.
type Schedules struct {
	cfg Config
	set partition.Set
}

// New makes Schedules; Bind it before the first verb.
func New(cfg Config) *Schedules { return &Schedules{cfg: cfg} }

// Bind says where flows are.
func (s *Schedules) Bind(set partition.Set) { s.set = set }

func flowID(tenant, id string) string { return tenant + infix + id }

// split is the inverse of flowID.
func split(flowID string) (tenant, id string) {
	tenant, id, _ = strings.Cut(flowID, infix)
	return tenant, id
}

// order is a message of the channel "control".
type order struct {
	Op       string  `json:"op"`
	At       int64   `json:"at"`                 // when it was given, microseconds
	Spec     []byte  `json:"spec,omitempty"`     // put
	Start    []byte  `json:"start,omitempty"`    // put
	Note     string  `json:"note,omitempty"`     // pause, resume
	Instants []int64 `json:"instants,omitempty"` // trigger, backfill; microseconds
	Flow     string  `json:"flow,omitempty"`     // closed
	Refused  string  `json:"refused,omitempty"`  // closed: it never began
}

const (
	opPut      = "put"
	opPause    = "pause"
	opResume   = "resume"
	opTrigger  = "trigger"
	opBackfill = "backfill"
	opClosed   = "closed"
)

// book is what a schedule has done and is about to do. Instants are those of
// its times, without jitter, in microseconds.
type book struct {
	Next     int64  `json:"next,omitempty"`      // 0 = none, it is paused
	Last     int64  `json:"last,omitempty"`      // that a flow was started for
	LastFlow string `json:"last_flow,omitempty"` // ID as users see it
	Running  string `json:"running,omitempty"`   // a flow that is watched and not over
	Queue    []wait `json:"queue,omitempty"`
	Started  uint64 `json:"started,omitempty"`
	Skipped  uint64 `json:"skipped,omitempty"`
	Error    string `json:"error,omitempty"` // why the newest refused start was
}

// wait is an instant whose flow is to be started later.
type wait struct {
	At int64  `json:"at"`
	By string `json:"by,omitempty"` // opTrigger, opBackfill, or empty: the schedule itself
}

// schedule is the whole state of one.
type schedule struct {
	spec  *wire.Schedule
	start *wire.StartFlow
	times *Times
	book  book

	specChanged bool // and start
}

// load reads a schedule from the attributes of its flow.
func load(attrs []*wire.Attribute) (*schedule, error) {
	s := &schedule{}
	var spec, start []byte
	for _, a := range attrs {
		switch a.Name {
		case attrBook:
			if err := json.Unmarshal(a.Value, &s.book); err != nil {
				return nil, fmt.Errorf("book of schedule: %w", err)
			}
		case attrSpec:
			spec = a.Value
		case attrStart:
			start = a.Value
		}
	}
	return s, s.take(spec, start)
}

// take replaces what the schedule is.
func (s *schedule) take(spec, start []byte) error {
	sp, st := &wire.Schedule{}, &wire.StartFlow{}
	if err := sp.UnmarshalVT(spec); err != nil {
		return fmt.Errorf("spec of schedule: %w", err)
	}
	if err := st.UnmarshalVT(start); err != nil {
		return fmt.Errorf("start of schedule: %w", err)
	}
	times, err := ParseTimes(sp.Cron, sp.TimeZone)
	if err != nil {
		return fmt.Errorf("times of schedule: %w", err)
	}
	s.spec, s.start, s.times = sp, st, times
	return nil
}

// attributes gives what is to be written.
func (s *schedule) attributes() ([]*wire.Attribute, error) {
	b, err := json.Marshal(s.book)
	if err != nil {
		return nil, err
	}
	out := []*wire.Attribute{{Name: attrBook, Value: b}}
	if !s.specChanged {
		return out, nil
	}
	spec, err := s.spec.MarshalVT()
	if err != nil {
		return nil, err
	}
	start, err := s.start.MarshalVT()
	if err != nil {
		return nil, err
	}
	return append(out, &wire.Attribute{Name: attrSpec, Value: spec}, &wire.Attribute{Name: attrStart, Value: start}), nil
}

// tick is the step that waits for an order, or for an instant unless it is 0.
func tick(wakeUs int64) *wire.StepSpec {
	w := &wire.Wait{
		Conditions:   []*wire.Condition{{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: channelControl, AtLeast: 1, AtMost: ordersATurn}}}},
		Combinations: []*wire.Combination{{Of: []uint32{0}}},
	}
	if wakeUs != 0 {
		w.Conditions = append(w.Conditions, &wire.Condition{On: &wire.Condition_AtUs{AtUs: max(wakeUs, 1)}})
		w.Combinations = append(w.Combinations, &wire.Combination{Of: []uint32{1}})
	}
	return &wire.StepSpec{Name: stepTick, Wait: w, Retry: forever()}
}

// watch is the step that starts a flow and waits for its end.
func watch(whole, id string, cmd *wire.StartFlow) *wire.StepSpec {
	return &wire.StepSpec{
		Name: stepWatch, Input: []byte(id), Retry: forever(),
		Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: whole, Start: cmd}}}}},
	}
}

// forever is for steps that must never end a schedule.
func forever() *wire.RetryPolicy {
	return &wire.RetryPolicy{MaxAttempts: 1<<32 - 1, InitialUs: time.Second.Microseconds(), MaxUs: time.Minute.Microseconds()}
}

// view gives a schedule as its users see it.
func (s *schedule) view() *wire.Schedule {
	out := s.spec.CloneVT()
	out.NextUs, out.LastUs, out.LastFlowId = 0, s.book.Last, s.book.LastFlow
	if s.book.Next != 0 {
		out.NextUs = s.due(s.book.Next)
	}
	out.Started, out.Skipped, out.Buffered = s.book.Started, s.book.Skipped, uint64(len(s.book.Queue))
	return out
}

func noSchedule(id string) error {
	return &core.Error{Code: core.NotFound, Message: fmt.Sprintf("schedule %q does not exist", id)}
}
