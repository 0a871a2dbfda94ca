package flow

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"github.com/perdure-dev/perdure/internal/jsontext"
	"github.com/perdure-dev/perdure/internal/wire"
)

// None is the input or output of what has none.
type None = struct{}

// Encode gives the JSON text that stands for v: what encoding/json gives, by a
// short way for strings, numbers, booleans and bytes. A json.RawMessage passes
// as it is.
func Encode[T any](v T) ([]byte, error) {
	switch x := any(v).(type) {
	case string:
		return jsontext.AppendString(make([]byte, 0, len(x)+2), x), nil
	case int:
		return strconv.AppendInt(make([]byte, 0, 20), int64(x), 10), nil
	case int64:
		return strconv.AppendInt(make([]byte, 0, 20), x, 10), nil
	case int32:
		return strconv.AppendInt(make([]byte, 0, 11), int64(x), 10), nil
	case uint64:
		return strconv.AppendUint(make([]byte, 0, 20), x, 10), nil
	case bool:
		return strconv.AppendBool(make([]byte, 0, 5), x), nil
	case []byte:
		if x == nil {
			return []byte("null"), nil
		}
		b := append(make([]byte, 0, base64.StdEncoding.EncodedLen(len(x))+2), '"')
		return append(base64.StdEncoding.AppendEncode(b, x), '"'), nil
	case json.RawMessage:
		if !json.Valid(x) {
			return nil, fmt.Errorf("flow: a json.RawMessage of %d bytes is not JSON", len(x))
		}
		return x, nil
	}
	return marshal(v)
}

// marshal is apart so that v escapes to the heap only here.
func marshal(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("flow: a %T cannot be stored as JSON: %w", v, err)
	}
	return b, nil
}

// Decode reads what Encode wrote. No bytes at all are the zero value.
func Decode[T any](b []byte) (T, error) {
	var v T
	if len(b) == 0 || decodeFast(&v, b) {
		return v, nil
	}
	return unmarshal[T](b)
}

// unmarshal is apart so that the value is on the heap only here.
func unmarshal[T any](b []byte) (T, error) {
	var v T
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("flow: stored JSON of %d bytes is not a %s: %w", len(b), reflect.TypeFor[T](), err)
	}
	return v, nil
}

// decodeFast takes the common forms of the common types; it leaves whatever is
// unusual, and all that is wrong, to encoding/json.
func decodeFast(v any, b []byte) bool {
	switch p := v.(type) {
	case *string:
		if !plain(b) {
			return false
		}
		*p = string(b[1 : len(b)-1])
	case *int:
		n, ok := parseInt(b)
		if !ok {
			return false
		}
		*p = int(n)
	case *int64:
		n, ok := parseInt(b)
		if !ok {
			return false
		}
		*p = n
	case *bool:
		*p = string(b) == "true"
		return *p || string(b) == "false"
	case *[]byte:
		if !plain(b) {
			return false
		}
		out, err := base64.StdEncoding.AppendDecode([]byte{}, b[1:len(b)-1])
		if err != nil {
			return false
		}
		*p = out
	case *json.RawMessage:
		*p = b
		return json.Valid(b)
	case *None:
	default:
		return false
	}
	return true
}

// plain says that b is a JSON string without escapes, of ASCII only.
func plain(b []byte) bool {
	if len(b) < 2 || b[0] != '"' || b[len(b)-1] != '"' {
		return false
	}
	for _, c := range b[1 : len(b)-1] {
		if c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// parseInt reads up to 18 digits, as JSON writes them.
func parseInt(b []byte) (int64, bool) {
	digits, neg := b, false
	if b[0] == '-' {
		digits, neg = b[1:], true
	}
	if len(digits) == 0 || len(digits) > 18 || digits[0] == '0' && len(digits) > 1 {
		return 0, false
	}
	n := int64(0)
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	if neg {
		n = -n
	}
	return n, true
}

// encodeInput is Encode, but None is no bytes at all.
func encodeInput[T any](v T) ([]byte, error) {
	if _, ok := any(v).(None); ok {
		return nil, nil
	}
	return Encode(v)
}

// typeName says in a word what T is, for people.
func typeName[T any]() string {
	t := reflect.TypeFor[T]()
	switch {
	case t == reflect.TypeFor[time.Time]():
		return "time"
	case t == reflect.TypeFor[[]byte]():
		return "bytes"
	case t == reflect.TypeFor[json.RawMessage]():
		return "json"
	}
	switch t.Kind() {
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "bool"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "int"
	case reflect.Float32, reflect.Float64:
		return "float"
	}
	return "json"
}

// indexFor gives how values of T are searched for.
func indexFor[T any]() (wire.Attribute_Index, bool) {
	switch typeName[T]() {
	case "string":
		return wire.Attribute_KEYWORD, true
	case "int":
		return wire.Attribute_INT, true
	case "float":
		return wire.Attribute_FLOAT, true
	case "bool":
		return wire.Attribute_BOOL, true
	case "time":
		return wire.Attribute_TIME, true
	}
	if t := reflect.TypeFor[T](); t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.String {
		return wire.Attribute_KEYWORD, true
	}
	return wire.Attribute_NONE, false
}
