package tracing

import (
	"context"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func TestSpansOfAFlow(t *testing.T) {
	rec := tracetest.NewSpanRecorder()
	tr := New(rec, "test", 0)
	at := time.Unix(100, 0)
	if got := tr.Flow(nil, "o1", "order", at); got != nil {
		t.Errorf("a flow out of the share is traced: %s", got)
	}
	caller := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	flow := tr.Flow([]byte(caller), "o1", "order", at)
	child, end := tr.Begin(flow, "step", "o1", "order", "charge", 2, at)
	if end == nil || string(child) == string(flow) {
		t.Fatalf("no span for a traced step: %s", child)
	}
	end("failed", at.Add(time.Second))
	if child, end := tr.Begin(nil, "step", "o1", "order", "charge", 1, at); child != nil || end != nil {
		t.Error("a flow that is not traced has a span")
	}
	for _, p := range []string{"nonsense", caller[:53] + "00"} {
		if child, end := tr.Begin([]byte(p), "step", "o1", "order", "charge", 1, at); string(child) != p || end != nil {
			t.Errorf("%q has a span, its child is %q", p, child)
		}
	}
	if err := tr.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	spans := rec.Ended()
	if len(spans) != 2 {
		t.Fatalf("%d spans, want 2", len(spans))
	}
	start, step := spans[0], spans[1]
	if start.SpanContext().TraceID().String() != caller[3:35] || start.Parent().SpanID().String() != caller[36:52] {
		t.Errorf("the start is not below the caller: %v", start.Parent())
	}
	if step.Parent().SpanID() != start.SpanContext().SpanID() || step.Name() != "step charge" || step.EndTime().Sub(step.StartTime()) != time.Second {
		t.Errorf("step span %v below %v", step.Name(), step.Parent())
	}
}

func TestNilTracer(t *testing.T) {
	var tr *Tracer
	if got := tr.Flow([]byte("x"), "f", "t", time.Time{}); string(got) != "x" {
		t.Errorf("got %q", got)
	}
	if _, end := tr.Begin([]byte("x"), "step", "f", "t", "s", 1, time.Time{}); end != nil {
		t.Error("a nil tracer makes spans")
	}
	if err := tr.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	f.Add([]byte("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	f.Fuzz(func(t *testing.T, p []byte) {
		c, ok := decode(p)
		if !ok {
			return
		}
		if again, ok := decode(encode(c)); c.IsSampled() && (!ok || again.TraceID() != c.TraceID() || again.SpanID() != c.SpanID()) {
			t.Errorf("%q is not the same again", p)
		}
	})
}
