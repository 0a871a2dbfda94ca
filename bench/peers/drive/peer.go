// Package bench is what the drivers of all peers share: the load loop, which is
// the very code that measures Perdure (hist.go, loop.go and process.go are links
// to internal/bench), a command line, and the form of a point.
package bench

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Steps is how many steps a flow of sequential-steps has.
const Steps = 10

// Objects is how many flows or objects the rpc scenarios spread their calls over.
const Objects = 1024

// Scenario is one that a peer can run.
type Scenario struct {
	Name  string
	Units int // of one operation; 0 = 1
	// Prepare makes what the operations need and returns the operation. ctx ends
	// when the point is done.
	Prepare func(ctx context.Context, clients int) (Op, error)
}

// Point is one measured point, printed as one line of JSON.
type Point struct {
	Peer     string             `json:"peer"`
	Scenario string             `json:"scenario"`
	Clients  int                `json:"clients"`
	Ops      uint64             `json:"ops"`
	PerS     float64            `json:"ops_per_s"`
	Latency  Latency            `json:"latency_ms"`
	CPU      map[string]float64 `json:"cpu_us_per_op"` // by process; "bench" is the driver, with workers that live in it
	RSS      map[string]int64   `json:"rss_bytes"`
	Errors   uint64             `json:"errors"`
	Settings map[string]string  `json:"settings"`
}

// Command is the command line of a peer's driver.
type Command struct {
	Peer      string
	Scenarios []Scenario
	// Open, if set, connects to the peer before the first scenario; its result
	// is called at the end.
	Open func(ctx context.Context) (func(), error)

	clients          []int
	names            []string
	warmup, duration time.Duration
	pids             map[string]int
	settings         map[string]string
}

// Main runs the command with the arguments of the process and ends it.
func (c *Command) Main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := c.parse(flag.CommandLine, os.Args[1:])
	if err == nil {
		err = c.run(ctx, os.Stdout, os.Stderr)
	}
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", c.Peer, err)
		os.Exit(1)
	}
}

func (c *Command) parse(fs *flag.FlagSet, args []string) error {
	c.pids, c.settings = map[string]int{}, Machine()
	fs.DurationVar(&c.warmup, "warmup", 5*time.Second, "not measured")
	fs.DurationVar(&c.duration, "duration", 15*time.Second, "measured window of a point")
	clients := fs.String("clients", "1,64,256", "clients, a point for each")
	names := fs.String("scenarios", "", "scenarios, all when empty")
	fs.Func("pid", "NAME=PID of a process whose CPU and memory are the peer's", func(s string) error {
		name, pid, _ := strings.Cut(s, "=")
		n, err := strconv.Atoi(pid)
		c.pids[name] = n
		return err
	})
	fs.Func("setting", "KEY=VALUE, printed with each point", func(s string) error {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want KEY=VALUE")
		}
		c.settings[k] = v
		return nil
	})
	if err := fs.Parse(args); err != nil {
		return err
	}
	for s := range strings.SplitSeq(*clients, ",") {
		n, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("-clients: %w", err)
		}
		c.clients = append(c.clients, n)
	}
	for s := range strings.SplitSeq(*names, ",") {
		if s == "" {
			continue
		}
		if !slices.ContainsFunc(c.Scenarios, func(sc Scenario) bool { return sc.Name == s }) {
			return fmt.Errorf("-scenarios: %s has no %q", c.Peer, s)
		}
		c.names = append(c.names, s)
	}
	return nil
}

func (c *Command) run(ctx context.Context, out, progress io.Writer) error {
	if c.Open != nil {
		closePeer, err := c.Open(ctx)
		if err != nil {
			return err
		}
		defer closePeer()
	}
	enc := json.NewEncoder(out)
	for _, sc := range c.Scenarios {
		if len(c.names) > 0 && !slices.Contains(c.names, sc.Name) {
			continue
		}
		for _, n := range c.clients {
			p, err := c.point(ctx, sc, n, progress)
			if err != nil {
				return fmt.Errorf("%s with %d clients: %w", sc.Name, n, err)
			}
			if err := enc.Encode(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// point measures one.
func (c *Command) point(ctx context.Context, sc Scenario, clients int, progress io.Writer) (*Point, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	op, err := sc.Prepare(ctx, clients)
	if err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	before, after := map[string]time.Duration{}, map[string]time.Duration{}
	p := &Point{Peer: c.Peer, Scenario: sc.Name, Clients: clients, CPU: map[string]float64{}, RSS: map[string]int64{}, Settings: c.settings}
	loop := &Loop{
		Clients: clients, Units: sc.Units, Warmup: c.warmup, Duration: c.duration, Op: op,
		WindowBegin: func() { c.cpu(before) },
		WindowEnd:   func() { c.cpu(after); c.rss(p.RSS) },
	}
	res, err := loop.Run(ctx)
	if err != nil {
		return nil, err
	}
	p.Ops, p.PerS, p.Latency, p.Errors = res.Units, tenths(res.PerSecond()), res.Latency.Latency(), res.Errors
	for name, end := range after {
		p.CPU[name] = tenths(float64((end - before[name]).Microseconds()) / float64(res.Units))
	}
	fmt.Fprintf(progress, "%s %s c=%d: %.1f/s, p50 %.2f ms, p99 %.2f ms, CPU µs/op %v, %d errors\n", c.Peer, sc.Name, clients, p.PerS, p.Latency.P50, p.Latency.P99, p.CPU, p.Errors)
	if res.First != nil {
		fmt.Fprintf(progress, "  first error: %v\n", res.First)
	}
	return p, nil
}

func tenths(v float64) float64 { return math.Round(v*10) / 10 }

// cpu reads the CPU of every process into m.
func (c *Command) cpu(m map[string]time.Duration) {
	for name, pid := range c.pids {
		if d, err := ProcessCPU(pid); err == nil {
			m[name] = d
		}
	}
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) == nil {
		m["bench"] = time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
}

func (c *Command) rss(m map[string]int64) {
	m["bench"], _ = ProcessRSS(os.Getpid())
	for name, pid := range c.pids {
		if n, err := ProcessRSS(pid); err == nil {
			m[name] = n
		}
	}
}
