package objectlog

import (
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

// sealing is the part of a Reader that puts the seal at the first missing
// sequence.
type sealing struct {
	state    sealState
	seq      uint64 // where; the counters below are of it
	data     []byte
	attempts int
	rounds   int // refusals without an object to be found
	tries    int
	first    time.Time
	again    time.Time
}

type sealState uint8

const (
	unsealed sealState = iota
	putting
	pausing // before the next attempt
)

// beginSeal puts the seal at the place that the reading has come to.
func (r *Reader) beginSeal() {
	if plantSkipSeal {
		r.done = true
		return
	}
	if r.seal.data == nil || r.seal.seq != r.c.seq {
		o := r.o.Owner
		r.seal = sealing{seq: r.c.seq, data: AppendSeal(nil, Seal{
			Epoch: o.Epoch, Nonce: o.Nonce, Seq: r.c.seq, Resume: r.c.seq + uint64(max(o.Window, 1))})}
	}
	r.putSeal()
}

func (r *Reader) putSeal() {
	r.seal.state, r.seal.again = putting, time.Time{}
	r.seal.attempts++
	r.actions = append(r.actions, Action{Put: true, Seq: r.seal.seq, Key: Key(r.o.Prefix, r.seal.seq), Data: r.seal.data, Attempt: r.seal.attempts})
}

// PutDone tells the answer to the Put of a seal.
func (r *Reader) PutDone(now time.Time, seq uint64, err error, leased bool) {
	if r.seal.state != putting || seq != r.seal.seq || r.err != nil {
		return
	}
	r.seal.state = unsealed
	switch {
	case err == nil && !leased:
		r.fail(fmt.Errorf("%w: the seal was put too late", ErrLeaseOver))
	case err == nil:
		o, perr := ParseObject(r.seal.data)
		if perr == nil {
			perr = r.c.next(&o, r.o.Owner)
		}
		if perr != nil {
			r.fail(perr)
			return
		}
		r.index.sealed(seq)
		r.done = true
	case errors.Is(err, blob.ErrPrecondition):
		// An object has come there: a frame of the former owner, a seal of a
		// competitor, or this one by an attempt whose answer was lost.
		if r.seal.rounds++; r.seal.rounds > maxSealRounds {
			r.fail(fmt.Errorf("%w: %s was refused %d times and not found: somebody deletes there", ErrFenced, Key(r.o.Prefix, seq), r.seal.rounds))
			return
		}
		r.end = false
		r.ahead = 1
		r.advance()
	default:
		if r.again(now, &r.seal.tries, &r.seal.first, &r.seal.again, err, leased) {
			r.seal.state = pausing
		}
	}
}

func (r *Reader) tickSeal(now time.Time, leased bool) {
	if r.seal.state != pausing || now.Before(r.seal.again) {
		return
	}
	if !leased {
		r.fail(fmt.Errorf("%w before the log was sealed", ErrLeaseOver))
		return
	}
	r.putSeal()
}
