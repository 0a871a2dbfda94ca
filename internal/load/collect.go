package load

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
)

// collector gathers attempts from all workers; safe for concurrent use.
type collector struct {
	err   io.Writer
	label string

	mu       sync.Mutex
	turns    []attempt        // completed; guarded by mu
	refused  []attempt        // rejected; guarded by mu
	errors   map[string]int64 // by class; guarded by mu
	dropped  int64            // beyond maxSamples; guarded by mu
	rejected int64            // guarded by mu
}

func newCollector(err io.Writer, label string) *collector {
	return &collector{err: err, label: label, errors: map[string]int64{}}
}

func (c *collector) add(a attempt) {
	failed := a.class != ""
	if failed {
		c.fail(a.class, a.detail)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	a.class, a.detail = "", "" // let the example's memory go
	switch {
	case a.rejected:
		c.rejected++
		c.keep(&c.refused, a)
	case !failed:
		c.keep(&c.turns, a)
	}
}

// keep is called under mu.
func (c *collector) keep(to *[]attempt, a attempt) {
	if len(*to) >= maxSamples {
		c.dropped++
		return
	}
	*to = append(*to, a)
}

// fail counts an error and prints the first of its class.
func (c *collector) fail(class, detail string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.errors[class]++
	if c.errors[class] == 1 {
		_, _ = fmt.Fprintf(c.err, "load: %s: first %s: %s\n", c.label, class, detail)
	}
}

// total counts the errors of all classes, or of one.
func (c *collector) total(class string) (n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, v := range c.errors {
		if class == "" || class == k {
			n += v
		}
	}
	return n
}

func (c *collector) kinds() map[string]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.errors) == 0 {
		return nil
	}
	return maps.Clone(c.errors)
}

// window are the attempts of one kind that started in [t0, t1).
func within(all []attempt, t0, t1 int64) []attempt {
	return slices.DeleteFunc(slices.Clone(all), func(a attempt) bool { return a.start < t0 || a.start >= t1 })
}

// weight is the number of turns in [t0, t1), each counted by the share of its
// time that lies inside.
func weight(turns []attempt, t0, t1 int64) float64 {
	var n float64
	for _, a := range turns {
		from, to := max(a.start, t0), min(a.end, t1)
		switch {
		case to > from:
			n += float64(to-from) / float64(a.end-a.start)
		case a.start == a.end && a.start >= t0 && a.start < t1:
			n++
		}
	}
	return n
}

// Quantiles of a latency in milliseconds, exact (nearest rank).
type Quantiles struct {
	P50 float64  `json:"p50"`
	P95 float64  `json:"p95"`
	P99 float64  `json:"p99"`
	Max *float64 `json:"max,omitempty"`
}

// quantiles sorts ns and reads its ranks; all are 0 without samples.
func quantiles(ns []int64) Quantiles {
	if len(ns) == 0 {
		return Quantiles{}
	}
	slices.Sort(ns)
	rank := func(percent int) float64 {
		i := (len(ns)*percent + 99) / 100 // nearest rank, counted from 1
		return millis(ns[max(i, 1)-1])
	}
	most := millis(ns[len(ns)-1])
	return Quantiles{P50: rank(50), P95: rank(95), P99: rank(99), Max: &most}
}

// millis rounds to a microsecond, which is finer than anything here means.
func millis(ns int64) float64 { return float64((ns+500)/1000) / 1000 }

func spans(all []attempt, of func(attempt) int64) []int64 {
	out := make([]int64, 0, len(all))
	for _, a := range all {
		if v := of(a); v >= 0 {
			out = append(out, v)
		}
	}
	return out
}

func turnTime(a attempt) int64    { return a.end - a.start }
func serviceTime(a attempt) int64 { return a.end - a.sent }

func ttft(a attempt) int64 {
	if a.first == 0 {
		return -1
	}
	return a.first - a.start
}
