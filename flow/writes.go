package flow

import (
	"encoding/json"
	"fmt"

	"github.com/perdure-dev/perdure/internal/wire"
)

// MaxWrites bounds what one handler call writes: attributes, messages, sends
// and next steps together.
const MaxWrites = 4096

// writes is what a handler call has written so far. Nothing of it leaves before
// the handler has returned well.
type writes struct {
	attrs   []*wire.Attribute
	publish []*wire.Publish
	sends   []*wire.Send
	next    []*wire.StepSpec
	close   *wire.Close
	err     error // the first write that could not be
	kept    int   // of attrs, the first that a rollback keeps: not to be changed
}

// fail remembers the first write that could not be: the handler fails with it.
func (w *writes) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// set appends a record, or takes the place of one of the same name.
func (w *writes) set(a *wire.Attribute) {
	for i := w.kept; i < len(w.attrs); i++ {
		if w.attrs[i].Name == a.Name {
			w.attrs[i] = a
			return
		}
	}
	w.attrs = append(w.attrs, a)
}

// attribute gives the newest record of a name; nil = not written.
func (w *writes) attribute(name string) *wire.Attribute {
	for i := len(w.attrs) - 1; i >= 0; i-- {
		if w.attrs[i].Name == name {
			return w.attrs[i]
		}
	}
	return nil
}

// mark is a place to go back to.
func (w *writes) mark() writes {
	before := *w
	w.kept = len(w.attrs)
	return before
}

// settle keeps what was written since mark.
func (w *writes) settle(before writes) { w.kept = before.kept }

// check says whether the whole is fit to be sent.
func (w *writes) check() error {
	if w.err != nil {
		return w.err
	}
	if n := len(w.attrs) + len(w.publish) + len(w.sends) + len(w.next); n > MaxWrites {
		return fmt.Errorf("flow: the handler wrote %d things, at most %d: split the work over several steps", n, MaxWrites)
	}
	return nil
}

// MaxValue bounds an attribute's value, a message, and the input of a step, in
// bytes of JSON; so it does the input and output of an RPC.
const MaxValue = 64 << 20

func decodeInto(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("flow: stored JSON of %d bytes is not a %T: %w", len(b), v, err)
	}
	return nil
}
