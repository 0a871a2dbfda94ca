package tool

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

const citySchema = `{"type":"object","properties":{
	"city":{"type":"string","minLength":1},"days":{"type":"integer","minimum":1,"maximum":7},
	"unit":{"enum":["c","f"]},"near":{"type":"array","items":{"type":"object","properties":{"km":{"type":"number","multipleOf":0.5}}}}
	},"required":["city"],"additionalProperties":false}`

func cityTool(t testing.TB, c *Client) *Tool {
	t.Helper()
	tool, err := Compile(Definition{Name: "city", Parameters: Schema(citySchema), MaxArgumentBytes: 128 << 10,
		HTTP: HTTP{URL: "https://example.com"}}, c, FromOperator)
	if err != nil {
		t.Fatal(err)
	}
	return tool
}

func TestValidate(t *testing.T) {
	tool := cityTool(t, newWorld().client(t, newHandClock()))
	many := `{"city":"a","near":[` + strings.TrimSuffix(strings.Repeat("1,", 20), ",") + "]}"
	tests := []struct {
		name, args string
		says       []string // none: valid
	}{
		{"valid", `{"city":"Oslo","days":3,"unit":"c","near":[{"km":1.5}]}`, nil},
		{"whole number with a fraction sign", `{"city":"Oslo","days":3.0}`, nil},
		{"empty text counts as no arguments", " \n", []string{"top level", "city"}},
		{"missing", `{}`, []string{"top level", "missing", "city"}},
		{"wrong type", `{"city":7}`, []string{"/city", "number", "string"}},
		{"out of range", `{"city":"a","days":8}`, []string{"/days", "maximum", "7"}},
		{"not in the list", `{"city":"a","unit":"k"}`, []string{"/unit", "'c', 'f'"}},
		{"unknown", `{"city":"a","town":"b"}`, []string{"additional properties", "town"}},
		{"deep inside", `{"city":"a","near":[{"km":1},{"km":0.3}]}`, []string{"/near/1/km", "0.5"}},
		{"two things", `{"city":"","days":0}`, []string{"/city", "/days"}},
		{"many things", many, []string{"/near/0", "and more"}},
		{"not an object", `["Oslo"]`, []string{"one JSON object"}},
		{"null", `null`, []string{"one JSON object"}},
		{"cut off", `{"city":"Os`, []string{"not valid JSON", "ends too early"}},
		{"malformed", `{"city":Oslo}`, []string{"not valid JSON", "at byte 9"}},
		{"two values", `{"city":"a"}{"city":"b"}`, []string{"follows the first value"}},
		{"too deep", `{"city":` + strings.Repeat("[", 64) + strings.Repeat("]", 64) + `}`, []string{"deeper than 64"}},
		{"brackets in text are not depth", `{"city":"` + strings.Repeat(`[\"`, 100) + `"}`, nil},
		{"too many values", `{"city":"a","near":[` + strings.Repeat("1,", MaxArgumentValues) + `1]}`, []string{"more than 32768 values"}},
		{"too large", `{"city":"` + strings.Repeat("a", 128<<10) + `"}`, []string{"131083 bytes", "at most 131072"}},
		{"vast exponent", `{"city":"a","days":1e400}`, []string{"1e400", "exponents"}},
		{"exponent beyond an int", `{"city":"a","days":1e99999999999999999999}`, []string{"exponents"}},
		{"long number", `{"city":"a","days":` + strings.Repeat("1", 65) + `}`, []string{"65 digits"}},
		{"not UTF-8", "{\"city\":\"\xff\"}", []string{"UTF-8"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tool.Validate(tt.args)
			if len(tt.says) == 0 {
				if err != nil {
					t.Fatalf("got %v, want no error", err)
				}
				return
			}
			if err == nil {
				t.Fatal("got no error")
			}
			for _, s := range tt.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%q does not say %q", err, s)
				}
			}
		})
	}
}

func TestCutKeepsRunesWhole(t *testing.T) {
	for n := range 8 {
		if got := cut("aæ€😀z", n); !utf8.ValidString(got) || len(got) > n+len("…") {
			t.Errorf("cut at %d gives %q", n, got)
		}
	}
	if got := cut("aæ", 3); got != "aæ" {
		t.Errorf("got %q, want the text as it is", got)
	}
}

// FuzzValidate: arguments of a model never panic, and what is accepted is one
// JSON object within the bounds.
func FuzzValidate(f *testing.F) {
	for _, s := range []string{`{"city":"Oslo"}`, `{}`, ``, `{"city":1e5,"days":-0.0}`, `{"near":[{"km":1e308}]}`, `[[[[`, `{"a":"\ud800"}`, `"`, "{\"city\":\"\x00\"}", `{"city":"a","city":2}`} {
		f.Add(s)
	}
	c, err := NewClient(Options{Clock: newHandClock(), Dialer: newWorld(), Resolver: newWorld()})
	if err != nil {
		f.Fatal(err)
	}
	tool := cityTool(f, c)
	f.Fuzz(func(t *testing.T, args string) {
		err := tool.Validate(args)
		if err != nil {
			if msg := err.Error(); len(msg) > (maxValidationErrors+1)*(maxValidationErrorBytes+8) {
				t.Errorf("a message of %d bytes", len(msg))
			}
			return
		}
		if len(args) > 128<<10 || !json.Valid([]byte(args)) || nesting([]byte(args)) > MaxArgumentDepth {
			t.Errorf("accepted %q", args)
		}
	})
}

// FuzzCompile: a definition from the API never panics, and what compiles can
// validate and make requests without a panic and without leaving its host.
func FuzzCompile(f *testing.F) {
	for _, s := range []string{
		`{"name":"a","http":{"url":"https://example.com/{id}?q=1"},"parameters":{"type":"object","properties":{"id":{}},"required":["id"]}}`,
		`{"name":"a","parameters":{"type":"object","$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}},"http":{"url":"http://h"}}`,
		`{"name":"a","parameters":{"type":"object","properties":{"a":{"pattern":"^a+$","multipleOf":0.1}}},"http":{"url":"http://[::1]:8080/","method":"GET"}}`,
		`{"name":"a","http":{"url":"http://h:1","timeout":"3s","headers":{"X-A":"$$${B}"},"allow_hosts":["h:1","i"]}}`,
		`{"name":"a","parameters":{"type":"object","$schema":"http://json-schema.org/draft-07/schema#","dependencies":{"a":["b"]}},"http":{"url":"http://h"}}`,
	} {
		f.Add([]byte(s), `{"id":"../x","a":"aa"}`)
	}
	c, err := NewClient(Options{Clock: newHandClock(), Dialer: newWorld(), Resolver: newWorld(), Secrets: secrets})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte, args string) {
		var def Definition
		if json.Unmarshal(text, &def) != nil {
			return
		}
		tool, err := Compile(def, c, FromAPI)
		if err != nil {
			return
		}
		if !json.Valid(tool.Schema()) {
			t.Errorf("the element is not JSON: %s", tool.Schema())
		}
		obj, err := tool.arguments(args)
		if err != nil {
			return
		}
		req, err := tool.request(t.Context(), obj, "key")
		if err != nil {
			return
		}
		if p, err := tool.route(req.URL); err != nil || p != publicOnly {
			t.Errorf("%s goes to policy %d, %v", req.URL, p, err)
		}
	})
}
