package flowcli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

func (a *app) describe() *cobra.Command {
	c := &cobra.Command{
		Use: "describe ID", Aliases: []string{"show"}, Short: "Show a flow: its state, live steps, attributes and channels",
		Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs(""),
	}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		i, err := cl.Describe(ctx, args[0])
		if err != nil {
			return err
		}
		if a.json {
			return a.print(i)
		}
		a.showInfo(i)
		return nil
	})
	return c
}

func (a *app) showInfo(i *client.Info) {
	status := a.paint(statusColor(i.Status.String()), i.Status.String())
	if i.Cancelling {
		status += a.paint(yellow, ", winding down")
	}
	fmt.Fprintf(a.Out, "%s  %s  %s\n", a.paint(bold, clean(i.ID)), clean(i.Type), status)
	line := func(name, text string) {
		if text != "" {
			fmt.Fprintf(a.Out, "  %s %s\n", a.paint(dim, fmt.Sprintf("%-9s", name)), text)
		}
	}
	line("run", i.RunID)
	line("parent", clean(i.Parent))
	line("started", a.both(i.Created))
	switch {
	case !i.Closed.IsZero():
		line("ended", a.both(i.Closed)+", took "+span(i.Closed.Sub(i.Created)))
	case !i.Updated.IsZero():
		line("changed", a.both(i.Updated))
	}
	if !i.TimeoutAt.IsZero() && i.Closed.IsZero() {
		line("timeout", a.both(i.TimeoutAt))
	}
	if i.Priority > 0 {
		line("priority", fmt.Sprint(i.Priority))
	}
	line("so far", fmt.Sprintf("%s, %s", count(int(i.StepsDone), "step"), count(int(i.Events), "event")))
	line("error", a.paint(red, harmless(i.Error)))
	line("output", short(i.Output, shortValue*5))
	a.showSteps(i)
	if len(i.Attributes) > 0 {
		t := &table{head: []string{"ATTRIBUTE", "VALUE"}, indent: "  "}
		for _, v := range i.Attributes {
			t.add(clean(v.Name), attributeText(v, shortValue))
		}
		fmt.Fprintln(a.Out)
		a.write(a.Out, t)
	}
	if len(i.Channels) > 0 {
		t := &table{head: []string{"CHANNEL", "WAITING"}, indent: "  "}
		for _, ch := range i.Channels {
			t.add(clean(ch.Name), fmt.Sprint(ch.Pending))
		}
		fmt.Fprintln(a.Out)
		a.write(a.Out, t)
	}
}

func (a *app) showSteps(i *client.Info) {
	if len(i.Steps) == 0 {
		return
	}
	t := &table{head: []string{"STEP", "NO", "STATE", "TRIES", "DETAILS"}, indent: "  "}
	for _, s := range i.Steps {
		t.add(clean(s.Step), fmt.Sprintf("#%d", s.Exec), s.State, fmt.Sprint(s.Attempts), a.stepDetails(s))
		t.color(2, statusColor(s.State))
	}
	fmt.Fprintln(a.Out)
	a.write(a.Out, t)
}

// stepDetails says what a live step waits for, or since when it runs and where.
func (a *app) stepDetails(s client.StepInfo) string {
	var parts []string
	if s.WaitsFor != "" {
		parts = append(parts, "for "+clean(s.WaitsFor))
	}
	if s.State == "running" && !s.Started.IsZero() {
		parts = append(parts, "for "+span(a.Now().Sub(s.Started)))
	}
	if s.Worker != "" {
		parts = append(parts, "on "+clean(s.Worker))
	}
	switch {
	case s.Next.IsZero():
	case s.State == "backoff":
		parts = append(parts, "tried again "+a.ago(s.Next))
	case s.State == "delayed":
		parts = append(parts, "begins "+a.ago(s.Next))
	default:
		parts = append(parts, "timer "+a.ago(s.Next))
	}
	if s.Retries > 0 {
		parts = append(parts, count(s.Retries, "failure"))
	}
	if s.ConcurrencyKey != "" {
		parts = append(parts, "key "+clean(s.ConcurrencyKey))
	}
	return strings.Join(parts, ", ")
}

func (a *app) queues(name string) *cobra.Command {
	c := &cobra.Command{Use: name, Short: "Show what waits for workers, by flow type", Args: args(cobra.NoArgs)}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, _ []string) error {
		qs, err := cl.Queues(ctx)
		if err != nil {
			return err
		}
		t := &table{head: []string{"TYPE", "QUEUED", "RUNNING", "WORKERS", "ROOM", "OLDEST", "DETAILS"}}
		for _, q := range qs {
			if a.json {
				if err := a.print(q); err != nil {
					return err
				}
				continue
			}
			t.add(clean(q.FlowType), fmt.Sprint(q.Queued), fmt.Sprint(q.Running), fmt.Sprint(q.Workers), fmt.Sprint(q.TaskCredits), a.ago(q.Oldest), queueDetails(q))
			if q.Queued > 0 && q.Workers == 0 {
				t.color(3, red)
			}
		}
		a.writeOr(t, "nothing waits, and no worker is connected")
		return nil
	})
	return c
}

// writeOr prints a table, or says that it is empty.
func (a *app) writeOr(t *table, none string) {
	switch {
	case a.json:
	case len(t.rows) == 0:
		fmt.Fprintln(a.Err, none)
	default:
		a.write(a.Out, t)
	}
}

func queueDetails(q client.Queue) string {
	var parts []string
	for _, p := range q.Priorities {
		parts = append(parts, fmt.Sprintf("priority %d: %d", p.Priority, p.Queued))
	}
	for _, k := range q.Keys {
		parts = append(parts, fmt.Sprintf("key %s: %d of %d run, %d wait", clean(k.Key), k.Running, k.Limit, k.Queued))
	}
	return strings.Join(parts, "; ")
}

func (a *app) workers(name string) *cobra.Command {
	c := &cobra.Command{Use: name, Short: "Show the workers that are connected", Args: args(cobra.NoArgs)}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, _ []string) error {
		ws, err := cl.Workers(ctx)
		if err != nil {
			return err
		}
		t := &table{head: []string{"WORKER", "ADDRESS", "SINCE", "RUNNING", "ROOM", "STATE", "BUILD", "TYPES"}}
		for _, w := range ws {
			if a.json {
				if err := a.print(w); err != nil {
					return err
				}
				continue
			}
			state := "ready"
			if w.Draining {
				state = "draining"
			}
			t.add(clean(w.ID), clean(w.Address), a.ago(w.Connected), fmt.Sprint(w.Running), fmt.Sprint(w.TaskCredits), state,
				clean(w.Build), clean(strings.Join(w.FlowTypes, ", ")))
			if w.Draining {
				t.color(5, yellow)
			}
		}
		a.writeOr(t, "no worker is connected")
		return nil
	})
	return c
}
