package httpapi

import (
	"errors"
	"net/netip"
	"strings"

	"github.com/perdure-dev/perdure/internal/config"
)

// authenticate finds the tenant of a request.
func (a *API) authenticate(c *call) error {
	tenant, err := a.cfg.Auth.Tenant(c.r.Header.Get("Authorization"))
	switch {
	case errors.Is(err, config.ErrNoKey):
		c.w.Header()["Www-Authenticate"] = []string{`Bearer realm="perdure"`}
		return errNoKey
	case err != nil:
		c.w.Header()["Www-Authenticate"] = []string{`Bearer realm="perdure", error="invalid_token"`}
		return errBadKey
	}
	c.tenant = tenant
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
