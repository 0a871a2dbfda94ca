package flows

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func publishBlob(id, channel, key string, blobs ...string) *wire.Call {
	return &wire.Call{Verb: &wire.Call_Publish{Publish: &wire.PublishRequest{
		FlowId: id, Channel: channel, RequestId: key, Payloads: make([][]byte, len(blobs)), Blobs: blobs}}}
}

// waitIn is a step that waits for n messages of the channel in.
func waitIn(n uint32) *wire.StepSpec {
	return &wire.StepSpec{Name: "pay", Wait: &wire.Wait{Conditions: []*wire.Condition{
		{On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: "in", AtLeast: n}}}}}}
}

func (w *world) sweep(want int) {
	w.t.Helper()
	if n, err := w.svc.Sweep(w.ctx); n != want || err != nil {
		w.t.Errorf("swept %d, %v; want %d", n, err, want)
	}
}

func (w *world) has(id, ref string, want bool) {
	w.t.Helper()
	if _, err := w.getBlob(id, ref); (err == nil) != want || err != nil && code(err) != BlobMissing {
		w.t.Errorf("blob %s of %q: %v", ref, id, err)
	}
}

// putFrom stores a blob of a flow that another one is to bring there.
func (w *world) putFrom(id, from string, size int) string {
	w.t.Helper()
	ref, err := w.svc.PutBlob(w.ctx, tenant, id, from, pieces(bytes.Repeat([]byte("1"), size), chunkSize))
	if err != nil {
		w.t.Fatal(err)
	}
	return ref.Blob
}

func TestLargeMessageIsRefused(t *testing.T) {
	w := newWorld(t)
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: waitIn(2)}))
	own, other := w.put("a", []byte("1")).Blob, w.put("b", []byte("1")).Blob
	both := publishBlob("a", "in", "", own)
	both.GetPublish().Payloads[0] = []byte("1")
	w.refused(Invalid, both)
	fewer := publishBlob("a", "in", "", own)
	fewer.GetPublish().Payloads = append(fewer.GetPublish().Payloads, []byte("1"))
	w.refused(Invalid, fewer)
	w.refused(Invalid, publishBlob("a", "in", "", "../x"))
	w.refused(BlobMissing, publishBlob("a", "in", "", other))
	w.refused(UnknownChannel, publishBlob("a", "out", "", own))
	w.refused(core.NotFound, publishBlob("none", "in", "", own))
	e := w.refused(TooLarge, publish("a", "in", "", `"`+strings.Repeat("x", 70_000)+`"`))
	if !strings.Contains(e.Message, "in line") {
		t.Errorf("got %v", e)
	}
	w.clock.advance(blobFresh + time.Second)
	w.refused(BlobMissing, publishBlob("a", "in", "", own))
}

// TestLargeMessageIsKept: while it waits, while a step has it, and not longer.
func TestLargeMessageIsKept(t *testing.T) {
	w := newWorld(t)
	first := w.put("a", make([]byte, partSize+5)).Blob // two objects
	second := w.put("a", make([]byte, 7)).Blob
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", Spec: waitIn(2),
		Publish: []*wire.PublishRequest{{Channel: "in", Payloads: [][]byte{nil}, Blobs: []string{first}}}}))
	w.clock.advance(blobSafety + time.Second)
	w.sweep(1) // second, which came too early
	w.has("a", first, true)
	w.has("a", second, false)
	waiting := w.must(list("a", "in")).GetMessages().Messages
	if len(waiting) != 1 || waiting[0].Blob != first || waiting[0].Size != partSize+5 {
		t.Errorf("waiting are %v", waiting)
	}
	second = w.put("a", make([]byte, 7)).Blob
	if r := w.must(publishBlob("a", "in", "k", second)).GetPublish(); len(r.MessageIds) != 1 || r.Duplicate {
		t.Errorf("got %v", r)
	}
	again := w.put("a", make([]byte, 7)).Blob // by a program that was restarted
	if r := w.must(publishBlob("a", "in", "k", again)).GetPublish(); !r.Duplicate {
		t.Errorf("got %v", r)
	}
	k := w.step("pay")
	if len(k.Matched) != 2 || k.Matched[0].Blob != first || k.Matched[1].Blob != second || k.Matched[1].Size != 7 {
		t.Errorf("handed out with %v", k.Matched)
	}
	w.clock.advance(blobSafety + time.Second)
	w.sweep(1) // again
	w.has("a", first, true)
	w.has("a", second, true)

	// A reset brings them back.
	w.must(reset("a", "pay", 0))
	if k = w.step("pay"); len(k.Matched) != 2 || k.Matched[0].Blob != first || k.Matched[0].Size != partSize+5 {
		t.Errorf("handed out with %v", k.Matched)
	}
	w.result(k, complete("1"))
	w.sweep(4) // three objects and the mark
	if e := w.refused(BlobMissing, reset("a", "pay", 0)); !strings.Contains(e.Message, first) {
		t.Errorf("got %v", e)
	}
}

// TestCarriedBlobIsKept: what a flow brings to another one is kept from when it
// is stored until the other one needs it no more.
func TestCarriedBlobIsKept(t *testing.T) {
	w := newWorld(t)
	w.must(start(&wire.StartRequest{FlowId: "b", FlowType: "order", Step: "pay", Spec: waitIn(1000)}))
	full := make([]string, 999)
	for i := range full {
		full[i] = "1"
	}
	w.must(publish("b", "in", "", full...))
	w.must(publish("b", "item.1", "", append(full, "1")...))
	w.order("a")
	k := w.step("pay")
	blob := w.putFrom("b", "a", partSize+5)
	r := &wire.StepResult{Next: []*wire.StepSpec{{Name: "ship"}},
		Sends: []*wire.Send{{FlowId: "b", Command: &wire.Send_Publish{Publish: &wire.Publish{Channel: "item.1", Blob: blob}}}}}
	if err := w.svc.CheckResult(tenant, "order", r); err != nil {
		t.Fatal(err)
	}
	w.result(k, r)
	k = w.step("ship")
	w.clock.advance(blobSafety + time.Second)
	w.sweep(0) // the channel is full: it is in the outbox still
	if err := w.svc.DropBlob(w.ctx, tenant, &wire.BlobRef{FlowId: "b", Blob: blob}); code(err) != Conflict {
		t.Errorf("dropped on its way: %v", err)
	}
	w.must(&wire.Call{Verb: &wire.Call_DropMessages{DropMessages: &wire.DropMessagesRequest{FlowId: "b", Channel: "item.1"}}})
	for { // the courier tries again in real time
		ms := w.must(list("b", "item.1")).GetMessages().Messages
		if len(ms) == 1 && ms[0].Blob == blob && ms[0].Size == partSize+5 {
			break
		}
	}
	w.result(k, complete("1"))
	w.must(&wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}})
	w.sweep(0)
	w.has("b", blob, true)
	w.must(&wire.Call{Verb: &wire.Call_DropMessages{DropMessages: &wire.DropMessagesRequest{FlowId: "b", Channel: "item.1"}}})
	w.sweep(4) // two objects, who carried them, and the mark
	w.has("b", blob, false)
}

// TestSubFlowWithLargeValues: the parent's wait keeps what its child gets.
func TestSubFlowWithLargeValues(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	k := w.step("pay")
	in, doc, msg := w.putFrom("b", "a", 3), w.putFrom("b", "a", 4), w.putFrom("b", "a", 5)
	child := &wire.OnFlow{FlowId: "b", Start: &wire.StartFlow{Type: "order", Steps: []*wire.StepSpec{{Name: "pay", InputBlob: in}},
		Attributes: []*wire.Attribute{{Name: "doc", Blob: doc}}, Publish: []*wire.Publish{{Channel: "in", Blob: msg}}}}
	spec := &wire.StepSpec{Name: "approve", Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: child}}}}}
	r := &wire.StepResult{Next: []*wire.StepSpec{spec}}
	if err := w.svc.CheckResult(tenant, "order", r); err != nil {
		t.Fatal(err)
	}
	w.result(k, r)
	got := w.step("pay")
	if got.Spec.InputBlob != in || got.Attributes[0].Size != 4 {
		t.Errorf("handed out %+v", got.Task)
	}
	w.clock.advance(blobSafety + time.Second)
	w.sweep(0)
	for _, id := range []string{in, doc, msg} {
		w.has("b", id, true)
	}

	// A start within a start has nobody who keeps its values.
	deep := &wire.StepResult{Sends: []*wire.Send{{FlowId: "c", Command: &wire.Send_Start{Start: &wire.StartFlow{
		Type: "order", Steps: []*wire.StepSpec{{Name: "approve", Wait: &wire.Wait{Conditions: []*wire.Condition{{On: &wire.Condition_Flow{Flow: &wire.OnFlow{
			FlowId: "d", Start: &wire.StartFlow{Type: "order", Steps: []*wire.StepSpec{{Name: "pay", InputBlob: in}}}}}}}}}}}}}}}
	if err := w.svc.CheckResult(tenant, "order", deep); code(err) != Invalid || !strings.Contains(err.Error(), "a step of its own") {
		t.Errorf("got %v", err)
	}
}

func TestDropBlob(t *testing.T) {
	w := newWorld(t)
	doc, tmp := w.put("a", []byte("1")), w.put("a", make([]byte, partSize+1))
	w.must(start(&wire.StartRequest{FlowId: "a", Attributes: []*wire.Attribute{{Name: "doc", Blob: doc.Blob}}}))
	drop := func(want core.Code, tenant string, ref *wire.BlobRef) {
		t.Helper()
		if err := w.svc.DropBlob(w.ctx, tenant, ref); code(err) != want {
			t.Errorf("%v: got %v, want %s", ref, err, want)
		}
	}
	drop(Conflict, tenant, doc)
	drop("", "u", tmp) // another tenant's flow a has none
	drop("", tenant, &wire.BlobRef{FlowId: "b", Blob: tmp.Blob})
	w.has("a", tmp.Blob, true)
	drop("", tenant, tmp)
	drop("", tenant, tmp)
	w.has("a", tmp.Blob, false)
	w.has("a", doc.Blob, true)
	if n := w.objects(); n != 2 {
		t.Errorf("%d objects are left", n)
	}
	drop(Invalid, tenant, &wire.BlobRef{FlowId: "a", Blob: "x"})
	drop(Invalid, tenant, &wire.BlobRef{Blob: tmp.Blob})
	w.svc.cfg.Blobs = nil
	drop(NotServed, tenant, doc)
}

func TestRPCWithLargeValues(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	in, out := w.put("a", []byte("1")).Blob, w.put("a", []byte("2")).Blob
	result := func(task *wire.RpcTask) *wire.RpcResult {
		if task.InputBlob != in || len(task.Input) > 0 {
			t.Errorf("called with %v", task)
		}
		return &wire.RpcResult{Update: &wire.Update{}, OutputBlob: out}
	}
	call := func(name, key string) *wire.Call {
		return &wire.Call{Verb: &wire.Call_Rpc{Rpc: &wire.RpcRequest{FlowId: "a", Name: name, InputBlob: in, RequestId: key}}}
	}
	w.rpc("total", result)
	w.rpc("add", result)
	for _, c := range []*wire.Call{call("total", ""), call("add", ""), call("add", "k")} {
		if r := w.must(c).GetRpc(); r.OutputBlob != out || len(r.Output) > 0 || r.Duplicate {
			t.Errorf("%v: got %v", c.GetRpc(), r)
		}
	}
	// A large output is not kept for the next time.
	if r := w.must(call("add", "k")).GetRpc(); !r.Duplicate || r.OutputBlob != "" {
		t.Errorf("got %v", r)
	}
	both := call("total", "")
	both.GetRpc().Input = []byte("1")
	w.refused(Invalid, both)
	bad := call("total", "")
	bad.GetRpc().InputBlob = "x"
	w.refused(Invalid, bad)
	w.rpc("total", func(*wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{Output: []byte("1")}, OutputBlob: out}
	})
	w.refused(RPCFailed, call("total", ""))
	w.rpc("total", func(*wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{}, OutputBlob: "../x"}
	})
	w.refused(RPCFailed, call("total", ""))
	in = w.put("b", []byte("1")).Blob
	w.refused(BlobMissing, call("total", ""))
}
