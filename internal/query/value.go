package query

import (
	"cmp"
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Kind of a value. Values of different kinds are not compared.
type Kind uint8

// The kinds.
const (
	None Kind = iota
	Bool
	Number
	Text
	Instant
)

// Value is one value that comparisons and indexes see.
type Value struct {
	Kind  Kind
	Text  string
	Int   int64     // Number without IsFloat; Bool: 0 or 1
	Float float64   // Number with IsFloat; never NaN
	At    time.Time // Instant

	IsFloat bool
}

// Compare orders two values of one kind.
func Compare(a, b Value) int {
	switch a.Kind {
	case Text:
		return strings.Compare(a.Text, b.Text)
	case Instant:
		return a.At.Compare(b.At)
	}
	switch {
	case a.IsFloat && b.IsFloat:
		return cmp.Compare(a.Float, b.Float)
	case a.IsFloat:
		return -compareMixed(b.Int, a.Float)
	case b.IsFloat:
		return compareMixed(a.Int, b.Float)
	}
	return cmp.Compare(a.Int, b.Int)
}

// compareMixed compares without rounding: not every int64 is a float64.
func compareMixed(i int64, f float64) int {
	const over = 1 << 63
	switch {
	case f >= over:
		return -1
	case f < -over:
		return 1
	}
	whole, frac := math.Modf(f)
	if c := cmp.Compare(i, int64(whole)); c != 0 {
		return c
	}
	return cmp.Compare(0, frac)
}

// Values calls fn with what is seen of an attribute, until it says stop: none
// of one without an index or with a value that is not here; the elements of an
// array of texts; else the one value. A text may share memory with value.
func Values(a *wire.Attribute, fn func(Value) bool) {
	if a.Index == wire.Attribute_NONE || len(a.Value) == 0 {
		return
	}
	raw := a.Value
	for len(raw) > 0 && isSpace(raw[0]) {
		raw = raw[1:]
	}
	if len(raw) > 0 && raw[0] == '[' {
		if a.Index == wire.Attribute_KEYWORD {
			elements(raw, fn)
		}
		return
	}
	if v := scalar(raw, a.Index == wire.Attribute_TIME); v.Kind != None {
		fn(v)
	}
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

// elements gives the texts among the first elements of an array. Others do not
// count: so all values of one attribute are of one kind.
func elements(raw []byte, fn func(Value) bool) {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return
	}
	for _, el := range list[:min(len(list), MaxElements)] {
		if v := scalar(el, false); v.Kind == Text && !fn(v) {
			return
		}
	}
}

// scalar reads a JSON text, number or boolean; anything else is no value.
func scalar(raw []byte, instant bool) Value {
	for len(raw) > 0 && isSpace(raw[len(raw)-1]) {
		raw = raw[:len(raw)-1]
	}
	if len(raw) == 0 {
		return Value{}
	}
	switch c := raw[0]; {
	case c == '"':
		s, ok := text(raw)
		if !ok {
			return Value{}
		}
		if instant {
			if at, err := time.Parse(time.RFC3339Nano, s); err == nil {
				return Value{Kind: Instant, At: at}
			}
		}
		return Value{Kind: Text, Text: s}
	case c == 't' && string(raw) == "true":
		return Value{Kind: Bool, Int: 1}
	case c == 'f' && string(raw) == "false":
		return Value{Kind: Bool}
	case c == '-' || c >= '0' && c <= '9':
		if v, ok := parseNumber(string(raw)); ok {
			return v
		}
	}
	return Value{}
}

// text reads a JSON string; the usual one has no escapes.
func text(raw []byte) (string, bool) {
	if len(raw) < 2 || raw[len(raw)-1] != '"' {
		return "", false
	}
	plain := raw[1 : len(raw)-1]
	for _, c := range plain {
		if c == '\\' || c == '"' || c < 0x20 {
			var s string
			err := json.Unmarshal(raw, &s)
			return s, err == nil
		}
	}
	if !utf8.Valid(plain) {
		return "", false
	}
	return string(plain), true
}

// parseNumber reads a decimal number as exactly as it can be kept.
func parseNumber(s string) (Value, bool) {
	whole := true
	for i := range len(s) {
		switch c := s[i]; {
		case c >= '0' && c <= '9' || (c == '-' || c == '+') && i == 0:
		case c == '.' || c == 'e' || c == 'E' || c == '-' || c == '+':
			whole = false
		default:
			return Value{}, false
		}
	}
	if whole {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil {
			return Value{Kind: Number, Int: n}, true
		}
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return Value{}, false
	}
	return Value{Kind: Number, Float: f, IsFloat: true}, true
}
