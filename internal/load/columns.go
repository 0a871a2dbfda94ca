package load

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteColumns prints sweeps side by side, a block of rows per series, and
// beside each how many times the turns a second of the last series it has and
// what part of its median turn time.
func WriteColumns(w io.Writer, all []Series) error {
	if len(all) == 0 {
		return nil
	}
	last := all[len(all)-1]
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(tw, "c\t\tturns/s\tturn p50\tp95\tp99 ms\tCPU ms/turn\tPSS MB\terrors\tturns/s by %s\tp50 by %s\t\n", last.Name, last.Name)
	for _, ref := range last.Points {
		for _, s := range all {
			p, ok := at(s.Points, ref.Concurrency)
			if !ok {
				continue
			}
			cpu, pss := "-", "-"
			if p.Server != nil {
				cpu, pss = fmt.Sprintf("%.2f", p.Server.CPUMSTurn), fmt.Sprintf("%.0f", float64(p.Server.PSS)/1e6)
			}
			_, _ = fmt.Fprintf(tw, "%d\t%s\t%.2f\t%.0f\t%.0f\t%.0f\t%s\t%s\t%d\t%s\t%s\t\n", p.Concurrency, s.Name, p.TurnsPerS,
				p.Turn.P50, p.Turn.P95, p.Turn.P99, cpu, pss, p.Errors, ratio(p.TurnsPerS, ref.TurnsPerS), ratio(p.Turn.P50, ref.Turn.P50))
		}
	}
	return tw.Flush()
}

func ratio(a, b float64) string {
	if b <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f×", a/b)
}
