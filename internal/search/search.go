// Package search finds flows across the partitions of this process by the
// query language of package query, the newest first.
//
// A search sees everything that was answered before it began: it passes by the
// goroutine of each partition before it reads its tables. Beside that it takes
// nothing from them: it reads tables, as of one moment in each partition, and
// does a bounded amount of work for a page.
package search

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of searches.
const (
	DefaultLimit = 100
	MaxLimit     = 1000
	// maxRunning is how many searches read tables at once; others wait.
	maxRunning = 4
)

// Part is a partition; *partition.Runner is one.
type Part interface {
	Do(ctx context.Context, fn func(*partition.Machine)) error
	Tables() *state.DB
}

// Searcher answers searches. Safe for concurrent use.
type Searcher struct {
	parts []Part
	clock env.Clock
	slots chan struct{}
}

// New makes a Searcher over all partitions of a set.
func New(set partition.Set, clock env.Clock) *Searcher {
	parts := make([]Part, len(set))
	for i, r := range set {
		parts[i] = r
	}
	return Over(parts, clock)
}

// Over makes a Searcher over some partitions.
func Over(parts []Part, clock env.Clock) *Searcher {
	return &Searcher{parts: parts, clock: clock, slots: make(chan struct{}, maxRunning)}
}

// Search gives one page of a tenant's flows. A page may have fewer flows than
// its limit, even none, while Next says that there is more. Times relative to
// now are as of the first page. Errors are a *query.Error, a *core.Error with
// code invalid, the end of ctx, or of the tables. It blocks: about 100 ms a
// partition at most for a page; a count goes on to its end, or that of ctx.
func (s *Searcher) Search(ctx context.Context, tenant string, r *wire.SearchRequest) (*wire.SearchReply, error) {
	at, err := decodePage(r.Page, r.Query)
	if err != nil {
		return nil, err
	}
	if r.Page == "" {
		at.now = s.clock.Now()
	}
	limit := int(r.Limit)
	switch {
	case limit == 0:
		limit = DefaultLimit
	case limit > MaxLimit:
		return nil, &core.Error{Code: core.Invalid, Message: fmt.Sprintf("limit is %d, at most %d: ask for further pages", limit, MaxLimit)}
	}
	q, err := query.Parse(r.Query, at.now)
	if err != nil {
		return nil, err
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if r.Count {
		n, err := s.count(ctx, tenant, q)
		return &wire.SearchReply{Count: n}, err
	}
	return s.page(ctx, tenant, q, at, r.Query, limit)
}

// page merges what the partitions find.
func (s *Searcher) page(ctx context.Context, tenant string, q *query.Query, at page, text string, limit int) (*wire.SearchReply, error) {
	found := make([]state.Found, len(s.parts))
	err := s.each(func(i int, p Part) (err error) {
		if err = p.Do(ctx, func(*partition.Machine) {}); err == nil {
			found[i], err = p.Tables().Search(tenant, q, at.from, limit)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	hits, next, more := merge(found, limit)
	reply := &wire.SearchReply{Count: uint64(len(hits))}
	for i := range hits {
		reply.Flows = append(reply.Flows, info(&hits[i]))
	}
	if more {
		at.from = next
		reply.Next = at.encode(text)
	}
	return reply, nil
}

// merge gives the first hits of all partitions, up to where the first of them
// stopped looking.
func merge(found []state.Found, limit int) (hits []state.Hit, next state.Place, more bool) {
	for _, f := range found {
		hits = append(hits, f.Hits...)
		if f.More && (!more || f.Next.Before(next)) {
			next, more = f.Next, true
		}
	}
	slices.SortFunc(hits, func(a, b state.Hit) int {
		if a.Place().Before(b.Place()) {
			return -1
		}
		return 1 // no two are in one place
	})
	if more {
		end, _ := slices.BinarySearchFunc(hits, next, func(h state.Hit, p state.Place) int {
			if h.Place().Before(p) {
				return -1
			}
			return 1
		})
		hits = hits[:end]
	}
	if len(hits) > limit {
		next, more = hits[limit].Place(), true
		hits = hits[:limit]
	}
	return hits, next, more
}

// count counts in one partition after the other.
func (s *Searcher) count(ctx context.Context, tenant string, q *query.Query) (n uint64, err error) {
	for _, p := range s.parts {
		if err := p.Do(ctx, func(*partition.Machine) {}); err != nil {
			return 0, err
		}
		for from, more := (state.Place{}), true; more; {
			f, err := p.Tables().Count(tenant, q, from)
			if err != nil {
				return 0, err
			}
			if ctx.Err() != nil {
				return 0, context.Cause(ctx)
			}
			n += f.Count
			from, more = f.Next, f.More
		}
	}
	return n, nil
}

// each runs fn for all partitions at the same time and gives the first error.
func (s *Searcher) each(fn func(int, Part) error) error {
	if len(s.parts) == 1 {
		return fn(0, s.parts[0])
	}
	errs := make([]error, len(s.parts))
	var wg sync.WaitGroup
	for i, p := range s.parts {
		wg.Go(func() { errs[i] = fn(i, p) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// info is what a search shows of a flow.
func info(h *state.Hit) *wire.FlowInfo {
	f := h.Flow
	out := &wire.FlowInfo{
		FlowId: h.ID, FlowType: f.Type, RunId: f.RunId, Status: f.Status,
		CreatedUs: f.CreatedUs, UpdatedUs: f.UpdatedUs, ClosedUs: f.ClosedUs, Error: f.Error,
		Events: f.EventCount, StepsDone: f.StepsDone, Priority: f.Priority,
		TimeoutAtUs: f.TimeoutAtUs, Cancelling: f.GraceAtUs != 0,
	}
	for _, a := range f.Attributes {
		if a.Index != wire.Attribute_NONE {
			out.Attributes = append(out.Attributes, a)
		}
	}
	return out
}

// page is where a page begins.
type page struct {
	now  time.Time // that relative times count from
	from state.Place
}

const pageVersion = 1

// pageBytes is version, hash of the query, now and created; the ID follows.
const pageBytes = 1 + 4 + 8 + 8

func (p page) encode(text string) string {
	b := append(make([]byte, 0, pageBytes+len(p.from.ID)), pageVersion)
	b = binary.BigEndian.AppendUint32(b, uint32(xxhash.Sum64String(text)))
	b = binary.BigEndian.AppendUint64(b, uint64(p.now.UnixMicro()))
	b = binary.BigEndian.AppendUint64(b, uint64(p.from.CreatedUs))
	return base64.RawURLEncoding.EncodeToString(append(b, p.from.ID...))
}

func decodePage(token, text string) (page, error) {
	if token == "" {
		return page{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(b) < pageBytes || b[0] != pageVersion || len(b) > pageBytes+core.MaxIDBytes+1 {
		return page{}, &core.Error{Code: core.Invalid, Message: "page is not one that a search gave: pass on next of the page before"}
	}
	if binary.BigEndian.Uint32(b[1:]) != uint32(xxhash.Sum64String(text)) {
		return page{}, &core.Error{Code: core.Invalid, Message: "page is of another query: ask the same query for all pages"}
	}
	return page{
		now:  time.UnixMicro(int64(binary.BigEndian.Uint64(b[5:]))),
		from: state.Place{CreatedUs: int64(binary.BigEndian.Uint64(b[13:])), ID: string(b[pageBytes:])},
	}, nil
}
