package state

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/wire"
)

var searchNow = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func parse(t testing.TB, text string) *query.Query {
	t.Helper()
	q, err := query.Parse(text, searchNow)
	must(t, err)
	return q
}

// world is flows as they should be found.
type world struct {
	d     *DB
	flows map[string]*wire.Flow // by whole ID
	lsn   uint64
	r     *rand.Rand
}

func anyOf[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

var texts = []string{`""`, `"a"`, `"ab"`, `"b"`, `"a\u0000"`, `"a\u0000b"`, `"` + strings.Repeat("a", 300) + `"`, `"` + strings.Repeat("a", 256) + `b"`, `"2026-12-01T12:00:00Z"`}

// change makes random flows and updates of them, in one batch.
func (w *world) change(t testing.TB) {
	t.Helper()
	w.lsn++
	write(t, w.d, w.lsn, func(b *Batch) {
		for range 1 + w.r.IntN(6) {
			id := anyOf(w.r, "acme/f/", "acme/f/", "acme/f/", "acm/f/", "acme/s/", "acme/x/") + anyOf(w.r, "a", "ab", "b/", "b/c", "ü") + fmt.Sprint(w.r.IntN(8))
			if w.r.IntN(8) == 0 {
				delete(w.flows, id)
				b.DeleteFlow(id)
				continue
			}
			f := w.flows[id]
			if f == nil && w.r.IntN(2) == 0 {
				b.Fresh(id)
			}
			if f == nil || w.r.IntN(6) == 0 {
				f = &wire.Flow{Id: id, Type: anyOf(w.r, "order", "orde", "user"), CreatedUs: searchNow.UnixMicro() - int64(w.r.IntN(5)), Closes: w.r.IntN(8) > 0}
			}
			f = f.CloneVT()
			w.update(f)
			w.flows[id] = f
			b.PutFlow(f)
		}
	})
}

func (w *world) update(f *wire.Flow) {
	f.UpdatedUs = searchNow.UnixMicro()
	switch w.r.IntN(5) {
	case 0:
		f.Status, f.ClosedUs = wire.Status(1+w.r.IntN(5)), searchNow.UnixMicro()+int64(w.r.IntN(3))
	case 1:
		f.Attributes = nil
		for _, name := range []string{"n\x00", "s", "x"} {
			a := &wire.Attribute{Name: name, Index: wire.Attribute_Index(w.r.IntN(6)), Lsn: w.lsn}
			switch w.r.IntN(5) {
			case 0:
				a.Value = []byte(anyOf(w.r, texts...))
			case 1:
				a.Value = []byte("[" + anyOf(w.r, texts...) + "," + anyOf(w.r, texts...) + "," + anyOf(w.r, texts...) + "]")
			case 2:
				a.Value = []byte(anyOf(w.r, "1", "-1.5", "9007199254740993", "9007199254740992", "-0.0", "0", "true", "false", "null", "1e300"))
			case 3:
				a.Value = []byte(`"` + strings.Repeat("a", 2000) + `"`) // large: not seen
			case 4:
				continue
			}
			f.Attributes = append(f.Attributes, a)
		}
	}
}

// want is what a search should find, by brute force.
func (w *world) want(tenant string, q *query.Query) (ids []string) {
	var hits []Hit
	for id, f := range w.flows {
		ten, user, ok := userFlow(id)
		if !ok || ten != tenant || !f.Closes {
			continue
		}
		row := f.CloneVT()
		for _, a := range row.Attributes {
			if isLarge(a) {
				a.Value = nil
			}
		}
		if q.Match(user, row) {
			hits = append(hits, Hit{user, row})
		}
	}
	slices.SortFunc(hits, func(a, b Hit) int {
		return cmp.Or(cmp.Compare(b.Flow.CreatedUs, a.Flow.CreatedUs), cmp.Compare(a.ID, b.ID))
	})
	for _, h := range hits {
		ids = append(ids, h.ID)
	}
	return ids
}

func search(t testing.TB, d *DB, tenant string, q *query.Query, limit int) (ids []string) {
	t.Helper()
	var from Place
	for {
		found, err := d.Search(tenant, q, from, limit)
		must(t, err)
		for i := range found.Hits {
			if p := found.Hits[i].Place(); p.Before(from) {
				t.Fatalf("%q: %v is before the page's %v", q, p, from)
			}
			ids = append(ids, found.Hits[i].ID)
		}
		if !found.More {
			return ids
		}
		if !from.Before(found.Next) {
			t.Fatalf("%q: page at %v goes on at %v", q, from, found.Next)
		}
		from = found.Next
	}
}

func (w *world) query() string {
	one := func() string {
		order := anyOf(w.r, "=", "!=", "<", "<=", ">", ">=")
		name := anyOf(w.r, "s", "x")
		switch w.r.IntN(9) {
		case 0:
			return "status in (running, " + anyOf(w.r, "failed", "completed") + ")"
		case 1:
			return "status = " + anyOf(w.r, "running", "failed")
		case 2:
			return "type " + anyOf(w.r, order, "^=") + ` "` + anyOf(w.r, "order", "ord", "user") + `"`
		case 3:
			return anyOf(w.r, "created", "closed") + " " + order + ` "2026-12-01T` + anyOf(w.r, "11:59:59.999997", "12:00:00", "12:00:00.0000015") + `Z"`
		case 4:
			return "id " + anyOf(w.r, "=", "^=", ">") + ` "` + anyOf(w.r, "a1", "a", "b/c", "b") + `"`
		case 5:
			return "exists(" + name + ")"
		case 6:
			return name + " in (" + anyOf(w.r, texts...) + "," + anyOf(w.r, "1", "true", "9007199254740993") + ")"
		case 7:
			return name + " " + anyOf(w.r, order, "^=") + " " + anyOf(w.r, texts...)
		}
		return name + " " + order + " " + anyOf(w.r, "1", "-2", "0", "9007199254740992", "true", "now", "+1s")
	}
	s := one()
	for depth := 0; depth < 9 && w.r.IntN(3) > 0; depth++ {
		s = anyOf(w.r, "not (", "(") + s + ") " + anyOf(w.r, "and", "and", "or") + " " + one()
	}
	return anyOf(w.r, "", s, s, s, s)
}

func (w *world) check(t testing.TB) {
	t.Helper()
	for range 12 {
		text := w.query()
		q := parse(t, text)
		for _, tenant := range []string{"acme", "acm", "nobody"} {
			want := w.want(tenant, q)
			if got := search(t, w.d, tenant, q, 1+w.r.IntN(9)); !slices.Equal(got, want) {
				t.Fatalf("%s of %s: found %q, want %q", text, tenant, got, want)
			}
			n, err := w.d.Count(tenant, q, Place{})
			must(t, err)
			if n.More || n.Count != uint64(len(want)) {
				t.Fatalf("%s of %s: counted %d of %d", text, tenant, n.Count, len(want))
			}
		}
	}
}

// indexRows gives all rows of the index.
func indexRows(t testing.TB, d *DB) (rows []string) {
	t.Helper()
	must(t, d.scan([]byte{tableIndex, 0}, []byte{tableIndex + 1}, 0, false, func(key, _ []byte) error {
		rows = append(rows, string(key))
		return nil
	}))
	return rows
}

// checkIndex compares the rows of the index with the flows.
func checkIndex(t testing.TB, d *DB) {
	t.Helper()
	b := d.NewBatch()
	defer b.Close()
	must(t, d.Flows("", "", 0, false, func(f *wire.Flow) error {
		if list := appendEntries(nil, f); len(list) > 0 {
			tenant, id, _ := userFlow(f.Id)
			b.diffIndex(tenant, id, nil, list)
		}
		return b.err
	}))
	var want []string
	for r := b.b.Reader(); ; {
		_, key, _, ok, err := r.Next()
		must(t, err)
		if !ok {
			break
		}
		want = append(want, string(key))
	}
	slices.Sort(want)
	if got := indexRows(t, d); !slices.Equal(got, want) {
		t.Fatalf("index has %d rows, flows say %d:\n%q\n%q", len(got), len(want), got, want)
	}
}

func TestSearchIsBruteForce(t *testing.T) {
	seeds := uint64(6)
	if testing.Short() {
		seeds = 2
	}
	for seed := range seeds {
		fs := vfs.NewMem()
		w := &world{d: openMem(t, fs, Options{Manual: seed%2 == 0}), flows: map[string]*wire.Flow{}, r: rand.New(rand.NewPCG(seed, 1))}
		for range 25 {
			for range 10 {
				w.change(t)
			}
			switch w.r.IntN(6) {
			case 0:
				must(t, w.d.Flush())
				must(t, w.d.Close())
				w.d = openMem(t, fs, Options{})
			case 1:
				clear(w.d.indexed)
			case 2:
				must(t, w.d.Flush())
				_, err := w.d.Shrink()
				must(t, err)
			}
			w.check(t)
			checkIndex(t, w.d)
		}
		must(t, w.d.Close())
	}
}

func TestIndexOfFlowsIsRestoredAndBuilt(t *testing.T) {
	w := &world{d: openMem(t, vfs.NewMem(), Options{}), flows: map[string]*wire.Flow{}, r: rand.New(rand.NewPCG(7, 1))}
	for range 200 {
		w.change(t)
	}
	hash, err := w.d.Hash()
	must(t, err)
	store := mem.New(mem.Options{})
	_, err = w.d.Snapshot(t.Context(), store, "p", SnapshotOptions{Epoch: 1})
	must(t, err)
	fs := vfs.NewMem()
	_, err = Restore(t.Context(), store, "p", fs, "p")
	must(t, err)
	w.d = openMem(t, fs, Options{})
	w.check(t)
	checkIndex(t, w.d)
	rows := indexRows(t, w.d)

	// Tables of before the index, and those with a broken index of another version.
	for _, spoil := range []func(b *pebble.Batch) error{
		func(b *pebble.Batch) error { return b.DeleteRange([]byte{tableIndex}, []byte{tableIndex + 1}, nil) },
		func(b *pebble.Batch) error {
			_ = b.Set([]byte("iacme\x00\x01garbage"), nil, nil)
			return b.Set([]byte{tableIndex}, []byte{indexVersion + 1}, nil)
		},
		func(b *pebble.Batch) error { return b.Delete([]byte{tableIndex}, nil) },
	} {
		b := w.d.NewBatch()
		must(t, spoil(&b.b))
		must(t, b.applyIndex())
		b.Close()
		must(t, w.d.Flush())
		must(t, w.d.Close())
		var said []string
		w.d = openMem(t, fs, Options{Log: func(_ Level, m string) { said = append(said, m) }})
		if got := indexRows(t, w.d); !slices.Equal(got, rows) {
			t.Errorf("built %d rows, want %d", len(got), len(rows))
		}
		if !slices.ContainsFunc(said, func(m string) bool { return strings.Contains(m, "search index was built") }) {
			t.Errorf("log: %q", said)
		}
		w.check(t)
	}
	if again, _ := w.d.Hash(); again != hash {
		t.Error("the index counts in the hash")
	}
}

// FuzzIndexValues: the order of values is the order of their rows, as far as
// rows tell them apart, and each row says where its value ends.
func FuzzIndexValues(f *testing.F) {
	f.Add("a", "a\x00", int64(1), 1.5, 2.5, "x")
	f.Add("a\x00b", "a\x00\xff", int64(1<<53+1), math.Copysign(0, -1), 1e300, "")
	f.Fuzz(func(t *testing.T, a, b string, i int64, x, y float64, id string) {
		values := []query.Value{
			{Kind: query.Text, Text: a}, {Kind: query.Text, Text: b},
			{Kind: query.Number, Int: i}, {Kind: query.Bool, Int: i & 1}, {Kind: query.Bool},
			{Kind: query.Instant, At: time.Unix(i%(1<<40), i&0x3fffffff)}, {Kind: query.Instant, At: searchNow},
		}
		for _, f := range []float64{x, y} {
			if !math.IsNaN(f) && !math.IsInf(f, 0) {
				values = append(values, query.Value{Kind: query.Number, Float: f, IsFloat: true})
			}
		}
		place := appendPlace(nil, Place{i, id})
		if got := decodePlace(place); got != (Place{i, id}) {
			t.Fatalf("place %v became %v", Place{i, id}, got)
		}
		for _, v := range values {
			kv := append(appendValue(nil, v, false), place...)
			if n, ok := valueEnd(kv[1:], v.Kind); !ok || n != len(kv)-1-len(place) {
				t.Fatalf("%v ends at %d of %x", v, n, kv)
			}
			for _, w := range values {
				if v.Kind != w.Kind {
					continue
				}
				c, rows := query.Compare(v, w), bytes.Compare(appendValue(nil, v, false), appendValue(nil, w, false))
				if c != rows && rows != 0 || c == 0 && rows != 0 {
					t.Fatalf("%v and %v: order %d, rows %d", v, w, c, rows)
				}
				if p := appendValue(nil, w, true); v.Kind == query.Text && strings.HasPrefix(v.Text, w.Text) && !bytes.HasPrefix(kv, p) {
					t.Fatalf("%q begins with %q, its row %x not with %x", v.Text, w.Text, kv, p)
				}
			}
		}
	})
}

// Updates that change nothing indexed write no row and read none.
func TestIndexCostsNothingWhenNothingChanges(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	f := &wire.Flow{Id: "acme/f/1", Closes: true, Type: "order", CreatedUs: 5, Attributes: []*wire.Attribute{
		{Name: "tags", Index: wire.Attribute_KEYWORD, Value: []byte(`["a","b"]`)}, {Name: "n", Index: wire.Attribute_INT, Value: []byte(`5`)},
	}}
	write(t, d, 1, func(b *Batch) { b.PutFlow(f) })
	b := d.NewBatch()
	defer b.Close()
	f.UpdatedUs, f.StepsDone = 7, 3
	b.PutFlow(f)
	before := b.b.Count()
	b.writeMarks()
	if b.b.Count() != before {
		t.Errorf("%d rows more", b.b.Count()-before)
	}
	b.Reset()
	if n := testing.AllocsPerRun(100, func() {
		b.Reset()
		b.marks = append(b.marks[:0], mark{id: f.Id})
		b.entries = appendEntries(b.entries, f)
		b.marks[0].to = len(b.entries)
		b.writeIndex(&b.marks[0])
	}); n > 20 { // of the array's JSON; none without
		t.Errorf("%v allocations", n)
	}
}

// Work is bounded, and the pages of a search that finds nothing end.
func TestSearchWorkIsBounded(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	const flows = searchWork/readWork + 2000
	for lsn := uint64(1); lsn <= flows/1000; lsn++ {
		write(t, d, lsn, func(b *Batch) {
			for i := range 1000 {
				n := int(lsn)*1000 + i
				b.PutFlow(&wire.Flow{Id: fmt.Sprintf("t/f/%d", n), Closes: true, Type: "x", CreatedUs: int64(n), Status: wire.Status(n % 2), Attributes: []*wire.Attribute{
					{Name: "n", Index: wire.Attribute_INT, Value: fmt.Append(nil, n)},
				}})
			}
		})
	}
	for _, c := range []struct {
		text  string
		pages int
		count uint64
	}{
		{`error ~ "x"`, 2, 0},
		{`n = 1500`, 1, 1},
		{`n >= 1500 and n < 2000`, 1, 500},
		{`n >= 0 and status = failed`, 1, 0},
		{`type = "x" and n ^= "a"`, 1, 0},
		{`type = "x" and status = running`, 1, flows / 2},
		{`type = "x" and not n = 5`, 2, flows},
		{``, 1, flows},
	} {
		var from Place
		var n uint64
		for page := 1; ; page++ {
			found, err := d.Count("t", parse(t, c.text), from)
			must(t, err)
			n += found.Count
			if from = found.Next; !found.More {
				if n != c.count || page != c.pages {
					t.Errorf("%s: %d in %d pages, want %d in %d", c.text, n, page, c.count, c.pages)
				}
				break
			}
		}
	}
}

func BenchmarkSearch(b *testing.B) {
	d := openMem(b, vfs.NewMem(), Options{})
	const flows = 200_000
	for lsn := uint64(1); lsn <= flows/1000; lsn++ {
		write(b, d, lsn, func(w *Batch) {
			for i := range 1000 {
				n := int(lsn)*1000 + i
				status := wire.Status_COMPLETED
				if n%1000 == 7 {
					status = wire.Status_RUNNING
				}
				w.PutFlow(&wire.Flow{Id: fmt.Sprintf("t/f/%d", n), Closes: true, Type: []string{"order", "user"}[n%2], CreatedUs: int64(n), Status: status,
					Attributes: []*wire.Attribute{{Name: "customer", Index: wire.Attribute_KEYWORD, Value: fmt.Appendf(nil, `"c%d"`, n%20000)}, {Name: "n", Index: wire.Attribute_INT, Value: fmt.Append(nil, n)}}})
			}
		})
	}
	for _, text := range []string{``, `status = running`, `type = "user" and status = running`, `type = "user" and status = completed`, `customer = "c17"`,
		`customer = "c17" and n > 5`, `n >= 50000 and n < 50100`, `n > 100000`, `id = "77777"`} {
		b.Run(text, func(b *testing.B) {
			q := parse(b, text)
			for b.Loop() {
				if _, err := d.Search("t", q, Place{}, 100); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPutFlowIndexed(b *testing.B) {
	for _, closes := range []bool{false, true} {
		b.Run(fmt.Sprintf("closes=%v", closes), func(b *testing.B) {
			d := openMem(b, vfs.NewMem(), Options{})
			f := &wire.Flow{Id: "acme/f/1", Closes: closes, Type: "order", CreatedUs: 5, Attributes: []*wire.Attribute{
				{Name: "customer", Index: wire.Attribute_KEYWORD, Value: []byte(`"acme"`)},
			}}
			batch := d.NewBatch()
			defer batch.Close()
			b.ReportAllocs()
			lsn := uint64(0)
			for b.Loop() {
				lsn++
				batch.PutFlow(f)
				must(b, batch.Commit(lsn))
			}
		})
	}
}

func BenchmarkNewFlowIndexed(b *testing.B) {
	for _, closes := range []bool{false, true} {
		b.Run(fmt.Sprintf("closes=%v", closes), func(b *testing.B) {
			d := openMem(b, vfs.NewMem(), Options{})
			batch := d.NewBatch()
			defer batch.Close()
			lsn := uint64(0)
			for b.Loop() {
				lsn++
				f := &wire.Flow{Id: fmt.Sprintf("acme/f/%d", lsn), Closes: closes, Type: "order", CreatedUs: int64(lsn)}
				batch.Fresh(f.Id)
				batch.PutFlow(f)
				must(b, batch.Commit(lsn))
				f.Status, f.ClosedUs = wire.Status_COMPLETED, int64(lsn)
				lsn++
				batch.PutFlow(f)
				must(b, batch.Commit(lsn))
			}
		})
	}
}
