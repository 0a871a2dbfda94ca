package flows

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
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

// TestAFullPartitionIsSaidAtOnce: calls that meet a full queue are refused, also
// in the middle of what they do.
func TestAFullPartitionIsSaidAtOnce(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	r := w.set.For("t/f/a")
	var burst chan *wire.Answer
	var others []chan *wire.Answer
	if err := r.Do(w.ctx, func(*partition.Machine) {
		burst = w.begin(w.ctx, publish("a", "in", "", "1", "2", "3"))
		for r.View("t/f/a", func(*wire.Flow) {}, func(error) {}) == nil { // until the queue is full
		}
		for _, c := range []*wire.Call{get("a"), stop("a", "", 0), rpc("a", "add", ""), start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay"}), wait("a", "")} {
			others = append(others, w.begin(w.ctx, c))
		}
	}); err != nil {
		t.Fatal(err)
	}
	for _, ch := range others {
		if a := w.next(ch); a.Error.GetCode() != string(Overloaded) || a.Error.RetryAfterUs == 0 {
			t.Errorf("got %v", a)
		}
	}
	if a := w.next(burst); a.Error.GetCode() != string(Overloaded) || !strings.HasPrefix(a.Error.Message, "only 1 of 3 messages were published") {
		t.Errorf("got %v", a)
	}
	w.unlocked()
}

// lameStore fails what the test says.
type lameStore struct {
	blob.Store
	put, get, list, del error
}

func (s *lameStore) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if s.put != nil {
		return "", s.put
	}
	return s.Store.Put(ctx, key, data, o)
}

func (s *lameStore) Get(ctx context.Context, key string) (blob.Object, error) {
	if s.get != nil {
		return blob.Object{}, s.get
	}
	return s.Store.Get(ctx, key)
}

func (s *lameStore) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if s.list != nil {
		return nil, s.list
	}
	return s.Store.List(ctx, prefix, after, limit)
}

func (s *lameStore) Delete(ctx context.Context, key string, o blob.DeleteOptions) error {
	if s.del != nil {
		return s.del
	}
	return s.Store.Delete(ctx, key, o)
}

func TestErrorsOfTheBlobStore(t *testing.T) {
	w := newWorld(t)
	store := &lameStore{Store: w.store}
	w.svc.cfg.Blobs = store
	ref := w.put("a", []byte("1"))
	store.put = blob.ErrUnavailable
	if _, err := w.svc.PutBlob(w.ctx, tenant, "a", "", pieces([]byte("1"), 1)); code(err) != Unavailable {
		t.Errorf("got %v", err)
	}
	store.get = blob.ErrCorrupt
	if _, err := w.getBlob("a", ref.Blob); code(err) != Internal {
		t.Errorf("got %v", err)
	}
	store.list = blob.ErrUnavailable
	w.refused(Unavailable, start(&wire.StartRequest{FlowId: "a", FlowType: "order", Attributes: []*wire.Attribute{{Name: "doc", Blob: ref.Blob}}}))
	if _, err := w.svc.Sweep(w.ctx); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	store.list = nil
	w.clock.advance(2 * blobSafety)
	if _, err := w.svc.Sweep(w.ctx); !errors.Is(err, blob.ErrCorrupt) { // whose they are cannot be read
		t.Errorf("got %v", err)
	}
	store.get, store.del = nil, blob.ErrAmbiguous
	if _, err := w.svc.Sweep(w.ctx); !errors.Is(err, blob.ErrAmbiguous) {
		t.Errorf("got %v", err)
	}
	store.del = nil
	if n, err := w.svc.Sweep(w.ctx); n != 2 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
}
