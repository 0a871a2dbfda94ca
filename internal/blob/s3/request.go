package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"
	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/perdure-dev/perdure/internal/blob"
)

const (
	// slowest is the rate, in bytes a second, that the timeout of a request
	// leaves time for.
	slowest = 1 << 20
	// maxErrorBody is how much of an answer is read that is no object or list.
	maxErrorBody = 64 << 10
	// suspectAfter is how long a connection may be silent before its end makes
	// the idle ones suspect: after a cut in the network all of them are dead, and
	// each would cost a request its timeout.
	suspectAfter = time.Second
)

// call is one request.
type call struct {
	kind        blob.Kind
	key         string // below the prefix; of a list: the prefix looked for
	query       url.Values
	body        []byte
	ifNoneMatch bool
	ifMatch     blob.Token
	maxAnswer   int64 // bytes of a successful answer's body
}

func (c *call) write() bool       { return c.kind == blob.KindPut || c.kind == blob.KindDelete }
func (c *call) conditional() bool { return c.ifNoneMatch || c.ifMatch != "" }

// answer is a success.
type answer struct {
	token blob.Token
	body  []byte
}

var methods = [blob.NumKinds]string{http.MethodGet, http.MethodPut, http.MethodGet, http.MethodDelete}

// what names the request in errors.
func (s *Store) what(c *call) string {
	return c.kind.String() + " " + c.key + " in " + s.name
}

// do sends c once and counts it. It never sends a request again of which a byte
// may have left.
func (s *Store) do(ctx context.Context, c *call) (*answer, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("blob: %s: not started: %w", s.what(c), err)
	}
	began := s.cfg.Clock.Now()
	a, err := s.exchange(ctx, c)
	took := s.cfg.Clock.Now().Sub(began)
	in := 0
	if err == nil && c.kind == blob.KindGet {
		in = len(a.body)
	}
	s.meter.Record(c.kind, blob.ResultOf(err), in, len(c.body), took)
	if took > suspectAfter && (errors.Is(err, errTimeout) || ctx.Err() != nil) {
		s.transport.CloseIdleConnections()
	}
	return a, err
}

// flight follows one request.
type flight struct {
	sent  atomic.Bool // a connection was found for it, so bytes may have left
	trace httptrace.ClientTrace
}

func (s *Store) exchange(ctx context.Context, c *call) (*answer, error) {
	timed, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := s.cfg.Clock.AfterFunc(s.timeout(len(c.body)), func() { cancel(errTimeout) })
	defer func() { timer.Stop() }()

	keys, err := s.keys.get(timed)
	if err != nil {
		return nil, s.notSent(ctx, c, err)
	}
	f := &flight{}
	f.trace.GotConn = func(httptrace.GotConnInfo) { f.sent.Store(true) }
	resp, err := s.transport.RoundTrip(s.request(httptrace.WithClientTrace(timed, &f.trace), c, keys))
	switch {
	case err != nil && f.sent.Load():
		return nil, s.lost(ctx, timed, c, err)
	case err != nil:
		return nil, s.notSent(ctx, c, cause(timed, err))
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what is missing makes it no S3 error
		r := readRefusal(resp.StatusCode, resp.Header, body)
		r.message = withoutKeys(r.message, keys)
		if expired[r.code] {
			s.keys.reject(keys)
		}
		if c.kind == blob.KindDelete && !c.conditional() && r.missing() {
			return &answer{}, nil
		}
		return nil, s.failure(c, r)
	}
	if c.kind == blob.KindGet && resp.ContentLength > slowest {
		if timer.Stop() {
			timer = s.cfg.Clock.AfterFunc(s.timeout(int(min(resp.ContentLength, blob.MaxObjectSize))), func() { cancel(errTimeout) })
		}
	}
	body, err := readBody(resp, c.maxAnswer)
	if err != nil && !c.write() { // a write's answer is all in its header
		return nil, s.lost(ctx, timed, c, err)
	}
	return &answer{token: blob.Token(strings.Trim(resp.Header.Get("Etag"), `"`)), body: body}, nil
}

// timeout leaves time for the bytes of an object.
func (s *Store) timeout(size int) time.Duration {
	return s.cfg.Timeout + time.Duration(size)*(time.Second/slowest)
}

var (
	errTimeout  = errors.New("no answer in time")
	errTooLarge = fmt.Errorf("%w: larger than an object may be", blob.ErrCorrupt)
)

// cause is why the request ended: the timeout if it was that, else err.
func cause(timed context.Context, err error) error {
	if c := context.Cause(timed); c == errTimeout {
		return errTimeout
	}
	return err
}

// notSent is the error of a request of which no byte has left.
func (s *Store) notSent(ctx context.Context, c *call, err error) error {
	var cert *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	switch {
	case errors.Is(err, blob.ErrDenied), errors.Is(err, blob.ErrUnavailable): // of the keyring
		return fmt.Errorf("%s: %w", s.what(c), err)
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %s: not sent: %w", blob.ErrUnavailable, s.what(c), ctx.Err())
	case errors.As(err, &cert):
		return fmt.Errorf("%w: %s: the server's certificate does not hold: %w; give the certificate of its authority", blob.ErrDenied, s.what(c), err)
	case errors.As(err, &record):
		return fmt.Errorf("%w: %s: the endpoint does not speak TLS (%w); is it http:// and not https://?", blob.ErrDenied, s.what(c), err)
	}
	return fmt.Errorf("%w: %s: not sent: %w", blob.ErrUnavailable, s.what(c), err)
}

// lost is the error of a request that was sent, or may have been, and whose
// answer did not come.
func (s *Store) lost(ctx, timed context.Context, c *call, err error) error {
	err = cause(timed, err)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	switch {
	case c.write():
		return fmt.Errorf("%w: %s: %w", blob.ErrAmbiguous, s.what(c), err)
	case errors.Is(err, blob.ErrCorrupt), ctx.Err() != nil:
		return fmt.Errorf("blob: %s: %w", s.what(c), err)
	}
	return fmt.Errorf("%w: %s: %w", blob.ErrUnavailable, s.what(c), err)
}

// request makes and signs the HTTP request. The hash of the body is part of
// the signature, so that the store refuses what was changed on its way.
func (s *Store) request(ctx context.Context, c *call, keys credentials.Value) *http.Request {
	path := s.root
	if c.kind != blob.KindList {
		path += s.prefix + c.key
	}
	u := &url.URL{Scheme: s.scheme, Host: s.host, Path: path, RawPath: s3utils.EncodePath(path), RawQuery: c.query.Encode()}
	sum := sha256.Sum256(c.body)
	req := (&http.Request{
		Method: methods[c.kind], URL: u, Host: s.host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"User-Agent":           {"perdure"},
			"X-Amz-Content-Sha256": {hex.EncodeToString(sum[:])},
		},
	}).WithContext(ctx)
	if c.kind == blob.KindPut {
		req.Header["Content-Type"] = []string{"application/octet-stream"}
	}
	if c.ifNoneMatch {
		req.Header["If-None-Match"] = []string{"*"}
	}
	if c.ifMatch != "" {
		req.Header["If-Match"] = []string{`"` + string(c.ifMatch) + `"`}
	}
	if len(c.body) > 0 {
		req.ContentLength = int64(len(c.body))
		// The transport uses GetBody only when nothing of the request has left.
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(c.body)), nil }
		req.Body, _ = req.GetBody()
	}
	return signer.SignV4(*req, keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken, s.cfg.Region)
}

// readBody reads at most limit bytes.
func readBody(resp *http.Response, limit int64) ([]byte, error) {
	if resp.ContentLength > limit {
		return nil, errTooLarge
	}
	if resp.ContentLength >= 0 {
		body := make([]byte, resp.ContentLength)
		_, err := io.ReadFull(resp.Body, body)
		return body, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err == nil && int64(len(body)) > limit {
		err = errTooLarge
	}
	return body, err
}

// withoutKeys removes what a store may have repeated of the credentials.
func withoutKeys(s string, keys credentials.Value) string {
	for _, k := range []string{keys.SecretAccessKey, keys.SessionToken, keys.AccessKeyID} {
		if k != "" {
			s = strings.ReplaceAll(s, k, hidden)
		}
	}
	return s
}
