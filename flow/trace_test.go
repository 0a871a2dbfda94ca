package flow_test

import (
	"errors"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestTraces(t *testing.T) {
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	rec := tracetest.NewSpanRecorder()
	s := newServer(t)
	seen := make(chan trace.SpanContext, 10)
	f := flow.Define("f", flow.Step(flow.StepFunc("look", func(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
		seen <- trace.SpanContextFromContext(ctx)
		return flow.Decision{}, errors.New("no luck")
	})))
	start(t, s, flow.WorkerOptions{Concurrency: 1, RPCConcurrency: 1, Tracing: sdk.NewTracerProvider(sdk.WithSpanProcessor(rec))}, f)
	l := s.accept()
	for i, p := range []string{parent, "", "nonsense", parent[:54] + "x", "ff" + parent[2:]} {
		l.credits(1, 1)
		l.send(&wire.ServerFrame{Tasks: []*wire.Task{{FlowId: "f1", FlowType: "f", Exec: uint64(i), Attempt: &wire.AttemptID{}, Step: "look", Trace: []byte(p)}}})
		l.until("the result", func() bool { return len(l.results) == i+1 })
		sc := <-seen
		if traced := sc.TraceID().String() == parent[3:35]; traced != (i == 0) {
			t.Errorf("%q: the handler saw %v", p, sc)
		}
	}
	spans := rec.Ended()
	if len(spans) != 1 || spans[0].Name() != "step look" || spans[0].Parent().SpanID().String() != parent[36:52] || spans[0].Status().Code != codes.Error {
		t.Errorf("spans are %v", spans)
	}
}
