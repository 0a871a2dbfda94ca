package journal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/perdure-dev/perdure/internal/env"
)

func readFile(t testing.TB, fs env.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(fs.PathJoin(testDir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, fi.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func overwrite(t testing.TB, fs env.FS, name string, off int64, b []byte) {
	t.Helper()
	f, err := fs.OpenReadWrite(fs.PathJoin(testDir, name), vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(bytes.Clone(b), off); err != nil {
		t.Fatal(err)
	}
}

// copyLog copies the log's files into a new file system.
func copyLog(t testing.TB, from env.FS) *vfs.MemFS {
	t.Helper()
	to := vfs.NewMem()
	if err := to.MkdirAll(testDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range listNames(t, from) {
		overwrite(t, to, name, 0, readFile(t, from, name))
	}
	return to
}

// lastRecord is the place of the last record of the log.
func lastRecord(t testing.TB, l *Log, fs env.FS) (name string, begin, end int64) {
	t.Helper()
	seg, end := l.tail()
	s, err := newScanner(fs, testDir, &seg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for s.off < end {
		begin = s.off
		if _, ok, err := s.next(); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	return seg.name(), begin, end
}

// TestTornTail leaves the last frame written up to each byte, with what was in
// the file before it behind, in a fresh and in a recycled segment, and as the
// first frame of a segment.
func TestTornTail(t *testing.T) {
	const size = 100
	record := int64(len(appendRecord(nil, frameOf(1, size), -1)))
	perSegment := func(n int64) int { return int((n - segmentHeaderSize) / record) }
	first, grown := perSegment(8<<10), perSegment(16<<10)
	for _, c := range []struct {
		name   string
		frames int // before the last one
		trim   bool
	}{
		{"first of the log", 0, false},
		{"fresh segment", 5, false},
		{"first of a segment", first, false},
		{"recycled segment", first + 4*grown + 7, true},
		{"first of a recycled segment", first + 5*grown, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := vfs.NewMem()
			l := mustOpen(t, fs, small())
			for range c.frames {
				appendFrames(t, l, 1, size)
				if c.trim {
					if err := l.Trim(l.NextLSN() - 1); err != nil {
						t.Fatal(err)
					}
				}
			}
			before := copyLog(t, fs)
			appendFrames(t, l, 1, size)
			if c.trim && l.Stats().Recycled == 0 {
				t.Fatal("nothing was recycled")
			}
			name, begin, end := lastRecord(t, l, fs)
			rec := readFile(t, fs, name)[begin:end]
			// The last byte may be padding, and then nothing is torn.
			for cut := range int64(len(rec)) - recordAlign {
				for _, fill := range []int{-1, 0xff} { // old content, or garbage
					torn := copyLog(t, before)
					b := bytes.Clone(rec)
					for i := cut; fill >= 0 && i < int64(len(b)); i++ {
						b[i] = byte(fill)
					}
					if fill < 0 {
						b = b[:cut]
					}
					overwrite(t, torn, name, begin, b)
					checkTornLog(t, torn, uint64(c.frames), fmt.Sprintf("cut at %d, fill %d", cut, fill))
				}
			}
		})
	}
}

// checkTornLog opens a log of n intact frames and a torn one, goes on with
// frames of another size, and opens it again.
func checkTornLog(t *testing.T, fs env.FS, n uint64, what string) {
	t.Helper()
	l, err := Open(fs, testDir, small())
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if l.NextSeq() != n+1 {
		t.Fatalf("%s: next seq %d, want %d", what, l.NextSeq(), n+1)
	}
	appendFrames(t, l, 3, 17)
	_ = l.Close()
	l, err = Open(fs, testDir, small())
	if err != nil {
		t.Fatalf("%s: second open: %v", what, err)
	}
	defer l.Close()
	got := replay(t, l, 0)
	if len(got) < 3 {
		t.Fatalf("%s: %d frames", what, len(got))
	}
	wantFrames(t, got[len(got)-3:], n+1, n+3, 17)
	wantFrames(t, got[:len(got)-3], (l.FirstLSN()+1)/2, n, 100)
}

// TestForgedRecordInPayload tears a frame whose payload is an image of a
// record for just that place: without the salt it would look like a frame that
// follows a damaged one, and one user could stop the log from opening.
func TestForgedRecordInPayload(t *testing.T) {
	fs := vfs.NewMem()
	l := mustOpen(t, fs, small())
	appendFrames(t, l, 2, 10)
	seg, off := l.tail()
	bodyAt := off + recordHeaderSize + frameHeaderSize
	fake := appendRecord(nil, frameOf(4, 10), -1)
	guess := seg
	guess.salt = seg.id
	guess.sealRecord(fake, bodyAt)
	if err := l.Append(Frame{Epoch: 1, Nonce: 7, Seq: 3, FirstLSN: 5, Count: 1, Body: fake}); err != nil {
		t.Fatal(err)
	}
	if _, _, ok := guess.probe(readFile(t, fs, seg.name())[bodyAt:], bodyAt); !ok {
		t.Fatal("the forgery is not at its place")
	}
	overwrite(t, fs, seg.name(), off, make([]byte, 16))
	_ = l.Close()
	l = mustOpen(t, fs, small())
	if l.NextSeq() != 3 {
		t.Fatalf("next seq %d", l.NextSeq())
	}
}

// TestMiddleDamageIsRefused flips a bit in every byte of frames that others
// follow.
func TestMiddleDamageIsRefused(t *testing.T) {
	const size = 60
	orig := vfs.NewMem()
	l := mustOpen(t, orig, small())
	appendFrames(t, l, 100, size)
	if n := len(l.segs); n < 2 {
		t.Fatalf("%d segments", n)
	}
	tailName := l.segs[len(l.segs)-1].name()
	firstName := l.segs[0].name()
	_ = l.Close()
	used := recordHeaderSize + len(AppendFrame(nil, frameOf(1, size)))
	record := (used + 7) / 8 * 8
	perFirst := (8<<10 - segmentHeaderSize) / record
	for _, c := range []struct {
		name, file string
		index      int // of the record in the file
	}{
		{"tail segment, second frame", tailName, 1},
		{"tail segment, first frame", tailName, 0},
		{"first segment, first frame", firstName, 0},
		{"first segment, second frame", firstName, 1},
		{"first segment, last frame", firstName, perFirst - 1},
	} {
		off := int64(segmentHeaderSize + c.index*record)
		for i := range used {
			fs := copyLog(t, orig)
			b := readFile(t, fs, c.file)[off+int64(i)]
			overwrite(t, fs, c.file, off+int64(i), []byte{b ^ 0x10})
			err := openAndReplay(fs)
			var ce *CorruptError
			if !errors.Is(err, ErrCorrupt) || !errors.As(err, &ce) {
				t.Fatalf("%s, byte %d: %v", c.name, i, err)
			}
			if ce.File != testDir+"/"+c.file || ce.Offset != off {
				t.Fatalf("%s, byte %d: blames %s at %d, want offset %d", c.name, i, ce.File, ce.Offset, off)
			}
		}
	}
}

func openAndReplay(fs env.FS) error {
	l, err := Open(fs, testDir, small())
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Replay(0, func(Frame) error { return nil })
}

func TestDamagedFilesAreRefused(t *testing.T) {
	orig := vfs.NewMem()
	l := mustOpen(t, orig, small())
	appendFrames(t, l, 60, 700)
	names := listNames(t, orig)
	_ = l.Close()
	if len(names) < 4 {
		t.Fatal(names)
	}
	for _, c := range []struct {
		name   string
		damage func(fs *vfs.MemFS) error
		want   error
	}{
		{"header flipped", func(fs *vfs.MemFS) error { overwrite(t, fs, names[1], 20, []byte{99}); return nil }, ErrCorrupt},
		{"not a segment", func(fs *vfs.MemFS) error { overwrite(t, fs, names[1], 0, []byte("x")); return nil }, ErrCorrupt},
		{"missing in the middle", func(fs *vfs.MemFS) error { return fs.Remove(testDir + "/" + names[1]) }, ErrCorrupt},
		{"two files swapped", func(fs *vfs.MemFS) error {
			p := func(i int) string { return testDir + "/" + names[i] }
			return errors.Join(fs.Rename(p(1), "x"), fs.Rename(p(2), p(1)), fs.Rename("x", p(2)))
		}, ErrCorrupt},
		{"empty file", func(fs *vfs.MemFS) error {
			_, err := fs.Create(testDir+"/"+names[1], vfs.WriteCategoryUnspecified)
			return err
		}, ErrCorrupt},
		{"newer format", func(fs *vfs.MemFS) error {
			seg := segment{id: 2, size: 16 << 10}
			b := seg.header()
			b[8] = 9
			overwrite(t, fs, names[1], 0, resumHeader(b))
			return nil
		}, ErrTooNew},
		{"foreign files are left alone", func(fs *vfs.MemFS) error {
			overwrite(t, fs, "notes.txt", 0, []byte("hello"))
			overwrite(t, fs, "other.tmp", 0, []byte("hello"))
			return nil
		}, nil},
	} {
		fs := copyLog(t, orig)
		if err := c.damage(fs); err != nil {
			t.Fatal(c.name, err)
		}
		if err := openAndReplay(fs); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// TestCrashes runs chains of lives of a log. Each ends in a crash before a
// random file operation, with a random part of what was not synced lost.
func TestCrashes(t *testing.T) {
	seeds := 300
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		crashChain(t, uint64(seed))
	}
}

func crashChain(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	disk := vfs.NewCrashableMem()
	acked := map[uint64]Frame{} // by sequence
	var trimmed uint64          // highest LSN given up
	var inFlight *Frame         // may be there or not
	for life := range 6 {
		var clone *vfs.MemFS
		ops, crashAt := 0, 1+rng.IntN(400)
		if rng.IntN(4) == 0 {
			crashAt = 1 + rng.IntN(25) // within Open, or soon after
		}
		src := disk
		fs := errorfs.Wrap(src, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind.ReadOrWrite() == errorfs.OpIsRead {
				return nil
			}
			if ops++; ops >= crashAt {
				if clone == nil {
					clone = src.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 20, 50, 90}[rng.IntN(4)], RNG: rng})
				}
				return errorfs.ErrInjected
			}
			return nil
		}))
		o := small()
		o.Rand = &counter{n: rng.Uint64()}
		inFlight = runLife(t, fs, o, rng, uint64(life+1), acked, inFlight, &trimmed)
		if clone == nil { // it ran out of work first: the machine stops
			clone = src.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng})
		}
		disk = clone
		checkSurvivor(t, disk.CrashClone(vfs.CrashCloneCfg{}), acked, inFlight, trimmed, fmt.Sprintf("seed %d life %d", seed, life))
	}
}

// runLife opens the log, appends and trims until it fails or has done enough,
// and returns the frame in flight, if any: that of the life before when it did
// not get to open the log.
func runLife(t *testing.T, fs env.FS, o Options, rng *rand.Rand, epoch uint64, acked map[uint64]Frame, before *Frame, trimmed *uint64) *Frame {
	t.Helper()
	l, err := Open(fs, testDir, o)
	if err != nil {
		if !errors.Is(err, errorfs.ErrInjected) {
			t.Fatal(err)
		}
		return before
	}
	defer l.Close()
	// What Open shows has become durable: hold the log to it.
	if err := l.Replay(0, func(f Frame) error {
		f.Body = bytes.Clone(f.Body)
		acked[f.Seq] = f
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for range 150 {
		f := Frame{Epoch: epoch, Nonce: rng.Uint64(), Seq: l.NextSeq(), FirstLSN: l.NextLSN(), Count: uint32(rng.IntN(3))}
		if l.Epoch() == epoch {
			f.Nonce = l.cur.nonce
		}
		f.Body = make([]byte, rng.IntN(1500))
		if rng.IntN(20) == 0 {
			f.Body = make([]byte, rng.IntN(40<<10))
		}
		for i := range f.Body {
			f.Body[i] = byte(rng.Uint32())
		}
		if err := l.Append(f); err != nil {
			if !errors.Is(err, errorfs.ErrInjected) {
				t.Fatal(err)
			}
			return &f
		}
		acked[f.Seq] = f
		if rng.IntN(10) == 0 {
			*trimmed = max(*trimmed, f.FirstLSN-uint64(rng.IntN(20))%f.FirstLSN)
			if err := l.Trim(*trimmed); err != nil {
				t.Fatal(err)
			}
		}
	}
	return nil
}

func checkSurvivor(t *testing.T, fs env.FS, acked map[uint64]Frame, inFlight *Frame, trimmed uint64, what string) {
	t.Helper()
	var last uint64
	for seq := range acked {
		last = max(last, seq)
	}
	l, err := Open(fs, testDir, small())
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer l.Close()
	got := replay(t, l, 0)
	if len(got) == 0 {
		if last != 0 {
			t.Fatalf("%s: log is empty, %d frames were acknowledged", what, last)
		}
		return
	}
	if got[0].FirstLSN > trimmed+1 {
		t.Fatalf("%s: begins at LSN %d, trimmed up to %d", what, got[0].FirstLSN, trimmed)
	}
	for _, f := range got {
		switch want, ok := acked[f.Seq]; {
		case ok && equalFrame(f, want):
		case !ok && f.Seq == last+1 && inFlight != nil && equalFrame(f, *inFlight):
		default:
			t.Fatalf("%s: frame %d is not what was written (acknowledged: %v)", what, f.Seq, ok)
		}
	}
	if end := got[len(got)-1].Seq; end < last {
		t.Fatalf("%s: ends at frame %d, acknowledged up to %d", what, end, last)
	}
}
