package partition

import "github.com/perdure-dev/perdure/internal/journal"

// Journal is where a partition's frames go, and from where they come back. It is
// Near or Far, too. Methods but MaxInFlight are for one caller at a time.
type Journal interface {
	// MaxInFlight is how many frames may be on their way just now; 0 = none. Safe
	// from any goroutine.
	MaxInFlight() int
	NextSeq() uint64
	FirstLSN() uint64
	Replay(fromLSN uint64, fn func(journal.Frame) error) error
}

// Near is a journal that is written within about the time of a hand-over between
// threads: a local disk.
type Near interface {
	Journal
	// Append returns when the frame is durable, or with an error after which
	// nothing more is taken.
	Append(f journal.Frame) error
}

// Far is a journal with several frames on their way: an object store.
type Far interface {
	Journal
	// Begin sends a frame and never blocks. done is called once for each frame,
	// in the order of Begin, on a goroutine of the journal's: nil when the frame
	// is durable. After an error all later frames get one.
	Begin(f journal.Frame, done func(error))
	// OnRoom sets what is called when MaxInFlight may have grown; it must not
	// block.
	OnRoom(fn func())
}
