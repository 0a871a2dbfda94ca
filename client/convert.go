package client

import (
	"encoding/json"
	"time"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// at converts microseconds since 1970; 0 is no time.
func at(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// raw gives stored bytes as JSON. They are not checked again: who wrote them was.
func raw(b []byte) json.RawMessage {
	if len(b) == 0 {
		return nil
	}
	return b
}

// encode makes the JSON of a value. A json.RawMessage is checked and taken as
// it is; nil, and flow.None, is no value.
func encode(what string, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil, flow.None:
		return nil, nil
	case json.RawMessage:
		if len(v) == 0 {
			return nil, nil
		}
	}
	b, err := flow.Encode(v)
	if err != nil {
		return nil, invalid("", "%s: %v", what, err)
	}
	return b, nil
}

func fromAttributes(in []*wire.Attribute) []Attribute {
	if len(in) == 0 {
		return nil
	}
	out := make([]Attribute, len(in))
	for i, a := range in {
		out[i] = Attribute{Name: a.Name, Value: raw(a.Value), Index: Index(a.Index), Size: a.Size}
	}
	return out
}

func fromInfo(f *wire.FlowInfo) *Info {
	i := &Info{
		ID: f.FlowId, Type: f.FlowType, RunID: f.RunId, Status: Status(f.Status),
		Created: at(f.CreatedUs), Updated: at(f.UpdatedUs), Closed: at(f.ClosedUs), TimeoutAt: at(f.TimeoutAtUs),
		Output: raw(f.Output), Error: f.Error, Cancelling: f.Cancelling, Priority: int(f.Priority), Parent: f.Parent,
		Attributes: fromAttributes(f.Attributes), Events: f.Events, StepsDone: f.StepsDone,
	}
	for _, s := range f.Steps {
		i.Steps = append(i.Steps, StepInfo{
			Exec: s.Exec, Step: s.Step, State: s.State, Attempts: int(s.Attempts), Retries: int(s.Retries),
			Started: at(s.StartedUs), Next: at(s.NextUs), WaitsFor: s.WaitsFor, Worker: s.Worker, ConcurrencyKey: s.ConcurrencyKey,
		})
	}
	for _, c := range f.Channels {
		i.Channels = append(i.Channels, ChannelInfo{c.Name, int(c.Pending)})
	}
	return i
}

func fromEvent(e *wire.Event) *Event {
	out := &Event{
		Cursor: Cursor{e.Lsn, e.N}, At: at(e.AtUs), Type: e.Type, Step: e.Step, Exec: e.Exec, Attempt: int(e.Attempt),
		Text: string(e.Data), Attributes: fromAttributes(e.Attributes), Next: e.Next,
	}
	for _, b := range e.Items {
		out.Items = append(out.Items, raw(b))
	}
	if e.Spec != nil {
		out.Input, out.Async = raw(e.Spec.Input), e.Spec.Async
	}
	switch e.Type {
	case "flow.started", "flow.reset":
		out.RunID = e.Scope
	case "channel.published", "channel.dropped":
		out.MessageID, out.Channel = e.Scope, e.Channel
	}
	return out
}

func fromMessages(in []*wire.Message) []Message {
	out := make([]Message, len(in))
	for i, m := range in {
		out[i] = Message{m.Id, raw(m.Payload), at(m.AtUs), m.Size}
	}
	return out
}

func fromQueue(q *wire.Queue) Queue {
	out := Queue{
		FlowType: q.FlowType, Queued: q.Queued, Running: q.Running, Workers: q.Workers,
		TaskCredits: q.TaskCredits, RPCCredits: q.RpcCredits, Oldest: at(q.OldestUs),
	}
	for _, p := range q.Priorities {
		out.Priorities = append(out.Priorities, PriorityCount{int(p.Priority), p.Queued})
	}
	for _, k := range q.Keys {
		out.Keys = append(out.Keys, KeyCount{k.Key, k.Queued, k.Running, k.Limit})
	}
	return out
}

func fromWorker(w *wire.WorkerInfo) Worker {
	return Worker{
		ID: w.WorkerId, Build: w.Build, SDK: w.Sdk, Address: w.Address, FlowTypes: w.FlowTypes,
		Running: w.Running, TaskCredits: w.TaskCredits, Connected: at(w.ConnectedUs), Draining: w.Draining, Streams: int(w.Streams),
	}
}
