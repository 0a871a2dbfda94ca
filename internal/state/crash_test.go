package state

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// model is the same tables in plain maps.
type model struct {
	flows  map[string]*wire.Flow
	events map[string][]string
}

func (m *model) String() string {
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(m.flows)) {
		fmt.Fprintf(&b, "%s n=%d open=%v: %v\n", id, m.flows[id].NextExec, core.HasOutstanding(m.flows[id]), m.events[id])
	}
	return b.String()
}

// dump reads the tables into the form of the model, by their public face.
func dump(t testing.TB, d *DB) string {
	t.Helper()
	m := &model{map[string]*wire.Flow{}, map[string][]string{}}
	must(t, d.Flows("", "", 0, false, func(f *wire.Flow) error { m.flows[f.Id] = f; return nil }))
	for id := range m.flows {
		var evs []string
		must(t, d.Events(id, 0, 0, 0, func(e *wire.Event) error {
			evs = append(evs, fmt.Sprintf("%d.%d", e.Lsn, e.N))
			return nil
		}))
		m.events[id] = evs
	}
	return m.String()
}

// checkDerived compares index and outbox with the rows they are derived from.
func checkDerived(t testing.TB, d *DB) {
	t.Helper()
	var open []string
	must(t, d.Flows("", "", 0, false, func(f *wire.Flow) error {
		if core.HasOutstanding(f) {
			open = append(open, f.Id)
		}
		return nil
	}))
	if got := openIDs(t, d); !slices.Equal(got, open) {
		t.Fatalf("index of open flows = %v, flows say %v", got, open)
	}
	var rows int64
	must(t, d.Outbox(0, 0, 0, func(uint64, uint32, string, *wire.Event) error { rows++; return nil }))
	if got := d.OutboxLen(); got != rows {
		t.Fatalf("OutboxLen = %d, there are %d rows", got, rows)
	}
	checkIndex(t, d)
}

// script is a run of batches that can be applied again from any LSN.
type script struct {
	seed uint64
	size int // bytes of each flow
}

// batch fills b with the rows of one LSN and changes m accordingly. It draws
// from the LSN alone, so that a replay writes the same.
func (s script) batch(lsn uint64, b *Batch, m *model) {
	r := rand.New(rand.NewPCG(s.seed, lsn))
	for n := range uint32(1 + r.IntN(3)) {
		id := fmt.Sprintf("t/%s/%d", []string{"s", "f"}[r.IntN(2)], r.IntN(6))
		if m.flows[id] != nil && r.IntN(10) == 0 {
			delete(m.flows, id)
			delete(m.events, id)
			b.DeleteFlow(id)
			continue
		}
		f := flow(id, r.IntN(2) == 0, r.IntN(s.size))
		f.NextExec = lsn*10 + uint64(n)
		f.Closes, f.CreatedUs, f.Status = strings.HasPrefix(id, "t/f/"), int64(lsn/8), wire.Status(r.IntN(3))
		f.Attributes = []*wire.Attribute{{Name: "n", Index: wire.Attribute_INT, Value: fmt.Append(nil, r.IntN(3))}}
		m.flows[id] = f
		b.PutFlow(f)
		m.events[id] = append(m.events[id], fmt.Sprintf("%d.%d", lsn, n))
		b.PutEvent(id, event(lsn, n))
	}
}

func TestCrashLeavesAPrefix(t *testing.T) {
	for _, c := range []struct {
		name    string
		o       Options
		size    int
		batches uint64
	}{
		{"own flushes", Options{MemTableBytes: 64 << 10, Outbox: true}, 4 << 10, 150},
		{"batches above the memtable", Options{MemTableBytes: 64 << 10, Outbox: true}, 64 << 10, 40},
		{"manual", Options{Manual: true, Outbox: true}, 8 << 10, 150},
		{"manual with big batches", Options{Manual: true, Outbox: true}, 300 << 10, 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			seeds := uint64(4)
			if testing.Short() {
				seeds = 1
			}
			for seed := range seeds {
				crashRun(t, c.o, script{seed, c.size}, c.batches)
			}
		})
	}
}

func crashRun(t *testing.T, o Options, s script, batches uint64) {
	r := rand.New(rand.NewPCG(s.seed, 0))
	fs := vfs.NewCrashableMem()
	d := openMem(t, fs, o)
	m := &model{map[string]*wire.Flow{}, map[string][]string{}}
	at := map[uint64]string{0: ""} // by LSN
	var hash uint64
	for lsn := uint64(1); lsn <= batches; lsn++ {
		write(t, d, lsn, func(b *Batch) { s.batch(lsn, b, m) })
		at[lsn] = m.String()
		disturb(t, d, r, lsn)
		if r.IntN(8) == 0 || lsn == batches {
			flushed := d.FlushedLSN()
			clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: r.IntN(101), RNG: r})
			checkCrashed(t, clone, o, s, lsn, flushed, at)
		}
	}
	if got := dump(t, d); got != at[batches] {
		t.Fatalf("tables differ from the model without any crash:\n%s\nwant\n%s", got, at[batches])
	}
	hash, err := d.Hash()
	must(t, err)
	must(t, d.Flush())
	must(t, d.Compact(context.Background()))
	if again, err := d.Hash(); err != nil || again != hash {
		t.Fatalf("hash went from %x to %x by flush and compaction (%v)", hash, again, err)
	}
	if got := d.FlushedLSN(); got != batches {
		t.Fatalf("FlushedLSN = %d after Flush", got)
	}
	must(t, d.Close())
}

// disturb does now and then what goes on beside commits.
func disturb(t *testing.T, d *DB, r *rand.Rand, lsn uint64) {
	t.Helper()
	switch r.IntN(20) {
	case 0:
		must(t, d.Flush())
		if got := d.FlushedLSN(); got != lsn {
			t.Fatalf("FlushedLSN = %d after a flush at %d", got, lsn)
		}
	case 1:
		must(t, d.Compact(context.Background()))
	case 2, 3:
		must(t, d.TrimOutbox(lsn-uint64(r.IntN(int(min(lsn, 20)))), uint32(r.IntN(3))))
		checkDerived(t, d)
	}
}

// checkCrashed opens what a crash at lsn left and replays behind it.
func checkCrashed(t *testing.T, fs vfs.FS, o Options, s script, lsn, flushed uint64, at map[uint64]string) {
	t.Helper()
	d := openMem(t, fs, o)
	defer d.Close()
	applied := d.AppliedLSN()
	if applied < flushed || applied > lsn {
		t.Fatalf("seed %d: tables came back at LSN %d; %d was flushed, %d written", s.seed, applied, flushed, lsn)
	}
	if d.FlushedLSN() != applied {
		t.Fatalf("FlushedLSN %d of fresh tables at %d", d.FlushedLSN(), applied)
	}
	if got := dump(t, d); got != at[applied] {
		t.Fatalf("seed %d: tables at LSN %d are\n%s\nwant\n%s", s.seed, applied, got, at[applied])
	}
	checkDerived(t, d)
	m := s.upTo(applied, d)
	for l := applied + 1; l <= lsn; l++ {
		write(t, d, l, func(b *Batch) { s.batch(l, b, m) })
	}
	if got := dump(t, d); got != at[lsn] {
		t.Fatalf("seed %d: replay from %d to %d gave\n%s\nwant\n%s", s.seed, applied, lsn, got, at[lsn])
	}
	checkDerived(t, d)
}

// upTo gives the model at lsn by running the script without committing.
func (s script) upTo(lsn uint64, d *DB) *model {
	m := &model{map[string]*wire.Flow{}, map[string][]string{}}
	b := d.NewBatch()
	defer b.Close()
	for l := uint64(1); l <= lsn; l++ {
		s.batch(l, b, m)
		b.Reset()
	}
	return m
}

// TestFlushedLSNFollowsFlushesByPebble writes until Pebble flushed by itself.
func TestFlushedLSNFollowsFlushesByPebble(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{MemTableBytes: 64 << 10})
	var lsn uint64
	for d.FlushedLSN() == 0 {
		if lsn++; lsn > 10000 {
			t.Fatal("10000 batches of 4 KiB and no flush was seen")
		}
		write(t, d, lsn, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(lsn%50), false, 4<<10)) })
	}
	if got := d.FlushedLSN(); got >= lsn && d.Metrics().Flushes == 0 {
		t.Fatalf("FlushedLSN %d of %d without a flush", got, lsn)
	}
}

// TestManualFlushesWithinCommit: in manual mode no flush runs between calls.
func TestManualFlushesWithinCommit(t *testing.T) {
	fs := vfs.NewCrashableMem()
	d := openMem(t, fs, Options{Manual: true})
	var flushes int64
	for lsn := uint64(1); lsn < 400; lsn++ {
		size := 3 << 10
		if lsn%100 == 0 {
			size = 600 << 10
		}
		write(t, d, lsn, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(lsn%50), false, size)) })
		m := d.Metrics()
		if m.Flushes > flushes {
			// The flush was of whole batches before or up to this one.
			if got := d.FlushedLSN(); got != lsn && got != lsn-1 {
				t.Fatalf("flushed LSN %d after commit %d", got, lsn)
			}
		}
		flushes = m.Flushes
	}
	if flushes < 4 {
		t.Fatalf("%d flushes", flushes)
	}
	if m := d.Metrics(); m.Compactions != 0 {
		t.Errorf("%d compactions", m.Compactions)
	}
}
