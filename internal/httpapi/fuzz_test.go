package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/session"
)

// refused fails unless err is nil or a refusal of the client's request.
func refused(t *testing.T, err error) bool {
	t.Helper()
	if err == nil {
		return false
	}
	var r *refusal
	if !errors.As(err, &r) || r.status < 400 || r.status > 499 || r.message == "" {
		t.Fatalf("not a refusal of a request: %v", err)
	}
	if b := r.appendNative(nil); !json.Valid(b) {
		t.Fatalf("the error is no JSON: %s", b)
	}
	if b := r.appendOpenAI(nil); !json.Valid(b) {
		t.Fatalf("the error is no JSON: %s", b)
	}
	return true
}

// kept fails unless what is kept of a request is one line of JSON.
func kept(t *testing.T, raw json.RawMessage) {
	t.Helper()
	if !json.Valid(raw) || bytes.ContainsAny(raw, "\r\n") {
		t.Fatalf("kept is %q", raw)
	}
}

// FuzzParse: parsing agrees with encoding/json on what is JSON and on its value.
func FuzzParse(f *testing.F) {
	for _, s := range []string{`{"a":[1,{"b":"\"]}\\"},null]}`, ` { "a" : true , "b" : [ ] } `, `"x"`, `[[[[]]]]`, `{"a":1e5,"a":2}`, `{"":-0}`, "\"\xff\"", `nul`, ``} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		given := bytes.Clone(body)
		v, err := parse(body)
		if refused(t, err) {
			return
		}
		var want, got any
		if err := json.Unmarshal(given, &want); err != nil {
			t.Fatalf("took what is no JSON: %v", err)
		}
		if err := json.Unmarshal(v.raw, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%q became %q: %v", given, v.raw, err)
		}
		kept(t, v.raw)
		walk(t, v)
	})
}

// walk visits every value; each must be JSON by itself.
func walk(t *testing.T, v value) {
	kept(t, v.raw)
	switch v.raw[0] {
	case '{':
		refused(t, v.object(func(_ string, m value) error { walk(t, m); return nil }))
	case '[':
		refused(t, v.array(1<<20, func(_ int, e value) error { walk(t, e); return nil }))
	case '"':
		var want string
		if err := json.Unmarshal(v.raw, &want); err != nil || text(v.raw) != want {
			t.Fatalf("%q is %q, want %q", v.raw, text(v.raw), want)
		}
	}
}

func FuzzTurn(f *testing.F) {
	for _, s := range []string{`{"input":"x","stream":true,"on_busy":"enqueue"}`, `{"input":[{"type":"text","text":"x"}]}`, `{"input":{"role":"user","content":"x"}}`, `{"input":{"content":{"content":"x"}}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := parse(body)
		if refused(t, err) {
			return
		}
		req, err := decodeTurn(v)
		if refused(t, err) {
			return
		}
		kept(t, req.content)
		if c := req.content[0]; c != '"' && c != '[' {
			t.Fatalf("content is %s", req.content)
		}
	})
}

// normal fails unless a message has the form that conversations rely on.
func normal(t *testing.T, m json.RawMessage) {
	t.Helper()
	kept(t, m)
	var got struct{ Role string }
	if err := json.Unmarshal(m, &got); err != nil || !strings.HasPrefix(string(m), `{"role":"`+got.Role+`"`) {
		t.Fatalf("not in normal form: %s", m)
	}
}

func FuzzSession(f *testing.F) {
	for _, s := range []string{`{"agent":"a","id":"x","metadata":{"k":1},"retention":"1h","messages":[{"role":"user","content":"x"}]}`, `{"agent":"a","messages":[{"content":"x","name":"n","role":"user"}]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := parse(body)
		if refused(t, err) {
			return
		}
		req, err := decodeSession(v)
		if refused(t, err) {
			return
		}
		if req.Metadata != nil {
			kept(t, req.Metadata)
		}
		for _, m := range req.History {
			normal(t, m)
		}
	})
}

func FuzzChat(f *testing.F) {
	for _, s := range []string{`{"model":"a","messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"model":"a","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"1","content":"x"},{"role":"user","content":[{"type":"text","text":"x"}]}]}`,
		`{"model":"a","n":1,"tools":[],"response_format":{"type":"text"},"messages":[{"role":"user","content":"x"}]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := parse(body)
		if refused(t, err) {
			return
		}
		req, err := decodeChat(v)
		if refused(t, err) {
			return
		}
		normal(t, session.UserMessage(req.input))
		for _, m := range req.history {
			normal(t, m)
		}
	})
}

func FuzzAgent(f *testing.F) {
	for _, s := range []string{`{"name":"a","provider":"p","parameters":{"x":1},"tools":["t",{"name":"u","parameters":{"type":"object"},"http":{"url":"https://x.example","headers":{"a":"b"},"timeout":"1s"}}]}`, `{"provider":"p"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := parse(body)
		if refused(t, err) {
			return
		}
		def, err := decodeAgent(v, "")
		if refused(t, err) {
			return
		}
		if model.ValidateParams(def.Parameters) == nil && def.Parameters != nil {
			kept(t, def.Parameters)
		}
		if _, err := json.Marshal(def); err != nil {
			t.Fatalf("cannot be written back: %v", err)
		}
	})
}
