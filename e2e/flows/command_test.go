//go:build e2e

package flows

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
)

// Exit codes, as docs/FLOWS-CLI.md promises them.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitConflict    = 4
	exitUnavailable = 5
)

// shell runs commands against one server.
type shell struct {
	*target
	t *testing.T
}

// object runs a command with --json and reads the one object that it prints,
// or, when it fails, the error.
func (s shell) object(code int, args ...string) map[string]any {
	s.t.Helper()
	all := s.objects(code, args...)
	if len(all) != 1 {
		s.t.Fatalf("perdure %s printed %d objects, want one: %v", strings.Join(args, " "), len(all), all)
	}
	return all[0]
}

func (s shell) objects(code int, args ...string) []map[string]any {
	s.t.Helper()
	out, errs, got := s.command(nil, append(args, "--json")...)
	if got != code {
		s.t.Fatalf("perdure %s ended with %d, want %d:\n%s%s", strings.Join(args, " "), got, code, out, errs)
	}
	text := out
	if text == "" {
		text = errs
	}
	var all []map[string]any
	for line := range strings.Lines(text) {
		var v map[string]any
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			s.t.Fatalf("perdure %s printed a line that is no JSON object: %q", strings.Join(args, " "), line)
		}
		all = append(all, v)
	}
	return all
}

// text runs a command without --json.
func (s shell) text(code int, args ...string) string {
	s.t.Helper()
	out, errs, got := s.command(nil, args...)
	if got != code {
		s.t.Fatalf("perdure %s ended with %d, want %d:\n%s%s", strings.Join(args, " "), got, code, out, errs)
	}
	return out + errs
}

func (s shell) contains(text string, words ...string) {
	s.t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			s.t.Errorf("%q is not in:\n%s", w, text)
		}
	}
}

func newShell(t *testing.T) shell {
	s := newTarget(t, "")
	s.start()
	newWorkers(t, s).start()
	sh := shell{s, t}
	eventually(t, "the worker", func() bool { return len(sh.objects(exitOK, "worker", "list")) == 1 })
	return sh
}

// TestCommandLine plays the life of a flow on the command line.
func TestCommandLine(t *testing.T) {
	s := newShell(t)
	if got := s.object(exitOK, "flow", "start", "note", "Write", `"tea"`, "--id", "n1"); got["flow_id"] != "n1" || got["created"] != true {
		t.Errorf("started %v", got)
	}
	eventually(t, "the step that waits", func() bool {
		steps, _ := s.object(exitOK, "flow", "describe", "n1")["steps"].([]any)
		return len(steps) == 1 && steps[0].(map[string]any)["step"] == "Approve"
	})
	s.contains(s.text(exitOK, "flow", "describe", "n1"), "n1", "note", "running", "Approve", "approval", "subject", "tea")
	if got := s.text(exitOK, "flow", "rpc", "n1", "about", `"all about"`); got != "\"all about tea\"\n" {
		t.Errorf("the RPC gives %q", got)
	}
	if got := s.text(exitOK, "flow", "get", "n1", "subject"); got != "\"tea\"\n" {
		t.Errorf("get gives %q", got)
	}
	s.text(exitOK, "flow", "set", "n1", `subject="coffee"`)
	list := s.objects(exitOK, "flow", "list", "--query", `subject = "coffee" and status = running`)
	if len(list) != 1 || list[0]["id"] != "n1" {
		t.Errorf("the query finds %v", list)
	}
	if got := s.objects(exitOK, "flow", "list", "--query", `subject = "tea"`); len(got) != 0 {
		t.Errorf("the former value finds %v", got)
	}
	watched := make(chan []map[string]any)
	go func() { watched <- s.objects(exitOK, "flow", "watch", "n1") }()
	s.text(exitOK, "flow", "signal", "n1", "approval", "true")
	if got := s.object(exitOK, "flow", "wait", "n1"); got["status"] != "completed" || got["output"] != "coffee is published" {
		t.Errorf("wait gives %v", got)
	}
	story := s.objects(exitOK, "flow", "history", "n1")
	if first, last := story[0], story[len(story)-1]; first["type"] != "flow.started" || last["type"] != "flow.completed" || last["cursor"] == "" {
		t.Errorf("the history is %v", story)
	}
	seen := <-watched
	if n := len(seen); n < len(story) || seen[n-1]["event"].(map[string]any)["type"] != "flow.completed" {
		t.Errorf("watch has shown %v", seen)
	}
	s.contains(s.text(exitOK, "flow", "history", "n1"), "Write #1", "Approve #2", "coffee is published")

	// A new run from its first step: it writes again, and the message is there again.
	if got := s.object(exitOK, "flow", "reset", "n1", "--exec", "1", "--reason", "once more"); got["run_id"] == "" {
		t.Errorf("reset gives %v", got)
	}
	if got := s.text(exitOK, "flow", "wait", "n1"); got != "\"tea is published\"\n" {
		t.Errorf("after the reset wait gives %q", got)
	}
	s.text(exitOK, "flow", "start", "note", "Write", `"time"`, "--id", "n2")
	eventually(t, "the step that waits for a timer", func() bool {
		_, _, code := s.command(nil, "flow", "skip-timer", "n2", "--condition", "reminder")
		return code == exitOK
	})
	if got := s.text(exitOK, "flow", "wait", "n2"); got != "\"nobody cared for time\"\n" {
		t.Errorf("after the timer wait gives %q", got)
	}
	if got := s.objects(exitOK, "flow", "list", "--type", "note", "--count")[0]; got["count"] != 2.0 {
		t.Errorf("list counts %v", got)
	}
	t.Run("failures", func(t *testing.T) { commandsFail(t, shell{s.target, t}) })
	t.Run("stops", func(t *testing.T) { commandsStop(t, shell{s.target, t}) })
	t.Run("queues", func(t *testing.T) {
		s := shell{s.target, t}
		types := s.objects(exitOK, "queue", "list")
		if !slices.ContainsFunc(types, func(q map[string]any) bool { return q["flow_type"] == "note" && q["workers"] == 1.0 }) {
			t.Errorf("the queues are %v", types)
		}
		s.contains(s.text(exitOK, "worker", "list"), "e2e-", "note")
	})
	s.text(exitOK, "flow", "delete", "n1")
	s.text(exitNotFound, "flow", "describe", "n1")
}

// commandsFail: each kind of failure has its exit code, and its words.
func commandsFail(t *testing.T, s shell) {
	for _, c := range []struct {
		args []string
		exit int
		code string
	}{
		{[]string{"flow", "start", "note", "Write", `""`, "--wait"}, exitFailed, "failed"}, // the object of the flow says it
		{[]string{"flow", "start", "nothing", "Write"}, exitUsage, "unknown_type"},
		{[]string{"flow", "start", "note", "Wriet", `"x"`}, exitUsage, "unknown_step"},
		{[]string{"flow", "start", "note", "Write", `tea`}, exitUsage, "usage"},
		{[]string{"flow", "start", "note", "Write", `"tea"`, "--id", "n1"}, exitConflict, "already_exists"},
		{[]string{"flow", "describe", "nowhere"}, exitNotFound, "not_found"},
		{[]string{"flow", "signal", "n1", "approvals", "true"}, exitUsage, "unknown_channel"},
		{[]string{"flow", "signal", "n1", "approval", "true"}, exitConflict, "flow_closed"},
		{[]string{"flow", "rpc", "n1", "abuot"}, exitUsage, "unknown_rpc"},
		{[]string{"flow", "set", "n1", "subject=7"}, exitUsage, "wrong_type"},
		{[]string{"flow", "list", "--query", `status = runing`}, exitUsage, "invalid"},
		{[]string{"flow", "reset", "n1"}, exitUsage, "usage"},
		{[]string{"flow", "reset", "n1", "--exec", "77"}, exitNotFound, "not_found"},
		{[]string{"schedule", "get", "never"}, exitNotFound, "not_found"},
		{[]string{"schedule", "create", "bad", "61 * * * *", "note", "Write", `"x"`}, exitUsage, "invalid"},
		{[]string{"flow", "describe", "n1", "--address", freeAddress(t)}, exitUnavailable, "unavailable"},
	} {
		got := s.objects(c.exit, c.args...)[0]
		if c.code == "failed" {
			if got["status"] != "failed" || !strings.Contains(got["error"].(string), "nothing to write about") {
				t.Errorf("%v prints %v", c.args, got)
			}
			continue
		}
		e, _ := got["error"].(map[string]any)
		if e["code"] != c.code || e["message"] == "" {
			t.Errorf("%v prints %v, want the code %s", c.args, got, c.code)
		}
		if said := s.text(c.exit, c.args...); !strings.HasPrefix(said, "perdure: ") {
			t.Errorf("%v says %q", c.args, said)
		}
	}
	said := s.text(exitUsage, "flow", "list", "--query", `type = "note" and status = runing`)
	s.contains(said, `type = "note" and status = runing`, "                           ^", "runing is not a status")
}

func commandsStop(t *testing.T, s shell) {
	for flag, want := range map[string]string{"--terminate": "terminated", "--fail": "failed", "--wait": "cancelled"} {
		id := "stop" + flag
		s.text(exitOK, "flow", "start", "note", "Write", `"x"`, "--id", id)
		if got := s.object(exitOK, "flow", "stop", id, flag, "--reason", "enough of it"); got["status"] != want {
			t.Errorf("stop %s: %v", flag, got)
		}
		s.text(exitConflict, "flow", "stop", id)
		if got := s.object(exitFailed, "flow", "wait", id); got["status"] != want || !strings.Contains(got["error"].(string), "enough of it") {
			t.Errorf("after stop %s: %v", flag, got)
		}
	}
}

// TestScheduleCommands: a schedule starts flows by itself, when it is told to,
// and not while it is paused.
func TestScheduleCommands(t *testing.T) {
	s := newShell(t)
	got := s.object(exitOK, "schedule", "create", "often", "@every 1s", "holding", "Hold", "1")
	if got["id"] != "often" || got["next"] == nil {
		t.Errorf("created %v", got)
	}
	s.text(exitConflict, "schedule", "create", "often", "@every 1s", "holding", "Hold", "1")
	started := func(id string) float64 {
		n, _ := s.object(exitOK, "schedule", "get", id)["started"].(float64)
		return n
	}
	eventually(t, "two flows of the schedule", func() bool { return started("often") >= 2 })
	s.text(exitOK, "schedule", "pause", "often", "--note", "enough")
	n := started("often")
	s.contains(s.text(exitOK, "schedule", "get", "often"), "paused", "enough", "@every 1s")
	if all := s.objects(exitOK, "flow", "list", "--query", `id ^= "often"`, "--limit", "0"); len(all) != int(n) {
		t.Errorf("%d flows were started, the schedule says %v", len(all), n)
	}

	s.object(exitOK, "schedule", "create", "yearly", "0 3 1 1 *", "holding", "Hold", "1", "--zone", "Europe/Berlin", "--overlap", "allow")
	s.text(exitOK, "schedule", "trigger", "yearly")
	eventually(t, "the triggered flow", func() bool { return started("yearly") == 1 })
	s.text(exitOK, "schedule", "backfill", "yearly", "--from", "2020-06-01", "--to", "2023-06-01")
	eventually(t, "three flows of past years", func() bool { return started("yearly") == 4 })
	id, _ := s.object(exitOK, "schedule", "get", "yearly")["last_flow_id"].(string)
	if got := s.object(exitOK, "flow", "wait", id); got["status"] != "completed" {
		t.Errorf("the last flow is %v", got)
	}
	if all := s.objects(exitOK, "schedule", "list"); len(all) != 2 {
		t.Errorf("the schedules are %v", all)
	}

	// Schedules are durable: this one goes on after a crash.
	s.text(exitOK, "schedule", "resume", "often")
	s.kill()
	s.start()
	eventually(t, "a flow after the crash", func() bool { return started("often") > n+1 })
	c := s.client(client.Options{})
	eventually(t, "the end of all flows of the schedule", func() bool {
		n, err := c.Count(t.Context(), `type = "holding" and status = completed`)
		return err == nil && n > 5
	})
	s.text(exitOK, "schedule", "delete", "often")
	s.text(exitNotFound, "schedule", "get", "often")
	all := s.objects(exitOK, "flow", "list", "--query", `id ^= "often"`, "--limit", "0")
	time.Sleep(1200 * time.Millisecond)
	if more := s.objects(exitOK, "flow", "list", "--query", `id ^= "often"`, "--limit", "0"); len(more) > len(all)+1 {
		t.Errorf("a schedule that was deleted has started %d flows", len(more)-len(all))
	}
}
