package blob

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Latency is a distribution of delays: log-normal through two quantiles, which
// is the shape of a store's answers, and cut at maxLatencyFactor × P99. A P50
// of 0 is no delay; a P99 not above P50 is always P50.
type Latency struct{ P50, P99 time.Duration }

const (
	maxLatencyFactor = 4
	z99              = 2.3263478740408408 // the 99th percentile of the normal distribution
)

// S3Like is what PUTs of a few kilobytes take on S3 from the same region.
var S3Like = Latency{P50: 25 * time.Millisecond, P99: 120 * time.Millisecond}

// Around is nearly constant: one request in a hundred takes a quarter longer.
func Around(d time.Duration) Latency { return Latency{P50: d, P99: d + d/4} }

// Draw takes one delay. It draws two values whatever the distribution is, so
// that a change of it leaves all other draws of r in place.
func (l Latency) Draw(r env.Rand) time.Duration {
	u1 := float64(r.Uint64()>>11+1) / (1 << 53) // (0, 1]
	u2 := float64(r.Uint64()>>11) / (1 << 53)
	if l.P50 <= 0 || l.P99 <= l.P50 {
		return max(l.P50, 0)
	}
	sigma := math.Log(float64(l.P99)/float64(l.P50)) / z99
	normal := math.Sqrt(-2*math.Log(u1)) * math.Cos(2*math.Pi*u2) // Box and Muller
	return time.Duration(min(float64(l.P50)*math.Exp(sigma*normal), maxLatencyFactor*float64(l.P99)))
}

// Latencies are the delays of each Kind.
type Latencies [NumKinds]Latency

// Delayed wraps inner and adds a delay to each call: a half before the store
// does it, a half after. Calls run beside each other, as they do over a network.
// r is used by one call at a time.
func Delayed(inner Store, l Latencies, clock env.Clock, r env.Rand) *Faulty {
	return NewFaulty(inner, func(op Op) Fault {
		d := l[op.Kind].Draw(r)
		return Fault{Before: d / 2, After: d - d/2}
	}, FaultHooks{Sleep: SleepBy(clock)})
}

// SleepBy passes time on clock: its result returns after d with nil, or with the
// context's error as soon as that ends.
func SleepBy(clock env.Clock) func(ctx context.Context, d time.Duration) error {
	return func(ctx context.Context, d time.Duration) error {
		if d <= 0 {
			return ctx.Err()
		}
		over := make(chan struct{})
		timer := clock.AfterFunc(d, func() { close(over) })
		defer timer.Stop()
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("while waiting: %w", ctx.Err())
		}
	}
}
