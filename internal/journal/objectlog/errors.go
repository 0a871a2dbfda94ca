package objectlog

import (
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/internal/journal"
)

// Errors of this package, to be matched with errors.Is.
var (
	// ErrFenced: a newer owner has taken the log over, or an object that is not
	// this writer's lies where its own should. It writes no more; it matches
	// journal.ErrStale.
	ErrFenced = fmt.Errorf("objectlog: fenced: %w", journal.ErrStale)
	// ErrLeaseOver: the store answered, or was to be asked again, when the lease
	// was no longer valid. What was in flight may be in the log or not; it
	// matches journal.ErrStale.
	ErrLeaseOver = fmt.Errorf("objectlog: the lease is over: %w", journal.ErrStale)
	// ErrTrimmed: what the follower needs next was given up; restore the tables
	// from the newest snapshot and follow from the manifest's head.
	ErrTrimmed = errors.New("objectlog: trimmed beyond the follower's place")
	// ErrWindowFull: Begin was called with as many frames in flight as the
	// manifest's window allows; see Log.MaxInFlight.
	ErrWindowFull = errors.New("objectlog: the window is full")
	// ErrNotReplayed: Begin before Replay has taken the log over.
	ErrNotReplayed = errors.New("objectlog: the log was not replayed yet, so it is not taken over")
	// ErrCorrupt: an object is not what was written, or does not belong where it is.
	ErrCorrupt = journal.ErrCorrupt
	// ErrTooNew: an intact object of a format this build does not read.
	ErrTooNew = journal.ErrTooNew
)

// ObjectError says which object of a log is at fault. It matches what Cause
// matches: ErrCorrupt or ErrTooNew.
type ObjectError struct {
	Key   string
	Seq   uint64
	Cause error
}

// Error implements error, with what an operator can do.
func (e *ObjectError) Error() string {
	if errors.Is(e.Cause, ErrTooNew) {
		return fmt.Sprintf("objectlog: object %s (sequence %d): %v; nothing is damaged: start the newer version again", e.Key, e.Seq, e.Cause)
	}
	return fmt.Sprintf("objectlog: object %s (sequence %d): %v; acknowledged data may be damaged, so the partition is not opened: "+
		"bring the object's former version back if the bucket keeps versions, else restore the partition from a backup (keep a copy of the damaged object)", e.Key, e.Seq, e.Cause)
}

// Unwrap gives the cause.
func (e *ObjectError) Unwrap() error { return e.Cause }
