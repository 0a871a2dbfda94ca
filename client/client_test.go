package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/wire"
)

func echo(c *wire.Call, answer func(*wire.Answer)) {
	answer(rpcAnswer(string(c.GetRpc().Input)))
}

// TestManyCallsAtOnce: each caller gets its own answer, in whatever order they come.
func TestManyCallsAtOnce(t *testing.T) {
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if c.Id%3 == 0 {
			go echo(c, answer)
			return
		}
		echo(c, answer)
	})
	c := f.client(Options{})
	var wg sync.WaitGroup
	for g := range 64 {
		wg.Go(func() {
			for i := range 50 {
				want := fmt.Sprintf("%d", g*1000+i)
				got, err := c.RPC(background(t), "f", "r", g*1000+i, RPCOptions{})
				if err != nil || string(got) != want {
					t.Errorf("got %s, %v, want %s", got, err, want)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := f.connections(); n != 1 {
		t.Errorf("%d connections for 64 callers", n)
	}
}

// TestLostConnection: what can be sent again is, with the key it had; of what
// cannot, the caller is told that its fate is unknown.
func TestLostConnection(t *testing.T) {
	var f *fake
	var tries atomic.Int32
	var keys sync.Map
	f = newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if r := c.GetRpc(); r != nil {
			keys.Store(r.RequestId, true)
		}
		if tries.Add(1) == 1 {
			f.cut()
			return
		}
		switch {
		case c.GetRpc() != nil:
			answer(rpcAnswer(`"ok"`))
		case c.GetStart() != nil:
			answer(&wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{FlowId: c.GetStart().FlowId, RunId: "r", Created: false}}})
		case c.GetWait() != nil:
			answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{Status: wire.Status_COMPLETED}}})
		default:
			answer(&wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}})
		}
	})
	c := f.client(Options{})
	ctx := background(t)

	got, err := c.RPC(ctx, "f", "r", nil, RPCOptions{})
	if err != nil || string(got) != `"ok"` || tries.Load() != 2 {
		t.Errorf("RPC: %s, %v after %d tries", got, err, tries.Load())
	}
	n := 0
	keys.Range(func(k, _ any) bool { n++; return k != "" })
	if n != 1 {
		t.Errorf("%d keys for one RPC", n)
	}

	tries.Store(0)
	st, err := c.Start(ctx, StartRequest{Type: "t", Step: "s"})
	if err != nil || !st.Created || st.FlowID == "" || tries.Load() != 2 {
		t.Errorf("Start: %+v, %v after %d tries", st, err, tries.Load())
	}

	tries.Store(0)
	if i, err := c.Wait(ctx, "f", ""); err != nil || i.Status != Completed {
		t.Errorf("Wait: %+v, %v", i, err)
	}

	tries.Store(0)
	err = c.Delete(ctx, "f", "")
	if !errors.Is(err, ErrUnknown) || tries.Load() != 1 {
		t.Errorf("Delete: %v after %d tries", err, tries.Load())
	}
	if err := c.Delete(ctx, "f", ""); err != nil {
		t.Errorf("after connecting again: %v", err)
	}
}

// TestDoubt: a refusal says nothing of a former try whose answer was lost.
func TestDoubt(t *testing.T) {
	var f *fake
	var tries atomic.Int32
	f = newFake(t, func(_ *wire.Call, answer func(*wire.Answer)) {
		if tries.Add(1) == 1 {
			f.cut()
			return
		}
		answer(refuseWith("unknown_type", 0))
	})
	c := f.client(Options{})
	_, err := c.Start(background(t), StartRequest{Type: "t", Step: "s"})
	if !errors.Is(err, ErrUnknown) || !errors.Is(err, ErrUnknownType) || tries.Load() != 2 {
		t.Errorf("after a lost answer: %v after %d tries", err, tries.Load())
	}
	if _, err = c.Start(background(t), StartRequest{Type: "t", Step: "s"}); errors.Is(err, ErrUnknown) || !errors.Is(err, ErrUnknownType) {
		t.Errorf("at the first try: %v", err)
	}
	tries.Store(0)
	if _, err = c.Describe(background(t), "f"); errors.Is(err, ErrUnknown) {
		t.Errorf("of a read: %v", err)
	}
}

func TestRestart(t *testing.T) {
	f := newFake(t, echo)
	c := f.client(Options{})
	for i := range 5 {
		if _, err := c.RPC(background(t), "f", "r", i, RPCOptions{}); err != nil {
			t.Fatal(err)
		}
		f.restart()
	}
}

func TestUnreachable(t *testing.T) {
	refused := errors.New("nobody listens")
	_, err := Dial(background(t), Options{Address: "fake", Patience: -1, Dialer: func(context.Context, string) (net.Conn, error) { return nil, refused }})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "nobody listens") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithTimeout(background(t), 50*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, Options{Address: "fake", Dialer: func(context.Context, string) (net.Conn, error) { return nil, refused }})
	if !errors.Is(err, ErrDeadline) || errors.Is(err, ErrUnknown) || err.Error() != "no connection to passthrough:///fake before the deadline: nobody listens" {
		t.Errorf("got %v", err)
	}

	f := newFake(t, echo)
	c := f.client(Options{Patience: 50 * time.Millisecond})
	f.stop()
	if _, err := c.Describe(background(t), "f"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestKeyIsRefused(t *testing.T) {
	f := newFake(t, echo)
	f.onStream = func(ctx context.Context) error {
		if keyOf(ctx) != "Bearer good" {
			return status.Error(codes.Unauthenticated, "unauthenticated: the key is not known")
		}
		return nil
	}
	_, err := f.client(Options{Key: "bad"}).RPC(background(t), "f", "r", nil, RPCOptions{})
	if !errors.Is(err, ErrUnauthenticated) || !strings.HasPrefix(err.Error(), "the key is not known (") {
		t.Errorf("got %v", err)
	}
	if _, err := f.client(Options{Key: "good"}).RPC(background(t), "f", "r", 1, RPCOptions{}); err != nil {
		t.Error(err)
	}
}

// TestDraining: a server that refuses a stream has done nothing of it, so that
// everything is tried again.
func TestDraining(t *testing.T) {
	var n atomic.Int32
	f := newFake(t, func(_ *wire.Call, answer func(*wire.Answer)) {
		answer(&wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}})
	})
	f.onStream = func(context.Context) error {
		if n.Add(1) < 4 {
			return status.Error(codes.Unavailable, "unavailable: the server stops: connect again")
		}
		return nil
	}
	if err := f.client(Options{}).Delete(background(t), "f", ""); err != nil || n.Load() != 4 {
		t.Errorf("%v after %d streams", err, n.Load())
	}
	n.Store(-1000)
	err := f.client(Options{Patience: -1}).Delete(background(t), "f", "")
	if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknown) || err.Error() != "the call was not taken: the server stops: connect again" {
		t.Error(err)
	}
}

// TestOfASessionThatHadEnded: a call that was never sent is known not to have
// happened, whatever ended the session that it came too late for.
func TestOfASessionThatHadEnded(t *testing.T) {
	cause := status.Error(codes.Unavailable, "unavailable: the server stops: connect again")
	for name, fate := range map[string]error{"it broke": &errLost{cause}, "the server stopped": &errUnsent{cause}} {
		err := ofLast(background(t), unsent(fate), manner{write: true})
		if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknown) || err.Error() != "the call was not taken: the server stops: connect again" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTLSRefusesPlainServer(t *testing.T) {
	f := newFake(t, echo)
	_, err := Dial(background(t), Options{Address: "fake", Dialer: f.dial, Patience: -1, TLS: &tls.Config{ServerName: "x"}})
	if !errors.Is(err, ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

// TestCancel: the caller gets its answer at once, the server is told, and a
// late answer harms nobody.
func TestCancel(t *testing.T) {
	came := make(chan func(*wire.Answer), 1)
	cancelled := make(chan uint64, 1)
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if c.GetRpc().Name == "slow" {
			came <- answer
			return
		}
		echo(c, answer)
	})
	f.onCancel = func(id uint64) { cancelled <- id }
	c := f.client(Options{})
	ctx, cancel := context.WithCancel(background(t))
	errs := make(chan error)
	go func() {
		_, err := c.RPC(ctx, "f", "slow", nil, RPCOptions{})
		errs <- err
	}()
	late := <-came
	cancel()
	err := <-errs
	if !errors.Is(err, ErrCanceled) || !errors.Is(err, context.Canceled) || !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
	<-cancelled
	late(rpcAnswer(`"late"`))
	for i := range 20 {
		if got, err := c.RPC(background(t), "f", "r", i, RPCOptions{}); err != nil || string(got) != fmt.Sprint(i) {
			t.Fatalf("got %s, %v, want %d", got, err, i)
		}
	}
}

// TestDeadline: the server learns how long the caller waits.
func TestDeadline(t *testing.T) {
	timeout := make(chan int64, 1)
	f := newFake(t, func(c *wire.Call, _ func(*wire.Answer)) { timeout <- c.TimeoutUs })
	c := f.client(Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := c.Describe(ctx, "f")
	if !errors.Is(err, ErrDeadline) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
	if us := <-timeout; us <= 0 || us > 100_000 {
		t.Errorf("timeout %d µs", us)
	}
	if _, err := c.Describe(ctx, "f"); !errors.Is(err, ErrDeadline) {
		t.Errorf("after the deadline: %v", err)
	}
}

// TestWaitOutlivesTheServersBound: a server gives up waiting after its own
// time; the caller has set none.
func TestWaitOutlivesTheServersBound(t *testing.T) {
	n := 0
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if n++; n < 4 {
			answer(refuseWith("deadline", 0))
			return
		}
		answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{FlowId: "f", Status: wire.Status_FAILED, Error: "broken"}}})
	})
	c := f.client(Options{})
	i, err := c.Wait(background(t), "f", "")
	if err != nil || i.Status != Failed || i.Error != "broken" {
		t.Errorf("%+v, %v", i, err)
	}
}

func TestOverload(t *testing.T) {
	var n atomic.Int32
	code := "overloaded"
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if n.Add(1) < 3 {
			answer(refuseWith(code, time.Millisecond))
			return
		}
		answer(&wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}})
	})
	c := f.client(Options{})
	if err := c.Delete(background(t), "f", ""); err != nil || n.Load() != 3 {
		t.Errorf("%v after %d tries", err, n.Load())
	}
	n.Store(-1000)
	hasty := f.client(Options{Patience: 50 * time.Millisecond})
	if err := hasty.Delete(background(t), "f", ""); !errors.Is(err, ErrOverloaded) || n.Load() < -998 || n.Load() > -990 {
		t.Errorf("%v after %d tries", err, n.Load()+1000)
	}
	// What is refused for its content is not asked again, whatever the server hints.
	for _, code = range []string{"locked", "conflict", "not_found"} {
		n.Store(0)
		if err := c.Delete(background(t), "f", ""); err == nil || n.Load() != 1 {
			t.Errorf("%s: %v after %d tries", code, err, n.Load())
		}
	}
	// A wait beyond the deadline is not begun.
	code = "overloaded"
	n.Store(0)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	f.onCall = func(_ *wire.Call, answer func(*wire.Answer)) { answer(refuseWith(code, time.Minute)) }
	if err := c.Delete(ctx, "f", ""); !errors.Is(err, ErrOverloaded) {
		t.Error(err)
	}
}

// TestOpenCallsAreBounded: beyond MaxOpen calls wait their turn, and waits for
// flows do not take it from them.
func TestOpenCallsAreBounded(t *testing.T) {
	answers := make(chan func(*wire.Answer), 10)
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		if c.GetWait() == nil {
			answers <- answer
		}
	})
	c := f.client(Options{MaxOpen: 2})
	ctx, cancel := context.WithCancel(background(t))
	defer cancel()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { _, _ = c.Wait(ctx, "f", "") })
	}
	for range 3 {
		wg.Go(func() { _, _ = c.RPC(background(t), "f", "r", nil, RPCOptions{}) })
	}
	first, second := <-answers, <-answers
	short, stop := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer stop()
	if _, err := c.RPC(short, "f", "r", nil, RPCOptions{}); !errors.Is(err, ErrDeadline) || errors.Is(err, ErrUnknown) {
		t.Errorf("the fourth call: %v", err)
	}
	first(rpcAnswer("1"))
	third := <-answers
	second(rpcAnswer("1"))
	third(rpcAnswer("1"))
	cancel()
	wg.Wait()
}

func TestCloseEndsCalls(t *testing.T) {
	came := make(chan bool, 1)
	f := newFake(t, func(*wire.Call, func(*wire.Answer)) { came <- true })
	c := f.client(Options{})
	errs := make(chan error)
	go func() { errs <- c.Delete(background(t), "f", "") }()
	<-came
	c.Close()
	if err := <-errs; !errors.Is(err, ErrClientClosed) || !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
	if err := c.Delete(background(t), "f", ""); !errors.Is(err, ErrClientClosed) || errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

// TestLargeValues: they go as blobs, and come back as values.
func TestLargeValues(t *testing.T) {
	big, _ := json.Marshal(strings.Repeat("x", 700_000))
	f := newFake(t, nil)
	f.onCall = func(c *wire.Call, answer func(*wire.Answer)) {
		switch {
		case c.GetStart() != nil:
			r := c.GetStart()
			if len(r.Input) > 0 || r.InputBlob != "b1" {
				t.Errorf("input of %d bytes, blob %q", len(r.Input), r.InputBlob)
			}
			answer(&wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{FlowId: r.FlowId, Created: true}}})
		case c.GetSetAttributes() != nil:
			for _, a := range c.GetSetAttributes().Attributes {
				if large := a.Name == "large"; large != (a.Blob != "") || large && (a.Size != uint64(len(big)) || len(a.Value) > 0) {
					t.Errorf("%s: blob %q, size %d", a.Name, a.Blob, a.Size)
				}
			}
			answer(&wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{}}})
		default:
			answer(&wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{Attributes: []*wire.Attribute{
				{Name: "large", Blob: "b1", Size: uint64(len(big))}, {Name: "small", Value: []byte("1")},
			}}}})
		}
	}
	c := f.client(Options{})
	ctx := background(t)
	if _, err := c.Start(ctx, StartRequest{ID: "f", Type: "t", Step: "s", Input: json.RawMessage(big)}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetAttributes(ctx, "f", Attribute{Name: "large", Value: big}, Attribute{Name: "small", Value: []byte("1")}); err != nil {
		t.Fatal(err)
	}
	got, err := c.Attributes(ctx, "f")
	if err != nil || len(got) != 2 || !bytes.Equal(got[0].Value, big) || got[0].Size != 0 || string(got[1].Value) != "1" {
		t.Errorf("%d attributes, %v", len(got), err)
	}
	f.mu.Lock()
	clear(f.blobs)
	f.mu.Unlock()
	if _, err := c.Attributes(ctx, "f"); err == nil || err.Error() != "moving a large value: flow f has no blob b1" {
		t.Errorf("a lost blob: %v", err)
	}
	if err := c.SetAttributes(ctx, "f", Attribute{Name: "bad", Value: []byte("{")}); !errors.Is(err, ErrInvalid) {
		t.Errorf("no JSON: %v", err)
	}
}

// TestWrongAnswer: a server that answers with something else is an error, not a panic.
func TestWrongAnswer(t *testing.T) {
	f := newFake(t, func(c *wire.Call, answer func(*wire.Answer)) {
		answer(&wire.Answer{Result: &wire.Answer_Done{Done: &wire.Done{}}})
	})
	c := f.client(Options{})
	if _, err := c.Describe(background(t), "f"); err == nil || !strings.Contains(err.Error(), "answered with") {
		t.Errorf("got %v", err)
	}
}

func TestErrorsMatchByCode(t *testing.T) {
	e := fromWire(&wire.Error{Code: "not_found", Message: "flow x does not exist", Hint: "check", Position: -1})
	if !errors.Is(e, ErrNotFound) || errors.Is(e, ErrExists) || errors.Is(e, ErrUnknown) || e.Error() != "flow x does not exist (check)" {
		t.Errorf("%v", e)
	}
}

// TestMoreConnections: very many open calls get connections of their own, and
// few share one.
func TestMoreConnections(t *testing.T) {
	const open = crowded + 500
	var mu sync.Mutex
	var answers []func(*wire.Answer)
	all := make(chan bool)
	f := newFake(t, func(_ *wire.Call, answer func(*wire.Answer)) {
		mu.Lock()
		defer mu.Unlock()
		if answers = append(answers, answer); len(answers) == open {
			close(all)
		}
	})
	c := f.client(Options{})
	var wg sync.WaitGroup
	for range open {
		wg.Go(func() {
			if _, err := c.Wait(background(t), "f", ""); err != nil {
				t.Error(err)
			}
		})
	}
	<-all
	if n := f.connections(); n != 2 {
		t.Errorf("%d connections for %d open calls", n, open)
	}
	for _, answer := range answers {
		answer(&wire.Answer{Result: &wire.Answer_Flow{Flow: &wire.FlowInfo{Status: wire.Status_COMPLETED}}})
	}
	wg.Wait()
}
