package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/dispatch"
	"github.com/perdure-dev/perdure/internal/flows"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	typesPrefix   = "types/"               // and the tenant: what its workers declared
	typesEvery    = 500 * time.Millisecond // between two looks at what is declared
	typesTimeout  = 5 * time.Second        // for a worker's to be written before it is welcomed
	maxTypesBytes = 64 << 20               // of one tenant's declarations
)

// declared is the workers with a memory of what they declared in former lives
// of the server: after a restart clients and handlers are there before the
// workers are back, and must not be told that there is no such flow type. What
// a worker declares in this life takes the place of what its type was before.
// Safe for concurrent use.
type declared struct {
	connected
	store blob.Store

	writing sync.Mutex // held while one tenant's types are written

	mu    sync.Mutex
	saved map[string]map[string]*wire.FlowType // by tenant and name; guarded by mu
	dirty map[string]bool                      // tenants that are not written yet; guarded by mu
}

// connected is the workers that are there.
type connected interface{ flows.Workers }

func newDeclared(w flows.Workers, store blob.Store) *declared {
	return &declared{connected: w, store: store, saved: map[string]map[string]*wire.FlowType{}, dirty: map[string]bool{}}
}

// KnownType implements flows.Workers.
func (d *declared) KnownType(tenant, flowType string) (*wire.FlowType, bool) {
	if t, ok := d.connected.KnownType(tenant, flowType); ok {
		return t, true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.saved[tenant][flowType]
	return t, t != nil
}

// load reads what the workers of a tenant declared in former lives.
func (d *declared) load(ctx context.Context, tenant string) error {
	obj, err := d.store.Get(ctx, typesPrefix+tenant)
	if errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	var all wire.Hello
	if err == nil {
		err = all.UnmarshalVT(obj.Data)
	}
	if err != nil {
		return fmt.Errorf("read the flow types of tenant %q: %w", tenant, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.saved[tenant] = map[string]*wire.FlowType{}
	for _, t := range all.FlowTypes {
		d.saved[tenant][t.Name] = t
	}
	return nil
}

// declares writes the types that are new here before anything can rely on them.
// How a type has changed is left to save.
func (d *declared) declares(ctx context.Context, tenant string, types []*wire.FlowType) error {
	d.add(tenant, types)
	return d.save(ctx, tenant) // which waits for another one's writing
}

// add takes over the types that are new.
func (d *declared) add(tenant string, types []*wire.FlowType) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.saved[tenant] == nil {
		d.saved[tenant] = map[string]*wire.FlowType{}
	}
	have := d.saved[tenant]
	for _, t := range types {
		if have[t.Name] == nil && len(have) < dispatch.MaxKnownTypes {
			have[t.Name], d.dirty[tenant] = t, true
		}
	}
}

// save writes what the workers of a tenant have declared, if that is new.
func (d *declared) save(ctx context.Context, tenant string) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	data := d.changes(tenant)
	if data == nil {
		return nil
	}
	if len(data) > maxTypesBytes {
		return fmt.Errorf("the flow types of tenant %q take %d bytes, at most %d are remembered over a restart", tenant, len(data), maxTypesBytes)
	}
	if _, err := d.store.Put(ctx, typesPrefix+tenant, data, blob.PutOptions{}); err != nil {
		d.mu.Lock()
		d.dirty[tenant] = true
		d.mu.Unlock()
		return fmt.Errorf("remember the flow types of tenant %q: %w", tenant, err)
	}
	return nil
}

// changes takes over what is new and gives all as it is to be written; nil =
// nothing is new.
func (d *declared) changes(tenant string) []byte {
	workers := d.connected.Workers(tenant)
	d.mu.Lock()
	defer d.mu.Unlock()
	types := d.saved[tenant]
	for _, w := range workers {
		for _, name := range w.FlowTypes {
			t, ok := d.connected.KnownType(tenant, name)
			if !ok || types[name] == t {
				continue
			}
			d.dirty[tenant] = d.dirty[tenant] || !types[name].EqualVT(t)
			if types == nil {
				types = map[string]*wire.FlowType{}
				d.saved[tenant] = types
			}
			types[name] = t
		}
	}
	if !d.dirty[tenant] {
		return nil
	}
	d.dirty[tenant] = false
	all := &wire.Hello{}
	for _, t := range types {
		all.FlowTypes = append(all.FlowTypes, t)
	}
	slices.SortFunc(all.FlowTypes, func(a, b *wire.FlowType) int { return cmp.Compare(a.Name, b.Name) })
	data, err := all.MarshalVT()
	if err != nil {
		return nil // of records that came over the wire
	}
	return data
}

// declares implements a hook of the dispatcher.
func (s *Server) declares(tenant string, types []*wire.FlowType) {
	ctx, cancel := context.WithTimeout(context.Background(), typesTimeout)
	defer cancel()
	if err := s.declared.declares(ctx, tenant, types); err != nil {
		s.log.Error("flow types are not remembered over a restart", "error", err)
	}
}

// rememberTypes keeps what workers declare.
func (s *Server) rememberTypes(ctx context.Context) {
	for s.wait(ctx, typesEvery) {
		for _, tenant := range s.tenants() {
			if err := s.declared.save(ctx, tenant); err != nil && ctx.Err() == nil {
				s.log.Error("flow types are not remembered over a restart", "error", err)
			}
		}
	}
}
