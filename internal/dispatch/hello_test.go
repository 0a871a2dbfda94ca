package dispatch

import (
	"fmt"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func TestBadHellos(t *testing.T) {
	w := newWorld(t)
	many := make([]*wire.StepType, MaxNames+1)
	for i := range many {
		many[i] = &wire.StepType{Name: fmt.Sprint(i)}
	}
	long := strings.Repeat("x", MaxName+1)
	hello := func(change func(*wire.Hello)) *wire.Hello {
		h := &wire.Hello{Protocol: 1, WorkerId: "w", FlowTypes: []*wire.FlowType{typeT()}}
		change(h)
		return h
	}
	typed := func(f *wire.FlowType) *wire.Hello {
		return hello(func(h *wire.Hello) { h.FlowTypes = []*wire.FlowType{f} })
	}
	for want, h := range map[string]*wire.Hello{
		"invalid: the first frame of a worker must be a Hello": nil,
		"unsupported_protocol: the worker speaks protocol 0":   hello(func(h *wire.Hello) { h.Protocol = 0 }),
		"invalid: a worker must declare 1 to 256 flow types":   hello(func(h *wire.Hello) { h.FlowTypes = nil }),
		"invalid: the name \"\" of the worker":                 hello(func(h *wire.Hello) { h.WorkerId = "" }),
		"invalid: build and SDK":                               hello(func(h *wire.Hello) { h.Build = long }),
		"declared twice":                                       hello(func(h *wire.Hello) { h.FlowTypes = append(h.FlowTypes, typeT()) }),
		"invalid: the name \"\" of a flow type":                typed(&wire.FlowType{}),
		"the server's own":                                     typed(&wire.FlowType{Name: "perdure.schedule"}),
		"declares more than 1024 steps":                        typed(&wire.FlowType{Name: "t", Steps: many}),
		"invalid: the name \"a\\nb\" of a step of t":           typed(&wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "a\nb"}}}),
		"of an RPC of t":                                       typed(&wire.FlowType{Name: "t", Rpcs: []*wire.RpcType{{Name: long}}}),
		"of an attribute of t":                                 typed(&wire.FlowType{Name: "t", Attributes: []*wire.AttributeType{{Name: "\xff"}}}),
		"the type of attribute \"a\"":                          typed(&wire.FlowType{Name: "t", Attributes: []*wire.AttributeType{{Name: "a", Type: long}}}),
		"of a channel of t":                                    typed(&wire.FlowType{Name: "t", Channels: []string{"\x00"}}),
	} {
		if _, err := w.d.Connect("a", "", h, &fake{w: w}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	if len(w.d.Workers("a")) != 0 {
		t.Error("a bad worker is connected")
	}
	f := w.connect("w", 0, &wire.FlowType{Name: "t", Attributes: []*wire.AttributeType{{Name: "*"}, {Name: "a*"}}, Channels: []string{"c*"}})
	if err := f.worker.Frame(&wire.WorkerFrame{Hello: &wire.Hello{}}); err == nil || !strings.Contains(err.Error(), "Hello once") {
		t.Errorf("second Hello: %v", err)
	}
}

func TestWhatIsKnownIsTheUnion(t *testing.T) {
	w := newWorld(t)
	if _, ok := w.d.KnownType("a", "t"); ok {
		t.Error("known before")
	}
	f := w.connect("f", 0, &wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "s"}, {Name: "old"}}, Attributes: []*wire.AttributeType{{Name: "x", Type: "int"}}})
	w.connect("g", 0, &wire.FlowType{Name: "t", Steps: []*wire.StepType{{Name: "s", WaitFor: true}, {Name: "new"}}, Attributes: []*wire.AttributeType{{Name: "x", Type: "string"}}, Channels: []string{"c"}})
	f.leave("gone")
	k, ok := w.d.KnownType("a", "t")
	if !ok || len(k.Steps) != 3 || !k.Steps[0].WaitFor || k.Steps[1].Name != "old" || len(k.Attributes) != 1 || k.Attributes[0].Type != "string" || len(k.Channels) != 1 {
		t.Errorf("known %v", k)
	}
	if _, ok := w.d.KnownType("b", "t"); ok {
		t.Error("known to another tenant")
	}
}

func TestRememberedNamesAreBounded(t *testing.T) {
	w := newWorld(t)
	var err error
	for i := 0; err == nil && i < 10; i++ {
		ft := &wire.FlowType{Name: "t"}
		for j := range MaxNames / 4 {
			ft.Steps = append(ft.Steps, &wire.StepType{Name: fmt.Sprint(i, ".", j)})
		}
		_, err = w.d.Connect("a", "", &wire.Hello{Protocol: 1, WorkerId: "w", FlowTypes: []*wire.FlowType{ft}}, &fake{w: w})
	}
	if err == nil || !strings.Contains(err.Error(), "limit_reached: workers declared more than 1024 names") {
		t.Errorf("names: %v", err)
	}
	err = nil
	for i := 0; err == nil && i < 40; i++ {
		h := &wire.Hello{Protocol: 1, WorkerId: "w"}
		for j := range MaxTypes {
			h.FlowTypes = append(h.FlowTypes, &wire.FlowType{Name: fmt.Sprint(i, ".", j)})
		}
		_, err = w.d.Connect("b", "", h, &fake{w: w})
	}
	if err == nil || !strings.Contains(err.Error(), "declared more than 4096 flow types") {
		t.Errorf("types: %v", err)
	}
}
