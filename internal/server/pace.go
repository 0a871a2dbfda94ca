package server

import (
	"context"
	"runtime/debug"
	rm "runtime/metrics"
	"time"
)

// How the collector is paced. A server at rest or with a few hundred turns a
// second saves memory: the heap may grow by restGC percent between two
// collections. One that journals busyEntries a second and more would spend a
// fifth of its time on that (docs/adr/0019): its heap may grow by up to busyGC percent, but
// not by more than headroom.
const (
	restGC      = 40
	busyGC      = 300
	busyEntries = 3000 // a second
	headroom    = 256 << 20
	paceEvery   = time.Second
	restAfter   = 5 // looks in a row that were not busy
)

// PaceGC lets the collector follow the load, from now until the server ends. It
// sets what holds for the whole process, so it is for a process that is a server.
func (s *Server) PaceGC() {
	debug.SetGCPercent(restGC)
	ctx, cancel := context.WithCancel(context.Background())
	s.stopPace = cancel
	s.upkeep.Add(1)
	go func() {
		defer s.upkeep.Done()
		s.pace(ctx)
	}()
}

func (s *Server) pace(ctx context.Context) {
	last, quiet, percent := s.applied(), 0, restGC
	for s.wait(ctx, paceEvery) {
		now := s.applied()
		quiet++
		if now-last >= busyEntries {
			quiet = 0
		}
		last = now
		want := percent
		switch {
		case quiet == 0:
			want = busyPercent(liveHeap())
		case quiet >= restAfter:
			want = restGC
		}
		if want > percent+percent/4 || want < percent-percent/4 {
			percent = want
			debug.SetGCPercent(percent) // stops the world for a moment: not for small changes
		}
	}
}

// busyPercent keeps the growth of a heap of so many live bytes within headroom.
func busyPercent(live uint64) int {
	return int(min(max(headroom*100/max(live, 1), restGC), busyGC))
}

func liveHeap() uint64 {
	sample := []rm.Sample{{Name: "/gc/heap/live:bytes"}}
	rm.Read(sample)
	return sample[0].Value.Uint64()
}

// applied sums what the partitions have written to their tables.
func (s *Server) applied() uint64 {
	n := uint64(0)
	for _, p := range s.parts {
		n += p.tables.AppliedLSN()
	}
	return n
}
