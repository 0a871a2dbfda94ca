package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"time"
)

// run is one invocation: what its points share.
type run struct {
	cfg      Config
	base     base
	upstream base
	epoch    time.Time
	col      *collector // of the point under way
	server   probe      // nil when it can't be seen
	mock     *mock      // nil when there is none
	floor    *float64   // ms
	spread   float64    // ms, the slowest of the floor's turns less the quickest: how noisy the machine is
}

// now is nanoseconds since the epoch, at least 1 so that 0 can mean never.
func (r *run) now() int64 { return max(int64(r.cfg.Env.Clock.Now().Sub(r.epoch)), 1) }

// Run measures every point of cfg, one after the other, and writes them as
// cfg asks. An error means that there is no result to trust (bad config,
// nobody answers, ctx ended); failed turns are no error but counted.
func Run(ctx context.Context, cfg Config) ([]Point, error) {
	r, err := newRun(ctx, cfg)
	if err != nil {
		return nil, err
	}
	var points []Point
	for _, n := range r.cfg.Sweep {
		measure := r.closed
		if r.cfg.Rate > 0 {
			measure = r.openLoop
		}
		p, err := measure(ctx, n)
		if err != nil {
			return points, err
		}
		points = append(points, p)
		if r.cfg.JSON {
			if err := writeLine(r.cfg.Out, p); err != nil {
				return points, err
			}
		}
	}
	return points, r.report(points)
}

// report writes the table and the plot where they are wanted.
func (r *run) report(points []Point) error {
	var errs []error
	if !r.cfg.JSON {
		errs = append(errs, WriteTable(r.cfg.Out, points))
	}
	if r.cfg.Table != "" {
		errs = append(errs, writeFile(r.cfg.Table, func(f *os.File) error { return WriteTable(f, points) }))
	}
	if r.cfg.Plot != "" {
		errs = append(errs, writeFile(r.cfg.Plot, func(f *os.File) error {
			return WritePlot(f, []Series{{Name: r.cfg.Protocol.Name(), Points: points}})
		}))
	}
	return errors.Join(errs...)
}

// writeLine writes v as JSON on one line.
func writeLine(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func writeFile(name string, write func(*os.File) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

func newRun(ctx context.Context, cfg Config) (*run, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &run{cfg: cfg, epoch: cfg.Env.Clock.Now()}
	if r.base, err = parseBase(cfg.Target); err != nil {
		return nil, err
	}
	r.server = r.findProbe(ctx)
	if cfg.Upstream != "" {
		if r.upstream, err = parseBase(cfg.Upstream); err != nil {
			return nil, err
		}
		r.mock = r.findMock(ctx)
		q, least, err := r.measureFloor(ctx)
		if err != nil {
			return nil, fmt.Errorf("floor: %w", err)
		}
		r.floor, r.spread = &q.P50, roundTo(*q.Max-least, 1000)
	}
	if cfg.Ramp == 0 {
		if r.cfg.Ramp, err = r.probeTurn(ctx); err != nil {
			return nil, fmt.Errorf("probe: %w", err)
		}
	}
	return r, nil
}

// Bounds of the measurement of the floor.
const (
	floorTurns    = 5
	floorMaxTurns = 1000
	floorTime     = 500 * time.Millisecond
)

// measureFloor takes the turn time of the upstream alone at concurrency 1:
// one warm-up turn, then at least five, and half a second. It returns the
// least in ms beside the quantiles.
func (r *run) measureFloor(ctx context.Context) (Quantiles, float64, error) {
	sub := *r
	sub.base, sub.cfg.APIKey, sub.cfg.TurnsPerSession = r.upstream, "", 0
	if sub.base.path == "" {
		sub.base.path = "/v1"
	}
	sub.cfg.Protocol = ChatCompletions(r.cfg.Model, r.cfg.InputBytes)
	times, err := sub.sequence(ctx, floorTurns, floorMaxTurns, floorTime)
	if err != nil {
		return Quantiles{}, 0, err
	}
	return quantiles(times), millis(slices.Min(times)), nil
}

// probeTurn measures how long a turn takes, to spread the workers over it.
func (r *run) probeTurn(ctx context.Context) (time.Duration, error) {
	if r.floor != nil {
		return time.Duration(*r.floor * float64(time.Millisecond)), nil
	}
	times, err := r.sequence(ctx, 1, 1, 0)
	if err != nil {
		return 0, err
	}
	return time.Duration(times[0]), nil
}

// sequence runs a warm-up turn and then between least and most turns, one
// after the other, for at least d. A turn that fails is an error; a rejected
// one waits.
func (r *run) sequence(ctx context.Context, least, most int, d time.Duration) ([]int64, error) {
	r.col = newCollector(r.cfg.Err, "probe")
	w := r.newWorker()
	defer w.c.close()
	defer context.AfterFunc(ctx, w.c.abort)()
	const maxRejected = 100
	var times []int64
	warm, rejected := false, 0
	for began := r.now(); len(times) < least || len(times) < most && r.now()-began < int64(d); {
		a := w.try(ctx)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case a.rejected && rejected < maxRejected:
			rejected++
			sleep(ctx, r.cfg.Env.Clock, a.retry)
		case a.rejected:
			return nil, fmt.Errorf("rejected %d times", maxRejected)
		case a.class != "":
			return nil, fmt.Errorf("%s: %s", a.class, a.detail)
		case !warm:
			warm = true
		default:
			times = append(times, turnTime(a))
		}
	}
	w.shut(ctx)
	return times, nil
}

// settings says how a point was taken, as far as it can change the figures.
func (r *run) settings(mode string) map[string]any {
	c := &r.cfg
	s := map[string]any{
		"mode": mode, "protocol": c.Protocol.Name(), "agent": c.Agent,
		"target": redactURL(c.Target), "duration": c.Duration.String(), "ramp": c.Ramp.Round(time.Microsecond).String(),
		"input_bytes": len(pad(c.InputBytes)), "turns_per_session": c.TurnsPerSession,
		"turn_timeout": c.TurnTimeout.String(), "started_at": c.Env.Clock.Now().UTC().Format(time.RFC3339),
		"go_version": runtime.Version(), "cpus": runtime.NumCPU(), "gomaxprocs": runtime.GOMAXPROCS(0),
		"kernel": kernel(), "client_version": 1,
	}
	if c.Upstream != "" {
		s["upstream"] = redactURL(c.Upstream)
		s["floor"] = fmt.Sprintf("median of at least %d upstream turns at concurrency 1", floorTurns)
		s["floor_spread_ms"] = r.spread
	}
	if c.Rate > 0 {
		s["rate"] = c.Rate
	}
	for k, v := range c.Labels {
		s[k] = v
	}
	return s
}

// cpus is CPU time by process; 0 for one that can't be seen.
type cpus struct{ server, client, mock time.Duration }

// figures is what is read from processes during a window.
type figures struct {
	memory memory // the highest of each
	heap   heap   // allocated in the window
	cpu    cpus   // spent in the window
	err    error  // the first time that the server's process could not be read
}

// watch samples the processes from now until the window's end, t1 on the
// run's clock, or until ctx ends.
func (r *run) watch(ctx context.Context, t1 int64) figures {
	const every = time.Second
	var f figures
	heapBegan := r.heap(ctx)
	began := r.readCPU(&f)
	for {
		left := time.Duration(t1 - r.now())
		if left <= 0 || !sleep(ctx, r.cfg.Env.Clock, min(left, every)) {
			break
		}
		r.sampleMemory(&f)
	}
	ended := r.readCPU(&f)
	if h := r.heap(ctx); heapBegan.objects > 0 && h.objects > heapBegan.objects {
		f.heap = heap{h.objects - heapBegan.objects, h.bytes - heapBegan.bytes}
	}
	f.cpu = cpus{ended.server - began.server, ended.client - began.client, ended.mock - began.mock}
	if f.err != nil {
		_, _ = fmt.Fprintf(r.cfg.Err, "load: the server's process can't be read: %v\n", f.err)
	}
	return f
}

func (r *run) readCPU(f *figures) cpus {
	c := cpus{client: selfCPU()}
	var err error
	if r.server != nil {
		if c.server, err = r.server.cpu(); err != nil && f.err == nil {
			f.err = err
		}
	}
	if r.mock != nil && r.mock.proc != nil {
		if c.mock, err = r.mock.proc.cpu(); err != nil {
			c.mock = 0
		}
	}
	return c
}

func (r *run) sampleMemory(f *figures) {
	if r.server == nil {
		return
	}
	m, err := r.server.memory()
	if err != nil && f.err == nil {
		f.err = err
	}
	f.memory = memory{max(f.memory.rss, m.rss), max(f.memory.pss, m.pss), max(f.memory.private, m.private)}
}

// point assembles the result of the window [t0, t1) on the run's clock.
func (r *run) point(ctx context.Context, n int, mode string, t0, t1 int64, f figures) Point {
	col := r.col
	turns, refused := within(col.turns, t0, t1), within(col.refused, t0, t1)
	rate := weight(col.turns, t0, t1)
	perTurn := func(d time.Duration) float64 {
		if rate == 0 {
			return 0
		}
		return millis(int64(float64(d) / rate))
	}
	p := Point{
		Concurrency: n, Turns: len(turns),
		TurnsPerS: roundTo(rate/time.Duration(t1-t0).Seconds(), 1000),
		TTFT:      quantiles(spans(turns, ttft)), Turn: quantiles(spans(turns, turnTime)),
		Errors: col.total(""), Rejected: col.rejected, BrokenStreams: col.total(errBroken),
		ErrorKinds: col.kinds(), SamplesDropped: col.dropped,
		Client: ClientFigures{CPUMSTurn: perTurn(f.cpu.client)}, Settings: r.settings(mode), FloorMS: r.floor,
	}
	p.TTFT.Max = nil
	if len(refused) > 0 {
		q := quantiles(spans(refused, turnTime))
		p.RejectedMS = &q
	}
	if r.server != nil && f.err == nil {
		p.Server = &ServerFigures{RSS: f.memory.rss, PSS: f.memory.pss, Private: f.memory.private, CPUMSTurn: perTurn(f.cpu.server)}
		if rate > 0 {
			p.Server.AllocsTurn = roundTo(f.heap.objects/rate, 10)
			p.Server.AllocBytesTurn = roundTo(f.heap.bytes/rate, 1)
		}
	}
	if r.mock != nil {
		p.Mock = &MockFigures{CPUMSTurn: perTurn(f.cpu.mock)}
		var err error
		if p.Mock.MaxConcurrent, err = r.mock.maxConcurrent(ctx); err != nil {
			_, _ = fmt.Fprintf(r.cfg.Err, "load: the upstream's stats: %v\n", err)
			p.Mock = nil
		}
	}
	return p
}

func roundTo(v, parts float64) float64 { return float64(int64(v*parts+0.5)) / parts }

// median of a non-empty list; the lower one of an even count.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[(len(s)-1)/2]
}
