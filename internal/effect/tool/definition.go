// Package tool compiles and calls the HTTP tools that an agent's model may
// use. A Definition comes from the config or the API; Compile checks it once
// and gives a Tool; Tool.Call checks one set of arguments, sends one request
// and turns whatever happens into a Result, because a failed call is an answer
// for the model and not an error of the engine.
//
// Arguments come from a model and are hostile by assumption: they are bounded,
// validated, re-encoded before they are sent, and can never choose the host.
// Where a request may go is decided twice: the authority of every hop must be
// on the tool's list, and the address that is dialled must be a public one
// (see guard.go), so a name that resolves differently each time gains nothing.
package tool

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// Bounds of definitions and calls. A definition may lower or raise those
// named Default up to the Max beside them.
const (
	MaxToolsPerAgent        = 128
	MaxDescriptionBytes     = 4 << 10
	MaxSchemaBytes          = 64 << 10
	MaxSchemaDepth          = 32
	MaxSchemaNodes          = 4096 // objects and arrays, each $ref counted as a copy
	MaxHeaders              = 32
	MaxHeaderValueBytes     = 8 << 10
	MaxAllowHosts           = 32
	MaxURLBytes             = 8 << 10 // of the configured and of the final URL
	MaxRedirects            = 5
	MaxArgumentDepth        = 64
	MaxIdempotencyKeyBytes  = 255
	DefaultArgumentBytes    = 256 << 10
	MaxArgumentBytes        = 1 << 20
	MaxArgumentValues       = 32 << 10 // values in the arguments, each element of a list counted
	DefaultResponseBytes    = 256 << 10
	MaxResponseBytes        = 4 << 20
	MaxErrorExcerptBytes    = 4 << 10 // of the body of an answer that is not 2xx
	DefaultTimeout          = 30 * time.Second
	MaxTimeout              = 10 * time.Minute
	maxResponseHeaderBytes  = 64 << 10
	maxNumberBytes          = 64
	maxNumberExponent       = 308
	maxValidationErrors     = 8
	maxValidationErrorBytes = 512
)

// Definition describes one tool as the config or the API gives it. The zero
// value of every optional field means its default.
type Definition struct {
	// Name is what the model calls: letters, digits, _ and -, 1 to 64 of them.
	Name string `json:"name" yaml:"name"`
	// Description tells the model what the tool is for.
	Description string `json:"description,omitempty" yaml:"description,omitempty"`
	// Parameters is the JSON Schema of the arguments, an object. Empty means
	// that the tool takes no arguments.
	Parameters Schema `json:"parameters,omitempty" yaml:"parameters,omitempty"`
	// MaxArgumentBytes bounds the arguments of one call; default 256 KiB.
	MaxArgumentBytes int `json:"max_argument_bytes,omitempty" yaml:"max_argument_bytes,omitempty"`
	// HTTP says which request a call makes.
	HTTP HTTP `json:"http" yaml:"http"`
}

// HTTP describes the request of a tool.
//
// GET and DELETE carry the arguments in the query, POST, PUT and PATCH as a
// JSON body. An argument named by a {placeholder} in the path goes there
// instead.
type HTTP struct {
	// Method is GET, POST, PUT, PATCH or DELETE; default POST.
	Method string `json:"method,omitempty" yaml:"method,omitempty"`
	// URL is absolute, http or https. Its path may hold {name} placeholders,
	// each a required argument; no other part of it can be chosen by a call.
	URL string `json:"url" yaml:"url"`
	// Headers are sent with every request. ${NAME} in a value is replaced by
	// the secret NAME; $$ is a plain dollar sign.
	Headers map[string]string `json:"headers,omitempty" yaml:"headers,omitempty"`
	// Timeout bounds the whole call with its redirects; default 30 s.
	Timeout Duration `json:"timeout,omitempty" yaml:"timeout,omitempty"`
	// MaxResponseBytes bounds the body kept of an answer; default 256 KiB.
	MaxResponseBytes int `json:"max_response_bytes,omitempty" yaml:"max_response_bytes,omitempty"`
	// AllowHosts lists where the request and its redirects may go, as host
	// (the standard port of the scheme) or host:port. Default: the host and
	// port of URL. A given list must hold them too.
	AllowHosts []string `json:"allow_hosts,omitempty" yaml:"allow_hosts,omitempty"`
	// AllowPrivate lets the hosts of the list resolve to loopback, private and
	// other non-public addresses. Addresses of cloud metadata services stay
	// refused unless URL names one literally.
	AllowPrivate bool `json:"allow_private,omitempty" yaml:"allow_private,omitempty"`
}

// Duration is a time.Duration written as text ("1m30s") in JSON and YAML.
type Duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%.64q is not a duration; allowed: a number with a unit, such as 500ms, 30s or 2m", text)
	}
	*d = Duration(v)
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Schema is a JSON Schema as JSON text. In YAML it is written as a mapping.
type Schema json.RawMessage

// UnmarshalJSON implements json.Unmarshaler. The text is checked by Compile.
func (s *Schema) UnmarshalJSON(b []byte) error {
	*s = bytes.Clone(b)
	return nil
}

// MarshalJSON implements json.Marshaler.
func (s Schema) MarshalJSON() ([]byte, error) {
	if len(s) == 0 {
		return []byte("null"), nil
	}
	return s, nil
}

// Error says what is wrong with a definition. It never holds a secret.
type Error struct {
	Path    string // of the bad key, such as http.url
	Problem string // what is wrong and what is allowed
}

// Error implements error.
func (e *Error) Error() string { return e.Path + ": " + e.Problem }

func bad(path, format string, args ...any) *Error {
	return &Error{Path: cut(path, 256), Problem: fmt.Sprintf(format, args...)}
}
