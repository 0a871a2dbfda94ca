package flowcli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

func (a *app) history() *cobra.Command {
	var o client.HistoryOptions
	var after string
	var limit int
	c := &cobra.Command{
		Use: "history ID", Aliases: []string{"log"}, Short: "Tell what has happened to a flow",
		Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs(""),
	}
	f := c.Flags()
	f.BoolVarP(&o.Live, "follow", "f", false, "go on with what comes, until the run is closed")
	f.BoolVar(&o.NewestFirst, "newest-first", false, "the newest event first")
	f.StringVar(&o.RunID, "run", "", "only this run (default: all that are kept)")
	f.StringVar(&after, "after", "", "only events after this cursor, see --json")
	f.IntVar(&limit, "limit", 0, "at most so many events; 0 = all")
	c.MarkFlagsMutuallyExclusive("follow", "newest-first")
	body := func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if err := cursor(after, &o.After); err != nil {
			return err
		}
		s := a.story()
		n := 0
		for e, err := range cl.History(ctx, args[0], o) {
			if err != nil {
				return unlessLeft(ctx, o.Live, err)
			}
			if err := s.show(client.Seen{Event: e}, true); err != nil {
				return err
			}
			if n++; n == limit {
				break
			}
		}
		return nil
	}
	c.RunE = func(cmd *cobra.Command, args []string) error { return a.run(o.Live, body)(cmd, args) }
	return c
}

func (a *app) watch() *cobra.Command {
	var after string
	c := &cobra.Command{
		Use: "watch ID", Short: "Follow a flow, with what its running steps put out, until it ends",
		Args: args(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().StringVar(&after, "after", "", "only events after this cursor, see --json")
	c.RunE = a.run(true, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		var from client.Cursor
		if err := cursor(after, &from); err != nil {
			return err
		}
		s := a.story()
		for seen, err := range cl.Watch(ctx, args[0], from) {
			if err != nil {
				s.endText()
				return unlessLeft(ctx, true, err)
			}
			if err := s.show(seen, false); err != nil {
				return err
			}
		}
		s.endText()
		return nil
	})
	return c
}

// unlessLeft is no error when the user ended with Ctrl-C what has no end.
func unlessLeft(ctx context.Context, endless bool, err error) error {
	if endless && errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	return err
}

func cursor(text string, c *client.Cursor) error {
	if text == "" {
		return nil
	}
	if err := c.UnmarshalText([]byte(text)); err != nil {
		return usage("--after: %v", err)
	}
	return nil
}

const maxRemembered = 4096 // live steps whose begin a story remembers

// story tells events as lines, and text of running steps between them.
type story struct {
	*app
	day   string
	began map[uint64]time.Time // of live steps
	names map[uint64]string    // of live steps
	flow  time.Time            // when the run began
	exec  uint64               // whose text is on the screen; 0 = none
	fresh bool                 // the text on the screen ends with a new line
}

func (a *app) story() *story {
	return &story{app: a, began: map[uint64]time.Time{}, names: map[uint64]string{}}
}

// show tells one thing; plain prints an event's object bare.
func (s *story) show(seen client.Seen, plain bool) error {
	switch {
	case s.json && seen.Event != nil && plain:
		return s.print(seen.Event)
	case s.json && seen.Event != nil:
		return s.print(map[string]any{"event": seen.Event})
	case s.json:
		return s.print(map[string]any{"output": seen.Output})
	case seen.Output != nil:
		s.text(seen.Output)
		return nil
	}
	s.endText()
	e := seen.Event
	at := e.At.In(s.Zone)
	if day := at.Format("2006-01-02"); day != s.day {
		s.day = day
		fmt.Fprintln(s.Out, s.paint(dim, day))
	}
	color, line := s.tell(e)
	if s.Width > 0 {
		line = cut(line, max(s.Width-14, 20))
	}
	fmt.Fprintln(s.Out, s.paint(dim, at.Format("15:04:05.000"))+"  "+s.paint(color, line))
	return nil
}

// text shows what a running step puts out, under its name.
func (s *story) text(o *client.Output) {
	if s.exec != o.Exec {
		s.endText()
		name := s.names[o.Exec]
		if name == "" {
			name = "step"
		}
		fmt.Fprintln(s.Out, s.paint(dim, fmt.Sprintf("%s #%d:", clean(name), o.Exec)))
		s.exec = o.Exec
	}
	fmt.Fprint(s.Out, harmless(o.Text))
	s.fresh = strings.HasSuffix(o.Text, "\n")
}

func (s *story) endText() {
	if s.exec != 0 && !s.fresh {
		fmt.Fprintln(s.Out)
	}
	s.exec = 0
}

// tell puts an event into words.
func (s *story) tell(e *client.Event) (color, line string) {
	kind, what, _ := strings.Cut(e.Type, ".")
	text := clean(e.Text)
	switch kind {
	case "flow":
		return s.tellFlow(e, what, text)
	case "step":
		return s.tellStep(e, what, text)
	}
	switch e.Type {
	case "timer.fired", "timer.skipped":
		verb := map[string]string{"timer.fired": "came due", "timer.skipped": "was skipped"}[e.Type]
		if text != "" {
			text = " " + text
		}
		return "", fmt.Sprintf("the timer%s of %s %s", text, step(e), verb)
	case "channel.published":
		return "", "a message waits" + in(e) + ": " + short(json.RawMessage(e.Text), shortValue)
	case "channel.dropped":
		return yellow, "a waiting message" + in(e) + " was dropped" + because(text)
	case "attributes.set":
		return "", "a client" + sets(e)
	case "rpc.executed":
		line = "RPC " + text
		if s := sets(e); s != "" {
			return "", line + s
		}
		return "", line + " ran"
	case "cancel.requested":
		return yellow, "cancel was asked for" + because(text)
	}
	return "", strings.TrimSpace(clean(e.Type) + " " + text)
}

// in names the channel of an event.
func in(e *client.Event) string {
	if e.Channel == "" {
		return ""
	}
	return " in " + clean(e.Channel)
}

func (s *story) tellFlow(e *client.Event, what, text string) (color, line string) {
	took := ""
	if !s.flow.IsZero() && !e.At.Before(s.flow) {
		took = " after " + span(e.At.Sub(s.flow))
	}
	switch what {
	case "started":
		s.flow = e.At
		return bold, strings.TrimRight("the flow begins, run "+e.RunID+with(e), " ")
	case "reset":
		s.flow = e.At
		return bold, fmt.Sprintf("a new run begins at step #%d", e.Exec) + because(text)
	case "completed":
		line = "the flow is completed" + took
		if len(e.Items) > 0 && len(e.Items[0]) > 0 {
			line += ": " + short(e.Items[0], shortValue)
		}
		return green, line
	case "failed":
		return red, "the flow has failed" + took + because(text)
	case "cancelled", "terminated":
		return yellow, "the flow is " + what + took + because(text)
	case "timed_out":
		return red, "the flow has timed out" + took
	}
	return yellow, "the flow: " + clean(what) + because(text)
}

func (s *story) tellStep(e *client.Event, what, text string) (color, line string) {
	name := step(e)
	if s.names[e.Exec] == "" && len(s.names) < maxRemembered {
		s.names[e.Exec] = e.Step
	}
	switch what {
	case "preparing":
		s.begin(e)
		return dim, name + " prepares its wait" + given(e)
	case "waiting":
		return "", name + sets(e) + " waits"
	case "started":
		s.begin(e)
		return blue, name + " begins" + given(e)
	case "restarted":
		return yellow, name + " was handed out again" + attempt(e) + because(text)
	case "retrying":
		return yellow, name + " failed and will be tried again" + because(text)
	}
	took := ""
	if t, ok := s.began[e.Exec]; ok {
		took = " after " + span(e.At.Sub(t))
		delete(s.began, e.Exec)
	}
	delete(s.names, e.Exec)
	then := ""
	if len(e.Next) > 0 {
		then = "; next: " + clean(strings.Join(e.Next, ", "))
	}
	switch what {
	case "completed":
		return green, name + " is done" + took + also(sets(e)) + then
	case "failed":
		return red, name + " has failed" + took + attempt(e) + because(text) + then
	case "cancelled":
		return yellow, name + " was cancelled" + took + because(text)
	}
	return "", name + " " + clean(what) + because(text)
}

// begin remembers when a step began; its WaitFor counts apart.
func (s *story) begin(e *client.Event) {
	if len(s.began) < maxRemembered {
		s.began[e.Exec] = e.At
	}
}

func step(e *client.Event) string { return fmt.Sprintf("%s #%d", clean(e.Step), e.Exec) }

func attempt(e *client.Event) string {
	if e.Attempt > 1 {
		return fmt.Sprintf(" (attempt %d)", e.Attempt)
	}
	return ""
}

func because(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
}

// given is what a step began with: its messages, or else its input.
func given(e *client.Event) string {
	switch {
	case len(e.Items) == 1:
		return " with the message " + short(e.Items[0], shortValue)
	case len(e.Items) > 1:
		return " with " + count(len(e.Items), "message") + ", first " + short(e.Items[0], shortValue)
	case len(e.Input) > 0:
		return " with " + short(e.Input, shortValue)
	}
	return ""
}

// with is the attributes that a flow begins with.
func with(e *client.Event) string {
	if len(e.Attributes) == 0 {
		return ""
	}
	return " with " + list(e.Attributes)
}

// sets is the attributes that were written.
func sets(e *client.Event) string {
	if len(e.Attributes) == 0 {
		return ""
	}
	return " sets " + list(e.Attributes)
}

// also joins what a line says further.
func also(s string) string {
	if s == "" {
		return ""
	}
	return "," + s
}

const maxNamed = 5 // attributes that a line names

func list(attrs []client.Attribute) string {
	var parts []string
	for i, v := range attrs {
		if i == maxNamed {
			parts = append(parts, fmt.Sprintf("and %d more", len(attrs)-i))
			break
		}
		if len(v.Value) == 0 && v.Size == 0 {
			parts = append(parts, clean(v.Name)+" removed")
			continue
		}
		parts = append(parts, clean(v.Name)+"="+attributeText(v, shortValue/2))
	}
	return strings.Join(parts, ", ")
}
