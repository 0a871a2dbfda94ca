package config

import (
	"fmt"
	"strings"
)

// DefaultYAML is the commented default file, made from the table. Loaded as it
// is, it changes nothing.
func DefaultYAML() []byte {
	var b strings.Builder
	b.WriteString(`# Perdure configuration. Every key is shown with its default.
# Flags win over PERDURE_* variables, those over this file. A key's flag is its
# path (--kernel.session_ttl_secs 300, or --set key=value for all keys), its
# variable the path in capitals (PERDURE_KERNEL_SESSION_TTL_SECS=300).
# Keys and passwords are never written here: name their variable or their file.
`)
	writeSection(&b, root, 0, false)
	return []byte(b.String())
}

// writeSection writes the keys of s at a depth. Inside an example everything
// is commented out.
func writeSection(b *strings.Builder, s *section, depth int, example bool) {
	pad := strings.Repeat("  ", depth)
	hash := ""
	if example {
		hash = "#"
	}
	for _, f := range s.fields {
		if depth == 0 && (f.sub != nil || f.kind == kindString && f.name == "listen") {
			b.WriteString("\n")
		}
		doc := f.doc
		if f.kind == kindInt || f.kind == kindBytes || f.kind == kindDuration {
			doc += fmt.Sprintf(" [%s to %s]", f.min, f.max)
		} else if f.enum != "" {
			doc += " [" + strings.ReplaceAll(f.enum, "|", ", ") + "]"
		}
		fmt.Fprintf(b, "%s# %s\n", pad, doc)
		switch f.kind {
		case kindSection:
			fmt.Fprintf(b, "%s%s%s:\n", hash, pad, f.name)
			writeSection(b, f.sub, depth+1, example)
		case kindNamed:
			fmt.Fprintf(b, "%s:\n#%s  %s:\n", f.name, pad, f.example)
			writeSection(b, f.sub, depth+2, true)
		case kindList:
			fmt.Fprintf(b, "%s%s:\n", pad, f.name)
			for i, lf := range f.sub.fields {
				dash := "  "
				if i == 0 {
					dash = "- "
				}
				fmt.Fprintf(b, "%s  # %s\n#%s  %s%s: %s\n", pad, lf.doc, pad, dash, lf.name, lf.yaml())
			}
		default:
			fmt.Fprintf(b, "%s%s%s: %s\n", hash, pad, f.name, f.yaml())
		}
	}
}

// yaml is the value shown in the file: the example inside an entry, the
// default elsewhere.
func (f *field) yaml() string {
	switch {
	case f.example != "" && (f.kind == kindString || f.kind.scalar() && f.kind != kindStrings):
		return quote(f.example)
	case f.example != "":
		return f.example
	case f.kind == kindStrings:
		return "[]"
	case f.kind == kindJSON, f.kind == kindHeaders:
		return "{}"
	case f.kind == kindString:
		return quote(f.def)
	}
	return f.def
}

func quote(s string) string {
	if s == "" || strings.ContainsAny(s, ":#{}[]&*!|>'\"%@` ") {
		return fmt.Sprintf("%q", s)
	}
	return s
}
