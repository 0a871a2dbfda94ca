// Package mux holds what both ends of a Perdure stream share: the codec, the
// sender that gathers what is written meanwhile into one frame, so that a busy
// stream carries many tasks, results or calls a frame, and the frames that carry
// calls and answers without gRPC.
package mux

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// Errors of Put.
var (
	ErrFull   = errors.New("the stream has too much waiting to be sent")
	ErrClosed = errors.New("the stream is closed")
)

// Message is what vtprotobuf gives every message.
type Message interface {
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
	UnmarshalVT([]byte) error
	UnmarshalVTUnsafe([]byte) error
}

// Codec is the gRPC codec of both ends: protobuf without reflection. Give it
// with grpc.ForceCodecV2 and grpc.ForceServerCodecV2.
type Codec struct {
	// Alias lets the parts of a large message share one piece of memory, which
	// saves a copy, and keeps all of it as long as one part is used: for a reader
	// that takes values and lets go of them.
	Alias bool
}

// aliasFrom is the size of messages from which sharing pays.
const aliasFrom = 32 << 10

var _ encoding.CodecV2 = Codec{}

// Name implements encoding.CodecV2: on the wire it is plain protobuf.
func (Codec) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (Codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(Message)
	if !ok {
		return nil, fmt.Errorf("mux: %T is not a message of this protocol", v)
	}
	n := m.SizeVT()
	if mem.IsBelowBufferPoolingThreshold(n) {
		b := make([]byte, n)
		_, err := m.MarshalToSizedBufferVT(b)
		return mem.BufferSlice{mem.SliceBuffer(b)}, err
	}
	b := Buffers.Get(n)
	if _, err := m.MarshalToSizedBufferVT((*b)[:n]); err != nil {
		Buffers.Put(b)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(b, Buffers)}, nil
}

// Unmarshal implements encoding.CodecV2. Messages own their memory.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(Message)
	if !ok {
		return fmt.Errorf("mux: %T is not a message of this protocol", v)
	}
	if c.Alias && data.Len() >= aliasFrom {
		parts := make([][]byte, len(data))
		for i, b := range data {
			parts[i] = b.ReadOnlyData()
		}
		return decode(bytes.Join(parts, nil), m, true) // unlike make, it does not clear what it fills
	}
	buf := data.MaterializeToBuffer(Buffers)
	defer buf.Free()
	return decode(buf.ReadOnlyData(), m, false)
}

// decode reads a message; with alias it keeps b, else it owns its memory.
func decode(b []byte, m Message, alias bool) error {
	switch {
	case tooDeep(b, 0):
		return errTooDeep
	case alias:
		return m.UnmarshalVTUnsafe(b)
	}
	return m.UnmarshalVT(b)
}

var errTooDeep = fmt.Errorf("mux: messages lie in each other more than %d deep", maxDepth)

// frameWeight is what a frame gathers before the next one is begun: larger ones
// would leave the caches of the processor between the steps of their way.
const frameWeight = 256 << 10

// Sender writes frames of type F on one goroutine; what is put while a frame is
// being sent goes together into the next one. Safe for concurrent use.
type Sender[F any] struct {
	send  func(*F) error
	bound int // of weight that waits

	mu     sync.Mutex
	wake   sync.Cond
	next   []*F // guarded by mu; what waits, oldest first
	last   int  // guarded by mu; weight of the youngest
	weight int  // guarded by mu; of all that wait
	closed error
	done   chan struct{}
}

// NewSender starts a sender; bound is how much weight (bytes, say) may wait.
// send is called on one goroutine, and must not keep the frame.
func NewSender[F any](bound int, send func(*F) error) *Sender[F] {
	s := &Sender[F]{send: send, bound: bound, done: make(chan struct{})}
	s.wake.L = &s.mu
	go s.run()
	return s
}

// Put lets fn add to the youngest frame that waits. It never blocks on the
// network; fn runs under the sender's lock. What exceeds the bound is taken when
// nothing else waits, so that anything can be sent.
func (s *Sender[F]) Put(weight int, fn func(*F)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed != nil {
		return s.closed
	}
	n := len(s.next)
	if n > 0 && s.weight+weight > s.bound {
		return ErrFull
	}
	if n == 0 || s.last+weight > frameWeight {
		s.next = append(s.next, new(F))
		s.last = 0
		if n++; n == 1 {
			s.wake.Signal()
		}
	}
	s.last += weight
	s.weight += weight
	fn(s.next[n-1])
	return nil
}

// Close refuses further frames with err (nil = ErrClosed), sends what waits
// when flush is set, and returns when nothing more is sent.
func (s *Sender[F]) Close(err error, flush bool) {
	if err == nil {
		err = ErrClosed
	}
	s.mu.Lock()
	if s.closed == nil {
		s.closed = err
	}
	if !flush {
		s.next = nil
	}
	s.wake.Signal()
	s.mu.Unlock()
	<-s.done
}

// Done is closed when the sender has ended.
func (s *Sender[F]) Done() <-chan struct{} { return s.done }

func (s *Sender[F]) run() {
	defer close(s.done)
	var frames []*F
	for {
		s.mu.Lock()
		for len(s.next) == 0 && s.closed == nil {
			s.wake.Wait()
		}
		frames, s.next = s.next, frames[:0]
		s.weight, s.last = 0, 0
		s.mu.Unlock()
		if len(frames) == 0 {
			return
		}
		for i, f := range frames {
			if err := s.send(f); err != nil {
				s.fail(err)
				return
			}
			frames[i] = nil
		}
	}
}

func (s *Sender[F]) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed == nil {
		s.closed = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	s.next = nil
}
