package server

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/perdure-dev/perdure/internal/partition"
)

// maxSeries bounds the series of steps and of calls: names come from users'
// programs. Those beyond are counted as "other".
const maxSeries = 2000

// flowMetrics is the series of users' steps and calls.
type flowMetrics struct {
	attempts *prometheus.HistogramVec // flow_type, step, outcome
	waits    *prometheus.HistogramVec // flow_type, step
	calls    *prometheus.HistogramVec // flow_type, rpc, outcome
	entries  *prometheus.Desc         // flow_type, step

	mu      sync.Mutex
	counted map[partition.StepOf]bool // guarded by mu; steps whose entries have a series of their own

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
		entries: prometheus.NewDesc(prometheus.BuildFQName(ns, "", "flow_step_entries_total"),
			"Commands journaled (commits) of steps: results, retries, and starts that are commands of their own.", []string{"flow_type", "step"}, nil),
		counted: map[partition.StepOf]bool{},
		calls:   vec("flow_rpc_duration_ms", "RPCs from hand-out to answer; outcome: completed, failed, timeout, lost, cancelled, overloaded.", "flow_type", "rpc", "outcome"),
	}
}

func (m *flowMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.attempts, m.waits, m.calls}
}

// collectEntries shows the counts of entries by step; those of steps beyond
// maxSeries are together. A step keeps its series.
func (m *flowMetrics) collectEntries(by map[partition.StepOf]uint64, ch chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	shown := make(map[partition.StepOf]uint64, len(by))
	for step, n := range by {
		if !m.counted[step] {
			if len(m.counted) < maxSeries {
				m.counted[step] = true
			} else {
				step = partition.StepOf{FlowType: "other", Step: "other"}
			}
		}
		shown[step] += n
	}
	for step, n := range shown {
		ch <- prometheus.MustNewConstMetric(m.entries, prometheus.CounterValue, float64(n), step.FlowType, step.Step)
	}
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
