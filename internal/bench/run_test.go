package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The test binary stands for perdure when this variable is set: a server that
// counts, a worker that connects, a client that loads without a product. Its
// value says what goes wrong.
const fakeEnv = "PERDURE_BENCH_FAKE"

func TestMain(m *testing.M) {
	if how := os.Getenv(fakeEnv); how != "" {
		if err := fake(how, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "fake:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func fake(how string, args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	switch strings.Join(args[:min(2, len(args))], " ") {
	case "bench worker":
		return play(ctx, os.Stdin, os.Stdout, func(ctx context.Context, job *Job, r *reporter) error {
			if how == "no worker" {
				return errors.New("the worker was refused")
			}
			if _, err := dialWakes(ctx, job.Socket); err != nil {
				return err
			}
			r.say(Report{Kind: kindReady})
			profileWindow(ctx, job, r)
			<-ctx.Done()
			return nil
		})
	case "bench client":
		return play(ctx, os.Stdin, os.Stdout, func(ctx context.Context, job *Job, r *reporter) error { return fakeClient(ctx, how, job, r) })
	}
	if args[0] != "serve" {
		return fmt.Errorf("arguments %q", args)
	}
	if how == "no server" {
		return errors.New("the port is taken")
	}
	return fakeServer(ctx, args)
}

func fakeClient(ctx context.Context, how string, job *Job, r *reporter) error {
	wakes, err := listenWakes(job.Socket)
	if err != nil {
		return err
	}
	defer wakes.close()
	r.say(Report{Kind: kindListening})
	if how == "client dies" {
		return fmt.Errorf("prepare %s: no room", job.Scenario)
	}
	r.say(Report{Kind: kindReady})
	var n atomic.Uint64
	loop := &Loop{Clients: job.Clients, Rate: job.Rate, Warmup: job.Warmup, Duration: job.Duration,
		WindowBegin: func() { r.edge(ctx, kindBegin) }, WindowEnd: func() { r.edge(ctx, kindEnd) },
		Progress: func(p Progress) { r.say(Report{Kind: kindProgress, Progress: &p}) },
		Op: func(ctx context.Context, _ int, _ time.Time) (time.Time, error) {
			res, err := http.Get("http://" + job.Address + "/op")
			if err != nil {
				return time.Time{}, err
			}
			_ = res.Body.Close()
			if n.Add(1)%50 == 7 && how == "errors" {
				return time.Time{}, errors.New("refused")
			}
			return time.Time{}, nil
		}}
	res, err := loop.Run(ctx)
	if err != nil {
		return err
	}
	o := &outcome{Units: res.Units, Elapsed: res.Elapsed, Latency: res.Latency.Latency(), Lag: res.Lag.Latency(), Errors: res.Errors}
	if res.First != nil {
		o.First = res.First.Error()
	}
	r.say(Report{Kind: kindResult, Result: o})
	<-ctx.Done()
	return nil
}

// fakeServer commits a batch of 100 bytes for each two operations.
func fakeServer(ctx context.Context, args []string) error {
	listen := args[slices.Index(args, "--listen")+1]
	if i := slices.Index(args, "--admin-listen"); i > 0 {
		s := &http.Server{Addr: args[i+1], Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, r.URL.String())
		})}
		context.AfterFunc(ctx, func() { _ = s.Close() })
		go func() { _ = s.ListenAndServe() }()
	}
	var ops atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/readyz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/op", func(http.ResponseWriter, *http.Request) { ops.Add(1) })
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "# HELP x\nperdure_journal_batches_total{partition=\"0\"} %d\nperdure_journal_bytes_total %d\n", ops.Load()/2, ops.Load()*50)
		if slices.Contains(args, "--store") {
			_, _ = fmt.Fprintf(w, "perdure_store_puts_total %d\n", ops.Load())
		}
	})
	s := &http.Server{Addr: listen, Handler: mux}
	context.AfterFunc(ctx, func() { _ = s.Close() })
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// quick is a configuration of short runs with fake processes.
func quick(t *testing.T, how string) (Config, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	t.Setenv(fakeEnv, how)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, progress bytes.Buffer
	return Config{
		Scenarios: []string{"flow-start"}, Clients: []int{2}, Warmup: 50 * time.Millisecond, Duration: 200 * time.Millisecond, Runs: 1,
		Durability: durabilitySync, Steps: 10, Binary: self, Version: "test", Dir: t.TempDir(), JSON: true, Stdout: &out, Stderr: &progress,
	}, &out, &progress
}

func TestRunStartsMeasuresAndKeeps(t *testing.T) {
	c, out, progress := quick(t, "yes")
	c.Runs, c.Clients, c.Store, c.Out = 3, []int{1, 4}, "mem:", filepath.Join(t.TempDir(), "results", "x")
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err, progress)
	}
	points, err := parsePoints(out)
	if err != nil || len(points) != 2 {
		t.Fatalf("%d points, %v", len(points), err)
	}
	for _, p := range points {
		if p.Ops == 0 || p.PerS == 0 || p.Latency.P50 == 0 || len(p.Runs) != 3 || p.Errors != 0 || p.RSS == 0 || p.RSSs.Worker == 0 || p.RSSs.Client == 0 || p.CPU.Client < 0 {
			t.Errorf("%+v", p)
		}
		if p.Journal == nil || p.Journal.Batches < 300 || p.Journal.Batches > 700 || p.Journal.Bytes < 30 || p.Journal.Bytes > 70 || p.Journal.Puts == nil || *p.Journal.Puts <= 0 {
			t.Errorf("journal %+v, want about 500 batches a thousand and 50 bytes", p.Journal)
		}
		if s := p.Settings; s.Cores == 0 || s.SyncMS == 0 || s.Filesystem == "" || s.Version != "test" || s.Store != "mem:" || s.Duration != "200ms" {
			t.Errorf("settings %+v", s)
		}
	}
	left, _ := filepath.Glob(filepath.Join(c.Dir, "*"))
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	for _, name := range []string{pointsFile, settingsFile, tableFile} {
		if b, err := os.ReadFile(filepath.Join(c.Out, name)); err != nil || len(b) == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	out.Reset()
	with, _, _ := quick(t, "yes")
	with.Stdout, with.JSON, with.Durability = out, false, ""
	if err := Reproduce(t.Context(), c.Out, "flow-start", 4, with); err != nil {
		t.Fatal(err)
	}
	if s := out.String(); strings.Count(s, "flow-start") != 2 || !strings.Contains(s, "now ÷ recorded") {
		t.Errorf("reproduce printed:\n%s", s)
	}
	if err := Reproduce(t.Context(), c.Out, "flow-start", 5, with); !errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), "flow-start c=1, flow-start c=4") {
		t.Errorf("a point that is not there: %v", err)
	}
}

func TestRunOpenLoopAndTable(t *testing.T) {
	c, out, _ := quick(t, "yes")
	c.Rate, c.JSON, c.Clients = 200, false, nil
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if s := out.String(); !strings.Contains(s, "rate=200") || !strings.Contains(s, "ops/s") {
		t.Errorf("the table:\n%s", s)
	}
}

func TestRunHalf(t *testing.T) {
	c, out, _ := quick(t, "yes")
	c.Half = true
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	points, err := parsePoints(out)
	if err != nil || len(points) != 2 {
		t.Fatalf("%d points, %v", len(points), err)
	}
	if a, b := points[0], points[1]; a.Rate != 0 || b.Rate < a.PerS*0.49 || b.Rate > a.PerS*0.51 || b.Clients != openClients || b.Lag == nil {
		t.Errorf("%+v\n%+v", a, b)
	}
}

func TestProfiles(t *testing.T) {
	c, _, _ := quick(t, "yes")
	c.Profile = filepath.Join(t.TempDir(), "profiles")
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	got, _ := filepath.Glob(filepath.Join(c.Profile, "flow-start-sync-2.*.pprof"))
	if len(got) != 2 { // the fake client writes none
		t.Errorf("profiles %v", got)
	}
	if b, _ := os.ReadFile(filepath.Join(c.Profile, "flow-start-sync-2.server.pprof")); string(b) != "/debug/pprof/profile?seconds=1" {
		t.Errorf("the server was asked for %q", b)
	}
}

// What goes wrong in a process is said in its own words.
func TestRunFailures(t *testing.T) {
	for how, want := range map[string]string{
		"no server": "the port is taken", "no worker": "the worker was refused", "client dies": "prepare flow-start: no room",
	} {
		t.Run(how, func(t *testing.T) {
			c, _, _ := quick(t, how)
			if err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
			if left, _ := filepath.Glob(filepath.Join(c.Dir, "*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	t.Run("errors", func(t *testing.T) {
		c, out, progress := quick(t, "errors")
		if err := Run(t.Context(), c); !errors.Is(err, ErrFailedOps) {
			t.Error(err)
		}
		if !strings.Contains(progress.String(), "the first error: refused") || !strings.Contains(out.String(), `"first_error":"refused"`) {
			t.Errorf("%s\n%s", progress, out)
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		c, _, _ := quick(t, "yes")
		c.Duration = time.Hour
		ctx, cancel := context.WithCancel(t.Context())
		c.Stderr = writer(func(b []byte) {
			if bytes.Contains(b, []byte("warming up")) {
				cancel()
			}
		})
		if err := Run(ctx, c); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

func TestTarget(t *testing.T) {
	c, out, _ := quick(t, "yes")
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	at := fmt.Sprintf("127.0.0.1:%d", port)
	server, err := startChild("server", nil, nil, c.Binary, "serve", "--listen", at)
	if err != nil {
		t.Fatal(err)
	}
	defer server.stop()
	for !ready(t.Context(), at) {
		select {
		case <-server.done:
			t.Fatal(server.ended(nil))
		default:
		}
	}
	c.Target = "http://" + at
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if points, err := parsePoints(out); err != nil || points[0].Ops == 0 || points[0].Settings.Target != c.Target {
		t.Errorf("%v %v", points, err)
	}
}

func TestCheck(t *testing.T) {
	good, _, _ := quick(t, "yes")
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"name a scenario":          func(c *Config) { c.Scenarios = nil },
		"no scenario \"nope\"":     func(c *Config) { c.Scenarios = []string{"nope"} },
		"--clients 0":              func(c *Config) { c.Clients = []int{0} },
		"not with --rate":          func(c *Config) { c.Half, c.Rate = true, 1 },
		"--rate -1":                func(c *Config) { c.Rate = -1 },
		"--duration at least":      func(c *Config) { c.Duration = 0 },
		"--runs 0":                 func(c *Config) { c.Runs = 0 },
		"--durability \"maybe\"":   func(c *Config) { c.Durability = "maybe" },
		"--steps 0":                func(c *Config) { c.Steps = 0 },
		"--objects -1":             func(c *Config) { c.Objects = -1 },
		"--worker-procs":           func(c *Config) { c.WorkerProcs = -1 },
		"--target \"x\"":           func(c *Config) { c.Target = "x" },
		"--target \"https://x:1\"": func(c *Config) { c.Target = "https://x:1" },
		"not with --target":        func(c *Config) { c.Target, c.Store = "h:1", "mem:" },
		"--serve-flag \"x\"":       func(c *Config) { c.ServeFlags = []string{"x"} },
	} {
		c := good
		change(&c)
		if err := Run(t.Context(), c); !errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestScenarioNames(t *testing.T) {
	names, what := Scenarios()
	for _, n := range []string{"sequential-steps", "flow-start", "rpc-read", "rpc-locked-update", "attribute-read", "channel-wake", "timers", "mixed"} {
		if i := slices.Index(names, n); i < 0 || what[i] == "" {
			t.Errorf("%s is not a scenario that is described", n)
		}
	}
	for _, sc := range scenarios {
		if n := sc.units(&Job{Steps: 7}); n != 1 && (sc.name != "sequential-steps" || n != 7) {
			t.Errorf("%s has %d units", sc.name, n)
		}
	}
	newPrograms(func(int) {}) // the definitions hold
}

func TestMedianRun(t *testing.T) {
	run := func(perS, p50 float64) Figures { return Figures{PerS: perS, Latency: Latency{P50: p50}} }
	runs := []Figures{run(30, 1), run(10, 2), run(20, 9)}
	if m := median(runs, false); m.PerS != 20 || m.Latency.P50 != 9 {
		t.Errorf("median by throughput: %+v", m)
	}
	if m := median(runs, true); m.Latency.P50 != 2 {
		t.Errorf("median by latency: %+v", m)
	}
	if m := median(runs[:2], false); m.PerS != 10 {
		t.Errorf("of two the worse: %+v", m)
	}
	if m := median(runs[:2], true); m.Latency.P50 != 2 {
		t.Errorf("of two the worse by latency: %+v", m)
	}
}

func TestRepeatHoldsSettings(t *testing.T) {
	c, _, _ := quick(t, "yes")
	c.Steps, c.Store, c.StoreLatency, c.ServeFlags, c.Rate, c.WorkerProcs = 7, "mem:", 3*time.Millisecond, []string{"--kernel.partitions=2"}, 50, 1
	p := &Point{Scenario: "flow-start", Clients: 9, Rate: 50, Settings: c.settings(&Job{Durability: c.Durability, Steps: 7, Objects: 3})}
	b, err := p.line()
	if err != nil {
		t.Fatal(err)
	}
	back, err := parsePoints(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	got, err := back[0].repeat()
	if err != nil {
		t.Fatal(err)
	}
	want := Config{Scenarios: []string{"flow-start"}, Clients: []int{9}, Rate: 50, Runs: 1, Durability: "sync", Steps: 7, Objects: 3,
		Store: "mem:", StoreLatency: 3 * time.Millisecond, ServeFlags: c.ServeFlags, WorkerProcs: 1, Warmup: c.Warmup, Duration: c.Duration}
	if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
		t.Errorf("\n%s, want\n%s", g, w)
	}
	back[0].Settings.Warmup = "soon"
	if _, err := back[0].repeat(); err == nil {
		t.Error("a bad duration was accepted")
	}
}

func TestParseMetrics(t *testing.T) {
	c := parseMetrics(strings.NewReader(`# TYPE a_journal_batches_total counter
a_journal_batches_total{partition="0"} 3
a_journal_batches_total{partition="1"} 4
my_journal_bytes_total 1e3
process_cpu_seconds_total 1.5 1700000000
process_resident_memory_bytes
perdure_other_total 9
broken
`))
	if c.batches != 7 || c.bytes != 1000 || c.cpuSeconds != 1.5 || c.rss != -1 || c.puts != -1 {
		t.Errorf("%+v", c)
	}
	if since(3, 7) != 4 || since(-1, 7) != -1 || since(7, 3) != -1 {
		t.Error("since")
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add("a_journal_batches_total{x=\"}\"} 3\n")
	f.Fuzz(func(_ *testing.T, s string) { _ = parseMetrics(strings.NewReader(s)) })
}

func FuzzParsePoints(f *testing.F) {
	f.Add([]byte(`{"scenario":"flow-start","clients":1,"settings":{"warmup":"1s"}}`))
	f.Fuzz(func(_ *testing.T, b []byte) {
		points, err := parsePoints(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, p := range points {
			_, _ = p.repeat()
		}
		_ = WriteTable(io.Discard, points)
	})
}

func TestRatios(t *testing.T) {
	dir := t.TempDir()
	ours, peer := filepath.Join(dir, "ours"), filepath.Join(dir, "peer")
	var a, b bytes.Buffer
	for i, perS := range []float64{3000, 1000, 2000} {
		p := &Point{Scenario: "flow-start", Clients: 64, Figures: Figures{PerS: perS, CPU: CPU{10, 20, 30}}}
		line, _ := p.line()
		a.Write(line)
		_ = json.NewEncoder(&b).Encode(map[string]any{"peer": "other", "scenario": "flow-start", "clients": 64, "ops_per_s": 100 * (i + 1), "cpu_us_per_op": map[string]float64{"x": 100, "y": 140}})
	}
	_ = json.NewEncoder(&b).Encode(map[string]any{"peer": "other", "scenario": "flow-start", "clients": 1, "ops_per_s": 5})
	_ = json.NewEncoder(&b).Encode(map[string]any{"peer": "other", "scenario": "flow-start-local", "clients": 64, "ops_per_s": 1000})
	if err := errors.Join(os.WriteFile(ours, a.Bytes(), 0o600), os.WriteFile(peer, b.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Ratios(&out, ours, peer); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || !strings.Contains(lines[1], "10.00×") || !strings.Contains(lines[1], "0.25×") || !strings.Contains(lines[2], "2.00×") {
		t.Errorf("\n%s", &out)
	}
	if err := os.WriteFile(peer, []byte(`{"peer":"other","scenario":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Ratios(&out, ours, peer); err == nil || !strings.Contains(err.Error(), "no point in common") {
		t.Error(err)
	}
}

func TestWakesTravel(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	r, err := listenWakes(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	s, err := dialWakes(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	first, woke := r.slot()
	second, other := r.slot()
	begin := time.Now()
	s.woke(second)
	s.woke(1 << 40) // nobody's
	s.woke(first)
	for _, ch := range []<-chan time.Time{woke, other} {
		at, err := await(t.Context(), ch)
		if d := at.Sub(begin); err != nil || d < -50*time.Millisecond || d > time.Second {
			t.Errorf("woke %v after, %v", d, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := await(ctx, woke); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestEachRunHasItsPlaceInAStore(t *testing.T) {
	for store, want := range map[string]string{
		"mem:":                         "mem:",
		"":                             "",
		"s3://bucket":                  "s3://bucket/run-1",
		"s3://bucket/a/?region=r&x=y?": "s3://bucket/a/run-1?region=r&x=y?",
	} {
		if got := below(store, "run-1"); got != want {
			t.Errorf("below(%q) = %q, want %q", store, got, want)
		}
	}
}
