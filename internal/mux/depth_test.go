package mux

import (
	"slices"
	"testing"

	"google.golang.org/grpc/mem"

	"github.com/perdure-dev/perdure/internal/wire"
)

// nested is a step whose recovery has a recovery, and so on, of about size bytes.
// It is put together from its end: recover is field 8.
func nested(size int) []byte {
	var back []byte
	for len(back) < size {
		var length []byte
		for n := uint64(len(back)); ; n >>= 7 {
			if n < 0x80 {
				length = append(length, byte(n))
				break
			}
			length = append(length, byte(n)|0x80)
		}
		slices.Reverse(length)
		back = append(append(back, length...), 8<<3|2)
	}
	slices.Reverse(back)
	return back
}

func TestWhatIsNestedTooDeepIsRefused(t *testing.T) {
	if err := (Codec{}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(nested(16 << 20))}, &wire.StepSpec{}); err == nil {
		t.Error("a frame that is nested millions deep is decoded")
	}
	if err := (Codec{Alias: true}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(nested(16 << 20))}, &wire.StepSpec{}); err == nil {
		t.Error("a frame that is nested millions deep is decoded in place")
	}
	// Large values are not looked at twice, whatever they hold.
	for _, value := range [][]byte{make([]byte, 8<<20), slices.Repeat([]byte(`{"a":[1,2,"x"]}`), 1<<20)} {
		in := &wire.StepSpec{Name: "s", Input: value, Recover: &wire.StepSpec{Name: "r", Input: value}}
		p, err := in.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		var out wire.StepSpec
		if err := (Codec{}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(p)}, &out); err != nil || !out.EqualVT(in) {
			t.Errorf("a large value: %v", err)
		}
	}
}

func BenchmarkTooDeep(b *testing.B) {
	in := &wire.StepSpec{Name: "s", Input: make([]byte, 8<<20)}
	p, err := in.MarshalVT()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if tooDeep(p, 0) {
			b.Fatal("too deep")
		}
	}
}
