package httpapi

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/perdure-dev/perdure/api"
)

// spec is the OpenAPI file with its schemas compiled. Every answer that the
// tests of this package get is held against it.
type spec struct {
	Paths      map[string]map[string]operation
	Components struct {
		Responses map[string]response
		Schemas   map[string]json.RawMessage
	}
	schemas map[string]*jsonschema.Schema
}

type operation struct {
	OperationID string `json:"operationId"`
	RequestBody struct{ Content map[string]media }
	Responses   map[string]response
	Parameters  []struct{ Name, In string }
	Security    *[]json.RawMessage
}

type response struct {
	Ref     string `json:"$ref"`
	Content map[string]media
	Headers map[string]json.RawMessage
}

type media struct {
	Schema struct {
		Ref string `json:"$ref"`
	}
	Events map[string]struct {
		Ref string `json:"$ref"`
	} `json:"x-events"`
}

var theSpec = sync.OnceValues(func() (*spec, error) {
	s := &spec{schemas: map[string]*jsonschema.Schema{}}
	if err := json.Unmarshal(api.OpenAPI, s); err != nil {
		return nil, err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(api.OpenAPI))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("openapi.json", doc); err != nil {
		return nil, err
	}
	for name := range s.Components.Schemas {
		if s.schemas[name], err = c.Compile("openapi.json#/components/schemas/" + name); err != nil {
			return nil, err
		}
	}
	return s, nil
})

func specOf(t testing.TB) *spec {
	t.Helper()
	s, err := theSpec()
	if err != nil {
		t.Fatalf("openapi.json: %v", err)
	}
	return s
}

func (s *spec) response(op operation, status int) (response, bool) {
	r, ok := op.Responses[strconv.Itoa(status)]
	if r.Ref != "" {
		r, ok = s.Components.Responses[strings.TrimPrefix(r.Ref, "#/components/responses/")]
	}
	return r, ok
}

// check holds a JSON text against the schema of a reference.
func (s *spec) check(t testing.TB, ref string, text []byte) {
	t.Helper()
	sch := s.schemas[strings.TrimPrefix(ref, "#/components/schemas/")]
	if sch == nil {
		t.Errorf("openapi.json has no %q", ref)
		return
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err == nil {
		err = sch.Validate(v)
	}
	if err != nil {
		t.Errorf("not a %s: %v\n%s", ref, err, text)
	}
}

// operation finds what the file says of a request's route.
func (w *world) operation(req *http.Request) (operation, bool) {
	rt, _, _ := w.api.router.find(req.Method, req.URL.Path)
	if rt == nil {
		return operation{}, false
	}
	return specOf(w.t).Paths[rt.pattern][strings.ToLower(rt.method)], true
}

// conforms holds an answer that was read whole against the file.
func (w *world) conforms(req *http.Request, sent string, a answer) {
	w.t.Helper()
	s := specOf(w.t)
	if a.header.Get("X-Request-Id") == "" {
		w.t.Errorf("%s %s: no X-Request-Id", req.Method, req.URL.Path)
	}
	op, ok := w.operation(req)
	if !ok {
		if a.status == 404 || a.status == 405 {
			s.check(w.t, "Error", a.body)
		}
		return
	}
	r, ok := s.response(op, a.status)
	if !ok {
		w.t.Errorf("%s %s: openapi.json has no status %d: %s", req.Method, req.URL.Path, a.status, a.body)
		return
	}
	if a.status/100 == 2 && sent != "" {
		s.check(w.t, op.RequestBody.Content["application/json"].Schema.Ref, []byte(sent))
	}
	kind := a.header.Get("Content-Type")
	m, ok := r.Content[strings.SplitN(kind, ";", 2)[0]]
	switch {
	case len(r.Content) == 0 && len(a.body) == 0:
	case !ok:
		w.t.Errorf("%s %s: openapi.json has no %d of type %q", req.Method, req.URL.Path, a.status, kind)
	case kind == "application/json" && m.Schema.Ref != "":
		s.check(w.t, m.Schema.Ref, a.body)
	}
	for name := range r.Headers {
		if a.header.Get(name) == "" && !(name == "Location" && a.status == 200) && !strings.HasPrefix(name, "X-Perdure") && !(a.status == 503 && name == "Retry-After") {
			w.t.Errorf("%s %s: %d has no header %s", req.Method, req.URL.Path, a.status, name)
		}
	}
}

// conforms holds a frame of a stream against the file.
func (f *frames) conforms(fr frame) {
	f.t.Helper()
	if fr.data == "" || fr.data == "[DONE]" {
		return
	}
	m := f.op.Responses["200"].Content["text/event-stream"]
	ref, ok := m.Events[fr.event]
	switch {
	case !ok:
		f.t.Errorf("openapi.json has no event %q here", fr.event)
	case fr.event == "" && strings.HasPrefix(fr.data, `{"error":`):
		specOf(f.t).check(f.t, "OpenAIError", []byte(fr.data))
	default:
		specOf(f.t).check(f.t, ref.Ref, []byte(fr.data))
	}
}

// TestSpecHasEveryRoute: the file and the router have the same routes, and the
// file says of each what the router does before the handler.
func TestSpecHasEveryRoute(t *testing.T) {
	s := specOf(t)
	ids := map[string]bool{}
	known := map[string]bool{}
	for _, rt := range routes {
		name := rt.method + " " + rt.pattern
		known[name] = true
		op, ok := s.Paths[rt.pattern][strings.ToLower(rt.method)]
		if !ok {
			t.Errorf("openapi.json has no %s", name)
			continue
		}
		if op.OperationID == "" || ids[op.OperationID] {
			t.Errorf("%s has no operationId of its own: %q", name, op.OperationID)
		}
		ids[op.OperationID] = true
		if isOpen := op.Security != nil && len(*op.Security) == 0; isOpen != (rt.flags&open != 0) {
			t.Errorf("%s: needs a key or not? The file and the router differ", name)
		}
		params := map[string]bool{}
		for _, p := range op.Parameters {
			params[p.In+" "+p.Name] = true
		}
		for _, part := range strings.Split(rt.pattern, "/") {
			if strings.HasPrefix(part, "{") && !params["path "+strings.Trim(part, "{}")] {
				t.Errorf("%s: the file has no parameter %s", name, part)
			}
		}
		for _, q := range rt.query {
			if !params["query "+q] {
				t.Errorf("%s: the file has no query parameter %s", name, q)
			}
			delete(params, "query "+q)
		}
		for p := range params {
			if strings.HasPrefix(p, "query ") {
				t.Errorf("%s: the router does not take %s", name, p)
			}
		}
		want := "Error"
		if rt.flags&openAI != 0 {
			want = "OpenAIError"
		}
		for status := range op.Responses {
			if code, _ := strconv.Atoi(status); code >= 400 {
				r, ok := s.response(op, code)
				if ref := r.Content["application/json"].Schema.Ref; !ok || ref != "#/components/schemas/"+want {
					t.Errorf("%s: %s is %q, want %s", name, status, ref, want)
				}
			}
		}
		for _, status := range []string{"403", "500"} {
			if _, ok := op.Responses[status]; !ok {
				t.Errorf("%s can answer %s; the file does not say so", name, status)
			}
		}
	}
	for path, ops := range s.Paths {
		for method := range ops {
			if !known[strings.ToUpper(method)+" "+path] {
				t.Errorf("openapi.json has %s %s, the router has not", method, path)
			}
		}
	}
}

func TestSpecIsServed(t *testing.T) {
	w := newWorld(t)
	a := w.do("GET", "/openapi.json", "")
	if a.status != 200 || !bytes.Equal(a.body, api.OpenAPI) {
		t.Errorf("%d, %d bytes", a.status, len(a.body))
	}
	resp, err := w.srv.Client().Do(w.request("HEAD", "/openapi.json", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || len(b) > 0 || resp.ContentLength != int64(len(api.OpenAPI)) {
		t.Errorf("HEAD: %d, %d bytes, length %d", resp.StatusCode, len(b), resp.ContentLength)
	}
}
