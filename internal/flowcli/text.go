package flowcli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/client"
)

const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	blue   = "36"
)

func (a *app) paint(color, s string) string {
	if !a.Color || color == "" || s == "" {
		return s
	}
	return "\x1b[" + color + "m" + s + "\x1b[0m"
}

// statusColor is that of a run's status or a step's state.
func statusColor(s string) string {
	switch s {
	case "running":
		return blue
	case "completed":
		return green
	case "failed", "timed_out":
		return red
	case "terminated", "cancelled", "backoff", "paused":
		return yellow
	}
	return ""
}

// table is rows of cells under a head; columns are as wide as their widest cell.
type table struct {
	head   []string
	rows   [][]string
	colors map[[2]int]string // by row and column
	indent string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// color colours a cell of the newest row.
func (t *table) color(col int, color string) {
	if t.colors == nil {
		t.colors = map[[2]int]string{}
	}
	t.colors[[2]int{len(t.rows) - 1, col}] = color
}

// write prints the table; with a terminal's width the last column is cut to it.
func (a *app) write(w io.Writer, t *table) {
	widths := make([]int, len(t.head))
	for i, h := range t.head {
		widths[i] = len(h)
	}
	for _, r := range t.rows {
		for i, c := range r {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	line := func(row int, cells []string) {
		var b strings.Builder
		b.WriteString(t.indent)
		used := utf8.RuneCountInString(t.indent)
		for i, c := range cells {
			if i == len(cells)-1 && a.Width > 0 {
				c = cut(c, max(a.Width-used, 8))
			}
			pad := ""
			if i < len(cells)-1 {
				pad = strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)+2)
			}
			color := t.colors[[2]int{row, i}]
			if row < 0 {
				color = dim
			}
			b.WriteString(a.paint(color, c) + pad)
			used += widths[i] + 2
		}
		out := b.String()
		if !a.Color {
			out = strings.TrimRight(out, " ")
		}
		fmt.Fprintln(w, out)
	}
	line(-1, t.head)
	for i, r := range t.rows {
		line(i, r)
	}
}

// cut shortens a text to n columns.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	r := []rune(s)
	return string(r[:max(n-1, 0)]) + "…"
}

// clean makes text of elsewhere safe for a terminal and for one line of it.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case unicode.IsControl(r), r == utf8.RuneError:
			return '�'
		}
		return r
	}, s)
}

// harmless is clean for text of several lines.
func harmless(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unicode.IsControl(r) {
			return '�'
		}
		return r
	}, s)
}

const shortValue = 80 // columns of a value in a line that has other things too

// short is a value as a part of a line.
func short(v json.RawMessage, n int) string {
	var b bytes.Buffer
	if json.Compact(&b, v) != nil {
		return cut(clean(string(v)), n)
	}
	return cut(clean(b.String()), n)
}

// value is an attribute's value as a part of a line, or how large it is.
func attributeText(v client.Attribute, n int) string {
	if len(v.Value) == 0 && v.Size > 0 {
		return "(" + size(v.Size) + ")"
	}
	return short(v.Value, n)
}

func size(n uint64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// clock is the time of day, with the date when that is not today's.
func (a *app) clock(t time.Time) string {
	t = t.In(a.Zone)
	if y, m, d := a.Now().In(a.Zone).Date(); t.Year() == y && t.Month() == m && t.Day() == d {
		return t.Format("15:04:05")
	}
	return t.Format("2006-01-02 15:04:05")
}

// ago is a time as it is seen from now: "3m ago", "in 2h".
func (a *app) ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := a.Now().Sub(t)
	switch {
	case d >= 0 && d < time.Second, d < 0 && d > -time.Second:
		return "now"
	case d < 0:
		return "in " + span(-d)
	}
	return span(d) + " ago"
}

// both is a time of day and how far it is.
func (a *app) both(t time.Time) string { return a.clock(t) + " (" + a.ago(t) + ")" }

// span is a duration of at most two units, as 2h5m, 12s or 340ms.
func span(d time.Duration) string {
	if d < 0 {
		d = 0
	}
	const day = 24 * time.Hour
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Minute:
		return d.Round(time.Second).String()
	case d < time.Hour:
		return units(d, time.Minute, "m", time.Second, "s")
	case d < day:
		return units(d, time.Hour, "h", time.Minute, "m")
	}
	return units(d, day, "d", time.Hour, "h")
}

func units(d, large time.Duration, l string, small time.Duration, s string) string {
	d = d.Truncate(small)
	out := fmt.Sprintf("%d%s", d/large, l)
	if rest := d % large / small; rest > 0 {
		out += fmt.Sprintf("%d%s", rest, s)
	}
	return out
}

// count is a number of things.
func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}
