package tool

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// target is where a tool's requests go.
type target struct {
	scheme    string
	authority string // as written
	host      string // canonical: lower case, no trailing dot, no brackets
	port      string // never empty
	path      []pathPart
	query     url.Values // set by the definition
}

// pathPart is a piece of the path: text as written, or an argument.
type pathPart struct {
	text     string
	argument bool
}

var (
	placeholder  = regexp.MustCompile(`\{([^{}/?#]*)\}`)
	validHost    = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$`)
	argumentName = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`)
)

func parseTarget(raw string) (target, error) {
	if raw == "" {
		return target{}, bad("http.url", "is required; allowed: an http or https URL")
	}
	if len(raw) > MaxURLBytes {
		return target{}, bad("http.url", "has %d bytes; allowed: at most %d", len(raw), MaxURLBytes)
	}
	if strings.Contains(raw, "${") {
		return target{}, bad("http.url", "secrets (${NAME}) are not supported here; allowed: in http.headers")
	}
	u, err := url.Parse(placeholder.ReplaceAllString(raw, "x"))
	if err != nil {
		// The parser's message quotes the URL, which may hold a password.
		return target{}, bad("http.url", "is not a URL; allowed: an http or https URL")
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return target{}, bad("http.url", "the scheme is %.32q; allowed: http, https", u.Scheme)
	case u.User != nil:
		return target{}, bad("http.url", "holds a user or password; allowed: an Authorization header with a ${NAME}")
	case u.Fragment != "" || strings.Contains(raw, "#"):
		return target{}, bad("http.url", "holds a fragment (#), which is never sent; allowed: none")
	case u.Opaque != "":
		return target{}, bad("http.url", "names no host; allowed: scheme://host/path")
	}
	authority, path, query := splitURL(raw)
	if strings.ContainsAny(authority, "{}") || strings.ContainsAny(query, "{}") {
		return target{}, bad("http.url", "a {placeholder} stands outside the path; allowed: in the path only (GET and DELETE add arguments to the query by name)")
	}
	tg := target{scheme: u.Scheme, authority: authority}
	if tg.host, tg.port, err = splitAuthority(authority); err != nil {
		return target{}, bad("http.url", "the host %.128q %s; allowed: host or host:port", authority, err)
	}
	if tg.port == "" {
		tg.port = defaultPort(u.Scheme)
	}
	if tg.query, err = url.ParseQuery(query); err != nil {
		return target{}, bad("http.url", "its query is not valid; allowed: name=value pairs, percent-encoded")
	}
	tg.path, err = parsePath(path)
	return tg, err
}

// splitURL cuts scheme://authority/path?query. The scheme is known to be there.
func splitURL(raw string) (authority, path, query string) {
	_, rest, _ := strings.Cut(raw, "://")
	rest, query, _ = strings.Cut(rest, "?")
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		return rest[:i], rest[i:], query
	}
	return rest, "/", query
}

func parsePath(path string) ([]pathPart, error) {
	var parts []pathPart
	literal := func(s string) error {
		if strings.ContainsAny(s, "{}") {
			return bad("http.url", "a brace in the path is not paired; allowed: {name}")
		}
		if s != "" {
			parts = append(parts, pathPart{text: s})
		}
		return nil
	}
	at := 0
	for _, m := range placeholder.FindAllStringSubmatchIndex(path, -1) {
		if err := literal(path[at:m[0]]); err != nil {
			return nil, err
		}
		name := path[m[2]:m[3]]
		if !argumentName.MatchString(name) {
			return nil, bad("http.url", "{%.64s} is not a placeholder; allowed: {name} with letters, digits, _, . and -", name)
		}
		parts = append(parts, pathPart{text: name, argument: true})
		at = m[1]
	}
	return parts, literal(path[at:])
}

// splitAuthority gives the canonical host and the port, "" if none is written.
func splitAuthority(s string) (host, port string, err error) {
	if s == "" {
		return "", "", errors.New("is empty")
	}
	host = s
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil {
		return canonicalAddr(a)
	}
	if strings.Contains(s, ":") {
		if host, port, err = net.SplitHostPort(s); err != nil {
			return "", "", errors.New("is not a host and port")
		}
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != port {
			return "", "", errors.New("has a port that is not a number from 1 to 65535")
		}
	}
	if a, err := netip.ParseAddr(host); err == nil {
		host, _, err = canonicalAddr(a)
		return host, port, err
	}
	host = canonicalName(host)
	if len(host) > 253 || !validHost.MatchString(host) {
		return "", "", errors.New("is not a host name (write other alphabets as xn--...)")
	}
	return host, port, nil
}

// canonicalName is the one form of a name that resolves the same.
func canonicalName(host string) string { return strings.TrimSuffix(strings.ToLower(host), ".") }

func canonicalAddr(a netip.Addr) (host, port string, err error) {
	if a.Zone() != "" {
		return "", "", errors.New("has a zone, which means something on one machine only")
	}
	return a.Unmap().String(), "", nil
}

// namedKind is the kind of the non-public address that the URL names
// literally, or "".
func (tg target) namedKind() string {
	if tg.host == "localhost" {
		return "loopback"
	}
	a, err := netip.ParseAddr(tg.host)
	if err != nil {
		return ""
	}
	return addressKind(a)
}

func (tg target) placeholders() []string {
	var names []string
	for _, p := range tg.path {
		if p.argument {
			names = append(names, p.text)
		}
	}
	return names
}

// url fills the path from args, takes what it used out of args, and adds the
// rest to the query if inQuery.
func (tg target) url(args map[string]any, inQuery bool) (string, error) {
	path, err := tg.fill(args)
	if err != nil {
		return "", err
	}
	for _, name := range tg.placeholders() {
		delete(args, name)
	}
	query := url.Values{}
	for name, values := range tg.query {
		query[name] = values
	}
	if inQuery {
		for name, v := range args {
			if _, fixed := query[name]; fixed {
				return "", fmt.Errorf("argument %.64q is set by the tool itself; leave it out", name)
			}
			values, err := queryValues(v)
			if err != nil {
				return "", fmt.Errorf("argument %.64q %w", name, err)
			}
			if len(values) > 0 {
				query[name] = values
			}
		}
	}
	out := tg.scheme + "://" + tg.authority + path
	if len(query) > 0 {
		out += "?" + query.Encode()
	}
	if len(out) > MaxURLBytes {
		return "", fmt.Errorf("the arguments make a URL of %d bytes; allowed: at most %d", len(out), MaxURLBytes)
	}
	return out, nil
}

func (tg target) fill(args map[string]any) (string, error) {
	var b strings.Builder
	for _, p := range tg.path {
		if !p.argument {
			b.WriteString(p.text)
			continue
		}
		v, ok := scalar(args[p.text])
		if !ok || v == "" {
			return "", fmt.Errorf("argument %q goes into the path: it must be text, a number or a boolean, and not empty", p.text)
		}
		if climbs(v) {
			return "", fmt.Errorf("argument %q may not hold . or .. as a step of a path", p.text)
		}
		b.WriteString(url.PathEscape(v))
	}
	path := b.String()
	for seg := range strings.SplitSeq(path, "/") {
		// A dot from the definition beside a dot from an argument.
		if len(tg.placeholders()) > 0 && (seg == "." || seg == "..") {
			return "", errors.New("the arguments make a path with . or .. as a step")
		}
	}
	return path, nil
}

// climbs reports whether a server that decodes %2F before it cleans a path
// would leave the segment with v.
func climbs(v string) bool {
	for step := range strings.FieldsFuncSeq(v, func(r rune) bool { return r == '/' || r == '\\' }) {
		if step == "." || step == ".." {
			return true
		}
	}
	return false
}

// queryValues is v as values of one query name: null is none, a list is one
// value for each element.
func queryValues(v any) ([]string, error) {
	if v == nil {
		return nil, nil
	}
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	values := make([]string, 0, len(list))
	for _, e := range list {
		s, ok := scalar(e)
		if !ok {
			return nil, errors.New("goes into the query: it must be text, a number, a boolean or a list of those")
		}
		values = append(values, s)
	}
	return values, nil
}

func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case json.Number:
		return v.String(), true
	case bool:
		return strconv.FormatBool(v), true
	}
	return "", false
}
