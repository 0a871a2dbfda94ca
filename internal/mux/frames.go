package mux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// A frame is a kind, the length of what follows as four bytes, the highest
// first, and that many bytes.
const (
	kindMessage = 0 // a protobuf message
	kindEnd     = 1 // the sender sends nothing more; of a server a code and a text say why
	kindBeat    = 2 // nothing: the sender is alive

	headBytes = 5
)

// Bounds of frames.
const (
	// readBytes is read at once. What is longer is read to where it stays, and
	// this much of it at most is copied.
	readBytes = 32 << 10
	// lentBytes is the memory that large messages share when they come one right
	// behind the other: to read several at once is a third of the work saved.
	lentBytes = 1 << 20
	// trusted is how much memory a length alone is worth; more comes with the bytes.
	trusted     = 1 << 20
	maxEndBytes = 4 << 10 // of the text that says why
)

// Times of frames. Each side says that it is alive when it has nothing else to
// say, so that a side that is busy sending need not answer.
const (
	BeatEvery = 10 * time.Second // between two calls of Beat
	maxSilent = 3                // beats without a byte from the other side
)

// Errors of frames.
var (
	ErrFrame  = errors.New("what came is not a frame of this protocol")
	ErrSilent = errors.New("nothing came for " + (maxSilent * BeatEvery).String())
)

// EndError is why the other side has ended the connection.
type EndError struct {
	Code byte // of gRPC
	Text string
}

func (e *EndError) Error() string { return e.Text }

// FramesConfig makes Frames.
type FramesConfig struct {
	Conn io.ReadWriter
	// Vector writes parts with one system call; nil = one part after the other
	// would cost more than to join them, as with TLS.
	Vector func(parts [][]byte) error
	Max    int  // bytes of a message to receive
	Alias  bool // as in Codec
}

// Frames carries messages over a connection, each in a frame of its own. One
// goroutine may receive while others send.
type Frames struct {
	cfg  FramesConfig
	in   reader
	over atomic.Bool // End was called

	beats sync.Mutex
	quiet int    // guarded by beats; how many since something came
	heard uint64 // guarded by beats; reads up to the last one

	mu    sync.Mutex
	sent  bool     // guarded by mu; since the last beat
	err   error    // guarded by mu; why nothing more can be sent
	parts [][]byte // guarded by mu; of the message that is being sent
}

// NewFrames makes frames of a connection; whoever made that closes it.
func NewFrames(cfg FramesConfig) *Frames {
	return &Frames{cfg: cfg, in: reader{src: cfg.Conn, buf: make([]byte, readBytes)}}
}

// Send writes a message. It has left this process when Send returns.
func (f *Frames) Send(m Message) error {
	n := m.SizeVT()
	if uint64(n) > 1<<32-1 {
		return fmt.Errorf("mux: a message has %d bytes, more than a frame takes", n)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	if f.cfg.Vector != nil && n >= spliceFrom {
		if done, err := f.splice(m, n); done {
			return f.wrote(err)
		}
	}
	b := Buffers.Get(headBytes + n)
	defer Buffers.Put(b)
	putHead(*b, kindMessage, n)
	if _, err := m.MarshalToSizedBufferVT((*b)[headBytes:]); err != nil {
		return err
	}
	_, err := f.cfg.Conn.Write(*b)
	return f.wrote(err)
}

// wrote notes what became of a frame: behind half of one nothing can follow.
// Guarded by mu.
func (f *Frames) wrote(err error) error {
	f.sent = true
	if err != nil {
		f.err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return f.err
}

// End says that nothing more is sent, and with a text why. What has come and was
// not received is dropped from then on.
func (f *Frames) End(code byte, text string) error {
	text = text[:min(len(text), maxEndBytes)]
	b := make([]byte, headBytes, headBytes+1+len(text))
	if text != "" {
		b = append(append(b, code), text...)
	}
	f.over.Store(true)
	return f.last(b)
}

// CloseSend says that nothing more is sent; what the other side sends can still
// be received.
func (f *Frames) CloseSend() error { return f.last(make([]byte, headBytes)) }

// last sends the end frame that b has room for the head of.
func (f *Frames) last(b []byte) error {
	putHead(b, kindEnd, len(b)-headBytes)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	_, err := f.cfg.Conn.Write(b)
	f.err = ErrClosed
	return err
}

// Beat is to be called every BeatEvery, also while the last call is stuck. It says
// that this side is alive if nothing else did, and gives ErrSilent when the other
// side has not: then the connection is to be closed.
func (f *Frames) Beat() error {
	if f.silent() {
		return ErrSilent
	}
	if !f.mu.TryLock() {
		return nil // something is being sent just now
	}
	defer f.mu.Unlock()
	if f.err == nil && !f.sent {
		b := make([]byte, headBytes)
		putHead(b, kindBeat, 0)
		_, err := f.cfg.Conn.Write(b)
		_ = f.wrote(err)
	}
	f.sent = false
	return nil
}

func (f *Frames) silent() bool {
	f.beats.Lock()
	defer f.beats.Unlock()
	f.quiet++
	if n := f.in.reads.Load(); n != f.heard {
		f.quiet, f.heard = 0, n
	}
	return f.quiet >= maxSilent
}

func putHead(b []byte, kind byte, n int) {
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(n))
}

// Recv reads the next message into m, which is empty but may have memory to use.
// io.EOF says that the other side has ended in good order, an *EndError that it
// said why, and all else that the connection is of no use any more.
func (f *Frames) Recv(m Message) error {
	for {
		head, err := f.in.peek(headBytes)
		if err != nil {
			return broken(err)
		}
		kind, n := head[0], binary.BigEndian.Uint32(head[1:])
		f.in.skip(headBytes)
		switch {
		case f.over.Load():
			return ErrClosed
		case kind == kindMessage && uint64(n) <= uint64(f.cfg.Max):
			return f.message(int(n), m)
		case kind == kindMessage:
			return fmt.Errorf("%w: a message of %d bytes, at most %d are taken", ErrFrame, n, f.cfg.Max)
		case kind == kindBeat && n == 0:
		case kind == kindEnd && n <= 1+maxEndBytes:
			return f.ended(int(n))
		default:
			return fmt.Errorf("%w: kind %d, length %d", ErrFrame, kind, n)
		}
	}
}

// broken is the error of a connection that ended between or within frames
// without a word.
func broken(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (f *Frames) ended(n int) error {
	b, err := f.in.peek(n)
	switch {
	case err != nil:
		return broken(err)
	case n == 0:
		return io.EOF
	}
	return &EndError{Code: b[0], Text: string(b[1:])}
}

// message reads and decodes n bytes.
func (f *Frames) message(n int, m Message) error {
	switch {
	case n <= readBytes:
		b, err := f.in.peek(n)
		if err != nil {
			return broken(err)
		}
		err = decode(b, m, false)
		f.in.skip(n)
		return err
	case n > trusted:
		b, err := f.in.whole(make([]byte, trusted), n)
		if err != nil {
			return broken(err)
		}
		return decode(b, m, f.cfg.Alias)
	case f.cfg.Alias:
		b, err := f.in.lend(n)
		if err != nil {
			return broken(err)
		}
		return decode(b, m, true)
	}
	b := Buffers.Get(n)
	defer Buffers.Put(b)
	if _, err := f.in.whole(*b, n); err != nil {
		return broken(err)
	}
	return decode(*b, m, false)
}
