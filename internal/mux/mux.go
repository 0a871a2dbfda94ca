// Package mux holds what both ends of a Perdure gRPC stream share: the codec,
// and the sender that gathers what is written meanwhile into one frame, so that
// a busy stream carries many tasks, results or calls a frame.
package mux

import (
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

// message is what vtprotobuf gives every message.
type message interface {
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
	UnmarshalVT([]byte) error
}

// Codec is the gRPC codec of both ends: protobuf without reflection. Give it
// with grpc.ForceCodecV2 and grpc.ForceServerCodecV2.
type Codec struct{}

var _ encoding.CodecV2 = Codec{}

// Name implements encoding.CodecV2: on the wire it is plain protobuf.
func (Codec) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (Codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(message)
	if !ok {
		return nil, fmt.Errorf("mux: %T is not a message of this protocol", v)
	}
	n := m.SizeVT()
	if mem.IsBelowBufferPoolingThreshold(n) {
		b := make([]byte, n)
		_, err := m.MarshalToSizedBufferVT(b)
		return mem.BufferSlice{mem.SliceBuffer(b)}, err
	}
	pool := mem.DefaultBufferPool()
	b := pool.Get(n)
	if _, err := m.MarshalToSizedBufferVT((*b)[:n]); err != nil {
		pool.Put(b)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(b, pool)}, nil
}

// Unmarshal implements encoding.CodecV2. Messages own their memory.
func (Codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(message)
	if !ok {
		return fmt.Errorf("mux: %T is not a message of this protocol", v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	return m.UnmarshalVT(buf.ReadOnlyData())
}

// Sender writes frames of type F on one goroutine; what is put while a frame is
// being sent goes together into the next one. Safe for concurrent use.
type Sender[F any] struct {
	send  func(*F) error
	bound int // of weight that waits

	mu     sync.Mutex
	wake   sync.Cond
	next   *F  // guarded by mu; nil = nothing waits
	weight int // guarded by mu; of next
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

// Put lets fn add to the next frame. It never blocks on the network; fn runs
// under the sender's lock. A frame takes what exceeds the bound when it was
// empty before, so that anything can be sent.
func (s *Sender[F]) Put(weight int, fn func(*F)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed != nil {
		return s.closed
	}
	if s.next != nil && s.weight+weight > s.bound {
		return ErrFull
	}
	if s.next == nil {
		s.next = new(F)
		s.wake.Signal()
	}
	s.weight += weight
	fn(s.next)
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
	for {
		s.mu.Lock()
		for s.next == nil && s.closed == nil {
			s.wake.Wait()
		}
		f := s.next
		s.next, s.weight = nil, 0
		s.mu.Unlock()
		if f == nil {
			return
		}
		if err := s.send(f); err != nil {
			s.mu.Lock()
			if s.closed == nil {
				s.closed = fmt.Errorf("%w: %w", ErrClosed, err)
			}
			s.next = nil
			s.mu.Unlock()
			return
		}
	}
}
