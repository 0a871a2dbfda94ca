package dispatch

import (
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// KnownType is the union of what the workers of a type declared, those that left
// included; where they differ the newest counts. It is not to be changed.
func (d *Dispatcher) KnownType(tenant, flowType string) (*wire.FlowType, bool) {
	t := d.tenantOf(tenant)
	if t == nil {
		return nil, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.known[flowType]
	return f, f != nil
}

// declare merges what a worker declares into what is known, all or nothing.
func (t *tenant) declare(types []*wire.FlowType) error {
	merged := make([]*wire.FlowType, len(types))
	fresh := 0
	for i, f := range types {
		if t.known[f.Name] == nil {
			fresh++
		}
		merged[i] = union(t.known[f.Name], f)
		if max(len(merged[i].Steps), len(merged[i].Rpcs), len(merged[i].Attributes), len(merged[i].Channels)) > MaxNames {
			return refuse(core.LimitReached, "workers declared more than %d names of a kind for flow type %q since the server started: use fewer", MaxNames, f.Name)
		}
	}
	if len(t.known)+fresh > MaxKnownTypes {
		return refuse(core.LimitReached, "workers of tenant %q declared more than %d flow types since the server started: use fewer", t.name, MaxKnownTypes)
	}
	for _, f := range merged {
		t.known[f.Name] = f
	}
	return nil
}

// union is both declarations in one; b's word counts where they differ. Neither
// is changed.
func union(a, b *wire.FlowType) *wire.FlowType {
	return &wire.FlowType{Name: b.Name,
		Steps:      unite(a.GetSteps(), b.Steps, (*wire.StepType).GetName),
		Rpcs:       unite(a.GetRpcs(), b.Rpcs, (*wire.RpcType).GetName),
		Attributes: unite(a.GetAttributes(), b.Attributes, (*wire.AttributeType).GetName),
		Channels:   unite(a.GetChannels(), b.Channels, func(s string) string { return s }),
	}
}

func unite[T any](a, b []T, name func(T) string) []T {
	out := make([]T, 0, len(a)+len(b))
	place := make(map[string]int, len(a)+len(b))
	for _, side := range [2][]T{a, b} {
		for _, v := range side {
			if i, ok := place[name(v)]; ok {
				out[i] = v
				continue
			}
			place[name(v)] = len(out)
			out = append(out, v)
		}
	}
	return out
}
