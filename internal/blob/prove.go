package blob

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// DefaultProofLimit is how long Prove takes at most, but for its cleaning up.
const DefaultProofLimit = 10 * time.Second

const (
	proofWriters    = 16                     // race for one object
	proofBackoff    = 20 * time.Millisecond  // before a second try, doubled for each further one
	proofMaxBackoff = 500 * time.Millisecond // at most
	proofCleanLimit = 2 * time.Second
)

// Proof says what Prove works with.
type Proof struct {
	Name   string        // of the store, for errors: an address without secrets
	Prefix string        // the proof's objects are put below it: "proof" gives proof/<random>/…
	Limit  time.Duration // 0 is DefaultProofLimit
	Clock  env.Clock
	Rand   env.Rand
}

// Prove holds store to the promises that ownership is built on: conditions of
// Put, one winner of each race, Get, List and Delete that see what was written.
// It puts a few objects of its own below Proof.Prefix and deletes them. Any
// number of nodes may prove one store at the same time.
//
// The error matches ErrUnfit when the store broke a promise, or when single
// writes worked but a race did not end in time; ErrDenied when it refused a
// request for good; ErrUnavailable when it did not answer in time, so that
// nothing is known; or it is the context's.
func Prove(ctx context.Context, store Store, proof Proof) error {
	if proof.Limit <= 0 {
		proof.Limit = DefaultProofLimit
	}
	nonce := fmt.Sprintf("%016x", proof.Rand.Uint64())
	p := &prover{Proof: proof, store: store, nonce: nonce, dir: proof.Prefix + "/" + nonce, sleep: SleepBy(proof.Clock)}
	limited, stop := within(ctx, proof.Clock, proof.Limit)
	err := p.run(limited)
	stop()
	clean, stop := within(context.WithoutCancel(ctx), proof.Clock, proofCleanLimit)
	defer stop()
	if cleanErr := p.clean(clean); err == nil {
		err = cleanErr
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("store %s failed the proof of conditional writes: %w", proof.Name, err)
}

// within ends the context after d on clock; its cause is then errProofLimit.
func within(ctx context.Context, clock env.Clock, d time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := clock.AfterFunc(d, func() { cancel(errProofLimit) })
	return ctx, func() { timer.Stop(); cancel(nil) }
}

var errProofLimit = errors.New("no end in time")

type prover struct {
	Proof
	store Store
	nonce string
	dir   string // of the objects of this proof
	sleep func(context.Context, time.Duration) error

	single bool // single conditional writes have been proved
}

// The names of the proof's objects, in the order of a List.
const (
	proofOther = "other"
	proofRace  = "race"
	proofSolo  = "solo"
)

func (p *prover) key(name string) string { return p.dir + "/" + name }

// content is unlike that of any other writer, so that a writer knows its own.
func (p *prover) content(writer string) []byte { return []byte(p.nonce + " " + writer) }

func (p *prover) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{p.create, p.swap, p.raceCreate, p.raceSwap, p.list} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// broken is a promise that the store did not keep.
func broken(format string, args ...any) error {
	return fmt.Errorf("%w: %s; Perdure needs a store with exact conditional writes (If-None-Match and If-Match), such as Amazon S3", ErrUnfit, fmt.Sprintf(format, args...))
}

// create: If-None-Match holds on a key without object, and only there.
func (p *prover) create(ctx context.Context) error {
	key := p.key(proofSolo)
	if _, err := p.put(ctx, key, p.content("first"), PutOptions{IfNoneMatch: true}); err != nil {
		return p.refused(err, "a put with If-None-Match of the new key %s was refused", key)
	}
	if _, err := p.put(ctx, key, p.content("second"), PutOptions{IfNoneMatch: true}); !errors.Is(err, ErrPrecondition) {
		return p.accepted(err, "a second put with If-None-Match replaced the object %s", key)
	}
	return p.holds(ctx, key, "first")
}

// swap: If-Match holds with the object's token, and with no other.
func (p *prover) swap(ctx context.Context) error {
	key := p.key(proofSolo)
	other, err := p.put(ctx, p.key(proofOther), p.content("other"), PutOptions{IfNoneMatch: true})
	if err != nil {
		return p.refused(err, "a put with If-None-Match of the new key %s was refused", p.key(proofOther))
	}
	old, err := p.get(ctx, key)
	if err != nil {
		return err
	}
	if _, err := p.put(ctx, key, p.content("wrong"), PutOptions{IfMatch: other}); !errors.Is(err, ErrPrecondition) {
		return p.accepted(err, "a put with If-Match of another object's ETag replaced the object %s", key)
	}
	if _, err := p.put(ctx, key, p.content("third"), PutOptions{IfMatch: old.Token}); err != nil {
		return p.refused(err, "a put with If-Match of the right ETag was refused for %s", key)
	}
	if _, err := p.put(ctx, key, p.content("late"), PutOptions{IfMatch: old.Token}); !errors.Is(err, ErrPrecondition) {
		return p.accepted(err, "a put with If-Match of a former ETag replaced the object %s", key)
	}
	missing := p.key("none")
	if _, err := p.put(ctx, missing, p.content("lost"), PutOptions{IfMatch: old.Token}); !errors.Is(err, ErrPrecondition) {
		return p.accepted(err, "a put with If-Match made the object %s, which did not exist", missing)
	}
	p.single = true
	return p.holds(ctx, key, "third")
}

func (p *prover) raceCreate(ctx context.Context) error {
	return p.race(ctx, "create", "If-None-Match", PutOptions{IfNoneMatch: true})
}

func (p *prover) raceSwap(ctx context.Context) error {
	o, err := p.get(ctx, p.key(proofRace))
	if err != nil {
		return err
	}
	return p.race(ctx, "swap", "If-Match", PutOptions{IfMatch: o.Token})
}

// race lets all writers put under one condition at once: exactly one may win,
// and its content must be the object's.
func (p *prover) race(ctx context.Context, name, condition string, opts PutOptions) error {
	key := p.key(proofRace)
	errs := make([]error, proofWriters)
	writer := func(i int) string { return fmt.Sprintf("%s %d", name, i) }
	begin := make(chan struct{})
	var writers sync.WaitGroup
	for i := range errs {
		writers.Go(func() {
			<-begin
			_, errs[i] = p.put(ctx, key, p.content(writer(i)), opts)
		})
	}
	close(begin)
	writers.Wait()
	winner, winners := 0, 0
	for i, err := range errs {
		switch {
		case err == nil:
			winner, winners = i, winners+1
		case !errors.Is(err, ErrPrecondition):
			return err
		}
	}
	if winners != 1 {
		return broken("of %d writers racing with %s for %s, %d won instead of one", proofWriters, condition, key, winners)
	}
	return p.holds(ctx, key, writer(winner))
}

// list: List sees what was written, whole and in order.
func (p *prover) list(ctx context.Context) error {
	var infos []Info
	err := p.again(ctx, "list "+p.dir, func() (err error) {
		infos, err = p.store.List(ctx, p.dir+"/", "", MaxList)
		return err
	})
	if err != nil {
		return err
	}
	got := make([]string, len(infos))
	for i, info := range infos {
		got[i] = strings.TrimPrefix(info.Key, p.dir+"/")
	}
	if want := []string{proofOther, proofRace, proofSolo}; !slices.Equal(got, want) {
		return broken("a list of %s gives %q right after %q were written", p.dir, got, want)
	}
	return nil
}

// clean removes what the proof has put, and sees that it is gone.
func (p *prover) clean(ctx context.Context) error {
	for _, name := range []string{proofSolo, proofOther, "none", proofRace} {
		key := p.key(name)
		err := p.again(ctx, "delete "+key, func() error { return p.store.Delete(ctx, key, DeleteOptions{}) })
		if err != nil {
			return err
		}
	}
	key := p.key(proofRace)
	err := p.again(ctx, "get "+key, func() error { _, err := p.store.Get(ctx, key); return err })
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return p.accepted(err, "the object %s is still there after it was deleted", key)
}

// holds: the object under key is what writer wrote.
func (p *prover) holds(ctx context.Context, key, writer string) error {
	o, err := p.get(ctx, key)
	if err != nil {
		return err
	}
	if want := p.content(writer); string(o.Data) != string(want) {
		return broken("the object %s is %.60q and not the last accepted write, %q", key, o.Data, want)
	}
	return nil
}

// accepted judges a request that should have been refused.
func (p *prover) accepted(err error, format string, args ...any) error {
	if err == nil {
		return broken(format, args...)
	}
	return err
}

// refused judges a request that should have been accepted.
func (p *prover) refused(err error, format string, args ...any) error {
	if errors.Is(err, ErrPrecondition) {
		return broken(format, args...)
	}
	return err
}

func (p *prover) get(ctx context.Context, key string) (o Object, err error) {
	err = p.again(ctx, "get "+key, func() (err error) {
		o, err = p.store.Get(ctx, key)
		return err
	})
	if errors.Is(err, ErrNotFound) {
		return o, broken("the object %s is missing right after it was written", key)
	}
	return o, err
}

// put writes until the outcome is known: nil when data is the object by this
// call, ErrPrecondition when it was refused. After an answer that left it open,
// a refusal may be the work of its own first try.
func (p *prover) put(ctx context.Context, key string, data []byte, opts PutOptions) (token Token, err error) {
	open := false
	err = p.again(ctx, "put "+key, func() (err error) {
		token, err = p.store.Put(ctx, key, data, opts)
		if errors.Is(err, ErrPrecondition) && open {
			if o, getErr := p.store.Get(ctx, key); getErr == nil && string(o.Data) == string(data) {
				token, err = o.Token, nil
			} else if getErr != nil && !errors.Is(getErr, ErrNotFound) {
				return getErr
			}
		}
		open = open || errors.Is(err, ErrAmbiguous)
		return err
	})
	return token, err
}

// again repeats do while its answer is open or the store unavailable, until the
// context ends.
func (p *prover) again(ctx context.Context, what string, do func() error) error {
	wait := proofBackoff
	for tries := 1; ; tries++ {
		err := do()
		if err == nil || (!errors.Is(err, ErrAmbiguous) && !errors.Is(err, ErrUnavailable) && ctx.Err() == nil) {
			return err
		}
		if ctx.Err() == nil {
			jitter := time.Duration(p.Rand.Uint64() % uint64(wait))
			_ = p.sleep(ctx, wait/2+jitter) // an early end shows in ctx
			wait = min(2*wait, proofMaxBackoff)
		}
		if ctx.Err() != nil {
			return p.ended(ctx, what, tries, err)
		}
	}
}

// ended says why a proof came to no end: last is the last answer.
func (p *prover) ended(ctx context.Context, what string, tries int, last error) error {
	if context.Cause(ctx) != errProofLimit {
		return fmt.Errorf("%s: %w", what, ctx.Err())
	}
	if p.single {
		return broken("single writes worked, but %d writers at once did not end within %v (%s, %d tries, last: %v)", proofWriters, p.Limit, what, tries, last)
	}
	return fmt.Errorf("%w: %s: no answer to build on within %v (%d tries, last: %v)", ErrUnavailable, what, p.Limit, tries, last)
}
