package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a request body.
const maxDepth = 64

// value is one value of a request body that is known to be valid JSON, with
// the path that errors about it name. raw is compact: it has no white space
// outside strings, so it may stand in a data line of an event stream.
type value struct {
	raw  []byte
	path string
}

// parse checks a body and makes it a value. The value shares b's memory.
func parse(b []byte) (value, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return value{}, invalidJSON("the body is empty; send a JSON object")
	}
	if !utf8.Valid(b) {
		return value{}, invalidJSON("the body is not valid UTF-8")
	}
	if !json.Valid(b) {
		return value{}, syntaxError(b)
	}
	compact, depth := compact(b)
	if depth > maxDepth {
		return value{}, invalidJSON(fmt.Sprintf("the body is nested more than %d deep", maxDepth))
	}
	return value{raw: compact}, nil
}

func syntaxError(b []byte) error {
	var discard json.RawMessage
	err := json.Unmarshal(b, &discard)
	var se *json.SyntaxError
	if errors.As(err, &se) {
		return invalidJSON(fmt.Sprintf("the body is not valid JSON: %s at byte %d", se.Error(), se.Offset))
	}
	return invalidJSON("the body is not valid JSON")
}

// compact removes white space outside strings, in place, and says how deep the
// text is nested. b must be valid JSON.
func compact(b []byte) (out []byte, depth int) {
	level, w := 0, 0
	inString := false
	for i := 0; i < len(b); i++ {
		c := b[i]
		if inString {
			b[w] = c
			w++
			if c == '\\' {
				i++
				b[w] = b[i]
				w++
			} else if c == '"' {
				inString = false
			}
			continue
		}
		switch c {
		case ' ', '\t', '\r', '\n':
			continue
		case '"':
			inString = true
		case '{', '[':
			level++
			depth = max(depth, level)
		case '}', ']':
			level--
		}
		b[w] = c
		w++
	}
	return b[:w], depth
}

// skip gives the end of the value that begins at b[i], in compact JSON.
func skip(b []byte, i int) int {
	level := 0
	for {
		switch c := b[i]; c {
		case '"':
			for i++; b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
			i++
		case '{', '[':
			level++
			i++
			continue
		case '}', ']':
			level--
			i++
		case ',', ':':
			i++
			continue
		default: // a number or a word
			for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' {
				i++
			}
		}
		if level == 0 {
			return i
		}
	}
}

func (v value) kind() string {
	switch v.raw[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

func (v value) isNull() bool { return v.raw[0] == 'n' }

// at is the path of a member.
func (v value) at(name string) string {
	if v.path == "" {
		return name
	}
	return v.path + "." + name
}

// bad is the refusal of this value.
func (v value) bad(format string, args ...any) error {
	return invalidField(v.path, fmt.Sprintf(format, args...))
}

func (v value) want(kind string) error { return v.bad("must be %s, is %s", kind, v.kind()) }

// object calls fn for each member. A name that is there twice is refused: which
// of the two counts would be a guess.
func (v value) object(fn func(name string, m value) error) error {
	if v.raw[0] != '{' {
		return v.want("an object")
	}
	var first [8]string
	seen := first[:0]
	for i := 1; v.raw[i] != '}'; {
		if v.raw[i] == ',' {
			i++
		}
		end := skip(v.raw, i)
		name := text(v.raw[i:end])
		i = end + 1
		end = skip(v.raw, i)
		for _, s := range seen {
			if s == name {
				return value{path: v.at(name)}.bad("is there twice")
			}
		}
		if seen = append(seen, name); len(seen) > maxMembers {
			return v.bad("has more than %d members", maxMembers)
		}
		if err := fn(name, value{raw: v.raw[i:end], path: v.at(name)}); err != nil {
			return err
		}
		i = end
	}
	return nil
}

// maxMembers bounds the members of an object that is read member by member.
const maxMembers = 256

// unknown refuses a member that means nothing here.
func (v value) unknown(allowed string) error {
	return v.bad("is not a known field; allowed here: %s", allowed)
}

// array calls fn for each element, at most bound of them.
func (v value) array(bound int, fn func(i int, e value) error) error {
	if v.raw[0] != '[' {
		return v.want("an array")
	}
	n := 0
	for i := 1; v.raw[i] != ']'; n++ {
		if v.raw[i] == ',' {
			i++
		}
		if n == bound {
			return v.bad("has more than %d elements", bound)
		}
		end := skip(v.raw, i)
		if err := fn(n, value{raw: v.raw[i:end], path: v.path + "[" + strconv.Itoa(n) + "]"}); err != nil {
			return err
		}
		i = end
	}
	return nil
}

func (v value) empty() bool { return len(v.raw) == 2 && (v.raw[0] == '[' || v.raw[0] == '{') }

// text decodes a JSON string.
func text(raw []byte) string {
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	var s string
	_ = json.Unmarshal(raw, &s) // valid: it was parsed before
	return s
}

func (v value) str(into *string) error {
	if v.raw[0] != '"' {
		return v.want("a string")
	}
	*into = text(v.raw)
	return nil
}

func (v value) boolean(into *bool) error {
	if c := v.raw[0]; c != 't' && c != 'f' {
		return v.want("a boolean")
	}
	*into = v.raw[0] == 't'
	return nil
}

func (v value) integer(into *int) error {
	n, err := strconv.Atoi(string(v.raw))
	if err != nil {
		if v.kind() != "a number" {
			return v.want("an integer")
		}
		return v.bad("must be an integer, is %.40s", v.raw)
	}
	*into = n
	return nil
}

// word reads one of the allowed words.
func (v value) word(into *string, allowed ...string) error {
	if err := v.str(into); err != nil {
		return err
	}
	for _, a := range allowed {
		if *into == a {
			return nil
		}
	}
	return v.bad("%.60q is not allowed; allowed: %s", *into, list(allowed))
}

func list(words []string) string {
	var b []byte
	for i, w := range words {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = append(b, w...)
	}
	return string(b)
}

// decode reads a value into a Go type, for what is not on the hot path.
func (v value) decode(into any) error {
	err := json.Unmarshal(v.raw, into)
	var te *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &te) && te.Field != "":
		return invalidField(v.at(te.Field), "must not be "+te.Value)
	case errors.As(err, &te):
		return v.bad("must not be %s", te.Value)
	}
	return v.bad("%v", err)
}
