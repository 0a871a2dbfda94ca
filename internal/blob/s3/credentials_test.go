package s3

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// source gives credentials that live an hour, unless it is down.
type source struct {
	mu    sync.Mutex
	down  bool
	hangs bool
	asked int
}

func (s *source) fetch(ctx context.Context) (credentials.Value, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	if s.hangs {
		<-ctx.Done()
		return credentials.Value{}, ctx.Err()
	}
	if s.down {
		return credentials.Value{SignerType: credentials.SignatureAnonymous}, nil
	}
	return credentials.Value{AccessKeyID: strings.Repeat("k", s.asked), SecretAccessKey: "s", Expiration: env.SystemClock{}.Now().Add(time.Hour)}, nil
}

func (s *source) set(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
}

func wantKey(t *testing.T, k *keyring, key string) {
	t.Helper()
	v, err := k.get(t.Context())
	if err != nil || v.AccessKeyID != key {
		t.Errorf("key %q, want %q (%v)", v.AccessKeyID, key, err)
	}
}

func TestCredentialsAreRenewedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{}
		k := &keyring{clock: env.SystemClock{}, fetch: s.fetch}
		var many sync.WaitGroup
		for range 20 {
			many.Go(func() { wantKey(t, k, "k") })
		}
		many.Wait()
		time.Sleep(49 * time.Minute)
		wantKey(t, k, "k")
		time.Sleep(time.Minute)
		wantKey(t, k, "k") // starts the search, and does not wait for it
		synctest.Wait()
		wantKey(t, k, "kk")

		s.set(true)
		time.Sleep(59 * time.Minute) // the source is down, the credentials good
		for range 3 {
			wantKey(t, k, "kk")
			synctest.Wait()
		}
		if s.asked != 3 {
			t.Errorf("asked %d times", s.asked)
		}
		time.Sleep(2 * time.Minute)
		if _, err := k.get(t.Context()); !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrDenied) {
			t.Error(err)
		}
		s.set(false)
		wantKey(t, k, strings.Repeat("k", s.asked+1))
	})
}

func TestNoCredentials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{down: true}
		k := &keyring{clock: env.SystemClock{}, fetch: s.fetch}
		if _, err := k.get(t.Context()); !errors.Is(err, blob.ErrDenied) || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
			t.Error(err)
		}
		s.set(false)
		wantKey(t, k, "kk")
	})
}

func TestCredentialsThatNeverCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &keyring{clock: env.SystemClock{}, fetch: (&source{hangs: true}).fetch}
		ctx, cancel := context.WithCancel(t.Context())
		env.SystemClock{}.AfterFunc(time.Second, cancel)
		if _, err := k.get(ctx); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		began := k.clock.Now()
		if _, err := k.get(t.Context()); !errors.Is(err, blob.ErrDenied) || k.clock.Now().Sub(began) > fetchTimeout {
			t.Error(err)
		}
	})
}

func TestRejectedCredentialsAreFetchedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{}
		k := &keyring{clock: env.SystemClock{}, fetch: s.fetch}
		old, err := k.get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		k.reject(old)
		wantKey(t, k, "kk")
		k.reject(old) // the answer to a request that was sent before
		wantKey(t, k, "kk")
	})
}

// TestChain finds credentials where the usual tools do.
func TestChain(t *testing.T) {
	for _, name := range []string{
		"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
		"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
	} {
		t.Setenv(name, "")
	}
	folder := t.TempDir()
	file := filepath.Join(folder, "credentials")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", file)
	t.Setenv("AWS_CONFIG_FILE", filepath.Join(folder, "config"))
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"AccessKeyId":"role","SecretAccessKey":"s","Token":"t","Expiration":"2100-01-01T00:00:00Z"}`))
	}))
	defer role.Close()
	find := func() (string, error) {
		k, err := newKeyring(Credentials{}, env.SystemClock{}, role.Client())
		if err != nil {
			return "", err
		}
		v, err := k.get(t.Context())
		return v.AccessKeyID + " " + v.SessionToken, err
	}
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL)
	if v, err := find(); err != nil || v != "role t" {
		t.Errorf("role: %q %v", v, err)
	}
	if err := os.WriteFile(file, []byte("[default]\naws_access_key_id = file\naws_secret_access_key = s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if v, err := find(); err != nil || v != "file " {
		t.Errorf("file: %q %v", v, err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "environment")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "s")
	t.Setenv("AWS_SESSION_TOKEN", "session")
	if v, err := find(); err != nil || v != "environment session" {
		t.Errorf("environment: %q %v", v, err)
	}
}
