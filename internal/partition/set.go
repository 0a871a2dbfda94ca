package partition

import (
	"github.com/cespare/xxhash/v2"
)

// Of gives the partition of a flow. It must never change for a data directory.
func Of(flowID string, partitions int) int {
	return int(xxhash.Sum64String(flowID) % uint64(partitions))
}

// Set is the partitions of one process.
type Set []*Runner

// For gives the partition that owns a flow.
func (s Set) For(flowID string) *Runner { return s[Of(flowID, len(s))] }
