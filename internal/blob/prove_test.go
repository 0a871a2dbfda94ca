package blob_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
)

func prove(ctx context.Context, s blob.Store) error {
	r := splitmix(1)
	return blob.Prove(ctx, s, blob.Proof{Name: "s3://bucket/one", Prefix: "proof", Clock: env.SystemClock{}, Rand: &locked{r: &r}})
}

type locked struct {
	mu sync.Mutex
	r  env.Rand
}

func (l *locked) Uint64() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Uint64()
}

// liar breaks what its fields say of a good store.
type liar struct {
	blob.Store
	put    func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error)
	get    func(ctx context.Context, key string) (blob.Object, error)
	list   func() ([]blob.Info, error)
	delete func() error
}

func (l *liar) Put(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
	if l.put != nil {
		return l.put(ctx, key, data, opts)
	}
	return l.Store.Put(ctx, key, data, opts)
}

func (l *liar) Get(ctx context.Context, key string) (blob.Object, error) {
	if l.get != nil {
		return l.get(ctx, key)
	}
	return l.Store.Get(ctx, key)
}

func (l *liar) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if l.list != nil {
		return l.list()
	}
	return l.Store.List(ctx, prefix, after, limit)
}

func (l *liar) Delete(ctx context.Context, key string, opts blob.DeleteOptions) error {
	if l.delete != nil {
		return l.delete()
	}
	return l.Store.Delete(ctx, key, opts)
}

func TestProveRefusesWhatBreaksAPromise(t *testing.T) {
	for _, c := range []struct {
		name string
		lie  func(good blob.Store, l *liar)
		want string // in the error
	}{
		{"ignores If-None-Match", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				opts.IfNoneMatch = false
				return good.Put(ctx, key, data, opts)
			}
		}, "a second put with If-None-Match replaced"},
		{"ignores If-Match", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				opts.IfMatch = ""
				return good.Put(ctx, key, data, opts)
			}
		}, "If-Match of another object's ETag replaced"},
		{"swaps what is not there", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				if _, err := good.Get(ctx, key); errors.Is(err, blob.ErrNotFound) {
					opts = blob.PutOptions{}
				}
				return good.Put(ctx, key, data, opts)
			}
		}, "which did not exist"},
		{"refuses the right token", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				if opts.IfMatch != "" {
					return "", blob.ErrPrecondition
				}
				return good.Put(ctx, key, data, opts)
			}
		}, "If-Match of the right ETag was refused"},
		{"lets several win a race", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				if strings.HasSuffix(key, "/race") { // looks first and writes later
					if _, err := good.Get(ctx, key); opts.IfNoneMatch && err == nil {
						return "", blob.ErrPrecondition
					}
					_ = blob.SleepBy(env.SystemClock{})(ctx, time.Millisecond)
					opts = blob.PutOptions{}
				}
				return good.Put(ctx, key, data, opts)
			}
		}, "won instead of one"},
		{"lets nobody win a race", func(good blob.Store, l *liar) {
			l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
				if strings.HasSuffix(key, "/race") {
					return "", blob.ErrPrecondition
				}
				return good.Put(ctx, key, data, opts)
			}
		}, "0 won instead of one"},
		{"reads what was", func(_ blob.Store, l *liar) {
			l.get = func(context.Context, string) (blob.Object, error) {
				return blob.Object{Data: []byte("old"), Token: "t"}, nil
			}
		}, "not the last accepted write"},
		{"loses what was written", func(_ blob.Store, l *liar) {
			l.get = func(context.Context, string) (blob.Object, error) { return blob.Object{}, blob.ErrNotFound }
		}, "missing right after it was written"},
		{"lists late", func(_ blob.Store, l *liar) {
			l.list = func() ([]blob.Info, error) { return nil, nil }
		}, "right after"},
		{"deletes nothing", func(_ blob.Store, l *liar) {
			l.delete = func() error { return nil }
		}, "still there after it was deleted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				good := mem.New(mem.Options{})
				l := &liar{Store: good}
				c.lie(good, l)
				err := prove(t.Context(), l)
				if !errors.Is(err, blob.ErrUnfit) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "s3://bucket/one") {
					t.Errorf("%v, want %q", err, c.want)
				}
				if c.name == "deletes nothing" {
					return
				}
				if left, err := good.List(t.Context(), "", "", 10); err != nil || len(left) != 0 {
					t.Errorf("left behind: %v %v", left, err)
				}
			})
		})
	}
}

func TestProveRefusesForGood(t *testing.T) {
	l := &liar{Store: mem.New(mem.Options{}), put: func(context.Context, string, []byte, blob.PutOptions) (blob.Token, error) {
		return "", blob.ErrDenied
	}}
	if err := prove(t.Context(), l); !errors.Is(err, blob.ErrDenied) || errors.Is(err, blob.ErrUnfit) {
		t.Error(err)
	}
	l = &liar{Store: mem.New(mem.Options{}), delete: func() error { return blob.ErrDenied }}
	if err := prove(t.Context(), l); !errors.Is(err, blob.ErrDenied) {
		t.Errorf("without the right to delete: %v", err)
	}
}

// TestProveEndsInTime: with a store that never answers, one that is down, one
// whose races never end, and a caller that goes.
func TestProveEndsInTime(t *testing.T) {
	hangs := func(ctx context.Context, _ string, _ []byte, _ blob.PutOptions) (blob.Token, error) {
		<-ctx.Done()
		return "", errors.Join(blob.ErrAmbiguous, ctx.Err())
	}
	down := func(context.Context, string, []byte, blob.PutOptions) (blob.Token, error) {
		return "", blob.ErrUnavailable
	}
	for _, c := range []struct {
		name  string
		put   func(context.Context, string, []byte, blob.PutOptions) (blob.Token, error)
		races bool // only races fail
		want  error
	}{
		{"never answers", hangs, false, blob.ErrUnavailable},
		{"is down", down, false, blob.ErrUnavailable},
		{"races never end", hangs, true, blob.ErrUnfit},
	} {
		synctest.Test(t, func(t *testing.T) {
			clock, good := env.SystemClock{}, mem.New(mem.Options{})
			l := &liar{Store: good, put: c.put}
			if c.races {
				l.put = func(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
					if strings.HasSuffix(key, "/race") {
						return c.put(ctx, key, data, opts)
					}
					return good.Put(ctx, key, data, opts)
				}
			}
			began := clock.Now()
			err := prove(t.Context(), l)
			if !errors.Is(err, c.want) || clock.Now().Sub(began) > 13*time.Second {
				t.Errorf("%s: %v after %v", c.name, err, clock.Now().Sub(began))
			}
			ctx, cancel := context.WithCancel(t.Context())
			clock.AfterFunc(time.Second, cancel)
			if err := prove(ctx, l); !errors.Is(err, context.Canceled) {
				t.Errorf("%s, the caller goes: %v", c.name, err)
			}
		})
	}
}

// TestProveBearsFaults: open outcomes and refusals are no reason to refuse a
// good store.
func TestProveBearsFaults(t *testing.T) {
	for seed := range 50 {
		synctest.Test(t, func(t *testing.T) {
			r := splitmix(seed)
			inner := mem.New(mem.Options{})
			s := blob.NewFaulty(inner, blob.Seeded(&r, blob.Rates{Refused: 10, Lost: 10, AnswerLost: 10, MaxDelay: 10 * time.Millisecond}),
				blob.FaultHooks{Sleep: blob.SleepBy(env.SystemClock{})})
			if err := prove(t.Context(), s); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
			if left, _ := inner.List(t.Context(), "", "", 10); len(left) != 0 {
				t.Errorf("seed %d left %v", seed, left)
			}
		})
	}
}
