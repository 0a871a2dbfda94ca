package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/doctor"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/server"
)

func serveCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the agent server",
		Long: `Run the agent server. With no configuration it answers on 127.0.0.1:8080 with
agent "demo", which needs no key, and keeps its data in ./data.

Every key of the configuration file can be given as a flag or as PERDURE_…;
see "perdure config init" and "perdure config show".`,
		Example: `  perdure serve
  perdure serve --openai-base-url https://api.openai.com/v1 --model gpt-4o-mini
  perdure serve --config perdure.yaml`,
		Args: cobra.NoArgs,
	}
	flags := config.RegisterFlags(c.Flags())
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		world := env.Real()
		cfg, warnings, err := config.Load(config.Input{FS: world.FS, Environ: os.Environ(), Flags: flags})
		if err != nil {
			return exitWith(exitUsage, err)
		}
		log := newLogger(cmd.ErrOrStderr(), cfg.Log)
		for _, w := range warnings {
			log.Warn(w)
		}
		return serve(cmd.Context(), cfg, world, log, cmd.ErrOrStderr())
	}
	return c
}

func newLogger(w io.Writer, c config.Log) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // checked by config
	opts := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// tuneRuntime sets the scheduler for a server, unless the operator did.
func tuneRuntime(parts int) {
	if os.Getenv("GOMAXPROCS") == "" {
		// A thread in fdatasync holds its scheduler slot until the runtime
		// notices; with a slot more for each journal the others go on.
		runtime.GOMAXPROCS(runtime.NumCPU() + min(parts, 4))
	}
}

func serve(ctx context.Context, cfg *config.Config, world env.Env, log *slog.Logger, out io.Writer) error {
	tuneRuntime(cfg.Kernel.Partitions)
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return exitWith(exitFailed, fmt.Errorf("listen on %s: %w (is another server running? choose another with --listen)", cfg.Listen, err))
	}
	defer l.Close() //nolint:errcheck // it is served no more
	site := &server.Site{Config: cfg, Env: world, Version: version(), Log: log, Listener: server.Lend(ctx, l)}
	for stood := false; ; stood = true {
		err := serveOnce(ctx, site, out, l)
		switch {
		case errors.Is(err, server.ErrTermOver):
			log.Warn("this process is not the active one any more and stands by", "error", err)
		case stood && errors.Is(err, server.ErrStoreAway):
			log.Warn("it is tried again", "error", err)
			pause(ctx, storeAwayPause)
		default:
			return exitWith(exitFailed, err)
		}
	}
}

// storeAwayPause is the rest before a process that has served stands by again,
// after the store did not let it.
const storeAwayPause = time.Second

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// serveOnce serves for as long as this process is the active one.
func serveOnce(ctx context.Context, site *server.Site, out io.Writer, l net.Listener) error {
	s, err := site.Open(ctx)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			return nil // asked to stop while it stood by
		}
		return err
	}
	if os.Getenv("GOGC") == "" {
		s.PaceGC()
	}
	debug.FreeOSMemory() // the start needed more than the rest, code and constants, too
	env.DropCode()
	greet(out, l.Addr().String(), site.Config)
	return s.Serve(ctx, server.Lend(ctx, l))
}

// greet prints where the server is and one command to try it.
func greet(w io.Writer, addr string, cfg *config.Config) {
	name := "demo"
	if cfg.Agents["demo"] == nil {
		for n := range cfg.Agents {
			if name == "demo" || n < name {
				name = n
			}
		}
	}
	url := "http://" + strings.Replace(addr, "[::]", "127.0.0.1", 1)
	auth := ""
	if len(cfg.Auth.Keys) > 0 {
		auth = ` -H "Authorization: Bearer $PERDURE_KEY"`
	}
	fmt.Fprintf(w, `
  Perdure is ready at %s   (data in %s, Ctrl-C stops)

  Try it:
    curl -N %s/v1/chat/completions%s -H 'Content-Type: application/json' \
      -d '{"model":"%s","stream":true,"messages":[{"role":"user","content":"Hello!"}]}'

  Or in a terminal:  bin/perdure chat --target %s --agent %s

`, url, dataOf(cfg), url, auth, name, url, name)
}

func dataOf(cfg *config.Config) string {
	switch {
	case cfg.Store == "mem:":
		return "memory: nothing is kept"
	case cfg.Store != "":
		where, _, _ := strings.Cut(cfg.Store, "?")
		return where + ", cached in " + cfg.Data
	}
	return cfg.Data
}

func configCommand() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Print or check the configuration"}
	c.AddCommand(&cobra.Command{
		Use: "init", Short: "Print a commented configuration file with all defaults", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.DefaultYAML())
			return exitWith(exitFailed, err)
		},
	})
	show := &cobra.Command{Use: "show", Short: "Print the effective configuration and where each value comes from", Args: cobra.NoArgs}
	flags := config.RegisterFlags(show.Flags())
	show.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, warnings, err := config.Load(config.Input{FS: env.Real().FS, Environ: os.Environ(), Flags: flags, SkipSecrets: true})
		if err != nil {
			return exitWith(exitUsage, err)
		}
		for _, w := range warnings {
			fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+w)
		}
		return exitWith(exitFailed, cfg.Explain(cmd.OutOrStdout()))
	}
	c.AddCommand(show)
	return c
}

func doctorCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "doctor", Args: cobra.NoArgs,
		Short: "Check configuration, disk, limits and providers; exit 1 when something would fail",
	}
	c.AddCommand(doctorStoreCommand())
	flags := config.RegisterFlags(c.Flags())
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		world := env.Real()
		cfg, warnings, err := config.Load(config.Input{FS: world.FS, Environ: os.Environ(), Flags: flags})
		in := doctor.Input{Config: cfg, Warnings: warnings, ConfigErr: err, Env: world, System: doctor.ThisSystem{}, Providers: map[string]doctor.Prober{}}
		if err == nil {
			providers, perr := server.Providers(cfg, world)
			if perr != nil {
				in.ConfigErr = perr
			}
			for name, p := range providers {
				in.Providers[name] = p
			}
		}
		checks := doctor.Run(cmd.Context(), in)
		write := doctor.WriteText
		if asJSON {
			write = doctor.WriteJSON
		}
		if err := write(cmd.OutOrStdout(), checks); err != nil {
			return exitWith(exitFailed, err)
		}
		if code := doctor.ExitStatus(checks); code != exitOK {
			return exitWith(code, fmt.Errorf("something needs attention, see above"))
		}
		return nil
	}
	return c
}
