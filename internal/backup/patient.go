package backup

import (
	"context"
	"errors"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	askTries              = 8 // of one request, about 13 s in all
	firstPause, lastPause = 100 * time.Millisecond, 5 * time.Second
)

// patient is a store that is asked again while it is unavailable: a long copy
// should not end for a short trouble.
type patient struct {
	store blob.Store
	clock env.Clock // nil: no pauses
}

func (p patient) again(ctx context.Context, ask func() error) error {
	for pause, try := firstPause, 1; ; pause, try = min(2*pause, lastPause), try+1 {
		err := ask()
		if !errors.Is(err, blob.ErrUnavailable) || try == askTries || !p.wait(ctx, pause) {
			return err
		}
	}
}

// wait reports whether ctx is still on.
func (p patient) wait(ctx context.Context, d time.Duration) bool {
	if p.clock == nil {
		return ctx.Err() == nil
	}
	over := make(chan struct{})
	defer p.clock.AfterFunc(d, func() { close(over) }).Stop()
	select {
	case <-over:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p patient) Get(ctx context.Context, key string) (o blob.Object, err error) {
	err = p.again(ctx, func() error { o, err = p.store.Get(ctx, key); return err })
	return o, err
}

func (p patient) Put(ctx context.Context, key string, data []byte, opts blob.PutOptions) (t blob.Token, err error) {
	err = p.again(ctx, func() error { t, err = p.store.Put(ctx, key, data, opts); return err })
	return t, err
}

func (p patient) List(ctx context.Context, prefix, after string, limit int) (infos []blob.Info, err error) {
	err = p.again(ctx, func() error { infos, err = p.store.List(ctx, prefix, after, limit); return err })
	return infos, err
}

func (p patient) Delete(ctx context.Context, key string, opts blob.DeleteOptions) error {
	return p.again(ctx, func() error { return p.store.Delete(ctx, key, opts) })
}
