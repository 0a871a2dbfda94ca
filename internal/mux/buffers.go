package mux

import "sync"

// Buffers is the memory that messages are encoded to and frames are read into,
// for both ends: grpc's own pool clears each buffer that it gives, which is a
// tenth of the time of a large answer. What is taken from it holds old bytes
// until it is written: all its users write what they read. Safe for concurrent
// use.
var Buffers = &bufferPool{}

// classes are the sizes of pooled buffers: those of HTTP/2 frames and of ours.
var classes = [...]int{1 << 10, 4 << 10, 16 << 10, 64 << 10, 192 << 10, 384 << 10, 1 << 20}

type bufferPool struct{ pools [len(classes)]sync.Pool }

// Get implements mem.BufferPool.
func (p *bufferPool) Get(n int) *[]byte {
	for i, size := range classes {
		if n > size {
			continue
		}
		if b, _ := p.pools[i].Get().(*[]byte); b != nil {
			*b = (*b)[:n]
			return b
		}
		b := make([]byte, n, size)
		return &b
	}
	b := make([]byte, n)
	return &b
}

// Put implements mem.BufferPool.
func (p *bufferPool) Put(b *[]byte) {
	for i, size := range classes {
		if cap(*b) == size {
			p.pools[i].Put(b)
			return
		}
	}
}
