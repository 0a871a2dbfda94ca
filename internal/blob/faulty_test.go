package blob_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

func TestFaultyWithoutFaultsConforms(t *testing.T) {
	blobtest.Run(t, func(*testing.T) blob.Store {
		return blob.NewFaulty(mem.New(mem.Options{}), func(blob.Op) blob.Fault { return blob.Fault{} }, blob.FaultHooks{})
	})
}

func TestFaultsAreTwoSided(t *testing.T) {
	for _, c := range []struct {
		outcome blob.Outcome
		want    error // of writes
		done    bool  // the write is there when the call returns
		late    bool  // … and after the late writes ran
	}{
		{blob.Passed, nil, true, true},
		{blob.Refused, blob.ErrUnavailable, false, false},
		{blob.Lost, blob.ErrAmbiguous, false, false},
		{blob.AnswerLost, blob.ErrAmbiguous, true, true},
		{blob.Late, blob.ErrAmbiguous, false, true},
	} {
		inner := mem.New(mem.Options{})
		ctx := t.Context()
		if _, err := inner.Put(ctx, "old", []byte("x"), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		var later []func()
		s := blob.NewFaulty(inner, func(blob.Op) blob.Fault { return blob.Fault{Outcome: c.outcome} },
			blob.FaultHooks{Later: func(f func()) { later = append(later, f) }})
		data := []byte("new")
		_, perr := s.Put(ctx, "new", data, blob.PutOptions{IfNoneMatch: true})
		copy(data, "???") // a late write must not see this
		derr := s.Delete(ctx, "old", blob.DeleteOptions{})
		if !errors.Is(perr, c.want) || !errors.Is(derr, c.want) {
			t.Errorf("outcome %d: put %v, delete %v", c.outcome, perr, derr)
		}
		check := func(when string, done bool) {
			o, err := inner.Get(ctx, "new")
			_, oldErr := inner.Get(ctx, "old")
			if done != (err == nil && string(o.Data) == "new") || done != errors.Is(oldErr, blob.ErrNotFound) {
				t.Errorf("outcome %d, %s: new %q %v, old %v", c.outcome, when, o.Data, err, oldErr)
			}
		}
		check("at return", c.done)
		for _, f := range later {
			f()
		}
		check("later", c.late)
		_, gerr := s.Get(ctx, "new")
		_, lerr := s.List(ctx, "", "", 1)
		if c.outcome != blob.Passed && (!errors.Is(gerr, blob.ErrUnavailable) || !errors.Is(lerr, blob.ErrUnavailable)) {
			t.Errorf("outcome %d: get %v, list %v", c.outcome, gerr, lerr)
		}
	}
}

func TestFaultyDelays(t *testing.T) {
	inner := mem.New(mem.Options{})
	var slept []time.Duration
	var failAt time.Duration
	s := blob.NewFaulty(inner, func(blob.Op) blob.Fault { return blob.Fault{Before: 1, After: 2} },
		blob.FaultHooks{Sleep: func(_ context.Context, d time.Duration) error {
			slept = append(slept, d)
			if d == failAt {
				return context.DeadlineExceeded
			}
			return nil
		}})
	if _, err := s.Put(t.Context(), "k", nil, blob.PutOptions{}); err != nil || !slices.Equal(slept, []time.Duration{1, 2}) {
		t.Fatal(err, slept)
	}
	failAt = 1
	err := s.Delete(t.Context(), "k", blob.DeleteOptions{})
	if _, gerr := inner.Get(t.Context(), "k"); gerr != nil || errors.Is(err, blob.ErrAmbiguous) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("ended before the call: %v, %v", err, gerr)
	}
	failAt = 2
	err = s.Delete(t.Context(), "k", blob.DeleteOptions{})
	if _, gerr := inner.Get(t.Context(), "k"); gerr == nil || !errors.Is(err, blob.ErrAmbiguous) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("ended after the call: %v, %v", err, gerr)
	}
}

// splitmix is a small seeded generator.
type splitmix uint64

func (s *splitmix) Uint64() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func TestSeededFaultsRepeat(t *testing.T) {
	run := func(seed uint64) string {
		r := splitmix(seed)
		rates := blob.Rates{Refused: 10, Lost: 10, AnswerLost: 10, Late: 10, MaxDelay: time.Second}
		decide := blob.Seeded(&r, rates)
		var faults []blob.Fault
		s := blob.NewFaulty(mem.New(mem.Options{}), func(op blob.Op) blob.Fault {
			f := decide(op)
			faults = append(faults, f)
			return f
		}, blob.FaultHooks{})
		var log string
		for i := range 200 {
			_, err := s.Put(t.Context(), fmt.Sprint("k", i%7), fmt.Append(nil, i), blob.PutOptions{IfNoneMatch: i%3 == 0})
			log += fmt.Sprintln(err)
		}
		seen := map[blob.Outcome]int{}
		for _, f := range faults {
			seen[f.Outcome]++
			if f.Before >= time.Second || f.After >= time.Second {
				t.Fatalf("delay over the bound: %+v", f)
			}
		}
		for o := blob.Passed; o <= blob.Late; o++ {
			if seen[o] == 0 {
				t.Errorf("seed %d never decided %d", seed, o)
			}
		}
		return log + fmt.Sprint(faults)
	}
	first, again := run(1), run(1)
	if first != again {
		t.Error("the same seed gave two runs")
	}
	if first == run(2) {
		t.Error("two seeds gave the same run")
	}
}
