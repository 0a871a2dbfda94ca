package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/perdure-dev/perdure/internal/blob"
)

// storeMetrics shows the requests to the object store; without one there are none.
type storeMetrics struct {
	read func() blob.Stats

	puts, gets, lists, deletes, in, out, requests, took *prometheus.Desc
}

func newStoreMetrics(ns string, read func() blob.Stats) *storeMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(ns, "store", name), help, labels, nil)
	}
	return &storeMetrics{
		read: read,
		puts: desc("puts_total", "PUT requests to the object store, failed ones too: stores charge for them."),
		gets: desc("gets_total", "GET requests to the object store."), lists: desc("lists_total", "LIST requests to the object store; most stores charge them as PUTs."),
		deletes: desc("deletes_total", "DELETE requests to the object store."),
		in:      desc("read_bytes_total", "Bytes of objects read."), out: desc("written_bytes_total", "Bytes of objects sent."),
		requests: desc("requests_total", "Requests to the object store by verb and result.", "verb", "result"),
		took:     desc("request_seconds", "Time of requests to the object store.", "verb"),
	}
}

// Describe implements prometheus.Collector.
func (m *storeMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.puts, m.gets, m.lists, m.deletes, m.in, m.out, m.requests, m.took} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *storeMetrics) Collect(ch chan<- prometheus.Metric) {
	st := m.read()
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	count(m.puts, st[blob.KindPut].Requests())
	count(m.gets, st[blob.KindGet].Requests())
	count(m.lists, st[blob.KindList].Requests())
	count(m.deletes, st[blob.KindDelete].Requests())
	var in, out uint64
	for k, v := range st {
		in, out = in+v.BytesIn, out+v.BytesOut
		verb := blob.Kind(k).String()
		for r, n := range v.Results {
			if n > 0 {
				count(m.requests, n, verb, blob.Result(r).String())
			}
		}
		buckets, sum := map[float64]uint64{}, uint64(0)
		for i, bound := range blob.LatencyBounds {
			sum += v.Buckets[i]
			buckets[bound.Seconds()] = sum
		}
		ch <- prometheus.MustNewConstHistogram(m.took, v.Requests(), v.Latency.Seconds(), buckets, verb)
	}
	count(m.in, in)
	count(m.out, out)
}
