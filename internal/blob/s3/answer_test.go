package s3_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3"
)

// calls are all kinds of requests, with what a store may say of them.
var calls = []struct {
	name string
	do   func(ctx context.Context, s *s3.Store) error
	kind blob.Kind
	cond bool
}{
	{"get", func(ctx context.Context, s *s3.Store) error { _, err := s.Get(ctx, "a/b"); return err }, blob.KindGet, false},
	{"list", func(ctx context.Context, s *s3.Store) error { _, err := s.List(ctx, "a", "", 10); return err }, blob.KindList, false},
	{"put", func(ctx context.Context, s *s3.Store) error {
		_, err := s.Put(ctx, "a/b", []byte("data"), blob.PutOptions{})
		return err
	}, blob.KindPut, false},
	{"create", func(ctx context.Context, s *s3.Store) error {
		_, err := s.Put(ctx, "a/b", []byte("data"), blob.PutOptions{IfNoneMatch: true})
		return err
	}, blob.KindPut, true},
	{"swap", func(ctx context.Context, s *s3.Store) error {
		_, err := s.Put(ctx, "a/b", nil, blob.PutOptions{IfMatch: "tag"})
		return err
	}, blob.KindPut, true},
	{"delete", func(ctx context.Context, s *s3.Store) error { return s.Delete(ctx, "a/b", blob.DeleteOptions{}) }, blob.KindDelete, false},
	{"delete if", func(ctx context.Context, s *s3.Store) error {
		return s.Delete(ctx, "a/b", blob.DeleteOptions{IfMatch: "tag"})
	}, blob.KindDelete, true},
}

var sentinels = []error{
	blob.ErrNotFound, blob.ErrPrecondition, blob.ErrAmbiguous, blob.ErrUnavailable,
	blob.ErrDenied, blob.ErrInvalid, blob.ErrCorrupt, blob.ErrUnfit,
}

// wantOnly: err matches want and no other error of package blob.
func wantOnly(t *testing.T, what string, err, want error) {
	t.Helper()
	for _, s := range sentinels {
		if errors.Is(err, s) != errors.Is(want, s) {
			t.Errorf("%s: %v, want %v", what, err, want)
			return
		}
	}
}

func TestEachStatusHasItsError(t *testing.T) {
	na, pre, amb := blob.ErrNotFound, blob.ErrPrecondition, blob.ErrAmbiguous
	una, den := blob.ErrUnavailable, blob.ErrDenied
	for _, c := range []struct {
		status int
		code   string // "": a page that is not S3's
		// by call: get, list, put, create, swap, delete, delete if
		want [7]error
		says string // in each error that is not of package blob alone
	}{
		{404, "NoSuchKey", [7]error{na, den, den, amb, pre, nil, pre}, ""},
		{404, "NoSuchBucket", [7]error{den, den, den, den, den, den, den}, "create the bucket"},
		{404, "", [7]error{una, una, amb, amb, amb, amb, amb}, "is it an S3 store"},
		{412, "PreconditionFailed", [7]error{den, den, den, pre, pre, den, pre}, ""},
		{412, "", [7]error{una, una, amb, pre, pre, amb, pre}, ""},
		{409, "ConditionalRequestConflict", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{409, "OperationAborted", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{503, "SlowDown", [7]error{una, una, una, una, una, una, una}, "SlowDown"},
		{503, "ServiceUnavailable", [7]error{una, una, una, una, una, una, una}, ""},
		{503, "XMinioServerNotInitialized", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{503, "", [7]error{una, una, amb, amb, amb, amb, amb}, "status 503"},
		{429, "", [7]error{una, una, una, una, una, una, una}, ""},
		{500, "InternalError", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{502, "", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{504, "", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{408, "", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{400, "RequestTimeout", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{400, "BadDigest", [7]error{una, una, una, una, una, una, una}, ""},
		{400, "XAmzContentSHA256Mismatch", [7]error{una, una, una, una, una, una, una}, ""},
		{400, "ExpiredToken", [7]error{una, una, una, una, una, una, una}, ""},
		{400, "InvalidArgument", [7]error{den, den, den, den, den, den, den}, ""},
		{400, "", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{400, "AuthorizationHeaderMalformed", [7]error{den, den, den, den, den, den, den}, "set region=eu-west-1"},
		{301, "PermanentRedirect", [7]error{den, den, den, den, den, den, den}, "set region=eu-west-1"},
		{307, "TemporaryRedirect", [7]error{una, una, una, una, una, una, una}, ""},
		{401, "", [7]error{den, den, den, den, den, den, den}, "check credentials"},
		{403, "AccessDenied", [7]error{den, den, den, den, den, den, den}, "s3:PutObject"},
		{403, "SignatureDoesNotMatch", [7]error{den, den, den, den, den, den, den}, "AWS_ACCESS_KEY_ID"},
		{403, "InvalidAccessKeyId", [7]error{den, den, den, den, den, den, den}, "AWS_ACCESS_KEY_ID"},
		{403, "RequestTimeTooSkewed", [7]error{den, den, den, den, den, den, den}, "clock"},
		{403, "", [7]error{den, den, den, den, den, den, den}, "check credentials"},
		{405, "MethodNotAllowed", [7]error{den, den, den, den, den, den, den}, ""},
		{501, "NotImplemented", [7]error{den, den, den, den, den, den, den}, "use another one"},
		{501, "", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
		{507, "InsufficientStorage", [7]error{una, una, amb, amb, amb, amb, amb}, ""},
	} {
		endpoint, requests := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			if c.code != "" {
				refuse(w, c.status, c.code, "<Region>eu-west-1</Region><AWSAccessKeyId>perdure-test</AWSAccessKeyId>")
				return
			}
			w.WriteHeader(c.status)
			_, _ = w.Write([]byte("<html>nginx</html>"))
		})
		s := open(t, with(config(endpoint, "one"), patient))
		for i, call := range calls {
			before := requests.Load()
			err := call.do(t.Context(), s)
			what := call.name + " answered " + http.StatusText(c.status) + " " + c.code
			wantOnly(t, what, err, c.want[i])
			if err == nil {
				continue
			}
			if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "s3://perdure-test/one") || strings.Contains(err.Error(), "perdure-test-secret") {
				t.Errorf("%s says %q, want %q", what, err, c.says)
			}
			want := int32(1)
			if read := call.kind == blob.KindGet || call.kind == blob.KindList; read && errors.Is(err, blob.ErrUnavailable) {
				want = 4
			}
			if n := requests.Load() - before; n != want {
				t.Errorf("%s: %d requests, want %d", what, n, want)
			}
		}
	}
}

// TestDeleteOfNothing: S3 answers 204, others 404.
func TestDeleteOfNothing(t *testing.T) {
	for _, status := range []int{204, 404} {
		endpoint, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			if status == 404 {
				refuse(w, 404, "NoSuchKey", "")
				return
			}
			w.WriteHeader(status)
		})
		if err := open(t, config(endpoint, "")).Delete(t.Context(), "k", blob.DeleteOptions{}); err != nil {
			t.Errorf("status %d: %v", status, err)
		}
	}
}

func TestSecretsStayOutOfErrors(t *testing.T) {
	const session = "session-token-of-the-test"
	endpoint, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte("<Error><Code>AccessDenied</Code><Message>perdure-test-secret and " +
			r.Header.Get("X-Amz-Security-Token") + " and the-access-key\n are bad" + strings.Repeat("é", 500) + "</Message></Error>"))
	})
	s := open(t, with(config(endpoint, ""), func(c *s3.Config) {
		c.Credentials.AccessKey, c.Credentials.SessionToken = "the-access-key", session
	}))
	err := s.Delete(t.Context(), "k", blob.DeleteOptions{})
	wantOnly(t, "delete", err, blob.ErrDenied)
	if n := strings.Count(err.Error(), "[secret]"); n != 3 {
		t.Errorf("%d secrets were hidden: %v", n, err)
	}
	for _, bad := range []string{"perdure-test-secret", session, "the-access-key", "\n"} {
		if strings.Contains(err.Error(), bad) {
			t.Errorf("%q has %q", err, bad)
		}
	}
	if len(err.Error()) > 700 {
		t.Errorf("%d bytes long", len(err.Error()))
	}
}
