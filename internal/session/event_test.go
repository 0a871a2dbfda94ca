package session

import (
	"bufio"
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// oneFrame reads b as a reader of event streams does and checks that it is one
// frame with valid JSON.
func oneFrame(t *testing.T, b []byte) (id, name string, data map[string]any) {
	t.Helper()
	if bytes.Contains(b, []byte("\r")) {
		t.Fatalf("a line break in %q", b)
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, len(b)+1)
	ended := false
	var raw string
	for sc.Scan() {
		if ended {
			t.Fatalf("more than one frame: %q", b)
		}
		field, value, _ := strings.Cut(sc.Text(), ": ")
		switch field {
		case "id":
			id = value
		case "event":
			name = value
		case "data":
			if raw != "" {
				t.Fatalf("two data lines: %q", b)
			}
			raw = value
		case "":
			ended = true
		default:
			t.Fatalf("unknown field %q in %q", field, b)
		}
	}
	if !ended {
		t.Fatalf("the frame is not ended: %q", b)
	}
	if err := json.Unmarshal([]byte(raw), &data); err != nil {
		t.Fatalf("%v: %q", err, raw)
	}
	return id, name, data
}

func FuzzFramesOfEvents(f *testing.F) {
	for _, s := range []string{"", "plain", "a\nb\r\nc", "data: x\n\nevent: y", `quote " and \ back`, "\x00\x1f\x7f", "\u2028\u2029\ufeff", "\xff\xfe", "<script>&", "€🙂"} {
		f.Add(s, "turn_1")
	}
	f.Add("x", "a\nid: 9")
	texts := []string{core.EventDropped, core.EventCancelRequested, core.EventStepRetrying, core.EventStepRestarted, core.EventDeleted}
	f.Fuzz(func(t *testing.T, s, scope string) {
		quoted, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		message := UserMessage(quoted)
		object := []byte(`{"text":` + string(quoted) + `}`)
		var evs []*wire.Event
		for _, typ := range texts {
			evs = append(evs, &wire.Event{Type: typ, Data: []byte(s), Step: s})
		}
		for _, step := range []string{agent.StepTurn, agent.StepTool} {
			evs = append(evs, &wire.Event{Type: core.EventStepStarted, Step: step, Data: object, Items: [][]byte{message}})
		}
		evs = append(evs, &wire.Event{Type: core.EventPublished, Data: message})
		for _, typ := range []string{agent.EventMessage, agent.EventTool, agent.EventCompleted, agent.EventFailed, agent.EventCancelled} {
			evs = append(evs, &wire.Event{Type: typ, Data: object, Items: [][]byte{message, message}}, &wire.Event{Type: typ, Data: []byte(`{}`)}, &wire.Event{Type: typ})
		}
		for i, ev := range evs {
			ev.Scope, ev.Lsn, ev.N, ev.AtUs = scope, uint64(i), 3, 1_700_000_000_000_000
			id, name, data := oneFrame(t, frame(ev))
			if name != nameOf(ev) || name == "" || (id == "") != (name == EventDeleted) {
				t.Fatalf("id %q name %q of %+v", id, name, ev)
			}
			if want := strings.ToValidUTF8(scope, "\ufffd"); scope != "" && data["turn_id"] != scope && !strings.Contains(want, "\ufffd") {
				t.Fatalf("turn %q of %q", data["turn_id"], scope)
			}
			described, raw := Describe(ev)
			if described != name || !json.Valid(raw) || !bytes.Equal(raw, Data(ev)) {
				t.Fatalf("Describe: %q %q", described, raw)
			}
		}
		_, name, data := oneFrame(t, deltaFrame(&stream.Delta{Scope: scope, Offset: 7, Text: s}))
		if name != EventDelta || data["offset"] != 7.0 {
			t.Fatalf("delta %v", data)
		}
	})
}

// A client may put line breaks between the tokens of its message.
func TestLineBreaksInAMessageStayInItsDataLine(t *testing.T) {
	content := json.RawMessage("[\n\t{\"type\":\"text\",\r\n\"text\":\"a\\nb\"}\r]")
	message := UserMessage(content)
	if bytes.ContainsAny(message, "\n\r") || !isNormal(message) {
		t.Fatalf("%q", message)
	}
	raw := append([]byte(`{"role":"user","content":`), append(content, '}')...) // as another writer may have kept it
	for _, m := range [][]byte{message, raw} {
		_, _, data := oneFrame(t, frame(&wire.Event{Type: core.EventStepStarted, Step: agent.StepTurn, Items: [][]byte{m}}))
		part := data["message"].(map[string]any)["content"].([]any)[0].(map[string]any)
		if part["text"] != "a\nb" {
			t.Fatalf("text %q", part["text"])
		}
	}
	if !bytes.ContainsAny(content, "\n") {
		t.Error("the caller's bytes were changed")
	}
}

func isNormal(m []byte) bool {
	return json.Valid(m) && bytes.HasPrefix(m, []byte(`{"role":"user","content":`))
}

func TestEventsThatAreNotShown(t *testing.T) {
	for _, ev := range []*wire.Event{{Type: core.EventStarted}, {Type: core.EventStepStarted, Step: agent.StepContinue}} {
		if b := frame(ev); b != nil {
			t.Errorf("%s: %q", ev.Type, b)
		}
	}
}

func TestFrame(t *testing.T) {
	for want, ev := range map[string]*wire.Event{
		"id: 12.1\nevent: turn.started\ndata: {\"turn_id\":\"t1\",\"at\":\"1970-01-01T00:00:01.500Z\",\"message\":{\"role\":\"user\",\"content\":\"hi\"}}\n\n": {
			Lsn: 12, N: 1, AtUs: 1_500_000, Type: core.EventStepStarted, Step: agent.StepTurn, Scope: "t1", Items: [][]byte{UserMessage([]byte(`"hi"`))}},
		"id: 3.0\nevent: turn.retrying\ndata: {\"turn_id\":\"t1\",\"at\":\"1970-01-01T00:00:00.000Z\",\"step\":\"turn\",\"attempt\":2,\"error\":\"503\"}\n\n": {
			Lsn: 3, Type: core.EventStepRetrying, Step: agent.StepTurn, Attempt: 2, Scope: "t1", Data: []byte("503")},
		"id: 4.0\nevent: turn.cancelled\ndata: {\"turn_id\":\"t1\",\"at\":\"1970-01-01T00:00:00.000Z\",\"reason\":\"superseded\"}\n\n": {
			Lsn: 4, Type: core.EventDropped, Scope: "t1", Data: []byte("superseded")},
		"event: session.deleted\ndata: {\"at\":\"1970-01-01T00:00:00.000Z\",\"reason\":\"retention\"}\n\n": {
			Lsn: 5, Type: core.EventDeleted, Data: []byte("retention")},
	} {
		if got := string(frame(ev)); got != want {
			t.Errorf("%q\nwant %q", got, want)
		}
	}
}

func FuzzParseID(f *testing.F) {
	for _, s := range []string{"", "0.0", "12.3", "18446744073709551615.4294967295", "18446744073709551616.0", "1.4294967296", "-1.0", "+1.0", "1", "1.", ".1", "1.2.3", "1_0.0", " 1.0", "0x1.0", "1.0\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		cur, err := ParseID(s)
		if err != nil {
			if cur != (core.Cursor{}) {
				t.Fatalf("%q gives %v and %v", s, cur, err)
			}
			return
		}
		again, err := ParseID(formatID(cur.LSN, cur.N))
		if err != nil || again != cur {
			t.Fatalf("%q: %v, again %v %v", s, cur, again, err)
		}
		if strings.Trim(s, "0123456789.") != "" {
			t.Fatalf("%q was taken", s)
		}
	})
}

func TestParseIDRefuses(t *testing.T) {
	for _, s := range []string{"1", "1.", ".1", "1.2.3", "-1.0", "+1.0", "a.b", " 1.0", "1.0 ", "18446744073709551616.0", "1.4294967296"} {
		if _, err := ParseID(s); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
}

// Whatever ID a client gives, its flow is its tenant's and no other's.
func FuzzFlowIDStaysWithItsTenant(f *testing.F) {
	for _, s := range []string{"", "x", "..", "../t2/s/x", "a/b", "chat_1", "s", "a\x00b", "%2f", "é", strings.Repeat("a", 129)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, id string) {
		one, err := flowID("t1", id)
		if err != nil {
			return
		}
		two, err := flowID("t2", id)
		if err != nil || one == two {
			t.Fatalf("%q is %q for both: %v", id, one, err)
		}
		got, ok := IDOf(one)
		if !ok || got != id || TenantOf(one) != "t1" || strings.Count(one, "/") != 2 || len(one) > core.MaxIDBytes {
			t.Fatalf("%q lives at %q and reads back as %q", id, one, got)
		}
	})
}

func TestFlowsThatAreNoSessions(t *testing.T) {
	for _, id := range []string{"", "t", "t/s", "t/a/name", "t/x/y"} {
		if got, ok := IDOf(id); ok {
			t.Errorf("%q is session %q", id, got)
		}
	}
}
