// Package load drives an agent server with turns and measures it: closed loop
// (a number of workers, each with its own session, one turn after the other),
// open loop (a rate, whatever the server does), and an overload scenario of
// both. It shares the machine with the server under test, so the client
// speaks its own small HTTP/1.1 on bare connections, one goroutine a worker.
//
// How a closed-loop point is measured:
//
//   - The starts of the workers are spread over one turn time (the ramp), so
//     that the replies of a constant-time model do not come in bursts.
//   - A worker's first attempt warms it up and is not counted. The window
//     begins when every worker is warm and lasts Duration.
//   - turn_ms and ttft_ms are of the turns that started in the window; the
//     workers keep the load up until the last of them has ended.
//   - turns_per_s counts each turn by the share of its time that lies in the
//     window: at a low concurrency whole turns would be too coarse.
//   - Errors are counted from the first connection to the last, warm-up too.
//   - floor_ms is the median turn of the upstream alone at concurrency 1,
//     measured first, in the same run and with the same client code.
//
// The package stands outside the engine: it talks to the network, reads
// /proc and writes files itself.
package load

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Limits of a run.
const (
	maxConcurrency = 20_000
	maxRate        = 1e6
	maxInput       = 8 << 20
	maxSamples     = 4 << 20 // turns kept for a point; more are counted as samples_dropped
)

// Config is one run of `load turns`. The zero value of every field but Target
// has a default.
type Config struct {
	// Target is the server's base URL; required.
	Target string
	// Protocol is how turns are asked for; nil is Perdure's own API with
	// Agent and Input.
	Protocol Protocol
	// Agent is the agent's name, default "default".
	Agent string
	// Concurrency is the number of workers of a single point, default 1, and
	// the cap of workers (default 4,096) when Rate is set.
	Concurrency int
	// Sweep measures one point per value instead of Concurrency.
	Sweep []int
	// Duration of the measured window of a point, default 15 s.
	Duration time.Duration
	// Rate, when positive, makes the run an open loop of so many turns a
	// second; latency counts from the intended start.
	Rate float64
	// Ramp spreads the workers' starts; 0 takes one turn time, measured by a
	// probe.
	Ramp time.Duration
	// InputBytes pads the turn's input to this size; 0 leaves it "hello".
	InputBytes int
	// TurnsPerSession starts a fresh session after so many turns, outside the
	// turn's time; 0 keeps one session for the whole point.
	TurnsPerSession int
	// Upstream is the model provider's base URL: its own turn time is
	// measured first as the floor, and its /stats are read when it has them.
	Upstream string
	// Model is the model asked of Upstream, default "mock".
	Model string
	// APIKey is sent to Target as a bearer token. It is never printed.
	APIKey string
	// ServerPID is the process whose memory and CPU are read; 0 looks for the
	// process of this machine that listens on Target, and otherwise reads
	// Target's /metrics.
	ServerPID int
	// TurnTimeout ends a turn as an error, default 2 minutes.
	TurnTimeout time.Duration
	// JSON writes one object a point to Out, at once when the point is done;
	// otherwise Out gets a table at the end.
	JSON bool
	// Out is where results go, Err where the first error of each kind and
	// the progress go; nil discards.
	Out, Err io.Writer
	// Plot and Table name files for an SVG and a table; "" writes none.
	Plot, Table string
	// Labels are copied into every point's settings.
	Labels map[string]string
	// Env is the world; the zero value is the real one.
	Env env.Env
}

// withDefaults checks c and fills it in; the errors name every bad field.
func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if _, err := parseBase(c.Target); err != nil {
		bad("target: %w", err)
	}
	if c.Upstream != "" {
		if _, err := parseBase(c.Upstream); err != nil {
			bad("upstream: %w", err)
		}
	}
	if c.Concurrency < 0 || c.Concurrency > maxConcurrency {
		bad("concurrency %d: want 1 to %d", c.Concurrency, maxConcurrency)
	}
	for _, n := range c.Sweep {
		if n < 1 || n > maxConcurrency {
			bad("sweep: concurrency %d: want 1 to %d", n, maxConcurrency)
		}
	}
	if !(c.Rate >= 0 && c.Rate <= maxRate) {
		bad("rate %g: want 0 to %g turns a second", c.Rate, maxRate)
	}
	if c.Rate > 0 && len(c.Sweep) > 0 {
		bad("rate and sweep exclude each other")
	}
	if c.Duration < 0 || c.Ramp < 0 || c.TurnTimeout < 0 || c.TurnsPerSession < 0 {
		bad("durations and turns per session must not be negative")
	}
	if c.InputBytes < 0 || c.InputBytes > maxInput {
		bad("input bytes %d: want 0 to %d", c.InputBytes, maxInput)
	}
	def(&c.Agent, "default")
	def(&c.Model, "mock")
	def(&c.Duration, 15*time.Second)
	def(&c.TurnTimeout, 2*time.Minute)
	if c.Rate > 0 {
		def(&c.Concurrency, 4096)
	}
	def(&c.Concurrency, 1)
	if len(c.Sweep) == 0 {
		c.Sweep = []int{c.Concurrency}
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	if c.Err == nil {
		c.Err = io.Discard
	}
	if c.Env.Clock == nil {
		c.Env = env.Real()
	}
	if c.Protocol == nil {
		c.Protocol = Perdure(c.Agent, c.InputBytes)
	}
	return c, errors.Join(errs...)
}

// def sets *p to v when it is zero.
func def[T comparable](p *T, v T) {
	if *p == *new(T) {
		*p = v
	}
}

// base is a parsed base URL.
type base struct {
	addr string // host:port
	host string // the Host header
	path string // prefix without a trailing slash
}

func parseBase(raw string) (base, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" || u.Host == "" {
		return base{}, fmt.Errorf("%q: want http://HOST:PORT", redactURL(raw))
	}
	b := base{addr: u.Host, host: u.Host, path: u.EscapedPath()}
	if u.Port() == "" {
		b.addr += ":80"
	}
	for len(b.path) > 0 && b.path[len(b.path)-1] == '/' {
		b.path = b.path[:len(b.path)-1]
	}
	return b, nil
}

// redactURL drops a password from a URL before it is shown.
func redactURL(raw string) string {
	if u, err := url.Parse(raw); err == nil {
		return u.Redacted()
	}
	return "(not a URL)"
}
