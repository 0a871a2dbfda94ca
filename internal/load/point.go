package load

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
)

// Point is the result of one measurement, as `--json` prints it. Times are
// in milliseconds.
type Point struct {
	Concurrency    int              `json:"concurrency"`
	Turns          int              `json:"turns"`
	TurnsPerS      float64          `json:"turns_per_s"`
	TTFT           Quantiles        `json:"ttft_ms"`
	Turn           Quantiles        `json:"turn_ms"`
	Errors         int64            `json:"errors"`
	Rejected       int64            `json:"rejected"`
	RejectedMS     *Quantiles       `json:"rejected_ms,omitempty"`         // from the intended start
	RejectedOwnMS  *Quantiles       `json:"rejected_service_ms,omitempty"` // from sending, in an open loop
	BrokenStreams  int64            `json:"broken_streams"`
	ErrorKinds     map[string]int64 `json:"error_kinds,omitempty"`
	SamplesDropped int64            `json:"samples_dropped,omitempty"`
	Server         *ServerFigures   `json:"server"` // null when it can't be seen
	Client         ClientFigures    `json:"client"`
	Mock           *MockFigures     `json:"mock,omitempty"`
	OfferedPerS    float64          `json:"offered_per_s,omitempty"` // open loop: attempts a second
	Workers        int              `json:"workers,omitempty"`       // open loop: most in use
	Settings       map[string]any   `json:"settings"`
	FloorMS        *float64         `json:"floor_ms"` // null without an upstream
}

// ServerFigures are of the server's process: the highest memory seen in the
// window, and the CPU of the window by its turns.
type ServerFigures struct {
	RSS       int64   `json:"rss_bytes"`
	PSS       int64   `json:"pss_bytes"`
	Private   int64   `json:"private_bytes"`
	CPUMSTurn float64 `json:"cpu_ms_per_turn"`
	// Heap allocations of a server in Go, by its metrics; 0 when it does not
	// tell.
	AllocsTurn     float64 `json:"allocs_per_turn,omitempty"`
	AllocBytesTurn float64 `json:"alloc_bytes_per_turn,omitempty"`
}

// ClientFigures are of the load generator itself.
type ClientFigures struct {
	CPUMSTurn float64 `json:"cpu_ms_per_turn"`
}

// MockFigures are of an upstream that is a mock.
type MockFigures struct {
	MaxConcurrent int64   `json:"max_concurrent"`
	CPUMSTurn     float64 `json:"cpu_ms_per_turn,omitempty"` // 0 when it can't be seen
}

// ReadPoints reads points as --json prints them, one a line.
func ReadPoints(r io.Reader) ([]Point, error) {
	const maxLine, maxPoints = 1 << 20, 10_000
	var out []Point
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxLine)
	for n := 1; sc.Scan(); n++ {
		if len(sc.Bytes()) == 0 {
			continue
		}
		if len(out) == maxPoints {
			return nil, fmt.Errorf("more than %d points", maxPoints)
		}
		var p Point
		if err := json.Unmarshal(sc.Bytes(), &p); err != nil {
			return nil, fmt.Errorf("line %d is no point: %w", n, err)
		}
		if p.Concurrency < 1 {
			return nil, fmt.Errorf("line %d is no point: concurrency %d", n, p.Concurrency)
		}
		out = append(out, p)
	}
	return out, sc.Err()
}
