package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// A worker and a client process read their Job from the first line of their
// input and end when the input does, so that none outlives who started it.

// Job is what a worker and a client are to do.
type Job struct {
	Scenario   string        `json:"scenario"`
	Address    string        `json:"address"` // of the server
	Key        string        `json:"key,omitempty"`
	Socket     string        `json:"socket"` // of the wakes; the client listens
	Clients    int           `json:"clients"`
	Rate       float64       `json:"rate"`
	Warmup     time.Duration `json:"warmup"`
	Duration   time.Duration `json:"duration"`
	Durability string        `json:"durability"`
	Steps      int           `json:"steps"`
	Objects    int           `json:"objects"`
	Run        string        `json:"run,omitempty"`     // sets its flows apart from those of other runs on the same server
	Profile    string        `json:"profile,omitempty"` // folder of CPU profiles; empty = none
}

// Report is what a worker or client process prints, one a line.
type Report struct {
	Kind     string    `json:"kind"` // one of the kinds below
	Progress *Progress `json:"progress,omitempty"`
	Result   *outcome  `json:"result,omitempty"`
	Error    string    `json:"error,omitempty"` // the process is at its end
}

// Kinds of reports.
const (
	kindListening = "listening" // the client's socket is there
	kindReady     = "ready"     // the worker is connected; the client is prepared
	kindProgress  = "progress"
	kindBegin     = "begin" // of the window
	kindEnd       = "end"
	kindResult    = "result"
	kindFailed    = "failed"
)

// outcome is a Result as it travels.
type outcome struct {
	Units   uint64        `json:"units"`
	Elapsed time.Duration `json:"elapsed"`
	Latency Latency       `json:"latency"`
	Lag     Latency       `json:"lag"`
	Errors  uint64        `json:"errors"`
	First   string        `json:"first"`
	Late    uint64        `json:"late"`
}

// Collecting garbage less often costs a few megabytes: both processes stand for
// programs whose memory is not what is measured.
const gcPercent = 400

// reporter writes reports; safe for concurrent use.
type reporter struct {
	mu   sync.Mutex
	out  io.Writer
	acks chan struct{} // one for each further line of the input
}

// edge reports an edge of the window and waits until it was noted: what is read
// of the processes there is to be read under load.
func (r *reporter) edge(ctx context.Context, kind string) {
	r.say(Report{Kind: kind})
	r.told(ctx)
}

// told waits for a line of the input; false = the input has ended.
func (r *reporter) told(ctx context.Context) bool {
	select {
	case <-r.acks:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *reporter) say(rep Report) {
	b, err := json.Marshal(rep)
	if err != nil {
		b = fmt.Appendf(nil, `{"kind":%q,"error":%q}`, kindFailed, err.Error())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, _ = r.out.Write(append(b, '\n'))
}

// edges of a window.
const edges = 2

// play runs one role with the job on in, until it is done or in ends.
func play(ctx context.Context, in io.Reader, out io.Writer, role func(context.Context, *Job, *reporter) error) error {
	debug.SetGCPercent(gcPercent)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &reporter{out: out, acks: make(chan struct{}, edges)}
	lines := bufio.NewReader(in)
	first, err := lines.ReadBytes('\n')
	var job Job
	if err == nil {
		err = json.Unmarshal(first, &job)
	}
	if err != nil {
		return fmt.Errorf("the job on the standard input: %w", err)
	}
	go func() {
		defer cancel()
		for {
			if _, err := lines.ReadBytes('\n'); err != nil {
				return
			}
			select {
			case r.acks <- struct{}{}:
			default: // nobody asked
			}
		}
	}()
	err = role(ctx, &job, r)
	if err != nil && ctx.Err() == nil {
		r.say(Report{Kind: kindFailed, Error: err.Error()})
		return err
	}
	return nil
}

// RunWorker is the worker process.
func RunWorker(ctx context.Context, in io.Reader, out io.Writer) error {
	return play(ctx, in, out, worker)
}

// RunClient is the client process.
func RunClient(ctx context.Context, in io.Reader, out io.Writer) error {
	return play(ctx, in, out, drive)
}

func worker(ctx context.Context, job *Job, r *reporter) error {
	wakes, err := dialWakes(ctx, job.Socket)
	if err != nil {
		return err
	}
	// Room for all that a client can have in flight, or the worker is what is
	// measured.
	room := max(256, 2*job.Clients)
	w, err := flow.NewWorker(flow.WorkerOptions{
		Address: job.Address, Key: job.Key, Concurrency: room, RPCConcurrency: room, ID: "bench", DrainTimeout: time.Second,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, newPrograms(wakes.woke).all()...)
	if err != nil {
		return err
	}
	r.say(Report{Kind: kindReady})
	go profileWindow(ctx, job, r)
	return w.Run(ctx)
}

// profileWindow profiles the worker between the edges of the window, of which it
// is told like the client.
func profileWindow(ctx context.Context, job *Job, r *reporter) {
	if !r.told(ctx) {
		return
	}
	stop, err := job.startProfile("worker")
	if err != nil {
		r.say(Report{Kind: kindFailed, Error: err.Error()})
		return
	}
	defer stop()
	r.told(ctx)
}

// drive is the client: it prepares, loads, and reports.
func drive(ctx context.Context, job *Job, r *reporter) error {
	sc, err := findScenario(job.Scenario)
	if err != nil {
		return err
	}
	wakes, err := listenWakes(job.Socket)
	if err != nil {
		return err
	}
	defer wakes.close()
	r.say(Report{Kind: kindListening})
	c, err := client.Dial(ctx, client.Options{Address: job.Address, Key: job.Key})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := awaitWorker(ctx, c); err != nil {
		return err
	}
	op, err := sc.prepare(ctx, &rig{job: job, client: c, programs: newPrograms(func(int) {}), wakes: wakes})
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	r.say(Report{Kind: kindReady})
	stopProfile := func() {}
	loop := &Loop{
		Clients: job.Clients, Rate: job.Rate, Units: sc.units(job), Warmup: job.Warmup, Duration: job.Duration, Op: op,
		WindowBegin: func() {
			r.edge(ctx, kindBegin)
			if stop, err := job.startProfile("client"); err == nil {
				stopProfile = stop
			}
		},
		WindowEnd: func() {
			stopProfile()
			r.edge(ctx, kindEnd)
		},
		Progress: func(p Progress) { r.say(Report{Kind: kindProgress, Progress: &p}) },
	}
	res, err := loop.Run(ctx)
	if err != nil {
		return err
	}
	o := &outcome{Units: res.Units, Elapsed: res.Elapsed, Latency: res.Latency.Latency(), Lag: res.Lag.Latency(), Errors: res.Errors, Late: res.Late}
	if res.First != nil {
		o.First = res.First.Error()
	}
	r.say(Report{Kind: kindResult, Result: o})
	<-ctx.Done() // this process's CPU is still to be read
	return nil
}

func (s *scenario) units(job *Job) int {
	if s.perOp == nil {
		return 1
	}
	return s.perOp(job)
}

// workerPatience bounds the wait for the worker's connection.
const workerPatience = 20 * time.Second

// awaitWorker waits until the server knows a worker: what is started before is
// refused as unknown.
func awaitWorker(ctx context.Context, c *client.Client) error {
	ctx, cancel := context.WithTimeoutCause(ctx, workerPatience, errors.New("no worker has connected"))
	defer cancel()
	for {
		all, err := c.Workers(ctx)
		if err == nil && len(all) > 0 {
			return nil
		}
		t := time.NewTimer(20 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			if err == nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("waiting for the worker: %w", err)
		}
	}
}
