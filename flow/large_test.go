package flow_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// large is a text that is too large for a record of the test's host.
func large(n int) string { return strings.Repeat("x", 2000+n) }

// wantBlob checks what a blob of the host holds.
func (b *bed) wantBlob(name, want, text string) {
	b.t.Helper()
	if name != want || string(b.h.blobs[name]) != `"`+text+`"` {
		b.t.Errorf("blob %q has %d bytes, want %q", name, len(b.h.blobs[name]), want)
	}
}

func TestLargeMessagesAreWrittenAsBlobs(t *testing.T) {
	b := newBed(t)
	child := flow.External("child")
	letters := flow.NewChannel[string]("letters")
	note := flow.NewAttribute[string]("note")
	// A condition of the program's own: it is used for each attempt.
	once := flow.Child(child, "c2", flow.To(flow.Ref[string]("work"), large(5)), flow.With(note, large(6)), flow.WithMessage(letters, large(7)))
	b.wait = func(*flow.Context, string) (flow.Wait, error) { return flow.AllOf(once, flow.FlowEnd("c3")), nil }
	for range 2 {
		clear(b.h.blobs)
		r := b.ok(b.script(func(ctx *flow.Context) (flow.Decision, error) {
			inbox.At(1).Publish(ctx, "small")
			inbox.At(1).Publish(ctx, large(1))
			letters.PublishTo(ctx, "f2", large(2))
			flow.StartFlow(ctx, child, "c1", flow.To(flow.Ref[string]("work"), large(3)), flow.WithMessage(letters, large(4)))
			return flow.GoTo(picky{}, "in"), nil
		}))
		if p := r.Publish[0]; string(p.Payload) != `"small"` || p.Blob != "" {
			t.Errorf("a small message is %v", p)
		}
		if p := r.Publish[1]; len(p.Payload) > 0 {
			t.Errorf("a large message is %v", p)
		}
		b.wantBlob(r.Publish[1].Blob, "f1#0", large(1))
		on := r.Next[0].Wait.Conditions[0].GetFlow()
		b.wantBlob(on.Start.Attributes[0].Blob, "c2#1 from f1", large(6))
		b.wantBlob(on.Start.Publish[0].Blob, "c2#2 from f1", large(7))
		b.wantBlob(on.Start.Steps[0].InputBlob, "c2#3 from f1", large(5))
		b.wantBlob(r.Sends[0].GetPublish().Blob, "f2#4 from f1", large(2))
		b.wantBlob(r.Sends[1].GetStart().Publish[0].Blob, "c1#5 from f1", large(4))
		b.wantBlob(r.Sends[1].GetStart().Steps[0].InputBlob, "c1#6 from f1", large(3))
	}
	// The same from a WaitFor of its own.
	task := b.task("picky", "in")
	task.Phase = wire.Task_WAIT_FOR
	clear(b.h.blobs)
	b.wantBlob(b.ok(b.do(task)).Wait.Conditions[0].GetFlow().Start.Steps[0].InputBlob, "c2#2 from f1", large(5))
	b.h.blobErr = errors.New("no room")
	b.failed(b.do(task), `attribute "note" of 2008 bytes cannot be stored: no room`)
}

func TestLargeMessagesAreReadWhenAskedFor(t *testing.T) {
	b := newBed(t)
	b.h.blobs["m"] = []byte(`"from afar"`)
	task := b.task("script", "in")
	task.Messages = []*wire.Message{{Id: "m1", Payload: []byte(`"near"`)}, {Id: "m2", Blob: "m", Size: 11}}
	task.Conditions, task.ConditionNames = []*wire.ConditionState{{Done: true, Messages: 2}}, []string{"inbox/1"}
	b.run = func(*flow.Context, string) (flow.Decision, error) { return flow.Complete(nil), nil }
	b.ok(b.do(task))
	if b.h.readings != 0 {
		t.Errorf("%d readings that nobody asked for", b.h.readings)
	}
	b.run = func(ctx *flow.Context, _ string) (flow.Decision, error) {
		if _, err := inbox.At(1).Messages(ctx); err != nil {
			return flow.Decision{}, err
		}
		all, err := inbox.At(1).Messages(ctx)
		return flow.Complete(strings.Join(all, ", ")), err
	}
	if r := b.ok(b.do(task)); string(r.Close.Output) != `"near, from afar"` || b.h.readings != 1 {
		t.Errorf("got %s after %d readings", r.Close.Output, b.h.readings)
	}
	delete(b.h.blobs, "m")
	b.failed(b.do(task), "a message of 11 bytes cannot be read: no such blob")
}

func TestRPCsWithLargeValues(t *testing.T) {
	b := newBed(t)
	b.h.blobs["in"] = []byte(`{"Amount":7}`)
	task := &wire.RpcTask{Call: 1, FlowId: "f1", FlowType: "order", Name: "deposit", Locked: true, InputBlob: "in"}
	r := b.rt.RPC(context.Background(), task, b.h).Run()
	if r.Error != "" || string(r.Update.Output) != "7" || r.OutputBlob != "" {
		t.Errorf("got %v", r)
	}
	task.InputBlob = "gone"
	if r := b.rt.RPC(context.Background(), task, b.h).Run(); !strings.Contains(r.Error, `the input of RPC "deposit" cannot be read: no such blob`) {
		t.Errorf("got %v", r)
	}
	clear(b.h.blobs)
	text := large(1)
	task = &wire.RpcTask{Call: 2, FlowId: "f1", FlowType: "order", Name: "get-status", Attributes: []*wire.Attribute{{Name: "status", Value: encode(t, text)}}}
	r = b.rt.RPC(context.Background(), task, b.h).Run()
	if r.Error != "" || len(r.Update.GetOutput()) > 0 {
		t.Errorf("got %v", r)
	}
	b.wantBlob(r.OutputBlob, "f1#0", text)
	b.h.blobErr = errors.New("no room")
	if r := b.rt.RPC(context.Background(), task, b.h).Run(); !strings.Contains(r.Error, "no room") || r.OutputBlob != "" {
		t.Errorf("got %v", r)
	}
}
