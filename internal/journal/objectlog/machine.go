package objectlog

import (
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Action is a request to the store that a Reader or a Writer asks for. Each
// must be answered to the one that asked, by GetDone or PutDone with its Seq.
type Action struct {
	Put     bool // with IfNoneMatch; else a Get
	Seq     uint64
	Key     string
	Data    []byte // of a Put; unchanged until it is answered
	Attempt int    // counts the Puts of this object from 1
}

// Backoff of requests that the store did not do, or may not have done.
const (
	minBackoff = 20 * time.Millisecond
	maxBackoff = time.Second
	// DefaultGiveUp is how long a request is tried again where no lease ends it.
	DefaultGiveUp = 60 * time.Second
)

// backoff is the wait before attempt n (2 or more): doubled each time, the
// upper half of it random.
func backoff(n int, r env.Rand) time.Duration {
	d := min(minBackoff<<min(n-2, 10), maxBackoff)
	if r == nil {
		return d
	}
	return d/2 + time.Duration(r.Uint64()%uint64(d/2))
}

// soonest is the earlier of two instants; zero is none.
func soonest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
