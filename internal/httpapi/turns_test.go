package httpapi

import (
	"strings"
	"testing"
)

func TestTurnStream(t *testing.T) {
	w := newWorld(t)
	id := w.session()
	f := w.open("POST", "/v1/sessions/"+id+"/turns", `{"input":"hello","stream":true}`)
	if f.resp.Header.Get("X-Perdure-Session") != id || f.resp.Header.Get("X-Perdure-Turn") == "" {
		t.Errorf("headers: %v", f.resp.Header)
	}
	all := f.rest()
	got := names(all)
	if !strings.HasPrefix(got, "turn.started ") || !strings.HasSuffix(got, " message.completed turn.completed") {
		t.Errorf("events: %s", got)
	}
	var text, whole string // a short answer may come without deltas
	for _, fr := range all {
		switch {
		case fr.event == "message.delta":
			text += lookUp(t, []byte(fr.data), "text")
			if fr.id != "" {
				t.Errorf("a delta has an ID: %v", fr)
			}
		case fr.id == "":
			t.Errorf("a durable event has no ID: %v", fr)
		case fr.event == "message.completed":
			whole = lookUp(t, []byte(fr.data), "message.content")
		}
	}
	if whole != "you said hello" || text != "" && text != whole {
		t.Errorf("text %q, deltas %q", whole, text)
	}
}

// TestDeltasAddUp: what is shown while it is written is the message.
func TestDeltasAddUp(t *testing.T) {
	w := newWorld(t)
	f := w.open("POST", "/v1/sessions/"+w.session()+"/turns", `{"input":"hold","stream":true}`)
	shown := lookUp(t, []byte(f.until("message.delta").data), "text")
	w.script.release <- struct{}{}
	fr := f.until("message.delta")
	if lookUp(t, []byte(fr.data), "offset") != "7" {
		t.Errorf("%v", fr)
	}
	shown += lookUp(t, []byte(fr.data), "text")
	if whole := lookUp(t, []byte(f.until("message.completed").data), "message.content"); shown != whole || whole != "before after" {
		t.Errorf("shown %q, message %q", shown, whole)
	}
}

func TestTurnWait(t *testing.T) {
	w := newWorld(t)
	id := w.session()
	tests := []struct{ input, status, text, calls string }{
		{`"hello"`, "completed", "you said hello", ""},
		{`{"content":"hi","role":"user"}`, "completed", "you said hi", ""},
		{`[ {"type": "text", "text": "parts"} ]`, "completed", `you said [{"type":"text","text":"parts"}]`, ""},
		{`"tool"`, "completed", "The tool answered.", "missing"},
		{`"fail upstream_error"`, "failed", "", ""},
		{`"break"`, "failed", "half ", ""},
	}
	for _, tt := range tests {
		t.Run(tt.input, func(t *testing.T) {
			a := w.do("POST", "/v1/sessions/"+id+"/turns", `{"input":`+tt.input+`}`)
			if a.status != 200 || a.get(t, "status") != tt.status || a.get(t, "text") != tt.text || a.get(t, "tool_calls.0.name") != tt.calls {
				t.Fatalf("%d %s", a.status, a.body)
			}
			if tt.status == "failed" && a.get(t, "error.code") == "" {
				t.Errorf("no error: %s", a.body)
			}
			again := w.do("GET", "/v1/sessions/"+id+"/turns/"+a.get(t, "turn_id"), "")
			if string(again.body) != string(a.body) {
				t.Errorf("looked up later it is another:\n%s\n%s", a.body, again.body)
			}
		})
	}
}
