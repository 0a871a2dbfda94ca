package mux

import "encoding/binary"

// A decoder calls itself for each message within a message. What is nested a
// million deep in a large frame would take more stack than the runtime gives, and
// end the process: such a frame is refused before it is decoded.
const (
	// heavy is the size of a part from which it is looked into: below it, what is
	// nested takes a stack that can be afforded.
	heavy    = 128 << 10
	maxDepth = 64 // heavy parts within each other; those of the protocol are few
)

// tooDeep reports whether heavy parts lie in each other more than maxDepth deep.
// It takes each part that is long enough for a message, which a value need not
// be: then what does not read like one ends the look.
func tooDeep(b []byte, depth int) bool {
	for len(b) >= heavy {
		if depth > maxDepth {
			return true
		}
		part, rest, ok := nextField(b)
		if !ok {
			return false
		}
		if len(part) >= heavy && tooDeep(part, depth+1) {
			return true
		}
		b = rest
	}
	return false
}

// nextField reads one field; part is its bytes when it has a length.
func nextField(b []byte) (part, rest []byte, ok bool) {
	tag, n := binary.Uvarint(b)
	if n <= 0 || tag>>3 == 0 {
		return nil, nil, false
	}
	b = b[n:]
	switch tag & 7 {
	case 0:
		_, n = binary.Uvarint(b)
		return nil, b[max(n, 0):], n > 0
	case 1:
		return nil, b[min(8, len(b)):], len(b) >= 8
	case 5:
		return nil, b[min(4, len(b)):], len(b) >= 4
	case 2:
		size, n := binary.Uvarint(b)
		if n <= 0 || size > uint64(len(b)-n) {
			return nil, nil, false
		}
		return b[n : n+int(size)], b[n+int(size):], true
	}
	return nil, nil, false
}
