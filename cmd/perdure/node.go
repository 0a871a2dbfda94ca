package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/env"
)

func nodeCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "node", Short: "Look at the processes that share an object store",
		Long: `Look at the processes that share an object store, as the store shows them. Nothing
is changed. To let another process take over, stop the active one (SIGTERM).`,
	}
	c.AddCommand(nodeListCommand(), nodePartitionsCommand())
	return c
}

// nodeLine is a process as "perdure node list" shows it.
type nodeLine struct {
	Node    string `json:"node"`
	Role    string `json:"role"`  // active, standby or gone
	State   string `json:"state"` // alive, silent or released
	Address string `json:"address"`
	Version string `json:"version"`
	TTLms   int64  `json:"lease_ttl_ms"`
}

func nodeListCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "list URL", Args: cobra.ExactArgs(1),
		Short: "List the processes of an object store; takes half a lease, to see which are alive",
		Example: `  perdure node list s3://bucket/prefix
  perdure node list s3://bucket/prefix --json`,
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		world := env.Real()
		store, done, err := openStore(world, args[0], false)
		if err != nil {
			return exitWith(exitUsage, err)
		}
		defer done()
		lines, err := listNodes(cmd.Context(), world, store)
		if err != nil {
			return exitWith(exitFailed, err)
		}
		return exitWith(exitFailed, writeRows(cmd.OutOrStdout(), asJSON, lines, "NODE\tROLE\tSTATE\tADDRESS\tVERSION\tLEASE", func(n nodeLine) string {
			return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%v", n.Node, n.Role, n.State, n.Address, n.Version, time.Duration(n.TTLms)*time.Millisecond)
		}))
	}
	return c
}

// lookEvery is the rest between two looks at the leases.
const lookEvery = 250 * time.Millisecond

// listNodes looks at the leases until each has changed or was unchanged for half
// its time: a live process renews it after 0.35 of that.
func listNodes(ctx context.Context, world env.Env, store blob.Store) ([]nodeLine, error) {
	active, err := cluster.ReadActive(ctx, store)
	if err != nil && !errors.Is(err, blob.ErrNotFound) {
		return nil, err
	}
	watch := cluster.NewWatch(cluster.LeaseConfig{Store: store, Env: world})
	first := map[string]uint64{}
	for {
		seen, err := watch.Poll(ctx)
		if err != nil {
			return nil, err
		}
		lines, sure := make([]nodeLine, 0, len(seen)), true
		for _, s := range seen {
			n := s.Node
			line := nodeLine{Node: n.ID, Role: "standby", State: "alive", Address: n.Address, Version: n.Version, TTLms: n.TTLms}
			if n.ID == active.Node && n.Nonce == active.Nonce && !active.Released {
				line.Role = "active"
			}
			before, known := first[n.Nonce]
			if !known {
				first[n.Nonce], before = n.Counter, n.Counter
			}
			switch {
			case n.Released:
				line.Role, line.State = "gone", "released"
			case n.Counter != before:
			case s.Quiet > n.TTL()/2:
				line.Role, line.State = "gone", "silent"
			default:
				sure = false
			}
			lines = append(lines, line)
		}
		if sure {
			return lines, nil
		}
		pause(ctx, lookEvery)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// partitionLine is a partition as "perdure node partitions" shows it.
type partitionLine struct {
	Partition int    `json:"partition"`
	Node      string `json:"node"`
	Address   string `json:"address"`
	Epoch     uint64 `json:"epoch"`
	HeadLSN   uint64 `json:"head_lsn"`
	Released  bool   `json:"released"`
}

func nodePartitionsCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "partitions URL", Args: cobra.ExactArgs(1),
		Short:   "List the partitions of an object store and who owns them",
		Example: `  perdure node partitions s3://bucket/prefix`,
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		store, done, err := openStore(env.Real(), args[0], false)
		if err != nil {
			return exitWith(exitUsage, err)
		}
		defer done()
		var lines []partitionLine
		for id := 0; ; id++ {
			m, err := cluster.Read(cmd.Context(), store, id)
			if errors.Is(err, blob.ErrNotFound) {
				break
			}
			if err != nil {
				return exitWith(exitFailed, err)
			}
			lines = append(lines, partitionLine{id, m.Node, m.Address, m.Epoch, m.HeadLSN, m.Released})
		}
		return exitWith(exitFailed, writeRows(cmd.OutOrStdout(), asJSON, lines, "PARTITION\tNODE\tADDRESS\tEPOCH\tJOURNAL FROM\tRELEASED", func(p partitionLine) string {
			return fmt.Sprintf("%d\t%s\t%s\t%d\t%d\t%t", p.Partition, p.Node, p.Address, p.Epoch, p.HeadLSN, p.Released)
		}))
	}
	return c
}

// writeRows writes a table, or one JSON object a line.
func writeRows[T any](w io.Writer, asJSON bool, rows []T, head string, row func(T) string) error {
	if asJSON {
		enc := json.NewEncoder(w)
		for _, r := range rows {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, head)
	for _, r := range rows {
		fmt.Fprintln(t, row(r))
	}
	return t.Flush()
}
