package config

import (
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// setting is one value for one key path, from a variable or a flag.
type setting struct {
	path, text string
	origin     Origin
}

// lookup finds the field of a key path without touching a value. It returns
// the names of the entries on the way ("main" in providers.main.model).
func (s *section) lookup(path string) (chain []*field, names []string) {
	for _, f := range s.fields {
		if path == f.name {
			return []*field{f}, nil
		}
		rest, ok := strings.CutPrefix(path, f.name+".")
		if !ok {
			continue
		}
		switch f.kind {
		case kindSection:
			if chain, names = f.sub.lookup(rest); chain != nil {
				return append([]*field{f}, chain...), names
			}
		case kindNamed:
			if chain, names = f.lookupEntry(rest); chain != nil {
				return append([]*field{f}, chain...), names
			}
		}
	}
	return nil, nil
}

// lookupEntry splits name.key where the name itself may hold dots: the
// shortest name whose rest is a key of the entry wins.
func (f *field) lookupEntry(rest string) (chain []*field, names []string) {
	for i := 0; i < len(rest) && i <= 64; i++ {
		if rest[i] != '.' || !nameRE.MatchString(rest[:i]) {
			continue
		}
		if sub, _ := f.sub.lookup(rest[i+1:]); sub != nil {
			return sub, []string{rest[:i]}
		}
	}
	return nil, nil
}

// apply puts one setting into the configuration.
func (c *Config) apply(s setting, errs *Errors) {
	d := &decoder{cfg: c, source: s.origin.Source, where: func(*yaml.Node) string { return s.origin.Where }}
	defer func() { *errs = append(*errs, d.errs...) }()

	chain, names := root.lookup(s.path)
	if chain == nil {
		d.fail(nil, shorten(s.path), "", "unknown key", "", unknownPath(s.path))
		return
	}
	v, at := reflect.ValueOf(c).Elem(), ""
	for i, f := range chain {
		v, at = v.Field(f.index), join(at, f.name)
		if i == len(chain)-1 {
			if n := d.textNode(f, at, s.text); n != nil {
				d.field(f, v, n, at, 0)
			}
			return
		}
		if f.kind == kindNamed {
			e, problem := f.entry(v, names[0])
			if problem != "" {
				d.fail(nil, at, names[0], problem, nameAllowed, "")
				return
			}
			v, at, names = e, join(at, names[0]), names[1:]
			if _, ok := c.origins[at]; !ok {
				c.origins[at] = s.origin
			}
		}
	}
}

// textNode makes the node that the decoder expects from a flag's text.
func (d *decoder) textNode(f *field, path, text string) *yaml.Node {
	word := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }
	if f.kind == kindStrings && !strings.HasPrefix(strings.TrimSpace(text), "[") {
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for _, w := range splitWords(text) {
			n.Content = append(n.Content, word(w))
		}
		return n
	}
	if f.kind.scalar() && f.kind != kindStrings {
		return word(text)
	}
	if len(text) > maxFileBytes {
		d.fail(nil, path, "", fmt.Sprintf("is longer than %d bytes", maxFileBytes), "", "")
		return nil
	}
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		d.fail(nil, path, "", "is not YAML: "+yamlProblem(err), f.allowed(), "")
		return nil
	}
	if len(doc.Content) == 0 {
		d.fail(nil, path, "", "has no value", f.allowed(), "")
		return nil
	}
	return doc.Content[0]
}

// yamlProblem takes the library's name off its message.
func yamlProblem(err error) string { return strings.TrimPrefix(err.Error(), "yaml: ") }

// unknownPath is the hint for a dotted path that is no key.
func unknownPath(path string) string {
	if strings.Contains(path, "[") {
		return "items of a list are set together: auth.keys='[{name: a, key_env: A}]'"
	}
	var known []string
	for _, k := range allKeys {
		known = append(known, k.Path)
	}
	if hint := didYouMean(path, known); hint != "" {
		return hint
	}
	for _, f := range root.fields {
		rest, ok := strings.CutPrefix(path, f.name+".")
		if !ok || f.sub == nil {
			continue
		}
		if f.kind == kindNamed {
			name, key, ok := strings.Cut(rest, ".")
			if !ok {
				return fmt.Sprintf("write %s.%s.KEY=value", f.name, name)
			}
			rest = key
		}
		return unknownKey(f.sub, rest)
	}
	first, _, _ := strings.Cut(path, ".")
	return unknownKey(root, first)
}
