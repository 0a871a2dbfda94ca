package server

import (
	"context"
	"errors"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/flows"
	"github.com/perdure-dev/perdure/internal/wire"
)

// present is workers of tenant t that are connected.
type present struct {
	nobody
	types map[string]*wire.FlowType
}

// nobody is the methods that this test does not need.
type nobody struct{ flows.Workers }

func (p present) KnownType(tenant, name string) (*wire.FlowType, bool) {
	t := p.types[name]
	return t, t != nil && tenant == "t"
}

func (p present) Workers(tenant string) []*wire.WorkerInfo {
	w := &wire.WorkerInfo{}
	for name := range p.types {
		if tenant == "t" {
			w.FlowTypes = append(w.FlowTypes, name)
		}
	}
	return []*wire.WorkerInfo{w}
}

// counting counts writes, and refuses them when it is told to.
type counting struct {
	blob.Store
	puts int
	fail error
}

func (c *counting) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if c.puts++; c.fail != nil {
		return "", c.fail
	}
	return c.Store.Put(ctx, key, data, o)
}

func workersOf(names ...string) present {
	p := present{types: map[string]*wire.FlowType{}}
	for _, n := range names {
		p.types[n] = &wire.FlowType{Name: n, Steps: []*wire.StepType{{Name: "s"}}}
	}
	return p
}

func TestDeclaredTypesOutliveARestart(t *testing.T) {
	ctx := t.Context()
	store := &counting{Store: mem.New(mem.Options{})}
	d := newDeclared(workersOf("a", "b"), store)
	if err := d.load(ctx, "t"); err != nil {
		t.Fatal(err)
	}
	store.fail = errors.New("full")
	if err := d.save(ctx, "t"); !errors.Is(err, store.fail) {
		t.Errorf("a write that fails: %v", err)
	}
	store.fail = nil
	for range 3 {
		if err := d.save(ctx, "t"); err != nil {
			t.Fatal(err)
		}
	}
	if store.puts != 2 {
		t.Errorf("%d writes, want one that failed and one more", store.puts)
	}

	d = newDeclared(workersOf(), store)
	if err := errors.Join(d.load(ctx, "t"), d.load(ctx, "other")); err != nil {
		t.Fatal(err)
	}
	if f, ok := d.KnownType("t", "b"); !ok || f.Steps[0].Name != "s" {
		t.Errorf("after a restart: %v, %v", f, ok)
	}
	for tenant, name := range map[string]string{"t": "c", "other": "a"} {
		if f, ok := d.KnownType(tenant, name); ok {
			t.Errorf("%s knows %v", tenant, f)
		}
	}
	// What is declared now counts.
	now := workersOf("a")
	now.types["a"].Steps[0].Name = "new"
	d.connected = now
	if f, _ := d.KnownType("t", "a"); f.Steps[0].Name != "new" {
		t.Errorf("known is %v", f)
	}
	if err := d.save(ctx, "t"); err != nil || store.puts != 3 {
		t.Errorf("%v after %d writes", err, store.puts)
	}
	d = newDeclared(workersOf(), store)
	if err := d.load(ctx, "t"); err != nil {
		t.Fatal(err)
	}
	if f, _ := d.KnownType("t", "a"); f.GetSteps()[0].Name != "new" {
		t.Errorf("kept is %v", f)
	}
	if _, ok := d.KnownType("t", "b"); !ok {
		t.Error("b is forgotten")
	}

	// A type that is new is written before its worker counts; a known one is not
	// written again.
	for range 2 {
		if err := d.declares(ctx, "t", []*wire.FlowType{{Name: "c"}, {Name: "a"}}); err != nil || store.puts != 4 {
			t.Errorf("%v after %d writes", err, store.puts)
		}
	}
	d = newDeclared(workersOf(), store)
	if err := d.load(ctx, "t"); err != nil {
		t.Fatal(err)
	}
	if _, ok := d.KnownType("t", "c"); !ok {
		t.Error("c is forgotten")
	}

	if _, err := store.Store.Put(ctx, typesPrefix+"t", []byte{0xff}, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := d.load(ctx, "t"); err == nil {
		t.Error("nonsense was read")
	}
}
