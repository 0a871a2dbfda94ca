package client

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

func (f *fake) blob(flowID string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return string(f.blobs[flowID+"/b1"])
}

// TestLargeMessages: they go as blobs of their flow, beside small ones.
func TestLargeMessages(t *testing.T) {
	big := strings.Repeat("x", 700_000)
	var got *wire.PublishRequest
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		switch {
		case c.GetPublish() != nil:
			got = c.GetPublish()
			answer(&wire.Answer{Result: &wire.Answer_Publish{Publish: &wire.PublishReply{}}})
		case c.GetStart() != nil:
			got = c.GetStart().Publish[0]
			answer(&wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{}}})
		default:
			answer(&wire.Answer{Result: &wire.Answer_Messages{Messages: &wire.MessagesReply{Messages: []*wire.Message{{Id: "m", Blob: "b1", Size: 9}}}}})
		}
	})
	c := f.client(Options{})
	ctx := background(t)
	letters := flow.NewChannel[string]("letters")
	typ := flow.Define("t", letters, flow.Step(flow.StepFunc("s", func(*flow.Context, flow.None) (flow.Decision, error) { return flow.DeadEnd(), nil })))
	for name, do := range map[string]func() error{
		"publish": func() error { return Publish(ctx, c, "f", letters, "small", big) },
		"start": func() error {
			_, err := c.Start(ctx, StartRequest{ID: "f", Type: "t", Step: "s", Publish: []Publishing{{"letters", []any{"small", big}}}})
			return err
		},
	} {
		if err := do(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got.Payloads) != 2 || string(got.Payloads[0]) != `"small"` || len(got.Payloads[1]) > 0 || len(got.Blobs) != 2 || got.Blobs[0] != "" || got.Blobs[1] != "b1" {
			t.Errorf("%s: sent %.200v", name, got)
		}
		if f.blob("f") != `"`+big+`"` {
			t.Errorf("%s: the blob has %d bytes", name, len(f.blob("f")))
		}
	}
	if _, err := Start(ctx, c, typ, "g", flow.NoStep, flow.WithMessage(letters, big)); err != nil || got.Blobs[0] != "b1" || f.blob("g") == "" {
		t.Errorf("sent %.200v, %v", got, err)
	}
	if err := Publish(ctx, c, "f", letters, "small"); err != nil || got.Blobs != nil {
		t.Errorf("sent %v, %v", got, err)
	}
	ms, err := c.Messages(ctx, "f", "letters")
	if err != nil || len(ms) != 1 || ms[0].Payload != nil || ms[0].Size != 9 {
		t.Errorf("got %v, %v", ms, err)
	}
	huge := json.RawMessage(`"` + strings.Repeat("x", maxValue) + `"`)
	if _, err := c.Publish(ctx, "f", "letters", PublishOptions{}, huge); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), "67108864") {
		t.Errorf("a huge message: %v", err)
	}
}

// TestRPCWithLargeValues: they go as blobs that are dropped behind the call.
func TestRPCWithLargeValues(t *testing.T) {
	big := strings.Repeat("x", 700_000)
	f := newFake(t, nil)
	refuse := false
	f.onCall = func(c *wire.Call, answer func(*wire.Answer)) {
		r := c.GetRpc()
		if len(r.Input) > 0 || r.InputBlob != "b1" || f.blob("f") != `"`+big+`"` {
			t.Errorf("called with %d bytes, blob %q", len(r.Input), r.InputBlob)
		}
		if refuse {
			answer(&wire.Answer{Error: &wire.Error{Code: "rpc_failed", Message: "no"}})
			return
		}
		f.mu.Lock()
		f.blobs["f/out"] = []byte(`"` + big + `y"`)
		f.mu.Unlock()
		answer(&wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{OutputBlob: "out"}}})
	}
	c := f.client(Options{})
	r := flow.NewRPC("echo", func(_ *flow.ReadContext, in string) (string, error) { return in, nil })
	left := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.blobs)
	}
	if out, err := Call(background(t), c, "f", r, big); err != nil || out != big+"y" || left() != 0 {
		t.Errorf("%d bytes, %v, %d blobs are left", len(out), err, left())
	}
	refuse = true
	if _, err := Call(background(t), c, "f", r, big); !errors.Is(err, ErrHandler) || left() != 0 {
		t.Errorf("got %v, %d blobs are left", err, left())
	}
	ctx, cancel := context.WithCancel(background(t))
	f.onCall = func(_ *wire.Call, answer func(*wire.Answer)) { cancel() }
	if _, err := Call(ctx, c, "f", r, big); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
