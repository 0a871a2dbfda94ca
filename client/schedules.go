package client

import (
	"context"
	"encoding/json"
	"iter"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

const schedulePage = 200

// Schedule starts flows at times.
type Schedule struct {
	ID       string        // of the schedule
	Cron     string        // five fields, or @every 10s, @daily, …
	TimeZone string        // IANA name; empty = UTC
	Jitter   time.Duration // each start is late by a random part of this
	Overlap  Overlap
	Start    StartRequest // its ID is a prefix; the instant is added
	Paused   bool
	Note     string        // why it is paused
	CatchUp  time.Duration // instants missed by at most this are made up; 0 = one minute
}

// ScheduleInfo is a schedule and what it has done.
type ScheduleInfo struct {
	ID         string          `json:"id"`
	Cron       string          `json:"cron"`
	TimeZone   string          `json:"time_zone,omitempty"`
	Jitter     time.Duration   `json:"-"`
	Overlap    Overlap         `json:"overlap"`
	FlowType   string          `json:"flow_type"`
	FlowID     string          `json:"flow_id,omitempty"` // prefix of the flows' IDs
	Step       string          `json:"step,omitempty"`
	Input      json.RawMessage `json:"input,omitempty"`
	Paused     bool            `json:"paused,omitempty"`
	Note       string          `json:"note,omitempty"`
	CatchUp    time.Duration   `json:"-"`
	Next       time.Time       `json:"next,omitzero"`
	Last       time.Time       `json:"last,omitzero"`
	LastFlowID string          `json:"last_flow_id,omitempty"`
	Started    uint64          `json:"started"`
	Skipped    uint64          `json:"skipped,omitempty"`
	Buffered   uint64          `json:"buffered,omitempty"`
}

// MarshalJSON gives durations as Go writes them.
func (s ScheduleInfo) MarshalJSON() ([]byte, error) {
	type plain ScheduleInfo
	return json.Marshal(struct {
		plain
		Jitter  string `json:"jitter,omitempty"`
		CatchUp string `json:"catch_up,omitempty"`
	}{plain(s), duration(s.Jitter), duration(s.CatchUp)})
}

func duration(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

func fromSchedule(s *wire.Schedule) *ScheduleInfo {
	out := &ScheduleInfo{
		ID: s.Id, Cron: s.Cron, TimeZone: s.TimeZone, Jitter: time.Duration(s.JitterUs) * time.Microsecond,
		Overlap: Overlap(s.Overlap), Paused: s.Paused, Note: s.Note, CatchUp: time.Duration(s.CatchUpUs) * time.Microsecond,
		Next: at(s.NextUs), Last: at(s.LastUs), LastFlowID: s.LastFlowId, Started: s.Started, Skipped: s.Skipped, Buffered: s.Buffered,
	}
	if f := s.Start; f != nil {
		out.FlowType, out.FlowID, out.Step, out.Input = f.FlowType, f.FlowId, f.Step, raw(f.Input)
	}
	return out
}

// PutSchedule stores a schedule. With create it fails with ErrExists when there
// is one; without, it takes its place.
func (c *Client) PutSchedule(ctx context.Context, s Schedule, create bool) (*ScheduleInfo, error) {
	// The schedule's own flows are told apart by their instants.
	start, err := c.startRequest(ctx, &s.Start)
	if err != nil {
		return nil, err
	}
	return c.schedule(ctx, &wire.Call{Verb: &wire.Call_PutSchedule{PutSchedule: &wire.PutScheduleRequest{Create: create, Schedule: &wire.Schedule{
		Id: s.ID, Cron: s.Cron, TimeZone: s.TimeZone, JitterUs: s.Jitter.Microseconds(), Overlap: wire.Schedule_Overlap(s.Overlap),
		Start: start, Paused: s.Paused, Note: s.Note, CatchUpUs: s.CatchUp.Microseconds(),
	}}}}, once)
}

// Schedule gives one schedule.
func (c *Client) Schedule(ctx context.Context, id string) (*ScheduleInfo, error) {
	return c.schedule(ctx, &wire.Call{Verb: &wire.Call_GetSchedule{GetSchedule: &wire.ScheduleRequest{Id: id}}}, read)
}

func (c *Client) schedule(ctx context.Context, w *wire.Call, m manner) (*ScheduleInfo, error) {
	a, err := c.do(ctx, w, m)
	if err != nil {
		return nil, err
	}
	s, err := reply(a, a.GetSchedule())
	if err != nil {
		return nil, err
	}
	return fromSchedule(s), nil
}

// Schedules gives all schedules.
func (c *Client) Schedules(ctx context.Context) iter.Seq2[*ScheduleInfo, error] {
	return pages(func(p *page[string, *ScheduleInfo]) error {
		a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_ListSchedules{ListSchedules: &wire.ListSchedulesRequest{Limit: schedulePage, Page: p.next}}}, read)
		if err != nil {
			return err
		}
		re, err := reply(a, a.GetSchedules())
		if err != nil {
			return err
		}
		for _, s := range re.Schedules {
			p.items = append(p.items, fromSchedule(s))
		}
		p.next, p.more = re.Next, re.Next != ""
		return nil
	})
}

// PauseSchedule stops a schedule from starting flows; note says why.
func (c *Client) PauseSchedule(ctx context.Context, id, note string) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_PauseSchedule{PauseSchedule: &wire.PauseScheduleRequest{Id: id, Note: note}}}, once)
	return err
}

// ResumeSchedule lets a paused schedule go on.
func (c *Client) ResumeSchedule(ctx context.Context, id string) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_PauseSchedule{PauseSchedule: &wire.PauseScheduleRequest{Id: id, Resume: true}}}, once)
	return err
}

// TriggerSchedule starts a schedule's flow now, besides its times.
func (c *Client) TriggerSchedule(ctx context.Context, id string) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_TriggerSchedule{TriggerSchedule: &wire.ScheduleRequest{Id: id}}}, once)
	return err
}

// BackfillSchedule starts the flows of the instants from from to to.
func (c *Client) BackfillSchedule(ctx context.Context, id string, from, to time.Time) error {
	if !to.After(from) {
		return invalid("", "the end of the time to make up, %s, is not after its begin, %s", to.Format(time.RFC3339), from.Format(time.RFC3339))
	}
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_BackfillSchedule{BackfillSchedule: &wire.BackfillRequest{Id: id, FromUs: micros(from), ToUs: micros(to)}}}, once)
	return err
}

// DeleteSchedule removes a schedule; flows that it started go on.
func (c *Client) DeleteSchedule(ctx context.Context, id string) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_DeleteSchedule{DeleteSchedule: &wire.ScheduleRequest{Id: id}}}, once)
	return err
}
