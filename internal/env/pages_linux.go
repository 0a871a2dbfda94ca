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
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0
	}
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return 0
	}
	n := 0
	for line := range bytes.Lines(maps) {
		if from, to, ok := constantPages(line, exe); ok {
			if _, _, no := syscall.Syscall(syscall.SYS_MADVISE, from, to-from, syscall.MADV_DONTNEED); no == 0 {
				n += int(to - from)
			}
		}
	}
	return n
}

// constantPages reads a line of /proc/self/maps. ok: it is a mapping of the
// file exe that cannot be written, so that dropping its pages loses nothing.
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
