package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Sizes of a frame. See docs/JOURNAL_FORMAT.md.
const (
	// MaxFrameSize bounds an encoded frame, and the body after decompression.
	MaxFrameSize = 64 << 20
	// MaxBodySize is the largest Frame.Body.
	MaxBodySize = MaxFrameSize - frameHeaderSize
	// MinFrameSize is the size of an encoded frame without a body.
	MinFrameSize = frameHeaderSize
	// DefaultCompressAbove is the body size from which AppendFrame tries to
	// compress: below it the CPU costs more than the bytes.
	DefaultCompressAbove = 16 << 10

	frameHeaderSize = 56
	frameMagic      = 0x314d5246 // "FRM1", little endian
	frameVersion    = 1
	flagZstd        = 1 << 0
	knownFlags      = flagZstd

	frameSeqOffset = 24
	frameCRCOffset = 52
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Frame is one committed batch: the entries FirstLSN … FirstLSN+Count-1.
type Frame struct {
	Epoch    uint64 // ownership under which it was written; never falls
	Nonce    uint64 // identifies the writer within the epoch
	Seq      uint64 // position among the frames of the log; starts at 1, no gaps
	FirstLSN uint64 // LSN of the first entry; starts at 1, no gaps
	Count    uint32 // number of entries in Body; 0 is allowed
	Body     []byte // entries, see AppendEntry; at most MaxBodySize
}

// AppendFrame appends the encoding of f to dst. It panics when f.Body is
// larger than MaxBodySize (Log.Append returns ErrTooLarge instead).
func AppendFrame(dst []byte, f Frame) []byte {
	return appendFrame(dst, f, DefaultCompressAbove)
}

// AppendFrameAbove is AppendFrame with the body size from which it tries to
// compress; below 0 means never.
func AppendFrameAbove(dst []byte, f Frame, compressAbove int) []byte {
	return appendFrame(dst, f, compressAbove)
}

// appendFrame is AppendFrame with its own threshold; below 0 means never
// compress.
func appendFrame(dst []byte, f Frame, compressAbove int) []byte {
	if len(f.Body) > MaxBodySize {
		panic(fmt.Sprintf("journal: body of %d bytes is over MaxBodySize", len(f.Body)))
	}
	start := len(dst)
	dst = append(dst, make([]byte, frameHeaderSize)...)
	var flags byte
	if compressAbove >= 0 && len(f.Body) > compressAbove {
		dst = compress(dst, f.Body)
		// Less than an eighth saved is not worth the reader's time.
		if len(dst)-start-frameHeaderSize <= len(f.Body)-len(f.Body)/8 {
			flags |= flagZstd
		} else {
			dst = dst[:start+frameHeaderSize]
		}
	}
	if flags&flagZstd == 0 {
		dst = append(dst, f.Body...)
	}
	b := dst[start:]
	le := binary.LittleEndian
	le.PutUint32(b[0:], frameMagic)
	b[4], b[5] = frameVersion, flags
	le.PutUint64(b[8:], f.Epoch)
	le.PutUint64(b[16:], f.Nonce)
	le.PutUint64(b[frameSeqOffset:], f.Seq)
	le.PutUint64(b[32:], f.FirstLSN)
	le.PutUint32(b[40:], f.Count)
	le.PutUint32(b[44:], uint32(len(b)-frameHeaderSize))
	le.PutUint32(b[48:], uint32(len(f.Body)))
	le.PutUint32(b[frameCRCOffset:], frameCRC(b))
	return dst
}

// DecodeFrame reads the frame at the start of b and says how many bytes it
// took. Body aliases b when the frame is not compressed; otherwise it is a
// fresh allocation of at most MaxBodySize bytes. Errors: ErrTorn when b ends
// too early, ErrCorrupt, ErrTooNew.
func DecodeFrame(b []byte) (f Frame, n int, err error) {
	f, n, _, err = decodeFrame(b, nil)
	return f, n, err
}

// decodeFrame is DecodeFrame with a buffer for the decompressed body, which it
// may grow and returns.
func decodeFrame(b, scratch []byte) (f Frame, n int, _ []byte, err error) {
	if len(b) < frameHeaderSize {
		return Frame{}, 0, scratch, ErrTorn
	}
	le := binary.LittleEndian
	if le.Uint32(b) != frameMagic {
		return Frame{}, 0, scratch, fmt.Errorf("%w: no frame magic", ErrCorrupt)
	}
	// Magic, lengths and CRC keep their places in every version, so damage is
	// told from novelty before the version is looked at.
	stored, raw := int(le.Uint32(b[44:])), int(le.Uint32(b[48:]))
	if stored > MaxBodySize || raw > MaxBodySize {
		return Frame{}, 0, scratch, fmt.Errorf("%w: body length out of bounds", ErrCorrupt)
	}
	n = frameHeaderSize + stored
	if len(b) < n {
		return Frame{}, 0, scratch, ErrTorn
	}
	b = b[:n:n]
	if le.Uint32(b[frameCRCOffset:]) != frameCRC(b) {
		return Frame{}, 0, scratch, fmt.Errorf("%w: checksum mismatch", ErrCorrupt)
	}
	if b[4] != frameVersion || b[5]&^knownFlags != 0 || b[6] != 0 || b[7] != 0 {
		return Frame{}, 0, scratch, fmt.Errorf("%w: frame version %d, flags %#x", ErrTooNew, b[4], b[5])
	}
	f = Frame{
		Epoch: le.Uint64(b[8:]), Nonce: le.Uint64(b[16:]), Seq: le.Uint64(b[frameSeqOffset:]),
		FirstLSN: le.Uint64(b[32:]), Count: le.Uint32(b[40:]), Body: b[frameHeaderSize:],
	}
	if b[5]&flagZstd != 0 {
		if scratch, err = decompress(scratch[:0], f.Body, raw); err != nil {
			return Frame{}, 0, scratch, err
		}
		f.Body = scratch
	} else if raw != stored {
		return Frame{}, 0, scratch, fmt.Errorf("%w: body lengths disagree", ErrCorrupt)
	}
	return f, n, scratch, nil
}

// frameCRC covers the header up to the CRC field, and the stored body.
func frameCRC(b []byte) uint32 {
	c := crc32.Update(0, castagnoli, b[:frameCRCOffset])
	return crc32.Update(c, castagnoli, b[frameHeaderSize:])
}
