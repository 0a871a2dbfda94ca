// Package s3 is a blob store on Amazon S3 and what speaks its protocol. It
// sends its own four requests over net/http, signed and with credentials by
// minio-go (docs/adr/0022-s3-client.md).
//
// A write is sent once: the caller alone knows what an open outcome means to it.
// Reads are repeated a few times. Tokens are ETags, so equal contents of one
// key have equal tokens.
//
// A Delete with a condition sends If-Match, which not every store minds: one
// that does not know it deletes without condition. Nothing in Perdure deletes
// objects of S3 under a condition, so Prove does not ask for it.
package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
)

const (
	readTries   = 4                     // of a Get or a page of List
	readBackoff = 50 * time.Millisecond // before the second try, doubled before each further one
	// keepIdle is how long a connection is kept without requests. Short, since
	// a write on a connection that the store is closing has an open outcome.
	keepIdle = 15 * time.Second
)

// Store is a blob.Store. Safe for concurrent use.
type Store struct {
	cfg          Config
	name         string // in errors
	scheme, host string
	root         string // "/" or "/bucket/"
	prefix       string // of all keys: "" or with a slash at its end
	transport    *http.Transport
	keys         *keyring
	meter        blob.Meter
	sleep        func(context.Context, time.Duration) error
}

var _ blob.Measured = (*Store)(nil)

// Open makes a store of cfg. It sends nothing: use blob.Prove to see whether it
// works. Errors match blob.ErrInvalid.
func Open(cfg Config) (*Store, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.MaxConns <= 0 {
		cfg.MaxConns = DefaultMaxConns
	}
	scheme, host, _ := strings.Cut(cfg.Endpoint, "://")
	s := &Store{cfg: cfg, name: "s3://" + cfg.Bucket, scheme: scheme, host: host, root: "/" + cfg.Bucket + "/", sleep: blob.SleepBy(cfg.Clock)}
	if !cfg.PathStyle {
		s.host, s.root = cfg.Bucket+"."+host, "/"
	}
	if cfg.Prefix != "" {
		s.name += "/" + cfg.Prefix
		s.prefix = cfg.Prefix + "/"
	}
	var err error
	if s.transport, err = newTransport(cfg); err != nil {
		return nil, err
	}
	// The sources of credentials are elsewhere: the system's authorities vouch
	// for them, and they are asked rarely.
	plain := &http.Transport{DialContext: cfg.Dialer.DialContext, DisableKeepAlives: true}
	if s.keys, err = newKeyring(cfg.Credentials, cfg.Clock, &http.Client{Transport: plain}); err != nil {
		return nil, err
	}
	return s, nil
}

// newTransport speaks HTTP/1.1 only: with one request a connection, a lost
// connection leaves one outcome open.
func newTransport(cfg Config) (*http.Transport, error) {
	t := &http.Transport{
		DialContext:         cfg.Dialer.DialContext,
		MaxConnsPerHost:     cfg.MaxConns,
		MaxIdleConnsPerHost: cfg.MaxConns,
		IdleConnTimeout:     keepIdle,
		TLSHandshakeTimeout: cfg.Timeout,
		DisableCompression:  true,
		WriteBufferSize:     16 << 10, // a small object leaves with its header
		ReadBufferSize:      16 << 10,
		Protocols:           new(http.Protocols),
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, ClientSessionCache: tls.NewLRUClientSessionCache(0)},
	}
	t.Protocols.SetHTTP1(true)
	if len(cfg.CA) == 0 {
		return t, nil
	}
	if strings.HasPrefix(cfg.Endpoint, "http://") {
		return nil, fmt.Errorf("%w: a certificate authority is given, but the endpoint %s has no TLS", blob.ErrInvalid, cfg.Endpoint)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(cfg.CA) {
		return nil, fmt.Errorf("%w: the certificate authority holds no certificate in PEM form", blob.ErrInvalid)
	}
	t.TLSClientConfig.RootCAs = pool
	return t, nil
}

// String is the address without secrets.
func (s *Store) String() string { return s.cfg.String() }

// Stats counts the requests that were sent, so each try of a read.
func (s *Store) Stats() blob.Stats { return s.meter.Stats() }

// Close closes the idle connections. The store can still be used.
func (s *Store) Close() { s.transport.CloseIdleConnections() }

// Get implements blob.Store.
func (s *Store) Get(ctx context.Context, key string) (blob.Object, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Object{}, err
	}
	a, err := s.read(ctx, &call{kind: blob.KindGet, key: key, maxAnswer: blob.MaxObjectSize})
	if err != nil {
		return blob.Object{}, err
	}
	return blob.Object{Data: a.body, Token: a.token}, nil
}

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
	if err := blob.CheckPut(key, data, opts); err != nil {
		return "", err
	}
	if err := checkToken(opts.IfMatch); err != nil {
		return "", err
	}
	c := &call{kind: blob.KindPut, key: key, body: data, ifNoneMatch: opts.IfNoneMatch, ifMatch: opts.IfMatch, maxAnswer: maxErrorBody}
	a, err := s.do(ctx, c)
	switch {
	case err != nil:
		return "", err
	case a.token == "":
		return "", fmt.Errorf("%w: %s: a success without an ETag", blob.ErrAmbiguous, s.what(c))
	}
	return a.token, nil
}

// Delete implements blob.Store; see the package about its condition.
func (s *Store) Delete(ctx context.Context, key string, opts blob.DeleteOptions) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	if err := checkToken(opts.IfMatch); err != nil {
		return err
	}
	_, err := s.do(ctx, &call{kind: blob.KindDelete, key: key, ifMatch: opts.IfMatch, maxAnswer: maxErrorBody})
	return err
}

// checkToken keeps out what would end the header that a token is sent in.
func checkToken(t blob.Token) error {
	for i := range len(t) {
		if c := t[i]; c <= ' ' || c > '~' || c == '"' {
			return fmt.Errorf("%w: token %q is no ETag", blob.ErrInvalid, t)
		}
	}
	return nil
}

// read does c, again a few times while the store is unavailable. After a
// timeout the caller is asked first: its own time is at stake.
func (s *Store) read(ctx context.Context, c *call) (*answer, error) {
	wait := readBackoff
	for try := 1; ; try++ {
		a, err := s.do(ctx, c)
		if err == nil || try == readTries || !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, errTimeout) || ctx.Err() != nil {
			return a, err
		}
		jitter := time.Duration(s.cfg.Rand.Uint64() % uint64(wait))
		if s.sleep(ctx, wait/2+jitter) != nil {
			return nil, err
		}
		wait *= 2
	}
}
