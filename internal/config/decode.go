package config

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decoder puts YAML nodes from one source into a Config. It goes on after an
// error, so that one run shows everything that is wrong.
type decoder struct {
	cfg    *Config
	source string                    // of Origin
	where  func(n *yaml.Node) string // of Origin
	nodes  int                       // visited, aliases counted each time
	errs   Errors
}

func (d *decoder) fail(n *yaml.Node, path, value, problem, allowed, hint string) {
	if len(d.errs) < maxErrors {
		d.errs = append(d.errs, &Error{Where: d.where(n), Path: path, Value: value, Problem: problem, Allowed: allowed, Hint: hint})
	}
}

// resolve follows an alias and counts the visit; false means that the document
// is too large once its aliases are followed, or too deep.
func (d *decoder) resolve(n *yaml.Node, path string, depth int) (*yaml.Node, bool) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	d.nodes++
	if d.nodes > maxNodes || depth > maxDepth {
		if d.nodes == maxNodes+1 || depth > maxDepth {
			d.fail(n, path, "", fmt.Sprintf("is too large (more than %d values, or deeper than %d)", maxNodes, maxDepth), "", "")
		}
		return n, false
	}
	return n, true
}

// pairs visits the entries of a mapping, refusing what is not a plain key.
func (d *decoder) pairs(n *yaml.Node, path string, visit func(key string, kn, vn *yaml.Node)) {
	seen := make(map[string]bool, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		kn, vn := n.Content[i], n.Content[i+1]
		switch {
		case kn.Kind != yaml.ScalarNode:
			d.fail(kn, path, "", "has a key that is not a word", "", "")
		case kn.Tag == "!!merge":
			d.fail(kn, path, "", "uses a merge key (<<)", "plain keys", "")
		case seen[kn.Value]:
			d.fail(kn, join(path, kn.Value), "", "is given twice", "one value", "")
		default:
			seen[kn.Value] = true
			visit(kn.Value, kn, vn)
		}
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// section decodes a mapping into a struct.
func (d *decoder) section(s *section, v reflect.Value, n *yaml.Node, path string, depth int) {
	n, ok := d.resolve(n, path, depth)
	if !ok || isNull(n) { // "kernel:" with every key commented out
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "", "is "+kindName(n), "a mapping with the keys "+strings.Join(s.names(), ", "), "")
		return
	}
	d.pairs(n, path, func(key string, kn, vn *yaml.Node) {
		f := s.field(key)
		if f == nil {
			d.fail(kn, join(path, shorten(key)), "", "unknown key", strings.Join(s.names(), ", "), unknownKey(s, key))
			return
		}
		d.field(f, v.Field(f.index), vn, join(path, key), depth+1)
	})
}

// field decodes one key.
func (d *decoder) field(f *field, v reflect.Value, n *yaml.Node, path string, depth int) {
	n, ok := d.resolve(n, path, depth)
	if !ok {
		return
	}
	switch f.kind {
	case kindSection:
		d.section(f.sub, v, n, path, depth)
	case kindNamed:
		d.named(f, v, n, path, depth)
	case kindList:
		d.list(f, v, n, path, depth)
	case kindStrings:
		d.strings(f, v, n, path)
	case kindJSON:
		d.json(f, v, n, path, depth)
	case kindHeaders:
		d.headers(f, v, n, path)
	default:
		d.scalar(f, v, n, path)
	}
}

func (d *decoder) scalar(f *field, v reflect.Value, n *yaml.Node, path string) {
	if n.Kind != yaml.ScalarNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "")
		return
	}
	if isNull(n) {
		d.fail(n, path, "", "has no value", f.allowed(), `remove the key for its default, or write "" for an empty text`)
		return
	}
	if problem := f.setText(v, n.Value); problem != "" {
		d.fail(n, path, f.shown(n.Value), problem, f.allowed(), f.valueHint(n.Value))
		return
	}
	d.record(path, n)
}

// shown is a refused value as an error may show it. Where people paste a key
// by mistake nothing is shown.
func (f *field) shown(text string) string {
	switch f.check {
	case "envname", "sha256":
		return ""
	case "httpurl", "baseurl":
		return showURL(text)
	}
	return text
}

// showURL hides user, password and query of a URL.
func showURL(text string) string {
	if i := strings.IndexByte(text, '?'); i >= 0 {
		text = text[:i] + "?…"
	}
	if i := strings.LastIndexByte(text, '@'); i >= 0 {
		text = "…" + text[i:]
	}
	return text
}

func (f *field) valueHint(text string) string {
	switch {
	case f.enum != "":
		return didYouMean(text, strings.Split(f.enum, "|"))
	case f.kind == kindDuration && text != "" && strings.Trim(text, "0123456789") == "":
		return "add a unit, like " + shorten(text) + "s"
	case f.name == "data" && text == "":
		return "store: \"mem:\" keeps nothing"
	}
	return ""
}

func (d *decoder) record(path string, n *yaml.Node) {
	d.cfg.origins[path] = Origin{Source: d.source, Where: d.where(n)}
}

// named decodes a map of entries; an entry that is there already is changed
// key by key.
func (d *decoder) named(f *field, v reflect.Value, n *yaml.Node, path string, depth int) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "")
		return
	}
	d.pairs(n, path, func(name string, kn, vn *yaml.Node) {
		e, problem := f.entry(v, name)
		if problem != "" {
			d.fail(kn, path, name, problem, nameAllowed, "")
			return
		}
		d.record(join(path, name), kn)
		d.section(f.sub, e, vn, join(path, name), depth+1)
	})
}

// entry finds or makes the named entry.
func (f *field) entry(v reflect.Value, name string) (e reflect.Value, problem string) {
	if !nameRE.MatchString(name) {
		return e, "is not a name"
	}
	if v.IsNil() {
		v.Set(reflect.MakeMap(v.Type()))
	}
	key := reflect.ValueOf(name)
	if p := v.MapIndex(key); p.IsValid() {
		return p.Elem(), ""
	}
	if v.Len() >= maxEntries {
		return e, fmt.Sprintf("is one entry too many (at most %d)", maxEntries)
	}
	p := reflect.New(f.sub.typ)
	f.sub.setDefaults(p.Elem())
	v.SetMapIndex(key, p)
	return p.Elem(), ""
}

func (d *decoder) list(f *field, v reflect.Value, n *yaml.Node, path string, depth int) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "")
		return
	}
	if len(n.Content) > maxListItems {
		d.fail(n, path, "", fmt.Sprintf("has more than %d items", maxListItems), "", "")
		return
	}
	out := reflect.MakeSlice(v.Type(), 0, len(n.Content))
	for i, in := range n.Content {
		p := reflect.New(f.sub.typ)
		f.sub.setDefaults(p.Elem())
		d.section(f.sub, p.Elem(), in, fmt.Sprintf("%s[%d]", path, i), depth+1)
		out = reflect.Append(out, p)
	}
	v.Set(out)
	d.record(path, n)
}

func (d *decoder) strings(f *field, v reflect.Value, n *yaml.Node, path string) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "write [a, b], or one - item a line")
		return
	}
	words := make([]string, 0, min(len(n.Content), maxListItems+1))
	for i, in := range n.Content {
		in, ok := d.resolve(in, path, 0)
		if !ok {
			return
		}
		if in.Kind != yaml.ScalarNode || isNull(in) {
			d.fail(in, fmt.Sprintf("%s[%d]", path, i), "", "is "+kindName(in), f.allowed(), "")
			return
		}
		if f.check != "" {
			if problem := checks[f.check].run(in.Value); problem != "" {
				d.fail(in, fmt.Sprintf("%s[%d]", path, i), in.Value, problem, f.allowed(), "")
				return
			}
		}
		words = append(words, in.Value)
	}
	if problem := f.setStrings(v, words); problem != "" {
		d.fail(n, path, "", problem, f.allowed(), "")
		return
	}
	d.record(path, n)
}

// headerRE is the token of RFC 9110, section 5.6.2.
var headerRE = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")

func (d *decoder) headers(f *field, v reflect.Value, n *yaml.Node, path string) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "")
		return
	}
	out := Headers{}
	d.pairs(n, path, func(key string, kn, vn *yaml.Node) {
		vn, ok := d.resolve(vn, path, 0)
		switch {
		case !ok:
		case !headerRE.MatchString(key) || len(out) >= 64:
			d.fail(kn, path, "", "has a name that is no HTTP header, or more than 64 headers", f.allowed(), "")
		case vn.Kind != yaml.ScalarNode || isNull(vn):
			d.fail(vn, join(path, key), "", "is "+kindName(vn), "text", "")
		case len(vn.Value) > 8<<10 || strings.ContainsAny(vn.Value, "\r\n\x00"):
			d.fail(vn, join(path, key), "", "has a line break, a NUL byte or more than 8 KiB", "one line of text", "")
		default:
			out[key] = NewSecret(vn.Value)
		}
	})
	v.Set(reflect.ValueOf(out))
	d.record(path, n)
}

func (d *decoder) json(f *field, v reflect.Value, n *yaml.Node, path string, depth int) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "", "is "+kindName(n), f.allowed(), "")
		return
	}
	had := len(d.errs)
	out := d.appendJSON(nil, n, path, depth)
	if len(d.errs) > had {
		return
	}
	if len(out) > maxTextBytes {
		d.fail(n, path, "", fmt.Sprintf("is longer than %d bytes as JSON", maxTextBytes), "", "")
		return
	}
	v.SetBytes(out)
	d.record(path, n)
}

// appendJSON writes a node as compact JSON, keys in the order of the file.
func (d *decoder) appendJSON(out []byte, n *yaml.Node, path string, depth int) []byte {
	n, ok := d.resolve(n, path, depth)
	if !ok || len(out) > maxTextBytes {
		return out
	}
	switch n.Kind {
	case yaml.MappingNode:
		out = append(out, '{')
		first := true
		d.pairs(n, path, func(key string, _, vn *yaml.Node) {
			if !first {
				out = append(out, ',')
			}
			first = false
			out = append(appendQuoted(out, key), ':')
			out = d.appendJSON(out, vn, join(path, shorten(key)), depth+1)
		})
		return append(out, '}')
	case yaml.SequenceNode:
		out = append(out, '[')
		for i, in := range n.Content {
			if i > 0 {
				out = append(out, ',')
			}
			out = d.appendJSON(out, in, fmt.Sprintf("%s[%d]", path, i), depth+1)
		}
		return append(out, ']')
	}
	return d.appendScalar(out, n, path)
}

func (d *decoder) appendScalar(out []byte, n *yaml.Node, path string) []byte {
	switch n.Tag {
	case "!!null":
		return append(out, "null"...)
	case "!!bool":
		var b bool
		if n.Decode(&b) == nil {
			return strconv.AppendBool(out, b)
		}
	case "!!int":
		var i int64
		var u uint64
		if n.Decode(&i) == nil {
			return strconv.AppendInt(out, i, 10)
		}
		if n.Decode(&u) == nil {
			return strconv.AppendUint(out, u, 10)
		}
	case "!!float":
		var x float64
		if n.Decode(&x) == nil && !math.IsNaN(x) && !math.IsInf(x, 0) {
			b, _ := json.Marshal(x) // cannot fail: x is finite
			return append(out, b...)
		}
	case "!!str", "!!timestamp": // JSON has no time; it stays as written
		return appendQuoted(out, n.Value)
	}
	d.fail(n, path, n.Value, "has no form in JSON", "text, a number, true, false or null", "")
	return append(out, "null"...)
}

func appendQuoted(out []byte, s string) []byte {
	b, _ := json.Marshal(s) // cannot fail: a string
	return append(out, b...)
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func kindName(n *yaml.Node) string {
	switch {
	case isNull(n):
		return "empty"
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	}
	return "a single value"
}
