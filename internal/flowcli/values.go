package flowcli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/client"
)

func (a *app) get() *cobra.Command {
	var wait bool
	var equals string
	c := &cobra.Command{
		Use:   "get ID [NAME...]",
		Short: "Print attributes; a name ending with * is a prefix",
		Long:  "Print attributes of a flow: the value alone when one name is given, a table for\nseveral or none. A name that ends with * is a prefix.",
		Args:  args(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeIDs(""),
	}
	c.Flags().BoolVar(&wait, "wait", false, "wait until the attribute has a value")
	c.Flags().StringVar(&equals, "equals", "", "wait until it has this value (JSON)")
	body := func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		id, names := args[0], args[1:]
		single := len(names) == 1 && !strings.HasSuffix(names[0], "*")
		if wait || equals != "" {
			if !single {
				return usage("--wait and --equals need one name")
			}
			return a.await(ctx, cl, id, names[0], equals)
		}
		got, err := cl.Attributes(ctx, id, names...)
		if err != nil {
			return err
		}
		if single && len(got) == 0 {
			return &client.Error{Code: client.ErrNotFound.Code, Message: fmt.Sprintf("flow %s has no attribute %s", clean(id), clean(names[0])), Position: -1}
		}
		return a.showAttributes(got, single)
	}
	c.RunE = func(cmd *cobra.Command, args []string) error { return a.run(wait || equals != "", body)(cmd, args) }
	return c
}

func (a *app) await(ctx context.Context, cl *client.Client, id, name, equals string) error {
	var want any
	if equals != "" {
		v, err := a.value("--equals", equals)
		if err != nil {
			return err
		}
		want = v
	}
	got, err := cl.WaitAttribute(ctx, id, name, want)
	if err != nil {
		return err
	}
	return a.showAttributes([]client.Attribute{got}, true)
}

func (a *app) showAttributes(got []client.Attribute, single bool) error {
	if a.json {
		for _, v := range got {
			if err := a.print(v); err != nil {
				return err
			}
		}
		return nil
	}
	if single {
		fmt.Fprintln(a.Out, harmless(string(got[0].Value)))
		return nil
	}
	t := &table{head: []string{"NAME", "VALUE"}}
	for _, v := range got {
		t.add(clean(v.Name), attributeText(v, shortValue*3))
	}
	if len(t.rows) > 0 {
		a.write(a.Out, t)
	}
	return nil
}

func (a *app) set() *cobra.Command {
	var unset []string
	c := &cobra.Command{
		Use: "set ID NAME=JSON...", Short: "Set attributes, all of them or none",
		Example: `  perdure flow set order-17 'customer="acme"' amount=42 --unset note`,
		Args:    args(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().StringArrayVar(&unset, "unset", nil, "remove this attribute; may be repeated")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		attrs, err := a.assignments("NAME", args[1:])
		if err != nil {
			return err
		}
		for _, name := range unset {
			attrs = append(attrs, client.Attribute{Name: name})
		}
		if len(attrs) == 0 {
			return usage("nothing to set: give NAME=JSON or --unset NAME")
		}
		if err := cl.SetAttributes(ctx, args[0], attrs...); err != nil {
			return err
		}
		return a.done(args[0], "set %s of %s", count(len(attrs), "attribute"), args[0])
	})
	return c
}

// done reports that a command is done: a sentence, or an object with the ID.
func (a *app) done(id, format string, args ...any) error {
	if a.json {
		return a.print(map[string]any{"id": id, "done": true})
	}
	fmt.Fprintln(a.Out, clean(fmt.Sprintf(format, args...)))
	return nil
}

func (a *app) signal() *cobra.Command {
	var o client.PublishOptions
	c := &cobra.Command{
		Use: "signal ID CHANNEL [MESSAGE...]", Aliases: []string{"publish"},
		Short:   "Publish messages to a channel of a flow; without one, null",
		Example: `  perdure flow signal order-17 payment '{"amount":12}'`,
		Args:    args(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().StringVar(&o.RequestID, "request-id", "", "idempotency key: the same again publishes nothing")
	c.Flags().IntVar(&o.MaxPending, "max-pending", 0, "refuse when this many wait already (0: the server's bound)")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		payloads := []any{json.RawMessage("null")}
		for i, arg := range args[2:] {
			v, err := a.value(fmt.Sprintf("message %d", i+1), arg)
			if err != nil {
				return err
			}
			payloads = append(payloads[:i], v)
		}
		ids, err := cl.Publish(ctx, args[0], args[1], o, payloads...)
		if err != nil {
			return err
		}
		if a.json {
			return a.print(map[string][]string{"message_ids": ids})
		}
		fmt.Fprintf(a.Out, "published %s to %s of %s\n", count(len(payloads), "message"), clean(args[1]), clean(args[0]))
		return nil
	})
	return c
}

func (a *app) messages() *cobra.Command {
	var drop bool
	var ids []string
	c := &cobra.Command{
		Use: "messages ID CHANNEL", Short: "List the messages that wait in a channel, or drop them",
		Args: args(cobra.ExactArgs(2)), ValidArgsFunction: a.completeIDs("status = running"),
	}
	c.Flags().BoolVar(&drop, "drop", false, "drop all that wait")
	c.Flags().StringArrayVar(&ids, "drop-id", nil, "drop the message of this ID; may be repeated")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		if drop && len(ids) > 0 {
			return usage("--drop drops all; give it or --drop-id")
		}
		if drop || len(ids) > 0 {
			n, err := cl.DropMessages(ctx, args[0], args[1], ids...)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(map[string]int{"dropped": n})
			}
			fmt.Fprintf(a.Out, "dropped %s\n", count(n, "message"))
			return nil
		}
		got, err := cl.Messages(ctx, args[0], args[1])
		if err != nil {
			return err
		}
		return a.showMessages(got)
	})
	return c
}

func (a *app) showMessages(got []client.Message) error {
	t := &table{head: []string{"ID", "CAME", "MESSAGE"}}
	for _, m := range got {
		if a.json {
			if err := a.print(m); err != nil {
				return err
			}
			continue
		}
		payload := short(m.Payload, shortValue*3)
		if m.Size > 0 {
			payload = fmt.Sprintf("(%d bytes)", m.Size)
		}
		t.add(clean(m.ID), a.ago(m.At), payload)
	}
	switch {
	case a.json:
	case len(got) == 0:
		fmt.Fprintln(a.Err, "no messages wait")
	default:
		a.write(a.Out, t)
	}
	return nil
}

func (a *app) rpc() *cobra.Command {
	var o client.RPCOptions
	c := &cobra.Command{
		Use: "rpc ID NAME [INPUT]", Aliases: []string{"call"}, Short: "Call an RPC of a flow, and print its output",
		Args: args(cobra.RangeArgs(2, 3)), ValidArgsFunction: a.completeIDs(""),
	}
	f := c.Flags()
	f.StringVar(&o.RequestID, "request-id", "", "idempotency key: the same again gives the first output")
	f.BoolVar(&o.FailFast, "fail-fast", false, "fail when another RPC holds the flow's lock, instead of waiting")
	f.DurationVar(&o.LockTimeout, "lock-timeout", 0, "how long to wait for the flow's lock (0: as long as for the answer)")
	c.RunE = a.run(false, func(ctx context.Context, cl *client.Client, _ *cobra.Command, args []string) error {
		var input any
		if len(args) == 3 {
			v, err := a.value("the input", args[2])
			if err != nil {
				return err
			}
			input = v
		}
		out, err := cl.RPC(ctx, args[0], args[1], input, o)
		if err != nil {
			return err
		}
		switch {
		case a.json:
			return a.print(map[string]json.RawMessage{"output": out})
		case len(out) > 0:
			fmt.Fprintln(a.Out, harmless(string(out)))
		}
		return nil
	})
	return c
}
