package search

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

type testClock struct {
	env.SystemClock
	us atomic.Int64
}

func (c *testClock) Now() time.Time { return time.UnixMicro(c.us.Load()) }

// nobody is executor and observer of partitions whose flows have no steps.
type nobody struct{ partition.Slotless }

func (nobody) Dispatch(*partition.Work)                          {}
func (nobody) Commit(*partition.Work)                            {}
func (nobody) Cancel(string, uint64, core.Attempt, string, bool) {}
func (nobody) Abort()                                            {}
func (nobody) Publish(string, []*wire.Event)                     {}

type world struct {
	t     *testing.T
	clock *testClock
	set   partition.Set
	s     *Searcher
}

func newWorld(t *testing.T, partitions int) *world {
	w := &world{t: t, clock: &testClock{}}
	w.clock.us.Store(time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC).UnixMicro())
	for id := range partitions {
		e := env.Real()
		e.FS, e.Clock = vfs.NewMem(), w.clock
		db, err := state.Open("tables", state.Options{FS: e.FS, Manual: true})
		w.must(err)
		log, err := journal.Open(e.FS, "journal", journal.Options{Rand: e.Rand})
		w.must(err)
		m, _, err := partition.Open(partition.Config{ID: id, Epoch: 1, Env: e, Tables: db, Log: log, Executor: nobody{}, Observer: nobody{}})
		w.must(err)
		r := partition.Start(m, func(err error) { t.Errorf("partition lost: %v", err) })
		w.set = append(w.set, r)
		t.Cleanup(func() {
			r.Stop()
			_ = log.Close()
			_ = db.Close()
		})
	}
	w.s = New(w.set, w.clock)
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) call(e *wire.Entry) {
	w.t.Helper()
	_, err := w.set.For(e.FlowId).Call(w.t.Context(), e)
	w.must(err)
}

func (w *world) start(tenant, id string, attrs ...*wire.Attribute) {
	w.t.Helper()
	w.call(&wire.Entry{FlowId: tenant + "/f/" + id, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{
		Type: "order", Closes: true, Attributes: attrs,
	}}})
}

func (w *world) search(r *wire.SearchRequest) *wire.SearchReply {
	w.t.Helper()
	reply, err := w.s.Search(w.t.Context(), "acme", r)
	w.must(err)
	return reply
}

// pages gives the IDs of all pages.
func (w *world) pages(text string, limit uint32) (ids []string, pages int) {
	w.t.Helper()
	r := &wire.SearchRequest{Query: text, Limit: limit}
	for {
		reply := w.search(r)
		for _, f := range reply.Flows {
			ids = append(ids, f.FlowId)
		}
		if pages++; reply.Next == "" {
			return ids, pages
		}
		r.Page = reply.Next
	}
}

func keyword(name, value string) *wire.Attribute {
	return &wire.Attribute{Name: name, Index: wire.Attribute_KEYWORD, Value: fmt.Appendf(nil, "%q", value)}
}

func TestNewestFirstOverAllPartitions(t *testing.T) {
	w := newWorld(t, 3)
	var want []string
	for i := range 50 {
		id := fmt.Sprintf("o/%02d", i)
		w.start("acme", id, keyword("customer", fmt.Sprint("c", i%5)), &wire.Attribute{Name: "hidden", Value: []byte(`1`)})
		w.start("other", id, keyword("customer", "c1"))
		want = append(want, id)
		w.clock.us.Add(int64(1 + i%2))
	}
	slices.Reverse(want)
	for _, limit := range []uint32{0, 1, 7, 50, 1000} {
		got, pages := w.pages("", limit)
		if !slices.Equal(got, want) || limit == 7 && pages != 8 {
			t.Errorf("limit %d: %q in %d pages", limit, got, pages)
		}
	}
	got, _ := w.pages(`customer = "c3" and created >= -1h`, 4)
	if slices.Sort(got); !slices.Equal(got, []string{"o/03", "o/08", "o/13", "o/18", "o/23", "o/28", "o/33", "o/38", "o/43", "o/48"}) {
		t.Errorf("found %q", got)
	}
	if n := w.search(&wire.SearchRequest{Query: `customer = "c3" and id ^= "o/0"`, Count: true}); n.Count != 2 || len(n.Flows) > 0 {
		t.Errorf("counted %v", n)
	}
	f := w.search(&wire.SearchRequest{Limit: 1}).Flows[0]
	if f.FlowId != "o/49" || f.FlowType != "order" || f.RunId == "" || f.CreatedUs == 0 || f.Status != wire.Status_RUNNING || len(f.Attributes) != 1 {
		t.Errorf("shows %v", f)
	}
}

func TestWhatWasAnsweredIsFound(t *testing.T) {
	w := newWorld(t, 2)
	for i := range 200 {
		id := fmt.Sprint(i)
		w.start("acme", id)
		if got, _ := w.pages(`id = "`+id+`"`, 1); !slices.Equal(got, []string{id}) {
			t.Fatalf("started %s, found %q", id, got)
		}
		w.call(&wire.Entry{FlowId: "acme/f/" + id, Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{
			Attributes: []*wire.Attribute{keyword("k", "v")},
		}}})
		if n := w.search(&wire.SearchRequest{Query: `k = "v" and status = running`, Count: true}).Count; n != uint64(i+1)/2+1 {
			t.Fatalf("%d flows have the attribute after %d", n, i+1)
		}
		how := wire.StopFlow_TERMINATE
		if i%2 == 1 {
			w.call(&wire.Entry{FlowId: "acme/f/" + id, Command: &wire.Entry_StopFlow{StopFlow: &wire.StopFlow{How: how}}})
		}
		if n := w.search(&wire.SearchRequest{Query: `status = terminated and exists(closed)`, Count: true}).Count; n != uint64(i+1)/2 {
			t.Fatalf("%d flows are terminated after %d", n, i+1)
		}
	}
	w.call(&wire.Entry{FlowId: "acme/f/7", Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{}}})
	if got, _ := w.pages(`id = "7" or k = "w"`, 0); len(got) > 0 {
		t.Errorf("found %q", got)
	}
}

// A page that begins before a new flow was started does not show it, nor any
// flow twice, and relative times stay as on the first page.
func TestPagesAreStable(t *testing.T) {
	w := newWorld(t, 2)
	for i := range 20 {
		w.start("acme", fmt.Sprint("old", i))
		w.clock.us.Add(1)
	}
	r := &wire.SearchRequest{Query: "created > -1m", Limit: 5}
	seen := map[string]bool{}
	for {
		reply := w.search(r)
		for _, f := range reply.Flows {
			if seen[f.FlowId] || strings.HasPrefix(f.FlowId, "new") {
				t.Errorf("%s is on a later page", f.FlowId)
			}
			seen[f.FlowId] = true
		}
		if r.Page = reply.Next; r.Page == "" {
			break
		}
		w.clock.us.Add(time.Hour.Microseconds())
		w.start("acme", fmt.Sprint("new", len(seen)))
	}
	if len(seen) != 20 {
		t.Errorf("%d flows", len(seen))
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 3 {
		w.start("acme", fmt.Sprint(i))
	}
	next := w.search(&wire.SearchRequest{Query: `type = "order"`, Limit: 1}).Next
	for _, c := range []struct {
		r    *wire.SearchRequest
		want string
	}{
		{&wire.SearchRequest{Query: "type ="}, "query, position 6: expected a value, got the end"},
		{&wire.SearchRequest{Limit: 1001}, "invalid: limit is 1001, at most 1000: ask for further pages"},
		{&wire.SearchRequest{Page: "x!"}, "invalid: page is not one that a search gave: pass on next of the page before"},
		{&wire.SearchRequest{Page: next}, "invalid: page is of another query: ask the same query for all pages"},
		{&wire.SearchRequest{Page: next[:20], Query: `type = "order"`}, "invalid: page is not one that a search gave: pass on next of the page before"},
	} {
		_, err := w.s.Search(t.Context(), "acme", c.r)
		var badQuery *query.Error
		var refused *core.Error
		if err == nil || err.Error() != c.want || !errors.As(err, &badQuery) && !errors.As(err, &refused) {
			t.Errorf("%v: %v", c.r, err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	for range maxRunning {
		w.s.slots <- struct{}{}
	}
	if _, err := w.s.Search(ctx, "acme", &wire.SearchRequest{}); err != gone {
		t.Errorf("waits for others: %v", err)
	}
}

// A partition that stops looking early ends the page there.
func TestMergeEndsWhereNobodyLooked(t *testing.T) {
	hit := func(us int64, id string) state.Hit {
		return state.Hit{ID: id, Flow: &wire.Flow{CreatedUs: us}}
	}
	place := func(us int64, id string) state.Place { return state.Place{CreatedUs: us, ID: id} }
	found := []state.Found{
		{Hits: []state.Hit{hit(9, "a"), hit(5, "b")}},
		{Hits: []state.Hit{hit(8, "c")}, More: true, Next: place(6, "x")},
		{More: true, Next: place(4, "y")},
	}
	for _, c := range []struct {
		limit int
		ids   string
		next  state.Place
		more  bool
	}{{10, "ac", place(6, "x"), true}, {1, "a", place(8, "c"), true}} {
		hits, next, more := merge(found, c.limit)
		ids := ""
		for _, h := range hits {
			ids += h.ID
		}
		if ids != c.ids || next != c.next || more != c.more {
			t.Errorf("limit %d: %s, %v %v", c.limit, ids, next, more)
		}
	}
}

func FuzzPage(f *testing.F) {
	f.Add("AQAAAAA", "")
	f.Fuzz(func(t *testing.T, token, text string) {
		p, err := decodePage(token, text)
		if err != nil || token == "" {
			return
		}
		again, err := decodePage(p.encode(text), text)
		if err != nil || !again.now.Equal(p.now) || again.from != p.from {
			t.Fatalf("%v became %v, %v", p, again, err)
		}
	})
}
