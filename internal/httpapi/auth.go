package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
	"strings"

	"github.com/perdure-dev/perdure/internal/config"
)

// defaultTenant is who calls when no keys are configured.
const defaultTenant = "default"

// key is an API key: its digest, and for whom it speaks.
type key struct {
	digest [sha256.Size]byte
	tenant string
}

func keysOf(auth config.Auth) []key {
	var keys []key
	for _, k := range auth.Keys {
		keys = append(keys, key{k.Digest, k.Tenant})
	}
	return keys
}

// authenticate finds the tenant of a request. All keys are compared, each in
// constant time, so that the time tells nothing about any of them.
func (a *API) authenticate(c *call) error {
	if len(a.keys) == 0 {
		c.tenant = defaultTenant
		return nil
	}
	scheme, given, _ := strings.Cut(c.r.Header.Get("Authorization"), " ")
	given = strings.TrimSpace(given)
	if given == "" || !strings.EqualFold(scheme, "Bearer") {
		c.w.Header()["Www-Authenticate"] = []string{`Bearer realm="perdure"`}
		return errNoKey
	}
	digest := sha256.Sum256([]byte(given))
	match := -1
	for i := range a.keys {
		match = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(digest[:], a.keys[i].digest[:]), i, match)
	}
	if match < 0 {
		c.w.Header()["Www-Authenticate"] = []string{`Bearer realm="perdure", error="invalid_token"`}
		return errBadKey
	}
	c.tenant = a.keys[match].tenant
	return nil
}

// isLocal reports whether a Host header names this machine by itself: as
// localhost or by an address, which no one else's DNS can make up.
func isLocal(host string) bool {
	if _, err := netip.ParseAddrPort(host); err == nil {
		return true
	}
	name := host
	if i := strings.LastIndexByte(name, ':'); i >= 0 && !strings.HasSuffix(name, "]") {
		name = name[:i]
	}
	name = strings.TrimSuffix(name, ".")
	if strings.EqualFold(name, "localhost") || len(name) > 10 && strings.EqualFold(name[len(name)-10:], ".localhost") {
		return true
	}
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil
}
