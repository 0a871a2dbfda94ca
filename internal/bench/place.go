package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// Place is the machine that a point was measured on.
type Place struct {
	TakenAt   time.Time `json:"taken_at"`
	Kernel    string    `json:"kernel"`
	CPU       string    `json:"cpu"`
	Cores     int       `json:"cores"`
	GoVersion string    `json:"go_version"`
	// SyncMS is the median time of an fdatasync of 4 KiB written over what was
	// there, in the folder of the server's data; 0 with a target.
	SyncMS float64 `json:"fdatasync_ms_p50,omitempty"`
}

// thisPlace looks at the machine; dir "" leaves the disk out.
func thisPlace(dir string) (Place, error) {
	m := Machine()
	p := Place{TakenAt: time.Now().UTC().Truncate(time.Second), Kernel: m["kernel"], CPU: m["cpu"], Cores: runtime.NumCPU(), GoVersion: runtime.Version()}
	if dir == "" {
		return p, nil
	}
	d, err := probeSync(dir)
	p.SyncMS = milliseconds(d)
	return p, err
}

// probeSync is the median of a few hundred syncs.
func probeSync(dir string) (time.Duration, error) {
	const size, syncs = 1 << 20, 300
	name := filepath.Join(dir, "sync.probe")
	f, err := os.Create(name)
	if err != nil {
		return 0, fmt.Errorf("probe of the disk: %w", err)
	}
	defer func() { _, _ = f.Close(), os.Remove(name) }()
	block := make([]byte, 4096)
	for at := int64(0); at < size; at += int64(len(block)) {
		block[0] = byte(at >> 12)
		if _, err := f.WriteAt(block, at); err != nil {
			return 0, fmt.Errorf("probe of the disk: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return 0, fmt.Errorf("probe of the disk: %w", err)
	}
	took := make([]time.Duration, 0, syncs)
	for i := range syncs {
		block[1] = byte(i)
		begin := time.Now()
		if _, err := f.WriteAt(block, int64(i%256)*4096); err != nil {
			return 0, fmt.Errorf("probe of the disk: %w", err)
		}
		if err := syscall.Fdatasync(int(f.Fd())); err != nil {
			return 0, fmt.Errorf("probe of the disk: %w", err)
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}
