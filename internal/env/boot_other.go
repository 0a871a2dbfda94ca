//go:build !linux

package env

import "time"

var began = time.Now()

// boot is the monotonic clock, which some systems stop while they are suspended:
// clusters are for Linux.
func boot() time.Duration { return time.Since(began) }
