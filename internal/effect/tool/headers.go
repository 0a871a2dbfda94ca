package tool

import (
	"encoding/json"
	"net/http"
	"net/textproto"
	"net/url"
	"regexp"
	"slices"
	"sort"
	"strings"
)

// minSecretBytes: hiding a shorter text would hide every place where it
// stands by chance, and say so.
const minSecretBytes = 4

// redacted stands where a secret stood.
const redacted = "[redacted]"

var (
	validHeaderName = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$")
	secretRef       = regexp.MustCompile(`\$\$|\$\{([^}]*)\}?`)
	secretName      = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

	// reserved headers belong to the client or to the engine.
	reserved = []string{"Accept-Encoding", "Connection", "Content-Length", "Expect", "Host", "Idempotency-Key",
		"Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}
	// harmless headers go along when a redirect changes the host.
	harmless = []string{"Accept", "Accept-Language", "Content-Type", "User-Agent"}
	// telling words in a header's name mean that its value is a secret even
	// if it is written out in the definition.
	telling = []string{"auth", "cookie", "key", "passw", "secret", "session", "signature", "token"}
)

// compileHeaders resolves the secrets in the values and collects what must
// never be shown.
func compileHeaders(in map[string]string, lookup func(string) (string, bool), from Origin) (http.Header, redactor, error) {
	if len(in) > MaxHeaders {
		return nil, redactor{}, bad("http.headers", "%d headers; allowed: at most %d", len(in), MaxHeaders)
	}
	names := make([]string, 0, len(in))
	for name := range in {
		names = append(names, name)
	}
	sort.Strings(names)
	out := http.Header{}
	var hide []string
	for _, name := range names {
		if !validHeaderName.MatchString(name) {
			return nil, redactor{}, bad("http.headers", "%.128q is not a header name; allowed: letters, digits and -", name)
		}
		path := "http.headers." + name
		canonical := textproto.CanonicalMIMEHeaderKey(name)
		if slices.Contains(reserved, canonical) {
			return nil, redactor{}, bad(path, "is set by the server itself; allowed: any header but %s", strings.Join(reserved, ", "))
		}
		if _, dup := out[canonical]; dup {
			return nil, redactor{}, bad(path, "is given twice; allowed: once, whatever its case")
		}
		value, secrets, err := expand(path, in[name], lookup, from)
		if err != nil {
			return nil, redactor{}, err
		}
		if len(secrets) > 0 && slices.Contains(harmless, canonical) {
			return nil, redactor{}, bad(path, "goes along when a redirect changes the host; allowed: plain text without ${NAME}")
		}
		if err := checkHeaderValue(path, value); err != nil {
			return nil, redactor{}, err
		}
		out.Set(canonical, value)
		hide = append(hide, secrets...)
		hide = append(hide, literalSecrets(canonical, value)...)
	}
	return out, newRedactor(hide), nil
}

// expand replaces ${NAME} and $$ in a header's value.
func expand(path, value string, lookup func(string) (string, bool), from Origin) (string, []string, error) {
	var secrets []string
	var problem error
	out := secretRef.ReplaceAllStringFunc(value, func(m string) string {
		if m == "$$" {
			return "$"
		}
		if problem != nil {
			return ""
		}
		name := strings.TrimSuffix(m[2:], "}")
		if !strings.HasSuffix(m, "}") || !secretName.MatchString(name) {
			problem = bad(path, "holds ${ without a name and }; allowed: ${NAME}, or $$ for a plain dollar sign")
			return ""
		}
		if from != FromOperator {
			problem = bad(path, "uses the secret %s; allowed for definitions made over the API: plain text", name)
			return ""
		}
		v, ok := lookup(name)
		switch {
		case !ok || v == "":
			problem = bad(path, "the secret %s is not set; allowed: the name of an environment variable that the server has", name)
		case len(v) < minSecretBytes:
			problem = bad(path, "the secret %s is shorter than %d bytes and could not be kept out of results; allowed: a longer one, or plain text", name, minSecretBytes)
		}
		secrets = append(secrets, v)
		return v
	})
	return out, secrets, problem
}

// checkHeaderValue never quotes the value: it may be a secret.
func checkHeaderValue(path, v string) error {
	if len(v) > MaxHeaderValueBytes {
		return bad(path, "the value has %d bytes; allowed: at most %d", len(v), MaxHeaderValueBytes)
	}
	for i := range len(v) {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return bad(path, "the value holds a control character (a line end?); allowed: text on one line")
		}
	}
	return nil
}

// literalSecrets is what to hide of a value that is written out in the
// definition of a header with a telling name: the value, and what follows a
// scheme such as Bearer.
func literalSecrets(name, value string) []string {
	lower := strings.ToLower(name)
	if !slices.ContainsFunc(telling, func(w string) bool { return strings.Contains(lower, w) }) {
		return nil
	}
	var out []string
	for _, s := range append(strings.Fields(value)[min(1, len(strings.Fields(value))):], value) {
		if len(s) >= minSecretBytes {
			out = append(out, s)
		}
	}
	return out
}

// redactor hides secrets in what comes back. The zero value hides nothing.
type redactor struct {
	secrets []string // longest first
	first   [256]bool
	longest int
}

// newRedactor hides each secret as it is, and as it looks inside JSON and URLs.
func newRedactor(secrets []string) redactor {
	var r redactor
	seen := map[string]bool{}
	for _, s := range secrets {
		quoted, _ := json.Marshal(s) // text always has a JSON form
		for _, form := range []string{s, string(quoted[1 : len(quoted)-1]), url.QueryEscape(s), url.PathEscape(s)} {
			if form == "" || seen[form] {
				continue
			}
			seen[form] = true
			r.secrets = append(r.secrets, form)
			r.first[form[0]] = true
			r.longest = max(r.longest, len(form))
		}
	}
	sort.Slice(r.secrets, func(i, j int) bool { return len(r.secrets[i]) > len(r.secrets[j]) })
	return r
}

// clean gives at most the first n bytes of text with the secrets hidden. A
// secret that begins before n is hidden whole, so text should reach longest
// bytes beyond n where there is more. Secrets that overlap are hidden as one.
func (r *redactor) clean(text string, n int) string {
	if len(r.secrets) == 0 {
		return text[:min(n, len(text))]
	}
	var b strings.Builder
	for i := 0; i < len(text) && i < n; {
		if end := r.match(text, i); end > i {
			b.WriteString(redacted)
			i = end
			continue
		}
		b.WriteByte(text[i])
		i++
	}
	return b.String()
}

// match gives the end of the secrets that begin at i or inside one that does.
func (r *redactor) match(text string, i int) int {
	end := i
	for j := i; j == i || j < end; j++ {
		if !r.first[text[j]] {
			continue
		}
		for _, s := range r.secrets {
			if strings.HasPrefix(text[j:], s) {
				end = max(end, j+len(s))
				break
			}
		}
	}
	return end
}
