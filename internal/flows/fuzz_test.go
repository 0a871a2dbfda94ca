package flows

import (
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

// FuzzDo: whatever a client sends is answered, and nothing panics.
func FuzzDo(f *testing.F) {
	for _, c := range []*wire.Call{
		start(&wire.StartRequest{FlowId: "b", FlowType: "order", Step: "pay", Spec: paySpec(), Attributes: []*wire.Attribute{attr("total", "1")}, Publish: []*wire.PublishRequest{{Channel: "in", Payloads: [][]byte{[]byte("1")}}}}),
		get("a", "line.*"), setAttr("a", attr("tags", `["x"]`)), waitAttr("a", "total", "1"), wait("a", ""), publish("a", "in", "k", "1", "2"),
		list("a", "in"), drop("a", "in", "x"), rpc("a", "add", "1"), rpc("a", "total", ""), stop("a", "", 1), reset("a", "pay", 0), reset("a", "", 1),
		history(&wire.HistoryRequest{FlowId: "a", Limit: 1, NewestFirst: true}), history(&wire.HistoryRequest{FlowId: "a", Live: true, RunId: "x"}),
		{Verb: &wire.Call_Watch{Watch: &wire.WatchRequest{FlowId: "a"}}}, {Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: "a"}}},
		{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}}, {Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: "a"}}},
		{Verb: &wire.Call_Queues{}}, {Verb: &wire.Call_PutSchedule{}}, {},
	} {
		b, err := c.MarshalVT()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	w := newWorld(f)
	w.rpc("add", adder)
	w.rpc("total", func(*wire.RpcTask) *wire.RpcResult { return &wire.RpcResult{} })
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &wire.Call{}
		if c.UnmarshalVT(data) != nil {
			return
		}
		c.TimeoutUs = max(c.TimeoutUs, -1)
		if c.TimeoutUs == 0 || c.TimeoutUs > 1000 {
			c.TimeoutUs = 1000 // a stream without an end ends so
		}
		w.t = t
		w.svc.Do(w.ctx, tenant, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Reuse: wire.StartFlow_IF_CLOSED}), func(*wire.Answer) {})
		ch := make(chan *wire.Answer, 1000)
		w.svc.Do(t.Context(), tenant, c, func(a *wire.Answer) { ch <- a })
		for {
			select {
			case a := <-ch:
				if _, err := a.MarshalVT(); err != nil {
					t.Fatal(err)
				}
				if !a.More {
					return
				}
			case <-w.steps:
			default:
				w.clock.advance(1e6)
			}
		}
	})
}
