package tool

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Resolver turns a host name into addresses. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// policy says which addresses a connection may be opened to. Each policy has
// a transport, and so a pool of connections, of its own: a connection opened
// under a wide policy is never reused under a narrow one.
type policy int

const (
	// publicOnly is the default.
	publicOnly policy = iota
	// privateToo is allow_private: all but metadata services.
	privateToo
	// namedHost is for the one authority that the operator wrote as a literal
	// address or as localhost in the tool's URL: that address, or loopback.
	namedHost
	policies
)

const (
	// maxAddresses bounds how many addresses of one name are tried.
	maxAddresses = 4
	// connectTimeout bounds the look-up, and the tries of all addresses
	// together. The transport goes on dialling after a call has ended, for the
	// sake of the next one, so the call's own timeout does not bound it.
	connectTimeout = 10 * time.Second
)

// refusal is a request or a connection that must not be made. It is never
// worth a retry.
type refusal struct{ why string }

func (r *refusal) Error() string { return "refused: " + r.why }

// dialError is a connection that could not be made; nothing was sent.
type dialError struct{ err error }

func (d *dialError) Error() string { return "could not connect: " + d.err.Error() }
func (d *dialError) Unwrap() error { return d.err }

// addressRange is a range that is not for the public internet.
type addressRange struct {
	prefix netip.Prefix
	kind   string
}

func ranges(kind string, prefixes ...string) []addressRange {
	out := make([]addressRange, len(prefixes))
	for i, p := range prefixes {
		out[i] = addressRange{netip.MustParsePrefix(p), kind}
	}
	return out
}

func concat(lists ...[]addressRange) []addressRange {
	var out []addressRange
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// metadataAddresses answer with a cloud machine's credentials.
var metadataAddresses = ranges("metadata service",
	"169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", // AWS, GCP, Azure; AWS containers
	"fd00:ec2::254/128", "fd00:ec2::23/128", // AWS over IPv6
	"fd20:ce::254/128",   // GCP over IPv6
	"100.100.100.200/32", // Alibaba Cloud
	"168.63.129.16/32",   // Azure's platform address
	"192.0.0.192/32",     // Oracle Cloud, classic
)

// specialRanges follow the IANA special-purpose address registries (RFC 6890
// and its updates). Ranges that embed an IPv4 address are refused as a whole:
// what they lead to depends on a translator that we cannot see.
var specialRanges = concat(
	ranges("unspecified", "0.0.0.0/8", "::/128"),
	ranges("loopback", "127.0.0.0/8", "::1/128"),
	ranges("private", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
	ranges("link-local", "169.254.0.0/16", "fe80::/10"),
	ranges("carrier-grade NAT", "100.64.0.0/10"),
	ranges("multicast", "224.0.0.0/4", "ff00::/8"),
	ranges("reserved", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4", "100::/64", "2001::/23", "5f00::/16"),
	ranges("documentation", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
	ranges("IPv4-translating", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::/96"),
)

// globalIPv6 is all that is handed out as public IPv6 space.
var globalIPv6 = netip.MustParsePrefix("2000::/3")

// addressKind names the range a is in, or gives "" for a public address. An
// IPv4 address inside IPv6 counts as the IPv4 address that it is.
func addressKind(a netip.Addr) string {
	a = a.Unmap().WithZone("")
	if !a.IsValid() {
		return "invalid"
	}
	for _, list := range [][]addressRange{metadataAddresses, specialRanges} {
		for _, r := range list {
			if r.prefix.Contains(a) {
				return r.kind
			}
		}
	}
	if a.Is6() && !globalIPv6.Contains(a) {
		return "reserved"
	}
	return ""
}

// check refuses a if p does not let host be reached there.
func (p policy) check(host string, a netip.Addr) error {
	kind := addressKind(a)
	switch {
	case kind == "":
		return nil
	case p == privateToo && kind != "metadata service" && kind != "invalid":
		return nil
	case p == namedHost && host == "localhost" && kind == "loopback":
		return nil
	case p == namedHost && isLiteral(host, a):
		return nil
	}
	hint := "; allowed: public addresses, or private ones with allow_private"
	if p != publicOnly {
		hint = ""
	}
	return &refusal{fmt.Sprintf("%s is at %s, a %s address%s", host, a, kind, hint)}
}

func isLiteral(host string, a netip.Addr) bool {
	named, err := netip.ParseAddr(host)
	return err == nil && named.Unmap() == a.Unmap()
}

// guard dials for one policy.
type guard struct {
	policy   policy
	clock    env.Clock
	resolver Resolver
	dialer   env.Dialer
}

// dial resolves once, checks each address and dials the checked address
// itself, so no second look-up can give another answer. The address that the
// connection reports is checked again: it is the one that counts.
func (g guard) dial(ctx context.Context, network, authority string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		return nil, &refusal{"not a host and port"}
	}
	host = canonicalName(host)
	addrs, err := g.resolve(ctx, host)
	if err != nil {
		return nil, err
	}
	var failed error
	for _, a := range addrs {
		conn, err := g.connect(ctx, network, net.JoinHostPort(a.String(), port), connectTimeout/time.Duration(len(addrs)))
		if err != nil {
			failed = err
			continue
		}
		if err := g.checkConn(host, conn); err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil
	}
	return nil, &dialError{failed}
}

func (g guard) connect(ctx context.Context, network, addr string, limit time.Duration) (net.Conn, error) {
	ctx, stop := withTimeout(ctx, g.clock, limit)
	defer stop()
	conn, err := g.dialer.DialContext(ctx, network, addr)
	if err != nil && errors.Is(context.Cause(ctx), errTimeout) {
		return nil, fmt.Errorf("dial %s: %w after %s", addr, errTimeout, limit)
	}
	return conn, err
}

// resolve gives the addresses of host that may be dialled, at least one.
func (g guard) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a.Unmap()}, g.policy.check(host, a)
	}
	ctx, stop := withTimeout(ctx, g.clock, connectTimeout)
	defer stop()
	found, err := g.resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		if errors.Is(context.Cause(ctx), errTimeout) {
			err = fmt.Errorf("look up %s: %w after %s", host, errTimeout, connectTimeout)
		}
		return nil, &dialError{err}
	}
	var ok []netip.Addr
	var refused error
	for _, a := range found[:min(len(found), maxAddresses)] {
		if err := g.policy.check(host, a); err != nil {
			refused = err
			continue
		}
		ok = append(ok, a.Unmap())
	}
	if len(ok) > 0 {
		return ok, nil
	}
	if refused == nil {
		refused = &dialError{errors.New("the name " + host + " has no address")}
	}
	return nil, refused
}

func (g guard) checkConn(host string, conn net.Conn) error {
	remote, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return &refusal{"the connection does not say which address it leads to"}
	}
	return g.policy.check(host, remote.Addr())
}
