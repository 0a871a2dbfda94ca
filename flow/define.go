package flow

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Bounds of a definition. A server has the same.
const (
	MaxName   = 256    // bytes of a name, with the key of a map
	MaxFlowID = 256    // bytes of a flow ID
	maxParts  = 10_000 // steps, RPCs, attributes and channels of one flow
)

// Flow is a definition: what a flow of this type consists of. It is immutable
// and safe for concurrent use.
type Flow struct {
	name     string
	external bool
	steps    map[string]*stepDef
	rpcs     map[string]*rpcDef
	attrs    map[string]wire.Attribute_Index // by declared name
	channels map[string]bool                 // by declared name
	typ      *wire.FlowType
}

// Part is something a flow consists of: what Step gives, an Attribute, an
// AttributeMap, a Channel, a ChannelMap or an RPC.
type Part interface {
	addTo(f *Flow) error
}

// Define describes a flow type; name is what is stored and shown. A mistake in
// the definition (a bad name, two parts of one name, a recovery step that is
// not part of it, …) is a bug of the program, so Define panics and says which;
// New returns it as an error.
func Define(name string, parts ...Part) *Flow {
	f, err := New(name, parts...)
	if err != nil {
		panic(err)
	}
	return f
}

// New is Define for definitions that are made at run time.
func New(name string, parts ...Part) (*Flow, error) {
	f := &Flow{
		name:     name,
		steps:    map[string]*stepDef{},
		rpcs:     map[string]*rpcDef{},
		attrs:    map[string]wire.Attribute_Index{},
		channels: map[string]bool{},
		typ:      &wire.FlowType{Name: name},
	}
	var errs []error
	if err := checkName("flow", name); err != nil {
		errs = append(errs, err)
	}
	if len(parts) > maxParts {
		errs = append(errs, fmt.Errorf("%d parts, at most %d", len(parts), maxParts))
		parts = nil
	}
	for i, p := range parts {
		if p == nil {
			errs = append(errs, fmt.Errorf("part %d is nil", i))
			continue
		}
		if err := p.addTo(f); err != nil {
			errs = append(errs, err)
		}
	}
	if err := f.checkRecovery(); err != nil {
		errs = append(errs, err)
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("flow: the definition of %q is wrong: %w", name, errors.Join(errs...))
	}
	return f, nil
}

// External names a flow type that another program runs, so that this one can
// start it. What it consists of is not known here and not checked here.
func External(name string) *Flow {
	return &Flow{name: name, external: true, typ: &wire.FlowType{Name: name}}
}

// Name is the flow type's name.
func (f *Flow) Name() string { return f.name }

// Type gives the declaration that a worker sends. It is for Perdure's own
// packages; do not change it.
func (f *Flow) Type() *wire.FlowType { return f.typ }

// checkRecovery resolves OnFailure.
func (f *Flow) checkRecovery() error {
	for _, t := range f.typ.Steps {
		d := f.steps[t.Name]
		if d.recoverBy == "" {
			continue
		}
		r := f.steps[d.recoverBy]
		switch {
		case r == nil:
			return fmt.Errorf("step %q names the recovery step %q, which is not part of the flow", d.name, d.recoverBy)
		case r == d:
			return fmt.Errorf("step %q is its own recovery step", d.name)
		case r.input != d.input:
			return fmt.Errorf("recovery step %q takes a %v, but step %q a %v: they must take the same", r.name, r.input, d.name, d.input)
		}
		d.recovery = r
	}
	for _, t := range f.typ.Steps {
		depth := 0
		for d := f.steps[t.Name]; d.recovery != nil; d = d.recovery {
			if depth++; depth > maxRecovery {
				return fmt.Errorf("recovery steps of %q are nested more than %d deep", t.Name, maxRecovery)
			}
		}
	}
	return nil
}

// maxRecovery is how many recovery steps may follow one upon the other.
const maxRecovery = 2

// checkName holds a declared name to what can be stored.
func checkName(kind, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("a %s has no name", kind)
	case len(name) > MaxName:
		return fmt.Errorf("the name of %s %.40q… has %d bytes, at most %d", kind, name, len(name), MaxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("the name of %s %q has control characters or is not UTF-8", kind, name)
	case strings.ContainsAny(name, "*/"):
		return fmt.Errorf("the name of %s %q has a '*' or a '/', which stand for the keys of maps", kind, name)
	}
	return nil
}

// checkKey holds a stored name with a map's key to what can be stored.
func checkKey(kind, name string) error {
	if len(name) > MaxName {
		return &SizeError{What: fmt.Sprintf("the name of %s %.40q…", kind, name), Bytes: uint64(len(name)), Most: MaxName}
	}
	if !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) || strings.HasSuffix(name, "*") {
		return fmt.Errorf("flow: the key of %s %q has control characters, is not UTF-8, or ends with '*'", kind, name)
	}
	return nil
}

// checkFlowID holds an ID that a handler chose to what a server takes.
func checkFlowID(id string) error {
	switch {
	case id == "":
		return errors.New("flow: a flow ID is empty")
	case len(id) > MaxFlowID:
		return &SizeError{What: "a flow ID", Bytes: uint64(len(id)), Most: MaxFlowID}
	case !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl):
		return fmt.Errorf("flow: the flow ID %q has control characters or is not UTF-8", id)
	}
	return nil
}
