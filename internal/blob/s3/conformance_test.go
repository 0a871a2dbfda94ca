package s3_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"sync"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/s3"
	"github.com/perdure-dev/perdure/internal/blob/s3/versitygw"
	"github.com/perdure-dev/perdure/internal/env"
)

const bucket = "perdure-test"

// fake starts an S3 server in this process, with one empty bucket.
func fake(tb testing.TB) (endpoint string) {
	backend := s3mem.New()
	if err := backend.CreateBucket(bucket); err != nil {
		tb.Fatal(err)
	}
	server := httptest.NewServer(gofakes3.New(backend).Server())
	tb.Cleanup(server.Close)
	return server.URL
}

// gateway starts a real S3 server if the environment names its binary.
func gateway(tb testing.TB) (endpoint string) {
	bin := os.Getenv(versitygw.Variable)
	if bin == "" {
		tb.Skipf("%s is not set; see scripts/versitygw.sh", versitygw.Variable)
	}
	server, err := versitygw.Start(context.Background(), bin, tb.TempDir(), bucket)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(server.Stop)
	return server.URL()
}

func config(endpoint, prefix string) s3.Config {
	world := env.Real()
	return s3.Config{
		Bucket: bucket, Prefix: prefix, Endpoint: endpoint, Region: versitygw.Region, PathStyle: true,
		Credentials: s3.Credentials{AccessKey: versitygw.AccessKey, SecretKey: versitygw.SecretKey},
		Dialer:      world.Dialer, Clock: world.Clock, Rand: world.Rand,
	}
}

func open(tb testing.TB, cfg s3.Config) *s3.Store {
	tb.Helper()
	s, err := s3.Open(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return s
}

// TestConformance is with a prefix; package s3proxy runs the suite without one.
func TestConformance(t *testing.T) {
	blobtest.RunWith(t, blobtest.Quirks{LooseDeletes: true}, func(t *testing.T) blob.Store {
		return open(t, config(fake(t), "clusters/one"))
	})
}

func TestConformanceVersitygw(t *testing.T) {
	endpoint, n := gateway(t), 0
	blobtest.RunWith(t, blobtest.Quirks{LooseDeletes: true, KeysAreFiles: true}, func(t *testing.T) blob.Store {
		n++
		return open(t, config(endpoint, fmt.Sprint("test-", n)))
	})
}

func proof(s *s3.Store) blob.Proof {
	return blob.Proof{Name: s.String(), Prefix: "proof", Clock: env.SystemClock{}, Rand: env.Real().Rand}
}

func TestProve(t *testing.T) {
	for name, start := range map[string]func(testing.TB) string{"gofakes3": fake, "versitygw": gateway} {
		t.Run(name, func(t *testing.T) {
			endpoint := start(t)
			var nodes sync.WaitGroup
			for range 3 { // that start at the same time
				nodes.Go(func() {
					s := open(t, config(endpoint, "one"))
					if err := blob.Prove(t.Context(), s, proof(s)); err != nil {
						t.Error(err)
					}
				})
			}
			nodes.Wait()
			left, err := open(t, config(endpoint, "")).List(t.Context(), "", "", 10)
			if err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}
