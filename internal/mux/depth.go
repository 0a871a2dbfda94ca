package mux

import "github.com/planetscale/vtprotobuf/protohelpers"

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

// nextField reads one field; part is its bytes when it has a length. It reads what
// the decoder reads: a field that only the decoder understood would hide all that
// follows it.
func nextField(b []byte) (part, rest []byte, ok bool) {
	tag, n := varint(b)
	if n == 0 || int32(tag>>3) <= 0 {
		return nil, nil, false
	}
	if tag&7 != 2 {
		n, err := protohelpers.Skip(b)
		if err != nil || n > len(b) {
			return nil, nil, false
		}
		return nil, b[n:], true
	}
	b = b[n:]
	size, n := varint(b)
	if n == 0 || size > uint64(len(b)-n) {
		return nil, nil, false
	}
	return b[n : n+int(size)], b[n+int(size):], true
}

// varint reads a number as the decoder does: the bits beyond 64 are dropped. n is
// 0 for what is none.
func varint(b []byte) (v uint64, n int) {
	for shift := 0; shift < 64 && n < len(b); shift += 7 {
		c := b[n]
		n++
		v |= uint64(c&0x7f) << shift
		if c < 0x80 {
			return v, n
		}
	}
	return 0, 0
}
