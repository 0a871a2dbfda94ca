package main

import (
	"fmt"
	"io"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/perdure-dev/perdure/internal/sim"
)

func simCommand() *cobra.Command {
	var seed uint64
	var seeds int
	var scenario string
	var asJSON, verbose, harmOnly bool
	c := &cobra.Command{
		Use:   "sim",
		Short: "Run seeds of the simulator; exit 1 when a checker was violated",
		Long: `Run whole servers in a simulated world with seeded faults, with every checker
on: one server with its disk, or several that share an object store (scenario
objects). The same seed gives the same run; a failure prints its story and how to
run it again.`,
		Example: `  perdure sim --seed 1 --seeds 200
  perdure sim --seed 17 --scenario crash -v`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.Uint64Var(&seed, "seed", 1, "the first seed")
	f.IntVar(&seeds, "seeds", 1, "how many seeds to run")
	f.StringVar(&scenario, "scenario", "", "what to stress: "+strings.Join(sim.Scenarios(), ", ")+"; each in turn when not given")
	f.BoolVar(&asJSON, "json", false, "print one JSON object a line")
	f.BoolVar(&harmOnly, "harm-only", false, "do not check the objects in the store themselves, only what clients, workers and later owners see")
	f.BoolVarP(&verbose, "verbose", "v", false, "print the whole story of each run")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if seeds < 1 {
			return exitWith(exitUsage, fmt.Errorf("--seeds is %d, must be at least 1", seeds))
		}
		if err := sim.Check(scenario); err != nil {
			return exitWith(exitUsage, err)
		}
		failed := 0
		out := cmd.OutOrStdout()
		o := sim.Options{Scenario: scenario, Whole: verbose, HarmOnly: harmOnly}
		err := sim.RunMany(cmd.Context(), seed, seeds, runtime.GOMAXPROCS(0), o, func(r *sim.Result) {
			if !r.OK {
				failed++
			}
			printRun(out, r, asJSON, verbose)
		})
		if err == nil && failed > 0 {
			err = fmt.Errorf("%d of %d seeds failed", failed, seeds)
		}
		return exitWith(exitFailed, err)
	}
	return c
}

func printRun(out io.Writer, r *sim.Result, asJSON, verbose bool) {
	if asJSON {
		fmt.Fprintln(out, r.JSON())
		return
	}
	if !r.OK || verbose {
		for _, l := range r.Story {
			fmt.Fprintln(out, "  "+l)
		}
	}
	fmt.Fprintln(out, r.Line())
	if !r.OK {
		fmt.Fprintf(out, "  violated: %s\n  run again: perdure sim --seed %d --scenario %s -v\n", r.Failure, r.Seed, r.Scenario)
	}
}
