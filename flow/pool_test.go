package flow

import (
	"sync"
	"sync/atomic"
	"testing"
)

type jobFunc func()

func (f jobFunc) run() { f() }

// TestPoolRunsBlockedJobsAtOnce: all of them meet, so none waits for another.
func TestPoolRunsBlockedJobsAtOnce(t *testing.T) {
	const n = 64
	p := newPool(n)
	for range 3 { // the second time on goroutines that are there
		var meet, done sync.WaitGroup
		meet.Add(n)
		done.Add(n)
		for range n {
			p.put(jobFunc(func() {
				meet.Done()
				meet.Wait()
				done.Done()
			}))
		}
		done.Wait()
	}
	<-p.stop()
	if p.size != 0 {
		t.Errorf("%d goroutines are left", p.size)
	}
}

func TestPoolRunsEachJobOnce(t *testing.T) {
	p := newPool(8)
	var ran atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 1000 {
				p.put(jobFunc(func() { ran.Add(1) }), jobFunc(func() { ran.Add(1) }))
			}
		})
	}
	all.Wait()
	<-p.stop()
	if ran.Load() != 8000 || p.size > 8 {
		t.Errorf("%d jobs ran on %d goroutines", ran.Load(), p.size)
	}
}

func TestPoolThatNeverRan(t *testing.T) { <-newPool(3).stop() }

func BenchmarkPool(b *testing.B) {
	p := newPool(256)
	var all sync.WaitGroup
	job := jobFunc(all.Done)
	b.ReportAllocs()
	for range b.N {
		all.Add(1)
		p.put(job)
	}
	all.Wait()
	<-p.stop()
}
