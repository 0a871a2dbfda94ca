package flowcli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

func (a *app) flow() *cobra.Command {
	c := &cobra.Command{
		Use:   "flow",
		Short: "Start, find, watch and change flows",
		Long: `
Inputs, messages and values are JSON: the text itself, @FILE, or - for the
standard input. Text needs its double quotes: '"hello"'.
`,
	}
	c.AddCommand(a.start(), a.list(), a.describe(), a.history(), a.watch(), a.wait(), a.get(), a.set(),
		a.signal(), a.messages(), a.rpc(), a.skipTimer(), a.stop(), a.reset(), a.delete(), a.queues("queues"), a.workers("workers"))
	return c
}

// args wraps a check of cobra's, so that its refusal is a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usage("%v\nusage: %s", err, cmd.UseLine())
		}
		return nil
	}
}

func (a *app) start() *cobra.Command {
	var r client.StartRequest
	var reuse string
	var attrs, messages []string
	var wait bool
	var forever bool
	c := &cobra.Command{
		Use:   "start [TYPE [STEP [INPUT]]]",
		Short: "Start a flow",
		Long:  "Start a flow of a type at a step. Without a step it lives by its RPCs and\nattributes; without a type it only holds attributes and needs no worker.",
		Example: `  perdure flow start order Charge '{"item":"tea","n":2}' --id order-17
  perdure flow start order Charge @order.json --wait`,
		Args: args(cobra.MaximumNArgs(3)),
	}
	f := c.Flags()
	f.StringVar(&r.ID, "id", "", "the flow's ID (default: one is made)")
	f.StringArrayVar(&attrs, "attr", nil, "NAME=JSON, an attribute to begin with; may be repeated")
	f.StringArrayVar(&messages, "message", nil, "CHANNEL=JSON, a message to begin with; may be repeated")
	f.StringVar(&reuse, "reuse", "refuse", "when the ID is there already: refuse, if_closed, if_failed, terminate or attach")
	f.StringVar(&r.RequestID, "request-id", "", "idempotency key: the same start again gives the same flow")
	f.DurationVar(&r.Delay, "delay", 0, "begin the first step this much later")
	f.DurationVar(&r.Timeout, "run-timeout", 0, "time out the run after this")
	f.DurationVar(&r.Retention, "retention", 0, "keep the closed run for this long (default: the server's)")
	f.BoolVar(&forever, "keep", false, "keep the closed run until it is deleted")
	f.IntVar(&r.Priority, "priority", 0, "0 to 9; higher is handed out first")
	f.BoolVar(&wait, "wait", false, "wait for the end and print the output")
	completeNames(c, "reuse", "refuse", "if_closed", "if_failed", "terminate", "attach")
	body := func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		args = append(args, make([]string, 3-len(args))...)
		r.Type, r.Step = args[0], args[1]
		if err := a.startInputs(&r, args[2], reuse, attrs, messages); err != nil {
			return err
		}
		if forever {
			r.Retention = client.Forever
		}
		st, err := cl.Start(ctx, r)
		if err != nil {
			return hinted(err, client.ErrExists, "Choose another --id, or a --reuse policy: if_closed, if_failed, terminate or attach.")
		}
		if wait {
			return a.result(ctx, cl, st.FlowID, st.RunID)
		}
		if a.json {
			return a.print(st)
		}
		if st.Created {
			fmt.Fprintf(a.Out, "started %s (run %s)\n", a.paint(bold, clean(st.FlowID)), st.RunID)
		} else {
			fmt.Fprintf(a.Out, "%s was there already (run %s)\n", a.paint(bold, clean(st.FlowID)), st.RunID)
		}
		return nil
	}
	c.RunE = func(cmd *cobra.Command, args []string) error { return a.run(wait, body)(cmd, args) }
	return c
}

func (a *app) startInputs(r *client.StartRequest, input, reuse string, attrs, messages []string) error {
	if err := r.Reuse.UnmarshalText([]byte(reuse)); err != nil {
		return usage("--reuse: %v", err)
	}
	if input != "" {
		v, err := a.value("the input", input)
		if err != nil {
			return err
		}
		r.Input = v
	}
	var err error
	if r.Attributes, err = a.assignments("NAME", attrs); err != nil {
		return err
	}
	ms, err := a.assignments("CHANNEL", messages)
	for _, m := range ms {
		r.Publish = append(r.Publish, client.Publishing{Channel: m.Name, Payloads: []any{m.Value}})
	}
	return err
}

// result waits for a run's end and prints its output.
func (a *app) result(ctx context.Context, cl *client.Client, id, runID string) error {
	i, err := cl.Wait(ctx, id, runID)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.print(i); err != nil {
			return err
		}
	}
	if i.Status != client.Completed {
		failed := &client.FlowFailed{FlowID: clean(i.ID), RunID: i.RunID, Status: i.Status, Message: harmless(i.Error)}
		if a.json {
			return shown{failed} // the object says it
		}
		return failed
	}
	if !a.json && len(i.Output) > 0 {
		fmt.Fprintln(a.Out, harmless(string(i.Output)))
	}
	return nil
}

func (a *app) wait() *cobra.Command {
	var run string
	c := &cobra.Command{
		Use: "wait ID", Short: "Wait until a flow ends, and print its output",
		Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().StringVar(&run, "run", "", "this run (default: the newest)")
	c.RunE = a.run(true, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		return a.result(ctx, cl, args[0], run)
	})
	return c
}

func (a *app) list() *cobra.Command {
	var query, status, typ string
	var limit int
	var counted bool
	c := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls", "search"},
		Short:   "List flows, newest first, or find some by a query",
		Example: `  perdure flow list --status running --type order
  perdure flow list --query 'type = "order" and amount > 100 and created > -2h'`,
		Args: args(cobra.NoArgs),
	}
	f := c.Flags()
	f.StringVarP(&query, "query", "q", "", "find these, see docs/FLOWS-CLI.md")
	f.StringVar(&status, "status", "", "of this status: running, completed, failed, cancelled, terminated, timed_out")
	f.StringVar(&typ, "type", "", "of this type")
	f.IntVar(&limit, "limit", 50, "at most so many; 0 = all")
	f.BoolVar(&counted, "count", false, "print only how many there are")
	completeNames(c, "status", "running", "completed", "failed", "cancelled", "terminated", "timed_out")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, _ []string) error {
		if limit < 0 {
			return usage("--limit is %d", limit)
		}
		full, begin, err := listQuery(query, status, typ)
		if err != nil {
			return err
		}
		if counted {
			n, err := cl.Count(ctx, full)
			if err != nil {
				return inQuery(err, query, begin)
			}
			if a.json {
				return a.print(map[string]uint64{"count": n})
			}
			fmt.Fprintln(a.Out, n)
			return nil
		}
		return inQuery(a.listFlows(ctx, cl, full, limit), query, begin)
	})
	return c
}

// listQuery joins the flags into one query; begin is where the user's own is in it.
func listQuery(query, status, typ string) (full string, begin int, err error) {
	var terms []string
	if status != "" {
		var s client.Status
		if err := s.UnmarshalText([]byte(status)); err != nil {
			return "", 0, usage("--status: %v", err)
		}
		terms = append(terms, "status = "+s.String())
	}
	if typ != "" {
		if strings.ContainsAny(typ, `"\`) {
			return "", 0, usage(`--type: %q has a quote or a backslash`, typ)
		}
		terms = append(terms, `type = "`+typ+`"`)
	}
	full = strings.Join(terms, " and ")
	if query == "" {
		return full, 0, nil
	}
	if full == "" {
		return query, 0, nil
	}
	full += " and ("
	return full + query + ")", len(full), nil
}

// inQuery shows a query's error in what the user wrote.
func inQuery(err error, query string, begin int) error {
	var e *client.Error
	if query == "" || !errors.As(err, &e) || !errors.Is(e, client.ErrInvalid) || e.Position < begin || e.Position > begin+len(query) {
		return err
	}
	own := *e
	own.Position -= begin
	return &queryError{query: query, err: &own}
}

func (a *app) listFlows(ctx context.Context, cl *client.Client, query string, limit int) error {
	t := &table{head: []string{"ID", "TYPE", "STATUS", "STARTED", "TOOK", "STEPS", "RESULT"}}
	for i, err := range cl.Search(ctx, query, limit) {
		if err != nil {
			return err
		}
		if a.json {
			if err := a.print(i); err != nil {
				return err
			}
			continue
		}
		end := i.Closed
		if end.IsZero() {
			end = a.Now()
		}
		status := i.Status.String()
		if i.Cancelling {
			status = "cancelling"
		}
		outcome := short(i.Output, 40)
		if i.Error != "" {
			outcome = cut(clean(i.Error), 60)
		}
		t.add(clean(i.ID), clean(i.Type), status, a.ago(i.Created), span(end.Sub(i.Created)), fmt.Sprint(i.StepsDone), outcome)
		t.color(2, statusColor(i.Status.String()))
	}
	switch {
	case a.json:
	case len(t.rows) == 0:
		fmt.Fprintln(a.Err, "no flows found")
	default:
		a.write(a.Out, t)
		if limit > 0 && len(t.rows) == limit {
			fmt.Fprintf(a.Err, "only the newest %d are shown; --limit 0 shows all\n", limit)
		}
	}
	return nil
}

func (a *app) skipTimer() *cobra.Command {
	var t client.Timer
	c := &cobra.Command{
		Use: "skip-timer ID", Short: "Make a timer due that a step waits for, or a retry's pause",
		Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().StringVar(&t.Step, "step", "", "of the oldest waiting step of this name")
	c.Flags().Uint64Var(&t.Exec, "exec", 0, "of this step execution, see describe")
	c.Flags().StringVar(&t.Condition, "condition", "", "this timer of the step (default: its first)")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if err := cl.SkipTimer(ctx, args[0], t); err != nil {
			return err
		}
		return a.done(args[0], "skipped a timer of %s", args[0])
	})
	return c
}

func (a *app) stop() *cobra.Command {
	var r client.StopRequest
	var terminate, fail, wait bool
	c := &cobra.Command{
		Use:   "stop ID",
		Short: "Stop a flow: cancel it, or terminate or fail it",
		Long:  "Stop a flow. By default it is cancelled: running handlers are told, what they\nanswer is kept, and no step follows. --terminate and --fail end it at once.",
		Args:  args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	f := c.Flags()
	f.BoolVar(&terminate, "terminate", false, "end it at once")
	f.BoolVar(&fail, "fail", false, "end it at once, as failed")
	f.StringVar(&r.Reason, "reason", "", "why; it is kept")
	f.DurationVar(&r.Grace, "grace", 0, "how long handlers may wind down (0: the server's default)")
	f.StringVar(&r.RunID, "run", "", "refuse when the newest run is not this one")
	f.BoolVar(&wait, "wait", false, "wait until it has ended")
	c.MarkFlagsMutuallyExclusive("terminate", "fail")
	body := func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if terminate {
			r.How = client.TerminateFlow
		}
		if fail {
			r.How = client.FailFlow
		}
		status, err := cl.Stop(ctx, args[0], r)
		if err != nil {
			return err
		}
		if wait {
			i, err := cl.Wait(ctx, args[0], r.RunID)
			if err != nil {
				return err
			}
			status = i.Status
		}
		if status == client.Running && r.How != client.CancelFlow { // these two end it at once
			status = map[client.How]client.Status{client.TerminateFlow: client.Terminated, client.FailFlow: client.Failed}[r.How]
		}
		if a.json {
			return a.print(map[string]any{"id": args[0], "status": status})
		}
		if status == client.Running {
			fmt.Fprintf(a.Out, "%s is winding down\n", clean(args[0]))
			return nil
		}
		fmt.Fprintf(a.Out, "%s is %s\n", clean(args[0]), a.paint(statusColor(status.String()), status.String()))
		return nil
	}
	c.RunE = func(cmd *cobra.Command, args []string) error { return a.run(wait, body)(cmd, args) }
	return c
}

func (a *app) reset() *cobra.Command {
	var r client.ResetRequest
	c := &cobra.Command{
		Use:   "reset ID",
		Short: "Begin a new run of a flow at a step of its log",
		Long:  "Begin a new run with the state the flow had before a step was started: its\nattributes, its messages, its other steps. history shows the steps' numbers.",
		Args:  args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs(""),
	}
	c.Flags().Uint64Var(&r.Exec, "exec", 0, "the step's number, see history")
	c.Flags().StringVar(&r.Step, "step", "", "the step's name: its last start")
	c.Flags().StringVar(&r.Reason, "reason", "", "why; it is kept")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if (r.Exec == 0) == (r.Step == "") {
			return usage("give --exec or --step: where the new run shall begin")
		}
		run, err := cl.Reset(ctx, args[0], r)
		if err != nil {
			return err
		}
		if a.json {
			return a.print(map[string]string{"id": args[0], "run_id": run})
		}
		fmt.Fprintf(a.Out, "reset %s (run %s)\n", clean(args[0]), run)
		return nil
	})
	return c
}

func (a *app) delete() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use: "delete ID...", Aliases: []string{"rm"}, Short: "Delete flows with all that is kept of them, running or not",
		Args: args(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeIDs("status != running"),
	}
	c.Flags().StringVar(&reason, "reason", "", "why")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		for _, id := range args {
			if err := cl.Delete(ctx, id, reason); err != nil {
				return err
			}
			if err := a.done(id, "deleted %s", id); err != nil {
				return err
			}
		}
		return nil
	})
	return c
}
