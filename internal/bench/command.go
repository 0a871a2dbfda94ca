package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Failures of a run.
var (
	// ErrUsage is a configuration that cannot be.
	ErrUsage = errors.New("usage")
	// ErrFailedOps is a run whose operations failed, or some of them.
	ErrFailedOps = errors.New("operations failed")
)

// Run measures all points of c, prints each as it is done, and keeps them in
// c.Out. It is ErrUsage for what c must not be, and ErrFailedOps if operations
// failed.
func Run(ctx context.Context, c Config) error {
	if err := c.check(); err != nil {
		return fmt.Errorf("%w: %w", ErrUsage, err)
	}
	var points []*Point
	add := func(p *Point, err error) error {
		if err != nil {
			return err
		}
		points = append(points, p)
		return c.show(p)
	}
	for _, name := range c.Scenarios {
		best := 0.0
		for _, n := range c.Clients {
			if err := add(c.point(ctx, name, n)); err != nil {
				return fmt.Errorf("%s %s: %w", name, clientsText(n, c.Rate), err)
			}
			best = max(best, points[len(points)-1].PerS)
		}
		if c.Half {
			half := c
			half.Rate = max(math.Round(best/2), 1)
			if err := add(half.point(ctx, name, openClients)); err != nil {
				return fmt.Errorf("%s %s: %w", name, clientsText(openClients, half.Rate), err)
			}
		}
	}
	if !c.JSON {
		if err := WriteTable(c.Stdout, points); err != nil {
			return err
		}
	}
	if c.Out != "" {
		if err := writeTableFile(c.Out); err != nil {
			return err
		}
		fmt.Fprintf(c.Stderr, "points, settings and table in %s\n", c.Out)
	}
	for _, p := range points {
		if slices.ContainsFunc(p.Runs, func(f Figures) bool { return f.Errors > 0 }) {
			return ErrFailedOps
		}
	}
	return nil
}

// point measures one, and gives its median run.
func (c *Config) point(ctx context.Context, name string, clients int) (*Point, error) {
	sc, err := findScenario(name)
	if err != nil {
		return nil, err
	}
	job := Job{
		Scenario: name, Clients: clients, Rate: c.Rate, Warmup: c.Warmup, Duration: c.Duration,
		Durability: c.Durability, Steps: c.Steps, Objects: c.Objects,
	}
	if c.Profile != "" {
		if job.Profile, err = filepath.Abs(c.Profile); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(job.Profile, 0o755); err != nil {
			return nil, err
		}
	}
	if job.Objects == 0 {
		job.Objects = sc.objects
	}
	p := &Point{Scenario: name, Clients: clients, Rate: c.Rate, Settings: c.settings(&job)}
	probed := c.Dir
	if probed == "" {
		probed = os.TempDir()
	}
	if c.Target != "" {
		probed = ""
	}
	if p.Settings.Place, err = thisPlace(probed); err != nil {
		return nil, err
	}
	if p.Settings.Filesystem == memoryOnly && c.Store == "" {
		fmt.Fprintf(c.Stderr, "warning: %s is in memory, where a sync does nothing; name a folder of a disk with --dir\n", probed)
	}
	for run := range c.Runs {
		prefix := fmt.Sprintf("%s %s run %d/%d: ", p.title(), clientsText(clients, c.Rate), run+1, c.Runs)
		f, err := c.measure(ctx, job, func(s string) { fmt.Fprintln(c.Stderr, prefix+s) })
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(c.Stderr, "%s%.0f/s, p50 %.2f ms, p99 %.2f ms, CPU µs %.1f server %.1f worker %.1f client, %d errors\n",
			prefix, f.PerS, f.Latency.P50, f.Latency.P99, f.CPU.Server, f.CPU.Worker, f.CPU.Client, f.Errors)
		if f.Error != "" {
			fmt.Fprintf(c.Stderr, "%sthe first error: %s\n", prefix, f.Error)
		}
		p.Runs = append(p.Runs, f)
	}
	p.Figures = median(p.Runs, c.Rate > 0)
	return p, nil
}

// show prints a point when that is wanted line by line, and keeps it.
func (c *Config) show(p *Point) error {
	line, err := p.line()
	if err != nil {
		return err
	}
	if c.JSON {
		if _, err := c.Stdout.Write(line); err != nil {
			return err
		}
	}
	if c.Out == "" {
		return nil
	}
	return keep(c.Out, p, line)
}

// Files of a result folder.
const (
	pointsFile   = "engine.jsonl"
	settingsFile = "engine-settings.json"
	tableFile    = "engine.txt"
)

// keep adds a point to a result folder; its settings are those of the first.
func keep(dir string, p *Point, line []byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, pointsFile), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(line)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	b, err := json.MarshalIndent(p.Settings, "", "  ")
	if err != nil {
		return err
	}
	s, err := os.OpenFile(filepath.Join(dir, settingsFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = s.Write(append(b, '\n'))
	return errors.Join(err, s.Close())
}

// writeTableFile writes the table of all points of a folder.
func writeTableFile(dir string) error {
	points, err := ReadPoints(filepath.Join(dir, pointsFile))
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := WriteTable(&b, points); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, tableFile), b.Bytes(), 0o644)
}

// maxPoint bounds a line of a points file.
const maxPoint = 4 << 20

// ReadPoints reads a file of points, one a line.
func ReadPoints(name string) ([]*Point, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	points, err := parsePoints(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return points, nil
}

func parsePoints(in io.Reader) ([]*Point, error) {
	var out []*Point
	sc := bufio.NewScanner(in)
	sc.Buffer(nil, maxPoint)
	for line := 1; sc.Scan(); line++ {
		if len(bytes.TrimSpace(sc.Bytes())) == 0 {
			continue
		}
		p := &Point{}
		if err := json.Unmarshal(sc.Bytes(), p); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		out = append(out, p)
	}
	return out, sc.Err()
}

// Reproduce measures a recorded point of a result folder again with its settings,
// and prints the recorded one, the new one and their ratio. Of several recorded
// ones it takes the last. The streams, the binary and the version are with's.
func Reproduce(ctx context.Context, dir, scenario string, clients int, with Config) error {
	points, err := ReadPoints(filepath.Join(dir, pointsFile))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUsage, err)
	}
	var old *Point
	var there []string
	for _, p := range points {
		there = append(there, p.Scenario+" "+clientsText(p.Clients, p.Rate))
		if p.Scenario == scenario && p.Clients == clients && (with.Durability == "" || p.Settings.Durability == with.Durability) {
			old = p
		}
	}
	if old == nil {
		return fmt.Errorf("%w: %s has no point of %s with %d clients; it has %s", ErrUsage, dir, scenario, clients, strings.Join(there, ", "))
	}
	c, err := old.repeat()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUsage, err)
	}
	c.Binary, c.Version, c.Stdout, c.Stderr, c.JSON, c.Dir, c.Key = with.Binary, with.Version, with.Stdout, with.Stderr, with.JSON, with.Dir, with.Key
	p, err := c.point(ctx, scenario, clients)
	if err != nil {
		return err
	}
	if with.JSON {
		return json.NewEncoder(c.Stdout).Encode(map[string]any{
			"recorded": old, "now": p, "ops_ratio": ratio(p.PerS, old.PerS), "p50_ratio": ratio(p.Latency.P50, old.Latency.P50),
		})
	}
	if err := WriteTable(c.Stdout, []*Point{old, p}); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.Stdout, "now ÷ recorded (%s, %s): ops/s %.2f, p50 %.2f, CPU of the server %.2f\n", old.Settings.TakenAt.Format("2006-01-02"), old.Settings.Version,
		ratio(p.PerS, old.PerS), ratio(p.Latency.P50, old.Latency.P50), ratio(p.CPU.Server, old.CPU.Server))
	return err
}

// ratio is 0 when there is nothing to compare with.
func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return round(a/b, 3)
}
