package server

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/sink"
)

// metrics is what /metrics shows. Counters of the hot path are atomics of the
// client library; the rest is read when asked for.
type metrics struct {
	s        *Server
	registry *prometheus.Registry
	turns    *prometheus.HistogramVec
	prompt   prometheus.Counter
	output   prometheus.Counter
	flows    *flowMetrics
	entries  *prometheus.Desc // by flow type
	gauges   []gauge
}

// gauge is a value read at the scrape.
type gauge struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func(*reading) float64
}

// reading is one consistent look at the parts.
type reading struct {
	hot       int
	waiting   int
	partition partition.Stats
	syncs     uint64
	journal   uint64
	sinks     sink.Stats
}

func newMetrics(s *Server) *metrics {
	ns := s.cfg.Metrics.Namespace
	m := &metrics{
		s: s, registry: prometheus.NewRegistry(),
		turns: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: ns, Name: "turn_duration_ms", Help: "Turns from accepted input to terminal event, by outcome.",
			Buckets: []float64{1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2000, 2500, 5000, 10_000, 30_000, 60_000, 300_000}}, []string{"outcome"}),
		prompt: prometheus.NewCounter(prometheus.CounterOpts{Namespace: ns, Name: "tokens_prompt_total", Help: "Prompt tokens, as the providers count them."}),
		output: prometheus.NewCounter(prometheus.CounterOpts{Namespace: ns, Name: "tokens_completion_total", Help: "Completion tokens, as the providers count them."}),
	}
	m.flows = newFlowMetrics(ns)
	m.entries = prometheus.NewDesc(prometheus.BuildFQName(ns, "", "flow_entries_total"), "Commands journaled, by flow type.", []string{"flow_type"}, nil)
	m.addGauges(ns)
	m.registry.MustRegister(m.flows.collectors()...)
	if s.objects != nil {
		m.registry.MustRegister(newStoreMetrics(ns, s.objects.measured.Stats))
	}
	m.registry.MustRegister(m.turns, m.prompt, m.output, m,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) addGauges(ns string) {
	add := func(name, help string, kind prometheus.ValueType, read func(*reading) float64) {
		m.gauges = append(m.gauges, gauge{prometheus.NewDesc(prometheus.BuildFQName(ns, "", name), help, nil, nil), kind, read})
	}
	const g, c = prometheus.GaugeValue, prometheus.CounterValue
	gate := m.s.gate
	add("in_flight_turns", "Turns accepted and not ended, waiting ones too.", g, func(*reading) float64 { return float64(gate.Stats().InFlight) })
	add("admission_limit", "kernel.max_in_flight_turns; 0 = off.", g, func(*reading) float64 { return float64(gate.Stats().Limit) })
	add("admission_rejected_total", "Turns refused with 429.", c, func(*reading) float64 {
		st := gate.Stats()
		return float64(st.OverLimit + st.OverShare)
	})
	add("active_sessions", "Flows decoded in memory: sessions, and flows of users' programs.", g, func(r *reading) float64 { return float64(r.hot) })
	add("active_processes", "Step attempts running in this process.", g, func(*reading) float64 { return float64(m.s.pool.Running()) })
	sinks := func(read func(sink.Stats) float64) func(*reading) float64 {
		return func(r *reading) float64 { return read(r.sinks) }
	}
	add("event_db_write_wait_ms", "Time the newest written event waited from its commit to the event log.", g, sinks(func(s sink.Stats) float64 { return s.Wait.Last }))
	add("message_store_queue", "Committed events that wait to be written to the logs.", g, sinks(func(s sink.Stats) float64 { return float64(s.OutboxRows) }))
	add("access_log_queue", "Access records that wait to be written.", g, sinks(func(s sink.Stats) float64 { return float64(s.AccessQueue) }))
	add("event_db_dropped_total", "Events left out of the event log by its backlog bound; never transcripts or terminal events, and never from the sessions' own logs.", c, sinks(func(s sink.Stats) float64 { return float64(s.EventsDropped) }))
	add("access_log_dropped_total", "Access records dropped by the queue's bound.", c, sinks(func(s sink.Stats) float64 { return float64(s.AccessDropped) }))
	add("log_write_errors_total", "Failed writes to the logs; they are tried again.", c, sinks(func(s sink.Stats) float64 { return float64(s.WriteErrors) }))
	add("proposal_queue", "Commands waiting for a partition.", g, func(r *reading) float64 { return float64(r.waiting) })
	add("journal_entries_total", "Commands journaled.", c, func(r *reading) float64 { return float64(r.partition.Entries) })
	add("journal_batches_total", "Journal batches committed: one sync, or one object, each.", c, func(r *reading) float64 { return float64(r.partition.Batches) })
	add("journal_bytes_total", "Bytes written to the journal.", c, func(r *reading) float64 { return float64(r.journal) })
	add("journal_syncs_total", "fdatasync calls of the journal.", c, func(r *reading) float64 { return float64(r.syncs) })
	add("commands_refused_total", "Commands the core refused; they changed nothing.", c, func(r *reading) float64 { return float64(r.partition.Refused) })
	add("steps_dispatched_total", "Step attempts handed out.", c, func(r *reading) float64 { return float64(r.partition.Dispatched) })
	add("steps_prefetched_total", "Step attempts handed out before their commit.", c, func(r *reading) float64 { return float64(r.partition.Prefetched) })
	add("provider_calls_in_flight", "Upstream model calls.", g, func(*reading) float64 {
		n := 0
		for _, p := range m.s.providers {
			n += p.Limiter.InFlight()
		}
		return float64(n)
	})
	add("provider_calls_waiting", "Model calls waiting for a permit.", g, func(*reading) float64 {
		n := 0
		for _, p := range m.s.providers {
			n += p.Limiter.Waiting()
		}
		return float64(n)
	})
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range m.gauges {
		ch <- g.desc
	}
	ch <- m.entries
	ch <- m.flows.entries
}

// scrapeTimeout bounds the wait for a busy partition.
const scrapeTimeout = 2 * time.Second

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	r := m.look()
	for _, g := range m.gauges {
		ch <- prometheus.MustNewConstMetric(g.desc, g.kind, g.read(&r))
	}
	for typ, n := range r.partition.EntriesByType {
		ch <- prometheus.MustNewConstMetric(m.entries, prometheus.CounterValue, float64(n), typ)
	}
	m.flows.collectEntries(r.partition.EntriesByStep, ch)
}

func (m *metrics) look() reading {
	r := reading{sinks: m.s.sinks.Stats()}
	r.partition.EntriesByType, r.partition.EntriesByStep = map[string]uint64{}, map[partition.StepOf]uint64{}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	for _, p := range m.s.parts {
		if p.runner == nil {
			continue
		}
		r.waiting += p.runner.Waiting()
		var st partition.Stats
		hot := 0
		if p.runner.Do(ctx, func(m *partition.Machine) { st, hot = m.Stats(), m.HotFlows() }) == nil {
			r.hot += hot
			r.partition.Entries += st.Entries
			r.partition.Batches += st.Batches
			r.partition.Refused += st.Refused
			r.partition.Dispatched += st.Dispatched
			r.partition.Prefetched += st.Prefetched
			for typ, n := range st.EntriesByType {
				r.partition.EntriesByType[typ] += n
			}
			for step, n := range st.EntriesByStep {
				r.partition.EntriesByStep[step] += n
			}
		}
		switch log := p.log.(type) {
		case *journal.Log:
			st := log.Stats()
			r.syncs += st.Syncs
			r.journal += st.Bytes
		case *objectlog.Log:
			r.journal += log.Stats().Bytes
		}
	}
	return r
}

func (m *metrics) turnEnded(_, outcome string, took time.Duration) {
	m.turns.WithLabelValues(outcome).Observe(float64(took) / float64(time.Millisecond))
}

func (m *metrics) usage(u model.Usage) {
	m.prompt.Add(float64(u.Prompt))
	m.output.Add(float64(u.Completion))
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}
