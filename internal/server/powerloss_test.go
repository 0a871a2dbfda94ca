package server

import (
	"context"
	"log/slog"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/session"
)

func openOn(t *testing.T, fs env.FS) *Server {
	t.Helper()
	cfg := config.Default()
	cfg.Data = "/srv/perdure/data"
	e := env.Real()
	e.FS = fs
	s, err := Open(cfg, e, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// TestAcknowledgedSurvivesPowerLoss loses all that was not synced, the names
// of directories too.
func TestAcknowledgedSurvivesPowerLoss(t *testing.T) {
	disk := vfs.NewCrashableMem()
	s := openOn(t, disk)
	ctx := context.Background()
	sess, err := s.Sessions().Create(ctx, "default", session.CreateRequest{Agent: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	runTurn(t, s, sess.ID, "hello there")
	left := disk.CrashClone(vfs.CrashCloneCfg{})
	s = openOn(t, left)
	msgs, _, err := s.Sessions().Messages(ctx, "default", sess.ID, "", 0)
	if err != nil || len(msgs) != 2 {
		t.Fatalf("%d messages after the power failure (%v), want 2", len(msgs), err)
	}
}

// TestUnfinishedFirstSnapshotIsNoObstacle: table files without a manifest, and
// tables that are missing, leave the journal as it is.
func TestUnfinishedFirstSnapshotIsNoObstacle(t *testing.T) {
	disk := vfs.NewMem()
	s := openOn(t, disk)
	ctx := context.Background()
	sess, err := s.Sessions().Create(ctx, "default", session.CreateRequest{Agent: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.parts {
		if _, err := s.store.Put(ctx, snapshotPrefix(p.id)+"/table/half", []byte("x"), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	for _, dir := range []string{"p000", "p001", "p002", "p003"} {
		if err := disk.RemoveAll("/srv/perdure/data/" + dir + "/tables"); err != nil {
			t.Fatal(err)
		}
	}
	s = openOn(t, disk)
	if _, err := s.Sessions().Get(ctx, "default", sess.ID); err != nil {
		t.Fatal(err)
	}
}
