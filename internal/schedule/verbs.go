package schedule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of a page of schedules.
const (
	defaultPage = 100
	maxPage     = 1000
)

// putTries bounds how often a put meets a schedule that comes and goes.
const putTries = 4

// Do serves the schedule verbs of a Call. What is wrong with a request is in
// the answer's error; other errors are those of the engine or of the Starter.
// An answer is durable, and a get or a list shows all that was answered before.
// It blocks until then.
func (s *Schedules) Do(ctx context.Context, tenant string, c *wire.Call) (*wire.Answer, error) {
	a, err := s.verb(ctx, tenant, c)
	var bad *Invalid
	if errors.As(err, &bad) {
		return &wire.Answer{Error: &wire.Error{Code: string(core.Invalid), Message: bad.Message, Hint: bad.Hint, Position: -1}}, nil
	}
	return a, err
}

func (s *Schedules) verb(ctx context.Context, tenant string, c *wire.Call) (*wire.Answer, error) {
	switch v := c.Verb.(type) {
	case *wire.Call_PutSchedule:
		return s.put(ctx, tenant, v.PutSchedule)
	case *wire.Call_GetSchedule:
		return s.get(ctx, tenant, v.GetSchedule.GetId())
	case *wire.Call_ListSchedules:
		return s.list(ctx, tenant, v.ListSchedules)
	case *wire.Call_PauseSchedule:
		return s.pause(ctx, tenant, v.PauseSchedule)
	case *wire.Call_TriggerSchedule:
		return s.trigger(ctx, tenant, v.TriggerSchedule.GetId())
	case *wire.Call_BackfillSchedule:
		return s.backfill(ctx, tenant, v.BackfillSchedule)
	case *wire.Call_DeleteSchedule:
		return s.delete(ctx, tenant, v.DeleteSchedule.GetId())
	}
	return nil, invalid("", "the call has no verb of schedules")
}

func done() *wire.Answer { return &wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}} }

func checkID(id string) error {
	switch {
	case id == "" || len(id) > MaxID:
		return invalid("", "a schedule's ID has %d bytes, must have 1 to %d", len(id), MaxID)
	case !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl):
		return invalid("", "the schedule's ID %q has control characters or is not UTF-8", clip(id))
	}
	return nil
}

// put makes a schedule, or replaces what one is: what it has done stays.
func (s *Schedules) put(ctx context.Context, tenant string, req *wire.PutScheduleRequest) (*wire.Answer, error) {
	sched, err := s.check(tenant, req.GetSchedule())
	if err != nil {
		return nil, err
	}
	id := sched.spec.Id
	for range putTries {
		err = s.create(ctx, tenant, sched)
		var refused *core.Error
		if errors.As(err, &refused) && refused.Code == core.Exists {
			if req.Create {
				return nil, &core.Error{Code: core.Exists, Message: fmt.Sprintf("schedule %q exists already", id)}
			}
			err = s.replace(ctx, tenant, sched)
		}
		if !isMissing(err) {
			break // else it was deleted meanwhile
		}
	}
	if err != nil {
		return nil, err
	}
	return s.get(ctx, tenant, id)
}

// check makes the schedule that a request asks for.
func (s *Schedules) check(tenant string, spec *wire.Schedule) (*schedule, error) {
	if spec == nil || spec.Start == nil {
		return nil, invalid("say what it starts, and when", "a schedule, or what it starts, is missing")
	}
	spec = spec.CloneVT()
	spec.NextUs, spec.LastUs, spec.LastFlowId, spec.Started, spec.Skipped, spec.Buffered = 0, 0, "", 0, 0, 0
	if err := checkID(spec.Id); err != nil {
		return nil, err
	}
	if err := checkSpec(spec); err != nil {
		return nil, err
	}
	times, err := ParseTimes(spec.Cron, spec.TimeZone)
	if err != nil {
		return nil, err
	}
	sched := &schedule{spec: spec, times: times, specChanged: true}
	sched.rewind(s.cfg.Clock.Now().UnixMicro())
	sample := spec.Start.CloneVT()
	sample.FlowId = sched.flowOf(s.cfg.Clock.Now().UnixMicro() | 1)
	id, cmd, err := s.cfg.Starter(tenant, sample)
	if err != nil {
		return nil, err
	}
	// The engine says now what it would say at each instant.
	entry := &wire.Entry{Version: core.EntryVersion, Lsn: 1, TimeUs: 1, FlowId: tenant + "/f/" + id, Command: &wire.Entry_StartFlow{StartFlow: cmd.CloneVT()}}
	if _, err := core.Apply(nil, entry); err != nil {
		return nil, err
	}
	sched.start = cmd
	return sched, nil
}

// checkSpec checks what neither the times nor the start say.
func checkSpec(spec *wire.Schedule) error {
	start := spec.Start
	switch {
	case spec.Overlap < wire.Schedule_SKIP || spec.Overlap > wire.Schedule_TERMINATE_OTHER:
		return invalid("use skip, buffer_one, allow, cancel_other or terminate_other", "the overlap policy %d is not known", spec.Overlap)
	case spec.JitterUs < 0 || spec.JitterUs > maxJitter.Microseconds():
		return invalid("", "the jitter is %s, must be 0 to %s", micros(spec.JitterUs), maxJitter)
	case spec.CatchUpUs < 0 || spec.CatchUpUs > maxCatchUp.Microseconds():
		return invalid("", "catch-up is %s, must be 0 (one minute) to %s", micros(spec.CatchUpUs), maxCatchUp)
	case len(spec.Note) > maxNote:
		return invalid("", "the note has %d bytes, at most %d", len(spec.Note), maxNote)
	case len(start.FlowId) > maxPrefix:
		return invalid("the instant is added to it", "what flow IDs begin with has %d bytes, at most %d", len(start.FlowId), maxPrefix)
	case start.RequestId != "":
		return invalid("leave it out: each instant has its own flow ID", "the start has a request ID")
	case start.InputBlob != "" || start.Spec.GetInputBlob() != "":
		return invalid("keep it elsewhere and pass where it is", "the start has a large input, which belongs to one flow")
	}
	for _, a := range start.Attributes {
		if a.GetBlob() != "" {
			return invalid("keep it elsewhere and pass where it is", "attribute %q of the start has a large value, which belongs to one flow", clip(a.Name))
		}
	}
	for _, p := range start.Publish {
		if len(p.GetBlobs()) > 0 {
			return invalid("keep it elsewhere and pass where it is", "a message of the start for channel %q is large, and belongs to one flow", clip(p.Channel))
		}
	}
	return nil
}

// micros is for messages: it does not overflow.
func micros(us int64) time.Duration {
	const most = 1 << 53
	return time.Duration(min(max(us, -most), most)) * time.Microsecond
}

// create makes the flow of a schedule that is not there yet.
func (s *Schedules) create(ctx context.Context, tenant string, sched *schedule) error {
	attrs, err := sched.attributes()
	if err != nil {
		return err
	}
	wake := int64(0)
	if sched.book.Next != 0 {
		wake = sched.due(sched.book.Next)
	}
	return s.call(ctx, flowID(tenant, sched.spec.Id), &wire.Entry{Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{
		Quiet: true, // it ticks for years
		Type:  Type, Attributes: attrs, Steps: []*wire.StepSpec{tick(wake)},
	}}})
}

func (s *Schedules) replace(ctx context.Context, tenant string, sched *schedule) error {
	spec, err := sched.spec.MarshalVT()
	if err != nil {
		return err
	}
	start, err := sched.start.MarshalVT()
	if err != nil {
		return err
	}
	return s.order(ctx, tenant, sched.spec.Id, order{Op: opPut, Spec: spec, Start: start})
}

// order publishes an order and waits until it is durable.
func (s *Schedules) order(ctx context.Context, tenant, id string, o order) error {
	o.At = s.cfg.Clock.Now().UnixMicro()
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return s.call(ctx, flowID(tenant, id), &wire.Entry{Command: &wire.Entry_Publish{Publish: &wire.Publish{
		Channel: channelControl, Payload: payload, MaxPending: maxOrders,
	}}})
}

// call proposes a command; a flow that is missing is a schedule that is.
func (s *Schedules) call(ctx context.Context, flow string, e *wire.Entry) error {
	e.FlowId = flow
	_, err := s.set.For(flow).Call(ctx, e)
	if isMissing(err) {
		_, id := split(flow)
		return noSchedule(id)
	}
	return err
}

func isMissing(err error) bool {
	var refused *core.Error
	return errors.As(err, &refused) && refused.Code == core.NotFound
}

func (s *Schedules) get(ctx context.Context, tenant, id string) (*wire.Answer, error) {
	sched, err := s.read(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	return &wire.Answer{Result: &wire.Answer_Schedule{Schedule: sched.view()}}, nil
}

// read gives a schedule with the orders that it has not taken yet.
func (s *Schedules) read(ctx context.Context, tenant, id string) (*schedule, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	whole := flowID(tenant, id)
	f, err := s.set.For(whole).Read(ctx, whole)
	if err != nil {
		return nil, err
	}
	if f == nil {
		return nil, noSchedule(id)
	}
	sched, err := load(f.Attributes)
	if err != nil {
		return nil, err
	}
	orders, err := ordersOf(waiting(f))
	if err != nil {
		return nil, err
	}
	for i := range orders {
		if err := sched.obey(&orders[i]); err != nil {
			return nil, err
		}
	}
	return sched, nil
}

// waiting gives the orders that are with the step or before it.
func waiting(f *wire.Flow) []*wire.Message {
	var out []*wire.Message
	for _, st := range f.Steps {
		if st.Spec.GetName() == stepTick {
			out = append(out, st.Matched...)
		}
	}
	for _, c := range f.Channels {
		if c.Name == channelControl {
			out = append(out, c.Pending...)
		}
	}
	return out
}

func (s *Schedules) pause(ctx context.Context, tenant string, req *wire.PauseScheduleRequest) (*wire.Answer, error) {
	if err := checkID(req.GetId()); err != nil {
		return nil, err
	}
	if len(req.Note) > maxNote {
		return nil, invalid("", "the note has %d bytes, at most %d", len(req.Note), maxNote)
	}
	o := order{Op: opPause, Note: req.Note}
	if req.Resume {
		o.Op = opResume
	}
	return done(), s.order(ctx, tenant, req.Id, o)
}

func (s *Schedules) trigger(ctx context.Context, tenant, id string) (*wire.Answer, error) {
	sched, err := s.read(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	if len(sched.book.Queue) >= MaxBackfill {
		return nil, full(id, len(sched.book.Queue))
	}
	now := s.cfg.Clock.Now().UnixMicro()
	if now%1e6 == 0 {
		now++ // not an instant of the schedule itself
	}
	return done(), s.order(ctx, tenant, id, order{Op: opTrigger, Instants: []int64{now}})
}

func full(id string, n int) error {
	return &core.Error{Code: core.QueueFull, Message: fmt.Sprintf("%d instants of schedule %q wait already, at most %d", n, id, MaxBackfill)}
}

// backfill starts the flows of all instants of an interval, ends included: one
// after the other, or side by side where the policy allows it. One whose flow
// is there already is left out, unless the start's reuse says otherwise.
func (s *Schedules) backfill(ctx context.Context, tenant string, req *wire.BackfillRequest) (*wire.Answer, error) {
	sched, err := s.read(ctx, tenant, req.GetId())
	if err != nil {
		return nil, err
	}
	if req.FromUs <= 0 || req.ToUs < req.FromUs {
		return nil, invalid("give two instants, the earlier one first", "a backfill from %d to %d microseconds is empty", req.FromUs, req.ToUs)
	}
	var instants []int64
	for at := sched.after(req.FromUs - 1); at != 0 && at <= req.ToUs; at = sched.after(at) {
		if instants = append(instants, at); len(instants) > MaxBackfill {
			return nil, invalid("backfill a shorter interval, several times", "the interval has more than %d instants", MaxBackfill)
		}
	}
	if len(instants) == 0 {
		return nil, invalid("check the interval and the time zone", "schedule %q has no instant from %s to %s", req.Id, stamp(req.FromUs), stamp(req.ToUs))
	}
	if n := len(sched.book.Queue); n+len(instants) > MaxBackfill {
		return nil, full(req.Id, n)
	}
	return done(), s.order(ctx, tenant, req.Id, order{Op: opBackfill, Instants: instants})
}

func stamp(us int64) string { return time.UnixMicro(us).UTC().Format(time.RFC3339Nano) }

func (s *Schedules) delete(ctx context.Context, tenant, id string) (*wire.Answer, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	e := &wire.Entry{Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "deleted by a client"}}}
	return done(), s.call(ctx, flowID(tenant, id), e)
}

// list gives schedules in order of ID.
func (s *Schedules) list(ctx context.Context, tenant string, req *wire.ListSchedulesRequest) (*wire.Answer, error) {
	limit := int(req.GetLimit())
	switch {
	case limit == 0:
		limit = defaultPage
	case limit > maxPage:
		return nil, invalid("ask for further pages", "limit is %d, at most %d", limit, maxPage)
	}
	var ids []string
	prefix, after := flowID(tenant, ""), ""
	if req.GetPage() != "" {
		after = prefix + req.Page
	}
	for _, p := range s.set {
		if err := p.Do(ctx, func(*partition.Machine) {}); err != nil { // what was answered is in the tables then
			return nil, err
		}
		err := p.Tables().Flows(prefix, after, limit+1, false, func(f *wire.Flow) error {
			ids = append(ids, f.Id[len(prefix):])
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(ids)
	reply := &wire.SchedulesReply{}
	if len(ids) > limit {
		ids = ids[:limit]
		reply.Next = ids[limit-1]
	}
	for _, id := range ids {
		sched, err := s.read(ctx, tenant, id)
		if isMissing(err) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, err
		}
		reply.Schedules = append(reply.Schedules, sched.view())
	}
	return &wire.Answer{Result: &wire.Answer_Schedules{Schedules: reply}}, nil
}
