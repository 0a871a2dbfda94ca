package query

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// parser is one token ahead of what it has read.
type parser struct {
	lex   lexer
	tok   token
	now   time.Time
	depth int
	terms int
}

func (p *parser) query() (*expr, error) {
	if n := len(p.lex.text); n > MaxLength {
		return nil, &Error{MaxLength, fmt.Sprintf("the query has %d bytes, at most %d", n, MaxLength), ""}
	}
	for i, r := range p.lex.text {
		if r == utf8.RuneError && !strings.HasPrefix(p.lex.text[i:], "\ufffd") {
			return nil, &Error{i, "the query is not valid UTF-8 here", ""}
		}
	}
	if err := p.advance(); err != nil || p.tok.kind == tokEnd {
		return nil, err
	}
	e, err := p.chain(exprOr)
	if err != nil {
		return nil, err
	}
	if p.tok.kind != tokEnd {
		return nil, p.expected(`"and", "or" or the end`)
	}
	return e, nil
}

func (p *parser) advance() (err error) {
	p.tok, err = p.lex.next()
	return err
}

func (p *parser) expected(what string) *Error {
	return &Error{Pos: p.tok.pos, Message: fmt.Sprintf("expected %s, got %s", what, p.tok)}
}

func (p *parser) is(kind tokenKind, text string) bool {
	return p.tok.kind == kind && strings.EqualFold(p.tok.text, text)
}

// sign takes the sign that must be here.
func (p *parser) sign(s, what string) error {
	if !p.is(tokSign, s) {
		return p.expected(what)
	}
	return p.advance()
}

// chain reads terms joined by "or", each of terms joined by "and".
func (p *parser) chain(kind exprKind) (*expr, error) {
	word := map[exprKind]string{exprOr: "or", exprAnd: "and"}[kind]
	var kids []*expr
	for {
		e, err := p.link(kind)
		if err != nil {
			return nil, err
		}
		if e.kind == kind {
			kids = append(kids, e.kids...)
		} else {
			kids = append(kids, e)
		}
		if !p.is(tokName, word) {
			break
		}
		if err := p.advance(); err != nil {
			return nil, err
		}
	}
	if len(kids) == 1 {
		return kids[0], nil
	}
	return &expr{kind: kind, kids: kids}, nil
}

func (p *parser) link(kind exprKind) (*expr, error) {
	if kind == exprOr {
		return p.chain(exprAnd)
	}
	return p.unary()
}

func (p *parser) unary() (*expr, error) {
	if p.depth++; p.depth > MaxDepth {
		return nil, &Error{p.tok.pos, fmt.Sprintf("nested deeper than %d", MaxDepth), ""}
	}
	defer func() { p.depth-- }()
	switch {
	case p.is(tokName, "not"):
		if err := p.advance(); err != nil {
			return nil, err
		}
		e, err := p.unary()
		return &expr{kind: exprNot, kids: []*expr{e}}, err
	case p.is(tokSign, "("):
		if err := p.advance(); err != nil {
			return nil, err
		}
		e, err := p.chain(exprOr)
		if err != nil {
			return nil, err
		}
		return e, p.sign(")", `"and", "or" or ")"`)
	case p.is(tokName, "exists"):
		return p.exists()
	}
	return p.compare()
}

func (p *parser) count() error {
	if p.terms++; p.terms > MaxTerms {
		return &Error{p.tok.pos, fmt.Sprintf("more than %d comparisons", MaxTerms), "ask in several queries"}
	}
	return nil
}

func (p *parser) exists() (*expr, error) {
	if err := p.count(); err != nil {
		return nil, err
	}
	if err := p.advance(); err != nil {
		return nil, err
	}
	if err := p.sign("(", `"(" behind exists`); err != nil {
		return nil, err
	}
	e := &expr{kind: exprExists}
	if err := p.field(e); err != nil {
		return nil, err
	}
	return e, p.sign(")", `")"`)
}

// field reads the field that e is about.
func (p *parser) field(e *expr) error {
	switch p.tok.kind {
	case tokQuoted:
		e.name = p.tok.text
	case tokName:
		if isKeyword(p.tok.text) {
			err := p.expected("a field or an attribute")
			err.Hint = "an attribute of that name stands in backquotes"
			return err
		}
		if f, ok := fieldByName(p.tok.text); ok {
			e.field = f
		} else {
			e.name = p.tok.text
		}
	default:
		err := p.expected("a field or an attribute")
		if p.tok.kind == tokText {
			err.Hint = "names stand without quotes, or in backquotes"
		}
		return err
	}
	return p.advance()
}

func (p *parser) compare() (*expr, error) {
	e := &expr{kind: exprCompare}
	if err := p.field(e); err != nil {
		return nil, err
	}
	o, ok := p.operator()
	if !ok {
		err := p.expected(fmt.Sprintf("an operator behind %s", fieldText(e.field, e.name)))
		if p.is(tokName, "not") {
			err.Hint = "not stands in front: not name in (…)"
		}
		return nil, err
	}
	if !e.field.class().allows(o) {
		return nil, &Error{p.tok.pos, fmt.Sprintf("%s cannot be compared by %s", fieldText(e.field, e.name), opText[o]), "see the fields and their comparisons"}
	}
	e.op = o
	if err := p.advance(); err != nil {
		return nil, err
	}
	if o == opIn {
		return e, p.list(e)
	}
	return e, p.value(e)
}

func (p *parser) operator() (op, bool) {
	if p.tok.kind != tokSign && !p.is(tokName, "in") {
		return 0, false
	}
	for o, text := range opText {
		if strings.EqualFold(text, p.tok.text) {
			return op(o), true
		}
	}
	return 0, false
}

func (p *parser) list(e *expr) error {
	if err := p.sign("(", `"(" behind in`); err != nil {
		return err
	}
	for {
		if err := p.value(e); err != nil {
			return err
		}
		if p.is(tokSign, ")") {
			return p.advance()
		}
		if err := p.sign(",", `"," or ")"`); err != nil {
			return err
		}
	}
}

// value reads one literal and checks that it fits the field.
func (p *parser) value(e *expr) error {
	if err := p.count(); err != nil {
		return err
	}
	l, err := p.literal(e.field.class())
	if err != nil {
		return err
	}
	if (e.op == opPrefix || e.op == opContains) && l.v.Kind != Text {
		return &Error{l.pos, opText[e.op] + " is for texts", `put the text in quotes`}
	}
	e.lits = append(e.lits, l)
	return p.advance()
}

func (p *parser) literal(c class) (literal, error) {
	l := literal{pos: p.tok.pos}
	var hint string
	switch {
	case p.tok.kind == tokText:
		l.text = quote(p.tok.text)
		l.v = Value{Kind: Text, Text: p.tok.text}
		if at, ok := parseInstant(p.tok.text); ok {
			l.at = &Value{Kind: Instant, At: at}
		}
	case p.tok.kind == tokNumber:
		l.text = p.tok.text
		if err := p.number(&l); err != nil {
			return l, err
		}
	case p.is(tokName, "now"):
		l.text, l.at = "now", &Value{Kind: Instant, At: p.now}
	case p.is(tokName, "true"), p.is(tokName, "false"):
		l.text = strings.ToLower(p.tok.text)
		l.v = Value{Kind: Bool, Int: int64(len("false") - len(l.text))}
	case p.tok.kind == tokName && c == classStatus:
		l.text, l.v = strings.ToLower(p.tok.text), Value{Kind: Text, Text: p.tok.text}
	case p.tok.kind == tokName:
		hint = "put text in quotes: " + quote(p.tok.text)
		fallthrough
	default:
		err := p.expected("a value")
		err.Hint = hint
		return l, err
	}
	return l, l.fit(c)
}

// fit checks a literal against what its field is compared with.
func (l *literal) fit(c class) error {
	bad := func(what, hint string) error {
		return &Error{l.pos, fmt.Sprintf("%s is not %s", l.text, what), hint}
	}
	switch c {
	case classText:
		if l.v.Kind != Text {
			return bad("a text", "put it in quotes")
		}
		l.at = nil
	case classNumber:
		if l.v.Kind != Number {
			return bad("a number", "")
		}
	case classTime:
		if l.at == nil {
			return bad("an instant", `write "2026-12-01", "2026-12-01T15:04:05Z", -2h or now`)
		}
		l.v = *l.at
	case classStatus:
		n, ok := statusByName(l.v.Text)
		if l.v.Kind != Text || !ok {
			return bad("a status", "one of "+strings.Join(statusNames[:], ", "))
		}
		l.text, l.at = statusNames[n], nil
		l.v = Value{Kind: Number, Int: n}
	}
	return nil
}

// number reads a number or a time relative to now.
func (p *parser) number(l *literal) error {
	s := p.tok.text
	if v, ok := parseNumber(s); ok {
		l.v = v
		return nil
	}
	if s[0] == '-' || s[0] == '+' {
		if d, ok := parseSpan(s[1:]); ok {
			if s[0] == '-' {
				d = -d
			}
			l.at = &Value{Kind: Instant, At: p.now.Add(d)}
			return nil
		}
	}
	return &Error{p.tok.pos, fmt.Sprintf("%s is neither a number nor a relative time", p.tok), "write 12, 1.5, -2h, -7d or +30m"}
}

// units of a relative time.
var units = []struct {
	name string
	d    time.Duration
}{{"ms", time.Millisecond}, {"s", time.Second}, {"m", time.Minute}, {"h", time.Hour}, {"d", 24 * time.Hour}, {"w", 7 * 24 * time.Hour}}

// maxSpan bounds a relative time: sums of it cannot overflow.
const maxSpan = 100 * 365 * 24 * time.Hour

// parseSpan reads 1h30m, 7d, 500ms.
func parseSpan(s string) (sum time.Duration, ok bool) {
	for s != "" {
		digits := 0
		for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
			digits++
		}
		n, err := strconv.ParseInt(s[:digits], 10, 64)
		s = s[digits:]
		letters := 0
		for letters < len(s) && (s[letters] < '0' || s[letters] > '9') {
			letters++
		}
		unit := unitOf(s[:letters])
		if err != nil || unit == 0 || n > int64(maxSpan/unit) {
			return 0, false
		}
		if sum += time.Duration(n) * unit; sum > maxSpan {
			return 0, false
		}
		s = s[letters:]
	}
	return sum, true
}

func unitOf(name string) time.Duration {
	for _, u := range units {
		if u.name == name {
			return u.d
		}
	}
	return 0
}

// layouts of instants; those without a zone are UTC.
var layouts = []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02T15:04", "2006-01-02 15:04", time.DateOnly}

func parseInstant(s string) (time.Time, bool) {
	if len(s) < len(time.DateOnly) || s[4] != '-' {
		return time.Time{}, false
	}
	for _, layout := range layouts {
		if at, err := time.Parse(layout, s); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}
