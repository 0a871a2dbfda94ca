package tool

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Origin says who wrote a definition, and so how far it is trusted.
type Origin int

const (
	// FromAPI is a definition from a client of the API. It may use neither
	// secrets nor allow_private, and its URL may not name a non-public host:
	// what the operator may reach is not for every client.
	FromAPI Origin = iota
	// FromOperator is a definition from the server's own config.
	FromOperator
)

// Tool is a compiled definition. It is immutable and safe for concurrent use.
type Tool struct {
	name             string
	element          json.RawMessage
	params           *parameters
	maxArgumentBytes int

	client      *Client
	http        http.Client
	method      string
	target      target
	hosts       map[string]bool // canonical authorities that may be reached
	private     bool
	headers     http.Header // secrets resolved
	redactor    redactor
	timeout     time.Duration
	maxResponse int
}

var (
	validName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	methods   = []string{"GET", "POST", "PUT", "PATCH", "DELETE"}
)

// Name is the name the model calls the tool by.
func (t *Tool) Name() string { return t.name }

// Schema is the tool as an element of the tools array of the Chat Completions
// API. The caller must not change it.
func (t *Tool) Schema() json.RawMessage { return t.element }

// CompileAll compiles the tools of one agent: at most MaxToolsPerAgent, their
// names distinct. An *Error's path begins with the tool's place, as tools[3].
func CompileAll(defs []Definition, c *Client, from Origin) ([]*Tool, error) {
	if len(defs) > MaxToolsPerAgent {
		return nil, bad("tools", "%d tools; allowed: at most %d for an agent", len(defs), MaxToolsPerAgent)
	}
	tools := make([]*Tool, 0, len(defs))
	first := map[string]int{}
	for i, def := range defs {
		t, err := Compile(def, c, from)
		at := fmt.Sprintf("tools[%d]", i)
		var e *Error
		if errors.As(err, &e) {
			return nil, &Error{Path: at + "." + e.Path, Problem: e.Problem}
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		if j, dup := first[t.name]; dup {
			return nil, bad(at+".name", "%q is also the name of tools[%d]; allowed: distinct names", t.name, j)
		}
		first[t.name] = i
		tools = append(tools, t)
	}
	return tools, nil
}

// Compile checks a definition and resolves its secrets. What is wrong with a
// definition is given as an *Error.
func Compile(def Definition, c *Client, from Origin) (*Tool, error) {
	if c == nil {
		return nil, errors.New("compile a tool: a client is required")
	}
	if !validName.MatchString(def.Name) {
		return nil, bad("name", "%.80q is not a name; allowed: letters, digits, _ and -, 1 to 64 of them", def.Name)
	}
	if len(def.Description) > MaxDescriptionBytes {
		return nil, bad("description", "has %d bytes; allowed: at most %d", len(def.Description), MaxDescriptionBytes)
	}
	t := &Tool{name: def.Name, client: c}
	var err error
	if t.maxArgumentBytes, err = bounded("max_argument_bytes", def.MaxArgumentBytes, DefaultArgumentBytes, MaxArgumentBytes); err != nil {
		return nil, err
	}
	if t.params, err = compileParameters(def.Parameters); err != nil {
		return nil, err
	}
	if t.element, err = toolElement(def.Name, def.Description, t.params.text); err != nil {
		return nil, err
	}
	if err := t.compileHTTP(def.HTTP, from); err != nil {
		return nil, err
	}
	t.http = http.Client{Transport: hops{t}, CheckRedirect: checkRedirect}
	return t, nil
}

func (t *Tool) compileHTTP(h HTTP, from Origin) error {
	t.method = h.Method
	if t.method == "" {
		t.method = "POST"
	}
	if !slices.Contains(methods, t.method) {
		return bad("http.method", "%.32q is not supported; allowed: %s", h.Method, strings.Join(methods, ", "))
	}
	if h.AllowPrivate && from != FromOperator {
		return bad("http.allow_private", "not for definitions made over the API; allowed: in the server's config")
	}
	t.private = h.AllowPrivate
	if h.Timeout < 0 || time.Duration(h.Timeout) > MaxTimeout {
		return bad("http.timeout", "%s is out of range; allowed: more than 0 up to %s", time.Duration(h.Timeout), MaxTimeout)
	}
	if t.timeout = time.Duration(h.Timeout); t.timeout == 0 {
		t.timeout = DefaultTimeout
	}
	var err error
	if t.maxResponse, err = bounded("http.max_response_bytes", h.MaxResponseBytes, DefaultResponseBytes, MaxResponseBytes); err != nil {
		return err
	}
	if t.target, err = parseTarget(h.URL); err != nil {
		return err
	}
	if err := t.checkTarget(from); err != nil {
		return err
	}
	if t.hosts, err = allowedHosts(h.AllowHosts, t.target); err != nil {
		return err
	}
	t.headers, t.redactor, err = compileHeaders(h.Headers, t.client.secrets, from)
	return err
}

// checkTarget checks what the URL has to do with the schema and the origin.
func (t *Tool) checkTarget(from Origin) error {
	for _, name := range t.target.placeholders() {
		if !t.params.properties[name] || !slices.Contains(t.params.required, name) {
			return bad("http.url", "{%s} is not a required argument; allowed: names in both properties and required of parameters", name)
		}
	}
	if t.inQuery() {
		for name := range t.target.query {
			if t.params.properties[name] {
				return bad("http.url", "its query already sets %.64q, which is also an argument; allowed: one of the two", name)
			}
		}
	}
	if kind := t.target.namedKind(); kind != "" {
		if from != FromOperator {
			return bad("http.url", "%s is a %s address; allowed for definitions made over the API: public hosts", t.target.host, kind)
		}
		if kind == "unspecified" || kind == "multicast" {
			return bad("http.url", "%s is a %s address; allowed: the address of one host", t.target.host, kind)
		}
	}
	return nil
}

// inQuery reports whether the arguments go into the query.
func (t *Tool) inQuery() bool { return t.method == "GET" || t.method == "DELETE" }

func bounded(path string, v, def, most int) (int, error) {
	if v == 0 {
		return def, nil
	}
	if v < 0 || v > most {
		return 0, bad(path, "%d is out of range; allowed: 1 to %d", v, most)
	}
	return v, nil
}

// allowedHosts gives the canonical authorities of the list.
func allowedHosts(list []string, tg target) (map[string]bool, error) {
	if len(list) > MaxAllowHosts {
		return nil, bad("http.allow_hosts", "%d hosts; allowed: at most %d", len(list), MaxAllowHosts)
	}
	if len(list) == 0 {
		list = []string{tg.authority}
	}
	hosts := map[string]bool{}
	for i, entry := range list {
		host, port, err := splitAuthority(entry)
		if err != nil {
			return nil, bad(fmt.Sprintf("http.allow_hosts[%d]", i), "%.128q %s; allowed: host or host:port", entry, err)
		}
		if port != "" {
			hosts[host+":"+port] = true
			continue
		}
		hosts[host+":80"], hosts[host+":443"] = true, true
	}
	if !hosts[tg.host+":"+tg.port] {
		return nil, bad("http.allow_hosts", "does not hold %s:%s, where the URL goes; allowed: a list that does", tg.host, tg.port)
	}
	return hosts, nil
}

// canonicalAuthority is host:port of u in the form of the allow list.
func canonicalAuthority(u *url.URL) (string, error) {
	host, port, err := splitAuthority(u.Host)
	if err != nil {
		return "", err
	}
	if port == "" {
		port = defaultPort(u.Scheme)
	}
	return host + ":" + port, nil
}

func defaultPort(scheme string) string {
	if scheme == "https" {
		return "443"
	}
	return "80"
}
