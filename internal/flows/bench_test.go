package flows

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// bench keeps so many calls in flight; each is made by next, and answers run on
// partition goroutines.
func (w *world) bench(b *testing.B, inFlight int, next func(i int) *wire.Call) {
	b.Helper()
	go func() {
		for range w.steps { // nobody runs them
		}
	}()
	b.ReportAllocs()
	b.ResetTimer()
	room := make(chan struct{}, inFlight)
	var all sync.WaitGroup
	all.Add(b.N)
	for i := range b.N {
		room <- struct{}{}
		w.svc.Do(w.ctx, tenant, next(i), func(a *wire.Answer) {
			if a.Error != nil {
				b.Errorf("%v", a.Error)
			}
			<-room
			all.Done()
		})
	}
	all.Wait()
}

const benchFlows = 256

func benchWorld(b *testing.B, as ...*wire.Attribute) *world {
	w := newWorld(b)
	for i := range benchFlows {
		w.must(start(&wire.StartRequest{FlowId: fmt.Sprint(i), FlowType: "order", Attributes: as}))
	}
	return w
}

func BenchmarkGetTenAttributesOf16KiB(b *testing.B) {
	var as []*wire.Attribute
	for i := range 10 {
		as = append(as, attr(fmt.Sprintf("line.%d", i), `"`+strings.Repeat("x", 16<<10)+`"`))
	}
	w := benchWorld(b, as...)
	w.bench(b, 256, func(i int) *wire.Call { return get(fmt.Sprint(i % benchFlows)) })
}

func BenchmarkReadRPC(b *testing.B) {
	w := benchWorld(b, attr("total", "1"))
	w.mu.Lock()
	w.rpcs = nil
	w.mu.Unlock()
	w.svc.cfg.Workers = instant{w}
	w.bench(b, 256, func(i int) *wire.Call { return rpc(fmt.Sprint(i%benchFlows), "total", "") })
}

func BenchmarkLockedRPC(b *testing.B) {
	for _, flows := range []int{1, benchFlows} {
		b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
			w := benchWorld(b, attr("total", "1"))
			w.svc.cfg.Workers = instant{w}
			w.bench(b, 128, func(i int) *wire.Call { return rpc(fmt.Sprint(i%flows), "add", "1") })
		})
	}
}

func BenchmarkPublish(b *testing.B) {
	w := benchWorld(b)
	w.bench(b, 256, func(i int) *wire.Call {
		if i/benchFlows%10 == 9 {
			return drop(fmt.Sprint(i%benchFlows), "in")
		}
		return publish(fmt.Sprint(i%benchFlows), "in", "", `{"n":1}`)
	})
}

func BenchmarkSetAttributes(b *testing.B) {
	w := benchWorld(b)
	w.bench(b, 256, func(i int) *wire.Call { return setAttr(fmt.Sprint(i%benchFlows), attr("total", "7")) })
}

func BenchmarkStart(b *testing.B) {
	w := benchWorld(b)
	w.bench(b, 256, func(i int) *wire.Call {
		return start(&wire.StartRequest{FlowId: fmt.Sprint("n", i), FlowType: "order", Step: "pay", Input: []byte("1")})
	})
}

// instant is workers that answer at once.
type instant struct{ *world }

func (instant) Call(_, _ string, t *wire.RpcTask, _ time.Duration, done func(*wire.RpcResult, error)) {
	if !t.Locked {
		done(&wire.RpcResult{Update: &wire.Update{Output: t.Attributes[0].Value}}, nil)
		return
	}
	done(adder(t), nil)
}
