package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/state"
)

// checkRestore makes the partition from what the store holds now and nothing else: it
// is what the history says, and what its owner has if that is at rest.
func (p *part) checkRestore() {
	w, j := p.n.w, p.judge()
	again, err := j.restored(p)
	if err != nil {
		w.violate("restore", "", "partition %d: %v", p.id, err)
		return
	}
	w.fault("restore-checked")
	w.tell("", "partition %d: restored from the store alone up to entry %d, hash %016x", p.id, p.hist.last(), again)
	if !p.quiet() || p.m.Err() != nil || !w.bucket.owned(p.n) || p.n.disk.fired() != nil {
		return
	}
	live, err := p.tables.Hash()
	if err != nil {
		w.violate("tables", "", "partition %d: hash: %v", p.id, err)
	}
	if again != live {
		w.violate("restore", "", "partition %d at entry %d: the hash of what the store holds is %016x, the owner's tables have %016x", p.id, p.hist.last(), again, live)
	}
}

// restored gives the hash of tables that come from the store, as it is at this
// moment.
func (j *judge) restored(p *part) (hash uint64, err error) {
	w, ctx, d := j.w, context.Background(), newDisk()
	if err := d.MkdirAll(fmt.Sprintf("%s/p%03d", dataDir, j.id), 0o750); err != nil {
		return 0, err
	}
	_, err = state.Restore(ctx, j.b.inner, snapshotPrefix(j.id), d, tablesDir(j.id))
	if err != nil && !errors.Is(err, state.ErrNoSnapshot) {
		return 0, err
	}
	q := &part{n: &node{w: w, m: p.n.m, disk: d}, id: j.id}
	if q.tables, err = state.Open(tablesDir(j.id), stateOptions(d, nil)); err != nil {
		return 0, err
	}
	defer q.tables.Close() // read and forgotten
	f := partition.Follow(q.config(silence{}))
	head, lsn := max(j.manifest.HeadSeq, 1), max(j.manifest.HeadLSN, 1)
	if err := j.readAll(head, lsn, f); err != nil {
		return 0, err
	}
	if at := q.tables.AppliedLSN(); at != j.history().last() {
		return 0, fmt.Errorf("it ends at entry %d, the history has %d", at, j.history().last())
	}
	if diff := j.history().fold.differs(q.tables); diff != "" {
		return 0, errors.New(diff)
	}
	return q.tables.Hash()
}

// readAll reads the log at once, from its head to its end.
func (j *judge) readAll(seq, lsn uint64, f *partition.Follower) error {
	r := objectlog.NewReader(objectlog.ReaderOptions{Prefix: j.prefix, HeadSeq: seq, HeadLSN: lsn, GiveUp: -1})
	for {
		for _, a := range r.Actions() {
			got := j.b.do(storeCall{kind: blob.KindGet, key: a.Key})
			tell(r, a, got, time.Time{}, true)
		}
		switch d, ok := r.Next(); {
		case ok:
			if err := f.Apply(d.Frame); err != nil {
				return err
			}
		case r.Err() != nil || r.Done():
			return r.Err()
		}
	}
}
