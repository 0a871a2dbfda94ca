// Package flowcli is the command line for flows: perdure flow, schedule, worker
// and queue. It shows what package client gives, for people by default and as
// one JSON object a line with --json.
package flowcli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

// Exit codes. Scripts rely on them.
const (
	ExitOK          = 0
	ExitFailed      = 1 // what was asked for has failed: the flow, or the RPC's handler
	ExitUsage       = 2 // the command line, an input or a query is wrong
	ExitNotFound    = 3 // no such flow, run, schedule or attribute
	ExitConflict    = 4 // it is there already, has ended, is locked, or somebody was faster
	ExitUnavailable = 5 // the server could not be reached, or refused, or gave no answer in time
)

const exitHelp = `
Exit codes: 0 done, 1 the flow or the RPC's handler has failed, 2 wrong usage,
3 not found, 4 there already, ended, locked or changed meanwhile, 5 the server
could not be reached, refused or gave no answer in time.`

// Env is the world outside, as the commands see it.
type Env struct {
	In       io.Reader
	Out, Err io.Writer
	Color    bool // Out is a terminal that shall have colours
	Width    int  // columns of the terminal; 0 = not one: nothing is cut
	Now      func() time.Time
	Zone     *time.Location // in which times are shown
	Getenv   func(string) string
	ReadFile func(string) ([]byte, error)
}

// app is the settings that all commands share.
type app struct {
	Env
	address string
	keyEnv  string
	keyFile string
	tls     bool
	tlsCA   string
	json    bool
	timeout time.Duration
}

const (
	defaultAddress = "127.0.0.1:8080"
	callTimeout    = 30 * time.Second
	longPatience   = time.Minute     // of wait, watch and the like, with a server that is away
	firstConnect   = 2 * time.Second // for them to find it at the begin
	keyVariable    = "PERDURE_KEY"
)

// Commands gives the command trees, for the root command of a program.
func Commands(e Env) []*cobra.Command {
	a := &app{Env: e}
	worker := &cobra.Command{Use: "worker", Short: "See the workers that are connected"}
	worker.AddCommand(a.workers("list"))
	queue := &cobra.Command{Use: "queue", Short: "See what waits for workers"}
	queue.AddCommand(a.queues("list"))
	all := []*cobra.Command{a.flow(), a.schedule(), worker, queue}
	for _, c := range all {
		c.Args = noSubcommand
		c.SuggestionsMinimumDistance = 2
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		c.Long = c.Short + ".\n" + c.Long + exitHelp
		a.connectionFlags(c)
	}
	return all
}

// noSubcommand refuses a word that is no subcommand; cobra would show the help.
func noSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("there is no command %q", cmd.CommandPath()+" "+args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		msg += "; is it " + strings.Join(near, " or ") + "?"
	}
	return usage("%s", msg)
}

func (a *app) connectionFlags(c *cobra.Command) {
	f := c.PersistentFlags()
	address := a.Getenv("PERDURE_ADDRESS")
	if address == "" {
		address = defaultAddress
	}
	f.StringVar(&a.address, "address", address, "the server's gRPC address, or PERDURE_ADDRESS")
	f.StringVar(&a.keyEnv, "key-env", keyVariable, "the environment variable that holds the API key")
	f.StringVar(&a.keyFile, "key-file", "", "the file that holds the API key")
	f.BoolVar(&a.tls, "tls", false, "connect by TLS")
	f.StringVar(&a.tlsCA, "tls-ca", "", "trust the certificates in this PEM file; implies --tls")
	f.BoolVar(&a.json, "json", false, "print JSON, one object a line")
	f.DurationVar(&a.timeout, "timeout", 0, "how long to wait for the answer (default: 30s; for wait, watch and the like: no limit)")
}

// usageError says that the command line is wrong.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func usage(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// shown is an error that was printed as JSON already.
type shown struct{ error }

func (shown) Error() string   { return "" }
func (s shown) Unwrap() error { return s.error }

// exits maps codes of the server, and of the client, to exit codes.
var exits = map[string]int{
	"not_found": ExitNotFound, "unknown_run": ExitNotFound, "blob_missing": ExitNotFound,
	"already_exists": ExitConflict, "conflict": ExitConflict, "locked": ExitConflict, "flow_closed": ExitConflict,
	"idempotency_key_reused": ExitConflict, "queue_full": ExitConflict, "busy": ExitConflict, "stale_attempt": ExitConflict, "not_due": ExitConflict,
	"invalid": ExitUsage, "too_large": ExitUsage, "wrong_type": ExitUsage, "unknown_type": ExitUsage, "unknown_step": ExitUsage,
	"unknown_rpc": ExitUsage, "unknown_attribute": ExitUsage, "unknown_channel": ExitUsage, "bad_cursor": ExitUsage, "limit_reached": ExitUsage,
	"unavailable": ExitUnavailable, "overloaded": ExitUnavailable, "no_worker": ExitUnavailable, "not_served": ExitUnavailable,
	"unauthenticated": ExitUnavailable, "deadline": ExitUnavailable, "outcome_unknown": ExitUnavailable,
}

// ExitCode is the exit code for an error of a command.
func ExitCode(err error) int {
	var e *client.Error
	var u *usageError
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &u):
		return ExitUsage
	case errors.As(err, &e):
		if code, ok := exits[e.Code]; ok {
			return code
		}
	}
	return ExitFailed
}

// run makes the function of a command: it connects, sets the time limit and
// reports an error the way it was asked for.
func (a *app) run(long bool, fn func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		limit := a.timeout
		if limit == 0 && !long {
			limit = callTimeout
		}
		if limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		c, err := a.connect(ctx, long)
		if err == nil {
			defer c.Close()
			err = fn(ctx, c, cmd, args)
		}
		switch {
		case err == nil || err.Error() == "":
			return err
		case a.json:
			a.printError(err)
			return shown{err}
		}
		return told(err)
	}
}

// hinted gives an error of this kind a hint in the words of the command line.
func hinted(err error, kind *client.Error, hint string) error {
	e, ok := err.(*client.Error)
	if !ok || !errors.Is(e, kind) {
		return err
	}
	own := *e
	own.Hint = hint
	return &own
}

// toldError is a server's error in lines: the hint stands below the message.
type toldError struct{ err *client.Error }

func (e *toldError) Error() string {
	msg := harmless(e.err.Message)
	if e.err.Kind != "" {
		msg += " [" + clean(e.err.Kind) + "]"
	}
	// A handler's own words need no hint of the server's.
	if e.err.Hint != "" && e.err.Code != client.ErrHandler.Code {
		msg += "\n" + harmless(e.err.Hint)
	}
	return msg
}

func (e *toldError) Unwrap() error { return e.err }

func told(err error) error {
	if e, ok := err.(*client.Error); ok {
		return &toldError{e}
	}
	return err
}

// connect fails at once when the server is away; what is long then outlives a
// restart of it.
func (a *app) connect(ctx context.Context, long bool) (*client.Client, error) {
	o := client.Options{Address: a.address, Patience: -1}
	if long {
		o.Patience = longPatience
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, firstConnect)
		defer cancel()
	}
	var err error
	if o.Key, err = a.key(); err != nil {
		return nil, err
	}
	if a.tls || a.tlsCA != "" {
		o.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if a.tlsCA != "" {
		pem, err := a.ReadFile(a.tlsCA)
		if err != nil {
			return nil, usage("--tls-ca: %v", err)
		}
		o.TLS.RootCAs = x509.NewCertPool()
		if !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usage("--tls-ca: %s holds no PEM certificate", a.tlsCA)
		}
	}
	return client.Dial(ctx, o)
}

// key finds the API key. A variable that was asked for must be there.
func (a *app) key() (string, error) {
	if a.keyFile != "" {
		b, err := a.ReadFile(a.keyFile)
		if err != nil {
			return "", usage("--key-file: %v", err)
		}
		return strings.TrimSpace(string(b)), nil
	}
	k := a.Getenv(a.keyEnv)
	if k == "" && a.keyEnv != keyVariable {
		return "", usage("--key-env: the environment variable %s is not set", a.keyEnv)
	}
	return k, nil
}

// print writes one object as one line.
func (a *app) print(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("the answer has no JSON form: %w", err)
	}
	_, err = a.Out.Write(append(b, '\n'))
	return err
}

// printError writes an error to Err, in the form of the HTTP surface.
func (a *app) printError(err error) {
	type problem struct {
		Code     string `json:"code"`
		Message  string `json:"message"`
		Hint     string `json:"hint,omitempty"`
		Kind     string `json:"kind,omitempty"`
		Position *int   `json:"position,omitempty"` // in a query, in bytes from 0
		Unknown  bool   `json:"outcome_unknown,omitempty"`
	}
	p := problem{Code: "failed", Message: err.Error()}
	var e *client.Error
	var u *usageError
	var failed *client.FlowFailed
	switch {
	case errors.As(err, &u):
		p.Code = "usage"
	case errors.As(err, &failed):
		p.Code = "flow_" + failed.Status.String()
	case errors.As(err, &e):
		p = problem{Code: e.Code, Message: e.Message, Hint: e.Hint, Kind: e.Kind, Unknown: e.Unknown}
		if e.Position >= 0 {
			p.Position = &e.Position
		}
	}
	b, _ := json.Marshal(map[string]problem{"error": p}) // strings and numbers only
	fmt.Fprintf(a.Err, "%s\n", b)
}
