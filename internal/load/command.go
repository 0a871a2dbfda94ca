package load

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

const usage = `usage:
  load turns    --target URL [--agent NAME] [--concurrency N | --sweep 1,2,4] [--duration D] [--rate R] [--json]
  load overload --target URL [--agent NAME] [--concurrency LIMIT] [--factor 10] [--overload-for D] [--json]
  load table    FILE...                        a table of recorded points
  load plot     --out FILE NAME=POINTS...      an SVG of recorded sweeps
  load columns  NAME=POINTS...                 sweeps side by side, with ratios to the last
  load compare  [--limit 0.2] --base A,B,C --head A,B,C   medians of runs; exit 1 on growth
each with -h for its flags
`

// Command runs `load ARGS` and returns the exit code: 0 = done, 1 = done, and
// a check failed or errors were counted, 2 = could not run.
func Command(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	sub := map[string]func(context.Context, []string, io.Writer, io.Writer) (bool, error){
		"turns": turnsCommand, "overload": overloadCommand, "table": tableCommand, "plot": plotCommand, "columns": columnsCommand, "compare": compareCommand,
	}
	if len(args) == 0 || sub[args[0]] == nil {
		_, _ = io.WriteString(stderr, usage)
		return 2
	}
	ok, err := sub[args[0]](ctx, args[1:], stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "load %s: %v\n", args[0], err)
		return 2
	case !ok:
		return 1
	}
	return 0
}

// configFlags are the flags that turns and overload share.
func configFlags(fs *flag.FlagSet, c *Config) (finish func() error) {
	fs.StringVar(&c.Target, "target", "", "base `URL` of the server (required)")
	fs.StringVar(&c.Agent, "agent", "default", "`NAME` of the agent; the model with --protocol chat")
	fs.DurationVar(&c.Duration, "duration", 0, "measured window of a point (default 15s)")
	fs.DurationVar(&c.Ramp, "ramp", 0, "spread of the workers' starts (default one turn)")
	fs.IntVar(&c.InputBytes, "input-bytes", 0, "size of a turn's input (default \"hello\")")
	fs.IntVar(&c.TurnsPerSession, "turns-per-session", 0, "fresh session after so many turns (default never)")
	fs.StringVar(&c.Upstream, "upstream", "", "base `URL` of the model provider, to measure the floor")
	fs.StringVar(&c.Model, "model", "mock", "model asked of the upstream")
	fs.IntVar(&c.ServerPID, "server-pid", 0, "process of the server (default: the listener on the target's port)")
	fs.DurationVar(&c.TurnTimeout, "turn-timeout", 0, "a longer turn is an error (default 2m)")
	fs.BoolVar(&c.JSON, "json", false, "one JSON object a line instead of a table")
	fs.StringVar(&c.Table, "table", "", "write a table to `FILE`")
	fs.StringVar(&c.Plot, "plot", "", "write an SVG to `FILE`")
	keyFile := fs.String("api-key-file", "", "`FILE` with the API key (default: $PERDURE_API_KEY)")
	protocol := fs.String("protocol", "perdure", "perdure, chat (OpenAI Chat Completions), or the `FILE` of a description")
	c.Labels = map[string]string{}
	fs.Func("label", "`KEY=VALUE` copied into the settings; may be repeated", func(s string) error {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want KEY=VALUE")
		}
		c.Labels[k] = v
		return nil
	})
	return func() error {
		c.APIKey = os.Getenv("PERDURE_API_KEY")
		if *keyFile != "" {
			b, err := os.ReadFile(*keyFile)
			if err != nil {
				return err
			}
			c.APIKey = strings.TrimSpace(string(b))
		}
		switch *protocol {
		case "perdure":
		case "chat":
			c.Protocol = ChatCompletions(c.Agent, c.InputBytes)
		default:
			f, err := os.Open(*protocol)
			if err != nil {
				return fmt.Errorf("protocol: want perdure, chat or a file: %w", err)
			}
			defer func() { _ = f.Close() }()
			if c.Protocol, err = ReadProtocol(f); err != nil {
				return err
			}
		}
		if fs.NArg() > 0 {
			return fmt.Errorf("unexpected argument %q", fs.Arg(0))
		}
		return nil
	}
}

func turnsCommand(ctx context.Context, args []string, stdout, stderr io.Writer) (bool, error) {
	fs := flags("turns", stderr)
	c := Config{Out: stdout, Err: stderr}
	finish := configFlags(fs, &c)
	fs.IntVar(&c.Concurrency, "concurrency", 0, "workers, each with its own session (default 1); with --rate their cap")
	fs.Float64Var(&c.Rate, "rate", 0, "open loop: turns offered a second")
	sweep := fs.String("sweep", "", "one point per concurrency, as 1,2,4")
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	if err := finish(); err != nil {
		return false, err
	}
	for _, s := range strings.FieldsFunc(*sweep, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil {
			return false, fmt.Errorf("sweep %q: want numbers, as 1,2,4", *sweep)
		}
		c.Sweep = append(c.Sweep, n)
	}
	points, err := Run(ctx, c)
	ok := true
	for _, p := range points {
		ok = ok && p.Errors == 0
	}
	return ok, err
}

func overloadCommand(ctx context.Context, args []string, stdout, stderr io.Writer) (bool, error) {
	fs := flags("overload", stderr)
	c := OverloadConfig{Config: Config{Out: stdout, Err: stderr}}
	finish := configFlags(fs, &c.Config)
	fs.IntVar(&c.Concurrency, "concurrency", 0, "workers of the calibration: the server's max_in_flight_turns (default 64)")
	fs.Float64Var(&c.Factor, "factor", 0, "overload by the accepted rate (default 10)")
	fs.DurationVar(&c.For, "overload-for", 0, "length of the overload (default 10s)")
	fs.IntVar(&c.MaxWorkers, "max-workers", 0, "cap of connections in the overload (default 4096)")
	fs.IntVar(&c.UpstreamLimit, "upstream-limit", 0, "the provider's concurrency_limit, to be checked at the mock")
	fs.DurationVar(&c.MaxRejectedP99, "max-rejected-p99", 0, "bound of a refusal's p99 (default 5ms)")
	fs.DurationVar(&c.MaxRecovery, "max-recovery", 0, "bound of the recovery (default 2s)")
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	if err := finish(); err != nil {
		return false, err
	}
	rep, err := Overload(ctx, c)
	return rep.Pass, err
}

func tableCommand(_ context.Context, args []string, stdout, _ io.Writer) (bool, error) {
	for _, name := range args {
		points, err := readFile(name)
		if err != nil {
			return false, err
		}
		if len(args) > 1 {
			_, _ = fmt.Fprintln(stdout, name)
		}
		if err := WriteTable(stdout, points); err != nil {
			return false, err
		}
	}
	return true, nil
}

func plotCommand(_ context.Context, args []string, _, stderr io.Writer) (bool, error) {
	fs := flags("plot", stderr)
	out := fs.String("out", "", "SVG `FILE` to write (required)")
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	if *out == "" || fs.NArg() == 0 {
		return false, errors.New("want --out FILE and NAME=POINTS")
	}
	all, err := readSeries(fs.Args())
	if err != nil {
		return false, err
	}
	return true, writeFile(*out, func(f *os.File) error { return WritePlot(f, all) })
}

func columnsCommand(_ context.Context, args []string, stdout, _ io.Writer) (bool, error) {
	all, err := readSeries(args)
	if err != nil {
		return false, err
	}
	return true, WriteColumns(stdout, all)
}

// readSeries reads sweeps given as NAME=FILE.
func readSeries(args []string) ([]Series, error) {
	var all []Series
	for _, a := range args {
		name, file, ok := strings.Cut(a, "=")
		if !ok {
			return nil, fmt.Errorf("%q: want NAME=POINTS", a)
		}
		points, err := readFile(file)
		if err != nil {
			return nil, err
		}
		all = append(all, Series{name, points})
	}
	if len(all) == 0 {
		return nil, errors.New("want NAME=POINTS")
	}
	return all, nil
}

func compareCommand(_ context.Context, args []string, stdout, stderr io.Writer) (bool, error) {
	fs := flags("compare", stderr)
	base := fs.String("base", "", "points of the base's runs, `A,B,C`, or a baseline.json (required)")
	head := fs.String("head", "", "points of the head's runs, `A,B,C` (required)")
	limit := fs.Float64("limit", 0.2, "share of growth that alarms")
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	b, err := readRuns(*base)
	if err != nil {
		return false, err
	}
	h, err := readRuns(*head)
	if err != nil {
		return false, err
	}
	growth, err := Compare(b, h, *limit)
	if err != nil {
		return false, err
	}
	alarm, err := WriteGrowth(stdout, growth)
	return !alarm, err
}

func flags(name string, stderr io.Writer) *flag.FlagSet {
	fs := flag.NewFlagSet("load "+name, flag.ContinueOnError)
	fs.SetOutput(stderr)
	return fs
}

// readRuns reads a list of files: a baseline (.json) holds several runs, any
// other one run's points.
func readRuns(list string) ([][]Point, error) {
	var out [][]Point
	for _, name := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' }) {
		runs, err := readRun(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, runs...)
	}
	return out, nil
}

func readRun(name string) ([][]Point, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if strings.HasSuffix(name, ".json") {
		b, err := ReadBaseline(f)
		return b.Runs, err
	}
	p, err := ReadPoints(f)
	return [][]Point{p}, err
}

func readFile(name string) ([]Point, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	points, err := ReadPoints(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return points, nil
}
