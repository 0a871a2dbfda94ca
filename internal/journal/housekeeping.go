package journal

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// zeroChunk is how much is zero-filled at once before its write-back starts.
const zeroChunk = 256 << 10

// Trim gives up the segments whose entries all are at or below upTo. The
// segment being written stays, so the log keeps its place. Files are removed
// or recycled in the background (see Options.Go), the oldest first.
func (l *Log) Trim(upTo uint64) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	for len(l.segs) > 1 && l.segs[1].firstSeq != 0 && l.segs[1].firstLSN-1 <= upTo {
		l.doomed = append(l.doomed, l.segs[0])
		l.segs = l.segs[1:]
		l.firstLSN = l.segs[0].firstLSN
	}
	l.mu.Unlock()
	l.keepHouse()
	return nil
}

// keepHouse starts housekeeping if there is any and none runs.
func (l *Log) keepHouse() {
	l.mu.Lock()
	if l.closed || l.keeping || (len(l.doomed) == 0 && !l.wantsSpare()) {
		l.mu.Unlock()
		return
	}
	l.keeping = true
	l.mu.Unlock()
	if l.opts.Go != nil {
		l.opts.Go(l.housekeeping)
		return
	}
	l.housekeeping()
}

// wantsSpare: half of the active segment is used and no other is ready.
// l.mu is held.
func (l *Log) wantsSpare() bool {
	return l.spare == nil && !l.prepareFail && l.failed == nil && l.off > l.segs[len(l.segs)-1].size/2
}

// housekeeping works off what there is to do. It owns l.keeping.
func (l *Log) housekeeping() {
	for l.housekeepingStep() {
	}
}

func (l *Log) housekeepingStep() (more bool) {
	l.mu.Lock()
	switch {
	case l.closed:
	case len(l.doomed) > 0:
		old, reuse := l.doomed[0], l.free == "" && l.doomed[0].size == l.opts.SegmentSize
		l.mu.Unlock()
		return l.retired(l.retire(&old, reuse))
	case l.wantsSpare():
		l.mu.Unlock()
		seg, err := l.prepare()
		l.mu.Lock()
		if err != nil {
			l.stats.PrepareErrors++
			l.prepareFail = true
		} else {
			l.spare = seg
		}
		l.mu.Unlock()
		return true
	}
	l.keeping = false
	l.idle.Broadcast()
	l.mu.Unlock()
	return false
}

// retire removes the file of old, or sets it aside for reuse and returns its
// new name. The directory is synced after each: a crash must never leave an
// older segment behind a hole.
func (l *Log) retire(old *segment, reuse bool) (free string, err error) {
	path := l.fs.PathJoin(l.dir, old.name())
	if reuse {
		free = old.name() + tempSuffix
		err = l.fs.Rename(path, l.fs.PathJoin(l.dir, free))
	} else {
		err = l.fs.Remove(path)
	}
	if err == nil {
		err = syncDir(l.fs, l.dir)
	}
	return free, err
}

// retired books the outcome of retire. After an error the rest waits for the
// next Trim.
func (l *Log) retired(free string, err error) (more bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.stats.TrimErrors++
		l.keeping = false
		l.idle.Broadcast()
		return false
	}
	l.doomed = l.doomed[1:]
	if free != "" {
		l.free = free
	}
	return true
}

// prepare makes the segment that follows the active one. The caller owns
// l.keeping.
func (l *Log) prepare() (*segment, error) {
	l.mu.Lock()
	size := min(segmentGrowth*l.segs[len(l.segs)-1].size, l.opts.SegmentSize)
	free := l.free
	if size != l.opts.SegmentSize {
		free = ""
	} else {
		l.free = ""
	}
	id := l.nextID
	l.nextID++
	l.mu.Unlock()
	seg, err := l.makeSegment(id, size, free)
	if err != nil {
		return nil, fmt.Errorf("prepare segment: %w", err)
	}
	if free != "" {
		l.mu.Lock()
		l.stats.Recycled++
		l.mu.Unlock()
	}
	return seg, nil
}

// makeSegment makes a segment file of the given size, from the file free if
// that is not "". It is complete and synced before it gets its name, and the
// name is synced before it is used.
func (l *Log) makeSegment(id uint64, size int64, free string) (*segment, error) {
	seg := &segment{id: id, size: size, salt: id}
	if l.opts.Rand != nil {
		seg.salt = l.opts.Rand.Uint64()
	}
	temp := l.fs.PathJoin(l.dir, seg.name()+tempSuffix)
	if free != "" {
		temp = l.fs.PathJoin(l.dir, free)
	}
	f, err := l.fs.OpenReadWrite(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	err = fill(f, seg, free != "")
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = l.fs.Rename(temp, l.fs.PathJoin(l.dir, seg.name()))
	}
	if err != nil {
		_ = l.fs.Remove(temp) // gives the space back; Open would do it too
		return nil, err
	}
	return seg, syncDir(l.fs, l.dir)
}

// fill writes the header and, unless the file has its blocks already, zeros
// up to the size: written, not only reserved, so that a later overwrite
// changes no metadata and its fdatasync is one device write. The new salt
// makes what a recycled file still holds unreadable.
func fill(f vfs.File, seg *segment, recycled bool) error {
	if _, err := f.WriteAt(seg.header(), 0); err != nil {
		return err
	}
	if !recycled {
		zeros := make([]byte, min(zeroChunk, seg.size))
		for off := int64(segmentHeaderSize); off < seg.size; {
			n := min(int64(len(zeros)), seg.size-off)
			if _, err := f.WriteAt(zeros[:n], off); err != nil {
				return err
			}
			off += n
			// Starts the write-back without waiting, so that the sync at the
			// end does not hold up appends with 16 MiB at once.
			if _, err := f.SyncTo(off); err != nil {
				return err
			}
		}
	}
	return f.Sync()
}

// roll makes the next segment active, waiting for its preparation or making it
// now.
func (l *Log) roll() error {
	l.mu.Lock()
	for l.keeping {
		l.idle.Wait()
	}
	seg := l.spare
	l.spare, l.keeping = nil, true // keeps others out of prepare
	l.mu.Unlock()
	var err error
	if seg == nil {
		seg, err = l.prepare()
	}
	var f vfs.File
	if err == nil {
		f, err = l.fs.OpenReadWrite(l.fs.PathJoin(l.dir, seg.name()), vfs.WriteCategoryUnspecified)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keeping = false
	l.idle.Broadcast()
	if err != nil {
		return err
	}
	_ = l.active.Close() // all of it is synced
	l.active = f
	l.segs = append(l.segs, *seg)
	l.off = segmentHeaderSize
	l.prepareFail = false
	return nil
}
