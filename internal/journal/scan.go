package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// scanWindow is how much a scanner reads at once; a larger record grows the
// window to its own size.
const scanWindow = 256 << 10

// scanner reads the records of one segment in order. Its frames alias its
// buffers: they are valid until the next call.
type scanner struct {
	seg  *segment
	path string
	f    vfs.File
	off  int64 // of the next record

	buf     []byte // bytes of the file from base on
	base    int64
	scratch []byte // decompressed body
}

func newScanner(fs env.FS, dir string, seg *segment) (*scanner, error) {
	f, err := openSegment(fs, dir, seg)
	if err != nil {
		return nil, err
	}
	return &scanner{seg: seg, path: fs.PathJoin(dir, seg.name()), f: f, off: segmentHeaderSize}, nil
}

func (s *scanner) close() { _ = s.f.Close() } // read-only: nothing to lose

// at returns up to n bytes from off on, fewer only at the end of the file.
// Any error is of the disk: it must never be taken for the end of the log.
func (s *scanner) at(off int64, n int) ([]byte, error) {
	if left := s.seg.size - off; int64(n) > left {
		n = int(max(left, 0))
	}
	if off < s.base || off+int64(n) > s.base+int64(len(s.buf)) {
		want := int(min(int64(max(n, scanWindow)), s.seg.size-off))
		if cap(s.buf) < want {
			s.buf = make([]byte, want)
		}
		s.buf, s.base = s.buf[:want], off
		got, err := s.f.ReadAt(s.buf, off)
		if err != nil && !(errors.Is(err, io.EOF) && got == want) {
			s.buf = s.buf[:0]
			return nil, fmt.Errorf("journal: read %s at offset %d: %w", s.path, off, err)
		}
	}
	i := int(off - s.base)
	return s.buf[i : i+n : i+n], nil
}

// next reads the record at s.off and moves past it. ok is false, and s.off
// stays, when no intact record is there. err is a disk error or ErrTooNew.
func (s *scanner) next() (f Frame, ok bool, err error) {
	b, err := s.at(s.off, recordProbe)
	if err != nil || len(b) < recordProbe {
		return Frame{}, false, err
	}
	size, _, ok := s.seg.probe(b, s.off)
	if !ok || s.off+size > s.seg.size {
		return Frame{}, false, nil
	}
	if b, err = s.at(s.off, int(size)); err != nil {
		return Frame{}, false, err
	}
	n := recordHeaderSize + int(binary.LittleEndian.Uint32(b))
	f, _, s.scratch, err = decodeFrame(b[recordHeaderSize:n], s.scratch)
	switch {
	case errors.Is(err, ErrTooNew):
		return Frame{}, false, fmt.Errorf("%w: %s at offset %d", err, s.path, s.off)
	case err != nil:
		return Frame{}, false, nil
	}
	s.off += size
	return f, true, nil
}

// find looks for a record header from off on, whether or not its frame is
// intact. It reads the rest of the segment: at most its size.
func (s *scanner) find(off int64) (pos int64, seq uint64, ok bool, err error) {
	for off+recordProbe <= s.seg.size {
		b, err := s.at(off, scanWindow)
		if err != nil {
			return 0, 0, false, err
		}
		i := 0
		for ; i+recordProbe <= len(b); i += recordAlign {
			if binary.LittleEndian.Uint32(b[i+recordHeaderSize:]) != frameMagic {
				continue // most of what is scanned: keep it cheap
			}
			if _, seq, ok := s.seg.probe(b[i:], off+int64(i)); ok {
				return off + int64(i), seq, true, nil
			}
		}
		off += int64(i)
	}
	return 0, 0, false, nil
}

// corrupt is the error for damage at off where seq was expected.
func (s *scanner) corrupt(off int64, seq uint64, format string, args ...any) error {
	return &CorruptError{File: s.path, Offset: off, Seq: seq, Reason: fmt.Sprintf(format, args...)}
}

// cursor is the place in the order of frames: what must come next.
type cursor struct {
	started      bool // a frame was seen; else seq and lsn are the lowest allowed
	epoch, nonce uint64
	seq, lsn     uint64 // of the next frame
}

// check says whether f may come next: ErrStale, ErrOutOfOrder or nil.
func (c *cursor) check(f Frame) error {
	switch {
	case c.started && f.Epoch < c.epoch:
		return fmt.Errorf("%w: epoch %d after epoch %d", ErrStale, f.Epoch, c.epoch)
	case c.started && f.Epoch == c.epoch && f.Nonce != c.nonce:
		return fmt.Errorf("%w: another writer within epoch %d", ErrStale, f.Epoch)
	case c.started && f.Seq != c.seq, f.Seq < 1, f.Seq+1 == 0:
		return fmt.Errorf("%w: sequence %d, want %d", ErrOutOfOrder, f.Seq, c.seq)
	case c.started && f.FirstLSN != c.lsn, f.FirstLSN < 1, f.FirstLSN+uint64(f.Count) < f.FirstLSN:
		return fmt.Errorf("%w: first LSN %d, want %d", ErrOutOfOrder, f.FirstLSN, c.lsn)
	}
	return nil
}

func (c *cursor) advance(f Frame) {
	*c = cursor{started: true, epoch: f.Epoch, nonce: f.Nonce, seq: f.Seq + 1, lsn: f.FirstLSN + uint64(f.Count)}
}
