package journal

import (
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// The codecs are shared by all logs of the process and built at first use: an
// encoder's tables weigh more than an idle partition may.
const codecConcurrency = 2

var encoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderConcurrency(codecConcurrency),
		zstd.WithWindowSize(256<<10),
		zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderCRC(false)) // the frame has its own
	if err != nil {
		panic(err) // constant options
	}
	return e
})

var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(codecConcurrency),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(MaxFrameSize),
		zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic(err) // constant options
	}
	return d
})

// compress appends the compressed src to dst.
func compress(dst, src []byte) []byte { return encoder().EncodeAll(src, dst) }

// decompress appends src, which must decompress to exactly n bytes, to the
// empty dst.
func decompress(dst, src []byte, n int) ([]byte, error) {
	if cap(dst) < n {
		dst = make([]byte, 0, n)
	}
	out, err := decoder().DecodeAll(src, dst[:0:n])
	if err != nil {
		return dst, fmt.Errorf("%w: body does not decompress: %w", ErrCorrupt, err)
	}
	if len(out) != n {
		return dst, fmt.Errorf("%w: body decompresses to %d bytes, not %d", ErrCorrupt, len(out), n)
	}
	return out, nil
}
