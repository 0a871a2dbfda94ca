package objectlog

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/journal"
)

// Owner is who takes a log over.
type Owner struct {
	Epoch  uint64 // above that of every former owner
	Nonce  uint64 // tells this writer from any other that may claim the epoch
	Window int    // the most frames that any epoch so far, and this one, may have in flight
}

// chain is a place in a log and the rules of what may come next. Only what the
// chain reaches from the head, through frames and seals, is in the log.
type chain struct {
	seq   uint64 // of the next object
	lsn   uint64 // of the next entry
	after uint64 // sequence behind the last frame (the start before the first); seals between it and seq were jumped over

	started      bool // epoch and nonce are known
	epoch, nonce uint64
	owned        bool // the last object was the reader's own seal
}

func chainAt(seq, lsn uint64) chain { return chain{seq: seq, lsn: lsn, after: seq} }

// next goes over the object at c.seq. The errors match ErrFenced (only with an
// owner) or ErrCorrupt; c stays as it was then.
func (c *chain) next(o *Object, owner *Owner) error {
	if o.Sealed {
		return c.jump(o.Seal, owner)
	}
	return c.step(o.Frame, owner)
}

func (c *chain) step(f journal.Frame, owner *Owner) error {
	switch {
	case owner != nil && f.Epoch >= owner.Epoch:
		return fmt.Errorf("%w: frame %d is of epoch %d, this owner's is %d", ErrFenced, f.Seq, f.Epoch, owner.Epoch)
	case f.Seq != c.seq, f.Seq+1 == 0:
		return fmt.Errorf("%w: the frame is number %d, its place is %d", ErrCorrupt, f.Seq, c.seq)
	case f.FirstLSN != c.lsn, f.FirstLSN+uint64(f.Count) < f.FirstLSN:
		return fmt.Errorf("%w: the frame's first LSN is %d, want %d", ErrCorrupt, f.FirstLSN, c.lsn)
	case c.started && (f.Epoch != c.epoch || f.Nonce != c.nonce):
		return fmt.Errorf("%w: a frame of epoch %d, and no seal since epoch %d (or another writer of the same epoch)", ErrCorrupt, f.Epoch, c.epoch)
	}
	*c = chain{seq: f.Seq + 1, lsn: f.FirstLSN + uint64(f.Count), after: f.Seq + 1, started: true, epoch: f.Epoch, nonce: f.Nonce}
	return nil
}

func (c *chain) jump(s Seal, owner *Owner) error {
	own := owner != nil && s.Epoch == owner.Epoch && s.Nonce == owner.Nonce
	switch {
	case owner != nil && s.Epoch >= owner.Epoch && !own:
		return fmt.Errorf("%w: epoch %d has taken over at %d, this owner's is %d", ErrFenced, s.Epoch, s.Seq, owner.Epoch)
	case s.Seq != c.seq:
		return fmt.Errorf("%w: the seal is number %d, its place is %d", ErrCorrupt, s.Seq, c.seq)
	case c.started && s.Epoch <= c.epoch:
		return fmt.Errorf("%w: a seal of epoch %d follows epoch %d", ErrCorrupt, s.Epoch, c.epoch)
	}
	c.seq = s.Resume
	c.started, c.epoch, c.nonce, c.owned = true, s.Epoch, s.Nonce, own
	return nil
}
