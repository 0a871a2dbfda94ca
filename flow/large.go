package flow

import (
	"fmt"
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// What is too large for a record goes to a blob of the flow that it is for, when
// the handler has returned well; what names it is written with the result. A blob
// of another flow says by which one it comes, so that it is kept on the way.

// moveLarge puts what is too large for a record into blobs.
func (h *handling) moveLarge() error {
	for _, a := range h.w.attrs {
		if err := h.moveAttribute(a, h.flowID); err != nil {
			return err
		}
	}
	for _, p := range h.w.publish {
		if err := h.moveMessage(p, h.flowID); err != nil {
			return err
		}
	}
	for _, s := range h.w.next {
		if err := h.moveStep(s); err != nil {
			return err
		}
	}
	for _, s := range h.w.sends {
		if err := h.moveStart(s.GetStart(), s.FlowId); err != nil {
			return err
		}
		if p := s.GetPublish(); p != nil {
			if err := h.moveMessage(p, s.FlowId); err != nil {
				return err
			}
		}
	}
	if o := h.w.close.GetOtherwise(); o != nil {
		return h.moveStep(o)
	}
	return nil
}

// moveStep is for a step of the flow itself, with the sub-flows that it waits for.
func (h *handling) moveStep(s *wire.StepSpec) error {
	if err := h.moveInput(s, h.flowID); err != nil {
		return err
	}
	return h.moveChildren(s.Wait)
}

// moveChildren is for the starts of the sub-flows that a wait begins with. A
// condition may be the program's own to use again: what changes is a copy.
func (h *handling) moveChildren(w *wire.Wait) error {
	for i, c := range w.GetConditions() {
		if start := c.GetFlow().GetStart(); !h.holdsLarge(start) {
			continue
		}
		c = c.CloneVT()
		w.Conditions[i] = c
		if err := h.moveStart(c.GetFlow().Start, c.GetFlow().FlowId); err != nil {
			return err
		}
	}
	return nil
}

func (h *handling) holdsLarge(s *wire.StartFlow) bool {
	most := int(h.host.MaxPayload())
	return slices.ContainsFunc(s.GetAttributes(), func(a *wire.Attribute) bool { return len(a.Value) > most }) ||
		slices.ContainsFunc(s.GetPublish(), func(p *wire.Publish) bool { return len(p.Payload) > most }) ||
		slices.ContainsFunc(s.GetSteps(), func(spec *wire.StepSpec) bool { return len(spec.Input) > most })
}

// moveStart is for the start of another flow; nil = none.
func (h *handling) moveStart(s *wire.StartFlow, flowID string) error {
	for _, a := range s.GetAttributes() {
		if err := h.moveAttribute(a, flowID); err != nil {
			return err
		}
	}
	for _, p := range s.GetPublish() {
		if err := h.moveMessage(p, flowID); err != nil {
			return err
		}
	}
	for _, spec := range s.GetSteps() {
		if err := h.moveInput(spec, flowID); err != nil {
			return err
		}
	}
	return nil
}

func (h *handling) moveAttribute(a *wire.Attribute, flowID string) error {
	size := uint64(len(a.Value))
	if err := h.move(flowID, &a.Value, &a.Blob, "attribute", a.Name); err != nil || a.Blob == "" {
		return err
	}
	a.Size = size
	return nil
}

func (h *handling) moveMessage(p *wire.Publish, flowID string) error {
	return h.move(flowID, &p.Payload, &p.Blob, "a message of channel", p.Channel)
}

func (h *handling) moveInput(s *wire.StepSpec, flowID string) error {
	return h.move(flowID, &s.Input, &s.InputBlob, "the input of step", s.Name)
}

// move puts a value that is too large for a record into a blob.
func (h *handling) move(flowID string, v *[]byte, blob *string, what, name string) error {
	size := uint64(len(*v))
	switch {
	case size <= h.host.MaxPayload():
		return nil
	case size > MaxValue:
		return &SizeError{What: fmt.Sprintf("%s %q", what, name), Bytes: size, Most: MaxValue}
	}
	from := ""
	if flowID != h.flowID {
		from = h.flowID
	}
	put, err := h.host.PutBlob(h, flowID, from, *v)
	if err != nil {
		return fmt.Errorf("flow: %s %q of %d bytes cannot be stored: %w", what, name, size, err)
	}
	*v, *blob = nil, put
	return nil
}

// payload gives what a message holds.
func (h *handling) payload(m *wire.Message) ([]byte, error) {
	if m.Blob == "" {
		return m.Payload, nil
	}
	if b, ok := h.fetched[m.Id]; ok {
		return b, nil
	}
	b, err := h.host.GetBlob(h, h.flowID, m.Blob)
	if err != nil {
		return nil, fmt.Errorf("flow: a message of %d bytes cannot be read: %w", m.Size, err)
	}
	h.keepFetched(m.Id, b)
	return b, nil
}

func (h *handling) keepFetched(key string, b []byte) {
	if h.fetched == nil {
		h.fetched = map[string][]byte{}
	}
	h.fetched[key] = b
}
