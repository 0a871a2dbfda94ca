package journal

import (
	"encoding/binary"
	"fmt"
	"iter"
)

// AppendEntry appends one entry of a frame's body to dst: the payload behind
// its length as an unsigned varint.
func AppendEntry(dst, payload []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(payload)))
	return append(dst, payload...)
}

// Entries iterates over the payloads of a body, in order, without copying:
// they alias body. A malformed body yields (nil, ErrCorrupt) and ends.
func Entries(body []byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for rest := body; len(rest) > 0; {
			n, w := binary.Uvarint(rest)
			if w <= 0 || n > uint64(len(rest)-w) {
				yield(nil, fmt.Errorf("%w: entry at byte %d of the body runs over its end", ErrCorrupt, len(body)-len(rest)))
				return
			}
			end := w + int(n)
			if !yield(rest[w:end:end], nil) {
				return
			}
			rest = rest[end:]
		}
	}
}
