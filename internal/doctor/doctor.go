// Package doctor looks for what would keep a server from working well:
// configuration, disk, limits of the process, memory, clock, model providers.
// It changes nothing that stays: what it writes to measure the disk is removed.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
)

// Status is the outcome of one check.
type Status string

const (
	// OK means that nothing needs to be done.
	OK Status = "ok"
	// Warn means that the server works, but not as well as it could, or less
	// safely.
	Warn Status = "warn"
	// Fail means that the server will not start, or not do its job.
	Fail Status = "fail"
)

// Check is the outcome of one look.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Hint   string `json:"hint,omitempty"` // what to do; empty when OK
}

// Prober says whether a model provider can be reached. The error should say
// what was tried; a key in it is hidden.
type Prober interface {
	Check(ctx context.Context) error
}

// System reads the limits of this process.
type System interface {
	// OpenFiles is the number of files it may open; ok is false where the
	// system has no such limit.
	OpenFiles() (n uint64, ok bool)
}

// Input is what Run may look at.
type Input struct {
	Config *config.Config
	// Warnings are those of config.Load.
	Warnings []string
	// ConfigErr is the error of config.Load; then nothing else is looked at.
	ConfigErr error
	Env       env.Env
	System    System
	Providers map[string]Prober
}

const (
	probeTimeout = 10 * time.Second
	probesAtOnce = 8
)

// Run makes every check, in a fixed order. It ends within about 20 seconds, or
// when ctx does.
func Run(ctx context.Context, in Input) []Check {
	if in.ConfigErr != nil || in.Config == nil {
		return []Check{badConfig(in.ConfigErr)}
	}
	out := []Check{goodConfig(in), clock(in), openFiles(in), memory(in)}
	if in.Config.Store == "mem:" {
		out = append(out, Check{"data", Warn, "store is mem:, so nothing is persisted", "leave store empty to keep sessions over a restart"})
	} else {
		out = append(out, data(ctx, in)...)
	}
	return append(out, providers(ctx, in)...)
}

// ExitStatus is the exit status of the command: 1 when any check failed. A
// warning is not a failure.
func ExitStatus(checks []Check) int {
	if worst(checks) == Fail {
		return 1
	}
	return 0
}

func worst(checks []Check) Status {
	w := OK
	for _, c := range checks {
		if c.Status == Fail || w == OK {
			w = c.Status
		}
	}
	return w
}

func badConfig(err error) Check {
	detail := "no configuration"
	if err != nil {
		detail = err.Error()
	}
	return Check{"config", Fail, detail, "perdure config init prints every key with its default"}
}

func goodConfig(in Input) Check {
	c := in.Config
	detail := fmt.Sprintf("%s, %s, %s; listens on %s", count(len(c.Agents), "agent"), count(len(c.Providers), "provider"), count(len(c.Tools), "tool"), c.Listen)
	var worries []string
	worries = append(worries, in.Warnings...)
	if c.Insecure && len(c.Auth.Keys) == 0 {
		worries = append(worries, "insecure is on and there are no API keys: whoever reaches the address may use it")
	}
	if len(worries) > 0 {
		return Check{"config", Warn, detail, strings.Join(worries, "; ")}
	}
	return Check{"config", OK, detail, ""}
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// clock compares the time with what can be true. Times in the journal come
// from it, and TLS to the providers needs it.
func clock(in Input) Check {
	now := in.Env.Clock.Now().UTC()
	detail := now.Format(time.RFC3339)
	if now.Year() < 2025 || now.Year() >= 2100 {
		return Check{"clock", Fail, detail, "set the clock; timers and TLS depend on it"}
	}
	lock := in.Env.FS.PathJoin(in.Config.Data, config.LockFile)
	if info, err := in.Env.FS.Stat(lock); err == nil && info.ModTime().After(now.Add(5*time.Minute)) {
		return Check{"clock", Warn, detail + ", but the data directory was used at " + info.ModTime().UTC().Format(time.RFC3339), "the clock was set back; timers due in between wait for it"}
	}
	return Check{"clock", OK, detail, ""}
}

// filesPerPartition is a bound on the tables, segments and directories that
// one partition keeps open.
const filesPerPartition = 64

// openFiles compares ulimit -n with what the configured limits may need.
func openFiles(in Input) Check {
	have, ok := in.System.OpenFiles()
	if !ok {
		return Check{"open files", OK, "no limit known on this system", ""}
	}
	c := in.Config
	need := uint64(128 + c.Limits.MaxConnections + c.Kernel.Partitions*filesPerPartition)
	for _, p := range c.Providers {
		if p.Type == "demo" {
			continue
		}
		if n := p.ConcurrencyLimit; n > 0 {
			need += uint64(n)
		} else {
			need += uint64(max(c.Kernel.MaxInFlightTurns, c.Limits.MaxRequests))
		}
	}
	detail := fmt.Sprintf("ulimit -n is %d; the configured limits may need %d", have, need)
	hint := fmt.Sprintf("ulimit -n %d (systemd: LimitNOFILE=%d), or lower limits.max_connections", need, need)
	switch {
	case have < uint64(128+c.Kernel.Partitions*filesPerPartition):
		return Check{"open files", Fail, detail, hint}
	case have < need:
		return Check{"open files", Warn, detail, hint}
	}
	return Check{"open files", OK, detail, ""}
}

// providers asks each provider, a few at a time, in the order of their names.
func providers(ctx context.Context, in Input) []Check {
	names := make([]string, 0, len(in.Config.Providers))
	for n := range in.Config.Providers {
		names = append(names, n)
	}
	slices.Sort(names)
	out := make([]Check, len(names))
	var g errgroup.Group
	g.SetLimit(probesAtOnce)
	for i, name := range names {
		g.Go(func() error {
			out[i] = provider(ctx, in, name)
			return nil
		})
	}
	_ = g.Wait() // the functions report by their checks
	return out
}

func provider(ctx context.Context, in Input, name string) Check {
	title, p := "provider "+name, in.Config.Providers[name]
	if p.Type == "demo" {
		return Check{title, OK, "built in", ""}
	}
	probe := in.Providers[name]
	if probe == nil {
		return Check{title, Warn, "was not asked", ""}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := in.Env.Clock.AfterFunc(probeTimeout, func() { cancel(fmt.Errorf("no answer within %v", probeTimeout)) })
	defer timer.Stop()
	start := in.Env.Clock.Now()
	if err := probe.Check(ctx); err != nil {
		detail := err.Error()
		if cause := context.Cause(ctx); cause != nil {
			detail = cause.Error()
		}
		if p.APIKey.IsSet() {
			detail = strings.ReplaceAll(detail, p.APIKey.Reveal(), p.APIKey.String())
		}
		return Check{title, Fail, detail, "check base_url, key and network of providers." + name}
	}
	took := in.Env.Clock.Now().Sub(start).Round(time.Millisecond)
	return Check{title, OK, fmt.Sprintf("answered in %v", took), ""}
}
