package flows

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// describe shows a flow as it is.
func (c *call) describe(req *wire.DescribeRequest) {
	flowID, err := c.flow(req.FlowId)
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) { return infoAnswer(c.s.info(f)), nil })
}

// outcome is what of a flow a wait shows.
func outcome(f *wire.Flow) *wire.FlowInfo {
	info := &wire.FlowInfo{
		FlowId: UserID(f.Id), FlowType: f.Type, RunId: f.RunId, Status: f.Status, CreatedUs: f.CreatedUs, UpdatedUs: f.UpdatedUs,
		ClosedUs: f.ClosedUs, Output: f.Output, Error: f.Error, Priority: f.Priority, TimeoutAtUs: f.TimeoutAtUs, Cancelling: f.GraceAtUs != 0,
		Events: f.EventCount, StepsDone: f.StepsDone,
	}
	if len(f.Parents) > 0 {
		info.Parent = UserID(f.Parents[0].FlowId)
	}
	return info
}

// info is everything that a describe shows. f is the live flow.
func (s *Service) info(f *wire.Flow) *wire.FlowInfo {
	info := Info(f)
	for _, st := range info.Steps {
		if st.State == "running" {
			st.Worker = s.cfg.Workers.RunningOn(f.Id, st.Exec)
		}
	}
	return info
}

// Info shows a flow without saying which workers run its steps. It keeps
// nothing of f that changes.
func Info(f *wire.Flow) *wire.FlowInfo {
	info := outcome(f)
	for _, st := range f.Steps[:min(len(f.Steps), maxListed)] {
		info.Steps = append(info.Steps, stepInfo(st))
	}
	for _, ch := range f.Channels[:min(len(f.Channels), maxListed)] {
		info.Channels = append(info.Channels, &wire.ChannelInfo{Name: ch.Name, Pending: uint32(len(ch.Pending))})
	}
	info.Attributes = slices.Clone(f.Attributes)
	for i, a := range info.Attributes {
		if len(a.Value) > largeValue {
			info.Attributes[i] = &wire.Attribute{Name: a.Name, Lsn: a.Lsn, Index: a.Index, Size: uint64(len(a.Value))}
		}
	}
	return info
}

func stepInfo(st *wire.Step) *wire.StepInfo {
	info := &wire.StepInfo{
		Exec: st.Exec, Step: st.Spec.Name, State: stateName(st), Attempts: st.Attempts, Retries: st.Retries,
		StartedUs: st.FirstStartUs, NextUs: st.RetryAtUs, ConcurrencyKey: st.Spec.ConcurrencyKey,
	}
	if st.State == wire.Step_WAITING {
		info.WaitsFor, info.NextUs = waitsFor(st)
	}
	return info
}

func stateName(st *wire.Step) string {
	switch st.State {
	case wire.Step_STARTED:
		return "running"
	case wire.Step_BACKOFF:
		return "backoff"
	case wire.Step_QUEUED:
		return "queued"
	case wire.Step_DELAYED:
		return "delayed"
	}
	return "waiting"
}

// waitsFor says in words what a step waits for, and when its next timer is due.
func waitsFor(st *wire.Step) (words string, next int64) {
	w := st.Spec.Wait
	if w == nil {
		return "", 0
	}
	if len(w.Conditions) == 0 {
		return messagesOf(w.Channel, w.Count, 0), 0
	}
	each := make([]string, len(w.Conditions))
	for i, c := range w.Conditions {
		var state *wire.ConditionState
		if i < len(st.Conditions) {
			state = st.Conditions[i]
		}
		if state.GetDone() {
			continue
		}
		if due := state.GetDueUs(); due != 0 && (next == 0 || due < next) {
			next = due
		}
		each[i] = conditionWords(c, state)
	}
	if len(w.Combinations) == 0 {
		return joined(each, nil, " and "), next
	}
	var sets []string
	for _, set := range w.Combinations {
		sets = append(sets, joined(each, set.Of, " and "))
	}
	return joined(sets, nil, " or "), next
}

// joined leaves out what holds already.
func joined(words []string, of []uint32, by string) string {
	var out []string
	if of == nil {
		out = slices.Clone(words)
	}
	for _, i := range of {
		if int(i) < len(words) {
			out = append(out, words[i])
		}
	}
	out = slices.DeleteFunc(out, func(s string) bool { return s == "" })
	return strings.Join(out, by)
}

func conditionWords(c *wire.Condition, state *wire.ConditionState) string {
	var s string
	switch on := c.On.(type) {
	case *wire.Condition_Channel:
		s = messagesOf(on.Channel.GetName(), on.Channel.GetAtLeast(), on.Channel.GetAtMost())
	case *wire.Condition_Flow:
		s = fmt.Sprintf("flow %q to close", UserID(on.Flow.GetFlowId()))
	default:
		s = "a timer at " + time.UnixMicro(state.GetDueUs()).UTC().Format(time.RFC3339Nano)
	}
	if c.Name != "" {
		s = c.Name + ": " + s
	}
	return s
}

func messagesOf(channel string, least, most uint32) string {
	least = max(least, 1)
	count := fmt.Sprint(least)
	if most > least {
		count = fmt.Sprintf("%d to %d", least, most)
	}
	plural := "s"
	if count == "1" {
		plural = ""
	}
	return fmt.Sprintf("%s message%s of channel %q", count, plural, channel)
}
