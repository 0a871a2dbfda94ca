package sim

import (
	"bytes"
	"context"
	"fmt"

	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/state"
)

// judge sees what becomes of one partition's objects, at the moment when it becomes.
// What can be reached from the first object on, over frames and seals, without a
// gap, is the partition's history: nothing may be acknowledged that is not in it,
// and nothing changes it any more.
type judge struct {
	w       *world
	b       *bucket
	id      int
	prefix  string
	objects map[uint64][]byte // every object of the log that ever was
	next    uint64            // where the history goes on
	epoch   uint64            // of the newest seal
	nonce   uint64

	manifest cluster.Manifest
	writers  map[uint64]*part // by nonce
}

func newJudge(w *world, b *bucket, id int) *judge {
	return &judge{w: w, b: b, id: id, prefix: fmt.Sprintf("p%03d", id), objects: map[uint64][]byte{}, next: 1, writers: map[uint64]*part{}}
}

// violate tells of a broken rule of the store's format, before it has done harm.
func (j *judge) violate(rule, format string, args ...any) {
	if j.w.harmOnly {
		return
	}
	j.w.violate(rule, "", "partition %d: %s", j.id, fmt.Sprintf(format, args...))
}

// put: an object was written, or written anew.
func (j *judge) put(key string, data []byte) {
	if key == cluster.OwnerKey(j.id) {
		j.owner(key, data)
		return
	}
	seq, ok := objectlog.ParseKey(j.prefix, key)
	if !ok {
		return
	}
	if before, ok := j.objects[seq]; ok && !bytes.Equal(before, data) {
		j.violate("once", "%s holds another content than it did before it was deleted", key)
	}
	j.objects[seq] = bytes.Clone(data)
	for j.w.broken == nil {
		data, ok := j.objects[j.next]
		if !ok {
			return
		}
		o, err := objectlog.ParseObject(data)
		switch {
		case err != nil:
			j.w.violate("objects", "", "partition %d: object %d: %v", j.id, j.next, err)
		case o.Sealed:
			j.seal(o.Seal)
		default:
			j.frame(o.Frame)
		}
	}
}

func (j *judge) seal(s objectlog.Seal) {
	if s.Seq != j.next || s.Epoch <= j.epoch || s.Epoch > j.manifest.Epoch {
		j.violate("seal", "the seal at %d says %d, of epoch %d after epoch %d, the manifest is of %d", j.next, s.Seq, s.Epoch, j.epoch, j.manifest.Epoch)
	}
	j.w.tell("", "partition %d: epoch %d has sealed at %d, goes on at %d, after entry %d", j.id, s.Epoch, s.Seq, s.Resume, j.history().last())
	j.epoch, j.nonce, j.next = s.Epoch, s.Nonce, s.Resume
	j.w.tally.takeovers++
	if p := j.writers[s.Nonce]; p == nil || p.epoch != s.Epoch {
		j.violate("seal", "nobody is epoch %d", s.Epoch)
	}
}

func (j *judge) frame(f journal.Frame) {
	if f.Epoch != j.epoch || f.Nonce != j.nonce || f.Seq != j.next {
		j.violate("seal", "frame %d of epoch %d is at %d, of epoch %d by the last seal", f.Seq, f.Epoch, j.next, j.epoch)
	}
	j.next++
	h := j.history()
	if j.w.harmOnly && f.FirstLSN != h.last()+1 {
		return
	}
	h.learn(f)
	p := j.writers[f.Nonce]
	if p == nil {
		j.w.violate("journal", "", "partition %d: nobody wrote frame %d", j.id, f.Seq)
		return
	}
	p.durable = h.last()
	j.w.tell("journal", "partition %d: entries %d to %d of epoch %d are in the store", j.id, f.FirstLSN, p.durable, f.Epoch)
}

func (j *judge) history() *history { return j.w.hist[j.id] }

// acknowledged: the log has told that a frame is durable and its writer the owner.
func (j *judge) acknowledged(f journal.Frame) {
	h, lsn := j.history(), f.FirstLSN
	for raw, err := range journal.Entries(f.Body) {
		if err != nil || lsn > h.last() || !bytes.Equal(raw, h.entries[lsn-1]) {
			j.violate("acknowledged", "entry %d of epoch %d is acknowledged and is not what the store holds (%d entries, %v)", lsn, f.Epoch, h.last(), err)
			return
		}
		lsn++
	}
}

// owner checks a new owner manifest.
func (j *judge) owner(key string, data []byte) {
	m, err := cluster.DecodeManifest(key, data)
	was := j.manifest
	switch {
	case err != nil:
		j.violate("manifest", "%v", err)
	case m.Nonce != was.Nonce && m.Epoch != was.Epoch+1:
		j.violate("epochs", "epoch %d of node %s begins after epoch %d of node %s", m.Epoch, m.Node, was.Epoch, was.Node)
	case m.Nonce == was.Nonce && m.Epoch != was.Epoch:
		j.violate("epochs", "epoch %d calls itself %d", was.Epoch, m.Epoch)
	case m.Window < was.Window || m.HeadSeq < was.HeadSeq || m.HeadLSN < was.HeadLSN || m.HeadSeq > j.next:
		j.violate("manifest", "%+v after %+v, the log ends at %d", m, was, j.next)
	}
	j.manifest = m
	if m.HeadLSN > was.HeadLSN && m.HeadLSN > 1 {
		j.w.tell("", "partition %d: the log begins at entry %d, object %d", j.id, m.HeadLSN, m.HeadSeq)
		j.covered(m.HeadLSN)
	}
}

// covered: what the log gives up is in a snapshot.
func (j *judge) covered(head uint64) {
	ctx := context.Background()
	ids, err := state.ListSnapshots(ctx, j.b.inner, snapshotPrefix(j.id))
	for _, id := range ids {
		key := state.ManifestKey(snapshotPrefix(j.id), id)
		obj, gerr := j.b.inner.Get(ctx, key)
		if gerr != nil {
			continue
		}
		if m, derr := state.DecodeManifest(obj.Data, id); derr == nil && m.AppliedLSN+1 >= head {
			return
		}
	}
	j.violate("trim", "the log begins at entry %d, and no snapshot has all before it (%v)", head, err)
}

// deleted: an object is gone.
func (j *judge) deleted(key string) {
	seq, ok := objectlog.ParseKey(j.prefix, key)
	if !ok {
		if key == cluster.OwnerKey(j.id) {
			j.violate("manifest", "it was deleted")
		}
		return
	}
	o, err := objectlog.ParseObject(j.objects[seq])
	switch {
	case seq >= j.manifest.HeadSeq:
		j.violate("trim", "object %d was deleted, the log begins at %d", seq, j.manifest.HeadSeq)
	case err == nil && o.Sealed:
		j.violate("trim", "the seal at %d was deleted: it keeps late writes of epochs before %d out", seq, o.Seal.Epoch)
	}
}
