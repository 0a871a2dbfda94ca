package state

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/wire"
)

func openMem(t testing.TB, fs vfs.FS, o Options) *DB {
	t.Helper()
	o.FS = fs
	d, err := Open("p", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	return d
}

// flow gives a flow with one step: at work or waiting.
func flow(id string, open bool, size int) *wire.Flow {
	s := &wire.Step{Exec: 1, Spec: &wire.StepSpec{Name: "s", Input: make([]byte, size)}}
	if open {
		s.State = wire.Step_STARTED
	}
	return &wire.Flow{Id: id, Type: "test", Steps: []*wire.Step{s}}
}

func event(lsn uint64, n uint32) *wire.Event {
	return &wire.Event{Lsn: lsn, N: n, Type: "t", Data: fmt.Appendf(nil, "%d.%d", lsn, n)}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write commits one batch.
func write(t testing.TB, d *DB, lsn uint64, fill func(*Batch)) {
	t.Helper()
	b := d.NewBatch()
	defer b.Close()
	fill(b)
	must(t, b.Commit(lsn))
}

func flowIDs(t testing.TB, d *DB, prefix, after string, limit int, desc bool) []string {
	t.Helper()
	var ids []string
	must(t, d.Flows(prefix, after, limit, desc, func(f *wire.Flow) error { ids = append(ids, f.Id); return nil }))
	return ids
}

func openIDs(t testing.TB, d *DB) []string {
	t.Helper()
	var ids []string
	must(t, d.OpenFlows(func(f *wire.Flow) error { ids = append(ids, f.Id); return nil }))
	return ids
}

func collect(into *[]string) func(*wire.Event) error {
	return func(e *wire.Event) error { *into = append(*into, string(e.Data)); return nil }
}

func TestFlowsAreFoundByIDAndPrefix(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	ids := []string{"a", "a/s/1", "a/s/2", "a/s/\xff", "a/s0", "ab/s/1", "b/s/1", "\xff", "\xff\xff"}
	write(t, d, 1, func(b *Batch) {
		for _, id := range ids {
			b.PutFlow(flow(id, false, 1))
		}
	})
	slices.Sort(ids)
	backwards := slices.Clone(ids)
	slices.Reverse(backwards)
	for _, c := range []struct {
		prefix, after string
		limit         int
		desc          bool
		want          []string
	}{
		{"", "", 0, false, ids},
		{"", "", 0, true, backwards},
		{"a/s/", "", 0, false, []string{"a/s/1", "a/s/2", "a/s/\xff"}},
		{"a/s/", "", 0, true, []string{"a/s/\xff", "a/s/2", "a/s/1"}},
		{"a/s/", "a/s/1", 1, false, []string{"a/s/2"}},
		{"a/s/", "a/s/2", 5, true, []string{"a/s/1"}},
		{"a/s/", "a", 0, false, []string{"a/s/1", "a/s/2", "a/s/\xff"}},
		{"a/s/", "b", 0, false, nil},
		{"a/s/", "b", 1, true, []string{"a/s/\xff"}},
		{"a/s/", "a", 0, true, nil},
		{"\xff", "", 0, false, []string{"\xff", "\xff\xff"}},
		{"\xff", "\xff", 0, false, []string{"\xff\xff"}},
		{"c", "", 0, false, nil},
	} {
		if got := flowIDs(t, d, c.prefix, c.after, c.limit, c.desc); !slices.Equal(got, c.want) {
			t.Errorf("Flows(%q, %q, %d, %v) = %q, want %q", c.prefix, c.after, c.limit, c.desc, got, c.want)
		}
	}
	for _, id := range ids {
		if f, err := d.Flow(id); err != nil || f.GetId() != id {
			t.Errorf("Flow(%q) = %v, %v", id, f, err)
		}
	}
	if f, err := d.Flow("none"); f != nil || err != nil {
		t.Errorf("Flow of none = %v, %v", f, err)
	}
}

func TestEventsPageInBothDirections(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	write(t, d, 300, func(b *Batch) {
		for _, id := range []string{"f", "f\x01", "ff", "e"} {
			for _, p := range []pos{{1, 0}, {1, 1}, {2, 0}, {255, 0}, {256, 7}} {
				b.PutEvent(id, event(p.lsn, p.n))
			}
		}
	})
	all := []string{"1.0", "1.1", "2.0", "255.0", "256.7"}
	for _, c := range []struct {
		lsn   uint64
		n     uint32
		limit int
		want  []string
	}{
		{0, 0, 0, all}, {0, 0, 2, all[:2]}, {1, 0, 0, all[1:]}, {1, 1, 0, all[2:]}, {1, ^uint32(0), 0, all[2:]},
		{100, 0, 1, all[3:4]}, {256, 7, 0, nil}, {^uint64(0), ^uint32(0), 0, nil},
	} {
		var got []string
		must(t, d.Events("f", c.lsn, c.n, c.limit, collect(&got)))
		if !slices.Equal(got, c.want) {
			t.Errorf("Events(%d, %d, %d) = %v, want %v", c.lsn, c.n, c.limit, got, c.want)
		}
	}
	back := slices.Clone(all)
	slices.Reverse(back)
	for _, c := range []struct {
		lsn   uint64
		n     uint32
		limit int
		want  []string
	}{
		{0, 0, 0, back}, {0, 0, 2, back[:2]}, {256, 7, 0, back[1:]}, {1, 1, 0, back[4:]}, {1, 0, 0, nil},
	} {
		var got []string
		must(t, d.EventsBefore("f", c.lsn, c.n, c.limit, collect(&got)))
		if !slices.Equal(got, c.want) {
			t.Errorf("EventsBefore(%d, %d, %d) = %v, want %v", c.lsn, c.n, c.limit, got, c.want)
		}
	}
	stop := errors.New("stop")
	if err := d.Events("f", 0, 0, 0, func(*wire.Event) error { return stop }); err != stop {
		t.Errorf("error of the callback came back as %v", err)
	}
}

func TestOpenFlowsFollowsEveryChange(t *testing.T) {
	fs := vfs.NewMem()
	d := openMem(t, fs, Options{})
	write(t, d, 1, func(b *Batch) {
		b.PutFlow(flow("a", true, 1))
		b.PutFlow(flow("b", true, 1))
		b.PutFlow(flow("c", false, 1))
		b.PutFlow(flow("d", true, 1))
		b.PutFlow(flow("d", false, 1))
	})
	if got := openIDs(t, d); !slices.Equal(got, []string{"a", "b"}) {
		t.Fatalf("open = %v", got)
	}
	write(t, d, 2, func(b *Batch) {
		b.PutFlow(flow("a", false, 1))
		b.DeleteFlow("b")
		b.PutFlow(flow("c", true, 1))
	})
	if got := openIDs(t, d); !slices.Equal(got, []string{"c"}) {
		t.Fatalf("open = %v", got)
	}
	// A spoiled batch leaves neither rows nor a false memory of the index.
	b := d.NewBatch()
	b.PutFlow(flow("a", true, 1))
	b.PutFlow(flow("bad\x00", true, 1))
	if err := b.Commit(3); err == nil {
		t.Fatal("NUL in a flow ID was taken")
	}
	b.PutFlow(flow("c", false, 1))
	if err := b.Commit(1); err == nil {
		t.Fatal("the LSN went back")
	}
	b.Close()
	write(t, d, 3, func(b *Batch) { b.PutFlow(flow("a", true, 1)) })
	if got := openIDs(t, d); !slices.Equal(got, []string{"a", "c"}) {
		t.Fatalf("open = %v", got)
	}
	must(t, d.Flush())
	must(t, d.Close())
	d = openMem(t, fs, Options{})
	write(t, d, 4, func(b *Batch) { b.PutFlow(flow("c", false, 1)) })
	if got := openIDs(t, d); !slices.Equal(got, []string{"a"}) {
		t.Fatalf("open after reopening = %v", got)
	}
}

func TestDeleteFlowTakesItsEventsAndNoOthers(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	write(t, d, 1, func(b *Batch) {
		for _, id := range []string{"f", "f\x01", "ff"} {
			b.PutFlow(flow(id, true, 1))
			b.PutEvent(id, event(1, 0))
		}
	})
	write(t, d, 2, func(b *Batch) {
		b.PutEvent("f", event(2, 0))
		b.DeleteFlow("f")
	})
	count := func(id string) (n int) {
		must(t, d.Events(id, 0, 0, 0, func(*wire.Event) error { n++; return nil }))
		return n
	}
	if f, _ := d.Flow("f"); f != nil || count("f") != 0 {
		t.Errorf("flow %v with %d events is left", f, count("f"))
	}
	if count("f\x01") != 1 || count("ff") != 1 {
		t.Error("events of other flows went with it")
	}
	// The same ID can be used again, in the same batch even.
	write(t, d, 3, func(b *Batch) {
		b.DeleteFlow("f")
		b.PutFlow(flow("f", false, 1))
		b.PutEvent("f", event(3, 0))
	})
	if f, _ := d.Flow("f"); f == nil || count("f") != 1 {
		t.Errorf("new flow %v has %d events", f, count("f"))
	}
}

func TestRowsAreEncodedWhenPut(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	f, e := flow("f", false, 1), event(1, 0)
	write(t, d, 1, func(b *Batch) {
		b.PutFlow(f)
		b.PutEvent("f", e)
		f.Type, e.Type = "later", "later"
	})
	got, err := d.Flow("f")
	must(t, err)
	if got.Type != "test" {
		t.Errorf("flow has what was changed after PutFlow: %q", got.Type)
	}
	must(t, d.Events("f", 0, 0, 0, func(e *wire.Event) error {
		if e.Type != "t" {
			t.Errorf("event has what was changed after PutEvent: %q", e.Type)
		}
		return nil
	}))
}

func TestCommitRefusesWhatIsNoStepForward(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	write(t, d, 5, func(b *Batch) { b.PutFlow(flow("f", false, 1)) })
	for name, c := range map[string]struct {
		lsn  uint64
		fill func(*Batch)
		want string
	}{
		"LSN goes back":       {4, func(b *Batch) { b.PutFlow(flow("x", true, 1)) }, "at 5 already"},
		"event applied twice": {6, func(b *Batch) { b.PutEvent("x", event(5, 0)) }, "events of LSN 5"},
		"event of the future": {6, func(b *Batch) { b.PutEvent("x", event(7, 0)) }, "events of LSN 7"},
		"no flow ID":          {6, func(b *Batch) { b.PutFlow(&wire.Flow{}) }, "0 bytes"},
		"long flow ID":        {6, func(b *Batch) { b.DeleteFlow(strings.Repeat("x", 513)) }, "513 bytes"},
		"NUL in a flow ID":    {6, func(b *Batch) { b.PutEvent("a\x00b", event(6, 0)) }, "NUL"},
		"no meta key":         {6, func(b *Batch) { b.PutMeta("", nil) }, "key of 0 bytes"},
		"big meta value":      {6, func(b *Batch) { b.PutMeta("k", make([]byte, MaxMetaValue+1)) }, "value of 1048577"},
	} {
		b := d.NewBatch()
		c.fill(b)
		if err := b.Commit(c.lsn); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
		b.Close()
		if got := d.AppliedLSN(); got != 5 {
			t.Fatalf("%s: applied LSN is %d", name, got)
		}
	}
	if f, _ := d.Flow("x"); f != nil {
		t.Error("a refused batch left a row")
	}
}

func TestMetaRows(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	before, err := d.Hash()
	must(t, err)
	write(t, d, 1, func(b *Batch) { b.PutMeta("k", []byte("v")); b.PutMeta("empty", []byte{}) })
	if v, err := d.Meta("k"); err != nil || string(v) != "v" {
		t.Errorf("Meta = %q, %v", v, err)
	}
	if v, err := d.Meta("empty"); err != nil || v == nil {
		t.Errorf("empty Meta = %v, %v", v, err)
	}
	write(t, d, 2, func(b *Batch) { b.PutMeta("k", nil) })
	if v, err := d.Meta("k"); err != nil || v != nil {
		t.Errorf("deleted Meta = %q, %v", v, err)
	}
	if after, _ := d.Hash(); after != before {
		t.Error("meta rows are in the hash")
	}
}

func TestClosedDBAnswers(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	write(t, d, 1, func(b *Batch) { b.PutFlow(flow("f", false, 1)) })
	b := d.NewBatch()
	b.PutFlow(flow("g", false, 1))
	must(t, d.Close())
	if err := b.Commit(2); !errors.Is(err, ErrClosed) {
		t.Errorf("Commit: %v", err)
	}
	if _, err := d.Flow("f"); !errors.Is(err, ErrClosed) {
		t.Errorf("Flow: %v", err)
	}
	if err := d.Flush(); !errors.Is(err, ErrClosed) {
		t.Errorf("Flush: %v", err)
	}
	if err := d.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("Close: %v", err)
	}
	d.FlushedLSN()
	d.Metrics()
}
