// Package jsontext appends JSON text without reflection, for the paths that
// run for each turn.
package jsontext

import "unicode/utf8"

const hex = "0123456789abcdef"

// AppendString appends s as a JSON string: control characters, quotes and
// backslashes escaped, invalid UTF-8 replaced. The result is on one line.
func AppendString[T string | []byte](b []byte, s T) []byte {
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
			if r != utf8.RuneError || n > 1 {
				i += n
				continue
			}
			b = append(append(b, s[from:i]...), `\ufffd`...)
			i++
			from = i
			continue
		}
		b = append(b, s[from:i]...)
		b = appendEscape(b, c)
		i++
		from = i
	}
	return append(append(b, s[from:]...), '"')
}

func appendEscape(b []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(b, '\\', c)
	case '\n':
		return append(b, '\\', 'n')
	case '\r':
		return append(b, '\\', 'r')
	case '\t':
		return append(b, '\\', 't')
	}
	return append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
}

// AppendField appends "name":"value"; the name must need no escape.
func AppendField(b []byte, name, value string) []byte {
	b = append(b, '"')
	b = append(b, name...)
	b = append(b, '"', ':')
	return AppendString(b, value)
}
