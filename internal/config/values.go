package config

import (
	"fmt"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// setText parses one scalar into v and checks its range. It returns what is
// wrong, or "".
func (f *field) setText(v reflect.Value, text string) (problem string) {
	switch f.kind {
	case kindString:
		return f.setString(v, text)
	case kindBool:
		if text != "true" && text != "false" {
			return "is not true or false"
		}
		v.SetBool(text == "true")
		return ""
	case kindStrings:
		return f.setStrings(v, splitWords(text))
	}
	n, problem := f.number(text)
	if problem != "" {
		return problem
	}
	lo, _ := f.number(f.min)
	hi, _ := f.number(f.max)
	if n < lo || n > hi {
		return "is out of range"
	}
	v.SetInt(n)
	return ""
}

// number parses an int, a size in bytes or a duration in nanoseconds.
func (f *field) number(text string) (n int64, problem string) {
	switch f.kind {
	case kindDuration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return 0, "is not a duration"
		}
		return int64(d), ""
	case kindBytes:
		b, ok := parseBytes(text)
		if !ok {
			return 0, "is not a size"
		}
		return int64(b), ""
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, "is not a whole number"
	}
	return n, ""
}

func (f *field) setString(v reflect.Value, text string) (problem string) {
	if strings.ContainsRune(text, 0) {
		return "contains a NUL byte"
	}
	if len(text) > maxTextBytes {
		return fmt.Sprintf("is longer than %d bytes", maxTextBytes)
	}
	if f.enum != "" {
		found := false
		for word := range strings.SplitSeq(f.enum, "|") {
			found = found || word == text
		}
		if !found {
			return "is not one of the allowed words"
		}
	}
	// An empty text means "not set"; keys that need a value say so in a
	// check of their own or in the cross checks.
	if f.check != "" && (text != "" || f.check == "nonempty") {
		if problem := checks[f.check].run(text); problem != "" {
			return problem
		}
	}
	v.SetString(text)
	return ""
}

func (f *field) setStrings(v reflect.Value, words []string) (problem string) {
	if len(words) > maxListItems {
		return fmt.Sprintf("has more than %d items", maxListItems)
	}
	for _, w := range words {
		if w == "" {
			return "has an empty item"
		}
		if f.check != "" {
			if problem := checks[f.check].run(w); problem != "" {
				return problem
			}
		}
	}
	v.Set(reflect.ValueOf(words))
	return ""
}

func splitWords(text string) []string {
	if strings.TrimSpace(text) == "" {
		return nil
	}
	words := strings.Split(text, ",")
	for i := range words {
		words[i] = strings.TrimSpace(words[i])
	}
	return words
}

var byteUnits = []struct {
	suffix string
	factor int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}, {"", 1}}

func parseBytes(text string) (ByteSize, bool) {
	for _, u := range byteUnits {
		digits, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n < 0 || n > (1<<62)/u.factor {
			return 0, false
		}
		return ByteSize(n * u.factor), true
	}
	return 0, false
}

// String writes the size the way it is read.
func (b ByteSize) String() string {
	for _, u := range []int{2, 1, 0} {
		if f := byteUnits[u].factor; b != 0 && int64(b)%f == 0 {
			return strconv.FormatInt(int64(b)/f, 10) + byteUnits[u].suffix
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

// nameRE is the form of agent, provider, tool, tenant and key names.
var nameRE = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,63}$`)

const nameAllowed = "a name: a-z and 0-9 first, then also _ . -, at most 64 characters"

var (
	metricRE = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]{0,63}$`)
	envRE    = regexp.MustCompile(`^[A-Z_][A-Z0-9_]{0,127}$`) // upper case only: a key pasted by mistake is refused
	shaRE    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	hostRE   = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
)

type check struct {
	allowed string
	run     func(text string) (problem string)
}

func match(re *regexp.Regexp) func(string) string {
	return func(text string) string {
		if !re.MatchString(text) {
			return "has the wrong form"
		}
		return ""
	}
}

// checks are the forms a text may have to follow.
var checks = map[string]check{
	"nonempty": {"text that is not empty", func(text string) string {
		if text == "" {
			return "is empty"
		}
		return ""
	}},
	"name":     {nameAllowed, match(nameRE)},
	"metric":   {"letters, digits and _, not a digit first, at most 64 characters", match(metricRE)},
	"envname":  {"the NAME of an environment variable in upper case (not the key itself)", match(envRE)},
	"sha256":   {"64 hex digits in lower case", match(shaRE)},
	"hosts":    {"host names or IP addresses, without scheme and port", checkHost},
	"hostport": {"host:port, like 127.0.0.1:8080 or [::1]:8080", func(text string) string { _, p := splitHostPort(text); return p }},
	"ratio":    {"0 to 1", checkRatio},
	"store":    {`empty (local segments), s3://bucket/prefix or mem:`, checkStore},
	"httpurl":  {"an http:// or https:// URL without user and password", checkURL},
	"baseurl": {"an http:// or https:// URL without user, password and query", func(text string) string {
		if strings.Contains(text, "?") {
			return "has a query"
		}
		return checkURL(text)
	}},
}

func checkHost(text string) string {
	if _, err := netip.ParseAddr(text); err == nil || hostRE.MatchString(text) {
		return ""
	}
	return "is not a host"
}

func checkRatio(text string) string {
	if v, err := strconv.ParseFloat(text, 64); err != nil || v < 0 || v > 1 {
		return "is not a share"
	}
	return ""
}

func checkStore(text string) string {
	if text == "mem:" {
		return ""
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "s3":
		return "is not a store"
	case u.User != nil:
		return "has a user or password: credentials come from the environment, a shared file or the machine's role"
	case u.Host == "":
		return "names no bucket"
	}
	return ""
}

func checkURL(text string) string {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "is not a URL"
	case u.Scheme != "http" && u.Scheme != "https":
		return "does not begin with http:// or https://"
	case u.Hostname() == "":
		return "has no host"
	case u.User != nil:
		return "holds a user or password"
	case u.Fragment != "":
		return "has a fragment"
	}
	return ""
}

// splitHostPort takes host:port apart without the net package. The host of
// ":8080" is empty, which means every address.
func splitHostPort(text string) (host, problem string) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return "", "has no port"
	}
	host, port := text[:i], text[i+1:]
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		return "", "has no valid port (0 to 65535)"
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if _, err := netip.ParseAddr(inner); !ok || err != nil {
			return "", "has no valid host"
		}
		return inner, ""
	}
	if host == "" {
		return "", ""
	}
	if strings.Contains(host, ":") {
		return "", "needs [ ] around an IPv6 address"
	}
	if checkHost(strings.ToLower(host)) != "" {
		return "", "has no valid host"
	}
	return host, ""
}

// loopback reports whether a listen address can only be reached from this
// machine.
func loopback(listen string) bool {
	host, problem := splitHostPort(listen)
	if problem != "" {
		return false
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

// Bounds of one configuration.
const (
	maxFileBytes = 1 << 20
	maxTextBytes = 256 << 10
	maxListItems = 1024
	maxEntries   = 4096 // named entries of one kind
	maxNodes     = 200_000
	maxDepth     = 64
	maxErrors    = 20
)
