package query

import (
	"math"
)

// PlanKind says how a Plan bounds what a query can find.
type PlanKind uint8

// The kinds of plans.
const (
	PlanAll    PlanKind = iota // nothing is known: every flow
	PlanNone                   // no flow at all
	PlanWindow                 // flows created from From to To
	PlanScan                   // flows with a value between Low and High
	PlanAnd                    // flows in all Kids
	PlanOr                     // flows in one of Kids
)

// Plan is a superset of what a query finds, as index scans. What a plan gives
// is still to be matched, unless it is Exact.
type Plan struct {
	Kind     PlanKind
	Kids     []Plan // of PlanAnd and PlanOr: one or more
	Scan     Scan
	From, To int64 // of PlanWindow: microseconds, both included
	Exact    bool  // gives nothing else than the query finds
}

// Scan is the values of one field from Low to High, both included.
type Scan struct {
	Field  Field // Attribute, ID, Type, Status or Closed
	Name   string
	Kind   Kind
	Low    *Value // nil: from the smallest of the kind
	High   *Value // nil: to the largest
	Prefix bool   // texts that begin with Low; High is nil
}

// Equal says whether the scan is of one value.
func (s *Scan) Equal() bool {
	return s.Low != nil && s.High != nil && !s.Prefix && Compare(*s.Low, *s.High) == 0
}

// Plan gives what bounds the query.
func (q *Query) Plan() Plan {
	if q.root == nil {
		return Plan{Kind: PlanAll, Exact: true}
	}
	return q.root.plan()
}

func (e *expr) plan() Plan {
	switch e.kind {
	case exprAnd:
		return e.planAnd()
	case exprOr:
		return e.planOr()
	case exprNot:
		if k := e.kids[0]; k.kind == exprNot {
			return k.kids[0].plan()
		}
	case exprExists:
		if e.field == Attribute {
			return anyOf(e.kinds([]Kind{Bool, Number, Text, Instant}))
		}
		if e.field == Closed {
			return anyOf(e.kinds([]Kind{Instant}))
		}
	case exprCompare:
		return e.planCompare()
	}
	return Plan{Kind: PlanAll}
}

// kinds scans all values of some kinds.
func (e *expr) kinds(kinds []Kind) []Plan {
	var out []Plan
	for _, k := range kinds {
		out = append(out, Plan{Kind: PlanScan, Scan: Scan{Field: e.field, Name: e.name, Kind: k}})
	}
	return out
}

// anyOf joins plans of which one holds.
func anyOf(kids []Plan) Plan {
	exact := true
	var flat []Plan
	for _, k := range kids {
		switch exact = exact && k.Exact; k.Kind {
		case PlanAll:
			return Plan{Kind: PlanAll}
		case PlanNone:
		case PlanOr:
			flat = append(flat, k.Kids...)
		default:
			flat = append(flat, k)
		}
	}
	switch len(flat) {
	case 0:
		return Plan{Kind: PlanNone, Exact: exact}
	case 1:
		return flat[0]
	}
	return Plan{Kind: PlanOr, Kids: flat, Exact: exact}
}

func (e *expr) planOr() Plan {
	kids := make([]Plan, len(e.kids))
	for i, k := range e.kids {
		kids[i] = k.plan()
	}
	return anyOf(kids)
}

// planCompare gives the scans of a comparison: one for each kind of value that
// it can hold for, of each of its literals.
func (e *expr) planCompare() Plan {
	if e.op == opNe || e.op == opContains {
		return Plan{Kind: PlanAll}
	}
	switch e.field {
	case Created:
		return e.planCreated()
	case Attribute, Type, Status, Closed:
	case ID:
		if e.op != opEq && e.op != opIn && e.op != opPrefix {
			return Plan{Kind: PlanAll}
		}
	default:
		return Plan{Kind: PlanAll}
	}
	var scans []Plan
	for i := range e.lits {
		for _, k := range []Kind{Bool, Number, Text, Instant} {
			v, ok := e.lits[i].as(k)
			if !ok || e.op == opPrefix && k != Text {
				continue
			}
			exact := e.field == Status || e.field == Type && e.op != opLt && e.op != opGt && len(v.Text) < exactText
			scans = append(scans, Plan{Kind: PlanScan, Scan: e.scan(v), Exact: exact})
		}
	}
	return anyOf(scans)
}

// exactText is below the length at which an index may cut texts.
const exactText = 64

func (e *expr) scan(v Value) Scan {
	s := Scan{Field: e.field, Name: e.name, Kind: v.Kind}
	switch e.op {
	case opEq, opIn:
		s.Low, s.High = &v, &v
	case opPrefix:
		s.Low, s.Prefix = &v, true
	case opGt, opGe:
		s.Low = &v
	case opLt, opLe:
		s.High = &v
	}
	return s
}

// planCreated gives a window for one literal, or one for each of a list. Flows
// are created at whole microseconds, so windows are exact.
func (e *expr) planCreated() Plan {
	var out []Plan
	for i := range e.lits {
		down := e.lits[i].v.At.UnixMicro()
		up, below := down, down-1 // the literal rounded up; the last microsecond before it
		if e.lits[i].v.At.Nanosecond()%1000 != 0 {
			up, below = down+1, down
		}
		w := Plan{Kind: PlanWindow, From: math.MinInt64, To: math.MaxInt64, Exact: true}
		switch e.op {
		case opGt:
			w.From = down + 1
		case opGe:
			w.From = up
		case opLt:
			w.To = below
		case opLe:
			w.To = down
		default:
			w.From, w.To = up, down
		}
		if w.From > w.To {
			w = Plan{Kind: PlanNone, Exact: true}
		}
		out = append(out, w)
	}
	return anyOf(out)
}

// planAnd joins plans that all hold: windows become one, and ranges of one
// field become one where its values are single.
func (e *expr) planAnd() Plan {
	all := Plan{Kind: PlanAnd, Exact: true}
	window := Plan{Kind: PlanWindow, From: math.MinInt64, To: math.MaxInt64, Exact: true}
	windows := false
	var fields []*narrow
	for _, k := range e.kids {
		p := k.plan()
		all.Exact = all.Exact && p.Exact
		switch {
		case p.Kind == PlanNone:
			return p
		case p.Kind == PlanAll:
		case p.Kind == PlanWindow:
			windows = true
			window.From, window.To = max(window.From, p.From), min(window.To, p.To)
		case k.kind == exprCompare || k.kind == exprExists:
			fields = narrowed(fields, k, p)
		default:
			all.Kids = append(all.Kids, p)
		}
	}
	for _, f := range fields {
		p := f.plan()
		if p.Kind == PlanNone {
			return p
		}
		all.Exact = all.Exact && !f.lossy
		all.Kids = append(all.Kids, p)
	}
	if windows {
		if window.From > window.To {
			return Plan{Kind: PlanNone}
		}
		all.Kids = append(all.Kids, window)
	}
	if len(all.Kids) == 0 {
		return Plan{Kind: PlanAll}
	}
	if len(all.Kids) == 1 && all.Kids[0].Exact == all.Exact {
		return all.Kids[0]
	}
	return all
}

// narrow gathers the comparisons of one field within an "and". All values of
// a flow's field are of one kind, so a kind that one comparison leaves out is
// out.
type narrow struct {
	field Field
	name  string
	sets  map[Kind][]Plan // scans of which one holds
	lossy bool            // a comparison is not in them
}

func narrowed(fields []*narrow, e *expr, p Plan) []*narrow {
	sets := map[Kind][]Plan{}
	scans := p.Kids
	if p.Kind == PlanScan {
		scans = []Plan{p}
	}
	for _, s := range scans {
		sets[s.Scan.Kind] = append(sets[s.Scan.Kind], s)
	}
	for _, f := range fields {
		if f.field == e.field && f.name == e.name {
			f.add(sets)
			return fields
		}
	}
	return append(fields, &narrow{field: e.field, name: e.name, sets: sets})
}

func (f *narrow) add(sets map[Kind][]Plan) {
	for k, had := range f.sets {
		more, ok := sets[k]
		switch {
		case !ok:
			delete(f.sets, k)
		case k != Text && len(had) == 1 && len(more) == 1:
			f.sets[k] = []Plan{intersect(had[0], more[0])}
		default:
			f.lossy = true
			if cost(more) < cost(had) {
				f.sets[k] = more
			}
		}
	}
}

// intersect is for values that are single: numbers, instants, booleans.
func intersect(a, b Plan) Plan {
	s := a.Scan
	if b.Scan.Low != nil && (s.Low == nil || Compare(*b.Scan.Low, *s.Low) > 0) {
		s.Low = b.Scan.Low
	}
	if b.Scan.High != nil && (s.High == nil || Compare(*b.Scan.High, *s.High) < 0) {
		s.High = b.Scan.High
	}
	return Plan{Kind: PlanScan, Scan: s, Exact: a.Exact && b.Exact}
}

// cost guesses which of two sets of scans is the smaller: equality before a
// prefix before an interval before half of everything.
func cost(scans []Plan) int {
	n := 0
	for _, p := range scans {
		s := &p.Scan
		switch {
		case s.Equal():
			n++
		case s.Prefix:
			n += 1 << 8
		case s.Low != nil && s.High != nil:
			n += 1 << 10
		case s.Low != nil || s.High != nil:
			n += 1 << 14
		default:
			n += 1 << 16
		}
	}
	return n
}

func (f *narrow) plan() Plan {
	var scans []Plan
	for _, k := range []Kind{Bool, Number, Text, Instant} {
		for _, p := range f.sets[k] {
			if s := &p.Scan; s.Low != nil && s.High != nil && Compare(*s.Low, *s.High) > 0 {
				continue
			}
			scans = append(scans, p)
		}
	}
	return anyOf(scans)
}
