package client

import (
	"fmt"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/perdure-dev/perdure/internal/wire"
)

// TestTrace: the server gets the span that the caller is in.
func TestTrace(t *testing.T) {
	got := make(chan string, 1)
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		got <- string(c.Trace)
		answer(rpcAnswer("1"))
	})
	c := f.client(Options{})
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1: 0xab, 15: 1}, SpanID: trace.SpanID{7: 2}, TraceFlags: 1})
	if _, err := c.RPC(trace.ContextWithSpanContext(background(t), sc), "f", "r", nil, RPCOptions{}); err != nil {
		t.Fatal(err)
	}
	if want, g := "00-00ab0000000000000000000000000001-0000000000000002-01", <-got; g != want {
		t.Errorf("%s, want %s", g, want)
	}
}

// TestSpans: with a provider each call has a span, and the server's are below it.
func TestSpans(t *testing.T) {
	var parents []string
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		parents = append(parents, string(c.Trace))
		if c.GetDelete() != nil {
			answer(refuseWith("not_found", 0))
			return
		}
		answer(rpcAnswer("1"))
	})
	rec := tracetest.NewSpanRecorder()
	c := f.client(Options{Tracing: sdk.NewTracerProvider(sdk.WithSpanProcessor(rec))})
	if _, err := c.RPC(background(t), "f-1", "r", nil, RPCOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(background(t), "f-2", ""); err == nil {
		t.Fatal("no error")
	}
	spans := rec.Ended()
	if len(spans) != 2 {
		t.Fatalf("%d spans", len(spans))
	}
	for i, want := range []string{"perdure.rpc f-1 Unset", "perdure.delete f-2 Error"} {
		s := spans[i]
		if got := fmt.Sprint(s.Name(), " ", s.Attributes()[1].Value.AsString(), " ", s.Status().Code); got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if sc := s.SpanContext(); parents[i] != fmt.Sprintf("00-%s-%s-01", sc.TraceID(), sc.SpanID()) {
			t.Errorf("the server got %s", parents[i])
		}
	}
}
