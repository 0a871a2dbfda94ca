package journal

import (
	"fmt"
)

// Replay calls fn for each frame that holds entries at or above fromLSN, in
// order; the first one may begin below it. 0 means from the start. The frame
// is valid only during the call. fn's error ends the replay and is returned.
//
// Errors: ErrMissing when the log starts above fromLSN or ends before it (an
// empty log has nothing to give and returns nil), ErrCorrupt, ErrTooNew, or
// the disk's.
func (l *Log) Replay(fromLSN uint64, fn func(Frame) error) error {
	l.mu.Lock()
	segs, end, closed, next, first := l.segs, l.off, l.closed, l.cur, l.firstLSN
	l.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case !next.started:
		return nil
	case fromLSN == 0:
		fromLSN = first
	case fromLSN < first || fromLSN > next.lsn:
		return fmt.Errorf("%w: %d, held are %d to %d", ErrMissing, fromLSN, first, next.lsn-1)
	}
	for len(segs) > 1 && segs[1].firstSeq != 0 && segs[1].firstLSN <= fromLSN {
		segs = segs[1:]
	}
	var cur cursor
	for i := range segs {
		stop := end
		var follow uint64 // first sequence of the next segment
		if i+1 < len(segs) {
			stop, follow = segs[i].size, segs[i+1].firstSeq
		}
		if err := l.replaySegment(segs[i], stop, follow, &cur, fromLSN, fn); err != nil {
			return err
		}
	}
	return nil
}

// replaySegment replays seg, which ends at offset stop if follow is 0, else
// before the frame with sequence follow.
func (l *Log) replaySegment(seg segment, stop int64, follow uint64, cur *cursor, fromLSN uint64, fn func(Frame) error) error {
	s, err := newScanner(l.fs, l.dir, &seg)
	if err != nil {
		return err
	}
	defer s.close()
	for s.off < stop && (follow == 0 || !cur.started || cur.seq < follow) {
		off := s.off
		f, ok, err := s.next()
		if err != nil {
			return err
		}
		if !ok {
			return s.corrupt(off, cur.seq, "the frame does not decode, and frames after it are valid")
		}
		if err := cur.check(f); err != nil {
			return s.corrupt(off, cur.seq, "%v", err)
		}
		cur.advance(f)
		if f.FirstLSN+uint64(f.Count) > fromLSN || (f.Count == 0 && f.FirstLSN >= fromLSN) {
			if err := fn(f); err != nil {
				return err
			}
		}
	}
	if follow != 0 && cur.seq != follow {
		return s.corrupt(s.off, cur.seq, "the next segment goes on with frame %d", follow)
	}
	return nil
}
