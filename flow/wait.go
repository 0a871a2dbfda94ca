package flow

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// MaxConditions bounds the conditions of one Wait, and the sets of them.
const MaxConditions = 128

// Condition is one thing a step can wait for: messages (Channel.ForOne and its
// kin), a timer (After, At) or a child flow (Child).
type Condition struct {
	c   *wire.Condition
	err error
}

// Wait is what a step waits for. The zero Wait waits for nothing.
type Wait struct {
	conditions []Condition
	sets       [][]int
	err        error
}

// AllOf waits until all of the conditions hold.
func AllOf(conditions ...Condition) Wait { return Wait{conditions: conditions} }

// AnyOf waits until one of the conditions holds; of several, the first counts.
// Only its messages are taken.
func AnyOf(conditions ...Condition) Wait {
	w := Wait{conditions: conditions}
	for i := range conditions {
		w.sets = append(w.sets, []int{i})
	}
	return w
}

// AnyCombination waits until one of the waits holds, each of them an AllOf; of
// several, the first counts. Only its messages are taken.
func AnyCombination(of ...Wait) Wait {
	var w Wait
	for _, o := range of {
		if len(o.sets) > 0 || len(o.conditions) == 0 {
			w.err = errors.New("flow: AnyCombination takes waits made by AllOf, of one condition or more")
			return w
		}
		set := make([]int, 0, len(o.conditions))
		for _, c := range o.conditions {
			i := slices.IndexFunc(w.conditions, func(have Condition) bool { return have.c.EqualVT(c.c) })
			if i < 0 {
				i = len(w.conditions)
				w.conditions = append(w.conditions, c)
			}
			set = append(set, i)
		}
		w.sets = append(w.sets, set)
	}
	return w
}

// After is a timer of d from when the wait begins. Its name is for ctx.Fired,
// and for those who skip it.
func After(name string, d time.Duration) Condition {
	if d < 0 {
		d = 0
	}
	c := Condition{c: &wire.Condition{Name: name, On: &wire.Condition_TimerUs{TimerUs: d.Microseconds()}}}
	if d > maxDuration {
		c.err = fmt.Errorf("flow: timer %q is of %v, at most %v", name, d, maxDuration)
	}
	return c
}

// At is a timer that is due at an instant.
func At(name string, t time.Time) Condition {
	return Condition{c: &wire.Condition{Name: name, On: &wire.Condition_AtUs{AtUs: max(t.UnixMicro(), 1)}}}
}

// wire makes the record of a wait in a flow of this type; nil = for nothing.
func (w Wait) wire(f *Flow) (*wire.Wait, error) {
	if w.err != nil {
		return nil, w.err
	}
	if len(w.conditions) == 0 {
		return nil, nil
	}
	if len(w.conditions) > MaxConditions || len(w.sets) > MaxConditions {
		return nil, fmt.Errorf("flow: a wait for %d conditions in %d sets, at most %d: split it over several steps", len(w.conditions), len(w.sets), MaxConditions)
	}
	out := &wire.Wait{Conditions: make([]*wire.Condition, len(w.conditions))}
	for i, c := range w.conditions {
		switch {
		case c.err != nil:
			return nil, c.err
		case c.c == nil:
			return nil, errors.New("flow: a wait for the zero Condition")
		}
		if ch := c.c.GetChannel(); ch != nil {
			if err := f.checkChannel(ch.Name); err != nil {
				return nil, err
			}
		}
		for _, before := range w.conditions[:i] {
			if before.c.Name == c.c.Name && c.c.Name != "" && (before.c.GetChannel() == nil || c.c.GetChannel() == nil) {
				return nil, fmt.Errorf("flow: two conditions of a wait have the name %q", c.c.Name)
			}
		}
		out.Conditions[i] = c.c
	}
	for _, set := range w.sets {
		of := make([]uint32, len(set))
		for i, n := range set {
			of[i] = uint32(n)
		}
		out.Combinations = append(out.Combinations, &wire.Combination{Of: of})
	}
	return out, nil
}
