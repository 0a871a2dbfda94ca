package journal

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// Open opens the log in dir, creating it if there is none. It finds the tail,
// cuts what a crash left torn behind it, and makes the last frame durable
// again before it returns. At most one process may have dir open; the caller
// sees to that.
//
// Errors match ErrCorrupt (a *CorruptError: acknowledged data is damaged) or
// ErrTooNew, or are the disk's.
func Open(fs env.FS, dir string, opts Options) (*Log, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Log{fs: fs, dir: dir, opts: opts, cur: cursor{seq: 1, lsn: 1}, firstLSN: 1, nextID: 1}
	l.idle = sync.NewCond(&l.mu)
	if err := makeDir(fs, dir); err != nil {
		return nil, fmt.Errorf("journal: create %s: %w", dir, err)
	}
	if err := l.load(); err != nil {
		return nil, err
	}
	if len(l.segs) == 0 {
		seg, err := l.makeSegment(l.nextID, opts.FirstSegmentSize, "")
		if err != nil {
			return nil, fmt.Errorf("journal: create first segment: %w", err)
		}
		l.nextID++
		l.segs = []segment{*seg}
	}
	if err := l.recoverTail(); err != nil {
		return nil, err
	}
	return l, nil
}

// load lists the segments with what their header and first frame say, and
// removes what was left half-made.
func (l *Log) load() error {
	names, err := l.fs.List(l.dir)
	if err != nil {
		return fmt.Errorf("journal: list %s: %w", l.dir, err)
	}
	slices.Sort(names)
	for _, name := range names {
		if base, ok := strings.CutSuffix(name, tempSuffix); ok {
			if _, ours := parseSegmentName(base); ours {
				if err := l.fs.Remove(l.fs.PathJoin(l.dir, name)); err != nil {
					return fmt.Errorf("journal: remove leftover: %w", err)
				}
			}
			continue
		}
		if id, ok := parseSegmentName(name); ok {
			seg := segment{id: id}
			if err := l.loadSegment(&seg); err != nil {
				return err
			}
			l.segs = append(l.segs, seg)
			l.nextID = id + 1
		}
	}
	return nil
}

func (l *Log) loadSegment(seg *segment) error {
	s, err := newScanner(l.fs, l.dir, seg)
	if err != nil {
		return err
	}
	defer s.close()
	f, ok, err := s.next()
	if err != nil {
		return err
	}
	if ok {
		seg.firstSeq, seg.firstLSN = f.Seq, f.FirstLSN
	}
	if n := len(l.segs); ok && n > 0 && (f.Seq <= l.segs[n-1].firstSeq || f.FirstLSN < l.segs[n-1].firstLSN) {
		return s.corrupt(segmentHeaderSize, 0, "frame %d does not follow the segment before", f.Seq)
	}
	return nil
}

// recoverTail finds the end of the log, proves that nothing was written behind
// it, and opens the active segment for writing.
func (l *Log) recoverTail() error {
	last := -1
	for i := range l.segs {
		if l.segs[i].firstSeq == 0 {
			continue
		}
		if i != last+1 {
			return l.lostFirstFrame(&l.segs[last+1])
		}
		last = i
	}
	active := max(last, 0)
	begin, err := l.scanTail(&l.segs[active])
	if err != nil {
		return err
	}
	if err := l.takeSpare(active + 1); err != nil {
		return err
	}
	if last >= 0 {
		l.firstLSN = l.segs[0].firstLSN
	}
	return l.settle(begin)
}

func (l *Log) lostFirstFrame(seg *segment) error {
	return &CorruptError{File: l.fs.PathJoin(l.dir, seg.name()), Offset: segmentHeaderSize,
		Reason: "the first frame does not decode, and a later segment has valid frames"}
}

// scanTail reads the last segment with frames to its end, sets l.cur and
// l.off, and returns where its last record begins (l.off if it has none).
func (l *Log) scanTail(seg *segment) (begin int64, err error) {
	s, err := newScanner(l.fs, l.dir, seg)
	if err != nil {
		return 0, err
	}
	defer s.close()
	for begin = s.off; ; {
		off := s.off
		f, ok, err := s.next()
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		if err := l.cur.check(f); err != nil {
			return 0, s.corrupt(off, l.cur.seq, "%v", err)
		}
		l.cur.advance(f)
		begin = off
	}
	l.off = s.off
	// One frame is in flight at most: what did not decode is the torn tail
	// only if no other record follows it.
	pos, seq, found, err := s.find(s.off + recordAlign)
	if err != nil {
		return 0, err
	}
	if found {
		return 0, s.corrupt(s.off, l.cur.seq, "the frame does not decode, and frame %d follows it at offset %d", seq, pos)
	}
	return begin, nil
}

// takeSpare drops the segments from index i on, which hold no intact first
// frame, from l.segs; the first becomes the spare if nothing was written to it.
func (l *Log) takeSpare(i int) error {
	rest := slices.Clone(l.segs[i:])
	l.segs = l.segs[:i]
	for j := range rest {
		written, err := l.provesNothing(&rest[j])
		if err != nil {
			return err
		}
		if j == 0 && !written {
			l.spare = &rest[j]
			continue
		}
		// A torn first frame would stay readable as a record's head, and be
		// taken for damage once the log has gone on elsewhere.
		if _, err := l.retire(&rest[j], false); err != nil {
			return fmt.Errorf("journal: remove torn segment: %w", err)
		}
	}
	return nil
}

// provesNothing checks that seg, which follows the tail, holds no record but
// possibly the torn one that was in flight: then written is true.
func (l *Log) provesNothing(seg *segment) (written bool, err error) {
	s, err := newScanner(l.fs, l.dir, seg)
	if err != nil {
		return false, err
	}
	defer s.close()
	pos, seq, found, err := s.find(segmentHeaderSize)
	if err != nil || !found {
		return false, err
	}
	if pos == segmentHeaderSize && (!l.cur.started || seq == l.cur.seq) {
		if _, seq, found, err = s.find(pos + recordAlign); err != nil || !found {
			return true, err
		}
	}
	return false, s.corrupt(segmentHeaderSize, l.cur.seq, "the frame does not decode, and frame %d was written behind it", seq)
}

// settle opens the active segment and makes sure that what will be replayed is
// on the disk. The last frame, which begins at begin, may be in the page cache
// only: its writer was killed before the sync, or the sync failed and the
// kernel dropped the pages' dirty marks. So it is written again and synced.
func (l *Log) settle(begin int64) error {
	path := l.fs.PathJoin(l.dir, l.segs[len(l.segs)-1].name())
	f, err := l.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("journal: open for writing: %w", err)
	}
	if begin < l.off {
		b := make([]byte, l.off-begin)
		if _, err = f.ReadAt(b, begin); err == nil {
			if _, err = f.WriteAt(b, begin); err == nil {
				err = f.SyncData()
			}
		}
	}
	if err == nil {
		err = syncDir(l.fs, l.dir)
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("journal: settle %s: %w", path, err)
	}
	l.active = f
	return nil
}

// makeDir makes dir and syncs the directories that its path hangs on.
func makeDir(fs env.FS, dir string) error {
	var parents []string // of what is missing, the deepest first
	for d := dir; ; {
		parent := fs.PathDir(d)
		if parent == d {
			break
		}
		parents = append(parents, parent)
		if _, err := fs.Stat(parent); err == nil {
			break
		}
		d = parent
	}
	if err := fs.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, p := range parents {
		if err := syncDir(fs, p); err != nil {
			return err
		}
	}
	return nil
}

// syncDir makes the names in dir durable.
func syncDir(fs env.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}
