package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// Point is one measured point, as --json prints it: the figures of its median
// run, and those of each run.
type Point struct {
	Scenario string  `json:"scenario"`
	Clients  int     `json:"clients"`
	Rate     float64 `json:"rate,omitempty"` // of an open loop
	Figures
	Runs     []Figures `json:"runs"`
	Settings Settings  `json:"settings"`
}

// Figures are what one run measured.
type Figures struct {
	Ops     uint64   `json:"ops"`
	PerS    float64  `json:"ops_per_s"`
	Latency Latency  `json:"latency_ms"`
	CPU     CPU      `json:"cpu_us_per_op"`
	Journal *Journal `json:"journal,omitempty"` // nil: the server showed no metrics
	RSS     int64    `json:"rss_bytes"`         // of the server, the highest of the window
	RSSs    RSS      `json:"rss_by_process"`
	Errors  uint64   `json:"errors"`
	Error   string   `json:"first_error,omitempty"`
	// Of an open loop: how late the client started operations, and how many it
	// did not start at all.
	Lag     *Latency `json:"lag_ms,omitempty"`
	Unstart uint64   `json:"not_started,omitempty"`
}

// CPU is microseconds of processor time a unit.
type CPU struct {
	Server float64 `json:"server"`
	Worker float64 `json:"worker"`
	Client float64 `json:"client"`
}

// RSS is resident memory, the highest of the window, in bytes.
type RSS struct {
	Server int64 `json:"server"`
	Worker int64 `json:"worker"`
	Client int64 `json:"client"`
}

// Journal is what the server's journal did for the window's units.
type Journal struct {
	Batches float64  `json:"batches_per_1000_ops"`
	Bytes   float64  `json:"bytes_per_op"`
	Puts    *float64 `json:"puts_per_s,omitempty"` // of an object store
	Store   *Store   `json:"store,omitempty"`      // nil: there is none
}

// Store is what an object store was asked for the window's units. LIST requests
// cost what PUTs do.
type Store struct {
	Puts  float64 `json:"puts_per_1000_ops"`
	Gets  float64 `json:"gets_per_1000_ops"`
	Lists float64 `json:"lists_per_1000_ops"`
	Bytes float64 `json:"written_bytes_per_op"`
}

// Settings are what a point is repeated with, and what it was measured on.
type Settings struct {
	Durability   string   `json:"durability"`
	Steps        int      `json:"steps"`
	Objects      int      `json:"objects"`
	Rate         float64  `json:"rate,omitempty"`
	Warmup       string   `json:"warmup"`
	Duration     string   `json:"duration"`
	Runs         int      `json:"runs"`
	Target       string   `json:"target,omitempty"`
	Store        string   `json:"store,omitempty"`
	StoreLatency string   `json:"store_latency,omitempty"`
	ServeFlags   []string `json:"serve_flags,omitempty"`
	WorkerProcs  int      `json:"worker_procs,omitempty"`
	ClientProcs  int      `json:"client_procs,omitempty"`
	Version      string   `json:"version"`
	Place
}

// median picks the run in the middle: by throughput, or by the median latency
// where the throughput is given. Of an even number it is the worse one.
func median(runs []Figures, open bool) Figures {
	sorted := slices.Clone(runs)
	slices.SortStableFunc(sorted, func(a, b Figures) int {
		x, y := a.PerS, b.PerS
		if open {
			x, y = b.Latency.P50, a.Latency.P50
		}
		switch {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	return sorted[(len(sorted)-1)/2]
}

func round(v float64, digits int) float64 {
	p := math.Pow(10, float64(digits))
	return math.Round(v*p) / p
}

// line is the point as one line of JSON.
func (p *Point) line() ([]byte, error) {
	b, err := json.Marshal(p)
	return append(b, '\n'), err
}

// WriteTable prints points for people.
func WriteTable(w io.Writer, points []*Point) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "scenario\tload\tops/s\tp50\tp90\tp99\tp99.9 ms\tCPU µs/op server\tworker\tclient\tbatches/1000\tbytes/op\tRSS MB\terrors\t")
	for _, p := range points {
		batches, bytes := "-", "-"
		if p.Journal != nil {
			batches, bytes = fmt.Sprintf("%.0f", p.Journal.Batches), fmt.Sprintf("%.0f", p.Journal.Bytes)
		}
		_, _ = fmt.Fprintf(tw, "%s\t%s\t%.0f\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f\t%.1f\t%.1f\t%s\t%s\t%.0f\t%d\t\n", p.title(), clientsText(p.Clients, p.Rate),
			p.PerS, p.Latency.P50, p.Latency.P90, p.Latency.P99, p.Latency.P999, p.CPU.Server, p.CPU.Worker, p.CPU.Client,
			batches, bytes, float64(p.RSS)/1e6, p.Errors)
	}
	return tw.Flush()
}

// title is the scenario with what sets it apart.
func (p *Point) title() string {
	t := p.Scenario
	if p.Scenario == "sequential-steps" {
		t += " " + p.Settings.Durability
	}
	if p.Settings.Store != "" {
		t += " " + strings.SplitN(p.Settings.Store, "?", 2)[0]
	}
	if p.Settings.StoreLatency != "" {
		t += " +" + p.Settings.StoreLatency
	}
	return t
}
