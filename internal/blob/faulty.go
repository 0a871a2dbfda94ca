package blob

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// Kind is a Store method.
type Kind uint8

// The methods of Store.
const (
	KindGet Kind = iota
	KindPut
	KindList
	KindDelete

	NumKinds = int(KindDelete) + 1
)

// String is the method's name.
func (k Kind) String() string { return [NumKinds]string{"get", "put", "list", "delete"}[k] }

// Op is one call of a faulty store.
type Op struct {
	N    uint64 // counts the calls from 1
	Kind Kind
	Key  string // of List: the prefix
}

// Outcome is what becomes of a call.
type Outcome uint8

const (
	// Passed: no fault.
	Passed Outcome = iota
	// Refused: not done, and the caller is told so: ErrUnavailable.
	Refused
	// Lost: the request is lost: not done. A write gets ErrAmbiguous.
	Lost
	// AnswerLost: done, but the answer is lost. A write gets ErrAmbiguous.
	AnswerLost
	// Late: the answer is lost and a write is done later, if at all: see
	// FaultHooks.Later. The caller gets ErrAmbiguous.
	Late
)

// Fault is a decision about one call. Reads get ErrUnavailable for every
// outcome but Passed.
type Fault struct {
	Outcome       Outcome
	Before, After time.Duration // delays around the inner call
}

// FaultHooks connect a faulty store to its world. All are optional.
type FaultHooks struct {
	// Sleep passes d; an error (of ctx) ends the call. Without it there are no
	// delays.
	Sleep func(ctx context.Context, d time.Duration) error
	// Later runs a late write some time after its call returned. Without it
	// late writes never happen.
	Later func(write func())
}

// Faulty wraps a store and breaks calls as decided for it. It draws nothing
// itself: the same decisions over the same calls give the same run.
type Faulty struct {
	inner  Store
	decide func(Op) Fault
	hooks  FaultHooks

	mu sync.Mutex // serialises decide, guards n
	n  uint64
}

var _ Store = (*Faulty)(nil)

// NewFaulty wraps inner. decide is called once per call, one at a time.
func NewFaulty(inner Store, decide func(Op) Fault, hooks FaultHooks) *Faulty {
	return &Faulty{inner: inner, decide: decide, hooks: hooks}
}

// Rates are the probabilities in percent of each outcome, and the bound of
// each delay; what is left passes.
type Rates struct {
	Refused, Lost, AnswerLost, Late int
	MaxDelay                        time.Duration
}

// Seeded decides by r alone. Each call draws the same number of values, so a
// change of one rate leaves the other draws in place.
func Seeded(r env.Rand, rates Rates) func(Op) Fault {
	return func(Op) Fault {
		roll, before, after := int(r.Uint64()%100), r.Uint64(), r.Uint64()
		var f Fault
		if rates.MaxDelay > 0 {
			f.Before = time.Duration(before % uint64(rates.MaxDelay))
			f.After = time.Duration(after % uint64(rates.MaxDelay))
		}
		limit := 0
		for i, percent := range []int{rates.Refused, rates.Lost, rates.AnswerLost, rates.Late} {
			if limit += percent; roll < limit {
				f.Outcome = []Outcome{Refused, Lost, AnswerLost, Late}[i]
				break
			}
		}
		return f
	}
}

// call runs do under the fault decided for it.
func (s *Faulty) call(ctx context.Context, kind Kind, key string, do func(context.Context) error) error {
	s.mu.Lock()
	s.n++
	op := Op{N: s.n, Kind: kind, Key: key}
	f := s.decide(op)
	s.mu.Unlock()
	if err := s.sleep(ctx, f.Before); err != nil {
		return fmt.Errorf("blob: %s %s: %w", kind, key, err) // before the call: nothing was done
	}
	write := kind == KindPut || kind == KindDelete
	var err error
	switch {
	case f.Outcome == Refused, !write && f.Outcome != Passed:
		err = fmt.Errorf("%w: %s %s: injected (call %d)", ErrUnavailable, kind, key, op.N)
	case f.Outcome == Passed:
		err = do(ctx)
	case f.Outcome == AnswerLost:
		_ = do(ctx) // the caller never hears of it
		err = s.ambiguous(op)
	case f.Outcome == Late && s.hooks.Later != nil:
		detached := context.WithoutCancel(ctx)
		s.hooks.Later(func() { _ = do(detached) })
		err = s.ambiguous(op)
	default:
		err = s.ambiguous(op)
	}
	if serr := s.sleep(ctx, f.After); serr != nil {
		if write {
			return fmt.Errorf("%w: %s %s: %w", ErrAmbiguous, kind, key, serr)
		}
		return fmt.Errorf("blob: %s %s: %w", kind, key, serr)
	}
	return err
}

func (s *Faulty) ambiguous(op Op) error {
	return fmt.Errorf("%w: %s %s: injected (call %d)", ErrAmbiguous, op.Kind, op.Key, op.N)
}

func (s *Faulty) sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 || s.hooks.Sleep == nil {
		return nil
	}
	return s.hooks.Sleep(ctx, d)
}

// Get implements Store.
func (s *Faulty) Get(ctx context.Context, key string) (obj Object, err error) {
	err = s.call(ctx, KindGet, key, func(ctx context.Context) (err error) {
		obj, err = s.inner.Get(ctx, key)
		return err
	})
	if err != nil {
		return Object{}, err
	}
	return obj, nil
}

// Put implements Store. A late write uses a copy of data.
func (s *Faulty) Put(ctx context.Context, key string, data []byte, opts PutOptions) (Token, error) {
	if err := CheckPut(key, data, opts); err != nil {
		return "", err
	}
	data = append([]byte(nil), data...)
	var mu sync.Mutex // a late write may run beside this call's return
	var token Token
	err := s.call(ctx, KindPut, key, func(ctx context.Context) error {
		t, err := s.inner.Put(ctx, key, data, opts)
		mu.Lock()
		defer mu.Unlock()
		token = t
		return err
	})
	if err != nil {
		return "", err
	}
	mu.Lock()
	defer mu.Unlock()
	return token, nil
}

// List implements Store.
func (s *Faulty) List(ctx context.Context, prefix, after string, limit int) (infos []Info, err error) {
	err = s.call(ctx, KindList, prefix, func(ctx context.Context) (err error) {
		infos, err = s.inner.List(ctx, prefix, after, limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	return infos, nil
}

// Delete implements Store.
func (s *Faulty) Delete(ctx context.Context, key string, opts DeleteOptions) error {
	return s.call(ctx, KindDelete, key, func(ctx context.Context) error {
		return s.inner.Delete(ctx, key, opts)
	})
}
