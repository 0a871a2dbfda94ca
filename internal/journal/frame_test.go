package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"testing"
)

func body(payloads ...string) []byte {
	var b []byte
	for _, p := range payloads {
		b = AppendEntry(b, []byte(p))
	}
	return b
}

func equalFrame(a, b Frame) bool {
	return a.Epoch == b.Epoch && a.Nonce == b.Nonce && a.Seq == b.Seq && a.FirstLSN == b.FirstLSN &&
		a.Count == b.Count && bytes.Equal(a.Body, b.Body)
}

func TestFrameRoundTrip(t *testing.T) {
	noise := make([]byte, 40<<10) // does not compress
	for i, x := 0, uint32(1); i < len(noise); i++ {
		x = x*1664525 + 1013904223
		noise[i] = byte(x >> 24)
	}
	for name, f := range map[string]Frame{
		"zero":         {},
		"small":        {Epoch: 1, Nonce: 2, Seq: 3, FirstLSN: 4, Count: 2, Body: body("a", "")},
		"extremes":     {Epoch: math.MaxUint64, Nonce: math.MaxUint64, Seq: math.MaxUint64, FirstLSN: math.MaxUint64, Count: math.MaxUint32, Body: []byte{0}},
		"compressible": {Seq: 1, Body: bytes.Repeat([]byte("again and again "), 4096)},
		"noise":        {Seq: 1, Body: noise},
	} {
		enc := AppendFrame([]byte("prefix"), f)[len("prefix"):]
		got, n, err := DecodeFrame(append(enc, "suffix"...))
		if err != nil || n != len(enc) || !equalFrame(got, f) {
			t.Errorf("%s: n %d of %d, err %v", name, n, len(enc), err)
		}
		if small := len(enc) < len(f.Body); small != (name == "compressible") {
			t.Errorf("%s: %d bytes for a body of %d", name, len(enc), len(f.Body))
		}
		if again := AppendFrame(nil, f); !bytes.Equal(again, enc) {
			t.Errorf("%s: encoding is not deterministic", name)
		}
	}
}

func TestDecodeFrameRefusesEveryDamage(t *testing.T) {
	enc := AppendFrame(nil, Frame{Epoch: 1, Nonce: 2, Seq: 3, FirstLSN: 4, Count: 1, Body: body("hello")})
	for n := range enc {
		if _, _, err := DecodeFrame(enc[:n]); !errors.Is(err, ErrTorn) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	for bit := range 8 * len(enc) {
		bad := bytes.Clone(enc)
		bad[bit/8] ^= 1 << (bit % 8)
		if _, _, err := DecodeFrame(bad); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTorn) {
			t.Errorf("bit %d: %v", bit, err)
		}
	}
}

// forge changes the header and gives it a right checksum.
func forge(f Frame, change func(b []byte)) []byte {
	b := AppendFrame(nil, f)
	change(b)
	binary.LittleEndian.PutUint32(b[frameCRCOffset:], frameCRC(b))
	return b
}

func TestDecodeFrameForged(t *testing.T) {
	small := Frame{Seq: 1, Body: []byte("abc")}
	big := Frame{Seq: 1, Body: make([]byte, 64<<10)}
	for _, c := range []struct {
		name   string
		f      Frame
		change func(b []byte)
		want   error
	}{
		{"version", small, func(b []byte) { b[4]++ }, ErrTooNew},
		{"flag", small, func(b []byte) { b[5] |= 0x80 }, ErrTooNew},
		{"reserved", small, func(b []byte) { b[7] = 1 }, ErrTooNew},
		{"raw length", small, func(b []byte) { b[48]++ }, ErrCorrupt},
		{"not zstd", small, func(b []byte) { b[5] |= flagZstd }, ErrCorrupt},
		{"decompresses to more", big, func(b []byte) { binary.LittleEndian.PutUint32(b[48:], 10) }, ErrCorrupt},
		{"decompresses to less", big, func(b []byte) { binary.LittleEndian.PutUint32(b[48:], 1<<20) }, ErrCorrupt},
		{"raw over the bound", big, func(b []byte) { binary.LittleEndian.PutUint32(b[48:], MaxFrameSize) }, ErrCorrupt},
	} {
		if _, _, err := DecodeFrame(forge(c.f, c.change)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestEntries(t *testing.T) {
	want := []string{"", "one", string(make([]byte, 300))}
	b := body(want...)
	i := 0
	for p, err := range Entries(b) {
		if err != nil || string(p) != want[i] {
			t.Fatalf("entry %d: %q %v", i, p, err)
		}
		if len(p) > 0 && cap(p) != len(p) {
			t.Errorf("entry %d can be appended into its neighbour", i)
		}
		i++
	}
	if i != len(want) {
		t.Fatalf("%d entries", i)
	}
	for _, bad := range [][]byte{{1}, {0x80}, {2, 'a'}, bytes.Repeat([]byte{0xff}, 11), {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}} {
		var last error
		for _, err := range Entries(bad) {
			last = err
		}
		if !errors.Is(last, ErrCorrupt) {
			t.Errorf("% x: %v", bad, last)
		}
	}
}

func FuzzDecodeFrame(f *testing.F) {
	f.Add(AppendFrame(nil, Frame{}))
	f.Add(AppendFrame(nil, Frame{Epoch: 1, Nonce: 2, Seq: 3, FirstLSN: 4, Count: 1, Body: body("hello")}))
	f.Add(AppendFrame(nil, Frame{Seq: 1, Body: make([]byte, 32<<10)}))
	f.Add([]byte("FRM1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= frameHeaderSize { // let the fuzzer through the checksum
			if n := int(binary.LittleEndian.Uint32(b[44:])); n <= len(b)-frameHeaderSize {
				b = bytes.Clone(b)
				binary.LittleEndian.PutUint32(b[frameCRCOffset:], frameCRC(b[:frameHeaderSize+n]))
			}
		}
		fr, n, err := DecodeFrame(b)
		if err != nil {
			if !errors.Is(err, ErrTorn) && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooNew) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if n < frameHeaderSize || n > len(b) || len(fr.Body) > MaxBodySize {
			t.Fatalf("n %d of %d, body %d", n, len(b), len(fr.Body))
		}
		again, _, err := DecodeFrame(AppendFrame(nil, fr))
		if err != nil || !equalFrame(again, fr) {
			t.Fatalf("does not survive a round trip: %v", err)
		}
		total := 0
		for p, err := range Entries(fr.Body) {
			if err == nil {
				total += len(p) + 1
			}
		}
		if total > len(fr.Body) {
			t.Fatalf("entries of %d bytes in a body of %d", total, len(fr.Body))
		}
	})
}
