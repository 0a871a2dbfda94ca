package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/internal/backup"
	"github.com/perdure-dev/perdure/internal/env"
)

func backupCommand() *cobra.Command {
	return copyCommand(&cobra.Command{
		Use:   "backup --from URL --to URL",
		Short: "Copy a store to a consistent point while servers work on it",
		Long: `Copy a store into an empty one while servers work on it. All that was acknowledged
before the command is in the copy, and of what comes meanwhile a consistent part.
Every object is verified. The copy is a store that a server can be started on.

Verify it again at any time with "perdure doctor store".`,
		Example: `  perdure backup --from s3://bucket/prefix --to /backups/monday
  perdure backup --from s3://bucket/prefix --to s3://other/monday`,
	})
}

func restoreCommand() *cobra.Command {
	return copyCommand(&cobra.Command{
		Use:   "restore --from URL --to URL",
		Short: "Copy a backup into an empty store",
		Long: `Copy a backup into an empty store, and verify every object. Start servers on it
when the command has ended; until then none would start.`,
		Example: `  perdure restore --from /backups/monday --to s3://bucket/new-prefix`,
	})
}

func copyCommand(c *cobra.Command) *cobra.Command {
	var from, to string
	var asJSON bool
	c.Args = cobra.NoArgs
	c.Flags().StringVar(&from, "from", "", "the store to copy: s3://BUCKET/PREFIX or a folder")
	c.Flags().StringVar(&to, "to", "", "the empty store to copy to: s3://BUCKET/PREFIX, or a folder, made if it is missing")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if from == "" || to == "" || from == to {
			return exitWith(exitUsage, errors.New("--from and --to are needed, and not the same"))
		}
		world := env.Real()
		source, closeSource, err := openStore(world, from, false)
		if err != nil {
			return exitWith(exitUsage, err)
		}
		defer closeSource()
		target, closeTarget, err := openStore(world, to, true)
		if err != nil {
			return exitWith(exitUsage, err)
		}
		defer closeTarget()
		line := newProgressLine(cmd.ErrOrStderr(), "copied")
		result, err := backup.Copy(cmd.Context(), source, target, backup.Options{
			Rand: world.Rand, Clock: world.Clock, Progress: func(p backup.Progress) { line.tell(p.Objects, p.Bytes) },
		})
		line.clear()
		switch {
		case errors.Is(err, backup.ErrNotEmpty), errors.Is(err, backup.ErrUnfit):
			return exitWith(exitUsage, err)
		case err != nil:
			return exitWith(exitFailed, err)
		}
		return exitWith(exitFailed, printCopy(cmd.OutOrStdout(), result, asJSON))
	}
	return c
}

func printCopy(w io.Writer, r backup.Result, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(r)
	}
	at := "no entries"
	if r.CutUs > 0 {
		at = "entries up to " + time.UnixMicro(r.CutUs).UTC().Format(time.RFC3339)
	}
	_, err := fmt.Fprintf(w, "copied and verified %d objects, %.1f MiB: %d partitions with %s\n", r.Objects, float64(r.Bytes)/(1<<20), len(r.Partitions), at)
	return err
}
