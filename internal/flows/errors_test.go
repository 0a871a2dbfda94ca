package flows

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestErrorsOfThePackagesBelowHaveCodes(t *testing.T) {
	for want, errs := range map[core.Code][]error{
		Overloaded:     {partition.ErrOverloaded},
		OutcomeUnknown: {partition.ErrLost},
		Unavailable:    {partition.ErrStopped, state.ErrClosed, stream.ErrClosed, blob.ErrUnavailable, blob.ErrAmbiguous},
		SlowReader:     {stream.ErrSlowReader},
		BlobMissing:    {blob.ErrNotFound},
		Deadline:       {errDeadline, context.DeadlineExceeded},
		Cancelled:      {context.Canceled},
		Internal:       {errors.New("disk on fire"), state.ErrDamaged},
		WorkerLost:     {&core.Error{Code: "worker_lost", Message: "gone"}},
		core.Busy:      {&core.Error{Code: core.Busy, Message: "busy"}},
	} {
		for _, err := range errs {
			e := Wire(fmt.Errorf("around: %w", err))
			if e.Code != string(want) || e.Hint == "" || e.Message == "" || e.Position != -1 || (e.RetryAfterUs > 0) != hints[want].retry {
				t.Errorf("%v: got %v, want %s", err, e, want)
			}
		}
	}
	if e := Wire(&Error{Code: Invalid, Message: "m", Kind: "k", Position: 3}); e.Message != "m" || e.Kind != "k" || e.Position != 3 {
		t.Errorf("got %v", e)
	}
}

// TestEveryCallIsAnsweredOnceWhenAPartitionIsLost: whatever was on its way gets
// one answer, and what comes later is refused.
func TestEveryCallIsAnsweredOnceWhenAPartitionIsLost(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	held := w.hold("add")
	locked := w.begin(w.ctx, rpc("a", "add", ""))
	done := <-held
	w.losing.Store(true)
	// One entry is applied and not committed when the journal is lost, so that
	// calls see what is never durable.
	r := w.set.For("t/f/a")
	calls := []*wire.Call{
		get("a"), setAttr("a", attr("total", "2")), publish("a", "in", "", "1", "2"), list("a", "in"), rpc("a", "total", ""),
		stop("a", "", wire.StopFlow_FAIL), waitAttr("a", "total", "1"), describe("a"),
	}
	var chans []chan *wire.Answer
	lost := make(chan struct{})
	if err := r.Do(w.ctx, func(m *partition.Machine) {
		m.Propose(partition.Proposal{Entry: &wire.Entry{FlowId: "t/f/a", Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: []*wire.Attribute{attr("total", "1")}}}}})
		for _, c := range calls {
			chans = append(chans, w.begin(w.ctx, c))
		}
		n := r.Waiting()
		go func() {
			_ = r.Do(w.ctx, func(m *partition.Machine) { m.Fail(errors.New("disk on fire")) })
			close(lost)
		}()
		for r.Waiting() == n {
			runtime.Gosched() // the loss comes behind the calls, before their commit
		}
	}); err != nil {
		t.Fatal(err)
	}
	<-lost
	done(adder(&wire.RpcTask{}), nil)
	for i, ch := range append(chans, locked) {
		a := w.next(ch)
		if a.Error.GetCode() != string(OutcomeUnknown) {
			t.Errorf("call %d: got %v", i, a)
		}
	}
	w.refused(OutcomeUnknown, get("a"))
	w.refused(OutcomeUnknown, history(&wire.HistoryRequest{FlowId: "a"}))
	w.refused(OutcomeUnknown, reset("a", "pay", 0))
	w.unlocked()
}
