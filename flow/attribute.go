package flow

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Attribute is a typed durable variable of a flow. Declare it once, as a
// package variable, and make it a part of each flow that has it. A value is
// stored as JSON, up to 64 MiB; large ones are kept apart and fetched only when
// they are read.
type Attribute[T any] struct {
	name  string
	base  string // the declared name: name, or "base/*" of a map
	index wire.Attribute_Index
	err   error
}

// AttributeOption is a setting of an attribute.
type AttributeOption struct{ indexed bool }

// Indexed makes the values searchable: strings (also several, as a []string) by
// their whole text, numbers and times by range, booleans.
func Indexed() AttributeOption { return AttributeOption{indexed: true} }

// NewAttribute declares an attribute.
func NewAttribute[T any](name string, opts ...AttributeOption) Attribute[T] {
	a := Attribute[T]{name: name, base: name, err: checkName("attribute", name)}
	a.setOptions(opts)
	return a
}

func (a *Attribute[T]) setOptions(opts []AttributeOption) {
	for _, o := range opts {
		if !o.indexed {
			continue
		}
		index, ok := indexFor[T]()
		if !ok {
			a.err = fmt.Errorf("attribute %q cannot be indexed: a %s is neither text, number, boolean nor time", a.name, typeName[T]())
		}
		a.index = index
	}
}

// Name is the stored name.
func (a Attribute[T]) Name() string { return a.name }

// Get reads the value, the zero value if there is none. It sees what this
// handler has written, and otherwise the value as it was when the handler was
// started, but for a large one: that is read now.
func (a Attribute[T]) Get(ctx Reader) (T, error) {
	v, _, err := a.Lookup(ctx)
	return v, err
}

// Lookup is Get, and says whether there is a value.
func (a Attribute[T]) Lookup(ctx Reader) (T, bool, error) {
	var zero T
	b, err := ctx.reading().attribute(a.base, a.name)
	if err != nil || len(b) == 0 {
		return zero, false, err
	}
	v, err := Decode[T](b)
	if err != nil {
		return zero, false, fmt.Errorf("attribute %q: %w", a.name, err)
	}
	return v, true, nil
}

// Set writes the value with the handler's commit. A value that cannot be stored
// makes the handler fail, whatever it returns.
func (a Attribute[T]) Set(ctx Writer, v T) {
	c := ctx.writing()
	r, err := a.Value(v)
	if err != nil {
		c.w.fail(err)
		return
	}
	c.setAttribute(a.base, r)
}

// Delete removes the value with the handler's commit.
func (a Attribute[T]) Delete(ctx Writer) {
	ctx.writing().setAttribute(a.base, &wire.Attribute{Name: a.name})
}

// Value gives the record that stands for v. It is for Perdure's own packages.
func (a Attribute[T]) Value(v T) (*wire.Attribute, error) {
	if a.err != nil {
		return nil, a.err
	}
	b, err := Encode(v)
	if err != nil {
		return nil, fmt.Errorf("attribute %q: %w", a.name, err)
	}
	return &wire.Attribute{Name: a.name, Value: b, Index: a.index}, nil
}

func (a Attribute[T]) addTo(f *Flow) error {
	if a.err != nil {
		return a.err
	}
	if a.base != a.name {
		return fmt.Errorf("attribute %q is one of a map: the map is the part", a.name)
	}
	return f.addAttribute(a.name, a.index, typeName[T]())
}

func (f *Flow) addAttribute(name string, index wire.Attribute_Index, typ string) error {
	if _, there := f.attrs[name]; there {
		return fmt.Errorf("two attributes have the name %q", name)
	}
	f.attrs[name] = index
	f.typ.Attributes = append(f.typ.Attributes, &wire.AttributeType{Name: name, Index: index, Type: typ})
	return nil
}

// Key is what the keys of maps can be.
type Key interface {
	~string | ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

// keyText gives the form of a key in a stored name.
func keyText[K Key](k K) string {
	switch x := any(k).(type) {
	case string:
		return x
	case int:
		return strconv.Itoa(x)
	}
	return fmt.Sprint(k)
}

// AttributeMap is attributes of one type under keys. They are stored as
// "name/key", each on its own.
type AttributeMap[K Key, T any] struct{ of Attribute[T] }

// NewAttributeMap declares a map of attributes.
func NewAttributeMap[K Key, T any](name string, opts ...AttributeOption) AttributeMap[K, T] {
	a := Attribute[T]{name: name, base: name + "/*", err: checkName("attribute map", name)}
	a.setOptions(opts)
	return AttributeMap[K, T]{a}
}

// At gives the attribute of a key. Keys have no control characters and do not
// end with '*'; name and key together have at most MaxName bytes.
func (m AttributeMap[K, T]) At(key K) Attribute[T] {
	a := m.of
	a.name += "/" + keyText(key)
	if a.err == nil {
		a.err = checkKey("attribute", a.name)
	}
	return a
}

// Keys lists the keys that have a value, in the order of their text.
func (m AttributeMap[K, T]) Keys(ctx Reader) []K {
	prefix := m.of.name + "/"
	var keys []K
	for _, name := range ctx.reading().attributeNames(m.of.base, prefix) {
		if k, ok := parseKey[K](strings.TrimPrefix(name, prefix)); ok {
			keys = append(keys, k)
		}
	}
	return keys
}

func (m AttributeMap[K, T]) addTo(f *Flow) error {
	if m.of.err != nil {
		return m.of.err
	}
	return f.addAttribute(m.of.base, m.of.index, typeName[T]())
}
