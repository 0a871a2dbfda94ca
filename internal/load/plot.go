package load

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// Series is a named sweep in a plot.
type Series struct {
	Name   string
	Points []Point
}

// A plot is two panels side by side: turn time and throughput, both over the
// concurrency on a logarithmic axis.
const (
	plotW, plotH         = 1080, 470
	panelW, panelH       = 420, 300
	panelTop             = 70
	leftPanel, nextPanel = 80, 600
)

// colours tell series apart, also for most who see few colours (Okabe, Ito).
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"}

// WritePlot draws up to six series as SVG.
func WritePlot(w io.Writer, all []Series) error {
	if len(all) > len(colours) {
		return fmt.Errorf("a plot has room for %d series, not %d", len(colours), len(all))
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", plotW, plotH, plotW, plotH)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", plotW, plotH)
	quantile := []struct {
		name, dash string
		of         func(Point) float64
	}{
		{"p50", "", func(p Point) float64 { return p.Turn.P50 }},
		{"p95", "7 3", func(p Point) float64 { return p.Turn.P95 }},
		{"p99", "2 3", func(p Point) float64 { return p.Turn.P99 }},
	}
	rate := func(p Point) float64 { return p.TurnsPerS }
	times, rates := newPanel(leftPanel, "Turn time, ms", all), newPanel(nextPanel, "Turns per second", all)
	for _, q := range quantile {
		times.include(all, q.of)
	}
	if f := floorOf(all); f > 0 {
		times.y.include(f)
	}
	rates.include(all, rate)
	times.frame(&b)
	rates.frame(&b)
	if f := floorOf(all); f > 0 {
		times.rule(&b, f, "model alone")
	}
	for i, s := range all {
		for _, q := range quantile {
			times.line(&b, s.Points, q.of, colours[i], q.dash)
		}
		rates.line(&b, s.Points, rate, colours[i], "")
	}
	x := leftPanel
	for i, s := range all {
		x = legend(&b, x, colours[i], "", s.Name)
	}
	for _, q := range quantile {
		x = legend(&b, x, "#555555", q.dash, q.name)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func floorOf(all []Series) float64 {
	for _, s := range all {
		for _, p := range s.Points {
			if p.FloorMS != nil {
				return *p.FloorMS
			}
		}
	}
	return 0
}

// axis is a logarithmic scale.
type axis struct{ lo, hi float64 }

func (a *axis) include(v float64) {
	if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return
	}
	if a.lo == 0 || v < a.lo {
		a.lo = v
	}
	a.hi = max(a.hi, v)
}

// share is where v lies, 0 to 1.
func (a *axis) share(v float64) float64 {
	if v <= 0 || a.hi <= a.lo {
		return 0
	}
	return (math.Log(v) - math.Log(a.lo)) / (math.Log(a.hi) - math.Log(a.lo))
}

// widen makes room around the values, and a span where there is one value.
func (a *axis) widen() {
	if a.lo == 0 {
		a.lo, a.hi = 1, 10
	}
	const least, share = 1.03, 0.06
	by := max(least, math.Pow(a.hi/a.lo, share))
	a.lo, a.hi = a.lo/by, a.hi*by
}

// ticks are round values inside the axis: evenly spaced where it spans little,
// else 1-2-5 of each decade while they are few, else the decades.
func (a *axis) ticks() []float64 {
	const most, narrow = 9, 4
	if a.hi/a.lo < narrow {
		step := roundStep((a.hi - a.lo) / 5)
		var out []float64
		for k := math.Ceil(a.lo / step); k*step <= a.hi && len(out) < most; k++ {
			out = append(out, k*step)
		}
		return out
	}
	out := a.decades(1, 2, 5)
	if len(out) > most {
		out = a.decades(1)
	}
	return out
}

// roundStep is the next of 1, 2, 5 times a power of ten.
func roundStep(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, s := range []float64{1, 2, 5} {
		if s*p >= v {
			return s * p
		}
	}
	return 10 * p
}

func (a *axis) decades(steps ...float64) (out []float64) {
	for d := math.Floor(math.Log10(a.lo)); d <= math.Ceil(math.Log10(a.hi)); d++ {
		for _, s := range steps {
			if v := s * math.Pow(10, d); v >= a.lo && v <= a.hi {
				out = append(out, v)
			}
		}
	}
	return out
}

type panel struct {
	left  int
	title string
	x, y  axis
	cs    []int // every concurrency measured
}

func newPanel(left int, title string, all []Series) *panel {
	p := &panel{left: left, title: title}
	seen := map[int]bool{}
	for _, s := range all {
		for _, pt := range s.Points {
			p.x.include(float64(pt.Concurrency))
			if !seen[pt.Concurrency] {
				seen[pt.Concurrency] = true
				p.cs = append(p.cs, pt.Concurrency)
			}
		}
	}
	p.x.widen()
	return p
}

func (p *panel) include(all []Series, of func(Point) float64) {
	for _, s := range all {
		for _, pt := range s.Points {
			if pt.Turns > 0 {
				p.y.include(of(pt))
			}
		}
	}
}

func (p *panel) at(c int, v float64) (x, y float64) {
	return float64(p.left) + p.x.share(float64(c))*panelW, panelTop + panelH - p.y.share(v)*panelH
}

func (p *panel) frame(b *strings.Builder) {
	p.y.widen()
	right, bottom := p.left+panelW, panelTop+panelH
	fmt.Fprintf(b, `<text x="%d" y="%d" font-size="15" font-weight="bold">%s</text>`+"\n", p.left, panelTop-14, p.title)
	for _, v := range p.y.ticks() {
		_, y := p.at(1, v)
		fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#e2e2e2"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			p.left, y, right, y, p.left-7, y+4, number(v))
	}
	for _, c := range p.cs {
		x, _ := p.at(c, p.y.lo)
		fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#888888"/><text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n",
			x, bottom, x, bottom+5, x, bottom+19, c)
	}
	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#888888"/>`+"\n", p.left, panelTop, panelW, panelH)
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">concurrent turns</text>`+"\n", p.left+panelW/2, bottom+38)
}

func (p *panel) line(b *strings.Builder, points []Point, of func(Point) float64, colour, dash string) {
	var path, dots strings.Builder
	for _, pt := range points {
		if pt.Turns == 0 {
			continue
		}
		x, y := p.at(pt.Concurrency, of(pt))
		fmt.Fprintf(&path, "%.1f,%.1f ", x, y)
		if dash == "" {
			fmt.Fprintf(&dots, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, x, y, colour)
		}
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.7"%s/>%s`+"\n", strings.TrimSpace(path.String()), colour, dashed(dash), dots.String())
}

// rule is a horizontal line with a name.
func (p *panel) rule(b *strings.Builder, v float64, name string) {
	_, y := p.at(1, v)
	fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#555555" stroke-dasharray="1 3"/><text x="%d" y="%.1f" text-anchor="end" fill="#555555">%s</text>`+"\n",
		p.left, y, p.left+panelW, y, p.left+panelW-5, y+14, name)
}

// legend draws one entry and returns where the next begins.
func legend(b *strings.Builder, x int, colour, dash, name string) int {
	const y, glyph, perRune = plotH - 24, 30, 7
	fmt.Fprintf(b, `<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="2"%s/><text x="%d" y="%d">%s</text>`+"\n",
		x, y, x+glyph, y, colour, dashed(dash), x+glyph+6, y+4, escape(name))
	return x + glyph + 28 + perRune*len([]rune(name))
}

func dashed(dash string) string {
	if dash == "" {
		return ""
	}
	return ` stroke-dasharray="` + dash + `"`
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }

var escape = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace
