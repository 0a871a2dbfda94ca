package server

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

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
