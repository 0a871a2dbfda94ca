package flow

import (
	"encoding/hex"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// traceParentLen is the length of a W3C trace parent: version, trace ID, span
// ID and flags in hex, with dashes between.
const traceParentLen = 2 + 1 + 32 + 1 + 16 + 1 + 2

// traced puts a call below the server's span of it: its context carries the
// trace, so that what the handler calls is part of it, and with a tracer there
// is a span of the handler. The result is called with the call's error, and is
// nil when there is no trace.
func (r *Runtime) traced(l *lifetime, parent []byte, what, name, flowID, flowType string) func(error) {
	sc, ok := spanContext(parent)
	if !ok {
		return nil
	}
	l.parent = trace.ContextWithRemoteSpanContext(l.parent, sc)
	if r.tracer == nil {
		return nil
	}
	var span trace.Span
	l.parent, span = r.tracer.Start(l.parent, what+" "+name, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
		attribute.String("perdure.flow.id", flowID), attribute.String("perdure.flow.type", flowType), attribute.String("perdure."+what, name)))
	return func(err error) {
		if err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, errorText(err))
		}
		span.End()
	}
}

// spanContext reads a W3C trace parent.
func spanContext(p []byte) (trace.SpanContext, bool) {
	if len(p) != traceParentLen || p[0] == 'f' && p[1] == 'f' || p[2] != '-' || p[35] != '-' || p[52] != '-' {
		return trace.SpanContext{}, false
	}
	cfg := trace.SpanContextConfig{Remote: true}
	var flags [1]byte
	for _, part := range []struct{ to, from []byte }{{cfg.TraceID[:], p[3:35]}, {cfg.SpanID[:], p[36:52]}, {flags[:], p[53:55]}} {
		if _, err := hex.Decode(part.to, part.from); err != nil {
			return trace.SpanContext{}, false
		}
	}
	cfg.TraceFlags = trace.TraceFlags(flags[0])
	sc := trace.NewSpanContext(cfg)
	return sc, sc.IsValid()
}
