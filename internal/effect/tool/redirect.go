package tool

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
)

// hops is the transport of one tool's client. Every request passes it, the
// first and each redirect, so here is the one check of where a request goes.
type hops struct{ t *Tool }

// RoundTrip implements http.RoundTripper.
func (h hops) RoundTrip(req *http.Request) (*http.Response, error) {
	p, err := h.t.route(req.URL)
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	return h.t.client.transports[p].RoundTrip(req)
}

// route says under which policy u may be reached, if at all.
func (t *Tool) route(u *url.URL) (policy, error) {
	if u.Scheme != "http" && u.Scheme != "https" {
		return 0, &refusal{fmt.Sprintf("the scheme %.32q; allowed: http, https", u.Scheme)}
	}
	authority, err := canonicalAuthority(u)
	if err != nil {
		return 0, &refusal{"a redirect to a host that is not valid"}
	}
	if !t.hosts[authority] {
		return 0, &refusal{fmt.Sprintf("%.256s is not one of the tool's allow_hosts", authority)}
	}
	// Compile let only an operator name a non-public host.
	if authority == t.target.host+":"+t.target.port && t.target.namedKind() != "" {
		return namedHost, nil
	}
	if t.private {
		return privateToo, nil
	}
	return publicOnly, nil
}

// checkRedirect implements http.Client.CheckRedirect. Once the host changed,
// the headers of the definition stay behind for the rest of the way; the
// client would keep all but a few well-known ones.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) > MaxRedirects {
		return &refusal{fmt.Sprintf("more than %d redirects", MaxRedirects)}
	}
	if via[len(via)-1].URL.Scheme == "https" && req.URL.Scheme != "https" {
		return &refusal{"a redirect from https to " + fmt.Sprintf("%.16s", req.URL.Scheme)}
	}
	req.URL.User = nil // a server does not choose our credentials
	req.Header.Del("Referer")
	first := via[0].URL
	moved := func(r *http.Request) bool { return !sameHost(first, r.URL) }
	if moved(req) || slices.ContainsFunc(via, moved) {
		for name := range req.Header {
			if name != "Idempotency-Key" && !slices.Contains(harmless, name) {
				req.Header.Del(name)
			}
		}
	}
	return nil
}

// sameHost reports whether b is the host of a: same name and port, or the
// standard ports of an upgrade to https.
func sameHost(a, b *url.URL) bool {
	from, err1 := canonicalAuthority(a)
	to, err2 := canonicalAuthority(b)
	if err1 != nil || err2 != nil {
		return false
	}
	if from == to {
		return a.Scheme == b.Scheme
	}
	return a.Scheme == "http" && b.Scheme == "https" &&
		from == canonicalHost(b)+":80" && to == canonicalHost(b)+":443"
}

func canonicalHost(u *url.URL) string {
	host, _, _ := splitAuthority(u.Host) // checked by the caller
	return host
}

// withoutURL takes the request's URL out of an error: it holds arguments.
func withoutURL(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return fmt.Errorf("the request failed: %w", ue.Err)
	}
	return err
}
