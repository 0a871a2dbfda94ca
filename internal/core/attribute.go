package core

import (
	"sort"

	"github.com/perdure-dev/perdure/internal/wire"
)

// EventAttributesSet says that a client or a call set attributes.
const EventAttributesSet = "attributes.set"

func checkAttributes(have, set []*wire.Attribute) error {
	if len(set) > MaxResultItems {
		return refuse(LimitReached, "%d attributes set at once, at most %d", len(set), MaxResultItems)
	}
	for _, a := range set {
		if err := checkName("attribute name", a.GetName()); err != nil {
			return err
		}
		switch {
		case len(a.Value) > MaxPayload:
			return refuse(LimitReached, "attribute %q has %d bytes, at most %d", a.Name, len(a.Value), MaxPayload)
		case len(a.Blob) > MaxName:
			return refuse(LimitReached, "attribute %q names a blob of more than %d bytes", a.Name, MaxName)
		case a.Blob != "" && len(a.Value) > 0:
			return refuse(Invalid, "attribute %q has a value and a blob", a.Name)
		}
	}
	if len(have)+len(set) > MaxAttributes {
		if next, _ := mergeAttributes(have, set, 0); len(next) > MaxAttributes {
			return refuse(LimitReached, "%d attributes, at most %d", len(next), MaxAttributes)
		}
	}
	return nil
}

func (t *tx) applySetAttributes(c *wire.SetAttributes) error {
	if err := t.mustRun(""); err != nil {
		return err
	}
	if err := checkAttributes(t.f.Attributes, c.Attributes); err != nil {
		return err
	}
	if set := t.setAttributes(c.Attributes); len(set) > 0 && t.f.Closes {
		t.event(&wire.Event{Type: EventAttributesSet, Attributes: set})
	}
	t.reply = Reply{RunID: t.f.RunId}
	return nil
}

// setAttributes gives what it changed, for the log.
func (t *tx) setAttributes(set []*wire.Attribute) []*wire.Attribute {
	if len(set) == 0 {
		return nil
	}
	before := len(t.f.Attributes)
	next, changed := mergeAttributes(t.f.Attributes, set, t.e.Lsn)
	if len(changed) == 0 {
		return nil
	}
	t.f.Attributes, t.f.AttributesLsn, t.changed = next, t.e.Lsn, true
	if len(next) < before+len(changed) {
		for _, a := range changed {
			if isRemoval(a) {
				t.removed = append(t.removed, a.Name)
			}
		}
	}
	return changed
}

func isRemoval(a *wire.Attribute) bool { return len(a.Value) == 0 && a.Blob == "" }

// mergeAttributes gives a new list, since tasks that are out share the old one,
// and what it took from set. The attributes in the list are copies, stamped with
// the entry that set them: entries are not changed.
func mergeAttributes(have, set []*wire.Attribute, lsn uint64) (next, changed []*wire.Attribute) {
	next = append(make([]*wire.Attribute, 0, len(have)+len(set)), have...)
	for _, a := range set {
		i := sort.Search(len(next), func(i int) bool { return next[i].Name >= a.Name })
		has := i < len(next) && next[i].Name == a.Name
		if isRemoval(a) {
			if has {
				next = append(next[:i], next[i+1:]...)
				changed = append(changed, &wire.Attribute{Name: a.Name})
			}
			continue
		}
		own := &wire.Attribute{Name: a.Name, Value: a.Value, Lsn: lsn, Index: a.Index, Blob: a.Blob, Size: a.Size}
		if !has {
			next = append(next, nil)
			copy(next[i+1:], next[i:])
		} else if own.Index == wire.Attribute_NONE {
			own.Index = next[i].Index // a declaration holds until another comes
		}
		next[i] = own
		changed = append(changed, own)
	}
	return next, changed
}
