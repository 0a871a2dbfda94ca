package flowcli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

const listHint = "perdure schedule list shows those there are."

func (a *app) schedule() *cobra.Command {
	c := &cobra.Command{Use: "schedule", Short: "Start flows at times"}
	c.AddCommand(a.createSchedule(), a.listSchedules(), a.getSchedule(), a.pauseSchedule(), a.backfill(),
		a.onSchedule("resume", "Let a paused schedule go on", "resumed %s", (*client.Client).ResumeSchedule),
		a.onSchedule("trigger", "Start a schedule's flow now, besides its times", "triggered %s", (*client.Client).TriggerSchedule),
		a.onSchedule("delete", "Delete a schedule; flows that it started go on", "deleted %s", (*client.Client).DeleteSchedule))
	return c
}

func (a *app) createSchedule() *cobra.Command {
	var s client.Schedule
	var overlap string
	var attrs []string
	var replace bool
	c := &cobra.Command{
		Use:   "create ID CRON TYPE [STEP [INPUT]]",
		Short: "Create a schedule",
		Long: `Create a schedule. CRON is five fields (minute, hour, day, month, weekday), or
@hourly, @daily, @weekly, @monthly, @every 10m. The flows it starts have the
schedule's ID, or --id, with the instant added.`,
		Example: `  perdure schedule create nightly '0 3 * * *' report Build '{"all":true}' --zone Europe/Berlin`,
		Args:    args(cobra.RangeArgs(3, 5)),
	}
	f := c.Flags()
	f.StringVar(&s.TimeZone, "zone", "", "IANA time zone of the times (default: UTC)")
	f.DurationVar(&s.Jitter, "jitter", 0, "start late by a random part of this")
	f.StringVar(&overlap, "overlap", "skip", "when the last flow still runs: skip, buffer_one, allow, cancel_other or terminate_other")
	f.DurationVar(&s.CatchUp, "catch-up", 0, "make up for instants missed by at most this (0: one minute)")
	f.BoolVar(&s.Paused, "paused", false, "create it paused")
	f.StringVar(&s.Note, "note", "", "why it is paused")
	f.BoolVar(&replace, "replace", false, "take the place of one that is there")
	f.StringVar(&s.Start.ID, "id", "", "what the flows' IDs begin with (default: the schedule's ID)")
	f.StringArrayVar(&attrs, "attr", nil, "NAME=JSON, an attribute to begin with; may be repeated")
	f.DurationVar(&s.Start.Timeout, "run-timeout", 0, "time out each run after this")
	f.DurationVar(&s.Start.Retention, "retention", 0, "keep closed runs for this long (default: the server's)")
	f.IntVar(&s.Start.Priority, "priority", 0, "0 to 9; higher is handed out first")
	completeNames(c, "overlap", "skip", "buffer_one", "allow", "cancel_other", "terminate_other")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if err := s.Overlap.UnmarshalText([]byte(overlap)); err != nil {
			return usage("--overlap: %v", err)
		}
		args = append(args, make([]string, 5-len(args))...)
		s.ID, s.Cron, s.Start.Type, s.Start.Step = args[0], args[1], args[2], args[3]
		if err := a.startInputs(&s.Start, args[4], client.Refuse.String(), attrs, nil); err != nil {
			return err
		}
		got, err := cl.PutSchedule(ctx, s, !replace)
		if err != nil {
			return hinted(err, client.ErrExists, "Choose another ID, or let it take the place with --replace.")
		}
		if a.json {
			return a.print(got)
		}
		next := "it is paused"
		if !got.Next.IsZero() {
			next = "next at " + a.both(got.Next)
		}
		verb := map[bool]string{false: "created", true: "stored"}[replace]
		fmt.Fprintf(a.Out, "%s %s, %s\n", verb, a.paint(bold, clean(got.ID)), next)
		return nil
	})
	return c
}

func (a *app) listSchedules() *cobra.Command {
	c := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List schedules", Args: args(cobra.NoArgs)}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, _ []string) error {
		t := &table{head: []string{"ID", "CRON", "ZONE", "TYPE", "STATE", "NEXT", "LAST", "STARTED"}}
		for s, err := range cl.Schedules(ctx) {
			if err != nil {
				return err
			}
			if a.json {
				if err := a.print(s); err != nil {
					return err
				}
				continue
			}
			state := "on"
			if s.Paused {
				state = "paused"
			}
			t.add(clean(s.ID), clean(s.Cron), zone(s), clean(s.FlowType), state, a.ago(s.Next), a.ago(s.Last), fmt.Sprint(s.Started))
			t.color(4, statusColor(state))
		}
		a.writeOr(t, "no schedules")
		return nil
	})
	return c
}

func zone(s *client.ScheduleInfo) string {
	if s.TimeZone == "" {
		return "UTC"
	}
	return clean(s.TimeZone)
}

func (a *app) getSchedule() *cobra.Command {
	c := &cobra.Command{Use: "get ID", Aliases: []string{"describe", "show"}, Short: "Show a schedule", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSchedules}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		s, err := cl.Schedule(ctx, args[0])
		if err != nil {
			return hinted(err, client.ErrNotFound, listHint)
		}
		if a.json {
			return a.print(s)
		}
		a.showSchedule(s)
		return nil
	})
	return c
}

func (a *app) showSchedule(s *client.ScheduleInfo) {
	state := "on"
	if s.Paused {
		state = a.paint(yellow, "paused")
		if s.Note != "" {
			state += ": " + clean(s.Note)
		}
	}
	fmt.Fprintf(a.Out, "%s  %s\n", a.paint(bold, clean(s.ID)), state)
	line := func(name, text string) {
		if text != "" {
			fmt.Fprintf(a.Out, "  %s %s\n", a.paint(dim, fmt.Sprintf("%-9s", name)), text)
		}
	}
	line("times", clean(s.Cron)+" in "+zone(s))
	if s.Jitter > 0 {
		line("jitter", s.Jitter.String())
	}
	line("overlap", s.Overlap.String())
	if s.CatchUp > 0 {
		line("catch-up", s.CatchUp.String())
	}
	what := clean(s.FlowType)
	if s.Step != "" {
		what += " at " + clean(s.Step)
	}
	line("starts", what)
	line("input", short(s.Input, shortValue*3))
	if !s.Next.IsZero() {
		line("next", a.both(s.Next))
	}
	if !s.Last.IsZero() {
		line("last", a.both(s.Last)+" "+clean(s.LastFlowID))
	}
	line("so far", fmt.Sprintf("%d started, %d skipped, %d wait", s.Started, s.Skipped, s.Buffered))
}

func (a *app) pauseSchedule() *cobra.Command {
	var note string
	c := &cobra.Command{Use: "pause ID", Short: "Stop a schedule from starting flows", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSchedules}
	c.Flags().StringVar(&note, "note", "", "why")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if err := cl.PauseSchedule(ctx, args[0], note); err != nil {
			return hinted(err, client.ErrNotFound, listHint)
		}
		return a.done(args[0], "paused %s", args[0])
	})
	return c
}

func (a *app) onSchedule(name, help, said string, fn func(*client.Client, context.Context, string) error) *cobra.Command {
	c := &cobra.Command{Use: name + " ID", Short: help, Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSchedules}
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if err := fn(cl, ctx, args[0]); err != nil {
			return hinted(err, client.ErrNotFound, listHint)
		}
		return a.done(args[0], said, args[0])
	})
	return c
}

func (a *app) backfill() *cobra.Command {
	var from, to string
	c := &cobra.Command{
		Use: "backfill ID", Short: "Start the flows of past times",
		Example: `  perdure schedule backfill nightly --from 2026-03-01 --to '2026-03-04 12:00'`,
		Args:    args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSchedules,
	}
	c.Flags().StringVar(&from, "from", "", "the first instant; RFC 3339, local time, or as -24h from now")
	c.Flags().StringVar(&to, "to", "", "the last instant (default: now)")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if from == "" {
			return usage("--from is missing: the first instant to make up for")
		}
		begin, err := a.instant("--from", from)
		if err != nil {
			return err
		}
		end := a.Now()
		if to != "" {
			if end, err = a.instant("--to", to); err != nil {
				return err
			}
		}
		if err := cl.BackfillSchedule(ctx, args[0], begin, end); err != nil {
			return hinted(err, client.ErrNotFound, listHint)
		}
		return a.done(args[0], "making up for %s from %s to %s", args[0], a.clock(begin), a.clock(end))
	})
	return c
}

// completeSchedules gives schedules for the shell.
func (a *app) completeSchedules(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
	defer cancel()
	c, err := a.connect(ctx, false)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer c.Close()
	var ids []string
	for s, err := range c.Schedules(ctx) {
		if err != nil || len(ids) == 50 {
			break
		}
		ids = append(ids, cobra.CompletionWithDesc(s.ID, s.Cron))
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}
