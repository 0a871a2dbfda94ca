package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

var rewrite = flag.Bool("rewrite", false, "write testdata anew (only with a new format version)")

func resumHeader(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[40:], crc32.Checksum(b[:40], castagnoli))
	return b
}

const sampleFile = "journal-000000000001.seg"

// sampleFrames are the frames of testdata: two epochs, a frame without
// entries, and a compressed body.
func sampleFrames() []Frame {
	return []Frame{
		{Epoch: 1, Nonce: 0x1111, Seq: 1, FirstLSN: 1, Count: 2, Body: body("hello", "journal")},
		{Epoch: 1, Nonce: 0x1111, Seq: 2, FirstLSN: 3, Count: 1, Body: body("")},
		{Epoch: 2, Nonce: 0x2222, Seq: 3, FirstLSN: 4, Count: 0},
		{Epoch: 2, Nonce: 0x2222, Seq: 4, FirstLSN: 4, Count: 1, Body: AppendEntry(nil, bytes.Repeat([]byte("compressed "), 2000))},
	}
}

// TestSampleJournal replays a segment as version 1 wrote it, and checks that
// this build still writes the same bytes.
func TestSampleJournal(t *testing.T) {
	written := vfs.NewMem()
	l := mustOpen(t, written, Options{SegmentSize: 8 << 10, FirstSegmentSize: 8 << 10, Rand: &counter{}})
	for _, f := range sampleFrames() {
		if err := l.Append(f); err != nil {
			t.Fatal(err)
		}
	}
	now := readFile(t, written, sampleFile)
	path := filepath.Join("testdata", sampleFile)
	if *rewrite {
		if err := os.WriteFile(path, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sample, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	fs := vfs.NewMem()
	if err := fs.MkdirAll(testDir, 0o755); err != nil {
		t.Fatal(err)
	}
	overwrite(t, fs, sampleFile, 0, sample)
	l = mustOpen(t, fs, small())
	got, want := replay(t, l, 0), sampleFrames()
	if len(got) != len(want) {
		t.Fatalf("%d frames", len(got))
	}
	for i := range want {
		if !equalFrame(got[i], want[i]) {
			t.Errorf("frame %d: %+v", i+1, got[i])
		}
	}
	if !bytes.Equal(now, sample) {
		t.Error("this build writes other bytes: raise the version, or undo the change of the format")
	}
}

// FuzzOpen opens a log whose one segment holds anything behind a valid header.
func FuzzOpen(f *testing.F) {
	seg := segment{id: 1, salt: 1}
	records := func(frames ...Frame) []byte {
		var out []byte
		for _, fr := range frames {
			rec := appendRecord(nil, fr, 64)
			seg.sealRecord(rec, segmentHeaderSize+int64(len(out)))
			out = append(out, rec...)
		}
		return out
	}
	whole := records(sampleFrames()...)
	f.Add(whole)
	f.Add(whole[:len(whole)-9])
	f.Add(append(make([]byte, 8), whole...))
	f.Add(records(frameOf(5, 10), frameOf(4, 10)))
	f.Fuzz(func(t *testing.T, b []byte) {
		fs := vfs.NewMem()
		if err := fs.MkdirAll(testDir, 0o755); err != nil {
			t.Fatal(err)
		}
		overwrite(t, fs, sampleFile, 0, append(seg.header(), b...))
		l, err := Open(fs, testDir, small())
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooNew) {
				t.Fatal(err)
			}
			return
		}
		before := len(replay(t, l, 0))
		if err := l.Append(Frame{Epoch: l.Epoch() + 1, Seq: l.NextSeq(), FirstLSN: l.NextLSN(), Count: 1, Body: body("x")}); err != nil {
			if l.Epoch()+1 != 0 && l.NextSeq()+1 != 0 && l.NextLSN()+1 != 0 {
				t.Fatal(err)
			}
			return
		}
		_ = l.Close()
		l = mustOpen(t, fs, small())
		if got := replay(t, l, 0); len(got) != before+1 {
			t.Fatalf("%d frames after one was appended to %d", len(got), before)
		}
	})
}
