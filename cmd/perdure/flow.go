package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/perdure-dev/perdure/internal/flowcli"
)

// flowCommands gives flow, schedule, worker and queue.
func flowCommands() []*cobra.Command {
	e := flowcli.Env{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		Now: time.Now, Zone: time.Local, Getenv: os.Getenv, ReadFile: os.ReadFile,
	}
	if fd := int(os.Stdout.Fd()); term.IsTerminal(fd) {
		e.Color = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
		if width, _, err := term.GetSize(fd); err == nil {
			e.Width = width
		}
	}
	all := flowcli.Commands(e)
	for _, c := range all {
		withExitCodes(c)
	}
	return all
}

// withExitCodes gives the errors of a command tree the exit codes of flowcli.
func withExitCodes(c *cobra.Command) {
	if run := c.RunE; run != nil {
		c.RunE = func(cmd *cobra.Command, args []string) error {
			err := run(cmd, args)
			return exitWith(flowcli.ExitCode(err), err)
		}
	}
	for _, sub := range c.Commands() {
		withExitCodes(sub)
	}
}
