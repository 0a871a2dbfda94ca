package config

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Origin says where a value came from.
type Origin struct {
	// Source is "default", "file", "env" or "flag".
	Source string
	// Where is file:line, the variable's or the flag's name.
	Where string
}

func (o Origin) String() string {
	if o.Where == "" {
		return "default"
	}
	return o.Where
}

// Error is one refused key or value. It never holds a secret.
type Error struct {
	Where   string // perdure.yaml:12, PERDURE_LISTEN or --listen; may be empty
	Path    string // kernel.session_ttl_secs
	Value   string // as given; empty when not shown
	Problem string
	Allowed string
	Hint    string
}

// Error writes it on one line.
func (e *Error) Error() string {
	var b strings.Builder
	for _, s := range []string{e.Where, e.Path} {
		if s != "" {
			b.WriteString(s + ": ")
		}
	}
	if e.Value != "" {
		fmt.Fprintf(&b, "%q ", shorten(e.Value))
	}
	b.WriteString(e.Problem)
	if e.Allowed != "" {
		b.WriteString("; allowed: " + e.Allowed)
	}
	if e.Hint != "" {
		b.WriteString(" (" + e.Hint + ")")
	}
	return b.String()
}

// Errors is all that is wrong with a configuration, at most 20 entries.
type Errors []*Error

// Error writes one problem a line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// userRE finds a user and password in a URL.
var userRE = regexp.MustCompile(`://[^/]*@`)

// shorten bounds a value in an error, and hides what a URL should not hold.
func shorten(v string) string {
	v = userRE.ReplaceAllString(v, "://"+redacted+"@")
	const most = 80
	if r := []rune(v); len(r) > most {
		return string(r[:most]) + "…"
	}
	return v
}

// didYouMean is a hint for a near miss among the known words, or "".
func didYouMean(word string, known []string) string {
	if best := nearest(word, known); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	return ""
}

func nearest(word string, known []string) string {
	if len(word) > 128 {
		return ""
	}
	best, least := "", 3
	for _, k := range known {
		d := distance(squash(word), squash(k))
		if d < least && d*3 <= max(len(word), 3) {
			best, least = k, d
		}
	}
	return best
}

// squash makes max-in-flight, maxInFlight and max_in_flight the same word.
func squash(s string) string {
	return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(s))
}

// distance is the number of single-letter edits, a swap of neighbours being
// one (optimal string alignment).
func distance(a, b string) int {
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}

// unknownKey is the hint for a key that section s does not have: a near miss
// in it, or the same word elsewhere in the table.
func unknownKey(s *section, name string) string {
	if strings.Contains(squash(name), "apikey") || squash(name) == "key" {
		return "a key is never written into the configuration: name its variable or its file"
	}
	if hint := didYouMean(name, s.names()); hint != "" {
		return hint
	}
	var paths []string
	for _, k := range allKeys {
		if k.Path[strings.LastIndexByte(k.Path, '.')+1:] == name {
			paths = append(paths, k.Path)
		}
	}
	if len(paths) > 0 {
		return "did you mean " + strings.Join(paths, " or ") + "?"
	}
	return ""
}

func sortedKeys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
