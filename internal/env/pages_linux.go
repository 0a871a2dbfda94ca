package env

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// DropCode unmaps the pages of the program's own file from this process: code
// and constants that a busy time touched. They stay in the system's page
// cache, where they can be reclaimed once nobody maps them; what is used again
// comes back from there with a minor fault. It gives the bytes of address
// space that it went over, 0 when it can not be done here. Safe at any time.
func DropCode() int {
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return 0
	}
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return 0
	}
	n := 0
	for _, m := range constantMappings(maps, exe) {
		if _, _, no := syscall.Syscall(syscall.SYS_MADVISE, m.from, m.to-m.from, syscall.MADV_DONTNEED); no == 0 {
			n += int(m.to - m.from)
		}
	}
	return n
}

type mapping struct{ from, to uintptr }

// constantMappings finds in /proc/self/smaps what is exactly as in the file exe,
// so that dropping it loses nothing. A mapping that cannot be written may have
// been written before: the loader relocates addresses in a dynamically linked
// program and then protects them. Those pages are anonymous.
func constantMappings(smaps []byte, exe string) []mapping {
	var out []mapping
	var m mapping
	candidate := false
	for line := range bytes.Lines(smaps) {
		f := bytes.Fields(line)
		switch {
		case len(f) == 0:
		case !bytes.HasSuffix(f[0], []byte(":")): // the first line of a mapping
			m.from, m.to, candidate = constantPages(line, exe)
		case candidate && string(f[0]) == "Anonymous:" && len(f) > 1 && string(f[1]) == "0":
			out = append(out, m)
		}
	}
	return out
}

// constantPages reads the first line of a mapping. ok: it is of the file exe and
// cannot be written.
func constantPages(line []byte, exe string) (from, to uintptr, ok bool) {
	f := bytes.Fields(line) // address permissions offset device inode path
	if len(f) != 6 || len(f[1]) != 4 || f[1][1] != '-' || string(f[5]) != exe {
		return 0, 0, false
	}
	a, b, _ := bytes.Cut(f[0], []byte("-"))
	lo, err1 := strconv.ParseUint(string(a), 16, 64)
	hi, err2 := strconv.ParseUint(string(b), 16, 64)
	return uintptr(lo), uintptr(hi), err1 == nil && err2 == nil && lo < hi
}
