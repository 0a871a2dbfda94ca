package config

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// shortcuts set keys of provider "default", so that one command line without a
// file can serve a real model.
var shortcuts = []struct{ flag, path, kind, doc string }{
	{"openai-base-url", shortcutURL, "url", "serve agent default on this OpenAI-compatible API"},
	{"model", "providers.default.model", "name", "model of agent default"},
	{"concurrency-limit", "providers.default.concurrency_limit", "n", "upstream calls of provider default at the same time; 0 = no limit"},
}

const (
	shortcutName = "default"
	shortcutURL  = "providers.default.base_url"
)

func shortcutOfEnv(name string) (path string, ok bool) {
	for _, s := range shortcuts {
		if envName(s.flag) == name {
			return s.path, true
		}
	}
	return "", false
}

// Flags is the command line's part of the configuration. A nil *Flags sets
// nothing.
type Flags struct {
	keys      []flagKey
	shortcuts []flagKey
	set       []string
	config    string
}

type flagKey struct {
	path, name string
	text       *flagText
}

// flagText holds a flag's text until Load checks it against the table.
type flagText struct {
	text, def, kind string
	given           bool
}

// Set implements pflag.Value.
func (t *flagText) Set(s string) error { t.text, t.given = s, true; return nil }

// String implements pflag.Value.
func (t *flagText) String() string {
	if t.given {
		return t.text
	}
	return t.def
}

// Type implements pflag.Value.
func (t *flagText) Type() string { return t.kind }

// RegisterFlags adds a flag for every key that has a fixed path, --set for all
// keys, --config and the shortcuts. Both spellings of a name, with _ and with
// -, are understood. Values are checked by Load, not by the flag parser.
func RegisterFlags(fs *pflag.FlagSet) *Flags {
	f := &Flags{}
	fs.SetNormalizeFunc(normalizeFlag)
	fs.StringVar(&f.config, "config", "", "configuration file (`file`); see perdure config init")
	fs.StringArrayVar(&f.set, "set", nil, "set any key: `key=value`, as in --set agents.helper.model=m; may be repeated")
	for _, s := range shortcuts {
		t := &flagText{kind: s.kind}
		fs.Var(t, s.flag, s.doc)
		f.shortcuts = append(f.shortcuts, flagKey{s.path, s.flag, t})
	}
	for _, k := range allKeys {
		if k.Flag == "" {
			continue
		}
		fl := root.leaf(k.Path)
		t := &flagText{def: k.Default, kind: flagKind(fl)}
		pf := fs.VarPF(t, k.Flag, "", strings.TrimSuffix(k.Doc, "."))
		if fl.kind == kindBool {
			pf.NoOptDefVal = "true"
		}
		f.keys = append(f.keys, flagKey{k.Path, k.Flag, t})
	}
	return f
}

// normalizeFlag gives a name its one spelling: the YAML path where there is a
// dot in it, words with - otherwise.
func normalizeFlag(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	if strings.Contains(name, ".") {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_"))
	}
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

func flagKind(f *field) string {
	switch f.kind {
	case kindInt:
		return "n"
	case kindBool:
		return "bool"
	case kindDuration:
		return "duration"
	case kindBytes:
		return "bytes"
	case kindStrings:
		return "a,b"
	}
	if f.enum != "" {
		return f.enum
	}
	return "text"
}

// leaf is the field of a path that is known to exist.
func (s *section) leaf(path string) *field {
	chain, _ := s.lookup(path)
	return chain[len(chain)-1]
}

func (f *Flags) configPath() string {
	if f == nil {
		return ""
	}
	return f.config
}

// settings lists what the command line sets, shortcuts apart.
func (f *Flags) settings() (out, given []setting, errs Errors) {
	if f == nil {
		return nil, nil, nil
	}
	for _, s := range f.shortcuts {
		if s.text.given {
			given = append(given, setting{s.path, s.text.text, Origin{"flag", "--" + s.name}})
		}
	}
	for _, k := range f.keys {
		if k.text.given {
			out = append(out, setting{k.path, k.text.text, Origin{"flag", "--" + k.name}})
		}
	}
	for _, kv := range f.set {
		path, text, ok := strings.Cut(kv, "=")
		path = strings.TrimSpace(path)
		if !ok {
			errs = append(errs, &Error{Where: "--set", Problem: "has no =", Allowed: "key=value"})
			continue
		}
		if slices.ContainsFunc(out, func(s setting) bool { return s.path == path && s.text != text }) {
			errs = append(errs, &Error{Where: "--set", Path: shorten(path), Problem: "is given twice on the command line"})
			continue
		}
		out = append(out, setting{path, text, Origin{"flag", "--set " + shorten(path)}})
	}
	return out, given, errs
}
