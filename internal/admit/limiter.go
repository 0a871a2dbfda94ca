package admit

import "sync/atomic"

// Limiter bounds how many of one thing (connections, requests) are open at
// once, without regard to who opens them. It is safe for concurrent use.
type Limiter struct {
	limit   int64
	open    atomic.Int64
	refused atomic.Uint64
}

// NewLimiter makes a limiter; a limit below 1 means none.
func NewLimiter(limit int) *Limiter { return &Limiter{limit: int64(limit)} }

// TryAcquire takes one place, or reports false. It never blocks. A place that
// was taken is given back with exactly one Release.
func (l *Limiter) TryAcquire() bool {
	if n := l.open.Add(1); l.limit >= 1 && n > l.limit {
		l.open.Add(-1)
		l.refused.Add(1)
		return false
	}
	return true
}

// Release gives one place back. It panics when none is taken, because then the
// limit would no longer hold.
func (l *Limiter) Release() {
	if l.open.Add(-1) < 0 {
		panic("admit: Release without TryAcquire")
	}
}

// Open is how many places are taken. While a refusal is being counted it may
// be above the limit for an instant.
func (l *Limiter) Open() int { return int(l.open.Load()) }

// Refused is how many calls of TryAcquire reported false.
func (l *Limiter) Refused() uint64 { return l.refused.Load() }
