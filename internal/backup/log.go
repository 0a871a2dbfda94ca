package backup

import (
	"context"
	"errors"
	"fmt"
	"math"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/wire"
)

// noCut takes entries of all times.
const noCut = math.MaxInt64

func (p *partition) key(seq uint64) string { return objectlog.Key(p.prefix(), seq) }

// copyLog goes on with the copy of the log, up to the first object that is
// missing or the first entry that is later than cutUs. Called again with a
// lower cut, it goes on where it was.
func (p *partition) copyLog(ctx context.Context, cutUs int64) error {
	if p.owner.Epoch == 0 {
		return nil
	}
	for {
		objects, err := p.read(ctx)
		if err != nil {
			return fmt.Errorf("log of partition %d: %w", p.id, err)
		}
		n, end, err := p.take(objects, cutUs)
		if err == nil {
			err = p.write(ctx, objects[:n])
		}
		if err != nil {
			return fmt.Errorf("log of partition %d: %w", p.id, err)
		}
		switch {
		case end:
			return nil
		case n == 0:
			return p.atEnd(ctx)
		}
	}
}

// object is an object of the log, as it is in the source.
type object struct {
	seq  uint64
	data []byte // nil: there is none
}

// read asks for the next few objects at once.
func (p *partition) read(ctx context.Context) ([]object, error) {
	objects := make([]object, framesAtOnce)
	g, gctx := errgroup.WithContext(ctx)
	for n := range objects {
		seq := p.seq + uint64(n)
		objects[n].seq = seq
		g.Go(func() error {
			o, err := p.from.Get(gctx, p.key(seq))
			switch {
			case errors.Is(err, blob.ErrNotFound):
				return nil
			case errors.Is(err, blob.ErrCorrupt):
				return fmt.Errorf("%w: %w", ErrDamaged, err)
			}
			objects[n].data = o.Data
			return err
		})
	}
	return objects, g.Wait()
}

// take goes over objects in order and says how many of them are to be written as
// they are. end: the log is cut here.
func (p *partition) take(objects []object, cutUs int64) (n int, end bool, err error) {
	for _, o := range objects {
		if o.data == nil || o.seq != p.seq { // missing, or passed over by a seal
			return n, false, nil
		}
		parsed, err := objectlog.ParseObject(o.data)
		switch {
		case errors.Is(err, journal.ErrTooNew):
			return n, false, err
		case err != nil:
			return n, false, fmt.Errorf("%w: object %d: %w", ErrDamaged, o.seq, err)
		case parsed.Sealed:
			if parsed.Seal.Seq != o.seq {
				return n, false, fmt.Errorf("%w: object %d holds the seal of %d", ErrDamaged, o.seq, parsed.Seal.Seq)
			}
			p.seq, p.epoch = parsed.Seal.Resume, max(p.epoch, parsed.Seal.Epoch)
			n++
			continue
		}
		whole, err := p.takeFrame(o.seq, parsed.Frame, cutUs)
		if err != nil || !whole {
			return n, true, err
		}
		n++
	}
	return n, false, nil
}

// takeFrame goes over a frame. It reports false when not all of it is before the
// cut; what is, waits in p.tail.
func (p *partition) takeFrame(seq uint64, f journal.Frame, cutUs int64) (bool, error) {
	if f.Seq != seq || f.FirstLSN != p.lsn {
		return false, fmt.Errorf("%w: object %d holds frame %d with entries from %d, want those from %d", ErrDamaged, seq, f.Seq, f.FirstLSN, p.lsn)
	}
	n := uint32(0)
	for raw, err := range journal.Entries(f.Body) {
		if err != nil {
			return false, fmt.Errorf("%w: object %d: %w", ErrDamaged, seq, err)
		}
		var e wire.Entry
		if err := e.UnmarshalVT(raw); err != nil {
			return false, fmt.Errorf("%w: object %d, entry %d: %w", ErrDamaged, seq, f.FirstLSN+uint64(n), err)
		}
		if e.TimeUs > cutUs {
			if n > 0 {
				f.Count, f.Body = n, firstEntries(f.Body, n)
				p.tail = journal.AppendFrame(nil, f)
				p.forward(f)
			}
			return false, nil
		}
		p.lastUs = max(p.lastUs, e.TimeUs)
		n++
	}
	if n != f.Count {
		return false, fmt.Errorf("%w: object %d has %d entries and says %d", ErrDamaged, seq, n, f.Count)
	}
	p.forward(f)
	return true, nil
}

// firstEntries is a body of the first n entries of a body that has more.
func firstEntries(body []byte, n uint32) (part []byte) {
	for raw, err := range journal.Entries(body) {
		if n == 0 || err != nil {
			break
		}
		n--
		part = journal.AppendEntry(part, raw)
	}
	return part
}

func (p *partition) forward(f journal.Frame) {
	p.seq, p.lsn, p.epoch = f.Seq+1, f.FirstLSN+uint64(f.Count), max(p.epoch, f.Epoch)
}

func (p *partition) write(ctx context.Context, objects []object) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, o := range objects {
		g.Go(func() error { return p.put(gctx, p.key(o.seq), o.data) })
	}
	return g.Wait()
}

// atEnd tells the end of the log, where an object is missing, from one that was
// trimmed.
func (p *partition) atEnd(ctx context.Context) error {
	now, err := cluster.Read(ctx, p.from, p.id)
	if err != nil {
		return fmt.Errorf("partition %d: %w", p.id, err)
	}
	if now.HeadSeq > p.seq {
		return &overtaken{fmt.Errorf("partition %d was trimmed up to object %d, the copy was at %d", p.id, now.HeadSeq, p.seq)}
	}
	p.owner.Window = max(p.owner.Window, now.Window)
	p.epoch = max(p.epoch, now.Epoch)
	return nil
}
