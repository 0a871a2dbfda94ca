package load

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const own = `{"name": "own", "open": {"method": "POST", "path": "/v1/sessions", "body": {"agent": "x"}}, "session_id": "id",
"turn": {"method": "POST", "path": "/v1/sessions/{session}/turns", "body": {"input": "hi", "stream": true}},
"shut": {"method": "DELETE", "path": "/v1/sessions/{session}"},
"events": {"token": ["message.delta"], "done": ["turn.completed"], "failed": ["turn.failed"]}}`

// A described protocol drives a server as the built-in one does.
func TestDescribedProtocol(t *testing.T) {
	p, err := ReadProtocol(strings.NewReader(own))
	if err != nil {
		t.Fatal(err)
	}
	f := newFake(t, &fake{ttft: 2 * time.Millisecond, total: 4 * time.Millisecond})
	points, err := Run(context.Background(), Config{Target: f.url, Protocol: p, Concurrency: 2, Ramp: time.Millisecond, Duration: 100 * time.Millisecond})
	if err != nil || points[0].Errors != 0 || points[0].Turns < 4 || points[0].TTFT.P50 < 2 {
		t.Errorf("%+v, %v", points, err)
	}
	if f.created != 2 || f.deleted != 2 || points[0].Settings["protocol"] != "own" {
		t.Errorf("%d created, %d deleted, settings %v", f.created, f.deleted, points[0].Settings)
	}
}

func TestDescribedWhole(t *testing.T) {
	p := described{WholeIs: describedWhole{All: []string{"a", "b"}, None: []string{"error"}}}
	for body, want := range map[string]Progress{"a b": Done, "a": Failed, "a b error": Failed, "": Failed} {
		if got := p.Whole([]byte(body)); got != want {
			t.Errorf("%q: %v, want %v", body, got, want)
		}
	}
}

func TestReadProtocolRefuses(t *testing.T) {
	for name, edit := range map[string][2]string{
		"unknown member": {`"name"`, `"nom": 1, "name"`},
		"no name":        {`"own"`, `""`},
		"no id":          {`"session_id": "id"`, `"session_id": ""`},
		"no turn":        {`"turn":`, `"shut":`},
		"method":         {`"DELETE"`, `"DROP"`},
		"path":           {`"/v1/sessions"`, `"/v1 HTTP/1.1\r\nX: y"`},
		"never done":     {`"done": ["turn.completed"]`, `"done": []`},
	} {
		text := strings.Replace(own, edit[0], edit[1], 1)
		if p, err := ReadProtocol(strings.NewReader(text)); text == own || err == nil {
			t.Errorf("%s: took %+v", name, p)
		}
	}
	if _, err := ReadProtocol(strings.NewReader(own + own)); err == nil {
		t.Error("two objects were taken")
	}
}

// The descriptions in the repository are readable.
func TestPeersAreDescribed(t *testing.T) {
	files, err := filepath.Glob("../../bench/peers/*/protocol.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ReadProtocol(bytes.NewReader(b)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadProtocol(f *testing.F) {
	f.Add([]byte(own), []byte(`{"id":"s"}`))
	f.Add([]byte(`{"name":"x","turn":{"method":"GET","path":"/"},"whole":{"contains":["y"]}}`), []byte("y"))
	f.Fuzz(func(t *testing.T, text, body []byte) {
		p, err := ReadProtocol(bytes.NewReader(text))
		if err != nil {
			return
		}
		if id, err := p.Session(body); err == nil && id == "" {
			t.Fatal("an empty session")
		}
		if p.Turn("s").Method == "" || p.Name() == "" {
			t.Fatalf("took %s", text)
		}
		p.Whole(body)
	})
}
