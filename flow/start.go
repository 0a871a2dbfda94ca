package flow

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Status is what a run is.
type Status int32

// The statuses of a run.
const (
	Running Status = iota
	Completed
	Failed
	Cancelled
	Terminated
	TimedOut
)

var statusNames = [...]string{"running", "completed", "failed", "cancelled", "terminated", "timed_out"}

// String gives the status as the API shows it.
func (s Status) String() string {
	if s < 0 || int(s) >= len(statusNames) {
		return fmt.Sprintf("status %d", int32(s))
	}
	return statusNames[s]
}

// ReusePolicy says what a start does when a flow of that ID is there already.
type ReusePolicy int32

// The reuse policies.
const (
	RefuseDuplicate   ReusePolicy = iota // refuse, whatever its state; the default
	ReuseClosed                          // begin a new run if the former one has ended
	ReuseFailed                          // begin a new run if the former one has ended, but not completed
	TerminateExisting                    // terminate one that runs, and begin a new run
	AttachExisting                       // take one that runs as it is; begin a new run if it has ended
)

// StartOption is a setting of a start: of Child, StartFlow, and of clients.
type StartOption struct{ set func(*wire.StartFlow) error }

// Reuse sets the reuse policy.
func Reuse(p ReusePolicy) StartOption {
	return StartOption{func(s *wire.StartFlow) error {
		if p < RefuseDuplicate || p > AttachExisting {
			return fmt.Errorf("there is no reuse policy %d", p)
		}
		s.Reuse = wire.StartFlow_Reuse(p)
		return nil
	}}
}

// Delay lets the first step begin this much later.
func Delay(d time.Duration) StartOption {
	return duration("delay", d, func(s *wire.StartFlow, us int64) { s.DelayUs = us })
}

// RunTimeout ends the run as timed out when it is not over by then. There is
// none by default.
func RunTimeout(d time.Duration) StartOption {
	return duration("run timeout", d, func(s *wire.StartFlow, us int64) { s.TimeoutUs = us })
}

// Retention keeps the run for this long when it is closed. The default is the
// server's.
func Retention(d time.Duration) StartOption {
	return duration("retention", d, func(s *wire.StartFlow, us int64) { s.RetentionUs = us })
}

func duration(what string, d time.Duration, set func(*wire.StartFlow, int64)) StartOption {
	return StartOption{func(s *wire.StartFlow) error {
		if d < 0 || d > maxDuration {
			return fmt.Errorf("the %s is %v, must be 0 to %v", what, d, maxDuration)
		}
		set(s, d.Microseconds())
		return nil
	}}
}

// Priority is 0, the default, to 9; steps of higher ones are handed out first.
func Priority(p int) StartOption {
	return StartOption{func(s *wire.StartFlow) error {
		if p < 0 || p > 9 {
			return fmt.Errorf("the priority is %d, must be 0 to 9", p)
		}
		s.Priority = uint32(p)
		return nil
	}}
}

// RequestID makes the start idempotent: the same again gives the flow that the
// first one made. Starts by handlers are idempotent without it.
func RequestID(id string) StartOption {
	return StartOption{func(s *wire.StartFlow) error { s.RequestId = id; return nil }}
}

// With gives the flow an attribute from the beginning.
func With[T any](a Attribute[T], v T) StartOption {
	return StartOption{func(s *wire.StartFlow) error {
		r, err := a.Value(v)
		s.Attributes = append(s.Attributes, r)
		return err
	}}
}

// WithMessage gives the flow a message from the beginning.
func WithMessage[T any](c Channel[T], v T) StartOption {
	return StartOption{func(s *wire.StartFlow) error {
		if c.err != nil {
			return c.err
		}
		b, err := Encode(v)
		s.Publish = append(s.Publish, &wire.Publish{Channel: c.name, Payload: b})
		return err
	}}
}

// NoStep starts a flow without a step: it lives by its RPCs and attributes.
var NoStep = Next{}

// StartRecord makes the record that starts a flow. It is for Perdure's own
// packages.
func (f *Flow) StartRecord(first Next, opts ...StartOption) (*wire.StartFlow, error) {
	s := &wire.StartFlow{Type: f.name, Closes: true}
	if first.name != "" || first.err != nil {
		spec, err := f.spec(first)
		if err != nil {
			return nil, err
		}
		s.Steps = []*wire.StepSpec{spec}
	}
	for _, o := range opts {
		if err := o.set(s); err != nil {
			return nil, fmt.Errorf("flow: a start of %s: %w", f.name, err)
		}
	}
	for _, a := range s.Attributes {
		if err := f.checkAttribute(a.Name); err != nil {
			return nil, err
		}
	}
	for _, p := range s.Publish {
		if err := f.checkChannel(p.Channel); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// checkAttribute says whether the flow declares an attribute.
func (f *Flow) checkAttribute(name string) error {
	if _, ok := f.attrs[name]; ok || f.external {
		return nil
	}
	if _, ok := f.attrs[mapName(name)]; ok {
		return nil
	}
	return &UnknownNameError{Flow: f.name, Kind: "attribute", Name: name}
}

// Child starts another flow when the wait begins, and holds when that one has
// ended. Its name, for ChildResult and ctx.Fired, is the child's ID. If the
// parent ends or is cancelled first, the child goes on: stop it with Stop.
func Child(f *Flow, flowID string, first Next, opts ...StartOption) Condition {
	c := Condition{c: &wire.Condition{Name: flowID}}
	start, err := f.StartRecord(first, opts...)
	c.c.On = &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: flowID, Start: start}}
	c.err = errors.Join(err, checkFlowID(flowID))
	return c
}

// FlowEnd holds when another flow, which is there already, has ended; otherwise
// it is like Child.
func FlowEnd(flowID string) Condition {
	return Condition{err: checkFlowID(flowID), c: &wire.Condition{Name: flowID,
		On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: flowID}}}}
}

// ChildResult gives the output of a child flow that the step has waited for. ok
// is false if the wait was over before the child was. A child that ended
// otherwise than completed is a *ChildFailedError.
func ChildResult[T any](ctx *Context, flowID string) (out T, ok bool, err error) {
	s, known := ctx.condition(flowID)
	switch {
	case !known:
		return out, false, fmt.Errorf("flow: step %q has not waited for a flow %q", ctx.step, flowID)
	case !s.Done:
		return out, false, nil
	case s.Error != "" || s.Status != wire.Status_COMPLETED:
		return out, true, &ChildFailedError{FlowID: flowID, Status: Status(s.Status), Message: s.Error}
	}
	out, err = Decode[T](s.Output)
	if err != nil {
		err = fmt.Errorf("the output of child %q: %w", flowID, err)
	}
	return out, true, err
}

// StartFlow starts another flow after the handler's commit, once. The handler
// does not learn what became of it; wait for a Child instead if it must.
func StartFlow(ctx Writer, f *Flow, flowID string, first Next, opts ...StartOption) {
	h := ctx.writing()
	start, err := f.StartRecord(first, opts...)
	if err != nil {
		h.w.fail(err)
		return
	}
	h.send(&wire.Send{FlowId: flowID, Command: &wire.Send_Start{Start: start}})
}

// Stopping says how a flow is stopped.
type Stopping int32

// The ways to stop a flow.
const (
	Cancel    Stopping = iota // its handlers are told, and may clean up
	Terminate                 // at once; what its handlers do is dropped
)

// Stop stops another flow after the handler's commit. It is not an error if
// that flow is not there or has ended.
func Stop(ctx Writer, flowID string, how Stopping, reason string) {
	h := ctx.writing()
	if how != Cancel && how != Terminate || len(reason) > math.MaxUint16 {
		h.w.fail(fmt.Errorf("flow: a stop of %q is wrong: how is %d, and the reason has %d bytes", flowID, how, len(reason)))
		return
	}
	h.send(&wire.Send{FlowId: flowID, Command: &wire.Send_Stop{Stop: &wire.StopFlow{How: wire.StopFlow_How(how), Reason: reason}}})
}
