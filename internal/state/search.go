package state

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/perdure-dev/perdure/internal/query"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of one call of Search.
const (
	// searchWork bounds the steps over index rows; reading a flow counts as
	// readWork of them, and one more for each readBytes. About 100 ms at most.
	searchWork = 80_000
	readWork   = 8
	readBytes  = 512
	// collectRows bounds the rows of intervals that are sorted, a flow that is read
	// for it counting as readWork: a larger interval does not guide the search.
	// Where something else does, fewer are worth it.
	collectRows   = 50_000
	collectRowsBy = 1_000
)

// Hit is a flow that was found, without steps, channels, output and what else
// is not for those who search. Large values of attributes are left out: the
// attribute has their size.
type Hit struct {
	ID   string // as its users see it
	Flow *wire.Flow
}

// Place is where the hit stands in the order of searches.
func (h *Hit) Place() Place { return Place{h.Flow.CreatedUs, h.ID} }

// Found is what one call of Search gives.
type Found struct {
	Hits  []Hit
	Count uint64 // as many as Hits, unless only the number was asked for
	// More says that the bound of hits or of work was met: go on from Next.
	More bool
	Next Place
}

// Search gives the flows of a tenant that match, the newest first, beginning
// with the first place that is not before from, at most limit of them. It does
// a bounded amount of work: it may give fewer, even none, with More set. Only
// users' flows are searched. All of one call is as of one moment.
func (d *DB) Search(tenant string, q *query.Query, from Place, limit int) (Found, error) {
	s := searcher{d: d, tenant: tenant, q: q, limit: limit}
	return s.run(from)
}

// Count counts the flows that Search would give, from a place on; with More,
// count on from Next and add.
func (d *DB) Count(tenant string, q *query.Query, from Place) (Found, error) {
	s := searcher{d: d, tenant: tenant, q: q, count: true}
	return s.run(from)
}

// searcher is one call.
type searcher struct {
	d      *DB
	tenant string
	q      *query.Query
	limit  int
	count  bool

	snap  *pebble.Snapshot
	from  []byte             // places before it are of no interest
	iters []*pebble.Iterator // to be closed
	work  int                // done so far
	spent int                // of collectRows
	key   []byte
}

func (s *searcher) run(from Place) (found Found, err error) {
	if !s.d.gate.enter() {
		return Found{}, ErrClosed
	}
	defer s.d.gate.leave()
	s.snap = s.d.db.NewSnapshot()
	defer func() {
		for _, it := range s.iters {
			if cerr := it.Close(); err == nil && cerr != nil {
				err = s.d.readError(cerr)
			}
		}
		if cerr := s.snap.Close(); err == nil {
			err = cerr
		}
	}()
	if from != (Place{}) {
		s.from = appendPlace(nil, from)
	}
	plan := s.q.Plan()
	str, err := s.stream(&plan, collectRows)
	if err == nil && str == nil {
		str, err = s.all()
	}
	if err != nil {
		return Found{}, s.d.readError(err)
	}
	if found, err = s.walk(str, s.count && plan.Exact); err != nil {
		return Found{}, s.d.readError(err)
	}
	return found, nil
}

// walk looks at what a stream gives. exact: what it gives needs no match.
func (s *searcher) walk(str stream, exact bool) (found Found, err error) {
	at := bytes.Clone(s.from)
	for {
		place, state, err := str.seek(at)
		switch {
		case err != nil:
			return Found{}, err
		case state == ended:
			return found, nil
		case state == paused || s.work >= searchWork || !s.count && len(found.Hits) >= s.limit:
			found.More, found.Next = true, decodePlace(place)
			return found, nil
		}
		id := place[placeBytes:]
		if exact {
			found.Count++
		} else if f, err := s.read(id); err != nil {
			return Found{}, err
		} else if f != nil && s.q.Match(string(id), f) {
			if found.Count++; !s.count {
				f.Steps, f.Channels, f.Requests, f.Outbox, f.Parents, f.Output, f.Closing = nil, nil, nil, nil, nil, nil, nil
				found.Hits = append(found.Hits, Hit{string(id), f})
			}
		}
		at = append(append(at[:0], place...), 0)
	}
}

// read gives the row of a flow; nil when there is none.
func (s *searcher) read(id []byte) (*wire.Flow, error) {
	s.work += readWork
	s.key = append(append(append(append(s.key[:0], tableFlow), s.tenant...), "/f/"...), id...)
	row, closer, err := s.snap.Get(s.key)
	if err == pebble.ErrNotFound {
		return nil, fmt.Errorf("%w: flow %q is in the search index and has no row", ErrDamaged, s.key[1:])
	}
	if err != nil {
		return nil, err
	}
	defer closer.Close()
	s.work += len(row) / readBytes
	return decodeFlow(row)
}

func (s *searcher) iter(lower, upper []byte) (*pebble.Iterator, error) {
	it, err := s.snap.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err == nil {
		s.iters = append(s.iters, it)
	}
	return it, err
}

// all is every flow of the tenant: those of every status.
func (s *searcher) all() (stream, error) {
	var all oneOf
	prefix := appendField(appendIndexPrefix(nil, s.tenant), query.Status, "")
	for status := range int64(len(wire.Status_name)) {
		v := query.Value{Kind: query.Number, Int: status}
		str, err := s.rows(appendValue(bytes.Clone(prefix), v, false))
		if err != nil {
			return nil, err
		}
		all.kids = append(all.kids, str)
	}
	return &all, nil
}

// rows is the rows behind a prefix that leaves only places.
func (s *searcher) rows(prefix []byte) (stream, error) {
	it, err := s.iter(prefix, prefixEnd(bytes.Clone(prefix)))
	return &rowStream{s: s, it: it, prefix: prefix}, err
}

// stream gives the places of a plan; nil when it does not guide the search.
func (s *searcher) stream(p *query.Plan, collect int) (stream, error) {
	switch p.Kind {
	case query.PlanNone:
		return &placeList{}, nil
	case query.PlanWindow:
		all, err := s.all()
		return window(p, all), err
	case query.PlanScan:
		return s.scan(&p.Scan, collect)
	case query.PlanAnd:
		return s.and(p, collect)
	case query.PlanOr:
		return s.or(p, collect)
	}
	return nil, nil
}

// and begins with what costs nothing to open, so that intervals are collected
// only as far as they are worth it.
func (s *searcher) and(p *query.Plan, collect int) (stream, error) {
	var kids []stream
	var frame *query.Plan
	for _, lazy := range []bool{true, false} {
		for i := range p.Kids {
			k := &p.Kids[i]
			if k.Kind == query.PlanWindow {
				frame = k
				continue
			}
			if isLazy(k) != lazy {
				continue
			}
			if len(kids) > 0 {
				collect = min(collect, collectRowsBy)
			}
			str, err := s.stream(k, collect)
			if err != nil {
				return nil, err
			}
			if str != nil {
				kids = append(kids, str)
			}
		}
	}
	var out stream
	switch len(kids) {
	case 0:
		if frame == nil {
			return nil, nil
		}
		return s.stream(frame, collect)
	case 1:
		out = kids[0]
	default:
		out = &allOf{s: s, kids: kids}
	}
	if frame != nil {
		out = window(frame, out)
	}
	return out, nil
}

// isLazy says whether a plan opens without collecting.
func isLazy(p *query.Plan) bool {
	switch p.Kind {
	case query.PlanScan:
		return p.Scan.Equal()
	case query.PlanAnd, query.PlanOr:
		for i := range p.Kids {
			if !isLazy(&p.Kids[i]) {
				return false
			}
		}
	}
	return true
}

func (s *searcher) or(p *query.Plan, collect int) (stream, error) {
	var kids []stream
	for i := range p.Kids {
		str, err := s.stream(&p.Kids[i], collect)
		if err != nil || str == nil {
			return nil, err
		}
		kids = append(kids, str)
	}
	return &oneOf{kids: kids}, nil
}

// scan gives one value's rows as they are, and those of an interval sorted.
func (s *searcher) scan(sc *query.Scan, collect int) (stream, error) {
	if sc.Field == query.ID {
		return s.scanIDs(sc)
	}
	prefix := appendField(appendIndexPrefix(nil, s.tenant), sc.Field, sc.Name)
	if sc.Equal() {
		return s.rows(appendValue(prefix, *sc.Low, false))
	}
	lower := append(bytes.Clone(prefix), byte(sc.Kind))
	upper := prefixEnd(bytes.Clone(lower))
	if sc.Low != nil {
		lower = appendValue(bytes.Clone(prefix), *sc.Low, sc.Prefix)
	}
	switch {
	case sc.Prefix:
		upper = prefixEnd(bytes.Clone(lower))
	case sc.High != nil:
		upper = prefixEnd(appendValue(bytes.Clone(prefix), *sc.High, false))
	}
	return s.collect(lower, upper, len(prefix)+1, sc.Kind, collect)
}

// collect sorts the places of an interval of values; nil when there are more
// than bound.
func (s *searcher) collect(lower, upper []byte, value int, kind query.Kind, bound int) (stream, error) {
	if bytes.Compare(lower, upper) >= 0 {
		return &placeList{}, nil
	}
	it, err := s.iter(lower, upper)
	if err != nil {
		return nil, err
	}
	var list placeList
	bound = min(s.spent+bound, collectRows)
	for ok := it.First(); ok; ok = it.Next() {
		if s.spent++; s.spent > bound {
			return nil, nil
		}
		key := it.Key()
		end, ok := valueEnd(key[value:], kind)
		if !ok || len(key) <= value+end+placeBytes {
			return nil, fmt.Errorf("%w: index row %x", ErrDamaged, clip(key))
		}
		if place := key[value+end:]; bytes.Compare(place, s.from) >= 0 {
			list.add(place)
		}
	}
	list.sort()
	return &list, it.Error()
}

// scanIDs reads the flows of one ID, or of some that begin alike.
func (s *searcher) scanIDs(sc *query.Scan) (stream, error) {
	lower := append(append(append([]byte{tableFlow}, s.tenant...), "/f/"...), sc.Low.Text...)
	upper := append(bytes.Clone(lower), 0)
	if sc.Prefix {
		upper = prefixEnd(bytes.Clone(lower))
	}
	it, err := s.iter(lower, upper)
	if err != nil {
		return nil, err
	}
	var list placeList
	for ok := it.First(); ok; ok = it.Next() {
		if s.spent += readWork; s.spent > collectRows {
			return nil, nil
		}
		row, err := it.ValueAndErr()
		if err != nil {
			return nil, err
		}
		f, err := decodeFlow(row)
		if err != nil {
			return nil, err
		}
		_, id, ok := userFlow(f.Id)
		if place := appendPlace(nil, Place{f.CreatedUs, id}); ok && f.Closes && bytes.Compare(place, s.from) >= 0 {
			list.add(place)
		}
	}
	list.sort()
	return &list, it.Error()
}
