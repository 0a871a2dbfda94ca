package flow_test

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	realserver "github.com/perdure-dev/perdure/internal/server"
)

// life is one life of a real server.
type life struct {
	address string
	end     func()
}

func serve(t *testing.T, dir, address string) life {
	t.Helper()
	cfg := config.Default()
	cfg.Data = dir
	s, err := realserver.Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	ended := false
	end := func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		s.Close()
	}
	t.Cleanup(end)
	return life{l.Addr().String(), end}
}

// hop goes from step to step until its input is 0.
type hop struct {
	done *atomic.Int64
	half chan bool // told at the middle, and asked whether to go on
}

func (h *hop) Execute(ctx *flow.Context, n int) (flow.Decision, error) {
	h.done.Add(1)
	if n == 500 && ctx.FlowID() == "hop-0" && ctx.Attempt() == 1 {
		h.half <- true
	}
	fmt.Fprint(ctx.Output(), n)
	if n == 0 {
		return flow.Complete(ctx.FlowID()), nil
	}
	return flow.GoTo(h, n-1), nil
}

// TestServerRestart runs flows on a real server that stops and comes back.
func TestServerRestart(t *testing.T) {
	dir := t.TempDir()
	first := serve(t, dir, "127.0.0.1:0")
	h := &hop{done: &atomic.Int64{}, half: make(chan bool)}
	hops := flow.Define("hop", flow.Step(h), flow.Step(awaitPayment{}), flow.Step(ship{}), status, paid, balance, getStatus, deposit)
	w, err := flow.NewWorker(flow.WorkerOptions{Address: first.address, Logger: slog.New(slog.DiscardHandler)}, hops)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	worked := make(chan error, 1)
	go func() { worked <- w.Run(ctx) }()
	t.Cleanup(cancel)

	late, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	c, err := client.Dial(late, client.Options{Address: first.address})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	begin(t, late, c, hops, "order-1", flow.To(awaitPayment{}, order{ID: "o", Amount: 3}))
	const flows, steps = 20, 1001
	for i := range flows {
		begin(t, late, c, hops, fmt.Sprintf("hop-%d", i), flow.To(h, steps-1))
	}
	<-h.half
	first.end()
	serve(t, dir, first.address)
	for i := range flows {
		id := fmt.Sprintf("hop-%d", i)
		if got, err := client.Result[string](late, c, id); got != id || err != nil {
			t.Errorf("flow %s: %q, %v", id, got, err)
		}
	}
	if n := h.done.Load(); n < flows*steps || n > flows*(steps+3) {
		t.Errorf("%d steps ran, want about %d", n, flows*steps)
	}
	if err := client.Publish(late, c, "order-1", paid, payment{7}); err != nil {
		t.Fatal(err)
	}
	if err := client.AwaitValue(late, c, "order-1", status, "paid"); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Call(late, c, "order-1", deposit, payment{30}); n != 30 || err != nil {
		t.Errorf("deposit: %d, %v", n, err)
	}
	cancel()
	if err := <-worked; err != nil {
		t.Error(err)
	}
}

// begin starts a flow; the worker may not have connected yet.
func begin(t *testing.T, ctx context.Context, c *client.Client, f *flow.Flow, id string, first flow.Next) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := client.Start(ctx, c, f, id, first)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("start of %s: %v", id, err)
		}
	}
}

// TestLargeValuesSurviveARestart: a message that waits, and what an RPC takes and
// gives, on a real server.
func TestLargeValuesSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	first := serve(t, dir, "127.0.0.1:0")
	letters := flow.NewChannel[string]("letters")
	hold := flow.NewChannel[int]("hold")
	echo := flow.NewRPC("echo", func(_ *flow.ReadContext, in string) (string, error) { return in + in, nil })
	read := flow.StepFunc("read", func(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
		got, _, err := letters.Message(ctx)
		return flow.Complete(len(got)), err
	}).WithWait(func(*flow.Context, flow.None) (flow.Wait, error) {
		return flow.AllOf(letters.ForOne(), hold.ForOne()), nil
	})
	f := flow.Define("reader", letters, hold, echo, flow.Step(read))
	r := startReal(t, first.address, func(*flow.Worker) {}, f)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, client.Options{Address: first.address})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	begin(t, ctx, c, f, "r", flow.To(read, flow.None{}))
	text := strings.Repeat("x", 5<<20)
	if err := client.Publish(ctx, c, "r", letters, text); err != nil {
		t.Fatal(err)
	}
	if ms, err := c.Messages(ctx, "r", "letters"); err != nil || len(ms) != 1 || ms[0].Size != 5<<20+2 || ms[0].Payload != nil {
		t.Errorf("waiting are %v, %v", ms, err)
	}
	first.end()
	serve(t, dir, first.address)
	if out, err := client.Call(ctx, c, "r", echo, text); err != nil || out != text+text {
		t.Errorf("%d bytes came back, %v", len(out), err)
	}
	left := 0
	err = filepath.WalkDir(filepath.Join(dir, "objects"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(path, "blobs.d") && !strings.Contains(path, ".owner.o") {
			left++
		}
		return err
	})
	if err != nil || left != 2 { // the message, of two parts
		t.Errorf("%d objects are left, %v", left, err)
	}
	if err := client.Publish(ctx, c, "r", hold, 1); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Result[int](ctx, c, "r"); n != 5<<20 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
	r.stop()
	if err := r.ended(); err != nil {
		t.Error(err)
	}
}
