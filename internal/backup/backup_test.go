package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	blobfs "github.com/perdure-dev/perdure/internal/blob/fs"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) put(key string, data []byte) {
	_, err := w.store.Put(context.Background(), key, data, blob.PutOptions{})
	must(w.t, err)
}

// world is a store with servers at work on it: they append, send messages from
// one partition to another, take snapshots, trim, and take partitions over.
type world struct {
	t     *testing.T
	r     *rand.Rand
	store *mem.Store
	nowUs int64
	parts []*owned
	sent  map[string]*message
}

const testWindow = 4

type owned struct {
	w       *world
	id      int
	m       cluster.Manifest
	seq     uint64
	truth   []string // payload of each entry, from LSN 1
	frames  []span   // at or above the head
	pending []string // proposed, not committed
	times   []int64  // of pending
	tables  *state.DB
}

type span struct{ seq, first, next uint64 }

// message is known to both of its ends.
type message struct {
	name     string
	from, to *owned
	received bool // and durable
	proposed bool // its next step
}

func newWorld(t *testing.T, seed uint64, partitions int) *world {
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 5)), store: mem.New(mem.Options{}), nowUs: 1, sent: map[string]*message{}}
	w.put("layout.json", fmt.Appendf(nil, `{"format":1,"partitions":%d}`, partitions))
	for id := range partitions {
		p := &owned{w: w, id: id, seq: 1, m: cluster.Manifest{Format: 1, Epoch: 1, Node: "n", Nonce: "00000000000000aa", Window: testWindow, HeadSeq: 1, HeadLSN: 1}}
		var err error
		p.tables, err = state.Open(fmt.Sprint("t", id), state.Options{FS: vfs.NewMem(), Manual: true})
		must(t, err)
		t.Cleanup(func() { must(t, p.tables.Close()) })
		p.manifest()
		w.parts = append(w.parts, p)
	}
	w.put("nodes/n.json", []byte("lease"))
	w.put("cluster/active.json", []byte("active"))
	w.put("types/default", []byte("types"))
	for i := range 3 {
		w.put(fmt.Sprintf("blobs/00/%d", i), fmt.Append(nil, "value ", i))
	}
	return w
}

func (p *owned) manifest() {
	raw, err := json.Marshal(p.m)
	must(p.w.t, err)
	p.w.put(cluster.OwnerKey(p.id), raw)
}

func (p *owned) key(seq uint64) string { return objectlog.Key(fmt.Sprintf("p%03d", p.id), seq) }

// step does one thing somewhere.
func (w *world) step() {
	p := w.parts[w.r.IntN(len(w.parts))]
	switch roll := w.r.IntN(600); {
	case roll == 0:
		p.snapshot()
	case roll < 4:
		p.takeOver()
	case roll < 8:
		w.put(fmt.Sprintf("blobs/00/%d", 10+w.nowUs), []byte("late value"))
	case len(p.pending) > 0:
		p.commit()
	default:
		p.propose()
	}
}

func (p *owned) propose() {
	w := p.w
	for range 1 + w.r.IntN(3) {
		text := fmt.Sprintf("send %d.%d", p.id, w.nowUs)
		for _, name := range sorted(w.sent) {
			m := w.sent[name]
			if m.proposed || w.r.IntN(2) == 0 {
				continue
			}
			if !m.received && m.to == p {
				text, m.proposed = "recv "+name, true
				break
			}
			if m.received && m.from == p {
				text, m.proposed = "done "+name, true
				break
			}
		}
		p.pending = append(p.pending, text)
		p.times = append(p.times, w.nowUs)
		w.nowUs += 1 + w.r.Int64N(3)
	}
}

func sorted(m map[string]*message) []string {
	var names []string
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func (p *owned) commit() {
	w := p.w
	first := uint64(len(p.truth) + 1)
	var body []byte
	for n, text := range p.pending {
		e := wire.Entry{Lsn: first + uint64(n), TimeUs: p.times[n], FlowId: text}
		raw, err := e.MarshalVT()
		must(w.t, err)
		body = journal.AppendEntry(body, raw)
		p.truth = append(p.truth, text)
		verb, name, _ := strings.Cut(text, " ")
		switch verb {
		case "send":
			to := w.parts[w.r.IntN(len(w.parts))]
			w.sent[name] = &message{name: name, from: p, to: to}
		case "recv":
			w.sent[name].received, w.sent[name].proposed = true, false
		case "done":
			delete(w.sent, name)
		}
		b := p.tables.NewBatch()
		b.PutFlow(&wire.Flow{Id: fmt.Sprintf("%06d %s", e.Lsn, text)})
		must(w.t, b.Commit(e.Lsn))
		b.Close()
	}
	f := journal.Frame{Epoch: p.m.Epoch, Nonce: p.m.Epoch, Seq: p.seq, FirstLSN: first, Count: uint32(len(p.pending)), Body: body}
	w.put(p.key(p.seq), journal.AppendFrame(nil, f))
	p.frames = append(p.frames, span{p.seq, first, first + uint64(f.Count)})
	p.seq++
	p.pending, p.times = nil, nil
}

func (p *owned) takeOver() {
	w := p.w
	p.pending, p.times = nil, nil
	for _, m := range w.sent {
		m.proposed = false // it is proposed again
	}
	p.m.Epoch++
	p.manifest()
	w.put(p.key(p.seq), objectlog.AppendSeal(nil, objectlog.Seal{Epoch: p.m.Epoch, Nonce: p.m.Epoch, Seq: p.seq, Resume: p.seq + testWindow}))
	w.put(p.key(p.seq+1+w.r.Uint64N(testWindow-1)), journal.AppendFrame(nil, journal.Frame{Epoch: p.m.Epoch - 1, Nonce: 1, Seq: 1, FirstLSN: 1}))
	p.seq += testWindow
}

// snapshot takes one and trims.
func (p *owned) snapshot() {
	m, err := p.tables.Snapshot(context.Background(), p.w.store, fmt.Sprintf("p%03d/snapshot", p.id), state.SnapshotOptions{Epoch: p.m.Epoch})
	must(p.w.t, err)
	keep := slices.IndexFunc(p.frames, func(s span) bool { return s.next > m.AppliedLSN+1 })
	if keep < 0 {
		keep = len(p.frames)
	}
	gone := p.frames[:keep]
	p.frames = p.frames[keep:]
	if len(gone) == 0 {
		return
	}
	last := gone[len(gone)-1]
	p.m.HeadSeq, p.m.HeadLSN = last.seq+1, last.next
	p.manifest()
	for _, s := range gone {
		must(p.w.t, p.w.store.Delete(context.Background(), p.key(s.seq), blob.DeleteOptions{}))
	}
}

// busy is the store of the world as a copy sees it: things happen at each
// request, until steps have been done.
func (w *world) busy(steps int) blob.Store {
	return blob.NewFaulty(w.store, func(blob.Op) blob.Fault {
		for range w.r.IntN(3) {
			if steps > 0 {
				steps--
				w.step()
			}
		}
		return blob.Fault{}
	}, blob.FaultHooks{})
}

// restored reads partition id of a copy: its entries, and how many of them come
// from the snapshot.
func (w *world) restored(store blob.Store, id int) []string {
	ctx := context.Background()
	m, err := cluster.Read(ctx, store, id)
	must(w.t, err)
	if !m.Released {
		w.t.Errorf("partition %d: %+v", id, m)
	}
	var all []string
	fs := vfs.NewMem()
	_, err = state.Restore(ctx, store, fmt.Sprintf("p%03d/snapshot", id), fs, "t")
	if err != nil && !errors.Is(err, state.ErrNoSnapshot) {
		w.t.Fatal(err)
	}
	d, err := state.Open("t", state.Options{FS: fs, Manual: true})
	must(w.t, err)
	defer d.Close()
	must(w.t, d.Flows("", "", 0, false, func(f *wire.Flow) error { all = append(all, f.Id[7:]); return nil }))
	if uint64(len(all)) != d.AppliedLSN() || d.AppliedLSN()+1 < m.HeadLSN {
		w.t.Fatalf("partition %d: %d rows at entry %d, the log begins at %d", id, len(all), d.AppliedLSN(), m.HeadLSN)
	}
	seq, lsn := m.HeadSeq, m.HeadLSN
	for {
		o, err := store.Get(ctx, w.parts[id].key(seq))
		if errors.Is(err, blob.ErrNotFound) {
			break
		}
		must(w.t, err)
		parsed, err := objectlog.ParseObject(o.Data)
		must(w.t, err)
		if max(parsed.Frame.Epoch, parsed.Seal.Epoch) >= m.Epoch {
			w.t.Errorf("partition %d: object %d is not below epoch %d", id, seq, m.Epoch)
		}
		if parsed.Sealed {
			seq = parsed.Seal.Resume
			continue
		}
		if parsed.Frame.Seq != seq || parsed.Frame.FirstLSN != lsn {
			w.t.Fatalf("partition %d: object %d has frame %d from %d, want %d", id, seq, parsed.Frame.Seq, parsed.Frame.FirstLSN, lsn)
		}
		for raw, err := range journal.Entries(parsed.Frame.Body) {
			must(w.t, err)
			var e wire.Entry
			must(w.t, e.UnmarshalVT(raw))
			if lsn++; e.Lsn > d.AppliedLSN() {
				all = append(all, e.FlowId)
			}
		}
		seq++
	}
	if m.TailSeq != seq || uint64(len(all)) != lsn-1 {
		w.t.Fatalf("partition %d: log ends at object %d and entry %d, manifest has %d, there are %d entries", id, seq, lsn, m.TailSeq, len(all))
	}
	return all
}

// check holds a copy against the truth. since is what was acknowledged before.
func (w *world) check(store blob.Store, since []int) {
	received, done := map[string]bool{}, []string{}
	for id, p := range w.parts {
		got := w.restored(store, id)
		if len(got) < since[id] || len(got) > len(p.truth) || !slices.Equal(got, p.truth[:len(got)]) {
			w.t.Fatalf("partition %d has %d entries of %d, %d when the copy began, or others", id, len(got), len(p.truth), since[id])
		}
		for _, text := range got {
			switch verb, name, _ := strings.Cut(text, " "); verb {
			case "recv":
				received[name] = true
			case "done":
				done = append(done, name)
			}
		}
	}
	for _, name := range done {
		if !received[name] {
			w.t.Errorf("message %s is noted as delivered and was never received", name)
		}
	}
	for _, key := range []string{"nodes/n.json", "cluster/active.json"} {
		if _, err := store.Get(context.Background(), key); !errors.Is(err, blob.ErrNotFound) {
			w.t.Errorf("%s was copied: %v", key, err)
		}
	}
	for _, key := range []string{"types/default", "blobs/00/0", "blobs/00/2", "layout.json"} {
		want, err := w.store.Get(context.Background(), key)
		must(w.t, err)
		if got, err := store.Get(context.Background(), key); err != nil || string(got.Data) != string(want.Data) {
			w.t.Errorf("%s: %q, %v", key, got.Data, err)
		}
	}
}

func (w *world) acknowledged() (since []int) {
	for _, p := range w.parts {
		since = append(since, len(p.truth))
	}
	return since
}

func options(seed uint64) Options { return Options{Rand: rand.New(rand.NewPCG(seed, 6))} }

func TestCopyOfAStoreAtWork(t *testing.T) {
	seeds := uint64(40)
	if testing.Short() {
		seeds = 8
	}
	cut, again := 0, 0
	for seed := range seeds {
		w := newWorld(t, seed, 3)
		for range w.r.IntN(300) {
			w.step()
		}
		since := w.acknowledged()
		to := mem.New(mem.Options{})
		o := options(seed)
		last := Progress{}
		o.Progress = func(p Progress) {
			if p.Objects != last.Objects+1 || p.Bytes < last.Bytes {
				t.Errorf("progress %+v after %+v", p, last)
			}
			last = p
		}
		r, err := Copy(t.Context(), w.busy(1500), to, o)
		must(t, err)
		if r.Progress != last || len(r.Partitions) != 3 {
			t.Errorf("result %+v, last progress %+v", r, last)
		}
		if r.Tries > 1 {
			again++
		}
		for id, p := range w.parts {
			if r.Partitions[id].LastLSN < uint64(len(p.truth)) {
				cut++
			}
		}
		w.check(to, since)
		// Back again, by the same way.
		back := mem.New(mem.Options{})
		_, err = Copy(t.Context(), to, back, o2(o))
		must(t, err)
		for id, p := range r.Partitions {
			if m, err := cluster.Read(t.Context(), back, id); err != nil || m.Epoch <= p.Epoch || m.TailSeq != p.TailSeq || m.HeadSeq != p.HeadSeq {
				t.Errorf("partition %d came back as %+v, %v", id, m, err)
			}
		}
	}
	if cut == 0 || again == 0 {
		t.Errorf("too tame: %d logs were cut, %d copies began again", cut, again)
	}
}

// o2 is o without its progress.
func o2(o Options) Options { return Options{Rand: o.Rand} }

func TestCopyIntoAFolder(t *testing.T) {
	w := newWorld(t, 1, 2)
	for range 200 {
		w.step()
	}
	folder, err := blobfs.Open(vfs.NewMem(), "backup")
	must(t, err)
	since := w.acknowledged()
	_, err = Copy(t.Context(), w.store, folder, options(1))
	must(t, err)
	w.check(folder, since)
}

func TestCopyRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		hurt func(w *world, to *mem.Store)
		want error
	}{
		"target in use": {func(_ *world, to *mem.Store) { _, _ = to.Put(context.Background(), "x", nil, blob.PutOptions{}) }, ErrNotEmpty},
		"no store": {func(w *world, _ *mem.Store) {
			must(w.t, w.store.Delete(context.Background(), "layout.json", blob.DeleteOptions{}))
		}, ErrUnfit},
		"layout too new":   {func(w *world, _ *mem.Store) { w.put("layout.json", []byte(`{"format":2,"partitions":2}`)) }, ErrUnfit},
		"unfinished copy":  {func(w *world, _ *mem.Store) { w.put("layout.json", []byte(`{"format":1000000,"partitions":2}`)) }, ErrUnfit},
		"layout damaged":   {func(w *world, _ *mem.Store) { w.put("layout.json", []byte(`{`)) }, ErrDamaged},
		"owner damaged":    {func(w *world, _ *mem.Store) { w.put("p000/owner.json", []byte(`{`)) }, ErrDamaged},
		"journal in files": {func(w *world, _ *mem.Store) { w.put("p001/owner.json", []byte(`{"epoch":3}`)) }, ErrUnfit},
	} {
		t.Run(name, func(t *testing.T) {
			w, to := newWorld(t, 1, 2), mem.New(mem.Options{})
			c.hurt(w, to)
			before, err := to.List(t.Context(), "", "", 10)
			must(t, err)
			if _, err := Copy(t.Context(), w.store, to, options(1)); !errors.Is(err, c.want) {
				t.Errorf("error %v", err)
			}
			if after, err := to.List(t.Context(), "", "", 10); err != nil || len(after) != len(before) {
				t.Errorf("the target has %v, %v", after, err)
			}
		})
	}
}

// TestCopyOfDamage: the copy fails, and what it left is no store.
func TestCopyOfDamage(t *testing.T) {
	for name, hurt := range map[string]func(w *world){
		"frame damaged": func(w *world) { w.put(w.parts[1].key(w.parts[1].frames[0].seq), []byte("x")) },
		"frame of another place": func(w *world) {
			o, err := w.store.Get(context.Background(), w.parts[1].key(w.parts[1].frames[0].seq))
			must(w.t, err)
			w.put(w.parts[1].key(w.parts[1].frames[1].seq), o.Data)
		},
		"table damaged": func(w *world) { w.put(w.keys("p001/snapshot/table/")[0], []byte("x")) },
		"table gone": func(w *world) {
			must(w.t, w.store.Delete(context.Background(), w.keys("p001/snapshot/table/")[0], blob.DeleteOptions{}))
		},
		"manifest damaged": func(w *world) { k := w.keys("p001/snapshot/snapshot/"); w.put(k[len(k)-1], []byte("x")) },
		"manifests gone": func(w *world) {
			for _, k := range w.keys("p001/snapshot/snapshot/") {
				must(w.t, w.store.Delete(context.Background(), k, blob.DeleteOptions{}))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, to := newWorld(t, 1, 2), mem.New(mem.Options{})
			grow := func() {
				for range 3 {
					w.parts[1].propose()
					w.parts[1].commit()
				}
			}
			grow()
			w.parts[1].snapshot()
			grow()
			hurt(w)
			if _, err := Copy(t.Context(), w.store, to, options(1)); err == nil || !strings.Contains(err.Error(), "perdure doctor store") {
				t.Errorf("error %v", err)
			}
			if _, err := Copy(t.Context(), to, mem.New(mem.Options{}), options(1)); !errors.Is(err, ErrUnfit) {
				t.Errorf("half a copy was copied: %v", err)
			}
		})
	}
}

func (w *world) keys(prefix string) (out []string) {
	infos, err := w.store.List(context.Background(), prefix, "", blob.MaxList)
	must(w.t, err)
	for _, i := range infos {
		out = append(out, i.Key)
	}
	return out
}

// TestCopyUnderFaults: it fails or it is right.
func TestCopyUnderFaults(t *testing.T) {
	good := 0
	for seed := range uint64(60) {
		w := newWorld(t, seed, 2)
		for range 100 {
			w.step()
		}
		since := w.acknowledged()
		inner := mem.New(mem.Options{})
		to := blob.NewFaulty(inner, blob.Seeded(rand.New(rand.NewPCG(seed, 7)), blob.Rates{Refused: 5, Lost: 2, AnswerLost: 10}), blob.FaultHooks{})
		from := blob.NewFaulty(w.store, blob.Seeded(rand.New(rand.NewPCG(seed, 8)), blob.Rates{Refused: 5}), blob.FaultHooks{})
		if _, err := Copy(t.Context(), from, to, options(seed)); err == nil {
			good++
			w.check(inner, since)
		}
	}
	if good < 3 || good == 60 {
		t.Errorf("%d of 60 copies succeeded", good)
	}
}
