package query

import (
	"slices"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// truth is of three values, see "What is missing". Their order makes "and" the
// smallest and "or" the largest.
type truth int8

const (
	isFalse truth = iota - 1
	isUnknown
	isTrue
)

func truthOf(b bool) truth {
	if b {
		return isTrue
	}
	return isFalse
}

func (e *expr) eval(id string, f *wire.Flow) truth {
	switch e.kind {
	case exprAnd:
		t := isTrue
		for _, k := range e.kids {
			if t = min(t, k.eval(id, f)); t == isFalse {
				break
			}
		}
		return t
	case exprOr:
		t := isFalse
		for _, k := range e.kids {
			if t = max(t, k.eval(id, f)); t == isTrue {
				break
			}
		}
		return t
	case exprNot:
		return -e.kids[0].eval(id, f)
	case exprExists:
		found := false
		e.each(id, f, func(Value) bool { found = true; return false })
		return truthOf(found)
	}
	return e.compare(id, f)
}

// compare holds when it holds for one value. A != is the negation of =.
func (e *expr) compare(id string, f *wire.Flow) truth {
	t, comparable := isFalse, false
	e.each(id, f, func(v Value) bool {
		for i := range e.lits {
			if one := e.lits[i].test(e.op, v); one != isUnknown {
				comparable, t = true, max(t, one)
			}
		}
		return t != isTrue
	})
	switch {
	case !comparable:
		return isUnknown
	case e.op == opNe:
		return -t
	}
	return t
}

// each calls fn with the values of the expression's field.
func (e *expr) each(id string, f *wire.Flow, fn func(Value) bool) {
	text := func(s string) {
		if s != "" {
			fn(Value{Kind: Text, Text: s})
		}
	}
	instant := func(us int64) { fn(Value{Kind: Instant, At: time.UnixMicro(us)}) }
	switch e.field {
	case Attribute:
		if a := attribute(f, e.name); a != nil {
			Values(a, fn)
		}
	case ID:
		text(id)
	case Type:
		text(f.Type)
	case Run:
		text(f.RunId)
	case Fault:
		text(f.Error)
	case Status:
		fn(Value{Kind: Number, Int: int64(f.Status)})
	case Created:
		instant(f.CreatedUs)
	case Updated:
		instant(f.UpdatedUs)
	case Closed:
		if f.ClosedUs != 0 {
			instant(f.ClosedUs)
		}
	case Priority:
		fn(Value{Kind: Number, Int: int64(f.Priority)})
	}
}

func attribute(f *wire.Flow, name string) *wire.Attribute {
	i, ok := slices.BinarySearchFunc(f.Attributes, name, func(a *wire.Attribute, n string) int {
		return strings.Compare(a.Name, n)
	})
	if !ok {
		return nil
	}
	return f.Attributes[i]
}

// as gives the literal as a value of a kind.
func (l *literal) as(k Kind) (Value, bool) {
	if k == Instant && l.at != nil {
		return *l.at, true
	}
	return l.v, l.v.Kind == k && k != None
}

// test compares one value; a != is tested as =.
func (l *literal) test(o op, v Value) truth {
	w, ok := l.as(v.Kind)
	if !ok {
		return isUnknown
	}
	switch o {
	case opPrefix:
		if v.Kind != Text {
			return isUnknown
		}
		return truthOf(strings.HasPrefix(v.Text, w.Text))
	case opContains:
		if v.Kind != Text {
			return isUnknown
		}
		return truthOf(strings.Contains(strings.ToLower(v.Text), strings.ToLower(w.Text)))
	}
	c := Compare(v, w)
	switch o {
	case opLt:
		return truthOf(c < 0)
	case opLe:
		return truthOf(c <= 0)
	case opGt:
		return truthOf(c > 0)
	case opGe:
		return truthOf(c >= 0)
	}
	return truthOf(c == 0)
}
