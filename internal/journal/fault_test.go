package journal

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// ops is a file system that records operations and fails those that fail picks.
type ops struct {
	log  []errorfs.Op
	fail func(errorfs.Op) bool
}

func (o *ops) wrap(fs vfs.FS) vfs.FS {
	return errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		o.log = append(o.log, op)
		if o.fail != nil && o.fail(op) {
			return errorfs.ErrInjected
		}
		return nil
	}))
}

func (o *ops) count(kinds ...errorfs.OpKind) int {
	n := 0
	for _, op := range o.log {
		for _, k := range kinds {
			if op.Kind == k {
				n++
			}
		}
	}
	return n
}

func TestOneSyncPerAppend(t *testing.T) {
	var rec ops
	l := mustOpen(t, rec.wrap(vfs.NewMem()), Options{SegmentSize: 1 << 20, FirstSegmentSize: 1 << 20})
	appendFrames(t, l, 1, 200)
	rec.log = nil
	const n = 500
	appendFrames(t, l, n, 200)
	if got := rec.count(errorfs.OpFileSyncData, errorfs.OpFileSync, errorfs.OpFileSyncTo); got != n {
		t.Errorf("%d syncs for %d appends", got, n)
	}
	if got := rec.count(errorfs.OpFileWriteAt); got != n || len(rec.log) != 2*n {
		t.Errorf("%d writes and %d operations for %d appends", got, len(rec.log), n)
	}
	if st := l.Stats(); st.Syncs != n+1 || st.Appends != n+1 {
		t.Errorf("stats %+v", st)
	}
}

func TestNothingIsAcknowledgedWithoutItsSync(t *testing.T) {
	var rec ops
	l := mustOpen(t, rec.wrap(vfs.NewMem()), small())
	for range 200 {
		rec.log = nil
		appendFrames(t, l, 1, 900)
		// Behind the frame's write, the first sync must be of the same file.
		i := 0
		for i < len(rec.log) && !(rec.log[i].Kind == errorfs.OpFileWriteAt && strings.HasSuffix(rec.log[i].Path, segmentSuffix)) {
			i++
		}
		if i+1 >= len(rec.log) || rec.log[i+1].Kind != errorfs.OpFileSyncData || rec.log[i+1].Path != rec.log[i].Path {
			t.Fatalf("operations %+v", rec.log)
		}
	}
}

func TestFailedWriteOrSyncPoisons(t *testing.T) {
	for name, kind := range map[string]errorfs.OpKind{"write": errorfs.OpFileWriteAt, "sync": errorfs.OpFileSyncData} {
		t.Run(name, func(t *testing.T) {
			disk := vfs.NewCrashableMem()
			var rec ops
			l := mustOpen(t, rec.wrap(disk), small())
			appendFrames(t, l, 5, 100)
			failed := false
			rec.fail = func(op errorfs.Op) bool {
				once := op.Kind == kind && !failed
				failed = failed || once
				return once
			}
			if err := l.Append(frameOf(6, 100)); !errors.Is(err, errorfs.ErrInjected) {
				t.Fatalf("append: %v", err)
			}
			rec.log = nil
			for range 3 { // the disk works again, the log must not be fooled
				if err := l.Append(frameOf(6, 100)); !errors.Is(err, ErrPoisoned) {
					t.Fatalf("append after a failure: %v", err)
				}
			}
			if len(rec.log) != 0 {
				t.Fatalf("a poisoned log touched the disk: %+v", rec.log)
			}
			wantFrames(t, replay(t, l, 0), 1, 5, 100)
			_ = l.Close()

			// Opened again without a crash, it shows what the page cache has,
			// and that must then be durable.
			l = mustOpen(t, rec.wrap(disk), small())
			shown := replay(t, l, 0)
			l = mustOpen(t, disk.CrashClone(vfs.CrashCloneCfg{}), small())
			wantFrames(t, replay(t, l, 0), 1, uint64(len(shown)), 100)
			if want := map[string]int{"write": 5, "sync": 6}[name]; len(shown) != want {
				t.Fatalf("%d frames, want %d", len(shown), want)
			}
		})
	}
}

// TestOpenWritesTheLastFrameAgain: after a failed fdatasync the kernel may hold
// the frame as clean, so that syncing alone would do nothing.
func TestOpenWritesTheLastFrameAgain(t *testing.T) {
	fs := vfs.NewMem()
	l := mustOpen(t, fs, small())
	appendFrames(t, l, 4, 100)
	_, begin, _ := lastRecord(t, l, fs)
	_ = l.Close()
	var rec ops
	mustOpen(t, rec.wrap(fs), small())
	for i, op := range rec.log {
		if op.Kind == errorfs.OpFileWriteAt && op.Offset == begin && rec.log[i+1].Kind == errorfs.OpFileSyncData {
			return
		}
	}
	t.Fatalf("operations of Open: %+v", rec.log)
}

func TestFailedPreparation(t *testing.T) {
	var rec ops
	fs := vfs.NewMem()
	l := mustOpen(t, rec.wrap(fs), small())
	rec.fail = func(op errorfs.Op) bool {
		return op.Kind == errorfs.OpFileWriteAt && strings.HasSuffix(op.Path, tempSuffix)
	}
	var err error
	for err == nil && l.NextSeq() < 100 {
		err = l.Append(frameOf(l.NextSeq(), 100))
	}
	if !errors.Is(err, errorfs.ErrInjected) {
		t.Fatalf("append without a segment: %v", err)
	}
	n := l.NextSeq() - 1
	if st := l.Stats(); st.PrepareErrors != 1 || n*100 < (8<<10-segmentHeaderSize)/2 {
		t.Fatalf("%d frames, stats %+v", n, st)
	}
	rec.fail = nil
	if err := l.Append(frameOf(n+1, 100)); !errors.Is(err, ErrPoisoned) {
		t.Fatalf("append: %v", err)
	}
	_ = l.Close()
	l = mustOpen(t, fs, small())
	wantFrames(t, replay(t, l, 0), 1, n, 100)
	appendFrames(t, l, 50, 100)
}

// TestPreparationRecovers: one failure ahead of need costs nothing.
func TestPreparationRecovers(t *testing.T) {
	var rec ops
	l := mustOpen(t, rec.wrap(vfs.NewMem()), small())
	failures := 1
	rec.fail = func(op errorfs.Op) bool {
		if op.Kind == errorfs.OpFileWriteAt && strings.HasSuffix(op.Path, tempSuffix) && failures > 0 {
			failures--
			return true
		}
		return false
	}
	appendFrames(t, l, 300, 100)
	if st := l.Stats(); st.PrepareErrors != 1 || failures != 0 {
		t.Fatalf("stats %+v", st)
	}
	wantFrames(t, replay(t, l, 0), 1, 300, 100)
}

func TestFailedTrimIsTriedAgain(t *testing.T) {
	var rec ops
	fs := vfs.NewMem()
	l := mustOpen(t, rec.wrap(fs), small())
	appendFrames(t, l, 200, 900)
	before := len(listNames(t, fs))
	rec.fail = func(op errorfs.Op) bool { return op.Kind == errorfs.OpRemove || op.Kind == errorfs.OpRename }
	if err := l.Trim(300); err != nil {
		t.Fatal(err)
	}
	if st := l.Stats(); st.TrimErrors != 1 || len(listNames(t, fs)) != before {
		t.Fatalf("stats %+v, %d files", st, len(listNames(t, fs)))
	}
	rec.fail = nil
	if err := l.Trim(300); err != nil {
		t.Fatal(err)
	}
	if after := len(listNames(t, fs)); after > before/2 {
		t.Fatalf("%d files, %d before", after, before)
	}
	first := l.FirstLSN()
	_ = l.Close()
	l = mustOpen(t, fs, small())
	if l.FirstLSN() != first {
		t.Fatalf("first LSN %d, want %d", l.FirstLSN(), first)
	}
}

// TestReadErrorIsNotTheEnd: a disk that cannot read must not make the log
// look shorter.
func TestReadErrorIsNotTheEnd(t *testing.T) {
	fs := vfs.NewMem()
	l := mustOpen(t, fs, small())
	appendFrames(t, l, 30, 900)
	_ = l.Close()
	reads := 0
	for at := 1; ; at++ {
		var rec ops
		reads = 0
		rec.fail = func(op errorfs.Op) bool {
			if op.Kind != errorfs.OpFileReadAt {
				return false
			}
			reads++
			return reads == at
		}
		err := openAndReplay(rec.wrap(fs))
		if reads < at {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		if !errors.Is(err, errorfs.ErrInjected) {
			t.Fatalf("read %d failed, got %v", at, err)
		}
	}
	if reads < 5 {
		t.Fatalf("only %d reads", reads)
	}
}

// TestKilledBeforeTheNameWasDurable: the process, not the machine, stops
// between a segment's rename and the sync of the directory; the next process
// finds the name and must not trust it.
func TestKilledBeforeTheNameWasDurable(t *testing.T) {
	disk := vfs.NewCrashableMem()
	var rec ops
	rec.fail = func(op errorfs.Op) bool { return op.Kind == errorfs.OpOpenDir && op.Path == testDir }
	big := Options{FirstSegmentSize: 64 << 10} // no other segment, no other sync
	if _, err := Open(rec.wrap(disk), testDir, big); !errors.Is(err, errorfs.ErrInjected) {
		t.Fatal(err)
	}
	l := mustOpen(t, disk, big)
	appendFrames(t, l, 3, 100)
	l = mustOpen(t, disk.CrashClone(vfs.CrashCloneCfg{}), small())
	wantFrames(t, replay(t, l, 0), 1, 3, 100)
}
