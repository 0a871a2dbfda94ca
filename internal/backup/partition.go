package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/state"
)

// overtaken says that the owner deleted what was about to be copied, or that it
// is lost.
type overtaken struct{ err error }

func (o *overtaken) Error() string { return o.err.Error() }
func (o *overtaken) Unwrap() error { return o.err }

// missing makes a lost object a reason to begin again, and a broken one an end.
func missing(err error) error {
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return &overtaken{err}
	case errors.Is(err, blob.ErrCorrupt):
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// partition is one partition in one attempt.
type partition struct {
	*copier
	id       int
	snapshot uint64           // LSN up to which the copied snapshot holds entries
	owner    cluster.Manifest // of the source, as it was when the copy of the log began; zero: never owned

	seq, lsn uint64 // of the next object and entry of the log
	epoch    uint64 // the highest in the log
	lastUs   int64  // time of the last entry
	tail     []byte // the log's last frame, cut in two; at seq-1
}

func (p *partition) prefix() string { return fmt.Sprintf("p%03d", p.id) }

// refuse looks at the owner manifests before anything is written.
func (c *copier) refuse(ctx context.Context, n int) error {
	for id := range n {
		m, err := readOwner(ctx, c.from, id)
		if err != nil {
			return err
		}
		if m.Format == 0 && m.Epoch > 0 {
			return fmt.Errorf("%w: its journal is in local files beside it: stop the server and copy the whole data directory", ErrUnfit)
		}
	}
	return nil
}

// readOwner gives a zero manifest for a partition that nobody has owned.
func readOwner(ctx context.Context, store blob.Store, id int) (cluster.Manifest, error) {
	m, err := cluster.Read(ctx, store, id)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return cluster.Manifest{}, nil
	case errors.Is(err, cluster.ErrDamaged), errors.Is(err, blob.ErrCorrupt):
		return m, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return m, err
}

// copySnapshot copies the newest snapshot, table files before the manifest.
func (p *partition) copySnapshot(ctx context.Context) error {
	prefix := p.prefix() + "/snapshot"
	ids, err := state.ListSnapshots(ctx, p.from, prefix)
	if err != nil || len(ids) == 0 {
		return err
	}
	id := ids[len(ids)-1]
	key := state.ManifestKey(prefix, id)
	o, err := p.from.Get(ctx, key)
	if err != nil {
		return missing(err)
	}
	m, err := state.DecodeManifest(o.Data, id)
	if errors.Is(err, state.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err != nil {
		return err
	}
	if err := p.copyTables(ctx, prefix, m); err != nil {
		return fmt.Errorf("snapshot %v of partition %d: %w", id, p.id, err)
	}
	p.snapshot = m.AppliedLSN
	return p.put(ctx, key, o.Data)
}

func (p *partition) copyTables(ctx context.Context, prefix string, m state.Manifest) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(copiesAtOnce)
	var keys []string
	for _, f := range m.Files {
		key := state.TableKey(prefix, f)
		if !f.IsTable() || p.tables[key] {
			continue
		}
		keys = append(keys, key)
		g.Go(func() error {
			o, err := p.from.Get(gctx, key)
			if err != nil {
				return missing(err)
			}
			if !f.Matches(o.Data) {
				return fmt.Errorf("%w: %s is not as its checksum says", ErrDamaged, key)
			}
			return p.put(gctx, key, o.Data)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, key := range keys {
		p.tables[key] = true
	}
	return nil
}

// begin reads where the log begins. It comes after the snapshot: the log holds
// whatever a snapshot from before does.
func (p *partition) begin(ctx context.Context) error {
	m, err := readOwner(ctx, p.from, p.id)
	if err != nil {
		return err
	}
	if m.Epoch > 0 && m.HeadLSN > p.snapshot+1 {
		return &overtaken{fmt.Errorf("the log of partition %d begins at entry %d, the snapshot holds those up to %d", p.id, m.HeadLSN, p.snapshot)}
	}
	p.owner, p.seq, p.lsn, p.epoch = m, m.HeadSeq, m.HeadLSN, m.Epoch
	return nil
}

// finish writes the end of the log and the manifest of an owner that was above
// all others, and has released the partition.
func (p *partition) finish(ctx context.Context) error {
	if p.owner.Epoch == 0 {
		return nil
	}
	if p.lsn <= p.snapshot {
		return fmt.Errorf("%w: the log of partition %d ends before entry %d, a snapshot holds entries up to %d", ErrDamaged, p.id, p.lsn, p.snapshot)
	}
	if p.tail != nil {
		if err := p.put(ctx, p.key(p.seq-1), p.tail); err != nil {
			return err
		}
	}
	m := p.owner
	m.Epoch, m.Node, m.Address, m.Nonce = p.epoch+1, nodeName, "", fmt.Sprintf("%016x", p.o.Rand.Uint64())
	m.Released, m.TailSeq = true, p.seq
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := p.put(ctx, cluster.OwnerKey(p.id), raw); err != nil {
		return err
	}
	p.result.Partitions = append(p.result.Partitions, Partition{ID: p.id, Epoch: m.Epoch, HeadSeq: m.HeadSeq, TailSeq: m.TailSeq, LastLSN: p.lsn - 1})
	return nil
}
