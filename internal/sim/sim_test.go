package sim

import (
	"strings"
	"testing"
)

// seeds is how many seeds of each scenario the tests run.
func seeds(t *testing.T) uint64 {
	if testing.Short() {
		return 5
	}
	return 25
}

func TestScenariosHold(t *testing.T) {
	for _, sc := range Scenarios() {
		t.Run(sc, func(t *testing.T) {
			t.Parallel()
			for seed := range seeds(t) {
				r := mustRun(t, seed, sc, mutant{})
				if !r.OK {
					t.Fatalf("%s\n%s\n%s", strings.Join(r.Story, "\n"), r.Line(), r.Failure)
				}
			}
		})
	}
}

func mustRun(t *testing.T, seed uint64, scenario string, m mutant) *Result {
	t.Helper()
	r, err := runMutant(seed, Options{Scenario: scenario}, m)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestSeedsThatFoundBugs: each of these has failed once: a message of a new run lost its
// text to an attempt of the run before; a process that had lost its lease took
// partitions, with and without a seal; a snapshot of a former owner was pruned while
// it was being verified.
func TestSeedsThatFoundBugs(t *testing.T) {
	for _, seed := range []uint64{1119, 1199, 1680, 10015, 12316} {
		if r := mustRun(t, seed, "objects", mutant{}); !r.OK {
			t.Errorf("%s\n%s", r.Line(), r.Failure)
		}
	}
}

// TestFlowsReachEverything: the scenarios of flows accept each kind of command,
// and meet each kind of loss.
func TestFlowsReachEverything(t *testing.T) {
	took, faults := map[string]int{}, map[string]int{}
	for _, sc := range []string{"flows", "flowcrash", "flowslots"} {
		for seed := range 12 + seeds(t) {
			r := mustRun(t, seed, sc, mutant{})
			for k, n := range r.Commands {
				took[k] += n
			}
			for k, n := range r.Faults {
				faults[k] += n
			}
		}
	}
	t.Log(took, faults)
	for _, kind := range strings.Fields("StartFlow Publish StepResult Redispatch FireTimer DeleteFlow SetAttributes StopFlow StartQueued " +
		"Update Checkpoint SkipTimer DropMessages Reset_ ChildClosed OutboxDone") {
		if took[kind] == 0 {
			t.Errorf("no %s was accepted", kind)
		}
	}
	for _, kind := range strings.Fields("async-again async-other-way conflict handler-fails send-twice stream-breaks worker-dies worker-drains worker-hangs kill power overloaded") {
		if faults[kind] == 0 {
			t.Errorf("no %s happened", kind)
		}
	}
}

// TestNodesMeetEverything: nodes that share a store meet each kind of mishap, and come
// through it in each way.
func TestNodesMeetEverything(t *testing.T) {
	faults, takeovers := map[string]int{}, 0
	for seed := range 30 + 2*seeds(t) {
		r := mustRun(t, seed, "objects", mutant{})
		takeovers += r.Takeovers
		for k, n := range r.Faults {
			faults[k] += n
		}
	}
	t.Log(takeovers, faults)
	for _, kind := range strings.Fields("clock-jump cut-off kill ousted outage power probe probe-refused release restore-checked restored snapshot " +
		"standby-trimmed stop stopped store-answer-lost store-busy store-late store-lost store-refused tables-lost take-over-failed zombie-asked") {
		if faults[kind] == 0 {
			t.Errorf("no %s happened", kind)
		}
	}
}

// TestSameSeedSameRun: a run is a function of its seed, also beside others.
func TestSameSeedSameRun(t *testing.T) {
	digests := map[string]uint64{}
	for _, sc := range Scenarios() {
		for seed := range uint64(4) {
			a, b := mustRun(t, seed, sc, mutant{}), mustRun(t, seed, sc, mutant{})
			if a.JSON() != b.JSON() {
				t.Errorf("the same seed gave\n%s\nand\n%s", a.Line(), b.Line())
			}
			if other, ok := digests[a.Digest]; ok {
				t.Errorf("seeds %d and %d of %s gave the same digest", other, seed, sc)
			}
			digests[a.Digest] = seed
		}
	}
}

// TestMutantsAreFound breaks the engine or its surroundings on purpose; one of
// a few seeds must notice, by the rule that was broken.
func TestMutantsAreFound(t *testing.T) {
	for _, c := range []struct {
		name, scenario string
		m              mutant
		rules          string // one of these, separated by spaces
	}{
		{"a disk that does not sync", "crash", mutant{diskLies: true}, "journal"},
		{"an acknowledgement before the append", "crash", mutant{ackEarly: true}, "gate"},
		{"an attempt that nobody runs", "default", mutant{dropDispatch: true}, "outstanding"},
		{"timers that do not fire", "cancel", mutant{noTimers: true}, "liveness"},
		{"text before its commit", "slowdisk", mutant{showEarly: true}, "gate"},
		{"a turn that nobody took", "default", mutant{inventAnswer: true}, "outcome"},
		{"a reader without a cursor", "default", mutant{seeTwice: true}, "watch"},
		{"a slot that is used twice", "flowslots", mutant{doubleSlots: true}, "slots"},
		{"a slot that is lost", "flows", mutant{leakSlots: true}, "slots liveness"},
		{"a step before its commit", "flows", mutant{runEarly: true}, "gate"},
		{"a step that nobody runs", "flows", mutant{dropDispatch: true}, "outstanding"},
		{"a step that waits and is forgotten", "flowslots", mutant{dropQueue: true}, "outstanding"},
		{"a key that does not limit", "flows", mutant{ignoreKeys: true}, "keys"},
		{"a send that is forgotten", "flows", mutant{dropSends: true}, "outstanding"},
		{"a delivery that is not known again", "flowcrash", mutant{forgetKeys: true}, "once"},
		{"an update that is lost", "flows", mutant{loseUpdates: true}, "linearizable"},
		{"a timer of a flow that does not fire", "flows", mutant{noTimers: true}, "liveness"},
		{"a lease that is not looked at", "objects", mutant{ignoreLease: true}, "reads watch linearizable"},
		{"a trim beyond the snapshot", "objects", mutant{trimFar: true}, "trim"},
		{"a follower that passes over frames", "objects", mutant{skipFrames: true}, "follow recovery"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(80) {
				r := mustRun(t, seed, c.scenario, c.m)
				if r.OK {
					continue
				}
				for _, rule := range strings.Fields(c.rules) {
					if strings.Contains(r.Failure, rule) {
						t.Logf("seed %d: %.200s", seed, r.Failure)
						return
					}
				}
				t.Fatalf("seed %d failed by another rule: %s", seed, r.Failure)
			}
			t.Fatal("no seed noticed")
		})
	}
}
