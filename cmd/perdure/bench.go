package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/internal/bench"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/load"
	"github.com/perdure-dev/perdure/internal/mockllm"
)

func loadCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "load turns|overload|table|plot|compare",
		Short:              "Put a server under load and measure it",
		DisableFlagParsing: true, // each subcommand has its own flags; see load COMMAND -h
		RunE: func(cmd *cobra.Command, args []string) error {
			if code := load.Command(cmd.Context(), args, cmd.OutOrStdout(), cmd.ErrOrStderr()); code != exitOK {
				return exitWith(code, errSaid)
			}
			return nil
		},
	}
}

// errSaid is an error whose words are on the screen already.
var errSaid = fmt.Errorf("")

func mockCommand() *cobra.Command {
	var listen string
	c := &cobra.Command{
		Use: "mockllm", Args: cobra.NoArgs,
		Short: "Serve a mock model (OpenAI form) for load tests",
		Long:  "Serve a mock model for load tests. It is set by MOCK_TTFT_MS, MOCK_TPS, MOCK_TOKENS,\nMOCK_ERROR_RATE and the others below; GET /stats shows what it saw.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := mockllm.ConfigFromEnv(os.Getenv)
			if err != nil {
				return exitWith(exitUsage, err)
			}
			s, err := mockllm.New(cfg, env.Real())
			if err != nil {
				return exitWith(exitUsage, err)
			}
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return exitWith(exitFailed, err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "mock model on http://%s/v1\n", l.Addr())
			stop := context.AfterFunc(cmd.Context(), func() { _ = s.Close() })
			defer stop()
			if err := s.Serve(l); err != nil && cmd.Context().Err() == nil {
				return exitWith(exitFailed, err)
			}
			return nil
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:9090", "address")
	return c
}

func benchCommand() *cobra.Command {
	var cfg bench.Config
	names, what := bench.Scenarios()
	var about strings.Builder
	for i, n := range names {
		fmt.Fprintf(&about, "  %-18s %s\n", n, what[i])
	}
	c := &cobra.Command{
		Use:   "bench SCENARIO...",
		Short: "Measure the durable engine: server, worker and client as processes of their own",
		Long: "Measure the durable engine. Without --target it starts a server, a worker and a\n" +
			"client, each a process of its own, on a scratch folder. An operation is:\n\n" + about.String(),
		Example: `  perdure bench sequential-steps --clients 1,64,256
  perdure bench rpc-read --rate 12000 --clients 1024 --json
  perdure bench reproduce bench/results/2026-12-01-flows flow-start 256
  perdure bench compare restate`,
		Args: cobra.MinimumNArgs(1), ValidArgs: names,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Scenarios = args
			if err := benchHere(cmd, &cfg); err != nil {
				return err
			}
			return benchError(bench.Run(cmd.Context(), cfg))
		},
	}
	cfg.Register(c.Flags())
	c.AddCommand(reproduceCommand(), compareCommand(), ratiosCommand(),
		roleCommand("worker", bench.RunWorker), roleCommand("client", bench.RunClient))
	return c
}

// benchHere fills in what the process knows.
func benchHere(cmd *cobra.Command, c *bench.Config) (err error) {
	c.Stdout, c.Stderr, c.Version, c.Key = cmd.OutOrStdout(), cmd.ErrOrStderr(), version(), os.Getenv("PERDURE_KEY")
	if c.Binary, err = os.Executable(); err != nil {
		return exitWith(exitFailed, err)
	}
	return nil
}

func benchError(err error) error {
	if errors.Is(err, bench.ErrUsage) {
		return exitWith(exitUsage, err)
	}
	return exitWith(exitFailed, err)
}

// roleCommand is one of the processes of a run.
func roleCommand(name string, run func(context.Context, io.Reader, io.Writer) error) *cobra.Command {
	return &cobra.Command{
		Use: name, Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return exitWith(exitFailed, run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout()))
		},
	}
}

func reproduceCommand() *cobra.Command {
	var cfg bench.Config
	c := &cobra.Command{
		Use: "reproduce DIR SCENARIO CLIENTS", Args: cobra.ExactArgs(3),
		Short: "Measure a recorded point again with its settings, and print both",
		RunE: func(cmd *cobra.Command, args []string) error {
			clients, err := strconv.Atoi(args[2])
			if err != nil {
				return exitWith(exitUsage, fmt.Errorf("clients %q: want a number", args[2]))
			}
			if err := benchHere(cmd, &cfg); err != nil {
				return err
			}
			return benchError(bench.Reproduce(cmd.Context(), args[0], args[1], clients, cfg))
		},
	}
	c.Flags().StringVar(&cfg.Durability, "durability", "", "the point with this durability, where there are several")
	c.Flags().StringVar(&cfg.Dir, "dir", "", "where the server's scratch folder is made")
	c.Flags().BoolVar(&cfg.JSON, "json", false, "print one JSON object")
	return c
}

func ratiosCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ratios PERDURE.jsonl PEER.jsonl", Args: cobra.ExactArgs(2),
		Short: "Print recorded points of Perdure and of a peer side by side",
		RunE: func(cmd *cobra.Command, args []string) error {
			return exitWith(exitFailed, bench.Ratios(cmd.OutOrStdout(), args[0], args[1]))
		},
	}
}

// compareCommand runs the script of a peer, which runs the peer and this binary
// in turns. It needs the repository.
func compareCommand() *cobra.Command {
	var root string
	c := &cobra.Command{
		Use: "compare restate|dbos|temporal", Args: cobra.ExactArgs(1), ValidArgs: []string{"restate", "dbos", "temporal"},
		Short: "Put a peer and Perdure under the same load in turns, and print the ratios",
		Long:  "Runs bench/peers/PEER/run.sh of the repository, which says what it needs and\nwhich variables it takes (CLIENTS, DURATION, RUNS, SCENARIOS, OUT, ...).",
		RunE: func(cmd *cobra.Command, args []string) error {
			script := filepath.Join(root, "bench", "peers", args[0], "run.sh")
			if _, err := os.Stat(script); err != nil || strings.ContainsAny(args[0], "./") {
				return exitWith(exitUsage, fmt.Errorf("no script of a peer %q: %w (run it in the repository, or name that with --root)", args[0], err))
			}
			binary, err := os.Executable()
			if err != nil {
				return exitWith(exitFailed, err)
			}
			return exitWith(exitFailed, bench.RunScript(cmd.Context(), script, []string{"BIN=" + binary}, cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	c.Flags().StringVar(&root, "root", ".", "folder of the repository")
	return c
}
