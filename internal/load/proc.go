package load

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// memory is what a process holds, in bytes.
type memory struct{ rss, pss, private int64 }

// probe reads the memory and the CPU of the process under test.
type probe interface {
	memory() (memory, error)
	cpu() (time.Duration, error)
}

// process is one of this machine.
type process int

func (p process) memory() (memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", int(p)))
	if err != nil {
		return memory{}, err
	}
	return parseRollup(b)
}

// parseRollup reads the sums of /proc/PID/smaps_rollup, which are in kB.
func parseRollup(b []byte) (memory, error) {
	var m memory
	seen := 0
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) != 3 || f[2] != "kB" {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 53)
		if err != nil || n < 0 {
			return memory{}, fmt.Errorf("smaps_rollup: %q", sc.Text())
		}
		switch f[0] {
		case "Rss:":
			m.rss = n << 10
		case "Pss:":
			m.pss = n << 10
		case "Private_Clean:", "Private_Dirty:":
			m.private += n << 10
		default:
			continue
		}
		seen++
	}
	if seen < 4 {
		return memory{}, errors.New("smaps_rollup: fields are missing")
	}
	return m, nil
}

// ticks is USER_HZ, which Linux has fixed at 100 for user space.
const ticks = 100

func (p process) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", int(p)))
	if err != nil {
		return 0, err
	}
	return parseStat(b)
}

// parseStat reads utime + stime, fields 14 and 15, of /proc/PID/stat. The
// command's name may hold spaces and brackets, so fields count from its end.
func parseStat(b []byte) (time.Duration, error) {
	i := bytes.LastIndexByte(b, ')')
	f := strings.Fields(string(b[i+1:]))
	if i < 0 || len(f) < 13 {
		return 0, errors.New("stat: fields are missing")
	}
	user, err1 := strconv.ParseInt(f[11], 10, 48)
	system, err2 := strconv.ParseInt(f[12], 10, 48)
	if err := errors.Join(err1, err2); err != nil {
		return 0, fmt.Errorf("stat: %w", err)
	}
	return time.Duration(user+system) * (time.Second / ticks), nil
}

// selfCPU is the CPU time of this process.
func selfCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// findListener is the process of this machine that listens on addr
// (host:port), or an error when there is none that this user may see.
func findListener(addr string) (process, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, err
	}
	want, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return 0, err
	}
	if !isLocal(addr) {
		return 0, errors.New(addr + " is not on this machine")
	}
	inodes := map[string]bool{}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if b, err := os.ReadFile(table); err == nil {
			listeners(b, uint16(want), inodes)
		}
	}
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0, err
	}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && inodes[to] {
			pid, err := strconv.Atoi(strings.Split(l, "/")[2])
			return process(pid), err
		}
	}
	return 0, fmt.Errorf("no process of this machine is seen to listen on %s", addr)
}

// listeners adds "socket:[inode]" of each listening socket on port.
func listeners(table []byte, port uint16, into map[string]bool) {
	const listening = "0A"
	sc := bufio.NewScanner(bytes.NewReader(table))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 10 || f[3] != listening {
			continue
		}
		_, hex, ok := strings.Cut(f[1], ":")
		if p, err := strconv.ParseUint(hex, 16, 16); ok && err == nil && uint16(p) == port {
			into["socket:["+f[9]+"]"] = true
		}
	}
}

// isLocal reports whether addr's host is an address of this machine.
func isLocal(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	if ip.IsLoopback() {
		return true
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok && n.IP.Equal(net.IP(ip.AsSlice())) {
			return true
		}
	}
	return false
}

// kernel is the release of the running kernel, for the settings.
func kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}
