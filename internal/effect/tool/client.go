package tool

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Bounds of the shared connections.
const (
	maxIdleConns        = 64
	maxIdleConnsPerHost = 8
	maxConnsPerHost     = 128 // further calls wait for one, within their timeout
	idleConnTimeout     = 90 * time.Second
	handshakeTimeout    = 10 * time.Second
)

// Options say what tools use of the world.
type Options struct {
	Clock  env.Clock  // required; timeouts and certificates' dates
	Dialer env.Dialer // required; gets literal addresses only
	// Resolver looks names up; default net.DefaultResolver.
	Resolver Resolver
	// Secrets gives the value of ${NAME} in a header. It decides which names a
	// definition may read at all. Default: none.
	Secrets func(name string) (string, bool)
	// RootCAs verify https servers; default the system's.
	RootCAs *x509.CertPool
}

// Client is what the tools of a process share: connections, names, secrets.
// It is safe for concurrent use. It never uses a proxy: a proxy would resolve
// the names, and the check of addresses would be blind.
type Client struct {
	clock      env.Clock
	secrets    func(string) (string, bool)
	transports [policies]*http.Transport
}

// NewClient makes a Client. It opens no connection.
func NewClient(o Options) (*Client, error) {
	if o.Clock == nil || o.Dialer == nil {
		return nil, errors.New("tool client: a clock and a dialer are required")
	}
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	if o.Secrets == nil {
		o.Secrets = func(string) (string, bool) { return "", false }
	}
	c := &Client{clock: o.Clock, secrets: o.Secrets}
	for p := range policies {
		c.transports[p] = newTransport(o, guard{policy: p, clock: o.Clock, resolver: o.Resolver, dialer: o.Dialer})
	}
	return c, nil
}

// Close closes idle connections. Calls in flight go on.
func (c *Client) Close() {
	for _, t := range c.transports {
		t.CloseIdleConnections()
	}
}

func newTransport(o Options, g guard) *http.Transport {
	return &http.Transport{
		Proxy: nil, // see Client
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return g.dial(ctx, network, addr)
		},
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: o.RootCAs, Time: o.Clock.Now},
		TLSHandshakeTimeout:    handshakeTimeout,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           maxIdleConns,
		MaxIdleConnsPerHost:    maxIdleConnsPerHost,
		MaxConnsPerHost:        maxConnsPerHost,
		IdleConnTimeout:        idleConnTimeout,
		MaxResponseHeaderBytes: maxResponseHeaderBytes,
	}
}
