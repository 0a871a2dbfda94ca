package model

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/effect/model/http1"
	"github.com/perdure-dev/perdure/internal/env"
)

// OpenAIOptions configure a provider of type openai. Zero durations and counts
// take the defaults.
type OpenAIOptions struct {
	// BaseURL is the address up to, not including, /chat/completions, such as
	// https://api.openai.com/v1. A query (api-version=…) is kept.
	BaseURL string
	// APIKey is sent as a bearer token when not empty. White space around it is
	// dropped. It is in no error.
	APIKey string
	Dialer env.Dialer
	Clock  env.Clock
	// TLS is the base of the configuration for https; nil takes the system's
	// roots.
	TLS *tls.Config

	DialTimeout      time.Duration // connection and TLS handshake; default 10 s
	FirstByteTimeout time.Duration // from the request to the first byte of the answer; default 120 s
	IdleTimeout      time.Duration // silence inside an answer; default 60 s, kept to within an eighth above
	KeepAlive        time.Duration // how long an idle connection is kept; default 30 s
	MaxIdle          int           // idle connections kept; default 1024
	MaxOutput        int           // bytes of text and tool calls of one answer; default 4 MiB

	// NoStreamUsage leaves stream_options out of the request, for servers that
	// refuse it; Usage is then zero.
	NoStreamUsage bool
}

// OpenAI is a client of one server that speaks OpenAI's chat completions over
// HTTP/1.1. The proxy variables of the environment (HTTPS_PROXY, …) are not
// used. Safe for concurrent use.
type OpenAI struct {
	http      *http1.Client
	clock     env.Clock
	redact    redactor
	postHead  string // request line and constant headers of a call
	getHead   string // the whole request of Check
	maxOutput int
	usage     bool
}

// OpenAIStats counts the use of connections.
type OpenAIStats = http1.Stats

// NewOpenAI makes the provider, or says what is wrong with its options. It
// opens no connection.
func NewOpenAI(o OpenAIOptions) (*OpenAI, error) {
	u, err := parseBase(o.BaseURL)
	if err != nil {
		return nil, err
	}
	key := strings.TrimSpace(o.APIKey)
	if !isVisible(key) {
		return nil, errors.New("the API key holds a space, a control or a non-ASCII character")
	}
	p := &OpenAI{clock: o.Clock, redact: redactor{key: key}, maxOutput: o.MaxOutput, usage: !o.NoStreamUsage}
	if p.maxOutput <= 0 {
		p.maxOutput = 4 << 20
	}
	p.postHead = requestHead("POST", u, "/chat/completions", key) +
		"Content-Type: application/json\r\nAccept: text/event-stream\r\n"
	p.getHead = requestHead("GET", u, "/models", key) + "Accept: application/json\r\n\r\n"

	h := http1.Options{
		Addr: hostPort(u), Dialer: o.Dialer, Clock: o.Clock,
		DialTimeout: o.DialTimeout, FirstByteTimeout: o.FirstByteTimeout, IdleTimeout: o.IdleTimeout,
		KeepAlive: o.KeepAlive, MaxIdle: o.MaxIdle,
	}
	if u.Scheme == "https" {
		h.TLS = &tls.Config{}
		if o.TLS != nil {
			h.TLS = o.TLS.Clone()
		}
		if h.TLS.ServerName == "" {
			h.TLS.ServerName = u.Hostname()
		}
	}
	p.http = http1.New(h)
	return p, nil
}

func parseBase(base string) (*url.URL, error) {
	u, err := url.Parse(base)
	switch {
	case err != nil:
		return nil, errors.New("base_url is not a URL") // err would repeat it, secrets included
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("base_url must start with http:// or https://, not %q", u.Scheme)
	case u.Hostname() == "":
		return nil, errors.New("base_url has no host")
	case u.User != nil:
		return nil, errors.New("base_url must not hold a user name or password: give the key as api key")
	case u.Fragment != "":
		return nil, errors.New("base_url must not hold a fragment (#…)")
	case !isVisible(u.RawQuery) || !isVisible(u.Host):
		return nil, errors.New("base_url holds a space or a non-ASCII character")
	}
	return u, nil
}

func hostPort(u *url.URL) string {
	host, port := u.Hostname(), u.Port()
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port == "" {
		port = "80"
		if u.Scheme == "https" {
			port = "443"
		}
	}
	return host + ":" + port
}

func requestHead(method string, u *url.URL, path, key string) string {
	target := strings.TrimRight(u.EscapedPath(), "/") + path
	if u.RawQuery != "" {
		target += "?" + u.RawQuery
	}
	head := method + " " + target + " HTTP/1.1\r\nHost: " + u.Host + "\r\nUser-Agent: perdure\r\n"
	if key != "" {
		head += "Authorization: Bearer " + key + "\r\n"
	}
	return head
}

// isVisible reports whether s is fit for a header value without spaces.
func isVisible(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// reservedParams are set by the provider itself; n is always 1.
var reservedParams = []string{"model", "messages", "tools", "stream", "stream_options", "n"}

// ValidateParams checks the extra parameters of an agent: nil, or a JSON
// object without the members that the provider sets itself.
func ValidateParams(params json.RawMessage) error {
	if len(params) == 0 {
		return nil
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(params, &m); err != nil {
		return fmt.Errorf("parameters must be a JSON object: %w", err)
	}
	for _, name := range reservedParams {
		if _, ok := m[name]; ok {
			return fmt.Errorf("parameter %q is set by the server and cannot be given", name)
		}
	}
	return nil
}

// Generate implements Provider.
func (p *OpenAI) Generate(ctx context.Context, req Request, sink Sink) (Result, error) {
	c := calls.Get().(*call)
	c.p, c.req, c.sink = p, req, sink
	defer c.release()
	fail := c.run(ctx)
	c.x.Close()
	res := c.result(fail != nil)
	if fail != nil {
		return res, fail
	}
	return res, nil
}

// Check implements Provider with GET {base}/models.
func (p *OpenAI) Check(ctx context.Context) error {
	c := calls.Get().(*call)
	c.p, c.check = p, true
	defer c.release()
	if err := c.open(ctx); err != nil {
		return err
	}
	if _, err := c.readAll(ctx, maxErrorBody); err != nil {
		return err
	}
	return nil
}

// Close implements Provider.
func (p *OpenAI) Close() { p.http.Close() }

// DropIdle closes idle connections; the next call dials.
func (p *OpenAI) DropIdle() { p.http.DropIdle() }

// Stats reads the counters of the connections.
func (p *OpenAI) Stats() OpenAIStats { return p.http.Stats() }

// trimObject gives what is inside the braces of a JSON object.
func trimObject(raw []byte) (inner []byte, ok bool) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, true
	}
	if len(raw) < 2 || raw[0] != '{' || raw[len(raw)-1] != '}' {
		return nil, false
	}
	return bytes.TrimSpace(raw[1 : len(raw)-1]), true
}
