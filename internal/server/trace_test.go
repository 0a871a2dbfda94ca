package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/tracing"
)

// serving serves s on an address of its own until end is called.
func serving(t *testing.T, s *Server) (address string, end func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(end)
	return l.Addr().String(), end
}

// working runs a worker until end is called.
func working(t *testing.T, o flow.WorkerOptions, flows ...*flow.Flow) (end func()) {
	t.Helper()
	o.Logger = slog.New(slog.DiscardHandler)
	w, err := flow.NewWorker(o, flows...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(end)
	return end
}

// eventually calls fn until it gives no error.
func eventually(t *testing.T, ctx context.Context, fn func() error) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := fn()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(err)
		}
	}
}

// traceTree is the spans of one trace, each as its scope's last part, its name and
// its outcome, with those below it indented, in order.
func traceTree(t *testing.T, spans []sdk.ReadOnlySpan, id trace.TraceID) string {
	t.Helper()
	below := map[trace.SpanID][]string{}
	seen := map[trace.SpanID]bool{}
	var ids []trace.SpanID
	lines := map[string]trace.SpanID{}
	for i, s := range spans {
		if s.SpanContext().TraceID() != id {
			continue
		}
		outcome := ""
		for _, a := range s.Attributes() {
			if a.Key == attribute.Key("perdure.outcome") {
				outcome = " " + a.Value.AsString()
			}
		}
		scope := strings.TrimPrefix(s.InstrumentationScope().Name, "github.com/perdure-dev/perdure")
		line := fmt.Sprintf("%s: %s%s\x00%d", strings.TrimPrefix(scope, "/"), s.Name(), outcome, i)
		lines[line] = s.SpanContext().SpanID()
		ids = append(ids, s.SpanContext().SpanID())
		below[s.Parent().SpanID()] = append(below[s.Parent().SpanID()], line)
	}
	var out strings.Builder
	var show func(parent trace.SpanID, indent string)
	show = func(parent trace.SpanID, indent string) {
		slices.Sort(below[parent])
		for _, line := range below[parent] {
			text, _, _ := strings.Cut(line, "\x00")
			fmt.Fprintf(&out, "%s%s\n", indent, text)
			seen[lines[line]] = true
			show(lines[line], indent+"  ")
		}
	}
	show(trace.SpanID{}, "")
	for _, id := range ids {
		if !seen[id] {
			t.Errorf("a span has a parent that is not there")
		}
	}
	return out.String()
}

// TestOneTrace follows a flow from the client through its steps, a child flow and
// an RPC: all is one trace, each span below the one that caused it. The wait for
// the child is part of the step before it, so the child is below that one.
func TestOneTrace(t *testing.T) {
	rec := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(rec))
	own := provider.Tracer("test")
	s := openServer(t, t.TempDir())
	s.tracer = tracing.New(rec, "test", 0)
	address, end := serving(t, s)

	child := flow.Define("parcel", flow.Step(flow.StepFunc("pack", func(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
		if ctx.Attempt() == 1 {
			return flow.Decision{}, errors.New("no paper")
		}
		return flow.Complete("packed"), nil
	}), flow.Retry(flow.RetryPolicy{MaxAttempts: 2, Initial: time.Millisecond})))
	await := flow.StepFunc("await", func(ctx *flow.Context, id string) (flow.Decision, error) {
		got, _, err := flow.ChildResult[string](ctx, id)
		return flow.Complete(got), err
	}).WithWait(func(_ *flow.Context, id string) (flow.Wait, error) {
		return flow.AllOf(flow.Child(child, id, flow.To(flow.Ref[flow.None]("pack"), flow.None{}))), nil
	})
	look := flow.NewRPC("look", func(ctx *flow.ReadContext, _ flow.None) (string, error) {
		_, span := own.Start(ctx, "inside look")
		span.End()
		return "ok", nil
	})
	order := flow.Define("order", look, flow.Step(await), flow.Step(flow.StepFunc("place", func(ctx *flow.Context, id string) (flow.Decision, error) {
		_, span := own.Start(ctx, "inside place")
		span.End()
		return flow.GoTo(flow.Ref[string]("await"), id), nil
	})))
	working(t, flow.WorkerOptions{Address: address, Tracing: provider}, order, child)

	late, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(late, client.Options{Address: address, Tracing: provider})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	eventually(t, late, func() error {
		ws, err := c.Workers(late)
		if err == nil && len(ws) == 0 {
			err = errors.New("no worker")
		}
		return err
	})
	ctx, root := own.Start(late, "root")
	if _, err := client.Start(ctx, c, order, "o1", flow.To(flow.Ref[string]("place"), "p1")); err != nil {
		t.Fatal(err)
	}
	if got, err := client.Result[string](late, c, "o1"); got != "packed" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	if got, err := client.Call(ctx, c, "o1", look, flow.None{}); got != "ok" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	root.End()
	c.Close()
	end()
	const want = `test: root
  client: perdure.rpc
    : rpc look completed
      flow: rpc look
        test: inside look
  client: perdure.start
    : flow.start order
      : step await completed
        flow: step await
      : step place completed
        : step pack completed
          flow: step pack
        : step pack retried
          flow: step pack
        flow: step place
          test: inside place
`
	if got := traceTree(t, rec.Ended(), root.SpanContext().TraceID()); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// collector takes what the server exports, as it is on the wire.
func collector(t *testing.T) (address string, got chan []byte) {
	t.Helper()
	got = make(chan []byte, 100)
	g := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		in := &emptypb.Empty{}
		if err := stream.RecvMsg(in); err != nil {
			return err
		}
		got <- in.ProtoReflect().GetUnknown()
		return stream.SendMsg(&emptypb.Empty{})
	}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	return l.Addr().String(), got
}

// TestSpansAreExported: with the settings, the spans of a flow that nobody asked
// to trace are with the collector when the server has ended.
func TestSpansAreExported(t *testing.T) {
	endpoint, got := collector(t)
	cfg := config.Default()
	cfg.Data, cfg.Flows.TraceEndpoint, cfg.Flows.TraceRatio = t.TempDir(), endpoint, "1"
	s, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	address, end := serving(t, s)
	f := flow.Define("exported", flow.Step(flow.StepFunc("only", func(*flow.Context, flow.None) (flow.Decision, error) {
		return flow.Complete("ok"), nil
	})))
	working(t, flow.WorkerOptions{Address: address}, f)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, client.Options{Address: address})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	eventually(t, ctx, func() error {
		_, err := client.Start(ctx, c, f, "e1", flow.To(flow.Ref[flow.None]("only"), flow.None{}))
		return err
	})
	if got, err := client.Result[string](ctx, c, "e1"); got != "ok" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	end()
	var all []byte
	for len(got) > 0 {
		all = append(all, <-got...)
	}
	for _, want := range []string{"flow.start exported", "step only", "perdure.outcome", "completed", "service.version"} {
		if !bytes.Contains(all, []byte(want)) {
			t.Errorf("%q was not exported: %q", want, all)
		}
	}
}
