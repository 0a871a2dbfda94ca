package doctor

import (
	"encoding/json"
	"fmt"
	"io"
)

// WriteJSON writes the report as one object on one line.
func (r *StoreReport) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Status string `json:"status"`
		*StoreReport
	}{r.Status(), r})
}

// WriteText writes the report for people: partitions, findings, a sum.
func (r *StoreReport) WriteText(w io.Writer) error {
	t := &textWriter{w: w}
	for _, p := range r.Partitions {
		owner := "never owned"
		if p.Epoch > 0 {
			owner = fmt.Sprintf("epoch %d", p.Epoch)
			if p.Node != "" {
				owner += " of " + p.Node
			}
			if p.Released {
				owner += ", released"
			}
		}
		t.printf("p%03d  %s\n", p.ID, owner)
		if p.LocalLog {
			t.printf("      log: in files beside the store, not looked at\n")
		} else if p.Epoch > 0 {
			t.printf("      log: from object %d, the next is %d; entries up to %d (%s, %s)\n", p.HeadSeq, p.TailSeq, max(p.TailLSN, 1)-1, count(int(p.Frames), "frame"), count(int(p.Seals), "seal"))
		}
		t.printf("      snapshots: %d with %s; the newest holds entries up to %d\n", p.Snapshots, count(p.Tables, "table file"), p.SnapshotLSN)
	}
	for _, f := range r.Findings {
		t.printf("%-8s  %s  %s\n", f.Severity, f.Key, f.Detail)
	}
	if all := r.Counts[Damage] + r.Counts[Warning] + r.Counts[Harmless]; all > len(r.Findings) {
		t.printf("and %d more\n", all-len(r.Findings))
	}
	t.printf("%s, %s in all; %s, %s read: %d damage, %s, %d harmless\n", count(int(r.Objects), "object"), sizeText(uint64(r.Bytes)),
		count(int(r.Read), "object"), sizeText(uint64(r.ReadBytes)), r.Counts[Damage], count(r.Counts[Warning], "warning"), r.Counts[Harmless])
	return t.err
}

// textWriter keeps the first error.
type textWriter struct {
	w   io.Writer
	err error
}

func (t *textWriter) printf(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.w, format, args...)
	}
}

func sizeText(n uint64) string {
	if n < 10<<20 {
		return fmt.Sprintf("%d KiB", (n+1023)>>10)
	}
	return mib(n)
}
