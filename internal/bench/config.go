package bench

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// The durabilities of steps.
const (
	durabilitySync  = "sync"
	durabilityAsync = "async"
)

// Bounds of a run.
const (
	maxSteps   = 100_000
	maxObjects = 1 << 20
	maxRuns    = 100
	maxRate    = 1e7
)

// Config is one call of `perdure bench SCENARIO…`.
type Config struct {
	Scenarios  []string
	Clients    []int // a point for each; none = the default of the loop
	Rate       float64
	Half       bool // then also an open loop at half of the best rate
	Warmup     time.Duration
	Duration   time.Duration
	Runs       int
	Durability string
	Steps      int
	Objects    int // flows that the calls spread over; 0 = the scenario's own number

	Target       string // a running server; empty = one of its own
	Key          string // API key of Target; never printed
	Store        string
	StoreLatency time.Duration
	ServeFlags   []string // further flags of `perdure serve`, as --name=value

	// Procs is GOMAXPROCS of worker and client; 0 = Go's own.
	WorkerProcs, ClientProcs int

	JSON bool
	Out  string // folder of a result; empty = none
	// Profile is a folder for CPU profiles of all processes; empty = none.
	Profile string
	Dir     string // where the scratch folders are made; empty = the system's

	// Binary is the perdure that is started; Version is noted with the results.
	Binary, Version string
	// Stdout gets the points, Stderr the progress.
	Stdout, Stderr io.Writer
}

// Register adds the flags of a run to fs.
func (c *Config) Register(fs *pflag.FlagSet) {
	fs.IntSliceVar(&c.Clients, "clients", nil, "operations in flight, a point for each number (default 64); with --rate the most that may be in flight (default 4096)")
	fs.Float64Var(&c.Rate, "rate", 0, "open loop: start so many units a second, whatever the server does; latency counts from the intended start")
	fs.BoolVar(&c.Half, "half", false, "after these points measure each scenario in an open loop at half of its best rate")
	fs.DurationVar(&c.Warmup, "warmup", 10*time.Second, "load before the measured window")
	fs.DurationVar(&c.Duration, "duration", 45*time.Second, "measured window of a run")
	fs.IntVar(&c.Runs, "runs", 3, "runs of a point, each with a fresh server; the median one counts")
	fs.StringVar(&c.Durability, "durability", durabilitySync, "of steps: sync or async")
	fs.IntVar(&c.Steps, "steps", 10, "steps of a flow of sequential-steps")
	fs.IntVar(&c.Objects, "objects", 0, "flows that calls are spread over (0 = the scenario's own number)")
	fs.StringVar(&c.Target, "target", "", "URL or HOST:PORT of a running server; without it one is started on a scratch folder")
	fs.StringVar(&c.Store, "store", "", "--store of the server that is started; each run has a prefix of its own below an object store's, and leaves it there")
	fs.DurationVar(&c.StoreLatency, "store-latency", 0, "--store-latency of the server that is started: each sync, or each PUT, takes so much longer")
	fs.StringArrayVar(&c.ServeFlags, "serve-flag", nil, "a further flag of the server that is started, as --name=value; may be repeated")
	fs.IntVar(&c.WorkerProcs, "worker-procs", 0, "GOMAXPROCS of the worker (0 = Go's own)")
	fs.IntVar(&c.ClientProcs, "client-procs", 0, "GOMAXPROCS of the client (0 = Go's own)")
	fs.BoolVar(&c.JSON, "json", false, "print one JSON object a point")
	fs.StringVar(&c.Out, "out", "", "folder for settings, points and table, such as bench/results/2026-12-01-name")
	fs.StringVar(&c.Profile, "profile", "", "folder for CPU profiles of the window, of each process; it costs a few percent")
	fs.StringVar(&c.Dir, "dir", "", "where the server's scratch folder is made (default: the system's temporary folder)")
}

// Clients when none are given.
const (
	closedClients = 64
	openClients   = 4096
)

// check fills in c's clients and names everything that is wrong with it.
func (c *Config) check() error {
	if len(c.Clients) == 0 {
		c.Clients = []int{closedClients}
		if c.Rate > 0 {
			c.Clients = []int{openClients}
		}
	}
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if len(c.Scenarios) == 0 {
		bad("name a scenario")
	}
	for _, s := range c.Scenarios {
		if _, err := findScenario(s); err != nil {
			errs = append(errs, err)
		}
	}
	for _, n := range c.Clients {
		if n < 1 || n > maxClients {
			bad("--clients %d: want 1 to %d", n, maxClients)
		}
	}
	if c.Half && c.Rate > 0 {
		bad("--half follows closed loops: not with --rate")
	}
	if !(c.Rate >= 0 && c.Rate <= maxRate) {
		bad("--rate %g: want 0 to %g", c.Rate, maxRate)
	}
	if c.Warmup < 0 || c.Duration < 100*time.Millisecond {
		bad("--warmup must not be negative, and --duration at least 100ms")
	}
	if c.Runs < 1 || c.Runs > maxRuns {
		bad("--runs %d: want 1 to %d", c.Runs, maxRuns)
	}
	if c.Durability != durabilitySync && c.Durability != durabilityAsync {
		bad("--durability %q: want sync or async", c.Durability)
	}
	if c.Steps < 1 || c.Steps > maxSteps {
		bad("--steps %d: want 1 to %d", c.Steps, maxSteps)
	}
	if c.Objects < 0 || c.Objects > maxObjects {
		bad("--objects %d: want 0 to %d", c.Objects, maxObjects)
	}
	if c.WorkerProcs < 0 || c.ClientProcs < 0 {
		bad("--worker-procs and --client-procs must not be negative")
	}
	if c.Target != "" {
		if _, err := address(c.Target); err != nil {
			errs = append(errs, err)
		}
		if c.Store != "" || c.StoreLatency != 0 || len(c.ServeFlags) > 0 {
			bad("--store, --store-latency and --serve-flag are of the server that is started: not with --target")
		}
	}
	for _, f := range c.ServeFlags {
		if !strings.HasPrefix(f, "--") {
			bad("--serve-flag %q: want --name=value", f)
		}
	}
	return errors.Join(errs...)
}

// address is the HOST:PORT of a target, which serves HTTP and gRPC.
func address(target string) (string, error) {
	host := target
	if strings.Contains(target, "://") {
		u, err := url.Parse(target)
		if err != nil || u.Scheme != "http" || u.Host == "" {
			return "", fmt.Errorf("--target %q: want http://HOST:PORT or HOST:PORT", target)
		}
		host = u.Host
	}
	if _, port, err := net.SplitHostPort(host); err != nil || port == "" {
		return "", fmt.Errorf("--target %q: want http://HOST:PORT or HOST:PORT", target)
	}
	return host, nil
}

// settings are what a point is repeated with, and what it was measured on.
func (c *Config) settings(job *Job) Settings {
	s := Settings{
		Durability: job.Durability, Steps: job.Steps, Objects: job.Objects, Rate: c.Rate,
		Warmup: c.Warmup.String(), Duration: c.Duration.String(), Runs: c.Runs,
		Target: c.Target, Store: c.Store, ServeFlags: slices.Clone(c.ServeFlags),
		WorkerProcs: c.WorkerProcs, ClientProcs: c.ClientProcs, Version: c.Version,
	}
	if c.StoreLatency > 0 {
		s.StoreLatency = c.StoreLatency.String()
	}
	return s
}

// repeat is the configuration that measures a recorded point again.
func (p *Point) repeat() (Config, error) {
	s := p.Settings
	c := Config{
		Scenarios: []string{p.Scenario}, Clients: []int{p.Clients}, Rate: s.Rate, Runs: s.Runs,
		Durability: s.Durability, Steps: s.Steps, Objects: s.Objects, Target: s.Target, Store: s.Store,
		ServeFlags: s.ServeFlags, WorkerProcs: s.WorkerProcs, ClientProcs: s.ClientProcs,
	}
	var errs [3]error
	c.Warmup, errs[0] = time.ParseDuration(s.Warmup)
	c.Duration, errs[1] = time.ParseDuration(s.Duration)
	if s.StoreLatency != "" {
		c.StoreLatency, errs[2] = time.ParseDuration(s.StoreLatency)
	}
	if err := errors.Join(errs[:]...); err != nil {
		return c, fmt.Errorf("settings of %s with %d clients: %w", p.Scenario, p.Clients, err)
	}
	return c, c.check()
}

// number of clients in words, for headings.
func clientsText(n int, rate float64) string {
	if rate > 0 {
		return "rate=" + strconv.FormatFloat(rate, 'f', -1, 64)
	}
	return "c=" + strconv.Itoa(n)
}
