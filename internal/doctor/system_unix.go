//go:build unix

package doctor

import "golang.org/x/sys/unix"

// ThisSystem reads the limits from the operating system.
type ThisSystem struct{}

// OpenFiles implements System with the soft limit of ulimit -n.
func (ThisSystem) OpenFiles() (n uint64, ok bool) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 0, false
	}
	return r.Cur, true
}
