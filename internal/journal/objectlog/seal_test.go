package objectlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/journal"
)

var rewrite = flag.Bool("rewrite", false, "write testdata anew (only with a new format version)")

// sampleObjects are the objects of testdata/v1, by sequence: an epoch with two
// frames, one of them compressed; the seal of a second one; what a zombie left
// behind the seal; and the second epoch's first frame.
func sampleObjects() map[uint64][]byte {
	long := journal.AppendEntry(nil, bytes.Repeat([]byte("compressed "), 2000))
	return map[uint64][]byte{
		1: AppendSeal(nil, Seal{Epoch: 1, Nonce: 0x1111, Seq: 1, Resume: 3}),
		3: journal.AppendFrame(nil, journal.Frame{Epoch: 1, Nonce: 0x1111, Seq: 3, FirstLSN: 1, Count: 2, Body: entries("hello", "objects")}),
		4: journal.AppendFrame(nil, journal.Frame{Epoch: 1, Nonce: 0x1111, Seq: 4, FirstLSN: 3, Count: 1, Body: long}),
		5: AppendSeal(nil, Seal{Epoch: 2, Nonce: 0x2222, Seq: 5, Resume: 9}),
		6: journal.AppendFrame(nil, journal.Frame{Epoch: 1, Nonce: 0x1111, Seq: 6, FirstLSN: 5, Count: 1, Body: entries("lost")}),
		9: journal.AppendFrame(nil, journal.Frame{Epoch: 2, Nonce: 0x2222, Seq: 9, FirstLSN: 4, Count: 1, Body: entries("resumed")}),
	}
}

func entries(payloads ...string) (body []byte) {
	for _, p := range payloads {
		body = journal.AppendEntry(body, []byte(p))
	}
	return body
}

// TestSampleLog reads a log as version 1 wrote it, and checks that this build
// still writes the same bytes.
func TestSampleLog(t *testing.T) {
	store := newStore()
	for seq, now := range sampleObjects() {
		name := filepath.Join("testdata", "v1", filepath.Base(Key(testPrefix, seq)))
		if *rewrite {
			if err := os.WriteFile(name, now, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		sample, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(sample, now) {
			t.Errorf("this build writes other bytes than %s: raise the version, or undo the change of the format", name)
		}
		if _, err := store.Put(t.Context(), Key(testPrefix, seq), sample, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	m := &manifest{epoch: 2, window: 4, seq: 1, lsn: 1}
	l, got := openLog(t, m.take(store, 4))
	if len(got) != 3 || got[0].Count != 2 || len(got[1].Body) < 20000 || !bytes.Equal(got[2].Body, entries("resumed")) {
		t.Fatalf("%d frames: %+v", len(got), got)
	}
	if l.NextSeq() != 10+4 || l.NextLSN() != 5 {
		t.Fatalf("next is %d, LSN %d", l.NextSeq(), l.NextLSN())
	}
}

func TestSealRoundTrip(t *testing.T) {
	want := Seal{Epoch: 1<<64 - 1, Nonce: 3, Seq: 1<<64 - 5, Resume: 1<<64 - 1}
	enc := AppendSeal([]byte("prefix"), want)[len("prefix"):]
	o, err := ParseObject(enc)
	if err != nil || !o.Sealed || o.Seal != want || o.Bytes != len(enc) || len(enc) >= maxSealSize {
		t.Fatalf("%+v, %v", o, err)
	}
	for bit := range 8 * len(enc) {
		bad := bytes.Clone(enc)
		bad[bit/8] ^= 1 << (bit % 8)
		if _, err := ParseObject(bad); !errors.Is(err, ErrCorrupt) {
			t.Errorf("bit %d flipped: %v", bit, err)
		}
	}
	for n := range enc {
		if _, err := ParseObject(enc[:n]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	for name, s := range map[string]Seal{"nowhere": {Seq: 5, Resume: 5}, "backwards": {Seq: 5, Resume: 4}} {
		if _, err := ParseObject(AppendSeal(nil, s)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// resum makes a seal's checksum right again.
func resum(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b[:sealCRCOffset:sealCRCOffset], crc32.Checksum(b[:sealCRCOffset], castagnoli))
}

func TestParseObjectErrors(t *testing.T) {
	seal := AppendSeal(nil, Seal{Epoch: 1, Nonce: 2, Seq: 3, Resume: 7})
	newer := bytes.Clone(seal)
	newer[4] = 2
	fr := journal.AppendFrame(nil, journal.Frame{Epoch: 1, Seq: 1, FirstLSN: 1, Count: 1, Body: entries("x")})
	for name, c := range map[string]struct {
		data []byte
		want error
	}{
		"empty":             {nil, ErrCorrupt},
		"newer seal":        {resum(newer), ErrTooNew},
		"damaged version":   {newer, ErrCorrupt},
		"long seal":         {append(bytes.Clone(seal), 0), ErrCorrupt},
		"torn frame":        {fr[:len(fr)-1], ErrCorrupt},
		"more than a frame": {append(bytes.Clone(fr), fr...), ErrCorrupt},
		"something else":    {[]byte(strings.Repeat("x", 100)), ErrCorrupt},
	} {
		if _, err := ParseObject(c.data); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestKeys(t *testing.T) {
	if Key("p001", 0xab) != "p001/log/00000000000000ab" {
		t.Fatal(Key("p001", 0xab))
	}
	for _, seq := range []uint64{0, 1, 1 << 40, 1<<64 - 1} {
		if got, ok := ParseKey("p001", Key("p001", seq)); !ok || got != seq {
			t.Errorf("%d comes back as %d, %v", seq, got, ok)
		}
	}
	for _, key := range []string{"", "p001/log/", "p002/log/00000000000000ab", "p001/log/00000000000000AB", "p001/log/00000000000000abc", "p001/log/0000000000000x0b"} {
		if seq, ok := ParseKey("p001", key); ok {
			t.Errorf("%q is taken for %d", key, seq)
		}
	}
}

func FuzzParseObject(f *testing.F) {
	for _, b := range sampleObjects() {
		f.Add(b)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := ParseObject(b)
		switch {
		case err != nil:
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooNew) {
				t.Fatal(err)
			}
		case o.Sealed:
			if !bytes.Equal(AppendSeal(nil, o.Seal), b) {
				t.Fatalf("%+v encodes to other bytes", o.Seal)
			}
		case o.Bytes != len(b):
			t.Fatalf("%d bytes of %d", o.Bytes, len(b))
		}
	})
}
