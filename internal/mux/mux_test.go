package mux

import (
	"errors"
	"sync"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
	"google.golang.org/grpc/mem"
)

func TestCodecRoundTrip(t *testing.T) {
	for _, n := range []int{0, 10, 100_000} {
		in := &wire.Calls{Calls: []*wire.Call{{Id: 7, Verb: &wire.Call_Publish{Publish: &wire.PublishRequest{FlowId: "f", Payloads: [][]byte{make([]byte, n)}}}}}}
		b, err := Codec{}.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		var out wire.Calls
		if err := (Codec{}).Unmarshal(b, &out); err != nil || !out.EqualVT(in) {
			t.Fatalf("%d bytes: %v, %v", n, err, &out)
		}
		b.Free()
	}
	if _, err := (Codec{}).Marshal(3); err == nil {
		t.Error("3 was encoded")
	}
	if err := (Codec{}).Unmarshal(mem.BufferSlice{mem.SliceBuffer{0xff}}, &wire.Calls{}); err == nil {
		t.Error("garbage was decoded")
	}
}

func TestSenderGathers(t *testing.T) {
	gate := make(chan struct{})
	var mu sync.Mutex
	var frames [][]int
	s := NewSender(100, func(f *[]int) error {
		mu.Lock()
		frames = append(frames, *f)
		mu.Unlock()
		<-gate
		return nil
	})
	add := func(v, weight int) error { return s.Put(weight, func(f *[]int) { *f = append(*f, v) }) }
	if err := add(1, 1); err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{} // the first frame is out: from now on frames gather
	if err := add(2, 1000); err != nil {
		t.Fatal("an empty frame takes anything:", err)
	}
	for v := 3; ; v++ {
		err := add(v, 60)
		if errors.Is(err, ErrFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	close(gate)
	s.Close(nil, true)
	if err := add(9, 1); !errors.Is(err, ErrClosed) {
		t.Errorf("put after close: %v", err)
	}
	sum := 0
	for _, f := range frames {
		sum += len(f)
	}
	if sum < 2 || len(frames) > sum {
		t.Errorf("frames %v", frames)
	}
}

func TestSenderStopsOnError(t *testing.T) {
	broken := errors.New("broken")
	s := NewSender(100, func(*[]int) error { return broken })
	_ = s.Put(1, func(f *[]int) { *f = append(*f, 1) })
	<-s.Done()
	if err := s.Put(1, func(*[]int) {}); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	s.Close(nil, true)
}
