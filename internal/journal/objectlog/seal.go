package objectlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/perdure-dev/perdure/internal/journal"
)

// Bytes of a seal. See docs/JOURNAL_FORMAT.md.
const (
	sealMagic     = 0x314c4553 // "SEL1", little endian
	sealVersion   = 1
	sealSize      = 44
	sealCRCOffset = 40
	// maxSealSize is what a seal of any version stays below, so that a list of
	// sizes tells seals, which are never deleted, from frames.
	maxSealSize = journal.MinFrameSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Seal is the object by which an epoch takes the log over: what lies between
// it and Resume is not part of the log.
type Seal struct {
	Epoch  uint64 // the epoch that took over
	Nonce  uint64 // its writer
	Seq    uint64 // where the seal is: the first sequence that was missing
	Resume uint64 // where the epoch's first frame is; above Seq
}

// AppendSeal appends the encoding of s to dst.
func AppendSeal(dst []byte, s Seal) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, sealSize)...)
	b := dst[start:]
	le := binary.LittleEndian
	le.PutUint32(b, sealMagic)
	b[4] = sealVersion
	le.PutUint64(b[8:], s.Epoch)
	le.PutUint64(b[16:], s.Nonce)
	le.PutUint64(b[24:], s.Seq)
	le.PutUint64(b[32:], s.Resume)
	le.PutUint32(b[sealCRCOffset:], crc32.Checksum(b[:sealCRCOffset], castagnoli))
	return dst
}

// Object is one object of a log: a frame, or a seal.
type Object struct {
	Sealed bool
	Seal   Seal          // if Sealed
	Frame  journal.Frame // if not
	Bytes  int           // size of the object

	fault error // it is there, but not intact
}

// ParseObject decodes an object; a frame's body may alias data. Errors match
// ErrCorrupt or ErrTooNew.
func ParseObject(data []byte) (Object, error) {
	if len(data) >= 4 && binary.LittleEndian.Uint32(data) == sealMagic {
		s, err := parseSeal(data)
		return Object{Sealed: true, Seal: s, Bytes: len(data)}, err
	}
	f, n, err := journal.DecodeFrame(data)
	switch {
	case errors.Is(err, journal.ErrTorn):
		return Object{}, fmt.Errorf("%w: the object has %d bytes, its frame is longer", ErrCorrupt, len(data))
	case err != nil:
		return Object{}, err
	case n != len(data):
		return Object{}, fmt.Errorf("%w: %d bytes follow the frame", ErrCorrupt, len(data)-n)
	}
	return Object{Frame: f, Bytes: n}, nil
}

// parseSeal reads a seal. Magic and checksum keep their places in all versions,
// so damage is told from novelty.
func parseSeal(b []byte) (Seal, error) {
	if len(b) != sealSize {
		return Seal{}, fmt.Errorf("%w: seal of %d bytes, want %d", ErrCorrupt, len(b), sealSize)
	}
	le := binary.LittleEndian
	if le.Uint32(b[sealCRCOffset:]) != crc32.Checksum(b[:sealCRCOffset], castagnoli) {
		return Seal{}, fmt.Errorf("%w: checksum mismatch in a seal", ErrCorrupt)
	}
	if b[4] != sealVersion || b[5] != 0 || b[6] != 0 || b[7] != 0 {
		return Seal{}, fmt.Errorf("%w: seal version %d", ErrTooNew, b[4])
	}
	s := Seal{Epoch: le.Uint64(b[8:]), Nonce: le.Uint64(b[16:]), Seq: le.Uint64(b[24:]), Resume: le.Uint64(b[32:])}
	if s.Resume <= s.Seq {
		return Seal{}, fmt.Errorf("%w: seal at %d resumes at %d", ErrCorrupt, s.Seq, s.Resume)
	}
	return s, nil
}

// Key is the name of the object with sequence seq in the log of the partition
// at prefix ("p000").
func Key(prefix string, seq uint64) string { return fmt.Sprintf("%s%016x", KeyPrefix(prefix), seq) }

// KeyPrefix is what the keys of a log begin with.
func KeyPrefix(prefix string) string { return prefix + "/log/" }

// ParseKey is the sequence in a key of the log at prefix; ok is false for any
// other key.
func ParseKey(prefix, key string) (seq uint64, ok bool) {
	start := KeyPrefix(prefix)
	if len(key) != len(start)+16 || key[:len(start)] != start {
		return 0, false
	}
	for _, c := range []byte(key[len(start):]) {
		switch {
		case c >= '0' && c <= '9':
			seq = seq<<4 | uint64(c-'0')
		case c >= 'a' && c <= 'f':
			seq = seq<<4 | uint64(c-'a'+10)
		default:
			return 0, false
		}
	}
	return seq, true
}
