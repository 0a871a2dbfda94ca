package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
)

// peerPoint is what a peer's driver prints for a point.
type peerPoint struct {
	Peer     string             `json:"peer"`
	Scenario string             `json:"scenario"`
	Clients  int                `json:"clients"`
	PerS     float64            `json:"ops_per_s"`
	Latency  Latency            `json:"latency_ms"`
	CPU      map[string]float64 `json:"cpu_us_per_op"`
}

// pair is one point of both, each the median of its runs.
type pair struct {
	scenario     string
	clients      int
	peer         string
	ours, theirs side
	runs         int
}

// side is the figures of one.
type side struct{ perS, p50, p99, cpu float64 }

// Ratios prints the points of one session side by side: ours and a peer's, with
// how many times the throughput of the peer ours has, and what part of its
// latency and CPU. Both files may have several runs of a point.
func Ratios(w io.Writer, oursName, peerName string) error {
	ours, err := ReadPoints(oursName)
	if err != nil {
		return err
	}
	peers, err := readPeerPoints(peerName)
	if err != nil {
		return err
	}
	pairs := pairUp(ours, peers)
	if len(pairs) == 0 {
		return fmt.Errorf("%s and %s have no point in common", oursName, peerName)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(tw, "scenario\tc\truns\tops/s perdure\t%[1]s\tratio\tp50 ms perdure\t%[1]s\tp99 ms perdure\t%[1]s\tCPU µs/op perdure\t%[1]s\tratio\t\n", pairs[0].peer)
	for _, p := range pairs {
		_, _ = fmt.Fprintf(tw, "%s\t%d\t%d\t%.0f\t%.0f\t%.2f×\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f\t%.0f\t%.2f×\t\n", p.scenario, p.clients, p.runs,
			p.ours.perS, p.theirs.perS, ratio(p.ours.perS, p.theirs.perS), p.ours.p50, p.theirs.p50, p.ours.p99, p.theirs.p99,
			p.ours.cpu, p.theirs.cpu, ratio(p.ours.cpu, p.theirs.cpu))
	}
	return tw.Flush()
}

func readPeerPoints(name string) ([]peerPoint, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var out []peerPoint
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, maxPoint)
	for line := 1; sc.Scan(); line++ {
		var p peerPoint
		if err := json.Unmarshal(sc.Bytes(), &p); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, line, err)
		}
		out = append(out, p)
	}
	return out, sc.Err()
}

// pairUp takes the points that both have, in the peer's order. A peer's variant
// of a scenario (sequential-steps-local) stands beside ours of the plain name.
func pairUp(ours []*Point, peers []peerPoint) []pair {
	var out []pair
	seen := map[string]bool{}
	for _, first := range peers {
		key := fmt.Sprint(first.Scenario, first.Clients)
		if seen[key] {
			continue
		}
		seen[key] = true
		var a, b []side
		for _, p := range ours {
			if p.Clients == first.Clients && p.Rate == 0 && (p.Scenario == first.Scenario || p.Scenario+"-local" == first.Scenario) {
				a = append(a, side{p.PerS, p.Latency.P50, p.Latency.P99, p.CPU.Server + p.CPU.Worker + p.CPU.Client})
			}
		}
		for _, p := range peers {
			if p.Clients == first.Clients && p.Scenario == first.Scenario {
				s := side{p.PerS, p.Latency.P50, p.Latency.P99, 0}
				for _, us := range p.CPU {
					s.cpu += us
				}
				b = append(b, s)
			}
		}
		if len(a) > 0 {
			out = append(out, pair{first.Scenario, first.Clients, first.Peer, middleSide(a), middleSide(b), min(len(a), len(b))})
		}
	}
	return out
}

// middleSide is the run with the median throughput.
func middleSide(runs []side) side {
	slices.SortFunc(runs, func(a, b side) int {
		switch {
		case a.perS < b.perS:
			return -1
		case a.perS > b.perS:
			return 1
		}
		return 0
	})
	return runs[(len(runs)-1)/2]
}
