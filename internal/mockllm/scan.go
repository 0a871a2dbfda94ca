package mockllm

import (
	"bytes"
	"errors"
)

// ask is what the mock needs to know of a request's body.
type ask struct {
	stream       bool
	includeUsage bool
	userLast     bool   // the last message's role is "user"
	model        []byte // as escaped in the body; aliases it
	tool         []byte // first tool's name, nil when none is offered; aliases the body
}

var errJSON = errors.New("the body is not a JSON object")

// maxDepth bounds the nesting of a body, as the scanner keeps no stack of it.
const maxDepth = 512

// scanAsk reads the few members that matter and skips the rest without
// building anything, since a prompt is tens of kilobytes and read each turn.
// It accepts every valid JSON object and some invalid ones.
func scanAsk(b []byte) (ask, error) {
	var a ask
	s := scanner{b: b}
	if s.space(); s.i >= len(b) || b[s.i] != '{' {
		return ask{}, errJSON
	}
	s.object(func(key []byte) {
		switch string(key) {
		case "stream":
			a.stream = string(s.value()) == "true"
		case "model":
			a.model = unquote(s.value())
		case "stream_options":
			s.object(func(k []byte) {
				if v := s.value(); string(k) == "include_usage" {
					a.includeUsage = string(v) == "true"
				}
			})
		case "messages":
			s.array(func() {
				s.object(func(k []byte) {
					if v := s.value(); string(k) == "role" {
						a.userLast = string(v) == `"user"`
					}
				})
			})
		case "tools":
			s.array(func() { s.scanTool(&a) })
		default:
			s.value()
		}
	})
	s.space()
	if s.bad || s.i != len(s.b) {
		return ask{}, errJSON
	}
	return a, nil
}

// scanTool keeps the name of the first tool.
func (s *scanner) scanTool(a *ask) {
	s.object(func(k []byte) {
		if string(k) != "function" {
			s.value()
			return
		}
		s.object(func(k []byte) {
			if v := s.value(); string(k) == "name" && a.tool == nil {
				a.tool = unquote(v)
			}
		})
	})
}

func unquote(v []byte) []byte {
	if len(v) >= 2 && v[0] == '"' {
		return v[1 : len(v)-1]
	}
	return nil
}

// scanner walks JSON left to right. Once bad, every method does nothing.
type scanner struct {
	b   []byte
	i   int
	bad bool
}

func (s *scanner) space() {
	for s.i < len(s.b) && (s.b[s.i] == ' ' || s.b[s.i] == '\n' || s.b[s.i] == '\r' || s.b[s.i] == '\t') {
		s.i++
	}
}

// take consumes c if it is next.
func (s *scanner) take(c byte) bool {
	s.space()
	if s.bad || s.i >= len(s.b) || s.b[s.i] != c {
		return false
	}
	s.i++
	return true
}

// object calls member for each key, which must consume the value. A value
// that is no object is skipped.
func (s *scanner) object(member func(key []byte)) {
	if !s.take('{') {
		s.value()
		return
	}
	if s.take('}') {
		return
	}
	for !s.bad {
		s.space()
		key := unquote(s.str())
		if !s.take(':') {
			s.bad = true
			return
		}
		member(key)
		if s.take('}') {
			return
		}
		if !s.take(',') {
			s.bad = true
		}
	}
}

// array calls elem for each element, which must consume it.
func (s *scanner) array(elem func()) {
	if !s.take('[') {
		s.value()
		return
	}
	if s.take(']') {
		return
	}
	for !s.bad {
		elem()
		if s.take(']') {
			return
		}
		if !s.take(',') {
			s.bad = true
		}
	}
}

// str consumes a string and returns it with its quotes, escapes untouched.
func (s *scanner) str() []byte {
	if s.bad || s.i >= len(s.b) || s.b[s.i] != '"' {
		s.bad = true
		return nil
	}
	start := s.i
	for j := s.i + 1; ; {
		q := bytes.IndexByte(s.b[j:], '"')
		if q < 0 {
			s.bad = true
			return nil
		}
		j += q + 1
		back := 0
		for k := j - 2; k > start && s.b[k] == '\\'; k-- {
			back++
		}
		if back%2 == 0 {
			s.i = j
			return s.b[start:j]
		}
	}
}

// value consumes any value and returns its bytes.
func (s *scanner) value() []byte {
	s.space()
	start, depth := s.i, 0
	for !s.bad {
		if s.i >= len(s.b) {
			s.bad = true
			break
		}
		switch c := s.b[s.i]; c {
		case '"':
			s.str()
		case '{', '[':
			s.i++
			if depth++; depth > maxDepth {
				s.bad = true
			}
			continue
		case '}', ']':
			if depth--; depth < 0 {
				s.bad = true
			}
			s.i++
		case ',', ':', ' ', '\n', '\r', '\t':
			if depth == 0 {
				s.bad = true
			}
			s.i++
			continue
		default:
			s.literal()
		}
		if depth == 0 && !s.bad {
			return s.b[start:s.i]
		}
	}
	return nil
}

// literal consumes a number, true, false or null.
func (s *scanner) literal() {
	start := s.i
	for s.i < len(s.b) {
		c := s.b[s.i]
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'z' || c == '-' || c == '+' || c == '.' || c == 'E') {
			break
		}
		s.i++
	}
	if s.i == start {
		s.bad = true
	}
}
