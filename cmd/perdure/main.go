// Command perdure serves agents durably: one binary, its parts as subcommands.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes. Scripts rely on them.
const (
	exitOK      = 0
	exitFailed  = 1 // the command did its work and the outcome is bad, or it broke
	exitUsage   = 2 // the command line or the configuration is wrong
	exitRefused = 3 // a server refused or could not be reached
)

// exitError carries an exit code with its words.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func exitWith(code int, err error) error {
	if err == nil {
		return nil
	}
	return &exitError{code, err}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := root().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	code := exitUsage // what cobra itself refuses is usage
	var ee *exitError
	if errors.As(err, &ee) {
		code = ee.code
	}
	if msg := err.Error(); msg != "" {
		fmt.Fprintln(os.Stderr, "perdure: "+msg)
	}
	os.Exit(code)
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:           "perdure",
		Short:         "Serve agents, never lose their place, and remember",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	c.AddCommand(serveCommand(), chatCommand(), loadCommand(), benchCommand(), mockCommand(), simCommand(), nodeCommand(), doctorCommand(), backupCommand(), restoreCommand(), configCommand(), versionCommand())
	c.AddCommand(flowCommands()...)
	return c
}

// version is the module's version, or the commit the binary was built from.
func version() string {
	bi, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v, rev, dirty := bi.Main.Version, "", ""
	for _, s := range bi.Settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+changes"
			}
		}
	}
	if v == "" || v == "(devel)" {
		v = "dev"
		if rev != "" {
			v += "-" + rev + dirty
		}
	}
	return v
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			bi, _ := debug.ReadBuildInfo()
			goVersion := ""
			if bi != nil {
				goVersion = bi.GoVersion
			}
			if asJSON {
				fmt.Fprintf(cmd.OutOrStdout(), "{\"version\":%q,\"go\":%q}\n", version(), goVersion)
				return nil
			}
			fmt.Fprintf(cmd.OutOrStdout(), "perdure %s (%s)\n", version(), goVersion)
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}
