package flow

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Next is a step with its input: where a flow goes, or begins.
type Next struct {
	name  string
	typ   reflect.Type
	in    []byte
	delay time.Duration
	err   error
}

// Delayed lets the step begin this much later. A step that has a WaitFor cannot
// be delayed: there, wait for an After.
func (n Next) Delayed(d time.Duration) Next {
	n.delay = d
	return n
}

// To names a step and its input, for all that goes to steps or begins with one:
// GoToAll, Child, StartFlow, clients. Of step only the type counts, see Executor.
func To[I any](step Executor[I], in I) Next {
	n := Next{name: nameOf(step), typ: reflect.TypeFor[I]()}
	n.in, n.err = encodeInput(in)
	return n
}

// Decision is what becomes of a flow after a step. The zero Decision is none: a
// step that returns it has failed.
type Decision struct {
	kind      decisionKind
	first     Next
	rest      []Next
	output    []byte
	err       error // of Fail, or of an output that cannot be stored
	channels  []string
	cancels   []string
	otherwise bool // first is the step if the channels are not empty
}

type decisionKind uint8

const (
	undecided decisionKind = iota
	goOn
	graceful
	force
	fail
	deadEnd
	ifEmpty
)

// GoTo goes on with one step.
func GoTo[I any](step Executor[I], in I) Decision {
	return Decision{kind: goOn, first: To(step, in)}
}

// GoToAll goes on with several steps at once, which run beside each other. None
// at all is a DeadEnd.
func GoToAll(next ...Next) Decision {
	if len(next) == 0 {
		return DeadEnd()
	}
	return Decision{kind: goOn, first: next[0], rest: next[1:]}
}

// Complete ends the run as completed, with an output, when no other step is
// left. Of several steps that say so, the last output counts.
func Complete(output any) Decision { return completion(graceful, output) }

// ForceComplete ends the run as completed at once. Steps that still run are
// told to stop, and what they write is dropped.
func ForceComplete(output any) Decision { return completion(force, output) }

func completion(kind decisionKind, output any) Decision {
	d := Decision{kind: kind}
	d.output, d.err = encodeOutput(output)
	return d
}

func encodeOutput(v any) ([]byte, error) {
	if v == nil {
		return nil, nil
	}
	if s, ok := v.(string); ok {
		return Encode(s)
	}
	return encodeInput(v)
}

// Fail ends the run as failed at once, without the step's recovery step; for
// that, return Permanent(err) instead.
func Fail(err error) Decision {
	if err == nil {
		err = errors.New("failed")
	}
	return Decision{kind: fail, err: err}
}

// DeadEnd ends this branch. The flow goes on with its other steps; when there
// are none left, it stays as it is until it is stopped or its RPCs start a step.
func DeadEnd() Decision { return Decision{kind: deadEnd} }

// CompleteIfEmpty ends the run as completed, like ForceComplete, if no message
// waits in any of the channels; else it goes on with otherwise. It is decided
// when the result is committed, so that no message that came meanwhile is lost.
func CompleteIfEmpty(output any, otherwise Next, channels ...AnyChannel) Decision {
	d := completion(ifEmpty, output)
	d.first, d.otherwise = otherwise, true
	for _, c := range channels {
		d.channels = append(d.channels, c.channelName())
	}
	return d
}

// Cancelling adds to a decision: other live steps of these kinds are cancelled.
// Each is a value of the step's type, or its stored name as a string.
func (d Decision) Cancelling(steps ...any) Decision {
	cancels := append([]string(nil), d.cancels...)
	for _, s := range steps {
		name, ok := s.(string)
		if !ok {
			name = nameOf(s)
		}
		cancels = append(cancels, name)
	}
	d.cancels = cancels
	return d
}

// spec makes the record of a step to come, for a flow of this type.
func (f *Flow) spec(n Next) (*wire.StepSpec, error) {
	switch {
	case n.err != nil:
		return nil, fmt.Errorf("flow: the input of step %q: %w", n.name, n.err)
	case n.name == "":
		return nil, errors.New("flow: no step was named: make Next values with To")
	case f.external && n.delay != 0:
		return nil, fmt.Errorf("flow: step %q of the external flow %s cannot be delayed: delay its start", n.name, f.name)
	case f.external:
		// Its worker answers WaitFor for a step without one, too.
		return &wire.StepSpec{Name: n.name, Input: n.in, WaitFor: true, Retry: defaultRetry}, nil
	}
	d := f.steps[n.name]
	if d == nil {
		return nil, &UnknownNameError{Flow: f.name, Kind: "step", Name: n.name}
	}
	if n.typ != d.input {
		return nil, fmt.Errorf("flow: step %q of %s takes a %v, not a %v", n.name, f.name, d.input, n.typ)
	}
	s, err := d.spec(n.in)
	if err == nil && n.delay != 0 {
		err = d.delay(s, n.delay)
	}
	return s, err
}

// delay puts a timer before a step.
func (d *stepDef) delay(s *wire.StepSpec, by time.Duration) error {
	switch {
	case d.wait != nil:
		return fmt.Errorf("flow: step %q has a WaitFor and cannot be delayed: wait for an After there", d.name)
	case by < 0 || by > maxDuration:
		return fmt.Errorf("flow: the delay of step %q is %v, must be 0 to %v", d.name, by, maxDuration)
	}
	s.Wait = &wire.Wait{Conditions: []*wire.Condition{{Name: delayTimer, On: &wire.Condition_TimerUs{TimerUs: by.Microseconds()}}}}
	return nil
}

// delayTimer is the name by which a delay can be skipped.
const delayTimer = "delay"

var defaultRetry = RetryPolicy{}.wire()

func (d *stepDef) spec(in []byte) (*wire.StepSpec, error) {
	s := &wire.StepSpec{Name: d.name, Input: in, Retry: d.retry, TimeoutUs: d.timeout, HeartbeatUs: d.heartbeat,
		Async: d.async, WaitFor: d.wait != nil}
	if d.keyOf != nil {
		key, err := d.keyOf(in)
		if err != nil {
			return nil, fmt.Errorf("flow: the concurrency key of step %q: %w", d.name, err)
		}
		if key != "" {
			s.ConcurrencyKey, s.ConcurrencyLimit = key, uint32(d.keyLimit)
		}
	}
	if d.recovery != nil {
		r, err := d.recovery.spec(in)
		if err != nil {
			return nil, err
		}
		r.Input = nil // none is that of the step that failed
		s.Recover = r
	}
	return s, nil
}
