package main

import (
	"errors"
	"net/http"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/perdure-dev/perdure/internal/chat"
)

func chatCommand() *cobra.Command {
	o := chat.Options{Client: &chat.Client{HTTP: &http.Client{}}}
	c := &cobra.Command{
		Use:   "chat",
		Short: "Talk to an agent in the terminal; Ctrl-C cancels the turn",
		Long:  "Talk to an agent in the terminal. Ctrl-C while it answers cancels the turn; at the\nprompt it leaves. An API key is taken from PERDURE_KEY.",
		Args:  cobra.NoArgs,
	}
	target := os.Getenv("PERDURE_TARGET")
	if target == "" {
		target = "http://127.0.0.1:8080"
	}
	c.Flags().StringVar(&o.Client.Target, "target", target, "the server's URL, or PERDURE_TARGET")
	c.Flags().StringVar(&o.Agent, "agent", "", "the agent's name (default: the only one, or demo)")
	c.Flags().StringVar(&o.Session, "session", "", "go on with this session")
	c.Flags().StringVarP(&o.Once, "message", "m", "", "send one message, print the answer, end")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Client.Key = os.Getenv("PERDURE_KEY")
		o.In, o.Out = os.Stdin, cmd.OutOrStdout()
		o.Color = term.IsTerminal(int(os.Stdout.Fd())) && os.Getenv("NO_COLOR") == ""
		// Ctrl-C is the turn's here, not the program's.
		sig := make(chan os.Signal, 4)
		signal.Reset(os.Interrupt)
		signal.Notify(sig, os.Interrupt)
		interrupts := make(chan struct{})
		go func() {
			for range sig {
				interrupts <- struct{}{}
			}
		}()
		o.Interrupts = interrupts
		err := chat.Run(cmd.Context(), o)
		var refused *chat.Refusal
		var away *chat.Unreachable
		if errors.As(err, &refused) || errors.As(err, &away) {
			return exitWith(exitRefused, err)
		}
		return exitWith(exitFailed, err)
	}
	return c
}
