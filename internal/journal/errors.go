package journal

import (
	"errors"
	"fmt"
)

// Errors of this package, to be matched with errors.Is.
var (
	// ErrTorn: the bytes end before the frame does.
	ErrTorn = errors.New("journal: frame is cut short")
	// ErrCorrupt: the bytes are not what was written.
	ErrCorrupt = errors.New("journal: corrupt")
	// ErrTooNew: an intact frame or segment of a format this build does not
	// read. Start the newer build again; nothing is damaged.
	ErrTooNew = errors.New("journal: written by a newer version of perdure")
	// ErrTooLarge: the frame would exceed MaxFrameSize.
	ErrTooLarge = errors.New("journal: frame too large")
	// ErrStale: the frame is of a writer that has been superseded: its epoch
	// is below one already in the log, or its nonce is not the epoch's.
	ErrStale = errors.New("journal: stale writer")
	// ErrOutOfOrder: the frame's sequence number or first LSN does not
	// continue the log.
	ErrOutOfOrder = errors.New("journal: out of order")
	// ErrPoisoned: a write or sync failed before; what is on disk is unknown
	// until the log is opened again.
	ErrPoisoned = errors.New("journal: closed for writing after a failed write")
	// ErrClosed: the log was closed.
	ErrClosed = errors.New("journal: closed")
	// ErrMissing: the log does not hold the LSN that was asked for.
	ErrMissing = errors.New("journal: LSN not in the log")
)

// CorruptError says where a log is damaged. It matches ErrCorrupt.
type CorruptError struct {
	File   string // path of the segment
	Offset int64  // byte offset of the damaged record in File
	Seq    uint64 // sequence number expected there; 0 if not known
	Reason string
}

// Error implements error, with what an operator can do.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("journal: corrupt: %s at offset %d (sequence %d): %s; acknowledged data is damaged, so the log is not opened: "+
		"check the disk, then restore this data directory from a backup (keep the damaged file for inspection)", e.File, e.Offset, e.Seq, e.Reason)
}

// Unwrap makes errors.Is(err, ErrCorrupt) hold.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }
