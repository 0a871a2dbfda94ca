package tool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// noParameters is the schema of a tool that takes no arguments.
const noParameters = `{"type":"object","properties":{},"additionalProperties":false}`

// schemaURL names the schema inside the compiler; nothing is loaded from it.
const schemaURL = "tool:parameters"

// drafts are the dialects a schema may name. Older ones give "id" a meaning
// that the checks below do not follow.
var drafts = []string{
	"https://json-schema.org/draft/2020-12/schema",
	"https://json-schema.org/draft/2019-09/schema",
	"http://json-schema.org/draft-07/schema",
	"http://json-schema.org/draft-06/schema",
}

// parameters is a checked schema. It is immutable.
type parameters struct {
	text       json.RawMessage // compact, keys in the order given
	schema     *jsonschema.Schema
	properties map[string]bool // named at the top level
	required   []string
}

// compileParameters checks the schema and compiles it. What it refuses beyond
// plain invalidity is what would make validation load something or cost more
// than its size suggests: references that leave the schema, that recurse, or
// that multiply.
func compileParameters(text Schema) (*parameters, error) {
	if len(bytes.TrimSpace(text)) == 0 || string(bytes.TrimSpace(text)) == "null" {
		text = Schema(noParameters)
	}
	if len(text) > MaxSchemaBytes {
		return nil, bad("parameters", "the schema has %d bytes; allowed: at most %d", len(text), MaxSchemaBytes)
	}
	doc, err := decodeJSON(text, MaxSchemaDepth)
	if err != nil {
		return nil, bad("parameters", "the schema %s", err)
	}
	root, ok := doc.(map[string]any)
	if !ok || root["type"] != "object" {
		return nil, bad("parameters", `the schema must be an object with "type": "object", because arguments are named`)
	}
	w := schemaWalk{root: doc, costs: map[string]int{}}
	if _, err := w.cost(doc, ""); err != nil {
		return nil, err
	}
	sch, err := compileSchema(doc)
	if err != nil {
		return nil, err
	}
	p := &parameters{schema: sch, properties: map[string]bool{}}
	if props, ok := root["properties"].(map[string]any); ok {
		for name := range props {
			p.properties[name] = true
		}
	}
	if req, ok := root["required"].([]any); ok {
		for _, r := range req {
			if name, ok := r.(string); ok {
				p.required = append(p.required, name)
			}
		}
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return nil, bad("parameters", "the schema is not JSON: %v", err)
	}
	p.text = compact.Bytes()
	return p, nil
}

// refuseLoader is the compiler's way out to files and network: closed.
type refuseLoader struct{}

func (refuseLoader) Load(string) (any, error) {
	return nil, errors.New("a schema is never loaded from elsewhere")
}

func compileSchema(doc any) (*jsonschema.Schema, error) {
	c := jsonschema.NewCompiler()
	c.UseLoader(refuseLoader{})
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, bad("parameters", "the schema cannot be used: %s", cut(err.Error(), maxValidationErrorBytes))
	}
	sch, err := c.Compile(schemaURL)
	if err == nil {
		return sch, nil
	}
	var invalid *jsonschema.SchemaValidationError
	var ve *jsonschema.ValidationError
	if errors.As(err, &invalid) && errors.As(invalid.Err, &ve) {
		return nil, bad("parameters", "not a valid JSON Schema: %s", explain(ve))
	}
	return nil, bad("parameters", "the schema cannot be compiled: %s", cut(err.Error(), maxValidationErrorBytes))
}

// schemaWalk measures a schema with every reference written out.
type schemaWalk struct {
	root  any
	costs map[string]int // by reference, once measured
	open  []string       // references on the way to where the walk is
}

// cost counts the objects and arrays under v, which is at the JSON pointer at.
func (w *schemaWalk) cost(v any, at string) (int, error) {
	total := 1
	add := func(child any, key string) error {
		n, err := w.cost(child, at+"/"+strings.NewReplacer("~", "~0", "/", "~1").Replace(key))
		if err != nil {
			return err
		}
		if total += n; total > MaxSchemaNodes {
			return bad("parameters", "the schema has more than %d objects and lists when its references are written out; allowed: at most that", MaxSchemaNodes)
		}
		return nil
	}
	switch v := v.(type) {
	case map[string]any:
		if n, err := w.keywords(v, at); err != nil {
			return 0, err
		} else {
			total += n
		}
		for _, key := range sortedKeys(v) {
			if err := add(v[key], key); err != nil {
				return 0, err
			}
		}
	case []any:
		for i, e := range v {
			if err := add(e, strconv.Itoa(i)); err != nil {
				return 0, err
			}
		}
	default:
		return 0, nil
	}
	return total, nil
}

// keywords checks the keywords that lead elsewhere. It looks at every object,
// examples and defaults included: to be strict there costs little, and to tell
// data from schema would need each dialect's rules.
func (w *schemaWalk) keywords(v map[string]any, at string) (int, error) {
	for _, key := range []string{"$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor", "$vocabulary"} {
		if _, isText := v[key].(string); isText {
			return 0, bad("parameters"+at+"/"+key, "not supported; allowed: $ref to a place in the same schema, such as #/$defs/name")
		}
	}
	if s, ok := v["$schema"].(string); ok {
		if at != "" || !slices.Contains(drafts, strings.TrimSuffix(s, "#")) {
			return 0, bad("parameters"+at+"/$schema", "%.128q is not supported; allowed, at the top: %s", s, strings.Join(drafts, ", "))
		}
	}
	ref, ok := v["$ref"].(string)
	if !ok {
		return 0, nil
	}
	return w.reference(ref, at+"/$ref")
}

func (w *schemaWalk) reference(ref, at string) (int, error) {
	if !strings.HasPrefix(ref, "#/") {
		if ref == "#" {
			return 0, bad("parameters"+at, "a reference to the whole schema recurses; allowed: references that end")
		}
		return 0, bad("parameters"+at, "%.128q leaves the schema; allowed: a place in the same schema, such as #/$defs/name", ref)
	}
	if slices.Contains(w.open, ref) {
		return 0, bad("parameters"+at, "%.128q recurses; allowed: references that end (write the levels out)", ref)
	}
	if n, ok := w.costs[ref]; ok {
		return n, nil
	}
	if len(w.open) >= MaxSchemaDepth {
		return 0, bad("parameters"+at, "references follow each other more than %d deep", MaxSchemaDepth)
	}
	target, ok := resolvePointer(w.root, ref[1:])
	if !ok {
		return 0, bad("parameters"+at, "%.128q points to nothing in the schema", ref)
	}
	w.open = append(w.open, ref)
	n, err := w.cost(target, at)
	w.open = w.open[:len(w.open)-1]
	if err != nil {
		return 0, err
	}
	w.costs[ref] = n
	return n, nil
}

// resolvePointer follows a JSON pointer (RFC 6901) written as a URL fragment.
func resolvePointer(v any, pointer string) (any, bool) {
	pointer, err := url.PathUnescape(pointer)
	if err != nil {
		return nil, false
	}
	for tok := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		tok = strings.NewReplacer("~1", "/", "~0", "~").Replace(tok)
		switch node := v.(type) {
		case map[string]any:
			next, ok := node[tok]
			if !ok {
				return nil, false
			}
			v = next
		case []any:
			i, err := strconv.Atoi(tok)
			if err != nil || i < 0 || i >= len(node) {
				return nil, false
			}
			v = node[i]
		default:
			return nil, false
		}
	}
	return v, true
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// toolElement is an element of the tools array of the Chat Completions API.
func toolElement(name, description string, params json.RawMessage) (json.RawMessage, error) {
	type function struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	out, err := json.Marshal(struct {
		Type     string   `json:"type"`
		Function function `json:"function"`
	}{"function", function{name, description, params}})
	if err != nil {
		return nil, fmt.Errorf("encode the tool for the model: %w", err)
	}
	return out, nil
}
