// Package tracing makes OpenTelemetry spans of flows: one for a flow's start,
// one for each attempt of a step and each call of an RPC, below whatever the
// caller's own trace says. A flow that is not sampled costs nothing.
package tracing

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Bounds of what waits for the collector; what is over them is dropped, since
// spans must never hold up work.
const (
	maxQueue = 8192
	maxBatch = 512
)

// Tracer makes spans. A nil one makes none. Safe for concurrent use.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// Open sends spans to the OTLP collector at endpoint (host:port, without TLS on
// loopback). ratio is the share of flows that are traced when their starter did
// not say. It does not wait for the collector.
func Open(ctx context.Context, endpoint, version string, ratio float64) (*Tracer, error) {
	exp, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(endpoint), otlptracegrpc.WithInsecure())
	if err != nil {
		return nil, fmt.Errorf("trace collector %s: %w", endpoint, err)
	}
	return New(sdk.NewBatchSpanProcessor(exp, sdk.WithMaxQueueSize(maxQueue), sdk.WithMaxExportBatchSize(maxBatch)), version, ratio), nil
}

// New makes a tracer that gives its spans to p.
func New(p sdk.SpanProcessor, version string, ratio float64) *Tracer {
	res := resource.NewSchemaless(attribute.String("service.name", "perdure"), attribute.String("service.version", version))
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(p), sdk.WithResource(res), sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(ratio))))
	return &Tracer{provider: provider, tracer: provider.Tracer("github.com/perdure-dev/perdure")}
}

// Close sends what waits.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// Flow makes the span of a flow's start and gives the trace parent that the
// flow's own spans have; nil when it is not sampled. parent is the caller's W3C
// trace parent, or empty.
func (t *Tracer) Flow(parent []byte, flowID, flowType string, at time.Time) []byte {
	if t == nil {
		return parent
	}
	_, span := t.tracer.Start(remote(parent), "flow.start "+flowType, trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("perdure.flow.id", flowID), attribute.String("perdure.flow.type", flowType)))
	defer span.End(trace.WithTimestamp(at))
	return encode(span.SpanContext())
}

// Begin makes the span of an attempt or a call, if its flow is traced: child is
// the trace parent for the handler, end is to be called once. For others, those
// whose parent cannot be read or is not sampled among them, child is parent and
// end is nil.
func (t *Tracer) Begin(parent []byte, what, flowID, flowType, name string, number uint32, at time.Time) (child []byte, end func(outcome string, at time.Time)) {
	if t == nil || len(parent) == 0 {
		return parent, nil
	}
	c, ok := decode(parent)
	if !ok || !c.IsSampled() {
		return parent, nil
	}
	ctx := trace.ContextWithRemoteSpanContext(context.Background(), c)
	_, span := t.tracer.Start(ctx, what+" "+name, trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.String("perdure.flow.id", flowID), attribute.String("perdure.flow.type", flowType),
			attribute.String("perdure."+what, name), attribute.Int64("perdure.attempt", int64(number))))
	return encode(span.SpanContext()), func(outcome string, at time.Time) {
		span.SetAttributes(attribute.String("perdure.outcome", outcome))
		if outcome != "completed" && outcome != "cancelled" {
			span.SetStatus(codes.Error, outcome)
		}
		span.End(trace.WithTimestamp(at))
	}
}

// The W3C trace parent: version, trace ID, span ID and flags, in hex.
const parentLen = 2 + 1 + 32 + 1 + 16 + 1 + 2

func encode(c trace.SpanContext) []byte {
	if !c.IsSampled() {
		return nil
	}
	return fmt.Appendf(make([]byte, 0, parentLen), "00-%s-%s-%02x", c.TraceID(), c.SpanID(), byte(c.TraceFlags()))
}

// remote gives a context with the parent's span; one that cannot be read is none.
func remote(parent []byte) context.Context {
	ctx := context.Background()
	c, ok := decode(parent)
	if !ok {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, c)
}

func decode(p []byte) (trace.SpanContext, bool) {
	if len(p) < parentLen || p[2] != '-' || p[35] != '-' || p[52] != '-' {
		return trace.SpanContext{}, false
	}
	var cfg trace.SpanContextConfig
	var version, flags [1]byte
	for _, part := range []struct {
		to   []byte
		from []byte
	}{{version[:], p[:2]}, {cfg.TraceID[:], p[3:35]}, {cfg.SpanID[:], p[36:52]}, {flags[:], p[53:55]}} {
		if n, err := hex.Decode(part.to, part.from); err != nil || n != len(part.to) {
			return trace.SpanContext{}, false
		}
	}
	if version[0] == 0xff || version[0] == 0 && len(p) != parentLen {
		return trace.SpanContext{}, false
	}
	cfg.TraceFlags = trace.TraceFlags(flags[0])
	cfg.Remote = true
	c := trace.NewSpanContext(cfg)
	return c, c.IsValid()
}
