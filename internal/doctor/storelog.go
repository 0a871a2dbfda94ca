package doctor

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
)

// readsAtOnce bounds the requests of one page of a list. A frame has at most
// journal.MaxFrameSize bytes, most have few.
const readsAtOnce = 8

// logObject is what matters of an object of the log once it was read.
type logObject struct {
	seq    uint64 // by its key
	bytes  int
	err    error // it cannot be read, or is not what its place in the log wants
	sealed bool
	seal   objectlog.Seal
	frame  journal.Frame // without its body
}

// logCheck follows one log in the order of its keys.
type logCheck struct {
	p      *partitionCheck
	window uint64

	seq, lsn     uint64 // of the next object and entry
	lsnKnown     bool
	epochKnown   bool
	epoch, nonce uint64

	left int64 // objects that are not part of the log, as crashes and take-overs leave them
	// ahead is the objects behind the first missing one, by rising seq, fewer
	// than the window: batches in flight, or a sign that one is lost.
	ahead []logObject
}

// log reads the log from its head to its end.
func (p *partitionCheck) log(ctx context.Context) error {
	l := &logCheck{p: p, seq: p.owner.HeadSeq, lsn: p.owner.HeadLSN, lsnKnown: true, window: uint64(max(p.owner.Window, 1))}
	var page []uint64
	flush := func() error {
		objects, err := p.readLog(ctx, page)
		page = page[:0]
		for _, o := range objects {
			if err == nil {
				err = l.feed(ctx, o)
			}
		}
		return err
	}
	err := p.walk(ctx, objectlog.KeyPrefix(p.prefix), func(i blob.Info) (string, error) {
		p.add(i)
		seq, ok := objectlog.ParseKey(p.prefix, i.Key)
		switch {
		case !ok:
			p.find(Warning, i.Key, "is nothing that perdure has written, by its key; %d bytes", i.Size)
			return "", nil
		case seq < p.owner.HeadSeq:
			if i.Size >= journal.MinFrameSize { // else it is a seal, which stays
				l.left++
			}
			return "", nil
		}
		if page = append(page, seq); len(page) < blob.MaxList {
			return "", nil
		}
		return "", flush()
	})
	if err == nil {
		err = flush()
	}
	if err != nil {
		return err
	}
	return l.end(ctx)
}

// readLog reads objects, a few at once, and gives them in order. What was
// deleted meanwhile is left out.
func (p *partitionCheck) readLog(ctx context.Context, seqs []uint64) ([]logObject, error) {
	all := make([]logObject, len(seqs))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(readsAtOnce)
	for n, seq := range seqs {
		g.Go(func() error {
			o, err := p.store.Get(gctx, objectlog.Key(p.prefix, seq))
			if err != nil && !isGone(err) {
				return err
			}
			all[n] = parseLog(seq, o.Data, err)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	there := all[:0]
	for _, o := range all {
		if !errors.Is(o.err, blob.ErrNotFound) {
			p.count(o.bytes)
			there = append(there, o)
		}
	}
	return there, nil
}

func parseLog(seq uint64, data []byte, err error) logObject {
	o := logObject{seq: seq, bytes: len(data), err: err}
	if err != nil {
		return o
	}
	parsed, err := objectlog.ParseObject(data)
	o.sealed, o.seal, o.frame, o.err = parsed.Sealed, parsed.Seal, parsed.Frame, err
	n := uint32(0)
	for _, err := range journal.Entries(o.frame.Body) {
		if n++; err != nil && o.err == nil {
			o.err = err
		}
	}
	o.frame.Body = nil
	at := o.frame.Seq
	if o.sealed {
		at = o.seal.Seq
	}
	switch {
	case o.err != nil:
	case at != seq:
		o.err = fmt.Errorf("%w: it is number %d", journal.ErrCorrupt, at)
	case n != o.frame.Count:
		o.err = fmt.Errorf("%w: it has %d entries, and says %d", journal.ErrCorrupt, n, o.frame.Count)
	}
	return o
}

// feed takes the next object in the order of keys.
func (l *logCheck) feed(ctx context.Context, o logObject) error {
	l.ahead = append(l.ahead, o)
	l.drain()
	for len(l.ahead) > 0 && o.seq-l.seq >= l.window {
		if err := l.missing(ctx); err != nil {
			return err
		}
		l.drain()
	}
	return nil
}

// drain takes what has its turn.
func (l *logCheck) drain() {
	for len(l.ahead) > 0 && l.ahead[0].seq <= l.seq {
		o := l.ahead[0]
		l.ahead = l.ahead[1:]
		if o.seq < l.seq {
			l.left++ // between a seal and its resume
		} else {
			l.take(o)
		}
	}
}

// missing is called when the object at l.seq is not there, and one is that no
// writer could have written before that was: it is lost, or the list is old.
func (l *logCheck) missing(ctx context.Context) error {
	if more, err := l.more(ctx); err != nil || more {
		return err // the log has grown since the list
	}
	now, err := cluster.Read(ctx, l.p.store, l.p.ID)
	switch w := uint64(max(now.Window, 1)); {
	case err != nil:
		return err
	case l.trimmed(now):
	case w > l.window:
		l.window = w
	default:
		next := l.ahead[0].seq
		l.p.find(Damage, objectlog.Key(l.p.prefix, l.seq), "objects %d to %d of the log are missing, and later ones are there: acknowledged entries are lost", l.seq, next-1)
		l.skipTo(next)
	}
	return nil
}

// trimmed goes on at the head if that has moved beyond l.seq since the list.
func (l *logCheck) trimmed(now cluster.Manifest) bool {
	if now.HeadSeq <= l.seq {
		return false
	}
	l.seq, l.lsn, l.lsnKnown, l.epochKnown = now.HeadSeq, now.HeadLSN, true, false
	return true
}

// more takes the object at l.seq if it is there by now.
func (l *logCheck) more(ctx context.Context) (bool, error) {
	o, err := l.p.readLog(ctx, []uint64{l.seq})
	if err != nil || len(o) == 0 {
		return false, err
	}
	l.take(o[0])
	return true, nil
}

// take goes over the object at l.seq.
func (l *logCheck) take(o logObject) {
	key := objectlog.Key(l.p.prefix, o.seq)
	switch {
	case errors.Is(o.err, journal.ErrTooNew):
		l.p.find(Warning, key, "%v", o.err)
		l.skipTo(o.seq + 1)
	case o.err != nil:
		l.p.find(Damage, key, "cannot be read: %v", o.err)
		l.skipTo(o.seq + 1)
	case o.sealed:
		l.jump(key, o.seal)
	default:
		l.step(key, o.frame)
	}
}

// skipTo goes on at seq without knowing what is before it.
func (l *logCheck) skipTo(seq uint64) { l.seq, l.lsnKnown, l.epochKnown = seq, false, false }

func (l *logCheck) jump(key string, s objectlog.Seal) {
	if l.epochKnown && s.Epoch <= l.epoch {
		l.p.find(Damage, key, "a seal of epoch %d follows epoch %d", s.Epoch, l.epoch)
	}
	l.p.Seals++
	l.seq, l.epoch, l.nonce, l.epochKnown = s.Resume, s.Epoch, s.Nonce, true
}

func (l *logCheck) step(key string, f journal.Frame) {
	if l.epochKnown && (f.Epoch != l.epoch || f.Nonce != l.nonce) {
		l.p.find(Damage, key, "a frame of epoch %d, and no seal since epoch %d (or another writer of the same epoch)", f.Epoch, l.epoch)
	}
	if l.lsnKnown && f.FirstLSN != l.lsn {
		l.p.find(Damage, key, "its first entry is %d, the one before it ended at %d", f.FirstLSN, l.lsn-1)
	}
	l.p.Frames++
	l.p.Entries += int64(f.Count)
	l.epoch, l.nonce, l.epochKnown = f.Epoch, f.Nonce, true
	l.seq, l.lsn, l.lsnKnown = f.Seq+1, f.FirstLSN+uint64(f.Count), true
}

// readOn takes what has come since the list where that ended, and goes on at the
// head if the end was trimmed; it gives the manifest after that.
func (l *logCheck) readOn(ctx context.Context) (now cluster.Manifest, err error) {
	for moved := false; ; moved = true {
		// Are those ahead behind a missing one still? Each round takes one at least.
		for more := true; more && (len(l.ahead) > 0 || moved); {
			if more, err = l.more(ctx); err != nil {
				return now, err
			}
			l.drain()
		}
		if now, err = cluster.Read(ctx, l.p.store, l.p.ID); err != nil || !l.trimmed(now) {
			return now, err
		}
		l.drain()
	}
}

// end compares the end of the log with the owner manifest as it is now.
func (l *logCheck) end(ctx context.Context) error {
	p := l.p
	now, err := l.readOn(ctx)
	if err != nil {
		return err
	}
	p.tailKnown = l.lsnKnown
	p.TailSeq, p.TailLSN, p.Left = l.seq, l.lsn, l.left+int64(len(l.ahead))
	if l.left > 0 {
		p.find(Harmless, objectlog.KeyPrefix(p.prefix), "%s of former owners, or that a trim did not get to", count(int(l.left), "object"))
	}
	if ahead := len(l.ahead); ahead > 0 {
		p.find(Harmless, objectlog.KeyPrefix(p.prefix), "%s behind the end of the log, within the window: batches that were never acknowledged", count(ahead, "object"))
	}
	if l.epochKnown && l.epoch > now.Epoch {
		p.find(Damage, cluster.OwnerKey(p.ID), "has epoch %d, the log has epoch %d: an older manifest was put back", now.Epoch, l.epoch)
	}
	// An owner that released and was not followed says where its log ends.
	if now.Released && now.Epoch == p.owner.Epoch && now.TailSeq != l.seq {
		s := Warning
		if now.TailSeq > l.seq {
			s = Damage
		}
		p.find(s, cluster.OwnerKey(p.ID), "the owner released the partition at sequence %d, the log ends at %d", now.TailSeq, l.seq)
	}
	return nil
}
