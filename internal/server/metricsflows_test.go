package server

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/perdure-dev/perdure/internal/partition"
)

// counted shows the entries by step, as a scrape does.
type counted struct {
	m  *flowMetrics
	by map[partition.StepOf]uint64
}

func (c counted) Describe(ch chan<- *prometheus.Desc) { ch <- c.m.entries }

func (c counted) Collect(ch chan<- prometheus.Metric) { c.m.collectEntries(c.by, ch) }

// shown gives the counts of one scrape by "type/step".
func (c counted) shown(t *testing.T) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, x := range families[0].Metric {
		out[x.Label[0].GetValue()+"/"+x.Label[1].GetValue()] = x.Counter.GetValue()
	}
	return out
}

// TestEntriesByStepAreBounded: steps beyond the bound are together, and a step
// that had a series keeps it.
func TestEntriesByStepAreBounded(t *testing.T) {
	m := newFlowMetrics("perdure")
	by := map[partition.StepOf]uint64{{FlowType: "order", Step: "pay"}: 3}
	c := counted{m, by}
	if got := c.shown(t); len(got) != 1 || got["order/pay"] != 3 {
		t.Errorf("got %v", got)
	}
	for i := range maxSeries + 10 {
		by[partition.StepOf{FlowType: "many", Step: fmt.Sprint(i)}] = 1
	}
	by[partition.StepOf{FlowType: "order", Step: "pay"}]++
	for range 2 {
		got := c.shown(t)
		if len(got) != maxSeries+1 || got["order/pay"] != 4 || got["other/other"] != 11 {
			t.Errorf("%d series, %v of pay, %v of others", len(got), got["order/pay"], got["other/other"])
		}
	}
}
