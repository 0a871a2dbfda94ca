package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// kind says how a key is read and shown.
type kind int

const (
	kindSection kind = iota // a struct of keys
	kindNamed               // a map of named structs
	kindList                // a list of structs
	kindString
	kindInt
	kindBool
	kindDuration
	kindBytes
	kindStrings
	kindJSON
	kindHeaders
)

// scalar reports whether a key holds one word, so that it can be a flag.
func (k kind) scalar() bool { return k >= kindString && k <= kindStrings }

// field is one row of the table: one key of one section.
type field struct {
	name, def, min, max, enum, check, flag, example, doc string

	index int
	kind  kind
	sub   *section // of kindSection, kindNamed, kindList
}

// section is the keys of one struct, in the order of the struct.
type section struct {
	typ    reflect.Type
	fields []*field
}

// root is the table of Config, built once from its tags.
var root = buildSection(reflect.TypeFor[Config]())

func (s *section) field(name string) *field {
	for _, f := range s.fields {
		if f.name == name {
			return f
		}
	}
	return nil
}

func (s *section) names() []string {
	out := make([]string, len(s.fields))
	for i, f := range s.fields {
		out[i] = f.name
	}
	return out
}

// buildSection reads the tags. A wrong tag is a mistake in this package, so it
// panics at start and in every test.
func buildSection(t reflect.Type) *section {
	s := &section{typ: t}
	for i := range t.NumField() {
		sf := t.Field(i)
		name := sf.Tag.Get("key")
		if name == "" {
			continue // filled in by Load, not by people
		}
		f := &field{
			name: name, index: i, kind: kindOf(sf.Type),
			def: sf.Tag.Get("default"), min: sf.Tag.Get("min"), max: sf.Tag.Get("max"),
			enum: sf.Tag.Get("enum"), check: sf.Tag.Get("check"), flag: sf.Tag.Get("flag"),
			example: sf.Tag.Get("example"), doc: sf.Tag.Get("doc"),
		}
		switch f.kind {
		case kindSection:
			f.sub = buildSection(sf.Type)
		case kindNamed, kindList:
			f.sub = buildSection(sf.Type.Elem().Elem())
		}
		if f.doc == "" {
			panic("config: key " + name + " has no doc")
		}
		s.fields = append(s.fields, f)
	}
	return s
}

func kindOf(t reflect.Type) kind {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return kindDuration
	case reflect.TypeFor[ByteSize]():
		return kindBytes
	case reflect.TypeFor[JSON]():
		return kindJSON
	case reflect.TypeFor[Headers]():
		return kindHeaders
	case reflect.TypeFor[[]string]():
		return kindStrings
	}
	switch t.Kind() {
	case reflect.Struct:
		return kindSection
	case reflect.Map:
		return kindNamed
	case reflect.Slice:
		return kindList
	case reflect.String:
		return kindString
	case reflect.Int:
		return kindInt
	case reflect.Bool:
		return kindBool
	}
	panic(fmt.Sprintf("config: no kind for %v", t))
}

// setDefaults puts each key's default into v, a struct of section s.
func (s *section) setDefaults(v reflect.Value) {
	for _, f := range s.fields {
		fv := v.Field(f.index)
		switch {
		case f.kind == kindSection:
			f.sub.setDefaults(fv)
		case f.kind.scalar() && f.def != "":
			if problem := f.setText(fv, f.def); problem != "" {
				panic("config: default of " + f.name + ": " + problem)
			}
		}
	}
}

// allowed describes what a key takes, for errors and documents.
func (f *field) allowed() string {
	switch f.kind {
	case kindSection:
		return "a mapping with the keys " + strings.Join(f.sub.names(), ", ")
	case kindNamed:
		return "a mapping of names to entries"
	case kindList:
		return "a list of mappings with the keys " + strings.Join(f.sub.names(), ", ")
	case kindStrings:
		if f.check != "" {
			return "a list of " + checks[f.check].allowed
		}
		return "a list of words"
	case kindJSON:
		return "a mapping"
	case kindHeaders:
		return "a mapping of header names to values"
	case kindBool:
		return "true or false"
	case kindInt:
		return fmt.Sprintf("a whole number from %s to %s", f.min, f.max)
	case kindBytes:
		return fmt.Sprintf("a size from %s to %s, like 65536, 64KiB, 1MiB", f.min, f.max)
	case kindDuration:
		return fmt.Sprintf("a duration from %s to %s, like 250ms, 30s, 5m", f.min, f.max)
	}
	if f.enum != "" {
		return strings.ReplaceAll(f.enum, "|", ", ")
	}
	if f.check != "" {
		return checks[f.check].allowed
	}
	return "text"
}

// Key describes one key, for documents and completion. Inside named entries
// and lists the path has <name> and [i].
type Key struct {
	Path    string
	Default string // as written in YAML; "" = none
	Allowed string
	Doc     string
	Env     string // variable that overrides it; "" for keys inside lists
	Flag    string // flag that overrides it; "" = only --set
}

// Keys lists every leaf key in the order of the default file.
func Keys() []Key { return slices.Clone(allKeys) }

var allKeys = appendKeys(nil, root, "", true)

func appendKeys(out []Key, s *section, prefix string, flags bool) []Key {
	for _, f := range s.fields {
		path := prefix + f.name
		switch f.kind {
		case kindSection:
			out = appendKeys(out, f.sub, path+".", flags)
		case kindNamed:
			out = appendKeys(out, f.sub, path+".<name>.", false)
		case kindList:
			out = append(out, Key{Path: path, Allowed: f.allowed(), Doc: f.doc, Env: envName(path)})
			for _, k := range appendKeys(nil, f.sub, path+"[i].", false) {
				k.Env = ""
				out = append(out, k)
			}
		default:
			k := Key{Path: path, Default: f.def, Allowed: f.allowed(), Doc: f.doc, Env: envName(path)}
			if flags && f.kind.scalar() {
				k.Flag = f.flagName(path)
			}
			out = append(out, k)
		}
	}
	return out
}

// flagName is the shorter name where there is one; keys without a section are
// spelled the way flags are (admin-listen), the others are the YAML path.
func (f *field) flagName(path string) string {
	if f.flag != "" {
		return f.flag
	}
	if !strings.Contains(path, ".") {
		return strings.ReplaceAll(path, "_", "-")
	}
	return path
}

// envName is the variable of a key: PERDURE_KERNEL_SESSION_TTL_SECS.
func envName(path string) string {
	up := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '<', r == '>':
			return r
		}
		return '_'
	}, path)
	return envPrefix + up
}

const envPrefix = "PERDURE_"
