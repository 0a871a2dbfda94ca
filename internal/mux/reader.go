package mux

import (
	"io"
	"strings"
	"sync/atomic"
	"unsafe"
)

// reader reads a connection through a buffer, parts of which it can lend for good.
// One goroutine uses it.
type reader struct {
	src   io.Reader
	buf   []byte
	lent  int           // bytes of buf that are not this reader's any more
	at    int           // first byte that was not taken
	end   int           // behind the last byte that was read
	dense bool          // more had come behind the last message that was lent
	reads atomic.Uint64 // that gave something
}

// read reads once into b, which has room.
func (r *reader) read(b []byte) (int, error) {
	// A connection that gives nothing and no error breaks the contract of Read:
	// it is not asked for ever.
	for range 100 {
		n, err := r.src.Read(b)
		if n > 0 {
			r.reads.Add(1)
			return n, nil
		}
		if err != nil {
			return 0, err
		}
	}
	return 0, io.ErrNoProgress
}

// peek gives the next n bytes, at most readBytes. They are valid until the next
// call.
func (r *reader) peek(n int) ([]byte, error) {
	for r.end-r.at < n {
		if err := r.more(); err != nil {
			return nil, err
		}
	}
	return r.buf[r.at : r.at+n], nil
}

// more reads once into the buffer. Of what it holds less than readBytes are not
// taken.
func (r *reader) more() error {
	switch {
	case r.at == r.end:
		r.at, r.end = r.lent, r.lent
	case r.end == len(r.buf) && r.lent < r.at:
		r.end = r.lent + copy(r.buf[r.lent:], r.buf[r.at:r.end])
		r.at = r.lent
	}
	if r.end == len(r.buf) { // all the rest is lent
		r.move(make([]byte, readBytes))
	}
	n, err := r.read(r.buf[r.end:])
	r.end += n
	return err
}

// move goes on in other memory.
func (r *reader) move(to []byte) {
	r.end = copy(to, r.buf[r.at:r.end])
	r.buf, r.at, r.lent = to, 0, 0
}

func (r *reader) skip(n int) { r.at += n }

// lend gives the next n bytes, at most lentBytes, to keep. Messages that come one
// by one get memory of about their own size, so that who keeps one keeps little
// else.
func (r *reader) lend(n int) ([]byte, error) {
	if len(r.buf)-r.at < n {
		size := n + headBytes // and the next one's head, if it has come
		if r.dense {
			size = lentBytes
		}
		r.move(uncleared(max(size, n, r.end-r.at)))
	}
	for r.end-r.at < n {
		m, err := r.read(r.buf[r.end:])
		if err != nil {
			return nil, err
		}
		r.end += m
	}
	b := r.buf[r.at : r.at+n : r.at+n]
	r.at += n
	r.lent = r.at
	r.dense = r.end > r.at
	return b, nil
}

// whole fills b with the next bytes, and what it gives up to n bytes: its memory
// grows with what has come.
func (r *reader) whole(b []byte, n int) ([]byte, error) {
	have := copy(b, r.buf[r.at:r.end])
	r.at += have
	for {
		for have < len(b) {
			m, err := r.read(b[have:])
			if err != nil {
				return nil, err
			}
			have += m
		}
		if have == n {
			return b, nil
		}
		more := make([]byte, min(n, 2*len(b)))
		copy(more, b)
		b = more
	}
}

// uncleared gives memory that holds whatever it did. To clear what is overwritten
// at once would be a tenth of the time of a large answer.
func uncleared(n int) []byte {
	var b strings.Builder
	b.Grow(n)
	b.WriteByte(0)
	// The builder is gone, so nobody else sees the string change.
	return unsafe.Slice(unsafe.StringData(b.String()), n)
}
