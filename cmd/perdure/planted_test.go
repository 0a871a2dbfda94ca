//go:build !race

package main

import (
	"errors"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/sim"
)

// mostSeeds is within how many seeds a bug must be found.
const mostSeeds = 200

// TestPlantedBugsAreFound builds perdure with each of the bugs that are planted in
// the object log, and runs the simulator: it must notice within 200 seeds, by a rule
// that says what is wrong. Without a bug it says nothing of the same seeds.
func TestPlantedBugsAreFound(t *testing.T) {
	if testing.Short() {
		t.Skip("builds four programs")
	}
	t.Run("none", func(t *testing.T) {
		err := sim.RunMany(t.Context(), 1, mostSeeds, runtime.GOMAXPROCS(0), sim.Options{Scenario: "objects"}, func(r *sim.Result) {
			if !r.OK {
				t.Errorf("%s\n%s", r.Line(), r.Failure)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	for _, bug := range []struct {
		tag   string
		rules string // one of these
		harm  string // by one of these when only the harm it does is looked at
	}{
		{"plant_ack_early", "acknowledged", "gate"},
		{"plant_skip_seal", "seal", "restore recovery follow liveness"},
		{"plant_reuse_epoch", "epochs", "recovery"},
		{"plant_trim_seal", "trim", "gate prefix recovery"},
	} {
		t.Run(bug.tag, func(t *testing.T) {
			perdure := filepath.Join(t.TempDir(), "perdure")
			if out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", bug.tag, "-o", perdure, ".").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			finds(t, perdure, bug.rules)
			finds(t, perdure, bug.harm, "--harm-only")
		})
	}
}

// finds runs the simulator, a few seeds at a time, until it fails.
func finds(t *testing.T, perdure, rules string, flags ...string) {
	t.Helper()
	const step = 20
	for first := 1; first <= mostSeeds; first += step {
		args := append([]string{"sim", "--scenario", "objects", "--seed", strconv.Itoa(first), "--seeds", strconv.Itoa(step)}, flags...)
		out, err := exec.CommandContext(t.Context(), perdure, args...).Output()
		if err == nil {
			continue
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitFailed {
			t.Fatalf("it ended with %v, want exit code %d", err, exitFailed)
		}
		_, what, _ := strings.Cut(string(out), "violated: ")
		what, _, _ = strings.Cut(what, "\n")
		rule, _, _ := strings.Cut(strings.TrimPrefix(what, "oracle: "), " ")
		if rule = strings.TrimSuffix(rule, ":"); !strings.Contains(" "+rules+" ", " "+rule+" ") {
			t.Errorf("it was found by rule %q, want one of %q: %s", rule, rules, what)
		}
		t.Logf("from seed %d on, %v: %.200s", first, flags, what)
		return
	}
	t.Errorf("%d seeds with flags %v did not find it", mostSeeds, flags)
}
