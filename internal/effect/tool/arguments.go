package tool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// Validate checks the arguments of one call against the bounds and the schema.
// The error is written for the model that made the call: where, and what is
// wrong there. Empty text counts as {}, because models send it for tools
// without arguments. It never panics and is safe for concurrent use.
func (t *Tool) Validate(args string) error {
	_, err := t.arguments(args)
	return err
}

// arguments decodes and validates.
func (t *Tool) arguments(args string) (map[string]any, error) {
	if len(args) > t.maxArgumentBytes {
		return nil, fmt.Errorf("the arguments have %d bytes; allowed: at most %d", len(args), t.maxArgumentBytes)
	}
	if strings.TrimSpace(args) == "" {
		args = "{}"
	}
	v, err := decodeJSON([]byte(args), MaxArgumentDepth)
	if err != nil {
		return nil, fmt.Errorf("the arguments text %w", err)
	}
	obj, ok := v.(map[string]any)
	if !ok {
		return nil, errors.New("the arguments must be one JSON object, such as {\"name\": \"value\"}")
	}
	if err := t.params.schema.Validate(v); err != nil {
		var ve *jsonschema.ValidationError
		if errors.As(err, &ve) {
			return nil, errors.New(explain(ve))
		}
		return nil, errors.New(cut(err.Error(), maxValidationErrorBytes))
	}
	return obj, nil
}

// explain lists the innermost causes, at most maxValidationErrors of them.
func explain(ve *jsonschema.ValidationError) string {
	var lines []string
	more := false
	var walk func(e *jsonschema.ValidationError)
	walk = func(e *jsonschema.ValidationError) {
		if len(e.Causes) == 0 {
			if len(lines) == maxValidationErrors {
				more = true
				return
			}
			line := strings.Replace(e.Error(), "at ''", "at the top level", 1)
			lines = append(lines, cut(line, maxValidationErrorBytes))
			return
		}
		for _, c := range e.Causes {
			if more {
				return
			}
			walk(c)
		}
	}
	walk(ve)
	if more {
		lines = append(lines, "and more")
	}
	return strings.Join(lines, "; ")
}

// decodeJSON decodes exactly one JSON value with numbers kept as written. It
// bounds depth, count, and the size of numbers: the validator computes with exact
// fractions, where 1e999999 is a million digits. Errors continue a sentence
// that begins with what the text is.
func decodeJSON(text []byte, maxDepth int) (any, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("is not valid UTF-8")
	}
	if nesting(text) > maxDepth {
		return nil, fmt.Errorf("is nested deeper than %d levels", maxDepth)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		var syntax *json.SyntaxError
		switch {
		case errors.As(err, &syntax):
			return nil, fmt.Errorf("is not valid JSON: at byte %d: %s", syntax.Offset, err)
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errors.New("is not valid JSON: it ends too early")
		}
		return nil, fmt.Errorf("is not valid JSON: %s", cut(err.Error(), maxValidationErrorBytes))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("is not valid JSON: something follows the first value")
	}
	left := MaxArgumentValues
	return v, checkValues(v, &left)
}

// nesting is the deepest level of brackets outside strings.
func nesting(text []byte) int {
	depth, deepest, inString := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			depth++
			deepest = max(deepest, depth)
		case c == '}' || c == ']':
			depth--
		}
	}
	return deepest
}

// checkValues bounds how many values v holds, and each number. Validation
// takes microseconds for a value, and far more for one that is wrong in
// several ways, so bytes alone are too weak a bound.
func checkValues(v any, left *int) error {
	if *left--; *left < 0 {
		return fmt.Errorf("holds more than %d values", MaxArgumentValues)
	}
	switch v := v.(type) {
	case map[string]any:
		for _, e := range v {
			if err := checkValues(e, left); err != nil {
				return err
			}
		}
	case []any:
		for _, e := range v {
			if err := checkValues(e, left); err != nil {
				return err
			}
		}
	case json.Number:
		return checkNumber(string(v))
	}
	return nil
}

func checkNumber(n string) error {
	if len(n) > maxNumberBytes {
		return fmt.Errorf("holds a number of %d digits; allowed: at most %d", len(n), maxNumberBytes)
	}
	if i := strings.IndexAny(n, "eE"); i >= 0 {
		if e, err := strconv.Atoi(n[i+1:]); err != nil || e > maxNumberExponent || e < -maxNumberExponent {
			return fmt.Errorf("holds the number %s; allowed: exponents from -%d to %d", n, maxNumberExponent, maxNumberExponent)
		}
	}
	return nil
}

// cut shortens s to at most n bytes at a rune's edge, marking that it did.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return trimRune(s[:n]) + "…"
}

// trimRune drops a rune that was cut at the end of s.
func trimRune(s string) string {
	for i := 1; i <= utf8.UTFMax && i <= len(s); i++ {
		if c := s[len(s)-i]; utf8.RuneStart(c) {
			if !utf8.FullRuneInString(s[len(s)-i:]) {
				return s[:len(s)-i]
			}
			break
		}
	}
	return s
}
