package load

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// fetch gets a small document; path is absolute on the host.
func fetch(ctx context.Context, e env.Env, b base, method, path, apiKey string) ([]byte, error) {
	b.path = ""
	c := newConn(e, b, apiKey)
	defer c.close()
	st, err := c.do(ctx, Request{Method: method, Path: path}, e.Clock.Now().Add(10*time.Second))
	if err != nil {
		return nil, err
	}
	body, err := c.rest()
	if err == nil && st.code != 200 {
		err = fmt.Errorf("%s %s: %d", method, path, st.code)
	}
	return body, err
}

// scraped reads a process through its Prometheus metrics; it knows no PSS and
// no private memory.
type scraped struct {
	ctx    context.Context // of the run that the probe belongs to
	env    env.Env
	base   base
	apiKey string
}

func (s scraped) gauge(name string) (float64, error) {
	b, err := fetch(s.ctx, s.env, s.base, "GET", "/metrics", s.apiKey)
	if err != nil {
		return 0, err
	}
	for _, l := range bytes.Split(b, []byte("\n")) {
		if v, ok := bytes.CutPrefix(l, []byte(name+" ")); ok {
			return strconv.ParseFloat(string(bytes.TrimSpace(v)), 64)
		}
	}
	return 0, errors.New("/metrics has no " + name + " in its first 64 KiB")
}

func (s scraped) memory() (memory, error) {
	v, err := s.gauge("process_resident_memory_bytes")
	return memory{rss: int64(v)}, err
}

func (s scraped) cpu() (time.Duration, error) {
	v, err := s.gauge("process_cpu_seconds_total")
	return time.Duration(v * float64(time.Second)), err
}

// heap is what a Go process has allocated since its start.
type heap struct{ objects, bytes float64 }

// heap reads the target's allocations; zero when it does not tell.
func (r *run) heap(ctx context.Context) heap {
	s := scraped{ctx: ctx, env: r.cfg.Env, base: r.base, apiKey: r.cfg.APIKey}
	objects, err1 := s.gauge("go_memstats_mallocs_total")
	bytes, err2 := s.gauge("go_memstats_alloc_bytes_total")
	if err1 != nil || err2 != nil {
		return heap{}
	}
	return heap{objects, bytes}
}

// findProbe looks for the process behind the target; nil when there is no way
// to see it.
func (r *run) findProbe(ctx context.Context) probe {
	if r.cfg.ServerPID != 0 {
		return process(r.cfg.ServerPID)
	}
	p, err := findListener(r.base.addr)
	if err == nil {
		return p
	}
	s := scraped{ctx: ctx, env: r.cfg.Env, base: r.base, apiKey: r.cfg.APIKey}
	if _, err2 := s.memory(); err2 != nil {
		_, _ = fmt.Fprintf(r.cfg.Err, "load: no server figures: %v; %v\n", err, err2)
		return nil
	}
	return s
}

// mock reads the stats of an upstream that has them.
type mock struct {
	env  env.Env
	base base
	proc probe // nil when not of this machine
}

// findMock returns nil when the upstream keeps no stats.
func (r *run) findMock(ctx context.Context) *mock {
	if r.cfg.Upstream == "" {
		return nil
	}
	m := &mock{env: r.cfg.Env, base: r.upstream}
	if _, err := m.maxConcurrent(ctx); err != nil {
		return nil
	}
	if p, err := findListener(m.base.addr); err == nil {
		m.proc = p
	}
	return m
}

func (m *mock) maxConcurrent(ctx context.Context) (int64, error) {
	b, err := fetch(ctx, m.env, m.base, "GET", "/stats", "")
	if err != nil {
		return 0, err
	}
	var s struct {
		Max *int64 `json:"max_concurrent"`
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return 0, err
	}
	if s.Max == nil {
		return 0, errors.New("/stats has no max_concurrent")
	}
	return *s.Max, nil
}

// reset begins a new measurement of the maximum where the upstream can.
func (m *mock) reset(ctx context.Context) {
	_, _ = fetch(ctx, m.env, m.base, "POST", "/stats/reset", "") // else the maximum is of its whole life
}
