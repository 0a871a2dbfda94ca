package tool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// UnmarshalYAML implements yaml.Unmarshaler: it writes the mapping as JSON in
// the order of its keys, which is the order the model will read. Dates stay
// the text they were written as. Size and depth are bounded while writing, so
// an alias that repeats itself cannot grow without limit.
func (s *Schema) UnmarshalYAML(n *yaml.Node) error {
	var b bytes.Buffer
	if err := writeYAML(&b, n, 0); err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	*s = b.Bytes()
	return nil
}

// MarshalYAML implements yaml.Marshaler.
func (s Schema) MarshalYAML() (any, error) {
	if len(s) == 0 {
		return nil, nil
	}
	// JSON is YAML: parsing it as such keeps the order of the keys.
	var n yaml.Node
	if err := yaml.Unmarshal(s, &n); err != nil {
		return nil, err
	}
	if n.Kind == yaml.DocumentNode && len(n.Content) == 1 {
		return n.Content[0], nil
	}
	return &n, nil
}

func writeYAML(b *bytes.Buffer, n *yaml.Node, depth int) error {
	if depth > MaxSchemaDepth {
		return fmt.Errorf("the schema is nested deeper than %d levels", MaxSchemaDepth)
	}
	if b.Len() > MaxSchemaBytes {
		return fmt.Errorf("the schema is larger than %d bytes", MaxSchemaBytes)
	}
	switch n.Kind {
	case yaml.AliasNode:
		return writeYAML(b, n.Alias, depth+1)
	case yaml.MappingNode:
		return writeYAMLMapping(b, n, depth)
	case yaml.SequenceNode:
		b.WriteByte('[')
		for i, e := range n.Content {
			if i > 0 {
				b.WriteByte(',')
			}
			if err := writeYAML(b, e, depth+1); err != nil {
				return err
			}
		}
		b.WriteByte(']')
		return nil
	case yaml.ScalarNode:
		return writeYAMLScalar(b, n)
	}
	return errors.New("the schema holds something that is neither mapping, sequence nor scalar")
}

func writeYAMLMapping(b *bytes.Buffer, n *yaml.Node, depth int) error {
	b.WriteByte('{')
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Kind != yaml.ScalarNode || key.Tag == "!!merge" {
			return fmt.Errorf("line %d: keys of a schema are plain text; merge keys (<<) are not supported", key.Line)
		}
		if seen[key.Value] {
			return fmt.Errorf("line %d: the key %.64q is given twice", key.Line, key.Value)
		}
		seen[key.Value] = true
		if i > 0 {
			b.WriteByte(',')
		}
		writeText(b, key.Value)
		b.WriteByte(':')
		if err := writeYAML(b, n.Content[i+1], depth+1); err != nil {
			return err
		}
	}
	b.WriteByte('}')
	return nil
}

func writeYAMLScalar(b *bytes.Buffer, n *yaml.Node) error {
	switch n.ShortTag() {
	case "!!null":
		b.WriteString("null")
	case "!!bool":
		var v bool
		if err := n.Decode(&v); err != nil {
			return err
		}
		b.WriteString(strconv.FormatBool(v))
	case "!!int", "!!float":
		if json.Valid([]byte(n.Value)) {
			b.WriteString(n.Value) // as written: no digit is lost
			return nil
		}
		var v any // 0x10, 1_000, .5, .inf
		if err := n.Decode(&v); err != nil {
			return err
		}
		out, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("line %d: %.64q is not a number of JSON", n.Line, n.Value)
		}
		b.Write(out)
	case "!!str", "!!timestamp":
		writeText(b, n.Value)
	default:
		return fmt.Errorf("line %d: the tag %.64q has no form in JSON", n.Line, n.Tag)
	}
	return nil
}

// writeText writes s as a JSON string without HTML escapes.
func writeText(b *bytes.Buffer, s string) {
	var one bytes.Buffer
	enc := json.NewEncoder(&one)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always has a JSON form
	b.WriteString(strings.TrimSuffix(one.String(), "\n"))
}
