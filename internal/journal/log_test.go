package journal

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// counter is a Rand for tests: distinct values, the same in each run.
type counter struct{ n uint64 }

func (c *counter) Uint64() uint64 { c.n += 0x9e3779b97f4a7c15; return c.n }

const testDir = "data/p0/journal"

func small() Options {
	return Options{SegmentSize: 16 << 10, FirstSegmentSize: 8 << 10, Rand: &counter{}}
}

func mustOpen(t testing.TB, fs env.FS, o Options) *Log {
	t.Helper()
	l, err := Open(fs, testDir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// frameOf makes the frame with sequence seq of a log where each frame holds
// two entries; its body depends on seq and has about size bytes.
func frameOf(seq uint64, size int) Frame {
	b := AppendEntry(nil, fmt.Appendf(nil, "frame %d", seq))
	pad := bytes.Repeat([]byte{byte(seq), byte(seq >> 8), 0x5a}, size/3+1)[:size]
	return Frame{Epoch: 1, Nonce: 7, Seq: seq, FirstLSN: 2*seq - 1, Count: 2, Body: AppendEntry(b, pad)}
}

func appendFrames(t testing.TB, l *Log, n, size int) {
	t.Helper()
	for range n {
		if err := l.Append(frameOf(l.NextSeq(), size)); err != nil {
			t.Fatal(err)
		}
	}
}

// replay returns copies of the frames from LSN from on.
func replay(t testing.TB, l *Log, from uint64) []Frame {
	t.Helper()
	var out []Frame
	if err := l.Replay(from, func(f Frame) error {
		f.Body = bytes.Clone(f.Body)
		out = append(out, f)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func wantFrames(t testing.TB, got []Frame, first, last uint64, size int) {
	t.Helper()
	if uint64(len(got)) != last+1-first {
		t.Fatalf("%d frames, want %d to %d", len(got), first, last)
	}
	for i, f := range got {
		if !equalFrame(f, frameOf(first+uint64(i), size)) {
			t.Fatalf("frame %d differs: %+v", first+uint64(i), f.Seq)
		}
	}
}

func TestEmptyLog(t *testing.T) {
	fs := vfs.NewMem()
	for range 2 {
		l := mustOpen(t, fs, small())
		if l.NextSeq() != 1 || l.NextLSN() != 1 || l.FirstLSN() != 1 || l.Epoch() != 0 || l.MaxInFlight() != 1 {
			t.Fatalf("seq %d lsn %d first %d epoch %d", l.NextSeq(), l.NextLSN(), l.FirstLSN(), l.Epoch())
		}
		if got := replay(t, l, 5); len(got) != 0 {
			t.Fatalf("%d frames", len(got))
		}
		if l.Size() != 8<<10 {
			t.Fatalf("size %d", l.Size())
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAppendReopenReplayAcrossSegments(t *testing.T) {
	fs := vfs.NewMem()
	const perLife, size = 40, 900
	for life := range 4 {
		l := mustOpen(t, fs, small())
		if got, want := l.NextSeq(), uint64(life*perLife+1); got != want {
			t.Fatalf("life %d: next seq %d, want %d", life, got, want)
		}
		appendFrames(t, l, perLife, size)
		n := l.NextSeq() - 1
		wantFrames(t, replay(t, l, 0), 1, n, size)
		for _, lsn := range []uint64{1, 2, 3, n, 2 * n, 2*n + 1} {
			wantFrames(t, replay(t, l, lsn), (lsn+1)/2, n, size)
		}
		if err := l.Replay(2*n+2, nil); !errors.Is(err, ErrMissing) {
			t.Fatalf("replay from beyond the end: %v", err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := l.Append(frameOf(n+1, 1)); !errors.Is(err, ErrClosed) {
			t.Fatalf("append to a closed log: %v", err)
		}
	}
}

func TestReplayStopsAtCallersError(t *testing.T) {
	l := mustOpen(t, vfs.NewMem(), small())
	appendFrames(t, l, 3, 10)
	boom := errors.New("boom")
	calls := 0
	if err := l.Replay(0, func(Frame) error { calls++; return boom }); !errors.Is(err, boom) || calls != 1 {
		t.Fatalf("%v after %d calls", err, calls)
	}
}

func TestAppendRefusals(t *testing.T) {
	l := mustOpen(t, vfs.NewMem(), small())
	appendFrames(t, l, 2, 10)
	good := frameOf(3, 10)
	next := good
	next.Epoch, next.Nonce = 2, 8
	for _, c := range []struct {
		name   string
		change func(f *Frame)
		want   error
	}{
		{"lower epoch", func(f *Frame) { f.Epoch = 0 }, ErrStale},
		{"foreign nonce", func(f *Frame) { f.Nonce++ }, ErrStale},
		{"seq again", func(f *Frame) { f.Seq-- }, ErrOutOfOrder},
		{"seq gap", func(f *Frame) { f.Seq++ }, ErrOutOfOrder},
		{"lsn gap", func(f *Frame) { f.FirstLSN++ }, ErrOutOfOrder},
		{"lsn again", func(f *Frame) { f.FirstLSN-- }, ErrOutOfOrder},
		{"too large", func(f *Frame) { f.Body = make([]byte, MaxBodySize+1) }, ErrTooLarge},
	} {
		f := good
		c.change(&f)
		if err := l.Append(f); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if err := l.Append(next); err != nil { // a refusal does not poison
		t.Fatal(err)
	}
	if err := l.Append(frameOf(4, 10)); !errors.Is(err, ErrStale) {
		t.Errorf("frame of the former epoch: %v", err)
	}
	if l.Epoch() != 2 {
		t.Errorf("epoch %d", l.Epoch())
	}
}

func TestFirstFrameMayStartAnywhere(t *testing.T) {
	fs := vfs.NewMem()
	l := mustOpen(t, fs, small())
	if err := l.Append(Frame{Seq: 0, FirstLSN: 1}); !errors.Is(err, ErrOutOfOrder) {
		t.Fatalf("sequence 0: %v", err)
	}
	if err := l.Append(Frame{Seq: 50, FirstLSN: 1000, Count: 0}); err != nil { // a frame without entries
		t.Fatal(err)
	}
	if err := l.Append(Frame{Seq: 51, FirstLSN: 1000, Count: 3, Body: body("a", "b", "c")}); err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	l = mustOpen(t, fs, small())
	if l.NextSeq() != 52 || l.NextLSN() != 1003 || l.FirstLSN() != 1000 {
		t.Fatalf("seq %d lsn %d first %d", l.NextSeq(), l.NextLSN(), l.FirstLSN())
	}
	if got := replay(t, l, 1001); len(got) != 1 || got[0].Seq != 51 {
		t.Fatalf("%d frames", len(got))
	}
	if err := l.Replay(999, nil); !errors.Is(err, ErrMissing) {
		t.Fatalf("replay from below: %v", err)
	}
}

func TestFramesLargerThanASegment(t *testing.T) {
	fs := vfs.NewMem()
	o := small()
	o.CompressAbove = -1
	l := mustOpen(t, fs, o)
	sizes := []int{10, 100 << 10, 20, 15 << 10, 300 << 10, 10, 10, 1 << 20}
	for i, n := range sizes {
		if err := l.Append(frameOf(uint64(i+1), n)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		got := replay(t, l, 0)
		if len(got) != len(sizes) {
			t.Fatalf("%d frames", len(got))
		}
		for i, f := range got {
			if !equalFrame(f, frameOf(uint64(i+1), sizes[i])) {
				t.Fatalf("frame %d differs", i+1)
			}
		}
		_ = l.Close()
		l = mustOpen(t, fs, o)
	}
}

func listNames(t testing.TB, fs env.FS) []string {
	t.Helper()
	names, err := fs.List(testDir)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

func TestTrimKeepsWhatIsNeededAndRecycles(t *testing.T) {
	fs := vfs.NewMem()
	const size = 900
	l := mustOpen(t, fs, small())
	appendFrames(t, l, 200, size)
	before := l.Size()
	for _, upTo := range []uint64{0, 1, 100, 101, 250, 399} {
		if err := l.Trim(upTo); err != nil {
			t.Fatal(err)
		}
		first := l.FirstLSN()
		if first > upTo+1 {
			t.Fatalf("trim to %d gave up LSN %d", upTo, first-1)
		}
		wantFrames(t, replay(t, l, 0), (first+1)/2, 200, size)
		if first > 1 {
			if err := l.Replay(first-1, nil); !errors.Is(err, ErrMissing) {
				t.Fatalf("replay of what was trimmed: %v", err)
			}
		}
	}
	if got := l.Size(); got >= before/4 {
		t.Fatalf("size %d after trim, %d before", got, before)
	}
	// Everything may go, the log's place stays.
	if err := l.Trim(1 << 60); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		appendFrames(t, l, 10, size)
		if err := l.Trim(l.NextLSN() - 1); err != nil {
			t.Fatal(err)
		}
		if n := len(listNames(t, fs)); n > 4 {
			t.Fatalf("%d files: %v", n, listNames(t, fs))
		}
	}
	if st := l.Stats(); st.Recycled < 50 {
		t.Errorf("%d segments recycled", st.Recycled)
	}
	first, n := l.FirstLSN(), l.NextSeq()-1
	_ = l.Close()
	l = mustOpen(t, fs, small())
	if l.FirstLSN() != first || l.NextSeq() != n+1 {
		t.Fatalf("reopened at %d, %d", l.FirstLSN(), l.NextSeq())
	}
	wantFrames(t, replay(t, l, 0), (first+1)/2, n, size)
	for _, name := range listNames(t, fs) {
		if strings.HasSuffix(name, tempSuffix) {
			t.Errorf("leftover %s", name)
		}
	}
}

func TestSizeCountsTheFiles(t *testing.T) {
	fs := vfs.NewMem()
	l := mustOpen(t, fs, small())
	for i := range 300 {
		appendFrames(t, l, 1, 700)
		if i%50 == 49 {
			if err := l.Trim(l.NextLSN() - 20); err != nil {
				t.Fatal(err)
			}
		}
		var sum int64
		for _, name := range listNames(t, fs) {
			fi, err := fs.Stat(fs.PathJoin(testDir, name))
			if err != nil {
				t.Fatal(err)
			}
			sum += fi.Size()
		}
		if sum != l.Size() {
			t.Fatalf("after %d: Size %d, files %d", i, l.Size(), sum)
		}
	}
}

func TestBackgroundHousekeeping(t *testing.T) {
	fs := vfs.NewMem()
	o := small()
	var wg sync.WaitGroup
	o.Go = func(f func()) { wg.Go(f) }
	l := mustOpen(t, fs, o)
	var readers sync.WaitGroup
	done := make(chan struct{})
	readers.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_, _, _, _ = l.Size(), l.Stats(), l.FirstLSN(), l.NextSeq()
			}
		}
	})
	for range 60 {
		appendFrames(t, l, 10, 900)
		if err := l.Trim(l.NextLSN() - 30); err != nil {
			t.Fatal(err)
		}
	}
	close(done)
	readers.Wait()
	first, n := l.FirstLSN(), l.NextSeq()-1
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	l = mustOpen(t, fs, small())
	got := replay(t, l, 0)
	if got[0].FirstLSN > first {
		t.Fatalf("first LSN %d, want at most %d", got[0].FirstLSN, first)
	}
	wantFrames(t, got, got[0].Seq, n, 900)
}

func TestOptionsRefused(t *testing.T) {
	for _, o := range []Options{{SegmentSize: 100}, {SegmentSize: 2 << 30}, {FirstSegmentSize: 1}, {SegmentSize: -1}} {
		if _, err := Open(vfs.NewMem(), testDir, o); err == nil {
			t.Errorf("%+v accepted", o)
		}
	}
}
