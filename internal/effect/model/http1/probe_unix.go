//go:build unix

package http1

import "syscall"

// probe looks at an idle connection without taking anything from it.
type probe struct {
	rc    syscall.RawConn // nil when the transport has none
	check func(fd uintptr) bool
	buf   [1]byte
	quiet bool // result of check
}

func (p *probe) attach(raw stream) {
	sc, ok := raw.(syscall.Conn)
	if !ok {
		return
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return
	}
	p.rc = rc
	p.check = func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), p.buf[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		p.quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK || err == syscall.EINTR
		return true
	}
}

// usable reports whether the connection is open and silent. One that the
// server has closed would cost a second try; one with bytes nobody asked for
// would give them as the answer to the next request. It costs one system call.
func (p *probe) usable() bool {
	if p.rc == nil {
		return true
	}
	return p.rc.Read(p.check) == nil && p.quiet
}
