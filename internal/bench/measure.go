package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	serverPatience = time.Minute
	// reportPatience bounds the silence of a client beyond its warm-up and
	// window: it prepares flows before, and drains after.
	reportPatience = 5 * time.Minute
	rssEvery       = 500 * time.Millisecond
)

// trial is one run under way: its processes, and what was read of them.
type trial struct {
	c        *Config
	job      Job
	dir      string // scratch
	admin    string // address of the server's profiles; empty = none are wanted
	server   *child // nil with a target
	worker   *child
	client   *child
	reports  chan Report // of both
	progress func(string)

	begin, end snapshot
	mu         sync.Mutex
	peak       RSS // guarded by mu
}

// snapshot is what was read at an edge of the window.
type snapshot struct {
	server, worker, client reading
	counters               counters
	at                     time.Time // of the counters
}

// reading is the CPU time of a process at an instant.
type reading struct {
	at  time.Time
	cpu time.Duration
}

// measure does one run of a job.
func (c *Config) measure(ctx context.Context, job Job, progress func(string)) (f Figures, err error) {
	t := &trial{c: c, job: job, reports: make(chan Report, 64), progress: progress}
	if t.dir, err = os.MkdirTemp(c.Dir, "perdure-bench-"); err != nil {
		return f, err
	}
	defer func() {
		t.client.stop()
		t.worker.stop()
		t.server.stop()
		err = errors.Join(err, os.RemoveAll(t.dir))
	}()
	if err := t.open(ctx); err != nil {
		return f, err
	}
	return t.follow(ctx)
}

// open starts server, client and worker, in this order.
func (t *trial) open(ctx context.Context) (err error) {
	t.job.Socket = filepath.Join(t.dir, "wakes")
	if t.c.Target != "" {
		t.job.Key = t.c.Key
		t.job.Run = filepath.Base(t.dir) + "/"
		if t.job.Address, err = address(t.c.Target); err != nil {
			return err
		}
	} else if err := t.serve(ctx); err != nil {
		return err
	}
	if t.client, err = t.role("client", t.c.ClientProcs); err != nil {
		return err
	}
	if _, err := t.next(ctx, kindListening); err != nil {
		return err
	}
	if t.worker, err = t.role("worker", t.c.WorkerProcs); err != nil {
		return err
	}
	return nil
}

// serve starts the server and waits until it is ready.
func (t *trial) serve(ctx context.Context) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	t.job.Address = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	args := []string{"serve", "--data", filepath.Join(t.dir, "data"), "--listen", t.job.Address}
	if t.c.Store != "" {
		args = append(args, "--store", below(t.c.Store, filepath.Base(t.dir)))
	}
	if t.c.StoreLatency > 0 {
		args = append(args, "--store-latency", t.c.StoreLatency.String())
	}
	if t.job.Profile != "" {
		if port, err = freePort(); err != nil {
			return err
		}
		t.admin = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		args = append(args, "--admin-listen", t.admin)
	}
	if t.server, err = startChild("server", nil, nil, t.c.Binary, append(args, t.c.ServeFlags...)...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	for {
		if ready(ctx, t.job.Address) {
			return nil
		}
		again := time.NewTimer(20 * time.Millisecond)
		select {
		case <-again.C:
		case <-t.server.done:
			again.Stop()
			return t.server.ended(nil)
		case <-ctx.Done():
			again.Stop()
			return t.server.ended(fmt.Errorf("not ready: %w", ctx.Err()))
		}
	}
}

func ready(ctx context.Context, address string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
	if err != nil {
		return false
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// role starts a worker or client with the job.
func (t *trial) role(name string, procs int) (*child, error) {
	var env []string
	if procs > 0 {
		env = []string{"GOMAXPROCS=" + strconv.Itoa(procs)}
	}
	c, err := startChild(name, func(r Report) {
		if name != "worker" || r.Kind == kindFailed {
			t.reports <- r
		}
	}, env, t.c.Binary, "bench", name)
	if err != nil {
		return nil, err
	}
	return c, c.tell(t.job)
}

// next gives the next report; want "" takes any kind.
func (t *trial) next(ctx context.Context, want string) (Report, error) {
	late := time.NewTimer(t.job.Warmup + t.job.Duration + reportPatience)
	defer late.Stop()
	for {
		select {
		case r := <-t.reports:
			if r.Kind == kindFailed {
				return r, errors.New(r.Error)
			}
			if want == "" || r.Kind == want {
				return r, nil
			}
		case <-doneOf(t.client):
			select {
			case r := <-t.reports: // what it said before it ended
				if r.Kind == kindFailed {
					return r, errors.New(r.Error)
				}
				if want == "" || r.Kind == want {
					return r, nil
				}
				continue
			default:
			}
			return Report{}, t.client.ended(nil)
		case <-doneOf(t.worker):
			return Report{}, t.worker.ended(nil)
		case <-doneOf(t.server):
			return Report{}, t.server.ended(nil)
		case <-late.C:
			return Report{}, t.client.ended(errors.New("it reports nothing"))
		case <-ctx.Done():
			return Report{}, ctx.Err()
		}
	}
}

// doneOf is nil, which never fires, for a process that was not started.
func doneOf(c *child) <-chan struct{} {
	if c == nil {
		return nil
	}
	return c.done
}

// follow reads the client's reports up to its result.
func (t *trial) follow(ctx context.Context) (Figures, error) {
	sampling, stopSampling := context.WithCancel(ctx)
	defer stopSampling()
	profiled := make(chan error, 1)
	for {
		r, err := t.next(ctx, "")
		if err != nil {
			return Figures{}, err
		}
		switch r.Kind {
		case kindReady:
			t.progress("warming up")
		case kindProgress:
			phase := "warm-up"
			if r.Progress.Warm {
				phase = "window"
			}
			t.progress(fmt.Sprintf("%s %2.0fs: %d/s, %d errors", phase, r.Progress.Elapsed.Seconds(), r.Progress.Units, r.Progress.Errors))
		case kindBegin:
			t.begin = t.look(ctx)
			go t.sampleRSS(sampling)
			if t.admin != "" {
				go func() { profiled <- t.fetchProfile(ctx) }()
			} else {
				profiled <- nil
			}
			err = errors.Join(t.worker.tell(kindBegin), t.client.tell(kindBegin))
		case kindEnd:
			t.end = t.look(ctx)
			stopSampling()
			err = errors.Join(t.worker.tell(kindEnd), t.client.tell(kindEnd))
		case kindResult:
			return t.figures(r.Result), <-profiled
		}
		if err != nil {
			return Figures{}, err
		}
	}
}

// below gives each run a place of its own in an object store, which it leaves as
// it is.
func below(store, name string) string {
	place, query, asked := strings.Cut(store, "?")
	if !strings.HasPrefix(place, "s3:") {
		return store
	}
	place = strings.TrimSuffix(place, "/") + "/" + name
	if asked {
		place += "?" + query
	}
	return place
}

// look reads CPU and metrics, each with its instant.
func (t *trial) look(ctx context.Context) (s snapshot) {
	s.worker = t.cpu(t.worker)
	s.client = t.cpu(t.client)
	if t.server != nil {
		s.server = t.cpu(t.server)
	}
	before := time.Now()
	var err error
	if s.counters, err = scrape(ctx, t.job.Address, t.job.Key); err != nil {
		t.progress("no metrics: " + err.Error())
	}
	s.at = before.Add(time.Since(before) / 2)
	if t.server == nil {
		s.server = reading{s.at, time.Duration(max(s.counters.cpuSeconds, 0) * float64(time.Second))}
	}
	return s
}

func (t *trial) cpu(c *child) reading {
	d, err := ProcessCPU(c.pid())
	if err != nil {
		t.progress("no CPU of the " + c.name + ": " + err.Error())
	}
	return reading{time.Now(), d}
}

// sampleRSS keeps the peaks until ctx ends.
func (t *trial) sampleRSS(ctx context.Context) {
	tick := time.NewTicker(rssEvery)
	defer tick.Stop()
	for {
		var now RSS
		if t.server != nil {
			now.Server, _ = ProcessRSS(t.server.pid())
		}
		now.Worker, _ = ProcessRSS(t.worker.pid())
		now.Client, _ = ProcessRSS(t.client.pid())
		t.mu.Lock()
		t.peak = RSS{max(t.peak.Server, now.Server), max(t.peak.Worker, now.Worker), max(t.peak.Client, now.Client)}
		t.mu.Unlock()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// figures puts the client's outcome and the readings together. What was read
// here was read a little apart from the client's window, but under the same
// load: so it counts by its own time, and by the client's units a second.
func (t *trial) figures(o *outcome) Figures {
	perS := float64(o.Units) / o.Elapsed.Seconds()
	cpu := func(a, b reading) float64 {
		return round(float64((b.cpu-a.cpu).Microseconds())/b.at.Sub(a.at).Seconds()/perS, 2)
	}
	t.mu.Lock()
	peak := t.peak
	t.mu.Unlock()
	if t.server == nil {
		peak.Server = int64(max(t.begin.counters.rss, t.end.counters.rss, 0))
	}
	f := Figures{
		Ops: o.Units, PerS: round(perS, 1), Latency: o.Latency,
		CPU: CPU{cpu(t.begin.server, t.end.server), cpu(t.begin.worker, t.end.worker), cpu(t.begin.client, t.end.client)},
		RSS: peak.Server, RSSs: peak, Errors: o.Errors, Error: o.First, Unstart: o.Late,
	}
	if t.job.Rate > 0 {
		f.Lag = &o.Lag
	}
	a, b, took := t.begin.counters, t.end.counters, t.end.at.Sub(t.begin.at).Seconds()
	if batches, bytes := since(a.batches, b.batches), since(a.bytes, b.bytes); batches >= 0 && bytes >= 0 {
		f.Journal = &Journal{Batches: round(batches/took/perS*1000, 2), Bytes: round(bytes/took/perS, 1)}
		if puts := since(a.puts, b.puts); puts >= 0 {
			rate := round(puts/took, 2)
			f.Journal.Puts = &rate
			f.Journal.Store = &Store{
				Puts: round(puts/took/perS*1000, 3), Gets: round(max(since(a.gets, b.gets), 0)/took/perS*1000, 3),
				Lists: round(max(since(a.lists, b.lists), 0)/took/perS*1000, 3), Bytes: round(max(since(a.sent, b.sent), 0)/took/perS, 1),
			}
		}
	}
	return f
}
