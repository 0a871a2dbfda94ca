package flow

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Executor is a step: a type with this method. One call of it is one commit:
// everything it writes through ctx, and its decision, take effect together, or,
// when it returns an error, panics or is lost with its machine, not at all. It
// may be called again for the same step; ctx.Key() is the same then, so that
// what it does outside can be done once.
//
// The stored name of a step is the name of its type, unless it has a method
// StepName() string. Flows that are under way look their next step up by this
// name: do not change it while there are any.
//
// A step may go to any step of its flow, also to one declared later or to
// itself: GoTo takes a value of the step's type, and uses only its type. The
// value that was given to Step, with whatever it holds (a database, say), is
// the one that runs. It runs concurrently.
type Executor[I any] interface {
	Execute(ctx *Context, in I) (Decision, error)
}

// Waiter is a step that waits durably before Execute is called. WaitFor is
// called once when the flow goes to the step, together with the decision that
// leads here when that can be, and otherwise as an attempt of its own with the
// step's timeout and retry policy. It may write as Execute may; it should do
// nothing outside.
type Waiter[I any] interface {
	Executor[I]
	WaitFor(ctx *Context, in I) (Wait, error)
}

// stepDef is a step as its flow knows it.
type stepDef struct {
	name    string
	input   reflect.Type
	execute func(c *Context, in []byte) (Decision, error)
	wait    func(c *Context, in []byte) (Wait, error) // nil = none

	retry     *wire.RetryPolicy // shared by all specs; never changed
	timeout   int64             // microseconds; 0 = the server's
	heartbeat int64             // microseconds; 0 = none
	async     bool
	recoverBy string
	recovery  *stepDef
	keyType   reflect.Type // nil = keyOf takes any input
	keyOf     func(in []byte) (string, error)
	keyLimit  int
	errs      []error
}

// Step makes a step a part of a flow. The compiler finds I by the step's method;
// in the initialiser of a package variable it only does so for methods that are
// declared above it, or in a file of a lesser name (golang/go#77905). Elsewhere
// write Step[Order](Ship{}).
func Step[I any](step Executor[I], opts ...StepOption) Part {
	d := &stepDef{name: nameOf(step), input: reflect.TypeFor[I](), retry: RetryPolicy{}.wire()}
	d.execute = func(c *Context, in []byte) (Decision, error) {
		v, err := Decode[I](in)
		if err != nil {
			return Decision{}, inputError(d.name, err)
		}
		return step.Execute(c, v)
	}
	if w, ok := any(step).(Waiter[I]); ok {
		d.wait = func(c *Context, in []byte) (Wait, error) {
			v, err := Decode[I](in)
			if err != nil {
				return Wait{}, inputError(d.name, err)
			}
			return w.WaitFor(c, v)
		}
	} else if m, ok := reflect.TypeOf(step).MethodByName("WaitFor"); ok {
		d.errs = append(d.errs, fmt.Errorf("its WaitFor is a %v, but should be func(*flow.Context, %v) (flow.Wait, error)", m.Type, d.input))
	}
	if f, ok := any(step).(FuncStep[I]); ok {
		if f.execute == nil {
			d.errs = append(d.errs, errors.New("it has no function: Ref only names a step"))
		}
		if f.wait == nil {
			d.wait = nil
		}
	}
	if strings.HasSuffix(d.name, genericMark) {
		d.errs = append(d.errs, errors.New("its type is generic: choose its name by a method StepName() string"))
	}
	for _, o := range opts {
		o.set(d)
	}
	return d
}

func inputError(step string, err error) error {
	return Permanent(WithKind(fmt.Errorf("the input of step %q: %w", step, err), "bad_input"))
}

// addTo implements Part.
func (d *stepDef) addTo(f *Flow) error {
	err := checkName("step", d.name)
	if err == nil && f.steps[d.name] != nil {
		err = fmt.Errorf("two steps have the name %q", d.name)
	}
	if d.keyType != nil && d.keyType != d.input {
		err = errors.Join(err, fmt.Errorf("the concurrency key of step %q is of a %v, but the step takes a %v", d.name, d.keyType, d.input))
	}
	for _, e := range d.errs {
		err = errors.Join(err, fmt.Errorf("step %q: %w", d.name, e))
	}
	if err != nil {
		return err
	}
	own := *d // a step may be part of several flows, and each resolves its own recovery
	f.steps[d.name] = &own
	f.typ.Steps = append(f.typ.Steps, &wire.StepType{Name: d.name, WaitFor: d.wait != nil})
	return nil
}

// genericMark ends the name of a generic type, which is refused: it would hold
// the paths of its arguments.
const genericMark = "[]"

// nameOf gives the stored name of a step.
func nameOf(step any) string {
	if n, ok := step.(interface{ StepName() string }); ok {
		return n.StepName()
	}
	t := reflect.TypeOf(step)
	if t == nil {
		return ""
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if name, _, generic := strings.Cut(t.Name(), "["); generic {
		return name + genericMark
	}
	return t.Name()
}

// FuncStep is a step made of functions, see StepFunc.
type FuncStep[I any] struct {
	name    string
	execute func(*Context, I) (Decision, error)
	wait    func(*Context, I) (Wait, error)
}

// StepFunc makes a step of a function. Two functions that go to each other's
// package variables would be an initialisation cycle; name the other one by Ref,
// or use types with methods, which have no such cycle.
func StepFunc[I any](name string, execute func(*Context, I) (Decision, error)) FuncStep[I] {
	return FuncStep[I]{name: name, execute: execute}
}

// Ref names a step without its code: to go to it, or to start it elsewhere.
func Ref[I any](name string) FuncStep[I] { return FuncStep[I]{name: name} }

// WithWait gives the step a WaitFor.
func (s FuncStep[I]) WithWait(wait func(*Context, I) (Wait, error)) FuncStep[I] {
	s.wait = wait
	return s
}

// StepName is the step's stored name.
func (s FuncStep[I]) StepName() string { return s.name }

// Execute implements Executor.
func (s FuncStep[I]) Execute(ctx *Context, in I) (Decision, error) { return s.execute(ctx, in) }

// WaitFor implements Waiter.
func (s FuncStep[I]) WaitFor(ctx *Context, in I) (Wait, error) { return s.wait(ctx, in) }

// StepOption is a setting of a step, given to Step.
type StepOption struct{ set func(*stepDef) }

// Timeout bounds one attempt: its context ends, and the attempt has failed. The
// default is the server's.
func Timeout(d time.Duration) StepOption {
	return StepOption{func(s *stepDef) { s.timeout = s.micros("timeout", d) }}
}

// Heartbeat wants a sign of life: an attempt that neither calls ctx.Heartbeat
// nor ends for this long has failed, with the kind "timeout", and is tried again
// by the step's policy. There is none by default: a lost worker is noticed anyway, a handler that hangs by its
// Timeout.
func Heartbeat(d time.Duration) StepOption {
	return StepOption{func(s *stepDef) { s.heartbeat = s.micros("heartbeat", d) }}
}

// Async lets the flow go on from this step before its result is on disk. It is
// faster; what was done between the last commit and a crash of the server is
// done again, this step and those that followed from it.
func Async() StepOption { return StepOption{func(s *stepDef) { s.async = true }} }

// OnFailure names the step that takes over when this one has failed for good.
// It gets the same input, and ctx.Failure says why. Without one, the run fails.
func OnFailure[I any](step Executor[I]) StepOption {
	name := nameOf(step)
	return StepOption{func(s *stepDef) {
		if s.recoverBy = name; s.input != reflect.TypeFor[I]() {
			s.errs = append(s.errs, fmt.Errorf("its recovery step %q takes a %v, but the step a %v: they must take the same", name, reflect.TypeFor[I](), s.input))
		}
	}}
}

// Concurrency lets at most limit attempts of one key run at a time on a server
// node: the steps of one flow type and tenant that share the key, in whatever run.
// The key is made of the step's input; an empty one is not limited.
func Concurrency[I any](limit int, key func(in I) string) StepOption {
	return StepOption{func(s *stepDef) {
		if limit < 1 || limit > math.MaxInt32 {
			s.errs = append(s.errs, fmt.Errorf("its concurrency limit is %d, must be at least 1", limit))
		}
		s.keyType, s.keyLimit = reflect.TypeFor[I](), limit
		s.keyOf = func(in []byte) (string, error) {
			v, err := Decode[I](in)
			if err != nil {
				return "", err
			}
			return key(v), nil
		}
	}}
}

// Retry sets the retry policy; the zero policy is the default.
func Retry(p RetryPolicy) StepOption {
	return StepOption{func(s *stepDef) {
		if err := p.check(); err != nil {
			s.errs = append(s.errs, err)
		}
		s.retry = p.wire()
	}}
}

// RetryPolicy says when a failed attempt is followed by another. The zero value
// tries for ever: after 1 s, then twice as long each time, up to a minute.
type RetryPolicy struct {
	MaxAttempts int           // attempts in all; 0 = no bound, 1 = no retry
	Initial     time.Duration // before the second attempt; 0 = 1 s
	Factor      float64       // of each pause to the one before, 1 to 1000; 0 = 2
	Max         time.Duration // no pause is longer; 0 = 1 min, or Initial when that is longer
	Total       time.Duration // no attempt begins later than this after the first; 0 = no bound
}

// NoRetry is the policy of a single attempt.
var NoRetry = RetryPolicy{MaxAttempts: 1}

func (p RetryPolicy) check() error {
	switch {
	case p.MaxAttempts < 0 || p.MaxAttempts > math.MaxInt32:
		return fmt.Errorf("its retry policy allows %d attempts, must be 0 or more", p.MaxAttempts)
	case p.Initial < 0 || p.Max < 0 || p.Total < 0 || max(p.Initial, p.Max, p.Total) > maxDuration:
		return fmt.Errorf("a duration of its retry policy is negative or above %v", maxDuration)
	case p.Factor != 0 && (p.Factor < 1 || p.Factor > 1000):
		return fmt.Errorf("the factor of its retry policy is %v, must be 1 to 1000", p.Factor)
	}
	return nil
}

func (p RetryPolicy) wire() *wire.RetryPolicy {
	if p.Initial == 0 {
		p.Initial = time.Second
	}
	if p.Max == 0 {
		p.Max = max(time.Minute, p.Initial)
	}
	w := &wire.RetryPolicy{MaxAttempts: uint32(p.MaxAttempts), InitialUs: p.Initial.Microseconds(), MaxUs: p.Max.Microseconds(),
		TotalUs: p.Total.Microseconds(), BackoffPermille: uint32(p.Factor * 1000)}
	if p.MaxAttempts == 0 {
		w.MaxAttempts = math.MaxUint32
	}
	return w
}

// maxDuration is the longest timer, timeout or pause.
const maxDuration = 100 * 365 * 24 * time.Hour

// micros checks a duration option.
func (d *stepDef) micros(what string, v time.Duration) int64 {
	if v < time.Microsecond || v > maxDuration {
		d.errs = append(d.errs, fmt.Errorf("its %s is %v, must be 1µs to %v", what, v, maxDuration))
	}
	return v.Microseconds()
}
