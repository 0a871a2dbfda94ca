package load

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteTable prints points for people. Memory is the highest of the window.
func WriteTable(w io.Writer, points []Point) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "c\tturns\tturns/s\tTTFT p50\tp95\tp99 ms\tturn p50\tp95\tp99\tmax ms\tover floor\terrors\t429s\tRSS\tPSS\tprivate MB\tCPU ms/turn\tallocs/turn\tclient\tmock\tupstream max\t")
	for _, p := range points {
		_, _ = fmt.Fprintf(tw, "%d\t%d\t%.2f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%s\t%s\t%d\t%d\t",
			p.Concurrency, p.Turns, p.TurnsPerS, p.TTFT.P50, p.TTFT.P95, p.TTFT.P99,
			p.Turn.P50, p.Turn.P95, p.Turn.P99, optional(p.Turn.Max, 0), overFloor(p), p.Errors, p.Rejected)
		if s := p.Server; s != nil {
			const mb = 1e6
			_, _ = fmt.Fprintf(tw, "%.1f\t%.1f\t%.1f\t%.3f\t%.0f\t", float64(s.RSS)/mb, float64(s.PSS)/mb, float64(s.Private)/mb, s.CPUMSTurn, s.AllocsTurn)
		} else {
			_, _ = fmt.Fprint(tw, "-\t-\t-\t-\t-\t")
		}
		_, _ = fmt.Fprintf(tw, "%.3f\t", p.Client.CPUMSTurn)
		if m := p.Mock; m != nil {
			_, _ = fmt.Fprintf(tw, "%.3f\t%d\t\n", m.CPUMSTurn, m.MaxConcurrent)
		} else {
			_, _ = fmt.Fprint(tw, "-\t-\t\n")
		}
	}
	return tw.Flush()
}

func overFloor(p Point) string {
	if p.FloorMS == nil || p.Turns == 0 {
		return "-"
	}
	return fmt.Sprintf("%+.1f", p.Turn.P50-*p.FloorMS)
}

// optional prints v less sub, or a dash.
func optional(v *float64, sub float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *v-sub)
}
