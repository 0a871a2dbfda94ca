package client

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/perdure-dev/perdure/internal/wire"
)

// span makes the span of a call; end is to be called once.
func (c *Client) span(ctx context.Context, w *wire.Call) (_ context.Context, end func(error)) {
	verb := strings.ToLower(strings.Trim(strings.TrimPrefix(fmt.Sprintf("%T", w.Verb), "*wire.Call_"), "_"))
	attrs := []attribute.KeyValue{attribute.String("perdure.call", verb)}
	if id := flowOf(w); id != "" {
		attrs = append(attrs, attribute.String("perdure.flow.id", id))
	}
	ctx, span := c.tracer.Start(ctx, "perdure."+verb, trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attrs...))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
			var e *Error
			if errors.As(err, &e) {
				span.SetAttributes(attribute.String("perdure.error", e.Code))
			}
		}
		span.End()
	}
}

// flowOf is the flow that a call is about; empty = none.
func flowOf(w *wire.Call) string {
	for _, v := range [...]interface{ GetFlowId() string }{
		w.GetStart(), w.GetDescribe(), w.GetWait(), w.GetStop(), w.GetGetAttributes(), w.GetSetAttributes(), w.GetWaitAttribute(),
		w.GetPublish(), w.GetListMessages(), w.GetDropMessages(), w.GetRpc(), w.GetSkipTimer(), w.GetReset_(), w.GetHistory(), w.GetDelete(),
	} {
		if id := v.GetFlowId(); id != "" { // a getter of nil gives nothing
			return id
		}
	}
	return ""
}

// traceParent is the W3C trace parent of ctx; nil without a span.
func traceParent(ctx context.Context) []byte {
	sc := trace.SpanContextFromContext(ctx)
	if !sc.IsValid() {
		return nil
	}
	b := make([]byte, 0, 55)
	b = append(b, "00-"...)
	t, s := sc.TraceID(), sc.SpanID()
	b = appendHex(b, t[:])
	b = append(b, '-')
	b = appendHex(b, s[:])
	b = append(b, '-')
	return appendHex(b, []byte{byte(sc.TraceFlags())})
}

func appendHex(b, v []byte) []byte {
	const digits = "0123456789abcdef"
	for _, c := range v {
		b = append(b, digits[c>>4], digits[c&15])
	}
	return b
}
