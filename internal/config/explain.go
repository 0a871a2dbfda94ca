package config

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"time"
)

func itoa(n int) string { return strconv.Itoa(n) }

// Explain writes every effective value with its source, one a line. Secrets
// are not shown.
func (c *Config) Explain(w io.Writer) error {
	var lines []line
	c.explain(&lines, root, reflect.ValueOf(c).Elem(), "")
	for _, l := range lines {
		if _, err := fmt.Fprintf(w, "%s = %s  # %s\n", l.path, l.value, l.origin); err != nil {
			return err
		}
	}
	return nil
}

type line struct {
	path, value string
	origin      Origin
}

func (c *Config) explain(out *[]line, s *section, v reflect.Value, prefix string) {
	for _, f := range s.fields {
		path, fv := prefix+f.name, v.Field(f.index)
		switch f.kind {
		case kindSection:
			c.explain(out, f.sub, fv, path+".")
		case kindNamed:
			names := make(map[string]reflect.Value, fv.Len())
			for it := fv.MapRange(); it.Next(); {
				names[it.Key().String()] = it.Value().Elem()
			}
			for _, n := range sortedKeys(names) {
				c.explain(out, f.sub, names[n], path+"."+n+".")
			}
		case kindList:
			for i := range fv.Len() {
				c.explain(out, f.sub, fv.Index(i).Elem(), fmt.Sprintf("%s[%d].", path, i))
			}
		default:
			*out = append(*out, line{path, f.show(fv), c.Origin(path)})
		}
	}
}

// show writes a value the way it is read, without what may be secret.
func (f *field) show(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case time.Duration:
		return x.String()
	case ByteSize:
		return x.String()
	case JSON:
		if x == nil {
			return "{}"
		}
		return string(x)
	case Headers:
		parts := make([]string, 0, len(x))
		for _, n := range sortedKeys(x) {
			parts = append(parts, n+": "+redacted)
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case []string:
		return "[" + strings.Join(x, ", ") + "]"
	case string:
		if f.check == "httpurl" {
			x = showURL(x)
		}
		b, _ := json.Marshal(x) // cannot fail: a string
		return string(b)
	}
	return fmt.Sprint(v.Interface())
}
