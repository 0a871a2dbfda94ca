package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
)

// Growth is one figure of one concurrency in two builds.
type Growth struct {
	Concurrency int     `json:"concurrency"`
	Figure      string  `json:"figure"` // turn_p95_ms or rss_bytes
	Base        float64 `json:"base"`   // medians over the runs
	Head        float64 `json:"head"`
	Ratio       float64 `json:"ratio"` // head by base
	Alarm       bool    `json:"alarm"`
}

// Compare takes the runs of two builds, each run a sweep, and compares the
// medians of p95 and RSS at every concurrency that all runs have. A figure
// that grew by more than the share limit (0.2 = 20 %) is an alarm, and so are
// errors that only the head has. The error says that there is nothing to
// compare.
func Compare(base, head [][]Point, limit float64) ([]Growth, error) {
	var out []Growth
	for _, c := range common(base, head) {
		for _, fig := range []struct {
			name string
			of   func(Point) float64
		}{
			{"turn_p95_ms", func(p Point) float64 { return p.Turn.P95 }},
			{"rss_bytes", func(p Point) float64 {
				if p.Server == nil {
					return 0
				}
				return float64(p.Server.RSS)
			}},
		} {
			b, h := medianOf(base, c, fig.of), medianOf(head, c, fig.of)
			if b <= 0 || h <= 0 {
				return nil, fmt.Errorf("compare: c=%d has no %s", c, fig.name)
			}
			out = append(out, Growth{c, fig.name, b, h, roundTo(h/b, 1000), h > b*(1+limit)})
		}
		errs := func(p Point) float64 { return float64(p.Errors) }
		if b, h := medianOf(base, c, errs), medianOf(head, c, errs); h > b {
			out = append(out, Growth{Concurrency: c, Figure: "errors", Base: b, Head: h, Alarm: true})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("compare: no concurrency is in all of %d base and %d head runs", len(base), len(head))
	}
	return out, nil
}

// Baseline is a recorded comparison point: the runs of one build and how they
// were taken.
type Baseline struct {
	Settings map[string]any `json:"settings"`
	Runs     [][]Point      `json:"runs"`
}

// ReadBaseline reads a file of bench/baselines, at most 16 MiB.
func ReadBaseline(r io.Reader) (Baseline, error) {
	const most = 16 << 20
	var b Baseline
	if err := json.NewDecoder(io.LimitReader(r, most)).Decode(&b); err != nil {
		return b, fmt.Errorf("not a baseline: %w", err)
	}
	if len(b.Runs) == 0 {
		return b, errors.New("not a baseline: it has no runs")
	}
	return b, nil
}

// common are the concurrencies of the first run that all others have too.
func common(sets ...[][]Point) []int {
	var out []int
	if len(sets[0]) == 0 {
		return nil
	}
	for _, p := range sets[0][0] {
		everywhere := true
		for _, runs := range sets {
			everywhere = everywhere && len(runs) > 0
			for _, run := range runs {
				_, ok := at(run, p.Concurrency)
				everywhere = everywhere && ok
			}
		}
		if everywhere {
			out = append(out, p.Concurrency)
		}
	}
	return out
}

func at(run []Point, c int) (Point, bool) {
	for _, p := range run {
		if p.Concurrency == c {
			return p, true
		}
	}
	return Point{}, false
}

func medianOf(runs [][]Point, c int, of func(Point) float64) float64 {
	var v []float64
	for _, run := range runs {
		p, _ := at(run, c)
		v = append(v, of(p))
	}
	return median(v)
}

// WriteGrowth prints a comparison and reports whether any figure alarms.
func WriteGrowth(w io.Writer, all []Growth) (alarm bool, err error) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "c\tfigure\tbase\thead\tchange\t\t")
	for _, g := range all {
		verdict := ""
		if g.Alarm {
			verdict, alarm = "ALARM", true
		}
		change := "-"
		if g.Base > 0 {
			change = fmt.Sprintf("%+.1f %%", (g.Head/g.Base-1)*100)
		}
		_, _ = fmt.Fprintf(tw, "%d\t%s\t%.4g\t%.4g\t%s\t%s\t\n", g.Concurrency, g.Figure, g.Base, g.Head, change, verdict)
	}
	return alarm, tw.Flush()
}
