package bench

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticks is USER_HZ, which Linux has fixed at 100 for user space.
const ticks = 100

// stat is what of /proc/PID/stat is used.
type stat struct {
	pid, parent int
	own         time.Duration // CPU of the process
	reaped      time.Duration // CPU of its children that have ended
}

// parseStat reads /proc/PID/stat. The command's name may hold spaces and
// brackets, so fields count from its end.
func parseStat(b []byte) (stat, error) {
	i, j := bytes.IndexByte(b, ' '), bytes.LastIndexByte(b, ')')
	if i < 0 || j < i {
		return stat{}, errors.New("stat: fields are missing")
	}
	f := strings.Fields(string(b[j+1:]))
	if len(f) < 15 {
		return stat{}, errors.New("stat: fields are missing")
	}
	var n [6]int64
	for k, s := range []string{string(b[:i]), f[1], f[11], f[12], f[13], f[14]} {
		v, err := strconv.ParseInt(s, 10, 48)
		if err != nil {
			return stat{}, fmt.Errorf("stat: %w", err)
		}
		n[k] = v
	}
	const tick = time.Second / ticks
	return stat{pid: int(n[0]), parent: int(n[1]), own: time.Duration(n[2]+n[3]) * tick, reaped: time.Duration(n[4]+n[5]) * tick}, nil
}

// ProcessCPU is the CPU time of a process and all its descendants, those that
// have ended too, to 10 ms.
func ProcessCPU(pid int) (time.Duration, error) {
	names, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	all := map[int]stat{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		if s, err := parseStat(b); err == nil {
			all[s.pid] = s
		}
	}
	if _, ok := all[pid]; !ok {
		return 0, fmt.Errorf("process %d does not run", pid)
	}
	return sumCPU(all, pid), nil
}

func sumCPU(all map[int]stat, pid int) time.Duration {
	var sum time.Duration
	for p, s := range all {
		for q := p; q > 1; q = all[q].parent {
			if q == pid {
				sum += s.own + s.reaped
				break
			}
		}
	}
	return sum
}

// ProcessRSS is the resident memory of a process, in bytes.
func ProcessRSS(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0, errors.New("statm: fields are missing")
	}
	pages, err := strconv.ParseInt(f[1], 10, 48)
	return pages * int64(os.Getpagesize()), err
}

// Machine describes this one: kernel, cores, model of the CPU.
func Machine() map[string]string {
	read := func(name string) string {
		b, err := os.ReadFile(name)
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(string(b))
	}
	model := "unknown"
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			model = strings.TrimSpace(value)
			break
		}
	}
	return map[string]string{"kernel": read("/proc/sys/kernel/osrelease"), "cpu": model}
}
