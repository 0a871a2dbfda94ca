package query

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

type tokenKind uint8

const (
	tokEnd    tokenKind = iota
	tokName             // a bare word
	tokQuoted           // a name in backquotes
	tokText             // a text in quotes
	tokNumber           // also a relative time: 12, -1.5e3, -2h
	tokSign             // an operator, a parenthesis, a comma
)

type token struct {
	kind tokenKind
	text string // without quotes, escapes resolved
	pos  int
}

// String is how an error message shows the token.
func (t token) String() string {
	switch t.kind {
	case tokEnd:
		return "the end"
	case tokText:
		return quote(clip(t.text))
	case tokQuoted:
		return "`" + clip(t.text) + "`"
	}
	return quote(clip(t.text))
}

// clip bounds what of a token goes into an error.
func clip(s string) string {
	const bound = 40
	if len(s) <= bound {
		return s
	}
	cut := bound
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

var keywords = [...]string{"and", "or", "not", "in", "exists", "true", "false", "now"}

func isKeyword(s string) bool {
	for _, k := range keywords {
		if strings.EqualFold(k, s) {
			return true
		}
	}
	return false
}

func isNameStart(r rune) bool { return r == '_' || unicode.IsLetter(r) }

func isNamePart(r rune) bool {
	return isNameStart(r) || unicode.IsDigit(r) || strings.ContainsRune("-./:@#", r)
}

// isBareName says whether a name can stand without backquotes.
func isBareName(s string) bool {
	for i, r := range s {
		if i == 0 && !isNameStart(r) || !isNamePart(r) {
			return false
		}
	}
	return s != ""
}

type lexer struct {
	text string
	at   int
}

func (l *lexer) next() (token, error) {
	for l.at < len(l.text) && strings.IndexByte(" \t\r\n", l.text[l.at]) >= 0 {
		l.at++
	}
	pos := l.at
	if pos == len(l.text) {
		return token{tokEnd, "", pos}, nil
	}
	rest := l.text[pos:]
	r, _ := utf8.DecodeRuneInString(rest)
	switch {
	case isNameStart(r):
		return l.take(tokName, span(rest, isNamePart)), nil
	case r >= '0' && r <= '9' || (r == '-' || r == '+') && len(rest) > 1 && rest[1] >= '0' && rest[1] <= '9':
		return l.take(tokNumber, numberSpan(rest)), nil
	case r == '"' || r == '\'':
		return l.quoted(byte(r))
	case r == '`':
		end := strings.IndexByte(rest[1:], '`')
		if end <= 0 {
			return token{}, &Error{pos, "a name in backquotes is empty or has no end", "write `name`"}
		}
		l.at += end + 2
		return token{tokQuoted, rest[1 : end+1], pos}, nil
	}
	for _, sign := range []string{"!=", "<=", ">=", "^=", "=", "<", ">", "~", "(", ")", ","} {
		if strings.HasPrefix(rest, sign) {
			return l.take(tokSign, len(sign)), nil
		}
	}
	return token{}, &Error{pos, fmt.Sprintf("unexpected character %q", r), "operators are = != < <= > >= ^= ~ in"}
}

func (l *lexer) take(kind tokenKind, n int) token {
	t := token{kind, l.text[l.at : l.at+n], l.at}
	l.at += n
	return t
}

func span(s string, ok func(rune) bool) int {
	for i, r := range s {
		if !ok(r) {
			return i
		}
	}
	return len(s)
}

// numberSpan takes digits, letters and points: what they mean is decided
// later. A sign belongs to it in front, and behind an exponent's e.
func numberSpan(s string) int {
	i := 1
	for i < len(s) {
		c := s[i]
		exponent := (c == '-' || c == '+') && (s[i-1] == 'e' || s[i-1] == 'E')
		if c != '.' && c != '_' && !exponent && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			break
		}
		i++
	}
	return i
}

// quoted reads a text with the escapes \\ \" \' \n \r \t and \u0000.
func (l *lexer) quoted(end byte) (token, error) {
	start := l.at
	var b strings.Builder
	for i := start + 1; i < len(l.text); i++ {
		c := l.text[i]
		if c == end {
			l.at = i + 1
			return token{tokText, b.String(), start}, nil
		}
		if c != '\\' {
			b.WriteByte(c)
			continue
		}
		r, n := escape(l.text[i+1:])
		if n == 0 {
			return token{}, &Error{i, "unknown escape in a text", `escapes are \\ \" \' \n \r \t and \u followed by four hexadecimal digits`}
		}
		b.WriteRune(r)
		i += n
	}
	return token{}, &Error{start, "a text has no closing quote", "end it with " + string(end)}
}

// escape reads what stands behind a backslash, n bytes of it; 0 = not known.
func escape(s string) (r rune, n int) {
	if s == "" {
		return 0, 0
	}
	switch s[0] {
	case '\\', '"', '\'':
		return rune(s[0]), 1
	case 'n':
		return '\n', 1
	case 'r':
		return '\r', 1
	case 't':
		return '\t', 1
	case 'u':
		if len(s) < 5 {
			return 0, 0
		}
		for _, c := range []byte(s[1:5]) {
			digit := strings.IndexByte("0123456789abcdef", c|0x20)
			if digit < 0 || c < '0' {
				return 0, 0
			}
			r = r<<4 | rune(digit)
		}
		if !utf8.ValidRune(r) {
			return 0, 0
		}
		return r, 5
	}
	return 0, 0
}

// quote writes a text so that the lexer reads the same.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
