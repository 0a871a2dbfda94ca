// Package env is the one seam between Perdure and the outside world: clock,
// randomness, file system and network. Everything above it takes these as
// values, so that the simulator can run the production code on a simulated
// world. A lint test forbids time.Now, math/rand, os and net elsewhere.
package env

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// FS is the file-system seam: the real one in production, a crashable
// in-memory one in the simulator. vfs.File.SyncData is fdatasync.
type FS = vfs.FS

// Clock gives time. Implementations are safe for concurrent use.
type Clock interface {
	// Now is wall time with the monotonic reading where there is one.
	Now() time.Time
	// AfterFunc calls f once, d from now, on a goroutine of its own in
	// production and on the scheduler in the simulator.
	AfterFunc(d time.Duration, f func()) Timer
}

// Timer is a pending AfterFunc.
type Timer interface {
	// Stop reports whether it kept f from being called.
	Stop() bool
}

// Rand gives randomness. Implementations are safe for concurrent use.
type Rand interface{ Uint64() uint64 }

// Dialer opens network connections.
type Dialer interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// Env is one world.
type Env struct {
	Clock  Clock
	Rand   Rand
	FS     FS
	Dialer Dialer
	// Boot is the time since some instant. It never goes back or jumps, and runs
	// on while the machine is suspended: leases are counted by it.
	Boot func() time.Duration
}

// Real is the world outside: system clock, system randomness, local disk,
// system network.
func Real() Env {
	return Env{Clock: SystemClock{}, Rand: systemRand{}, FS: vfs.Default, Dialer: &net.Dialer{Timeout: 10 * time.Second}, Boot: boot}
}

// SystemClock is the machine's clock.
type SystemClock struct{}

// Now implements Clock.
func (SystemClock) Now() time.Time { return time.Now() }

// AfterFunc implements Clock.
func (SystemClock) AfterFunc(d time.Duration, f func()) Timer { return time.AfterFunc(d, f) }

type systemRand struct{}

func (systemRand) Uint64() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // crypto/rand.Read never fails since Go 1.24
	return binary.LittleEndian.Uint64(b[:])
}
