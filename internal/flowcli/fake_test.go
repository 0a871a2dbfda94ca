package flowcli

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// now is the time that the commands see.
var now = time.Date(2026, 3, 1, 14, 30, 0, 0, time.UTC)

// us is a time so long before now.
func us(before time.Duration) int64 { return now.Add(-before).UnixMicro() }

// fake is a server with a few flows that are always the same. It keeps the last
// call that changes something, so that a test sees what was asked.
type fake struct {
	wire.UnimplementedFlowsServer
	wire.UnimplementedBlobsServer

	mu   sync.Mutex
	last *wire.Call // guarded by mu
}

// serve runs a fake server, and gives its address.
func serve(t *testing.T) (*fake, string) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{}
	s := grpc.NewServer(grpc.ForceServerCodecV2(mux.Codec{}))
	wire.RegisterFlowsServer(s, f)
	wire.RegisterBlobsServer(s, f)
	go s.Serve(lis)
	t.Cleanup(s.Stop)
	return f, lis.Addr().String()
}

func (f *fake) Stream(stream grpc.BidiStreamingServer[wire.Calls, wire.Answers]) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	if k := md.Get("authorization"); len(k) == 1 && k[0] != "Bearer good" {
		return status.Error(codes.Unauthenticated, "this key is not known")
	}
	for {
		in, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, c := range in.Calls {
			for _, a := range f.answers(c) {
				a.Id = c.Id
				if err := stream.Send(&wire.Answers{Answers: []*wire.Answer{a}}); err != nil {
					return err
				}
			}
		}
	}
}

// asked gives the last changing call as text, without what differs each time.
func (f *fake) asked() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == nil {
		return ""
	}
	c := f.last.CloneVT()
	f.last = nil
	c.Id, c.TimeoutUs = 0, 0
	if s := c.GetStart(); s != nil {
		s.RequestId = mask(s.RequestId)
		s.FlowId = mask(s.FlowId)
	}
	if p := c.GetPublish(); p != nil {
		p.RequestId = mask(p.RequestId)
	}
	if r := c.GetRpc(); r != nil {
		r.RequestId = mask(r.RequestId)
	}
	if s := c.GetPutSchedule().GetSchedule().GetStart(); s != nil {
		s.RequestId = mask(s.RequestId)
	}
	return words(c)
}

// mask hides what the client has made by chance.
func mask(id string) string {
	if strings.HasPrefix(id, "f_") || strings.Contains(id, ".") {
		return "(made)"
	}
	return id
}

// words is a message as text; the package that does it adds spaces by chance.
func words(c *wire.Call) string {
	return strings.Join(strings.Fields(fmt.Sprint(c)), " ")
}

func one(a *wire.Answer) []*wire.Answer { return []*wire.Answer{a} }

func refuse(code, msg, hint string) []*wire.Answer {
	return one(&wire.Answer{Error: &wire.Error{Code: code, Message: msg, Hint: hint, Position: -1}})
}

func done() []*wire.Answer { return one(&wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}}) }

// flowID is the flow that a call is about.
func flowID(c *wire.Call) string {
	for _, v := range []interface{ GetFlowId() string }{
		c.GetDescribe(), c.GetWait(), c.GetStop(), c.GetGetAttributes(), c.GetSetAttributes(), c.GetWaitAttribute(), c.GetPublish(),
		c.GetListMessages(), c.GetDropMessages(), c.GetRpc(), c.GetSkipTimer(), c.GetReset_(), c.GetHistory(), c.GetDelete(), c.GetWatch(),
	} {
		if id := v.GetFlowId(); id != "" {
			return id
		}
	}
	return ""
}

func (f *fake) answers(c *wire.Call) []*wire.Answer {
	switch flowID(c) {
	case "none":
		return refuse("not_found", `flow "none" does not exist`, "Check the ID.")
	case "ended":
		if c.GetDescribe() == nil && c.GetHistory() == nil {
			return refuse("flow_closed", `the run of flow "ended" is completed`, "Start a new one.")
		}
	case "busy":
		return one(&wire.Answer{Error: &wire.Error{Code: "overloaded", Message: "too much to do", RetryAfterUs: 3600e6, Position: -1}})
	}
	switch v := c.Verb.(type) {
	case *wire.Call_Describe:
		return one(&wire.Answer{Result: &wire.Answer_Flow{Flow: order()}})
	case *wire.Call_Wait:
		return waited(v.Wait.FlowId)
	case *wire.Call_GetAttributes:
		return one(attributes(v.GetAttributes.Names))
	case *wire.Call_WaitAttribute:
		return one(attributes([]string{v.WaitAttribute.Name}))
	case *wire.Call_ListMessages:
		return one(&wire.Answer{Result: &wire.Answer_Messages{Messages: &wire.MessagesReply{Messages: []*wire.Message{
			{Id: "m1", Payload: []byte(`{"amount":12}`), AtUs: us(time.Minute)}, {Id: "m2", Payload: []byte(`"two\nlines"`), AtUs: us(time.Second)}}}}})
	case *wire.Call_Search:
		return search(v.Search)
	case *wire.Call_History:
		return one(&wire.Answer{Result: &wire.Answer_History{History: &wire.HistoryReply{Events: events()}}})
	case *wire.Call_Watch:
		return watched()
	case *wire.Call_Queues:
		return queues()
	case *wire.Call_Workers:
		return one(&wire.Answer{Result: &wire.Answer_Workers{Workers: &wire.WorkersReply{Workers: []*wire.WorkerInfo{
			{WorkerId: "shop/1", Build: "v1.2", Sdk: "go", Address: "10.0.0.7:4242", FlowTypes: []string{"order", "refund"}, Running: 3, TaskCredits: 61, ConnectedUs: us(3 * time.Hour)},
			{WorkerId: "shop/0", Build: "v1.1", FlowTypes: []string{"order"}, Running: 1, ConnectedUs: us(50 * time.Hour), Draining: true},
		}}}})
	case *wire.Call_GetSchedule:
		if v.GetSchedule.Id == "none" {
			return refuse("not_found", `schedule "none" does not exist`, "")
		}
		return one(&wire.Answer{Result: &wire.Answer_Schedule{Schedule: nightly()}})
	case *wire.Call_ListSchedules:
		return one(&wire.Answer{Result: &wire.Answer_Schedules{Schedules: &wire.SchedulesReply{Schedules: []*wire.Schedule{nightly(),
			{Id: "poll", Cron: "@every 10s", Start: &wire.StartRequest{FlowType: "poll"}, Paused: true, Started: 7, LastUs: us(time.Hour)}}}}})
	}
	f.mu.Lock()
	f.last = c
	f.mu.Unlock()
	return changed(c)
}

func changed(c *wire.Call) []*wire.Answer {
	switch v := c.Verb.(type) {
	case *wire.Call_Start:
		switch id := v.Start.FlowId; id {
		case "order-17":
			return refuse("already_exists", `flow "order-17" is there already and running`, "Choose another flow ID, or a reuse policy.")
		default:
			if v.Start.FlowType == "ordre" {
				return refuse("unknown_type", `no worker has declared the flow type "ordre"`, "Start a worker that registers it.")
			}
			return one(&wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{FlowId: mask(id), RunId: "run_2", Created: v.Start.Reuse != wire.StartFlow_ATTACH}}})
		}
	case *wire.Call_Stop:
		return one(&wire.Answer{Result: &wire.Answer_Stop{Stop: &wire.StopReply{RunId: "run_1", Status: wire.Status_RUNNING}}})
	case *wire.Call_SetAttributes:
		return one(attributes(nil))
	case *wire.Call_Publish:
		return one(&wire.Answer{Result: &wire.Answer_Publish{Publish: &wire.PublishReply{MessageIds: []string{"m3"}}}})
	case *wire.Call_DropMessages:
		return one(&wire.Answer{Result: &wire.Answer_Messages{Messages: &wire.MessagesReply{Dropped: 2}}})
	case *wire.Call_Rpc:
		if v.Rpc.Name == "refuse" {
			return one(&wire.Answer{Error: &wire.Error{Code: "rpc_failed", Message: "the amount is negative", Kind: "bad_amount", Position: -1}})
		}
		if v.Rpc.FailFast {
			return refuse("locked", "another locked RPC runs on the flow", "Try again.")
		}
		return one(&wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: []byte(`{"total":42}`)}}})
	case *wire.Call_Reset_:
		return one(&wire.Answer{Result: &wire.Answer_Reset_{Reset_: &wire.ResetReply{RunId: "run_3"}}})
	case *wire.Call_PutSchedule:
		s := nightly()
		s.Id = v.PutSchedule.Schedule.Id
		return one(&wire.Answer{Result: &wire.Answer_Schedule{Schedule: s}})
	}
	return done()
}

func order() *wire.FlowInfo {
	return &wire.FlowInfo{
		FlowId: "order-17", FlowType: "order", RunId: "run_1", Status: wire.Status_RUNNING,
		CreatedUs: us(26 * time.Hour), UpdatedUs: us(90 * time.Second), TimeoutAtUs: us(-2 * time.Hour), Priority: 5, Events: 41, StepsDone: 12,
		Steps: []*wire.StepInfo{
			{Exec: 13, Step: "WaitPay", State: "waiting", WaitsFor: `1 message of channel "payment" or a timer`, NextUs: us(-8 * time.Minute)},
			{Exec: 14, Step: "Charge", State: "running", Attempts: 2, Retries: 1, StartedUs: us(3 * time.Second), Worker: "shop/1", ConcurrencyKey: "acme"},
			{Exec: 15, Step: "Mail", State: "backoff", Attempts: 3, Retries: 3, StartedUs: us(time.Minute), NextUs: us(-4 * time.Second)},
			{Exec: 16, Step: "Later", State: "delayed", NextUs: us(-72 * time.Hour)},
			{Exec: 17, Step: "Ship", State: "queued"},
		},
		Attributes: []*wire.Attribute{
			{Name: "amount", Value: []byte("42")}, {Name: "customer", Value: []byte(`"acme\u001b[31m"`)}, {Name: "scan", Size: 3 << 20},
		},
		Channels: []*wire.ChannelInfo{{Name: "payment", Pending: 2}},
	}
}

func waited(id string) []*wire.Answer {
	f := &wire.FlowInfo{FlowId: id, FlowType: "order", RunId: "run_1", Status: wire.Status_COMPLETED, CreatedUs: us(time.Hour), ClosedUs: us(0), Output: []byte(`{"paid":true}`)}
	if id == "bad" {
		f.Status, f.Output, f.Error = wire.Status_FAILED, nil, "the card was refused"
	}
	return one(&wire.Answer{Result: &wire.Answer_Flow{Flow: f}})
}

func attributes(names []string) *wire.Answer {
	var out []*wire.Attribute
	for _, v := range []*wire.Attribute{{Name: "amount", Value: []byte("42"), Index: wire.Attribute_INT}, {Name: "customer", Value: []byte(`"acme"`)}} {
		if len(names) == 0 || names[0] == v.Name || names[0] == "*" {
			out = append(out, v)
		}
	}
	return &wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{Attributes: out}}}
}

func search(q *wire.SearchRequest) []*wire.Answer {
	if at := strings.Index(q.Query, "statuz"); at >= 0 {
		return one(&wire.Answer{Error: &wire.Error{Code: "invalid", Message: `there is no field "statuz"`, Hint: "Is it status?", Position: int32(at)}})
	}
	r := &wire.SearchReply{Count: 2}
	if !q.Count && !strings.Contains(q.Query, "nothing") {
		failed := &wire.FlowInfo{FlowId: "order-16", FlowType: "order", RunId: "run_0", Status: wire.Status_FAILED, CreatedUs: us(3 * time.Hour), ClosedUs: us(2 * time.Hour), StepsDone: 3, Error: "the card was refused\nby the bank"}
		ok := &wire.FlowInfo{FlowId: "größe/1", FlowType: "report", RunId: "run_9", Status: wire.Status_COMPLETED, CreatedUs: us(5 * time.Second), ClosedUs: us(4500 * time.Millisecond), StepsDone: 1, Output: []byte(`{"rows": 7}`)}
		r.Flows = []*wire.FlowInfo{order(), failed, ok}
	}
	return one(&wire.Answer{Result: &wire.Answer_Search{Search: r}})
}

func events() []*wire.Event {
	at := us(24 * time.Hour)
	e := func(after time.Duration, typ, step string, exec uint64) *wire.Event {
		at += after.Microseconds()
		return &wire.Event{Lsn: uint64(at-us(48*time.Hour)) / 1000, AtUs: at, Type: typ, Step: step, Exec: exec}
	}
	list := []*wire.Event{
		e(0, "flow.started", "", 0), e(time.Millisecond, "step.started", "Charge", 1), e(1500*time.Millisecond, "step.retrying", "Charge", 1),
		e(time.Second, "step.restarted", "Charge", 1), e(20*time.Millisecond, "step.completed", "Charge", 1),
		e(0, "step.preparing", "WaitPay", 2), e(2*time.Millisecond, "step.waiting", "WaitPay", 2),
		e(time.Hour, "timer.fired", "WaitPay", 2), e(time.Hour, "channel.published", "", 0), e(time.Hour, "step.started", "WaitPay", 2),
		e(time.Minute, "attributes.set", "", 0), e(time.Minute, "rpc.executed", "", 0), e(time.Minute, "cancel.requested", "", 0),
		e(time.Second, "step.cancelled", "Mail", 3), e(time.Second, "step.failed", "WaitPay", 2), e(time.Second, "channel.dropped", "", 0),
		e(20*time.Hour, "flow.reset", "", 2), e(time.Second, "step.novelty", "New", 9), e(time.Second, "flow.completed", "", 0),
	}
	list[0].Scope, list[0].Attributes = "run_1", []*wire.Attribute{{Name: "amount", Value: []byte("42")}, {Name: "scan", Size: 5 << 20}}
	list[1].Spec, list[1].Attempt = &wire.StepSpec{Name: "Charge", Input: []byte(`{"item": "tea"}`)}, 1
	list[2].Data, list[2].Attempt = []byte("no answer\nfrom the bank"), 1
	list[3].Data, list[3].Attempt = []byte("the pause is over"), 2
	list[4].Next, list[4].Attributes = []string{"WaitPay", "Mail"}, []*wire.Attribute{{Name: "paid", Value: []byte("true")}, {Name: "note"}}
	list[7].Data = []byte("reminder")
	list[8].Data = []byte(`{"amount":12}`)
	list[9].Items = [][]byte{[]byte(`{"amount":12}`)}
	list[10].Attributes = []*wire.Attribute{{Name: "note", Value: []byte(`"x"`)}}
	list[11].Data = []byte("total")
	list[12].Data = []byte("the customer left")
	list[14].Data, list[14].Attempt = []byte("boom"), 3
	list[15].Data = []byte("dropped by a client")
	list[16].Data = []byte("wrong price")
	list[18].Items = [][]byte{[]byte(`"paid"`)}
	return list
}

func watched() []*wire.Answer {
	all := events()
	h := func(r *wire.HistoryReply) *wire.Answer {
		return &wire.Answer{More: true, Result: &wire.Answer_History{History: r}}
	}
	text := func(exec, offset uint64, s string) *wire.Answer {
		return h(&wire.HistoryReply{Outputs: []*wire.OutputPart{{Exec: exec, Attempt: 1, Offset: offset, Text: s}}})
	}
	end := h(&wire.HistoryReply{Events: all[18:]})
	end.More = false
	return []*wire.Answer{
		h(&wire.HistoryReply{Events: all[:2]}), text(1, 0, "asking the "), text(1, 11, "bank\nline two"), text(5, 0, "meanwhile\n"),
		h(&wire.HistoryReply{Events: all[4:5]}), end,
	}
}

func queues() []*wire.Answer {
	return one(&wire.Answer{Result: &wire.Answer_Queues{Queues: &wire.QueuesReply{Queues: []*wire.Queue{
		{FlowType: "order", Queued: 12, Running: 3, Workers: 1, TaskCredits: 61, OldestUs: us(4 * time.Second),
			Priorities: []*wire.PriorityCount{{Priority: 9, Queued: 2}, {Queued: 10}}, Keys: []*wire.KeyCount{{Key: "acme", Queued: 4, Running: 2, Limit: 2}}},
		{FlowType: "report", Queued: 1, OldestUs: us(time.Hour)},
	}}}})
}

func nightly() *wire.Schedule {
	return &wire.Schedule{
		Id: "nightly", Cron: "0 3 * * *", TimeZone: "Europe/Berlin", JitterUs: 60e6, Overlap: wire.Schedule_BUFFER_ONE, CatchUpUs: 3600e6,
		Start:  &wire.StartRequest{FlowId: "report-", FlowType: "report", Step: "Build", Input: []byte(`{"all": true}`)},
		NextUs: us(-11*time.Hour - 30*time.Minute), LastUs: us(12*time.Hour + 30*time.Minute), LastFlowId: "report-20260301T020000Z", Started: 41, Skipped: 1,
	}
}
