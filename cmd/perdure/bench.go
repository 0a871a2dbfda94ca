package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

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
