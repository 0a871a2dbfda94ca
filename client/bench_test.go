package client

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

// BenchmarkRPC counts both sides: the fake server is as thin as it can be.
func BenchmarkRPC(b *testing.B) {
	out := []byte("42")
	f := newFake(b, func(_ *wire.Call, answer func(*wire.Answer)) {
		answer(&wire.Answer{Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: out}}})
	})
	c := f.client(Options{})
	b.ReportAllocs()
	b.SetParallelism(64)
	var failed atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := c.RPC(context.Background(), "flow-1", "get", nil, RPCOptions{ReadOnly: true}); err != nil {
				failed.Add(1)
			}
		}
	})
	if failed.Load() > 0 {
		b.Errorf("%d calls failed", failed.Load())
	}
}
