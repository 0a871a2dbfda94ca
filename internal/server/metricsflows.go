package server

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxSeries bounds the series of steps and of calls: names come from users'
// programs. Those beyond are counted as "other".
const maxSeries = 2000

// flowMetrics is the histograms of users' steps and calls.
type flowMetrics struct {
	attempts *prometheus.HistogramVec // flow_type, step, outcome
	waits    *prometheus.HistogramVec // flow_type, step
	calls    *prometheus.HistogramVec // flow_type, rpc, outcome

	series sync.Map // seriesKey → *stepSeries or prometheus.Observer; a lookup without building labels
	count  atomic.Int64
}

type seriesKey struct {
	kind                    byte // 'a' attempt, 'c' call
	flowType, name, outcome string
}

type stepSeries struct{ took, queued prometheus.Observer }

func newFlowMetrics(ns string) *flowMetrics {
	buckets := []float64{0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000}
	vec := func(name, help string, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: ns, Name: name, Help: help, Buckets: buckets}, labels)
	}
	return &flowMetrics{
		attempts: vec("flow_step_duration_ms", "Attempts of users' steps from hand-out to answer; outcome: completed, retried, failed, timeout, lost, late, refused.", "flow_type", "step", "outcome"),
		waits:    vec("flow_step_queue_ms", "Time a step waited for a worker.", "flow_type", "step"),
		calls:    vec("flow_rpc_duration_ms", "RPCs from hand-out to answer; outcome: completed, failed, timeout, lost, cancelled, overloaded.", "flow_type", "rpc", "outcome"),
	}
}

func (m *flowMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.attempts, m.waits, m.calls}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// admit makes the names of a series "other" when there are too many.
func (m *flowMetrics) admit(k *seriesKey) {
	if m.count.Add(1) > maxSeries {
		k.flowType, k.name = "other", "other"
	}
}

func (m *flowMetrics) attempt(flowType, step, outcome string, took, queued time.Duration) {
	k := seriesKey{'a', flowType, step, outcome}
	v, ok := m.series.Load(k)
	if !ok {
		own := k
		m.admit(&own)
		v = &stepSeries{m.attempts.WithLabelValues(own.flowType, own.name, outcome), m.waits.WithLabelValues(own.flowType, own.name)}
		if m.count.Load() <= maxSeries {
			m.series.Store(k, v)
		}
	}
	s := v.(*stepSeries)
	s.took.Observe(ms(took))
	s.queued.Observe(ms(queued))
}

func (m *flowMetrics) rpc(flowType, name, outcome string, took time.Duration) {
	k := seriesKey{'c', flowType, name, outcome}
	v, ok := m.series.Load(k)
	if !ok {
		own := k
		m.admit(&own)
		v = m.calls.WithLabelValues(own.flowType, own.name, outcome)
		if m.count.Load() <= maxSeries {
			m.series.Store(k, v)
		}
	}
	v.(prometheus.Observer).Observe(ms(took))
}
