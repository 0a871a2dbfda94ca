package versitygw_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3"
	"github.com/perdure-dev/perdure/internal/blob/s3/versitygw"
	"github.com/perdure-dev/perdure/internal/env"
)

// TestKeepsObjectsOverRestarts also shows how a store is opened on it.
func TestKeepsObjectsOverRestarts(t *testing.T) {
	bin := os.Getenv(versitygw.Variable)
	if bin == "" {
		t.Skipf("%s is not set; see scripts/versitygw.sh", versitygw.Variable)
	}
	server, err := versitygw.Start(t.Context(), bin, t.TempDir(), "bucket")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	world := env.Real()
	cfg, err := s3.ParseURL("s3://bucket/one?endpoint="+server.URL(), func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	cfg.Credentials = s3.Credentials{AccessKey: versitygw.AccessKey, SecretKey: versitygw.SecretKey}
	cfg.Dialer, cfg.Clock, cfg.Rand = world.Dialer, world.Clock, world.Rand
	store, err := s3.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if _, err := store.Put(t.Context(), "k", []byte("v"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	former := server.PID()
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if server.PID() == former || server.PID() == 0 {
		t.Errorf("process %d, then %d", former, server.PID())
	}
	if o, err := store.Get(t.Context(), "k"); err != nil || string(o.Data) != "v" {
		t.Errorf("%q %v", o.Data, err)
	}
	server.Stop()
	server.Stop()
	if server.PID() != 0 {
		t.Error("still running")
	}
}

func TestStartSaysWhatWentWrong(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "gateway")
	if err := os.WriteFile(bin, []byte("#!/bin/sh\necho no disk left >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := versitygw.Start(t.Context(), bin, t.TempDir(), "bucket"); err == nil || !strings.Contains(err.Error(), "no disk left") {
		t.Error(err)
	}
	if _, err := versitygw.Start(t.Context(), bin+"-missing", t.TempDir()); err == nil {
		t.Error("started what is not there")
	}
}

func TestBinary(t *testing.T) {
	t.Setenv(versitygw.Variable, "/somewhere")
	if path, err := versitygw.Binary(t.Context(), "/nowhere"); err != nil || path != "/somewhere" {
		t.Error(path, err)
	}
	t.Setenv(versitygw.Variable, "")
	if path, err := versitygw.Binary(t.Context(), "/nowhere"); err == nil {
		t.Error(path)
	}
}
