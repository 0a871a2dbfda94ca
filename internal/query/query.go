// Package query is the language that flows are searched with:
//
//	type = "order" and status in (running, failed) and created > -2h
//	and (customer = "acme" or amount >= 100) and not tag = "x"
//
// # Fields
//
//	id, type, run, error   text
//	status                 running, completed, failed, cancelled, terminated, timed_out
//	created, updated, closed   instants
//	priority               a number
//	anything else          an attribute that was declared with an index
//
// Indexes help with all of them but run, error, updated and priority, which are
// looked at flow by flow, as is everything that is negated.
//
// A name in backquotes is always an attribute: `type` or `any name at all`.
// Attributes without an index, and values too large to be kept with the flow,
// are not seen. An attribute declared as keyword may hold an array of texts:
// its first MaxElements count, and a comparison holds when it holds for one of
// them. Texts, numbers, booleans and instants are never equal to each other.
//
// # Comparisons
//
//	=  !=  <  <=  >  >=      equal, and in order
//	in (a, b, c)             equal to one of them
//	^= "ord-"                begins with
//	~ "timeout"              contains, whatever the case
//	exists(name)             has a value
//
// Texts stand in "quotes" or 'quotes'. Instants are RFC 3339, a date, or
// relative to now: -2h, -7d, +30m, now. Terms are joined by and, or, not and
// parentheses.
//
// # What is missing
//
// A comparison with a value that is not there, or is of another kind, is
// neither true nor false, and so is its negation: not tag = "x" finds flows
// whose tag is something else, and not those without a tag. Only what is true
// is found. Write not exists(tag) or tag != "x" to have both.
package query

import (
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of a query and of what it looks at.
const (
	MaxLength   = 4 << 10 // bytes
	MaxDepth    = 32      // parentheses and nots within each other
	MaxTerms    = 64      // comparisons; each value of a list is one
	MaxElements = 64      // of an array that are seen
)

// Error says where a query is wrong, and what to write instead.
type Error struct {
	Pos     int // byte in the query, from 0
	Message string
	Hint    string // may be empty
}

func (e *Error) Error() string {
	s := fmt.Sprintf("query, position %d: %s", e.Pos, e.Message)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Query is a parsed query. It never changes; safe for concurrent use.
type Query struct{ root *expr } // nil: everything

// Parse reads a query; an empty one finds everything. Relative times count
// from now. An error is an *Error.
func Parse(text string, now time.Time) (*Query, error) {
	p := &parser{lex: lexer{text: text}, now: now}
	root, err := p.query()
	if err != nil {
		return nil, err
	}
	return &Query{root}, nil
}

// String gives a query that Parse reads as the same one.
func (q *Query) String() string {
	if q.root == nil {
		return ""
	}
	var b strings.Builder
	q.root.print(&b, 0)
	return b.String()
}

// Match says whether a flow is found. id is the flow's ID as its users see it;
// the ID in f is not looked at.
func (q *Query) Match(id string, f *wire.Flow) bool {
	return q.root == nil || q.root.eval(id, f) == isTrue
}

// kind of an expression.
type exprKind uint8

const (
	exprAnd exprKind = iota
	exprOr
	exprNot
	exprCompare
	exprExists
)

// op is a comparison.
type op uint8

const (
	opEq op = iota
	opNe
	opLt
	opLe
	opGt
	opGe
	opIn
	opPrefix
	opContains
)

var opText = [...]string{opEq: "=", opNe: "!=", opLt: "<", opLe: "<=", opGt: ">", opGe: ">=", opIn: "in", opPrefix: "^=", opContains: "~"}

// expr is a node of a query.
type expr struct {
	kind  exprKind
	kids  []*expr // and, or: two or more; not: one
	field Field   // compare, exists
	name  string  // of an attribute
	op    op
	lits  []literal // in: one or more; else one
}

// literal is a value as it was written.
type literal struct {
	text string // as String shows it
	v    Value  // a text, number or boolean, unless only an instant was written
	at   *Value // the same as an instant, when it can be read as one
	pos  int
}

// Precedence of the places an expression can stand in.
const (
	inOr = iota
	inAnd
	inNot
)

func (e *expr) print(b *strings.Builder, place int) {
	switch e.kind {
	case exprAnd, exprOr:
		own, word := inAnd, " and "
		if e.kind == exprOr {
			own, word = inOr, " or "
		}
		if place > own {
			b.WriteByte('(')
			defer b.WriteByte(')')
		}
		for i, k := range e.kids {
			if i > 0 {
				b.WriteString(word)
			}
			k.print(b, own+1)
		}
	case exprNot:
		b.WriteString("not ")
		e.kids[0].print(b, inNot)
	case exprExists:
		b.WriteString("exists(" + fieldText(e.field, e.name) + ")")
	case exprCompare:
		b.WriteString(fieldText(e.field, e.name) + " " + opText[e.op] + " ")
		if e.op != opIn {
			b.WriteString(e.lits[0].text)
			return
		}
		b.WriteByte('(')
		for i, l := range e.lits {
			if i > 0 {
				b.WriteString(", ")
			}
			b.WriteString(l.text)
		}
		b.WriteByte(')')
	}
}

// fieldText writes a field so that it is read as the same one.
func fieldText(f Field, name string) string {
	if f != Attribute {
		return fieldNames[f]
	}
	if _, taken := fieldByName(name); taken || isKeyword(name) || !isBareName(name) {
		return "`" + name + "`"
	}
	return name
}
