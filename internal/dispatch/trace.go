package dispatch

import "github.com/perdure-dev/perdure/internal/wire"

// span is one hand-out's place in the trace of its flow or call. Nil when there
// is no trace, which costs nothing.
type span struct {
	child []byte               // the trace parent of what the handler does
	end   func(outcome string) // nil: nobody records it, or it has ended
}

// begin opens the span of a hand-out; name is that of the step or RPC.
func (d *Dispatcher) begin(trace []byte, what, id, flowType, name string, number uint32) *span {
	s := &span{child: trace}
	if h := d.cfg.Hooks.Begin; h != nil {
		s.child, s.end = h(trace, what, id, flowType, name, number)
	}
	return s
}

// ended closes the span; the first outcome counts.
func (s *span) ended(outcome string) {
	if s != nil && s.end != nil {
		s.end(outcome)
		s.end = nil
	}
}

// inherit puts the flows that a handler starts below what it did, unless it says
// where they belong.
func (s *span) inherit(sends []*wire.Send, wait *wire.Wait, next []*wire.StepSpec) {
	if s == nil || len(s.child) == 0 {
		return
	}
	for _, m := range sends {
		s.toStart(m.GetStart())
	}
	s.toWait(wait)
	s.toSteps(next)
}

func (s *span) toSteps(specs []*wire.StepSpec) {
	for _, spec := range specs {
		for ; spec != nil; spec = spec.Recover {
			s.toWait(spec.Wait)
		}
	}
}

func (s *span) toWait(w *wire.Wait) {
	for _, c := range w.GetConditions() {
		s.toStart(c.GetFlow().GetStart())
	}
}

func (s *span) toStart(c *wire.StartFlow) {
	if c == nil {
		return
	}
	if len(c.Trace) == 0 {
		c.Trace = s.child
	}
	s.toSteps(c.Steps)
}
