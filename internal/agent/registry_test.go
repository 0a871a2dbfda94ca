package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestDefinitionErrorsNameThePath(t *testing.T) {
	r := NewRegistry(map[string]*Provider{"p": {Name: "p", Model: "m"}, "q": {Name: "q"}}, nil, nil)
	ok := Definition{Name: "a", Provider: "p"}
	if a, err := r.Compile(ok, true); err != nil || a.model != "m" || !a.FromAPI {
		t.Fatalf("%+v %v", a, err)
	}
	for _, c := range []struct {
		path   string
		change func(*Definition)
		says   string
	}{
		{"name", func(d *Definition) { d.Name = "" }, "not a name"},
		{"name", func(d *Definition) { d.Name = "a/b" }, "allowed"},
		{"name", func(d *Definition) { d.Name = strings.Repeat("a", 65) }, "1 to 64"},
		{"name", func(d *Definition) { d.Name = "a\x00" }, "not a name"},
		{"name", func(d *Definition) { d.Name = ".." }, "not a name"},
		{"provider", func(d *Definition) { d.Provider = "" }, "[p q]"},
		{"provider", func(d *Definition) { d.Provider = "none" }, `"none"`},
		{"instructions", func(d *Definition) { d.Instructions = strings.Repeat("x", MaxInstructions+1) }, fmt.Sprint(MaxInstructions)},
		{"parameters", func(d *Definition) { d.Parameters = json.RawMessage(`[]`) }, ""},
		{"parameters", func(d *Definition) { d.Parameters = json.RawMessage(`{"stream":false}`) }, "stream"},
		{"max_context_messages", func(d *Definition) { d.MaxContextMessages = -1 }, "negative"},
		{"tools[0]", func(d *Definition) { d.Tools = []ToolRef{{Name: "none"}} }, `"none"`},
		{"tools", func(d *Definition) { d.Tools = make([]ToolRef, 1000) }, "1000"},
	} {
		d := ok
		c.change(&d)
		_, err := r.Compile(d, true)
		var de *DefinitionError
		if !errors.As(err, &de) || de.Path != c.path || !strings.Contains(de.Problem, c.says) {
			t.Errorf("%s: got %v", c.path, err)
		}
	}
}

func TestToolDefinitionErrorsNameThePath(t *testing.T) {
	w := newWorld(t, nil, nil)
	for _, c := range []struct{ tools, path, says string }{
		{`["look","look"]`, "tools[1]", "twice"},
		{`["look",{"name":"x","http":{"url":"ftp://example.com"}}]`, "tools[1]", "http"},
		{`[{"name":"x","http":{"url":"https://example.com","allow_private":true}}]`, "tools[0]", "allow_private"},
		{`[{"name":"x","http":{"url":"http://127.0.0.1/"}}]`, "tools[0]", "http.url"},
	} {
		d := Definition{Name: "b", Provider: "p"}
		if err := json.Unmarshal([]byte(c.tools), &d.Tools); err != nil {
			t.Fatal(err)
		}
		_, err := w.registry.Compile(d, true)
		var de *DefinitionError
		if !errors.As(err, &de) || de.Path != c.path || !strings.Contains(de.Problem, c.says) {
			t.Errorf("%s: got %v", c.tools, err)
		}
	}
}

func TestToolRefsKeepTheirForm(t *testing.T) {
	in := `[ "look", {"name":"x","http":{"url":"https://example.com/"}}]`
	var refs []ToolRef
	if err := json.Unmarshal([]byte(in), &refs); err != nil {
		t.Fatal(err)
	}
	if refs[0].Name != "look" || refs[0].Def != nil || refs[1].Def == nil || refs[1].Def.Name != "x" {
		t.Fatalf("%+v", refs)
	}
	out, err := json.Marshal(refs)
	if err != nil || !strings.HasPrefix(string(out), `["look",{"name":"x"`) {
		t.Fatalf("%s %v", out, err)
	}
	for _, bad := range []string{`[1]`, `[true]`, `[["look"]]`} {
		if json.Unmarshal([]byte(bad), &refs) == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

func TestRegistryKeepsTenantsApart(t *testing.T) {
	r := NewRegistry(map[string]*Provider{"p": {Name: "p"}}, nil, nil)
	if err := r.AddConfig(Definition{Name: "all", Provider: "p"}); err != nil {
		t.Fatal(err)
	}
	a, err := r.Compile(Definition{Name: "mine", Provider: "p"}, true)
	if err != nil {
		t.Fatal(err)
	}
	r.Set("t1", a)
	if _, err := r.Get("t2", "mine"); !errors.Is(err, ErrNoAgent) {
		t.Errorf("another tenant sees it: %v", err)
	}
	if _, err := r.Get("t2", "all"); err != nil {
		t.Error(err)
	}
	if got := len(r.List("t1")); got != 2 || r.List("t1")[0].Def.Name != "all" {
		t.Errorf("%d agents", got)
	}
	if !errors.Is(r.CanSet("t1", "all"), ErrConfigged) || r.CanSet("t1", "mine") != nil {
		t.Error("CanSet")
	}
	r.Remove("t2", "mine")
	r.Remove("t1", "all")
	if len(r.List("t1")) != 2 {
		t.Error("removed what was not the tenant's")
	}
	r.Remove("t1", "mine")
	if _, err := r.Get("t1", "mine"); !errors.Is(err, ErrNoAgent) || len(r.api) != 0 {
		t.Errorf("%v, %d tenants left", err, len(r.api))
	}
}

func TestAgentsOfATenantAreBounded(t *testing.T) {
	r := NewRegistry(map[string]*Provider{"p": {Name: "p"}}, nil, nil)
	for i := range MaxAgentsPerTenant {
		r.Set("t", &Agent{Def: Definition{Name: fmt.Sprintf("a%d", i)}})
	}
	if r.CanSet("t", "more") == nil {
		t.Error("one more was allowed")
	}
	if r.CanSet("t", "a0") != nil || r.CanSet("u", "more") != nil {
		t.Error("the bound is of one tenant, and for new names")
	}
}
