package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
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
	// Commit of the folder that the measurement was started in; the version is
	// the binary's own.
	Commit string `json:"commit,omitempty"`
	// Variables of the environment that change how the processes run.
	Environment map[string]string `json:"environment,omitempty"`
	// Filesystem of the server's data.
	Filesystem string `json:"filesystem,omitempty"`
	// SyncMS is the median time of an fdatasync of 4 KiB written over what was
	// there, in the folder of the server's data; 0 with a target.
	SyncMS float64 `json:"fdatasync_ms_p50,omitempty"`
}

// thisPlace looks at the machine; dir "" leaves the disk out.
func thisPlace(dir string) (Place, error) {
	m := Machine()
	p := Place{TakenAt: time.Now().UTC().Truncate(time.Second), Kernel: m["kernel"], CPU: m["cpu"], Cores: runtime.NumCPU(), GoVersion: runtime.Version()}
	p.Commit = commit()
	for _, name := range []string{"GOMAXPROCS", "GOGC", "GOMEMLIMIT", "GODEBUG"} {
		if v := os.Getenv(name); v != "" {
			if p.Environment == nil {
				p.Environment = map[string]string{}
			}
			p.Environment[name] = v
		}
	}
	if dir == "" {
		return p, nil
	}
	p.Filesystem = filesystem(dir)
	d, err := probeSync(dir)
	p.SyncMS = milliseconds(d)
	return p, err
}

// commit is that of the current folder; empty outside of a repository.
func commit() string {
	out, err := exec.Command("git", "rev-parse", "HEAD").Output()
	if err != nil {
		return ""
	}
	rev := strings.TrimSpace(string(out))
	if exec.Command("git", "diff", "--quiet", "HEAD").Run() != nil {
		rev += " and changes"
	}
	return rev
}

// memoryOnly is a file system on which a sync does nothing.
const memoryOnly = "tmpfs"

// filesystem names the kind of dir's file system, for those that matter here.
func filesystem(dir string) string {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return "unknown"
	}
	switch uint32(s.Type) {
	case 0x01021994, 0x858458f6:
		return memoryOnly
	case 0xef53:
		return "ext4"
	case 0x58465342:
		return "xfs"
	case 0x9123683e:
		return "btrfs"
	case 0x794c7630:
		return "overlay"
	}
	return fmt.Sprintf("%#x", uint32(s.Type))
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
