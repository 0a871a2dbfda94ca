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
	var text string
	for _, fr := range all {
		if fr.event == "message.delta" {
			text += lookUp(t, []byte(fr.data), "text")
			if fr.id != "" {
				t.Errorf("a delta has an ID: %v", fr)
			}
		} else if fr.id == "" {
			t.Errorf("a durable event has no ID: %v", fr)
		}
	}
	if text != "you said hello" {
		t.Errorf("text %q", text)
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
