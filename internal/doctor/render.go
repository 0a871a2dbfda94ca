package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// WriteJSON writes one object on one line: {"status": the worst, "checks": […]}.
func WriteJSON(w io.Writer, checks []Check) error {
	if checks == nil {
		checks = []Check{}
	}
	return json.NewEncoder(w).Encode(struct {
		Status Status  `json:"status"`
		Checks []Check `json:"checks"`
	}{worst(checks), checks})
}

// WriteText writes one check a line, with its hint below when there is one.
func WriteText(w io.Writer, checks []Check) error {
	width := 0
	for _, c := range checks {
		width = max(width, len(c.Name))
	}
	for _, c := range checks {
		detail := strings.ReplaceAll(c.Detail, "\n", "\n"+strings.Repeat(" ", width+8))
		if _, err := fmt.Fprintf(w, "%-4s  %-*s  %s\n", c.Status, width, c.Name, detail); err != nil {
			return err
		}
		if c.Hint == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s→ %s\n", strings.Repeat(" ", width+8), c.Hint); err != nil {
			return err
		}
	}
	return nil
}
