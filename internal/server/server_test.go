package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/session"
)

func openServer(t *testing.T, dir string) *Server {
	t.Helper()
	cfg := config.Default()
	cfg.Data = dir
	s, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func runTurn(t *testing.T, s *Server, id, text string) []session.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	content, _ := json.Marshal(text)
	w, err := s.Sessions().StartTurn(ctx, "default", id, session.TurnRequest{Content: content})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	var all []session.Event
	for {
		evs, err := w.Next(ctx)
		if errors.Is(err, session.ErrEnded) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, evs...)
	}
}

func TestTurnSurvivesRestart(t *testing.T) {
	dir := t.TempDir()
	s := openServer(t, dir)
	ctx := context.Background()
	sess, err := s.Sessions().Create(ctx, "default", session.CreateRequest{Agent: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	evs := runTurn(t, s, sess.ID, "hello there")
	var names []string
	for _, e := range evs {
		names = append(names, e.Name)
		t.Logf("%s", e.SSE)
	}
	if names[0] != "turn.started" || names[len(names)-1] != "turn.completed" {
		t.Fatalf("events %v", names)
	}
	s.Close()
	s = openServer(t, dir)
	msgs, _, err := s.Sessions().Messages(ctx, "default", sess.ID, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(msgs) != 2 || !strings.Contains(string(msgs[0].Message), "hello there") {
		t.Fatalf("messages after restart: %+v", msgs)
	}
	runTurn(t, s, sess.ID, "again")
}

func TestLostTablesComeBackFromSnapshotAndJournal(t *testing.T) {
	dir := t.TempDir()
	s := openServer(t, dir)
	ctx := context.Background()
	var ids []string
	for range 8 { // over all partitions
		sess, err := s.Sessions().Create(ctx, "default", session.CreateRequest{Agent: "demo"})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sess.ID)
	}
	runTurn(t, s, ids[0], "before the snapshot")
	for _, p := range s.parts {
		if _, err := s.snapshot(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	runTurn(t, s, ids[0], "after the snapshot")
	s.Close()
	for i := range s.parts {
		if err := os.RemoveAll(filepath.Join(dir, fmt.Sprintf("p%03d", i), "tables")); err != nil {
			t.Fatal(err)
		}
	}
	s = openServer(t, dir)
	for _, id := range ids {
		if _, err := s.Sessions().Get(ctx, "default", id); err != nil {
			t.Errorf("session %s: %v", id, err)
		}
	}
	msgs, _, err := s.Sessions().Messages(ctx, "default", ids[0], "", 0)
	if err != nil || len(msgs) != 4 {
		t.Fatalf("%d messages (%v), want 4", len(msgs), err)
	}
}

func TestDataDirectoryIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := openServer(t, dir)
	cfg := config.Default()
	cfg.Data = dir
	if _, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatalf("a second process: %v", err)
	}
	s.Close()
	cfg.Kernel.Partitions = 7
	if _, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "4 partitions") {
		t.Fatalf("another partition count: %v", err)
	}
	openServer(t, dir) // the refusals left it as it was
}

func TestEpochsRise(t *testing.T) {
	dir := t.TempDir()
	for want := uint64(1); want <= 3; want++ {
		s := openServer(t, dir)
		for _, p := range s.parts {
			if p.epoch() != want {
				t.Fatalf("partition %d: epoch %d, want %d", p.id, p.epoch(), want)
			}
		}
		s.Close()
	}
}

func TestAgentsOfTheAPISurviveARestart(t *testing.T) {
	dir := t.TempDir()
	s := openServer(t, dir)
	ctx := context.Background()
	def := agent.Definition{Name: "mine", Provider: "demo", Instructions: "Be brief."}
	if _, err := s.Sessions().PutAgent(ctx, "default", def); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = openServer(t, dir)
	if _, err := s.Sessions().Agents().Get("default", "mine"); err != nil {
		t.Fatal(err)
	}
	if err := s.Sessions().DeleteAgent(ctx, "default", "mine"); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = openServer(t, dir)
	if _, err := s.Sessions().Agents().Get("default", "mine"); !errors.Is(err, agent.ErrNoAgent) {
		t.Fatalf("deleted agent: %v", err)
	}
}

func TestInMemoryServerRunsTurns(t *testing.T) {
	cfg := config.Default()
	cfg.Store = "mem:"
	s, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	ctx := context.Background()
	sess, err := s.Sessions().Create(ctx, "default", session.CreateRequest{Agent: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	runTurn(t, s, sess.ID, "hello")
	for _, p := range s.parts {
		if _, err := s.snapshot(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	runTurn(t, s, sess.ID, "after the trim")
}
