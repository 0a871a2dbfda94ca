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
	// Nor is it hidden by what only a lenient decoder reads.
	overlong := append([]byte{99<<3&0x7f | 0x80, 99 >> 4}, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x7f)
	// A group of field 99, and a number of it.
	for _, first := range [][]byte{{0x9b, 0x06, 0x9c, 0x06}, overlong} {
		p := append(first, nested(16<<20)...)
		if !tooDeep(p, 0) {
			t.Errorf("% x hides what is nested", first)
			continue
		}
		if err := (Codec{}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(p)}, &wire.StepSpec{}); err == nil {
			t.Errorf("% x and a frame that is nested millions deep is decoded", first)
		}
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
