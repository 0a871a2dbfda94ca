package blob_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
)

func TestMeteredConformance(t *testing.T) {
	blobtest.Run(t, func(*testing.T) blob.Store { return blob.NewMetered(mem.New(mem.Options{}), env.SystemClock{}) })
}

func TestResultOf(t *testing.T) {
	for err, want := range map[error]blob.Result{
		nil:                      blob.ResultOK,
		blob.ErrNotFound:         blob.ResultNotFound,
		blob.ErrPrecondition:     blob.ResultPrecondition,
		blob.ErrAmbiguous:        blob.ResultAmbiguous,
		blob.ErrUnavailable:      blob.ResultUnavailable,
		blob.ErrDenied:           blob.ResultDenied,
		blob.ErrInvalid:          blob.ResultOther,
		blob.ErrCorrupt:          blob.ResultOther,
		context.Canceled:         blob.ResultOther,
		context.DeadlineExceeded: blob.ResultOther,
	} {
		if got := blob.ResultOf(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
		if err != nil {
			if got := blob.ResultOf(fmt.Errorf("%w: %w", blob.ErrAmbiguous, err)); got != blob.ResultAmbiguous {
				t.Errorf("ambiguous by %v: %v", err, got)
			}
		}
	}
	seen := map[string]bool{}
	for r := range blob.NumResults {
		if name := blob.Result(r).String(); name == "" || seen[name] {
			t.Errorf("result %d has the name %q", r, name)
		} else {
			seen[name] = true
		}
	}
}

func TestMeterCounts(t *testing.T) {
	ctx := t.Context()
	s := blob.NewMetered(mem.New(mem.Options{}), env.SystemClock{})
	if _, err := s.Put(ctx, "k", make([]byte, 100), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	before := s.Stats()
	for range 2 {
		if _, err := s.Put(ctx, "k", make([]byte, 10), blob.PutOptions{IfNoneMatch: true}); !errors.Is(err, blob.ErrPrecondition) {
			t.Fatal(err)
		}
	}
	if o, err := s.Get(ctx, "k"); err != nil || len(o.Data) != 100 {
		t.Fatal(err)
	}
	if err := s.Delete(ctx, "k", blob.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.List(ctx, "", "", 1); err != nil {
		t.Fatal(err)
	}
	got := s.Stats().Since(before)
	put, get := got[blob.KindPut], got[blob.KindGet]
	if put.Requests() != 2 || put.Results[blob.ResultPrecondition] != 2 || put.BytesOut != 20 || put.BytesIn != 0 {
		t.Errorf("puts: %+v", put)
	}
	if get.Requests() != 1 || get.Results[blob.ResultOK] != 1 || get.BytesIn != 100 {
		t.Errorf("gets: %+v", get)
	}
	if d, l := got[blob.KindDelete].Requests(), got[blob.KindList].Requests(); d != 1 || l != 1 {
		t.Errorf("%d deletes, %d lists", d, l)
	}
}

func TestQuantiles(t *testing.T) {
	var m blob.Meter
	if q := m.Stats()[blob.KindPut].Quantile(0.5); q != 0 {
		t.Errorf("of nothing: %v", q)
	}
	for i := range 100 {
		m.Record(blob.KindPut, blob.ResultOK, 0, 1, time.Duration(i+1)*time.Millisecond)
	}
	m.Record(blob.KindPut, blob.ResultAmbiguous, 0, 1, time.Hour)
	v := m.Stats()[blob.KindPut]
	for q, want := range map[float64]time.Duration{0: time.Millisecond, 0.01: 2 * time.Millisecond, 0.5: 60 * time.Millisecond, 0.9: 100 * time.Millisecond, 1: 10 * time.Second} {
		if got := v.Quantile(q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if v.Latency != time.Hour+5050*time.Millisecond {
		t.Errorf("sum %v", v.Latency)
	}
	if n := testing.AllocsPerRun(100, func() { m.Record(blob.KindPut, blob.ResultOK, 0, 1, time.Second) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
