package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// A segment file is a header page and then records, each 8-byte aligned:
//
//	length u32 | check u32 | frame … | zero padding to 8
//
// check binds the frame to this place in this life of the file: a record of a
// recycled file's former life, a copy at another offset, and bytes inside an
// entry that look like a frame all fail it.
const (
	segmentHeaderSize = 4096 // a page of its own, so that no append rewrites it
	segmentHeaderUsed = 44
	segmentMagic      = "PRDJSEG\n"
	segmentVersion    = 1

	recordHeaderSize = 8
	recordAlign      = 8
	// recordProbe is what must be read to judge a record's header.
	recordProbe = recordHeaderSize + frameHeaderSize

	segmentPrefix, segmentSuffix = "journal-", ".seg"
	tempSuffix                   = ".tmp" // removed at Open
)

// segment is what is known of one file.
type segment struct {
	id   uint64 // in its name; rises in the order of use
	salt uint64 // drawn anew in each life of the file
	size int64  // bytes on disk
	// Of the first frame; firstSeq is 0 while the segment holds none.
	firstSeq, firstLSN uint64
}

func (s *segment) name() string { return fmt.Sprintf("%s%012d%s", segmentPrefix, s.id, segmentSuffix) }

// parseSegmentName is the inverse of segment.name.
func parseSegmentName(name string) (id uint64, ok bool) {
	s, ok1 := strings.CutPrefix(name, segmentPrefix)
	s, ok2 := strings.CutSuffix(s, segmentSuffix)
	if !ok1 || !ok2 {
		return 0, false
	}
	id, err := strconv.ParseUint(s, 10, 64)
	return id, err == nil && (&segment{id: id}).name() == name
}

func (s *segment) header() []byte {
	b := make([]byte, segmentHeaderSize)
	le := binary.LittleEndian
	copy(b, segmentMagic)
	le.PutUint32(b[8:], segmentVersion)
	le.PutUint64(b[16:], s.id)
	le.PutUint64(b[24:], s.salt)
	le.PutUint64(b[32:], uint64(s.size))
	le.PutUint32(b[40:], crc32.Checksum(b[:40], castagnoli))
	return b
}

// decodeHeader sets salt from the header page b and checks it against s.id.
func (s *segment) decodeHeader(b []byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) < segmentHeaderUsed:
		return errors.New("segment header is cut short")
	case string(b[:8]) != segmentMagic:
		return errors.New("not a journal segment")
	case le.Uint32(b[40:]) != crc32.Checksum(b[:40], castagnoli):
		return errors.New("segment header checksum mismatch")
	case le.Uint32(b[8:]) != segmentVersion:
		return fmt.Errorf("%w: segment version %d", ErrTooNew, le.Uint32(b[8:]))
	case le.Uint64(b[16:]) != s.id:
		return fmt.Errorf("segment header is of segment %d: the file was renamed", le.Uint64(b[16:]))
	}
	s.salt = le.Uint64(b[24:])
	return nil
}

// recordCheck is the check of a record at off that holds a frame of length n
// with checksum frameCRC.
func (s *segment) recordCheck(off int64, n, frameCRC uint32) uint32 {
	var b [32]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], s.salt)
	le.PutUint64(b[8:], s.id)
	le.PutUint64(b[16:], uint64(off))
	le.PutUint32(b[24:], n)
	le.PutUint32(b[28:], frameCRC)
	return crc32.Checksum(b[:], castagnoli)
}

// appendRecord appends the record of f without its check, which depends on
// where it goes: see sealRecord.
func appendRecord(dst []byte, f Frame, compressAbove int) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, recordHeaderSize)...)
	dst = appendFrame(dst, f, compressAbove)
	binary.LittleEndian.PutUint32(dst[start:], uint32(len(dst)-start-recordHeaderSize))
	for (len(dst)-start)%recordAlign != 0 {
		dst = append(dst, 0)
	}
	return dst
}

// sealRecord completes rec for its place at off in s.
func (s *segment) sealRecord(rec []byte, off int64) {
	le := binary.LittleEndian
	le.PutUint32(rec[4:], s.recordCheck(off, le.Uint32(rec), le.Uint32(rec[recordHeaderSize+frameCRCOffset:])))
}

// probe judges the record header at the start of b (recordProbe bytes or
// more), which lies at off: ok says that a record was written there in this
// life. Its frame may still be damaged. size is the record's, with padding.
func (s *segment) probe(b []byte, off int64) (size int64, seq uint64, ok bool) {
	le := binary.LittleEndian
	if le.Uint32(b[recordHeaderSize:]) != frameMagic {
		return 0, 0, false
	}
	n := le.Uint32(b)
	if n < frameHeaderSize || n > MaxFrameSize || le.Uint32(b[4:]) != s.recordCheck(off, n, le.Uint32(b[recordHeaderSize+frameCRCOffset:])) {
		return 0, 0, false
	}
	size = (recordHeaderSize + int64(n) + recordAlign - 1) / recordAlign * recordAlign
	return size, le.Uint64(b[recordHeaderSize+frameSeqOffset:]), true
}

// openSegment opens the segment s of dir for reading and completes s.size and
// s.salt from the file.
func openSegment(fs env.FS, dir string, s *segment) (vfs.File, error) {
	path := fs.PathJoin(dir, s.name())
	f, err := fs.Open(path)
	if err != nil {
		return nil, fmt.Errorf("journal: open segment: %w", err)
	}
	if err := readHeader(f, s, path); err != nil {
		_ = f.Close() // read-only
		return nil, err
	}
	return f, nil
}

func readHeader(f vfs.File, s *segment, path string) error {
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("journal: stat segment: %w", err)
	}
	s.size = fi.Size()
	b := make([]byte, segmentHeaderUsed)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("journal: read %s: %w", path, err)
	}
	switch err := s.decodeHeader(b[:n]); {
	case errors.Is(err, ErrTooNew):
		return fmt.Errorf("%w: %s", err, path)
	case err != nil:
		// Headers are synced before a segment gets its name: no crash does this.
		return &CorruptError{File: path, Reason: err.Error()}
	}
	return nil
}
