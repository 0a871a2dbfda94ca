package tool

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

func TestCompileRefuses(t *testing.T) {
	c := newWorld().client(t, newHandClock())
	http := func(h HTTP) Definition { return Definition{Name: "n", HTTP: h} }
	at := func(url string) Definition { return http(HTTP{URL: url}) }
	header := func(name, value string) Definition {
		return http(HTTP{URL: "https://example.com", Headers: map[string]string{name: value}})
	}
	schema := func(s string) Definition {
		return Definition{Name: "n", Parameters: Schema(s), HTTP: HTTP{URL: "https://example.com"}}
	}
	manyHeaders := map[string]string{}
	for i := range MaxHeaders + 1 {
		manyHeaders[fmt.Sprintf("X-%d", i)] = "v"
	}
	tests := []struct {
		name string
		def  Definition
		path string
		says string
	}{
		{"no name", Definition{}, "name", "letters, digits"},
		{"name with a space", Definition{Name: "a b"}, "name", `"a b"`},
		{"long name", Definition{Name: strings.Repeat("a", 65)}, "name", "1 to 64"},
		{"name with a line end", Definition{Name: "a\n"}, "name", "allowed"},
		{"long description", Definition{Name: "n", Description: strings.Repeat("d", MaxDescriptionBytes+1)}, "description", "4096"},
		{"argument bound", Definition{Name: "n", MaxArgumentBytes: -1}, "max_argument_bytes", "1 to"},

		{"schema is no JSON", schema(`{"type":`), "parameters", "ends too early"},
		{"schema is not an object", schema(`{"type":"array"}`), "parameters", `"type": "object"`},
		{"schema is a boolean", schema(`true`), "parameters", `"type": "object"`},
		{"schema is invalid", schema(`{"type":"object","properties":{"a":{"type":"text"}}}`), "parameters", "/properties/a/type"},
		{"schema with a bad pattern", schema(`{"type":"object","properties":{"a":{"pattern":"("}}}`), "parameters", "pattern"},
		{"large schema", schema(`{"type":"object","title":"` + strings.Repeat("x", MaxSchemaBytes) + `"}`), "parameters", "65536"},
		{"deep schema", schema(`{"type":"object","not":` + strings.Repeat(`{"not":`, MaxSchemaDepth) + "{}" + strings.Repeat("}", MaxSchemaDepth+1)), "parameters", "deeper than 32"},
		{"schema with two values", schema(`{"type":"object"} {}`), "parameters", "follows"},
		{"schema with a vast number", schema(`{"type":"object","properties":{"a":{"maximum":1e999999}}}`), "parameters", "exponents"},
		{"remote reference", schema(`{"type":"object","properties":{"a":{"$ref":"https://example.com/s.json"}}}`), "parameters/properties/a/$ref", "same schema"},
		{"file reference", schema(`{"type":"object","properties":{"a":{"$ref":"file:///etc/passwd"}}}`), "parameters/properties/a/$ref", "same schema"},
		{"relative reference", schema(`{"type":"object","allOf":[{"$ref":"other.json#/a"}]}`), "parameters/allOf/0/$ref", "same schema"},
		{"reference to an anchor", schema(`{"type":"object","allOf":[{"$ref":"#name"}]}`), "parameters/allOf/0/$ref", "same schema"},
		{"reference to nothing", schema(`{"type":"object","allOf":[{"$ref":"#/$defs/a"}]}`), "parameters/allOf/0/$ref", "points to nothing"},
		{"reference to itself", schema(`{"type":"object","allOf":[{"$ref":"#"}]}`), "parameters/allOf/0/$ref", "recurses"},
		{"references in a circle", schema(`{"type":"object","$ref":"#/$defs/a","$defs":{"a":{"items":{"$ref":"#/$defs/b"}},"b":{"items":{"$ref":"#/$defs/a"}}}}`), "parameters/$ref/items/$ref/items/$ref", "recurses"},
		{"references that multiply", schema(multiplying(12)), "parameters", "4096"},
		{"dynamic reference", schema(`{"type":"object","$dynamicRef":"#a"}`), "parameters/$dynamicRef", "not supported"},
		{"own identity", schema(`{"type":"object","$id":"https://example.com/"}`), "parameters/$id", "not supported"},
		{"remote dialect", schema(`{"type":"object","$schema":"https://example.com/dialect"}`), "parameters/$schema", "2020-12"},

		{"unknown method", http(HTTP{Method: "TRACE", URL: "https://example.com"}), "http.method", "GET, POST"},
		{"lower-case method", http(HTTP{Method: "get", URL: "https://example.com"}), "http.method", "GET, POST"},
		{"negative timeout", http(HTTP{URL: "https://example.com", Timeout: -1}), "http.timeout", "10m"},
		{"long timeout", http(HTTP{URL: "https://example.com", Timeout: Duration(time.Hour)}), "http.timeout", "10m"},
		{"response bound", http(HTTP{URL: "https://example.com", MaxResponseBytes: MaxResponseBytes + 1}), "http.max_response_bytes", "1 to"},

		{"no URL", at(""), "http.url", "required"},
		{"not a URL", at("http://%zz"), "http.url", "not a URL"},
		{"no scheme", at("example.com/a"), "http.url", "http, https"},
		{"file URL", at("file:///etc/passwd"), "http.url", "http, https"},
		{"opaque URL", at("http:example.com"), "http.url", "scheme://host"},
		{"no host", at("http:///a"), "http.url", "is empty"},
		{"long URL", at("http://example.com/" + strings.Repeat("a", MaxURLBytes)), "http.url", "8192"},
		{"password in URL", at("https://user:hunter22@example.com/"), "http.url", "Authorization"},
		{"fragment", at("https://example.com/#a"), "http.url", "fragment"},
		{"secret in URL", at("https://example.com/${TOKEN}"), "http.url", "http.headers"},
		{"placeholder in host", at("https://{host}/"), "http.url", "path only"},
		{"placeholder in port", at("https://example.com:{port}/"), "http.url", ""},
		{"placeholder in query", at("https://example.com/?q={q}"), "http.url", "path only"},
		{"unknown placeholder", at("https://example.com/{id}"), "http.url", "required argument"},
		{"optional placeholder", Definition{Name: "n", Parameters: Schema(`{"type":"object","properties":{"id":{}}}`), HTTP: HTTP{URL: "https://example.com/{id}"}}, "http.url", "required argument"},
		{"empty placeholder", at("https://example.com/{}"), "http.url", "not a placeholder"},
		{"lone brace", at("https://example.com/{id"), "http.url", "brace"},
		{"port 0", at("https://example.com:0/"), "http.url", "1 to 65535"},
		{"port 65536", at("https://example.com:65536/"), "http.url", "1 to 65535"},
		{"host in another alphabet", at("https://exämple.com/"), "http.url", "xn--"},
		{"address with a zone", at("http://[fe80::1%25eth0]/"), "http.url", ""},
		{"unspecified address", at("http://0.0.0.0/"), "http.url", "unspecified"},
		{"multicast address", at("http://224.0.0.1/"), "http.url", "multicast"},
		{"query names an argument", Definition{Name: "n", Parameters: Schema(`{"type":"object","properties":{"q":{}}}`), HTTP: HTTP{Method: "GET", URL: "https://example.com/?q=1"}}, "http.url", "one of the two"},

		{"allowed host is a URL", http(HTTP{URL: "https://example.com", AllowHosts: []string{"example.com", "https://b.example"}}), "http.allow_hosts[1]", "host:port"},
		{"allowed host is empty", http(HTTP{URL: "https://example.com", AllowHosts: []string{""}}), "http.allow_hosts[0]", "host:port"},
		{"own host not allowed", http(HTTP{URL: "https://example.com", AllowHosts: []string{"b.example"}}), "http.allow_hosts", "example.com:443"},
		{"own port not allowed", http(HTTP{URL: "https://example.com:444", AllowHosts: []string{"example.com"}}), "http.allow_hosts", "example.com:444"},
		{"many hosts", http(HTTP{URL: "https://example.com", AllowHosts: make([]string, MaxAllowHosts+1)}), "http.allow_hosts", "32"},

		{"many headers", http(HTTP{URL: "https://example.com", Headers: manyHeaders}), "http.headers", "32"},
		{"header name", header("a b", "v"), "http.headers", `"a b"`},
		{"reserved header", header("host", "v"), "http.headers.host", "set by the server"},
		{"own idempotency key", header("idempotency-key", "v"), "http.headers.idempotency-key", "set by the server"},
		{"header given twice", http(HTTP{URL: "https://example.com", Headers: map[string]string{"X-A": "1", "x-a": "2"}}), "http.headers.x-a", "twice"},
		{"line end in a header", header("X-A", "a\r\nB: c"), "http.headers.X-A", "control"},
		{"long header", header("X-A", strings.Repeat("a", MaxHeaderValueBytes+1)), "http.headers.X-A", "8192"},
		{"unset secret", header("X-A", "${NONE}"), "http.headers.X-A", "NONE is not set"},
		{"empty secret", header("X-A", "${EMPTY}"), "http.headers.X-A", "EMPTY is not set"},
		{"short secret", header("X-A", "${SHORT}"), "http.headers.X-A", "SHORT is shorter"},
		{"secret of two lines", header("X-A", "${LINES}"), "http.headers.X-A", "control"},
		{"open secret", header("X-A", "${TOKEN"), "http.headers.X-A", "${NAME}"},
		{"secret without a name", header("X-A", "${}"), "http.headers.X-A", "${NAME}"},
		{"secret in a header that travels", header("User-Agent", "${TOKEN}"), "http.headers.User-Agent", "without ${NAME}"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Compile(tt.def, c, FromOperator)
			wantError(t, err, tt.path, tt.says)
			for _, secret := range []string{"s3cr3t-t0ken", "hunter22", "line\nline"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("the error shows a secret: %v", err)
				}
			}
		})
	}
}

// The compiler itself has no way out, even where the walk would miss one.
func TestCompilerLoadsNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "s.json")
	if err := os.WriteFile(file, []byte(`{}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := compileSchema(map[string]any{"$ref": "file://" + file})
	wantError(t, err, "parameters", "never loaded")
}

// multiplying is a schema of n definitions, each with two of the one before.
func multiplying(n int) string {
	var b strings.Builder
	b.WriteString(`{"type":"object","$ref":"#/$defs/d0","$defs":{`)
	for i := range n {
		fmt.Fprintf(&b, `"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]},`, i, i+1, i+1)
	}
	fmt.Fprintf(&b, `"d%d":{}}}`, n)
	return b.String()
}

func TestCompileFromAPIRefuses(t *testing.T) {
	c := newWorld().client(t, newHandClock())
	tests := []struct {
		name string
		http HTTP
		path string
	}{
		{"private hosts", HTTP{URL: "https://example.com", AllowPrivate: true}, "http.allow_private"},
		{"secret", HTTP{URL: "https://example.com", Headers: map[string]string{"X-A": "${TOKEN}"}}, "http.headers.X-A"},
		{"localhost", HTTP{URL: "http://LOCALHOST.:80/"}, "http.url"},
		{"loopback", HTTP{URL: "http://127.0.0.1/"}, "http.url"},
		{"mapped loopback", HTTP{URL: "http://[::ffff:127.0.0.1]/"}, "http.url"},
		{"metadata", HTTP{URL: "http://169.254.169.254/"}, "http.url"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			def := Definition{Name: "n", HTTP: tt.http}
			_, err := Compile(def, c, FromAPI)
			wantError(t, err, tt.path, "API")
			if _, err := Compile(def, c, FromOperator); err != nil {
				t.Errorf("from the operator: %v", err)
			}
		})
	}
	if _, err := Compile(Definition{Name: "n", HTTP: HTTP{URL: "https://example.com"}}, c, FromAPI); err != nil {
		t.Errorf("a plain definition: %v", err)
	}
}

func TestCompileAll(t *testing.T) {
	c := newWorld().client(t, newHandClock())
	def := func(name string) Definition {
		return Definition{Name: name, HTTP: HTTP{URL: "https://example.com"}}
	}
	tools, err := CompileAll([]Definition{def("a"), def("b")}, c, FromAPI)
	if err != nil || len(tools) != 2 || tools[1].Name() != "b" {
		t.Fatalf("got %v, %v", tools, err)
	}
	_, err = CompileAll([]Definition{def("a"), def("b"), def("a")}, c, FromAPI)
	wantError(t, err, "tools[2].name", "tools[0]")
	_, err = CompileAll([]Definition{def("a"), {Name: "b"}}, c, FromAPI)
	wantError(t, err, "tools[1].http.url", "required")
	_, err = CompileAll(make([]Definition, MaxToolsPerAgent+1), c, FromAPI)
	wantError(t, err, "tools", "128")
}

func TestSchemaIsAToolsElement(t *testing.T) {
	c := newWorld().client(t, newHandClock())
	tool := mustCompile(t, Definition{
		Name: "look_up", Description: "Finds <things>",
		Parameters: Schema(`{ "type": "object", "properties": {"z": {"type":"string"}, "a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}} }`),
		HTTP:       HTTP{URL: "https://example.com"},
	}, c)
	var got struct {
		Type     string
		Function struct {
			Name, Description string
			Parameters        json.RawMessage
		}
	}
	if err := json.Unmarshal(tool.Schema(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Type != "function" || got.Function.Name != "look_up" || got.Function.Description != "Finds <things>" {
		t.Errorf("got %+v", got)
	}
	want := `{"type":"object","properties":{"z":{"type":"string"},"a":{"$ref":"#/$defs/n"}},"$defs":{"n":{"type":"integer"}}}`
	if string(got.Function.Parameters) != want {
		t.Errorf("parameters %s, want %s in the order given", got.Function.Parameters, want)
	}
	none := mustCompile(t, Definition{Name: "none", HTTP: HTTP{URL: "https://example.com"}}, c)
	if !strings.Contains(string(none.Schema()), `"parameters":`+noParameters) {
		t.Errorf("a tool without parameters: %s", none.Schema())
	}
}

const yamlTool = `
name: weather
description: Weather of a city
parameters:
  type: object
  properties:
    city: {type: string, const: 2026-01-02}
    days: &n {type: integer, maximum: 7, minimum: 0x1, default: 1.50}
    more: *n
    flag: {enum: [true, null, "yes"]}
  required: [city]
http:
  method: GET
  url: https://example.com/{city}
  headers:
    Authorization: Bearer ${TOKEN}
  timeout: 1m30s
`

func TestDefinitionFromYAML(t *testing.T) {
	dec := yaml.NewDecoder(strings.NewReader(yamlTool))
	dec.KnownFields(true)
	var def Definition
	if err := dec.Decode(&def); err != nil {
		t.Fatal(err)
	}
	want := `{"type":"object","properties":{"city":{"type":"string","const":"2026-01-02"},` +
		`"days":{"type":"integer","maximum":7,"minimum":1,"default":1.50},"more":{"type":"integer","maximum":7,"minimum":1,"default":1.50},` +
		`"flag":{"enum":[true,null,"yes"]}},"required":["city"]}`
	if string(def.Parameters) != want {
		t.Errorf("parameters\n%s, want\n%s", def.Parameters, want)
	}
	if time.Duration(def.HTTP.Timeout) != 90*time.Second {
		t.Errorf("timeout %v", def.HTTP.Timeout)
	}
	mustCompile(t, def, newWorld().client(t, newHandClock()))

	// Through YAML and JSON and back nothing changes.
	text, err := yaml.Marshal(def)
	if err != nil {
		t.Fatal(err)
	}
	var again Definition
	if err := yaml.Unmarshal(text, &again); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	first, _ := json.Marshal(def)
	second, err := json.Marshal(again)
	if err != nil || string(first) != string(second) {
		t.Errorf("after YAML: %s, want %s (%v)", second, first, err)
	}
	var third Definition
	if err := json.Unmarshal(first, &third); err != nil || time.Duration(third.HTTP.Timeout) != 90*time.Second {
		t.Errorf("after JSON: %+v, %v", third, err)
	}
}

func TestDefinitionFromYAMLRefuses(t *testing.T) {
	tests := []struct{ name, yaml, says string }{
		{"unknown key", "name: n\nurl: x\n", "url"},
		{"unknown key of http", "http: {uri: x}\n", "uri"},
		{"duration without a unit", "http: {timeout: 30}\n", "500ms"},
		{"key given twice", "parameters: {a: 1, a: 2}\n", "twice"},
		{"merge key", "parameters: {<<: {a: 1}}\n", "merge"},
		{"infinite number", "parameters: {a: .inf}\n", "not a number"},
		{"binary", "parameters: {a: !!binary aGk=}\n", "no form"},
		{"cycle", "parameters: &a {b: [*a]}\n", ""},
		{"aliases that multiply", "parameters:\n  a: &a [xxxxxxxxxxxxxxxx, xxxxxxxxxxxxxxxx, xxxxxxxxxxxxxxxx]\n" +
			"  b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n  c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n  d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n  e: [*d,*d,*d]\n", "larger"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dec := yaml.NewDecoder(strings.NewReader(tt.yaml))
			dec.KnownFields(true)
			var def Definition
			err := dec.Decode(&def)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want an error with %q", err, tt.says)
			}
		})
	}
}
